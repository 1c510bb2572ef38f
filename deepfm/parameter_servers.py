"""Asynchronous training with parameter servers: how its processes start, agree and end together.

Every process has a TensorFlow server. The chief and the workers train, each on its share of the
records, at their own pace; the variables lie on the parameter servers. What TensorFlow leaves open
is when each may end. Here all live until the chief has finished the job: it waits for the workers'
last steps before its last checkpoint, and releases them and the servers when its work is done.
Before that, a process that is lost ends them all (watch.Watch).

What the processes tell each other are numbers on a board: variables on server 0, outside of the
model's graph, which one posts and the others wait for.
"""

import contextlib
import os
import time
import uuid
from typing import Callable

import tensorflow as tf
from absl import logging

from deepfm import cluster as clusters
from deepfm import interruption
from deepfm.cluster import Cluster
from deepfm.entry import BadInput
from deepfm.hooks import EXAMPLES
from deepfm.watch import Watch

v1 = tf.compat.v1

_POLL = 0.1  # seconds between two looks at the board
_BETWEEN_LOOKS = 1.0  # seconds between two looks for a process that is to stop
_RELEASED = "released"  # on the board when the chief ends, and so may all
_FAREWELL = 10  # seconds that the chief waits at most for the workers to say that they are leaving


def _on_board(name):
    """The name of a number's variable."""
    return f"deepfm_board/{name}"


def _steps_of(rank):
    """The name of the number of a process's steps."""
    return f"steps/{rank}"


class _Board:
    """Numbers that processes post under a name, once each, on a parameter server."""

    def __init__(self, server: tf.distribute.Server, filters):
        self._graph = tf.Graph()
        config = v1.ConfigProto(device_filters=filters)
        self._session = v1.Session(server.target, self._graph, config)
        self._ops = {}

    def post(self, name: str, number: float = 0.0):
        post, value, _, _ = self._of(name, 0)
        self._run(post, {value: number})

    def post_last(self, name: str, server: int = 0):
        """Posts what may be the last thing that a server hears; it may be gone already."""
        post, value, _, _ = self._of(name, server)
        with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
            self._session.run(post, {value: 0.0})

    def posted(self, name: str, server: int = 0) -> bool:
        return self._run(self._of(name, server)[2])

    def read(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> float:
        """The number, when it is there; until then calls `meanwhile` again and again.

        Raises:
            interruption.Interrupted: a signal has ended the chief, which will not post it any more.
        """
        while not self.posted(name):
            if name != _RELEASED and self.posted(_RELEASED):
                raise interruption.Interrupted(together=True)
            meanwhile()
            time.sleep(_POLL)
        return self._run(self._of(name, 0)[3])

    def reads_file(self, path: str, server: int) -> bool:
        """Whether a server can read a file."""
        with self._graph.as_default(), tf.device(f"/job:ps/task:{server}"):
            content = tf.io.read_file(path)
        try:
            self._session.run(content)
        except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
            return False
        return True

    def _of(self, name, server):
        """Ops of a number: (post, its placeholder, is it posted, read)."""
        if (name, server) not in self._ops:
            with self._graph.as_default(), tf.device(f"/job:ps/task:{server}"):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.float64, shape=[], shared_name=_on_board(name)
                )
                value = v1.placeholder(tf.float64, [])
                self._ops[name, server] = (
                    tf.raw_ops.AssignVariableOp(resource=handle, value=value),
                    value,
                    tf.raw_ops.VarIsInitializedOp(resource=handle),
                    tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64),
                )
        return self._ops[name, server]

    def _run(self, fetch, feed=None):
        while True:
            try:
                return self._session.run(fetch, feed)
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                time.sleep(1)  # the network may come back; if the server is lost, the Watch ends us


def _start_server(cluster: Cluster, config) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            v1.train.ClusterSpec(cluster.jobs), cluster.job, cluster.index, config=config
        )
    except tf.errors.UnknownError as error:
        address = cluster.jobs[cluster.job][cluster.index]
        raise BadInput(
            f"TF_CONFIG: {cluster.job} {cluster.index} cannot listen on port "
            f"{address.rpartition(':')[2]} of {address}; another program may use it."
        ) from error


