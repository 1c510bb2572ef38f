"""Hooks that end training after the same step in all processes."""

import tensorflow as tf

from deepfm.errors import BadInput
from deepfm.runtime.interruption import Stop

v1 = tf.compat.v1


# Collection: float32 [2], the records of this step and of the next, averaged over all processes.
ROWS_OF_STEPS = "deepfm_rows_of_steps"


class StopTogether(v1.train.SessionRunHook):
    """Stops training after the same step in all processes, once one of them wants to stop.

    Args:
        mode: the Mode, whose `stop` says whether this process wants to.
    """

    def __init__(self, mode):
        self._mode = mode

    def begin(self):
        # With a constant 0, TensorFlow might compute the mean in advance and never ask the others.
        zero = tf.cast(tf.timestamp() < 0, tf.float32)
        self._mine = v1.placeholder_with_default(zero, [], name="stop")
        self._share = self._mode.average(self._mine, "stop")

    def before_run(self, run_context):
        if self._share is self._mine:
            return None
        wanted = {self._mine: 1.0} if self._mode.stop.wanted else None
        return v1.train.SessionRunArgs(self._share, wanted)

    def after_run(self, run_context, run_values):
        told = run_values.results  # None if the step does not average
        if self._mode.anyone_stops() if told is None else told > 0:
            self._mode.stop.heard()
            run_context.request_stop()


class GiveUp(v1.train.SessionRunHook):
    """Ends an evaluation with interruption.Interrupted when a signal has come, though training
    goes on in other processes meanwhile."""

    def __init__(self, stop: Stop):
        self._stop = stop

    def after_run(self, run_context, run_values):
        self._stop.give_up()


class EndTogether(v1.train.SessionRunHook):
    """Ends training at the same step in all processes, when none has records for the next one."""

    def begin(self):
        (self._rows,) = v1.get_collection(ROWS_OF_STEPS)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._rows)

    def after_run(self, run_context, run_values):
        this, following = run_values.results
        if not this:
            raise BadInput("The training channels have no records on any host.")
        if not following:
            run_context.request_stop()
