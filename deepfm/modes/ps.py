"""Asynchronous training with parameter servers: how its processes start, agree and end together.

Every process runs a TensorFlow server. The chief and the workers train, each on its share of the
records and at its own pace; the parameter servers hold the variables. TensorFlow does not define
when each process may end. Here all stay until the chief has finished the job: it waits for the
workers' last steps before its last checkpoint, and releases them and the servers when it is done.
If a process is lost before that, all others end (peers.Watch). They communicate over a Board.
"""

import itertools
import os
import time
import uuid

from absl import logging

from deepfm.errors import BadInput
from deepfm.modes.common import board, devices
from deepfm.modes.common import tf_config as clusters
from deepfm.modes.common.board import POLL, RELEASED, Board
from deepfm.modes.common.mode import Mode
from deepfm.modes.common.peers import Watch
from deepfm.modes.common.tf_config import Cluster
from deepfm.modes.local import Local
from deepfm.modes.tower import Tower
from deepfm.runtime import interruption
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

_BETWEEN_LOOKS = 1.0  # seconds between two checks whether a process wants to stop
_CLAIMED = "claimed"  # counter of the steps that have begun
_FAREWELL = 10  # seconds at most that the chief waits for the workers to say that they leave


class Ps(Mode):
    """A process that trains: the chief or a worker, with the tf.ConfigProto of its server."""

    name = "ps"

    def __init__(self, cluster: Cluster, config, *more):
        super().__init__(config, *more)
        self.cluster = cluster
        self.size, self.rank = cluster.num_processes, cluster.rank
        self.synchronous = self.size == 1
        self.tf_config, self.hosts = os.environ["TF_CONFIG"], cluster.hosts
        self._server = _start_server(cluster, config)
        self._watch = Watch(cluster.watched())
        clusters.wait_for_servers(cluster)
        me = f"/job:{cluster.job}/task:{cluster.index}"
        filters = ["/job:ps", me]
        config.device_filters.extend(filters)
        self.device_fn = v1.train.replica_device_setter(
            cluster.num_servers, worker_device=me, cluster=v1.train.ClusterSpec(cluster.jobs)
        )
        self.partitioner = v1.fixed_size_partitioner(cluster.num_servers)
        self.board = Board(self._server, filters)
        self._rounds = map("round_{}".format, itertools.count(1))
        self._stops, self._looked = False, 0.0

    @classmethod
    def make(cls, flags):
        cluster = clusters.parse(os.environ.get("TF_CONFIG"))
        if not cluster or "ps" not in cluster.jobs:
            raise BadInput(
                "--distribution=ps needs a cluster with 'ps' in TF_CONFIG, or --ps_hosts; "
                "scripts/local_cluster.py starts one on this machine."
            )
        if flags.task_type != "train":
            if cluster.job == cluster.chief:
                return Local.make(flags)
            idle, said = Mode(), "Only the chief runs --task_type=%s; this process ends."
            idle.serve = lambda: logging.info(said, flags.task_type)
            return idle
        several = flags.replicas_per_process or len(devices.gpus())
        on = devices.of_replicas(flags) if several > 1 else []
        config = devices.session_config(flags, on)
        if cluster.job == "ps":
            return _Server(cluster, config)
        return _Towers(cluster, config, on) if on else cls(cluster, config)

    def exchange(self, value):
        name = next(self._rounds)
        self.board.post(f"{name}/{self.rank}", value)
        return [self.board.read(f"{name}/{rank}", self.hear) for rank in range(self.size)]

    def steps_taken(self, of_processes):
        """The chief sets the steps from `of_processes`; for a restarted worker they include those
        taken since."""
        if self.chief:
            self.board.set_steps(of_processes)
            self.board.post("steps")
        self.board.read("steps")
        return self.board.steps(self.size)[self.rank]

    def wrap_model_fn(self, model_fn, max_steps=0):
        model_fn = super().wrap_model_fn(model_fn)

        def in_steps(features, labels, mode):
            features, labels = self._begin_step(features, labels, max_steps)
            spec = model_fn(features, labels, mode)
            return spec._replace(train_op=self._end_step(spec.train_op))

        return in_steps

    def _begin_step(self, features, labels, max_steps):
        """Makes each batch claim a step before the model uses it.

        All processes share --max_steps steps; a process that gets none has reached its end.
        """
        if not max_steps:
            return features, labels
        batch = tf.nest.flatten((features, labels))
        with tf.device(board.BOARD):
            claimed = board.counter(_CLAIMED)
        with tf.control_dependencies(batch), tf.device(board.BOARD):
            claim = tf.raw_ops.ResourceCountUpTo(resource=claimed, limit=max_steps, T=tf.int64)
        with tf.control_dependencies([claim]):
            return tf.nest.map_structure(tf.identity, (features, labels))

    def _end_step(self, train_op):
        """Counts a step on the board after its updates; the count outlives this process."""
        with tf.device(board.BOARD):
            steps = board.counter(board.STEPS, [self.size])
            mine = tf.one_hot(self.rank, self.size, dtype=tf.int64)
        with tf.control_dependencies([train_op]), tf.device(board.BOARD):
            return tf.raw_ops.AssignAddVariableOp(resource=steps, value=mine)

    @property
    def count_steps(self):
        return None if self.synchronous else lambda: board.read_steps(self.size)

    def all_run(self, make):
        return self._every_server_runs(
            make,
            "does not have the compiled kernels, so the servers update variables with TensorFlow's "
            "own operators, which takes longer.",
        )

    def _every_server_runs(self, make, else_said):
        for i, address in enumerate(self.cluster.jobs["ps"]):
            if not self.board.runs(make, i):
                logging.info("ps %d (%s) %s", i, address, else_said)
                return False
        return True

    def saves_in_parts(self, model_dir):
        """Whether the servers share the disk of model_dir, so that each can write its part."""
        tf.io.gfile.makedirs(model_dir)
        path = os.path.join(model_dir, f".shared-{uuid.uuid4().hex}")
        with tf.io.gfile.GFile(path, "w") as f:
            f.write("A parameter server looks for this file.\n")
        try:
            return self._every_server_runs(
                lambda: tf.io.read_file(path),
                f"does not see --model_dir={model_dir}, so the chief gathers the variables and "
                "writes whole checkpoints. On a shared disk each server would write its part.",
            )
        finally:
            tf.io.gfile.remove(path)

    def anyone_stops(self):
        """As of Mode; checks the board once a second."""
        return self._told_to_stop(self.stop.wanted)

    def _told_to_stop(self, wanted):
        if wanted and not self._stops:
            self.board.post("stop")
            self._stops = True
        if not self._stops and time.monotonic() - self._looked > _BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self._stops = self.board.posted("stop")
        return self._stops

    def hear(self):
        """Passes a signal on to the others while this process waits for them."""
        if self._told_to_stop(self.stop.signal is not None):
            self.stop.heard()

    def make_hooks(self, save_in_time):
        return [_Chief(self, save_in_time) if self.chief else _Worker(self)]

    def finish(self):
        """Ends the job in all processes once the chief gets here."""
        workers = [f"left/{rank}" for rank in range(1, self.size)]
        if not self.chief:
            self.board.read(RELEASED)
            self._watch.stop()
            self.board.post_last(workers[self.rank - 1])
            return
        self._watch.stop()
        self.board.patience = _FAREWELL
        last = time.monotonic() + _FAREWELL
        try:
            self.board.post(RELEASED)
            while time.monotonic() < last and not all(map(self.board.posted, workers)):
                time.sleep(POLL)
        except (tf.errors.UnavailableError, tf.errors.AbortedError):
            logging.warning("Parameter server 0 is lost, but the job was done before.")
        for server in range(self.cluster.num_servers):
            self.board.post_last("closed", server)