def serve(cluster: Cluster, config):
    """What a parameter server does: holds variables until the chief has finished the job."""
    server = _start_server(cluster, config)
    watch = Watch(cluster.watched())
    board = _Board(server, [f"/job:ps/task:{cluster.index}"])
    logging.info("Parameter server %d serves.", cluster.index)
    stops = False
    with interruption.taking_steps():  # of the others: this one ends when the chief has saved
        while not board.posted("closed", cluster.index):
            if interruption.requested() and not stops:
                interruption.heard()
                _Board(server, ["/job:ps"]).post("stop")
                stops = True
            time.sleep(_POLL)
    watch.stop()
    time.sleep(0.5)  # the chief's post is answered by then
    if stops:
        raise interruption.Interrupted()
    logging.info("Parameter server %d ends: the job is done.", cluster.index)


class Member:
    """A process that trains: the chief or a worker.

    Args:
        cluster: Cluster.
        config: tf.ConfigProto of its server.
    """

    def __init__(self, cluster: Cluster, config):
        self.cluster = cluster
        self._server = _start_server(cluster, config)
        self._watch = Watch(cluster.watched())
        clusters.wait_for_servers(cluster)
        me = f"/job:{cluster.job}/task:{cluster.index}"
        self.device_filters = ["/job:ps", me]
        self.device_fn = v1.train.replica_device_setter(
            cluster.num_servers, worker_device=me, cluster=v1.train.ClusterSpec(cluster.jobs)
        )
        self._board = _Board(self._server, self.device_filters)
        self._rounds = 0
        self._stops, self._looked = False, 0.0

    def agree(self, number):
        """The chief's number, in all processes."""
        name = self._next_round()
        if self.cluster.rank == 0:
            self._board.post(name, number)
        return type(number)(self._board.read(name))

    def exchange(self, number):
        """All processes' numbers, by rank."""
        name = self._next_round()
        self._board.post(f"{name}/{self.cluster.rank}", number)
        ranks = range(self.cluster.num_processes)
        read = lambda rank: self._board.read(f"{name}/{rank}", self._hear)
        return [type(number)(read(rank)) for rank in ranks]

    def steps_taken(self, of_processes):
        """The steps that this process has taken, of those that the chief knows; a worker that is
        started again has taken more."""
        if self.cluster.rank == 0:
            for rank, steps in enumerate(of_processes):
                self._board.post(_steps_of(rank), steps)
        return int(self._board.read(_steps_of(self.cluster.rank)))

    def steps_now(self):
        """The steps of each process so far."""
        ranks = range(self.cluster.num_processes)
        return [int(self._board.read(_steps_of(rank))) for rank in ranks]

    def anyone_stops(self, wanted):
        """Whether any process is to stop; looks once a second."""
        if wanted and not self._stops:
            self._board.post("stop")
            self._stops = True
        if not self._stops and time.time() - self._looked > _BETWEEN_LOOKS:
            self._looked = time.time()
            self._stops = self._board.posted("stop")
        return self._stops

    def _hear(self):
        """While this process waits for others: hands a signal on to them."""
        if self.anyone_stops(interruption.requested()):
            interruption.heard()

    def _next_round(self):
        self._rounds += 1
        return f"round_{self._rounds}"

    def make_hooks(self, model_dir: str, keep_checkpoint_max: int, save_in_time: Callable):
        """The hooks of training; they come before the one that saves checkpoints.

        Args:
            model_dir, keep_checkpoint_max: of the job.
            save_in_time: (session) -> None, saves a checkpoint if it is time for one.
        """
        count = _CountSteps(_steps_of(self.cluster.rank))
        if self.cluster.rank == 0:

            def meanwhile(session):
                self._hear()
                save_in_time(session)

            chief = _Chief(self.cluster, self._board, model_dir, keep_checkpoint_max, meanwhile)
            return [chief, count]
        return [_Worker(self.cluster, self._board, self._hear), count]

    def finish(self):
        """Ends the job in all processes, when the chief comes here."""
        workers = [f"left/{rank}" for rank in range(1, self.cluster.num_processes)]
        if self.cluster.rank > 0:
            self._board.read(_RELEASED)
            self._watch.stop()
            self._board.post_last(workers[self.cluster.rank - 1])
            return
        self._watch.stop()
        self._board.post(_RELEASED)
        last = time.time() + _FAREWELL
        while time.time() < last and not all(map(self._board.posted, workers)):
            time.sleep(_POLL)
        for server in range(self.cluster.num_servers):
            self._board.post_last("closed", server)


