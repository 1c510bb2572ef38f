"""MirroredStrategy: one process, a copy of the variables on each device."""

from absl import logging

from deepfm.config.modes import CROSS_DEVICE_OPS
from deepfm.errors import BadInput
from deepfm.modes.common import devices
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf
from deepfm.runtime.utilization import why_no_gpus

v1 = tf.compat.v1


class OneIterator:
    """Has the replicas of a strategy share each batch of one iterator on the CPU, as towers do.

    TensorFlow's own, over several devices, now and then hangs when the data end or the first batch
    is damaged.
    """

    def make_input_fn_iterator(self, input_fn, replication_mode=None):
        with tf.device("/cpu:0"):
            dataset = input_fn(tf.distribute.InputContext())
            iterator = v1.data.make_initializable_iterator(dataset)
        iterator.initialize = lambda: iterator.initializer  # as Estimator asks one of a strategy
        return iterator


class _Strategy(OneIterator, tf.distribute.MirroredStrategy):
    pass


class Mirrored(Mode):
    """One process, MirroredStrategy: a copy of the variables on each device."""

    name = "mirrored"

    def __init__(self, session_config, on, strategy):
        super().__init__(session_config, on)
        self.strategy = strategy

    @classmethod
    def make(cls, flags):
        if flags.cross_device_ops == "nccl" and not devices.gpus():
            raise BadInput(
                "--cross_device_ops=nccl needs GPUs, but TensorFlow finds none: "
                f"{why_no_gpus()}; try --cross_device_ops=reduction_to_one_device."
            )
        on = devices.of_replicas(flags)
        how = flags.cross_device_ops or ("nccl" if devices.gpus() else "reduction_to_one_device")
        reduction = getattr(tf.distribute, CROSS_DEVICE_OPS[how])()
        logging.info("MirroredStrategy adds up gradients by %s.", how)
        config = devices.session_config(flags, on)  # before the strategy looks for devices
        return cls(config, on, _Strategy(on, reduction))

    def wrap_model_fn(self, model_fn, max_steps=0):
        """The model_fn of a replica, which takes its part of the batch."""

        def of_replica(features, labels, mode):
            parts = devices.split_batch(features, labels, len(self.devices))
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return model_fn(*parts[int(tf.get_static_value(replica))], mode)

        return of_replica

    def stack(self, tensor, name):
        def together(strategy, values):
            with tf.device("/cpu:0"):
                return tf.stack(strategy.experimental_local_results(values))

        return tf.distribute.get_replica_context().merge_call(together, args=(tensor,))
