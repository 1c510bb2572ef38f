"""When a session has come to its end: with the last record or step, and with nothing else.

TensorFlow says OutOfRangeError where there is no further record, where a counter has reached its
limit (parameter servers count steps so, for --max_steps), and also where a file may not grow any
more (the system's EFBIG: a limit on the size of files, or the file system's own). A
MonitoredSession takes any of them for the end of the data: training would end well after a
checkpoint that could not be saved.
"""

import contextlib
import re

import tensorflow as tf

v1 = tf.compat.v1

# What the ops that get the next element, and those that count up, say after the last one. Servers
# put in front of it who says it, and TensorFlow numbers several errors. The op does not tell: what
# writes a cache file writes it when it is asked for the next element.
_END = re.compile(r"(^|: )(End of sequence|Reached limit of \d+)$", re.MULTILINE)


def is_end(error: BaseException) -> bool:
    """Whether an error of Session.run says that there is no further record or step."""
    return isinstance(error, tf.errors.OutOfRangeError) and bool(_END.search(error.message))


@contextlib.contextmanager
def ended_by_input_alone():
    """In this block a MonitoredSession passes on every error but those of its end."""
    leave = v1.train.MonitoredSession.__exit__

    def leave_or_fail(self, kind, error, trace):
        if isinstance(error, tf.errors.OutOfRangeError) and not is_end(error):
            kind = tf.errors.UnknownError  # any but the one that is swallowed
        return leave(self, kind, error, trace)

    v1.train.MonitoredSession.__exit__ = leave_or_fail
    try:
        yield
    finally:
        v1.train.MonitoredSession.__exit__ = leave