class _CountSteps(v1.train.SessionRunHook):
    """Counts this process's steps on the board, where they outlive it."""

    def __init__(self, name):
        self._name = name
        self._in_session = False

    def begin(self):
        # Not when there was no batch any more.
        batch = v1.get_collection(EXAMPLES)
        with tf.device("/job:ps/task:0"), tf.control_dependencies(batch):
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.float64, shape=[], shared_name=_on_board(self._name)
            )
            self._count = tf.raw_ops.AssignAddVariableOp(
                resource=handle, value=tf.constant(1.0, tf.float64)
            )

    def after_create_session(self, session, coord):
        if self._in_session:  # a new one would begin with the first record of the share again
            raise OSError(
                "the session on the parameter servers was lost, so this process ends; the same "
                "command again goes on."
            )
        self._in_session = True

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._count)


class _Worker(v1.train.SessionRunHook):
    """Starts when the chief has made the variables; tells it of the last step."""

    def __init__(self, cluster, board, meanwhile):
        self._cluster, self._board = cluster, board
        self._meanwhile = meanwhile  # () -> None, called while it waits for the chief

    def begin(self):
        # Estimator's own waiting looks every 30 s.
        self._board.read("started", self._meanwhile)

    def end(self, session):
        self._board.post(f"joined/{self._cluster.rank}")


class _Chief(v1.train.SessionRunHook):
    """Decides who writes checkpoints and reports what lies where; waits for the workers' last
    steps, so that the last checkpoint has them."""

    def __init__(self, cluster, board, model_dir, keep_checkpoint_max, meanwhile):
        self._cluster, self._board, self._model_dir = cluster, board, model_dir
        self._keep_checkpoint_max = keep_checkpoint_max
        self._meanwhile = meanwhile  # (session) -> None, called while it waits for the workers

    def begin(self):
        blind = self._server_that_sees_no_file()
        if blind:
            logging.info(
                "%s does not see --model_dir=%s: the chief gathers the variables and writes "
                "checkpoints whole. On a shared disk each server would write its part.",
                blind, self._model_dir,
            )  # fmt: skip
            savers = v1.get_collection_ref(v1.GraphKeys.SAVERS)  # Estimator's, not built yet
            savers[:] = [
                v1.train.Saver(
                    sharded=False,
                    max_to_keep=self._keep_checkpoint_max,
                    defer_build=True,
                    save_relative_paths=True,
                )
            ]
        log_balance(self._cluster.num_servers, v1.global_variables())

    def after_create_session(self, session, coord):
        self._board.post("started")

    def end(self, session):
        for rank in range(1, self._cluster.num_processes):
            self._board.read(f"joined/{rank}", lambda: self._meanwhile(session))

    def _server_that_sees_no_file(self):
        """The name of a server that does not share the disk of model_dir, or None."""
        tf.io.gfile.makedirs(self._model_dir)
        path = os.path.join(self._model_dir, f".shared-{uuid.uuid4().hex}")
        with tf.io.gfile.GFile(path, "w") as f:
            f.write("A parameter server looks for this file.\n")
        try:
            for i, address in enumerate(self._cluster.jobs["ps"]):
                if not self._board.reads_file(path, i):
                    return f"ps {i} ({address})"
        finally:
            tf.io.gfile.remove(path)
        return None


def log_balance(num_servers: int, variables):
    """Logs how many bytes of the variables, the optimizer's among them, each server holds."""
    sizes = [0] * num_servers
    for variable in variables:
        task = tf.DeviceSpec.from_string(variable.device).task
        sizes[task] += variable.shape.num_elements() * variable.dtype.size
    logging.info(
        "Parameter servers hold %s MB; max/min %.2f.",
        ", ".join(f"{size / 1e6:.1f}" for size in sizes),
        max(sizes) / max(min(sizes), 1),
    )
