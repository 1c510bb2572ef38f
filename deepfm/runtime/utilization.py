"""How busy the processors are while a model trains, what limits it, and what to try."""

import contextlib
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import threading
import time
from typing import Callable, Dict, List, Optional, Tuple

from deepfm.config import JobConfig

GPU_LOOK = 1.0  # seconds of which a look at the GPUs tells, up to its own time
_GPU_SECONDS = 0.5  # between two of them
_WAITING = 0.1  # share of a step spent waiting for records from which on reading is the limit
_BUSY = 0.9  # share of the processors' time in use from which on they are the limit
_OTHERS = 0.1  # share used by other programs from which on it is reported
_FULL = 0.95  # the same from which on steps wait because no core has time to read
# Found before TensorFlow is loaded: OpenMP may bind the thread that loads it to a single core.
_ALLOWED = frozenset(os.sched_getaffinity(0))
# Variables in which Open MPI, Intel MPI and Horovod's Gloo give the number of ranks of a host.
_RANKS = "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "HOROVOD_LOCAL_SIZE"


def cores() -> float:
    """CPU cores that this process may use, by its affinity and its control group's quota."""
    allowed = float(len(_ALLOWED))
    quota = _quota()
    return min(allowed, quota) if quota else allowed


def _quota() -> Optional[float]:
    """Cores that the control group allows, None if it sets no limit."""
    first = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"
    for paths in (("/sys/fs/cgroup/cpu.max",), first):  # second and first version
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(pathlib.Path(x).read_text() for x in paths).split()
            return float(quota) / float(period) if quota not in ("max", "-1") else None
    return None


def has_mkl() -> bool:
    """Whether TensorFlow is built with MKL: its library, not loaded, asks for Intel's OpenMP."""
    package = importlib.util.find_spec("tensorflow_core")
    with contextlib.suppress(OSError, AttributeError):
        path = pathlib.Path(package.origin).with_name("libtensorflow_framework.so.1")
        with path.open("rb") as library:  # which begins with the names of what it asks for
            return b"\0libiomp5.so\0" in library.read(1 << 24)
    return False


