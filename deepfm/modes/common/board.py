"""The board by which processes communicate: variables on server 0, outside the model's graph.

One process posts a value and the others wait for it. Beside the values are counters: of the steps
that each process has taken and, with --max_steps, of the steps that have begun. A checkpoint holds
the former.
"""

import contextlib
import json
import math
import time
from typing import Callable, List

from deepfm.runtime import interruption
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

POLL = 0.1  # seconds between two looks at the board
BOARD = "/job:ps/task:0"
STEPS = "steps"  # counters of the steps that each process has taken
RELEASED = "released"  # posted when the chief ends: now all others may end too


def counter(name, shape=()):
    """An int64 counter on server 0."""
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=shape, shared_name=f"deepfm_count/{name}")


def read_steps(num_processes):
    """int64 [num_processes]: the steps that each process has taken."""
    with tf.device(BOARD):
        steps = counter(STEPS, [num_processes])
        return tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.int64)


class Board:
    """Values that processes post under a name, once each, on a server: anything that JSON holds."""

    def __init__(self, server: tf.distribute.Server, filters):
        self._graph = tf.Graph()
        config = v1.ConfigProto(device_filters=filters)
        self._session = v1.Session(server.target, self._graph, config)
        self._ops = {}
        self.patience = math.inf  # seconds for a server that does not answer

    def post(self, name: str, value=None):
        post, text, _, _ = self._of(name, 0)
        self._run(post, {text: json.dumps(value)})

    def post_last(self, name: str, server: int = 0):
        """Posts what may be the last message to a server, which may be gone already."""
        post, text, _, _ = self._of(name, server)
        with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
            self._session.run(post, {text: json.dumps(None)})

    def posted(self, name: str, server: int = 0) -> bool:
        return self._run(self._of(name, server)[2])

    def read(self, name: str, meanwhile: Callable[[], None] = lambda: None):
        """Waits for a value and returns it; until then, calls `meanwhile` again and again.

        Raises:
            interruption.Interrupted: a signal has ended the chief, so it will never post the value.
        """
        while not self.posted(name):
            # Perhaps the value has come meanwhile, and after it the end of the job.
            if name != RELEASED and self.posted(RELEASED) and not self.posted(name):
                raise interruption.Interrupted(together=True)
            meanwhile()
            time.sleep(POLL)
        return json.loads(self._run(self._of(name, 0)[3]).decode())

    def set_steps(self, of_ranks):
        """Sets the steps that each process has taken."""
        with self._graph.as_default(), tf.device(BOARD):
            steps, taken = counter(STEPS, [len(of_ranks)]), tf.constant(of_ranks, tf.int64)
            self._run(tf.raw_ops.AssignVariableOp(resource=steps, value=taken))

    def steps(self, num_processes: int) -> List[int]:
        """The steps that each process has taken."""
        with self._graph.as_default():
            return self._run(read_steps(num_processes)).tolist()

    def runs(self, make: Callable, server: int) -> bool:
        """Whether a server has the operator of the tensor that make() returns, and can read it."""
        with self._graph.as_default(), tf.device(f"/job:ps/task:{server}"):
            made = make()
        try:
            self._run(made)
        except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
            return False
        return True

    def _of(self, name, server):
        """The ops for a name: (post, its placeholder, is it posted, read)."""
        if (name, server) not in self._ops:
            with self._graph.as_default(), tf.device(f"/job:ps/task:{server}"):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.string, shape=[], shared_name=f"deepfm_board/{name}"
                )
                text = v1.placeholder(tf.string, [])
                self._ops[name, server] = (
                    tf.raw_ops.AssignVariableOp(resource=handle, value=text),
                    text,
                    tf.raw_ops.VarIsInitializedOp(resource=handle),
                    tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string),
                )
        return self._ops[name, server]

    def _run(self, fetch, feed=None):
        began = time.monotonic()
        while True:
            try:
                return self._session.run(fetch, feed)
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                if time.monotonic() - began > self.patience:
                    raise
                time.sleep(1)  # the network may come back; if the server is lost, the Watch ends us
