"""The processes of a job with parameter servers: who they are, and which depends on which.

TF_CONFIG, in TensorFlow's own format, says who they are:

    {"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], "ps": ["host:port", ...]},
     "task": {"type": "worker", "index": 0}}

`master` is another name for `chief`. This module does not load TensorFlow.
"""

import json
import os
import time
from typing import Dict, List, NamedTuple, Optional

from absl import logging

from deepfm.errors import BadInput
from deepfm.modes.common.peers import Other, answers

_CHIEFS = ("chief", "master")
_JOBS = (*_CHIEFS, "worker", "ps")
_KEYS = "cluster", "task", "environment", "job", "rpc_layer", "model_dir"
# Seconds of silence after which a process counts as lost and the job ends. A worker may be
# restarted meanwhile; the chief and the servers hold state that a restart would lose.
_PATIENCE = {"chief": 15, "master": 15, "ps": 15, "worker": 25}


class Cluster(NamedTuple):
    """All processes of a job, and which of them this one is.

    Attributes:
        jobs: addresses "host:port" of the tasks of each job: chief (or master), worker, ps.
        job: the job of this process.
        index: its index in that job.
    """

    jobs: Dict[str, List[str]]
    job: str
    index: int

    @property
    def chief(self):
        """The chief's job name, chief or master."""
        return next(job for job in _CHIEFS if job in self.jobs)

    @property
    def num_servers(self):
        return len(self.jobs["ps"])

    @property
    def num_processes(self):
        """Processes that train: the chief and the workers."""
        return 1 + len(self.jobs.get("worker", ()))

    @property
    def hosts(self):
        """How many hosts the addresses name, those that only serve included."""
        everyone = [address for addresses in self.jobs.values() for address in addresses]
        return len({address.rpartition(":")[0] for address in everyone})

    @property
    def rank(self):
        """The rank of this process among those that train; the chief's is 0."""
        return 0 if self.job == self.chief else 1 + self.index

    def watched(self) -> List[Other]:
        """The processes that this one depends on: the chief on all, a worker on the chief and the
        servers, a server on the chief. So none outlives a lost one by more than two patiences."""
        chief = self.chief
        jobs = {chief: ("ps", "worker"), "worker": (chief, "ps"), "ps": (chief,)}[self.job]
        return [
            Other(f"{job} {i}", address, _PATIENCE[job], _PATIENCE[job])
            for job in jobs
            for i, address in enumerate(self.jobs.get(job, ()))
        ]


def take(ps_hosts=(), worker_hosts=(), job_name=None, task_index=0):
    """Sets TF_CONFIG by the flags of these names; BadInput if it describes another process."""
    jobs = {"chief": worker_hosts[:1], "worker": worker_hosts[1:], "ps": ps_hosts}
    job, index = job_name, task_index
    if job == "worker":
        job, index = ("worker", index - 1) if index else ("chief", 0)
    text = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
    try:
        if parse(os.environ.get("TF_CONFIG")) not in (None, parse(text)):
            raise BadInput("TF_CONFIG describes another process; leave out one of them.")
    except BadInput as error:
        raise BadInput(f"--ps_hosts, --worker_hosts, --job_name, --task_index: {error}") from error
    os.environ["TF_CONFIG"] = text


def parse(tf_config: Optional[str]) -> Optional[Cluster]:
    """The cluster that TF_CONFIG describes; None if it describes none.

    Raises:
        BadInput: it is not JSON, or does not describe a cluster with this process in it, or says
            nothing of a cluster to one of several processes, which would train a model of its own.
    """
    try:
        config = json.loads(tf_config or "{}")
    except ValueError as error:
        raise BadInput(f"TF_CONFIG is not JSON ({error}): {tf_config[:80]!r}") from error
    if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
        raise BadInput(
            f"TF_CONFIG is not an object with 'cluster' and 'task': {tf_config[:80]!r}; e.g. "
            '{"cluster": {"chief": ["host:port"], "ps": ["host:port"]}, '
            '"task": {"type": "chief", "index": 0}}'
        )
    for key in config:
        if key not in _KEYS:
            raise BadInput(f"TF_CONFIG: unknown key '{key}'; known are {', '.join(_KEYS)}.")
    jobs, task = config.get("cluster"), config.get("task")
    evaluates = "evaluator" in (tf_config or "")
    hint = "; the chief evaluates (--val_data_dir), so start no evaluator" * evaluates
    if not jobs:
        _check_alone(task or {}, hint)
        return None
    for job, addresses in jobs.items():
        if job not in _JOBS:
            has = ", ".join(_JOBS)
            raise BadInput(f"TF_CONFIG: unknown job '{job}'; a cluster has {has}{hint}.")
        if not isinstance(addresses, list) or not all(map(_is_address, addresses)):
            raise BadInput(f"TF_CONFIG: '{job}' is {addresses!r}; give a list of 'host:port'.")
    jobs = {job: addresses for job, addresses in jobs.items() if addresses}
    chiefs = sum(len(jobs.get(job, ())) for job in _CHIEFS)
    if chiefs != 1:
        raise BadInput(f"TF_CONFIG: the cluster has {chiefs} chiefs (or masters); name one.")
    everyone = [address for addresses in jobs.values() for address in addresses]
    twice = {address for address in everyone if everyone.count(address) > 1}
    if twice:
        raise BadInput(f"TF_CONFIG: two processes have the address {min(twice)}.")
    if not isinstance(task, dict) or not {"type", "index"} <= set(task):
        raise BadInput("TF_CONFIG: 'task' is missing; give its 'type' and 'index'.")
    job, index = task["type"], task["index"]
    index = int(index) if isinstance(index, str) and index.isdecimal() else index
    if not isinstance(job, str) or job not in jobs or index not in range(len(jobs[job])):
        tasks = ", ".join(f"{job} 0 to {len(found) - 1}" for job, found in sorted(jobs.items()))
        raise BadInput(f"TF_CONFIG: the cluster has no task {job} {index}; it has {tasks}{hint}.")
    return Cluster(jobs, job, int(index))


def _check_alone(task, hint):
    """Refuses (BadInput) a task without a cluster that cannot be a process which trains alone."""
    task = task if isinstance(task, dict) else {"type": task}
    job, index = task.get("type", "chief"), task.get("index", 0)
    if job not in (*_CHIEFS, "worker") or str(index) != "0":
        raise BadInput(
            f"TF_CONFIG names task {job} {index}, but no 'cluster' with its addresses; give that, "
            f"or no TF_CONFIG to train in one process{hint}."
        )


def _is_address(address):
    host, _, port = str(address).rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def wait_for_servers(cluster: Cluster):
    """Waits until all servers listen, or a Watch ends the process; logs which one does not yet."""
    said = time.monotonic()
    for i, address in enumerate(cluster.jobs["ps"]):
        while not answers(address):
            if time.monotonic() - said > 10:
                said = time.monotonic()
                logging.info("Waiting for ps %d (%s).", i, address)
            time.sleep(0.2)
