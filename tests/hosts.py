"""Two hosts on this machine: namespaces, each with a network, a host name and an /etc/hosts."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
from conftest import ROOT, started

NAMES = ("host-1", "host-2")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
_COMMANDS = ("ip", "iptables", "nsenter", "setpriv", "unshare")

_RENDEZVOUS = """
import sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer()
print(server.start(), flush=True)
server.init(get_host_assignments(parse_hosts(sys.argv[1]), int(sys.argv[2])))
sys.stdin.read()
"""


class Hosts:
    """Two hosts that are joined by a wire.

    Args:
        folder: for their files.
        pids: of a process in each host's namespaces.
    """

    def __init__(self, folder, pids):
        self.folder = folder
        self._pids = pids

    def inside(self, host, command):
        """The words that run a command on a host, 0 or 1."""
        enter = ["nsenter", f"--target={self._pids[host]}", "--net", "--uts", "--mount"]
        return [*enter, f"--wd={ROOT}", *map(str, command)]

    def run(self, host, *command):
        subprocess.run(self.inside(host, command), check=True)

    def cut(self):
        """From now on the wire loses everything, silently."""
        for host in range(2):
            self.run(host, "iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")

    def mend(self):
        for host in range(2):
            self.run(host, "iptables", "-D", "INPUT", "-i", "eth0", "-j", "DROP")


def _problem():
    missing = [command for command in _COMMANDS if not shutil.which(command)]
    if os.geteuid() != 0:
        return "only root can make network namespaces and cut them"
    return f"{', '.join(missing)}: not on this machine" if missing else None


@contextlib.contextmanager
def two_hosts(own_address=None):
    """Hosts; nothing that runs on them outlives the block.

    Args:
        own_address: each host's address for its own name; Debian's installer sets a loopback one.
    """
    problem = _problem()
    if problem:
        pytest.skip(problem)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pids = []
        for _ in range(2):
            # Ended with this process, even by kill -9.
            holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount"]
                + ["sh", "-c", "echo; exec sleep infinity"],
                stdout=subprocess.PIPE,
            )
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            if not holder.stdout.readline():
                pytest.skip("this machine lets nobody make namespaces")
            pids.append(holder.pid)
        hosts = Hosts(folder, pids)
        ends = [["name", "eth0", "netns", str(pid)] for pid in pids]
        subprocess.run(
            ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True
        )
        for host in range(2):
            names = os.path.join(folder, f"hosts-{host}")
            with open(names, "w") as f:
                f.write(f"127.0.0.1 localhost\n{own_address or ADDRESSES[host]} {NAMES[host]}\n")
                f.write(f"{ADDRESSES[1 - host]} {NAMES[1 - host]}\n")
            hosts.run(host, "mount", "--bind", names, "/etc/hosts")
            hosts.run(host, "hostname", NAMES[host])
            hosts.run(host, "ip", "link", "set", "lo", "up")
            hosts.run(host, "ip", "address", "add", f"{ADDRESSES[host]}/24", "dev", "eth0")
            hosts.run(host, "ip", "link", "set", "eth0", "up")
        yield hosts


class Job:
    """Processes of train.py that only end by themselves, and what each has written so far.

    Attributes:
        folder: for its files.
        processes: {name: subprocess.Popen}
    """

    def __init__(self, hosts, stack):
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(dir=hosts.folder))
        self.processes, self._hosts, self._stack = {}, hosts, stack

    def start(self, name, host, command, **env):
        """Starts a process on a host, whose lines go to a file."""
        env = {**os.environ, **{key: str(value) for key, value in env.items()}}
        with open(self._log(name), "w") as log:
            process = started(self._hosts.inside(host, command), env=env, stdout=log)
            self.processes[name] = self._stack.enter_context(process)

    def _log(self, name):
        return os.path.join(self.folder, f"{name}.log")

    def text(self, name):
        with open(self._log(name)) as f:
            return f.read()

    def wait_for(self, name, words):
        """Waits until a process has written some words."""
        last = time.time() + 180
        while words not in self.text(name):
            assert self.processes[name].poll() is None and time.time() < last, self.text(name)
            time.sleep(0.1)

    def codes(self, seconds):
        """{name: exit code}, when all have ended."""
        last = time.time() + seconds
        for name, process in self.processes.items():
            try:
                process.wait(timeout=max(0.1, last - time.time()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} still runs: {self.text(name)}") from None
        return {name: process.returncode for name, process in self.processes.items()}

    def last_line(self, name):
        return self.text(name).splitlines()[-1]


def _train(flags):
    return [sys.executable, "-u", "train.py", *flags]


@contextlib.contextmanager
def gloo_job(hosts, *flags, processes_per_host=1):
    """A Job of ranks 0, 1, ... without a launcher."""
    size = 2 * processes_per_host
    plan = ",".join(f"{name}:{processes_per_host}" for name in NAMES)
    with contextlib.ExitStack() as stack:
        job = Job(hosts, stack)
        server = hosts.inside(0, [sys.executable, "-c", _RENDEZVOUS, plan, size])
        rendezvous = started(server, stdin=subprocess.PIPE, stderr=None)
        port = stack.enter_context(rendezvous).stdout.readline().strip()
        for rank in range(size):
            host, local = divmod(rank, processes_per_host)
            job.start(
                rank, host, _train(flags), HOROVOD_HOSTNAME=NAMES[host], HOROVOD_RANK=rank,
                HOROVOD_SIZE=size, HOROVOD_LOCAL_RANK=local, HOROVOD_LOCAL_SIZE=processes_per_host,
                HOROVOD_CROSS_RANK=host, HOROVOD_CROSS_SIZE=2,
                HOROVOD_GLOO_RENDEZVOUS_ADDR=ADDRESSES[0], HOROVOD_GLOO_RENDEZVOUS_PORT=port,
                HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_IFACE="eth0",
            )  # fmt: skip
        yield job


@contextlib.contextmanager
def mpi_job(hosts, *flags):
    """A Job of mpirun alone, which starts a rank on each host."""
    with contextlib.ExitStack() as stack:
        job = Job(hosts, stack)
        agent = os.path.join(job.folder, "agent")
        with open(agent, "w") as f:
            f.write('#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n')
            for host, name in enumerate(NAMES):
                f.write(f'{name}) exec {" ".join(hosts.inside(host, ["sh", "-c"]))} "$*";;\n')
            f.write("esac\n")
        os.chmod(agent, 0o755)
        command = ["mpirun", "--allow-run-as-root", "--host", ",".join(NAMES), "-np", 2]
        command += ["-mca", "plm_rsh_agent", agent, "-mca", "orte_tmpdir_base", job.folder]
        command += ["-mca", "btl_tcp_if_include", "eth0", "-mca", "oob_tcp_if_include", "eth0"]
        command += ["-mca", "pml", "ob1", "-mca", "btl", "^openib", "-bind-to", "none"]
        # So that mpirun itself sees within 17 s that the other host is gone, not when TCP gives up.
        for name, value in (("time", 5), ("intvl", 2), ("probes", 6)):
            command += ["-mca", f"oob_tcp_keepalive_{name}", value]
        job.start("mpirun", 0, [*command, *_train(flags)])
        yield job


@contextlib.contextmanager
def ps_job(hosts, *flags):
    """A Job of a chief on the first host, a worker and a server on the other."""
    tasks = {"chief": 0, "worker": 1, "ps": 1}
    cluster = {job: [f"{ADDRESSES[host]}:{2222 + (job == 'ps')}"] for job, host in tasks.items()}
    with contextlib.ExitStack() as stack:
        job = Job(hosts, stack)
        for name, host in tasks.items():
            config = {"cluster": cluster, "task": {"type": name, "index": 0}}
            job.start(f"{name} 0", host, _train(flags), TF_CONFIG=json.dumps(config))
        yield job
