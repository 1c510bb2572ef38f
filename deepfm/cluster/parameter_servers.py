"""Asynchronous training with parameter servers: how its processes start, agree and end together.

Every process runs a TensorFlow server. The chief and the workers train, each on its share of the
records and at its own pace; the parameter servers hold the variables. TensorFlow does not define
when each process may end. Here all stay until the chief has finished the job: it waits for the
workers' last steps before its last checkpoint, and releases them and the servers when it is done.
If a process is lost before that, all others end (peers.Watch).

The processes communicate over a board: variables on server 0, outside the model's graph, which one
process posts and the others wait for. Beside it are counters: of the steps that each process has
taken and, with --max_steps, of the steps that have begun. A checkpoint holds the former.
"""

import contextlib
import itertools
import json
import math
import os
import time
import uuid
from typing import Callable, List

import tensorflow as tf
from absl import logging

from deepfm.cluster import tf_config as clusters
from deepfm.cluster.peers import Watch
from deepfm.cluster.tf_config import Cluster
from deepfm.errors import BadInput
from deepfm.runtime import interruption

v1 = tf.compat.v1

_POLL = 0.1  # seconds between two looks at the board
_BETWEEN_LOOKS = 1.0  # seconds between two checks whether a process wants to stop
_BOARD = "/job:ps/task:0"
_CLAIMED = "claimed"  # counter of the steps that have begun
_STEPS = "steps"  # counters of the steps that each process has taken
_RELEASED = "released"  # posted when the chief ends: now all others may end too
_FAREWELL = 10  # seconds at most that the chief waits for the workers to say that they leave


def _counter(name, shape=()):
    """An int64 counter on server 0."""
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=shape, shared_name=f"deepfm_count/{name}")


def _read_steps(num_processes):
    """int64 [num_processes]: the steps that each process has taken."""
    with tf.device(_BOARD):
        steps = _counter(_STEPS, [num_processes])
        return tf.raw_ops.ReadVariableOp(resource=steps, dtype=tf.int64)


class _Board:
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
            if name != _RELEASED and self.posted(_RELEASED) and not self.posted(name):
                raise interruption.Interrupted(together=True)
            meanwhile()
            time.sleep(_POLL)
        return json.loads(self._run(self._of(name, 0)[3]).decode())

    def set_steps(self, of_ranks):
        """Sets the steps that each process has taken."""
        with self._graph.as_default(), tf.device(_BOARD):
            steps, taken = _counter(_STEPS, [len(of_ranks)]), tf.constant(of_ranks, tf.int64)
            self._run(tf.raw_ops.AssignVariableOp(resource=steps, value=taken))

    def steps(self, num_processes: int) -> List[int]:
        """The steps that each process has taken."""
        with self._graph.as_default():
            return self._run(_read_steps(num_processes)).tolist()

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


def _start_server(cluster: Cluster, config) -> tf.distribute.Server:
    try:
        return tf.distribute.Server(
            v1.train.ClusterSpec(cluster.jobs), cluster.job, cluster.index, config=config
        )
    except tf.errors.UnknownError as error:
        address = cluster.jobs[cluster.job][cluster.index]
        raise BadInput(
            f"TF_CONFIG: {cluster.job} {cluster.index} cannot listen on port "
            f"{address.rpartition(':')[2]} of {address}; if another program uses it, "
            "end that or give another port."
        ) from error


def serve(cluster: Cluster, config):
    """Runs a parameter server, which holds variables until the chief has finished the job."""
    server = _start_server(cluster, config)
    watch = Watch(cluster.watched())
    board = _Board(server, [f"/job:ps/task:{cluster.index}"])
    logging.info("Parameter server %d is ready.", cluster.index)
    stops = False
    with interruption.taking_steps():  # others' steps: this process ends once the chief has saved
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
    logging.info("Parameter server %d: the job is done.", cluster.index)


