"""How busy the processors are while a model trains, what limits it, and what to try."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import threading
from typing import List, Optional

_GPU_SECONDS = 5  # between two looks at the GPUs
_WAITING = 0.1  # share of a step that waits for records, from which on these are the limit
_BUSY = 0.75  # share of the processors' time in use, from which on they are the limit
_OTHERS = 0.1  # share that other programs use, from which on it is told
_FULL = 0.95  # the same, from which on records are waited for because nobody has time to read them


def cores() -> float:
    """CPU cores that this process may use, by its affinity and its control group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = _quota()
    return min(allowed, quota) if quota else allowed


def _quota() -> Optional[float]:
    """Cores that the control group allows, None where it sets no limit."""
    first = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"
    for paths in (("/sys/fs/cgroup/cpu.max",), first):  # second and first version
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(pathlib.Path(x).read_text() for x in paths).split()
            return float(quota) / float(period) if quota not in ("max", "-1") else None
    return None


def busy_seconds() -> float:
    """CPU time that has been used of the cores of `cores`, by this process and all others.

    In a control group with a quota that of the group, else that of the CPUs of this process.
    """
    if _quota():
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = pathlib.Path("/sys/fs/cgroup/cpu.stat").read_text().split()
            return int(dict(zip(words[::2], words[1::2]))["usage_usec"]) / 1e6
        with contextlib.suppress(OSError, ValueError):
            return int(pathlib.Path("/sys/fs/cgroup/cpuacct/cpuacct.usage").read_text()) / 1e9
    names = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    ticks = 0
    for line in pathlib.Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _, _, interrupts, soft = map(int, fields[:7])
            ticks += user + nice + system + interrupts + soft
    return ticks / os.sysconf("SC_CLK_TCK")


class Gpus:
    """The utilization of this host's GPUs, as nvidia-smi tells it every few seconds.

    Attributes:
        percents: of all GPUs and looks so far.
    """

    def __init__(self):
        self.percents = []

    def share(self, first: int = 0) -> Optional[float]:
        """Mean of the percents from one on; None where there are none."""
        found = self.percents[first:]
        return sum(found) / len(found) / 100 if found else None

    def _read(self, lines):
        for line in lines:
            with contextlib.suppress(ValueError):  # "[N/A]", or that there is no driver
                self.percents.append(float(line))

    @contextlib.contextmanager
    def watched(self):
        """In this block nvidia-smi looks, where there is one."""
        program = shutil.which("nvidia-smi")
        if not program:
            yield
            return
        process = subprocess.Popen(
            [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            + [f"--loop={_GPU_SECONDS}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        try:
            yield
        finally:
            process.kill()
            process.wait()


def verdict(
    input_wait_share: float,
    host_cpu_utilization: float,
    gpu_utilization: Optional[float],
    others: float,
    num_processes: int,
    batch_size: int,
    advice: str,
) -> str:
    """What limits a run, and what to try, in a sentence.

    Args:
        input_wait_share: of the time of a step that waits for its records.
        host_cpu_utilization: busy share of the allowed cores of the host.
        gpu_utilization: of the host's GPUs; None without.
        others: part of host_cpu_utilization that other programs' processes use.
        num_processes: that train together.
        batch_size: of a replica.
        advice: what would make reading faster.
    """
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
    hosts = "a host without other programs" if shared else "more hosts"
    if wait >= _WAITING and cpu >= _FULL:
        return f"CPU-bound ({seen}): reading and the steps share its cores; try {hosts}."
    if wait >= _WAITING:
        return f"Input-bound ({seen}): reading is the limit; try {advice}."
    if max(cpu, gpu or 0.0) >= _BUSY:
        return f"Compute-bound ({seen}): the step is the limit; try {larger}, or {hosts}."
    if num_processes > 1:
        return (
            f"Communication-bound ({seen}): the processes wait for each other; try {larger}, which "
            "exchanges less per record, or fewer processes."
        )
    return (
        f"Bound by one process ({seen}), which cannot keep more cores busy; try {larger}, or "
        "horovodrun with several processes on this host."
    )


def reading_advice(faster: Optional[str], pipe: bool, cached: bool, epochs: int, reads: int) -> str:
    """What would make reading faster.

    Args:
        faster: what is read faster than files of this format, if anything is.
        pipe: whether records come from a FIFO.
        cached: whether records are kept after the first epoch.
        epochs: of the run.
        reads: files that are read side by side.
    """
    if faster:
        return faster
    if pipe:
        return "larger objects in the channel, or --pipe_mode=false"
    if epochs > 1 and not cached:
        return "--cache=memory"
    return f"--num_parallel_reads={2 * reads}, or a faster disk"


def share_in_use(samples: List, first: float = 0.0) -> Optional[float]:
    """The busy share of the allowed cores between samples (time in s, busy_seconds) from a time on.

    None where no time lies between them.
    """
    found = [sample for sample in samples if sample[0] >= first]
    if not found or found[-1][0] <= found[0][0]:
        return None
    (start, before), (end, after) = found[0], found[-1]
    return min(max((after - before) / (end - start) / cores(), 0.0), 1.0)
