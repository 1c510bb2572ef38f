"""What a mode decides: the processes that train together, their replicas, and their servers."""

import copy
from typing import Any, Tuple

from absl import logging

from deepfm.errors import BadInput
from deepfm.modes.common import devices
from deepfm.runtime.interruption import Stop


class Mode:
    """One process with one replica; the class of a mode overrides that in which it differs.

    Attributes:
        name: the mode's name.
        session_config: tf.ConfigProto.
        devices: a device for each replica; (): TensorFlow places the only one.
        stop: whether training in this process is to stop.
        serve: what this process does instead of the job, or None.
        size: number of processes that train together; each has its share of the records.
        rank: rank of this process; 0 is the chief, which writes checkpoints, reports and exports.
        local_size, local_rank: number of processes on this host and the rank of this one among
            them, in modes that start several per host.
        synchronous: whether all take each step together. If not, each process takes steps of its
            own, and the chief evaluates alone while the others go on training.
        replicas_per_process: copies of the model in this process; each takes its part of a batch.
        replicas_in_step: replicas, over all processes, whose batches make up the global batch.
        strategy: tf.distribute.Strategy for Estimator's training, or None.
        stack: (tensor [...], name) -> tensor [replicas_in_step, ...], this tensor of every replica
            in the training step, in the same order on each, without gradient; None if a replica
            steps alone. Every replica must call it exactly once for each name.
        tf_config, device_fn: TF_CONFIG as Estimator reads it; operation -> its device, or None.
        hosts: number of hosts with a process of the job, as far as TF_CONFIG names them.
        partitioner: cuts the model's variables into parts, on parameter servers, or None.
        count_steps: () -> int64 [processes], the steps that each process has taken; weights read
            after it include all of their updates. None if all take each step together.
    """

    name: str = "local"
    serve: Any = None
    size, rank, local_size, local_rank = 1, 0, 1, 0
    synchronous = True
    strategy: Any = None
    stack: Any = None
    tf_config, hosts = "{}", 1
    device_fn = partitioner = count_steps = None
    _gathers = True

    def __init__(self, session_config=None, on=()):
        self.session_config, self.devices, self.stop = session_config, on, Stop()
        self.replicas_per_process = self.replicas_in_step = max(len(on), 1)

    @classmethod
    def make(cls, flags) -> "Mode":
        """The mode in this process, as ModeFlags and the environment ask for it."""
        return cls(devices.session_config(flags))

    @property
    def chief(self):
        """Whether this process is the chief."""
        return self.rank == 0

    @property
    def in_step(self):
        """Whether several processes take each step together."""
        return self.synchronous and self.size > 1

    @property
    def evaluates(self):
        """Whether this process takes part in evaluations: all if synchronous, else the chief."""
        return self.synchronous or self.chief

    @property
    def evaluate_on(self):
        """The devices that share each batch of evaluation: GPUs; one replica uses all cores."""
        return self.devices if devices.gpus() else ()

    def alone(self) -> "Mode":
        """The same, for an evaluation of all records by this process: `gather` asks no other."""
        mode = copy.copy(self)
        mode._gathers = False
        return mode

    def exchange(self, value):
        """The values of all processes, by rank. All must call it, with what JSON can hold."""
        return [value]

    def agree(self, value):
        """The chief's value, in all processes; called likewise."""
        return self.exchange(value if self.chief else None)[0]

    def total(self, value):
        """The sum of a number over all processes; called likewise."""
        return sum(self.exchange(value))

    def finish(self):
        """Called when the job is done; returns when this process may end."""

    def average(self, tensor, name):
        """The mean of a tensor over the processes that take each step together."""
        return tensor

    def gather(self, tensor, name):
        """Tensors [n, ...] of the same processes, concatenated: [sum of n, ...]."""
        return tensor

    def wrap_model_fn(self, model_fn, max_steps=0):
        """The model_fn to train with, up to --max_steps."""
        return model_fn

    def wrap_optimizer(self, optimizer):
        """The optimizer to train with."""
        return optimizer

    def owns_variables(self):
        """Whether the replica being built creates variables of its own, rather than sharing those
        of a replica built before it."""
        return True

    def session_hooks(self):
        """Hooks for each session: training, evaluation and inference."""
        return []

    def make_hooks(self, save_in_time):
        """More hooks of training, which run before the one that saves checkpoints; that is what
        `save_in_time(session)` does if it is time for one."""
        return []

    def steps_taken(self, of_processes):
        """The steps of this process, from those of each, by rank; all processes must call it."""
        return of_processes[0]

    def all_run(self, make):
        """Whether every parameter server has the operator that makes the tensor of `make()`."""
        return False

    def saves_in_parts(self, model_dir):
        """Whether the holders of a variable's parts write them to model_dir."""
        return True

    def anyone_stops(self):
        """Whether any process wants to stop, after each step. Processes that take each step
        together learn it from `average` instead."""
        return self.stop.wanted

    def check_alone(self, task_type: str):
        """Refuses (BadInput) a mode other than that of one process with one replica."""
        if self.name != Mode.name:
            raise BadInput(
                f"--task_type={task_type} runs in one process, with one replica; give "
                f"--distribution={Mode.name} instead of {self.name}."
            )

    def warn_of_flags(self, given: Tuple[str, ...], replicas_per_process: int):
        """Warns of flags, `given` by the user, that have no effect in this mode."""
        if replicas_per_process and replicas_per_process != self.replicas_per_process:
            logging.warning(
                "--replicas_per_process=%d has no effect with --distribution=%s; try tower or "
                "mirrored.",
                replicas_per_process, self.name,
            )  # fmt: skip
        if "cross_device_ops" in given and not self.strategy:
            logging.warning("--cross_device_ops has no effect without --distribution=mirrored.")
        if "ps_hosts" in given and not self.partitioner:
            logging.warning("--ps_hosts has no effect without --distribution=ps.")