class Member:
    """A process that trains: the chief or a worker, with the tf.ConfigProto of its server."""

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
        self.board = _Board(self._server, self.device_filters)
        self._rounds = map("round_{}".format, itertools.count(1))
        self._stops, self._looked = False, 0.0

    def agree(self, value):
        """Returns the chief's value, in all processes."""
        name = next(self._rounds)
        if self.cluster.rank == 0:
            self.board.post(name, value)
        return self.board.read(name)

    def exchange(self, value):
        """Returns the values of all processes, by rank."""
        name = next(self._rounds)
        self.board.post(f"{name}/{self.cluster.rank}", value)
        ranks = range(self.cluster.num_processes)
        return [self.board.read(f"{name}/{rank}", self.hear) for rank in ranks]

    def steps_taken(self, of_processes):
        """Returns the steps of this process. The chief sets them from `of_processes`; for a
        restarted worker they include those taken since."""
        if self.cluster.rank == 0:
            self.board.set_steps(of_processes)
            self.board.post("steps")
        self.board.read("steps")
        return self.board.steps(self.cluster.num_processes)[self.cluster.rank]

    def begin_step(self, features, labels, max_steps):
        """Makes each batch claim a step before the model uses it.

        All processes share --max_steps steps; a process that gets none has reached its end.
        """
        if not max_steps:
            return features, labels
        batch = tf.nest.flatten((features, labels))
        with tf.device(_BOARD):
            claimed = _counter(_CLAIMED)
        with tf.control_dependencies(batch), tf.device(_BOARD):
            claim = tf.raw_ops.ResourceCountUpTo(resource=claimed, limit=max_steps, T=tf.int64)
        with tf.control_dependencies([claim]):
            return tf.nest.map_structure(tf.identity, (features, labels))

    def end_step(self, train_op):
        """Counts a step on the board after its updates; the count outlives this process."""
        processes = self.cluster.num_processes
        with tf.device(_BOARD):
            steps = _counter(_STEPS, [processes])
            mine = tf.one_hot(self.cluster.rank, processes, dtype=tf.int64)
        with tf.control_dependencies([train_op]), tf.device(_BOARD):
            return tf.raw_ops.AssignAddVariableOp(resource=steps, value=mine)

    def count_steps(self):
        """int64 [processes]: the steps of each."""
        return _read_steps(self.cluster.num_processes)

    def servers_run(self, make: Callable):
        """Whether all servers have the operator of the tensor that make() returns."""
        return self._all_run(
            make,
            "does not have the compiled kernels, so the servers update variables with TensorFlow's "
            "own operators, which takes longer.",
        )

    def _all_run(self, make, else_said):
        for i, address in enumerate(self.cluster.jobs["ps"]):
            if not self.board.runs(make, i):
                logging.info("ps %d (%s) %s", i, address, else_said)
                return False
        return True

    def servers_see(self, model_dir):
        """Whether the servers share the disk of model_dir, so that each can write its part."""
        tf.io.gfile.makedirs(model_dir)
        path = os.path.join(model_dir, f".shared-{uuid.uuid4().hex}")
        with tf.io.gfile.GFile(path, "w") as f:
            f.write("A parameter server looks for this file.\n")
        try:
            return self._all_run(
                lambda: tf.io.read_file(path),
                f"does not see --model_dir={model_dir}, so the chief gathers the variables and "
                "writes whole checkpoints. On a shared disk each server would write its part.",
            )
        finally:
            tf.io.gfile.remove(path)

    def anyone_stops(self, wanted):
        """Whether any process wants to stop; checks the board once a second."""
        if wanted and not self._stops:
            self.board.post("stop")
            self._stops = True
        if not self._stops and time.monotonic() - self._looked > _BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._stops = self.board.posted("stop")
        return self._stops

    def hear(self):
        """Passes a signal on to the others while this process waits for them."""
        if self.anyone_stops(interruption.requested()):
            interruption.heard()

    def make_hooks(self, save_in_time: Callable):
        """The hooks of training; they come before the one that saves checkpoints, which
        `save_in_time(session)` does if it is time for one."""
        return [_Worker(self) if self.cluster.rank > 0 else _Chief(self, save_in_time)]

    def finish(self):
        """Ends the job in all processes once the chief gets here."""
        workers = [f"left/{rank}" for rank in range(1, self.cluster.num_processes)]
        if self.cluster.rank > 0:
            self.board.read(_RELEASED)
            self._watch.stop()
            self.board.post_last(workers[self.cluster.rank - 1])
            return
        self._watch.stop()
        self.board.patience = _FAREWELL
        last = time.monotonic() + _FAREWELL
        try:
            self.board.post(_RELEASED)
            while time.monotonic() < last and not all(map(self.board.posted, workers)):
                time.sleep(_POLL)
        except (tf.errors.UnavailableError, tf.errors.AbortedError):
            logging.warning("Parameter server 0 is lost, but the job was done before.")
        for server in range(self.cluster.num_servers):
            self.board.post_last("closed", server)


class _OneSession(v1.train.SessionRunHook):
    """Ends a process whose session on the parameter servers was lost."""

    def __init__(self, member=None, save_in_time=None):
        self._member, self._save_in_time = member, save_in_time
        self._in_session = False

    def after_create_session(self, session, coord):
        if self._in_session:  # a new one would start over with the share's first record
            raise OSError(
                "the session on the parameter servers was lost, so this process ends; run the "
                "same command again to resume."
            )
        self._in_session = True


class _Worker(_OneSession):
    """Starts when the chief has made the variables; reports its last step to the chief."""

    def begin(self):
        # Estimator's own waiting looks every 30 s.
        self._member.board.read("started", self._member.hear)

    def end(self, session):
        self._member.board.post(f"joined/{self._member.cluster.rank}")


class _Chief(_OneSession):
    """Logs the balance; waits for the workers' last steps, which the last checkpoint must have."""

    def begin(self):
        log_balance(self._member.cluster.num_servers, v1.global_variables())
        with tf.device(_BOARD):
            claimed = _counter(_CLAIMED)
            step = tf.cast(v1.train.get_global_step(), tf.int64)
            self._claim = tf.raw_ops.AssignVariableOp(resource=claimed, value=step)

    def after_create_session(self, session, coord):
        super().after_create_session(session, coord)
        session.run(self._claim)  # the steps of the checkpoint
        self._member.board.post("started")

    def end(self, session):
        def meanwhile():
            self._member.hear()
            self._save_in_time(session)

        for rank in range(1, self._member.cluster.num_processes):
            self._member.board.read(f"joined/{rank}", meanwhile)


def log_balance(num_servers: int, variables):
    """Logs how many bytes of the variables, the optimizer's among them, each server holds."""
    sizes, shards = [0] * num_servers, [[] for _ in range(num_servers)]
    for variable in variables:
        task = tf.DeviceSpec.from_string(variable.device).task
        size = variable.shape.num_elements() * variable.dtype.size
        sizes[task] += size
        shards[task].append(f"{variable.op.name} {size:,}")
    for i, names in enumerate(shards):
        logging.info("ps %d holds, in bytes: %s.", i, ", ".join(names))
    logging.info(
        "Parameter servers hold %s MB; max/min %.2f.",
        ", ".join(f"{size / 1e6:.1f}" for size in sizes),
        max(sizes) / max(min(sizes), 1),
    )
