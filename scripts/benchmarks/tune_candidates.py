"""The ways to start train.py that tune.py tries, and what this machine has for them."""

import itertools
import os
import pathlib
import subprocess
import sys
from ctypes.util import find_library
from typing import Dict, List, NamedTuple, Sequence, Tuple

from programs import ROOT, run_command


class Candidate(NamedTuple):
    """A way to start train.py."""

    flags: Tuple[Tuple[str, str], ...] = ()  # (name, value) of those that are not the default's
    processes: int = 0  # ranks of horovodrun, or chief and workers beside a server; 0: neither
    preload: str = ""  # a library that replaces the memory allocator
    cpus_only: bool = False  # whether the host's GPUs are hidden

    def with_flags(self, **more) -> "Candidate":
        """The candidate with some flags set."""
        given = {**dict(self.flags), **{name: str(value) for name, value in more.items()}}
        return self._replace(flags=tuple(sorted(given.items())))

    def command(self) -> List[str]:
        """The words that start train.py, without those that all candidates share."""
        python = sys.executable
        if ROOT in pathlib.Path(python).parents:
            python = os.path.relpath(python)
        start = [python, os.path.relpath(ROOT / "train.py")]
        if self.mode() == "ps":
            cluster = os.path.relpath(ROOT / "scripts" / "local_cluster.py")
            start = [python, cluster, f"--num_workers={self.processes - 1}", "--"]
        elif self.processes:
            horovodrun = os.path.join(os.path.dirname(python), "horovodrun")
            start = [horovodrun, "-np", str(self.processes), *start]
        return [
            *([f"LD_PRELOAD={self.preload}"] if self.preload else []),
            *(["CUDA_VISIBLE_DEVICES=-1"] if self.cpus_only else []),
            *start,
            *(f"--{name}={value}" for name, value in self.flags),
        ]  # fmt: skip

    def mode(self) -> str:
        """Its --distribution."""
        return dict(self.flags).get("distribution", "local")

    def batch(self, default: int) -> int:
        """Its global batch."""
        return int(dict(self.flags).get("global_batch_size", default))

    def label(self) -> str:
        """Its name in tables."""
        given = dict(self.flags)
        parts = [given.pop("distribution", "local")]
        if self.processes:
            parts[0] += f" × {self.processes}"
        parts += ["no GPU"] if self.cpus_only else []
        names = {
            "replicas_per_process": "replicas", "intra_op_threads": "intra",
            "inter_op_threads": "inter", "num_parallel_reads": "reads",
            "num_parsers": "parsers", "prefetch_batches": "prefetched",
            "global_batch_size": "batch", "omp_num_threads": "OMP", "kmp_affinity": "KMP",
        }  # fmt: skip
        parts += [f"{names.get(name, name)} {value}" for name, value in given.items()]
        parts += [pathlib.Path(self.preload).name.split(".")[0]] if self.preload else []
        return ", ".join(parts)


class Run(NamedTuple):
    """A run of a candidate: its rung of the ladder, examples/s (0: it failed), report.json, and
    its error if it failed."""

    candidate: Candidate
    rung: str
    rate: float
    report: dict
    failure: str = ""


class Machine(NamedTuple):
    """What there is to use: CPU cores, GPUs, whether TensorFlow has MKL, an allocator to try."""

    cores: int
    gpus: int
    mkl: bool
    allocator: str


def this_machine() -> Machine:
    """Looks at this machine."""
    program = (
        "from deepfm.runtime.utilization import cores, has_mkl;print(int(cores()), int(has_mkl()))"
    )
    cores, mkl = map(int, run_command(sys.executable, "-c", program).stdout.split()[-2:])
    listed = subprocess.getoutput("nvidia-smi -L").splitlines()  # or an error message
    gpus = sum(line.startswith("GPU ") for line in listed)
    allocator = find_library("tcmalloc_minimal") or find_library("tcmalloc") or ""
    return Machine(max(cores, 1), gpus, bool(mkl), allocator)


def threads(machine) -> List[Candidate]:
    """Threads inside an operator × operators side by side, many before few."""
    halves = sorted({1, max(machine.cores // 2, 1), machine.cores})
    found = [
        Candidate().with_flags(intra_op_threads=a, inter_op_threads=b)
        for a, b in itertools.product(halves[::-1], halves[::-1])
        if (a, b) != (max(machine.cores // 2, 1), machine.cores)  # the default
    ]
    if machine.mkl:
        names = "intra_op_threads", "inter_op_threads", "omp_num_threads"
        found[:0] = [  # as the article's scripts
            Candidate().with_flags(**dict.fromkeys(names, n), kmp_affinity="verbose,disabled")
            for n in halves[:-3:-1]
        ]
        affinities = ("granularity=fine,compact,1,0", "disabled")
        found += [
            Candidate().with_flags(omp_num_threads=n, kmp_affinity=affinity)
            for n, affinity in itertools.product(halves, affinities)
        ]
    return found


def devices(machine, modes: Sequence[str], best: Candidate, batch: int) -> List[Candidate]:
    """More devices and processes of this host, which divide the batch among them; many before few,
    and each mode in turn; and, where there are GPUs, the same on its CPUs alone."""
    there = machine.gpus or machine.cores
    counts = sorted({n for n in (2, there // 2, there - 1, there) if 1 < n <= there}, reverse=True)
    found = []
    for n in (n for n in counts if batch % n == 0):
        for mode in modes:
            if mode in ("tower", "mirrored"):
                more = best.with_flags(distribution=mode, replicas_per_process=n)
                reductions = ("nccl", "reduction_to_one_device") * (mode == "mirrored")
                by = [more.with_flags(cross_device_ops=name) for name in reductions if machine.gpus]
                found += by or [more]
            elif mode == "horovod" or not machine.gpus:  # workers would share each GPU
                share = max(machine.cores // n, 1)
                flags = tuple(f for f in best.flags if not f[0].endswith("_threads"))
                alone = best._replace(flags=flags, processes=n)
                omp = {"omp_num_threads": share} if machine.mkl else {}
                alone = alone.with_flags(distribution=mode, inter_op_threads=share, **omp)
                halves = sorted({share, max(share // 2, 1)})
                found += [alone.with_flags(intra_op_threads=a) for a in halves]
    if "mirrored" in modes:
        found.append(best.with_flags(distribution="mirrored", replicas_per_process=1))
    if machine.gpus:
        flags = tuple(f for f in best.flags if f[0] != "use_amp")
        alone = best._replace(flags=flags, cpus_only=True)
        found += [alone, *devices(machine._replace(gpus=0), modes, alone, batch)]
    return found


def inputs(machine) -> List[Dict[str, int]]:
    """Flags to try where training waits for its input: reads, parsers, and batches kept."""
    parsers = (machine.cores, max(machine.cores // 4, 1))
    kept = [{"num_parsers": n, "prefetch_batches": 4 * n} for n in dict.fromkeys(parsers)]
    return [{"num_parallel_reads": 8}, *kept, {"num_parallel_reads": 2}, {"num_parallel_reads": 1}]