def openmp(threads: int, affinity: Optional[str], num_cpus: int) -> Dict[str, str]:
    """OpenMP's environment, read when TensorFlow is loaded: as asked for, or by default as follows.

    Builds with MKL get a rank's cores, unless OMP_NUM_THREADS is set, and unbound threads.
    """
    variables, mkl = {}, has_mkl()
    if mkl and not threads and "OMP_NUM_THREADS" not in os.environ:
        ranks = max(int(os.environ.get(name) or 1) for name in _RANKS)
        threads = max(int(min(cores(), num_cpus or cores())) // ranks, 1)
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    if affinity:
        variables.update(KMP_AFFINITY=affinity, KMP_SETTINGS="1")
    elif mkl:
        variables["KMP_AFFINITY"] = "disabled"
    return variables


def busy_seconds() -> float:
    """CPU time that all processes have used of the cores that `cores` counts.

    In a control group with a quota, that is the group's; otherwise that of this process's CPUs.
    """
    if _quota():
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = pathlib.Path("/sys/fs/cgroup/cpu.stat").read_text().split()
            return int(dict(zip(words[::2], words[1::2]))["usage_usec"]) / 1e6
        with contextlib.suppress(OSError, ValueError):
            return int(pathlib.Path("/sys/fs/cgroup/cpuacct/cpuacct.usage").read_text()) / 1e9
    names = {f"cpu{i}" for i in _ALLOWED}
    ticks = 0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _, _, interrupts, soft = map(int, fields[:7])
            ticks += user + nice + system + interrupts + soft
    return ticks / os.sysconf("SC_CLK_TCK")


def gpus_of_host() -> List[str]:
    """The names of this host's NVIDIA GPUs, whether TensorFlow can use them or not."""
    files = pathlib.Path("/proc/driver/nvidia/gpus").glob("*/information")
    text, program = "".join(path.read_text() for path in files), shutil.which("nvidia-smi")
    if program and not text:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            words = [program, "--list-gpus"]  # "GPU 0: Tesla T4 (UUID: GPU-...)"
            text = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    return re.findall(r"^(?:Model:|GPU \d+:)\s*(.*?)(?: \(UUID.*)?$", text, re.MULTILINE)


def why_no_gpus() -> str:
    """Why TensorFlow finds no GPU, and what to install."""
    from deepfm.runtime.tf import tf  # only here: what OpenMP reads at its load is set later

    there = ", ".join(sorted(set(gpus_of_host())))
    if not there:
        return "neither nvidia-smi nor /proc/driver/nvidia shows one"
    if tf.test.is_built_with_cuda():
        return f"this host has a GPU ({there}), but CUDA or cuDNN does not load (docs/gpu.md)"
    return (
        f"this host has a GPU ({there}), but this TensorFlow is built without CUDA; install "
        "tensorflow-gpu with scripts/setup.sh --gpu (docs/gpu.md)"
    )


class Gpus:
    """The utilization of this host's GPUs, as nvidia-smi reports it twice a second.

    Args:
        clock: the time in seconds, without what shall not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._samples = clock, []  # (time, percent) of each GPU and look

    def share(self, since: float = -math.inf) -> Optional[float]:
        """Mean of what was seen after a time, as a share; None if nothing was."""
        percents = [percent for seen, percent in self._samples if seen > since]
        return sum(percents) / len(percents) / 100 if percents else None

    def forget(self, since: float):
        """Drops what was seen after a time."""
        self._samples = [sample for sample in self._samples if sample[0] <= since]

    def _read(self, lines):
        for line in lines:
            with contextlib.suppress(ValueError):  # "[N/A]", or a message that there is no driver
                self._samples.append((self._clock(), float(line)))

    @contextlib.contextmanager
    def watched(self):
        """Runs nvidia-smi, if there is one, during this block."""
        program = shutil.which("nvidia-smi")
        if not program or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # none to be used
            yield
            return
        process = subprocess.Popen(
            [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            + [f"--loop-ms={1000 * _GPU_SECONDS:.0f}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        try:
            yield
        finally:
            process.kill()
            process.wait()


def verdict(
    job: JobConfig,
    faster: Optional[str],
    pipe: bool,
    others: float,
    input_wait_share: float,
    host_cpu_utilization: float,
    gpu_utilization: Optional[float],
) -> str:
    """What limits a run, and what to try, in a sentence.

    Args:
        faster: a format that would be read faster, if there is one.
        pipe: whether the records come through a FIFO.
        others: part of host_cpu_utilization that other programs' processes use.
        input_wait_share, host_cpu_utilization, gpu_utilization: as of Throughput.
    """
    num_processes, batch_size = job.distribution.size, job.input.batch_size
    wait, cpu, gpu = input_wait_share, host_cpu_utilization, gpu_utilization
    seen = f"input waits {100 * wait:.0f} %, CPU {100 * cpu:.0f} %"
    shared = others > _OTHERS
    if shared:
        seen += f", of which other programs use {100 * others:.0f} %"
    if gpu is not None:
        seen += f", GPU {100 * gpu:.0f} %"
    if num_processes > 1:
        seen += f"; means of {num_processes} processes"
    larger = f"--batch_size={2 * batch_size}"
    idle = gpu is not None and gpu < _BUSY
    hosts = "a host with more cores for each GPU" if idle else "more hosts"
    hosts = "a host without other programs" if shared else hosts
    if wait >= _WAITING and cpu >= _FULL:
        return f"CPU-bound ({seen}): reading and the steps share its cores; try {hosts}."
    if wait >= _WAITING:
        disk = f"--num_parallel_reads={2 * job.input.num_parallel_reads}, or a faster disk"
        advice = "larger objects in the channel, or --pipe_mode=false" if pipe else disk
        return f"Input-bound ({seen}): reading is the limit; try {faster or advice}."
    if idle:
        return (
            f"Idle GPU ({seen}): reading keeps up, and the steps leave it idle; try {larger}, then "
            "fewer GPUs or CPUs alone, which often train click models for less money. --use_amp "
            "pays only on a busy GPU."
        )
    if max(cpu, gpu or 0.0) >= _BUSY:
        more = gpu and not job.optimizer.use_amp
        amp = "--use_amp (large layers, tensor cores), " if more else ""
        return f"Compute-bound ({seen}): the step is the limit; try {amp}{larger}, or {hosts}."
    if num_processes > 1:
        return (
            f"Communication-bound ({seen}): the processes wait for each other; try {larger}, which "
            "exchanges less per record, or fewer processes."
        )
    return (
        f"Bound by one process ({seen}), which cannot keep more cores busy; try {larger}, or "
        "horovodrun with several processes on this host."
    )


def cost(price: float, hosts: int, rate: float) -> Tuple[Dict[str, float], str]:
    """(what the report says about money, and the verdict) at a host's hourly price; 0: unknown."""
    if not (price and rate):
        return {"hosts": hosts}, ""
    million = price * hosts / 3600 / rate * 1e6
    said = f" A million examples cost {million:.3g} on {hosts} host(s) at {price:g} per hour."
    return {"hosts": hosts, "cost_per_million_examples": million}, said


def share_in_use(samples: List, first: float = 0.0) -> Optional[float]:
    """The busy share of the allowed cores, from samples (time in s, busy_seconds) after a time.

    None if no time has passed between them.
    """
    timed = [sample for sample in samples if sample[0] >= first]
    if not timed or timed[-1][0] <= timed[0][0]:
        return None
    (start, before), (end, after) = timed[0], timed[-1]
    return min(max((after - before) / (end - start) / cores(), 0.0), 1.0)
