"""Horovod: one process per GPU or per group of cores.

Every tensor that travels is named after its variable. With Horovod's own DistributedOptimizer about
one two-rank start in five hung in its first step; with these names none did. The cause is unknown.
"""

import os

from deepfm.errors import BadInput
from deepfm.modes.common import devices, peers
from deepfm.modes.common.averaging import Averaged
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise BadInput(
        f"--distribution=horovod: Horovod cannot be loaded ({error}); run scripts/setup.sh, or "
        "choose --distribution=local."
    ) from error


class Horovod(Mode):
    """One process per GPU or per group of cores; gradients are all-reduced, table rows as rows."""

    name = "horovod"

    def __init__(self, session_config):
        super().__init__(session_config)
        self.size = self.replicas_in_step = hvd.size()
        self.rank, self.local_size, self.local_rank = hvd.rank(), hvd.local_size(), hvd.local_rank()
        self._watch = peers.watch_ranks(self.rank, self.exchange) if self.size > 1 else None

    @classmethod
    def make(cls, flags):
        # Open MPI would otherwise busy-wait on a whole core, which the step needs.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        hvd.init()
        rank = hvd.local_rank()
        own = [f"/gpu:{rank}"] if devices.gpus() else []
        config = devices.session_config(flags, own, hvd.local_size(), bool(own) or rank == 0)
        if own:
            config.gpu_options.visible_device_list = str(rank)
        return cls(config)

    def exchange(self, value):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=self.session_config) as session:
            return hvd.allgather_object(value, session=session, name="exchange")

    def finish(self):
        if self._watch:
            self.exchange(0)  # ranks watch each other until here: rank 0 may still fail on its own
            self._watch.stop()

    def stack(self, tensor, name):
        stacked = hvd.allgather(tensor[tf.newaxis], name=name)
        return tf.ensure_shape(stacked, [self.size, *tensor.shape])

    def average(self, tensor, name):
        return hvd.allreduce(tensor, name=name)

    def gather(self, tensor, name):
        return hvd.allgather(tensor, name=name) if self._gathers else tensor

    def wrap_optimizer(self, optimizer):
        add_up = lambda tensor, name: hvd.allreduce(tensor, name=name, op=hvd.Sum)
        return Averaged(optimizer, add_up, self.gather, self.size)

    def session_hooks(self):
        return [hvd.BroadcastGlobalVariablesHook(0)]