class _Towers(Ps, Tower):
    """A process that trains on several devices."""


class _Server(Mode):
    """A parameter server."""

    def __init__(self, cluster: Cluster, config):
        super().__init__(config)
        self._cluster = cluster

    def serve(self):
        """Holds variables until the chief has finished the job."""
        index = self._cluster.index
        server = _start_server(self._cluster, self.session_config)
        watch = Watch(self._cluster.watched())
        own = Board(server, [f"/job:ps/task:{index}"])
        logging.info("Parameter server %d is ready.", index)
        stops = False
        with self.stop.taking_steps():  # others' steps: this one ends once the chief has saved
            while not own.posted("closed", index):
                if self.stop.wanted and not stops:
                    self.stop.heard()
                    Board(server, ["/job:ps"]).post("stop")
                    stops = True
                time.sleep(POLL)
        watch.stop()
        time.sleep(0.5)  # the chief's post is answered by then
        if stops:
            raise interruption.Interrupted()
        logging.info("Parameter server %d: the job is done.", index)


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


class _OneSession(v1.train.SessionRunHook):
    """Ends a process whose session on the parameter servers was lost."""

    def __init__(self, mode=None, save_in_time=None):
        self._mode, self._save_in_time = mode, save_in_time
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
        self._mode.board.read("started", self._mode.hear)

    def end(self, session):
        self._mode.board.post(f"joined/{self._mode.rank}")


class _Chief(_OneSession):
    """Logs the balance; waits for the workers' last steps, which the last checkpoint must have."""

    def begin(self):
        log_balance(self._mode.cluster.num_servers, v1.global_variables())
        with tf.device(board.BOARD):
            claimed = board.counter(_CLAIMED)
            step = tf.cast(v1.train.get_global_step(), tf.int64)
            self._claim = tf.raw_ops.AssignVariableOp(resource=claimed, value=step)

    def after_create_session(self, session, coord):
        super().after_create_session(session, coord)
        session.run(self._claim)  # the steps of the checkpoint
        self._mode.board.post("started")

    def end(self, session):
        def meanwhile():
            self._mode.hear()
            self._save_in_time(session)

        for rank in range(1, self._mode.size):
            self._mode.board.read(f"joined/{rank}", meanwhile)


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
