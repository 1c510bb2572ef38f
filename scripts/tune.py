"""Finds the flags with which train.py is fastest on this machine, for a data set and a model.

    .venv/bin/python scripts/tune.py -- --training_data_dir=data/train
    .venv/bin/python scripts/tune.py --budget_minutes=30 --global_batch_sizes=1024,4096 -- \\
        --training_data_dir=data/train --embedding_size=16

What follows `--` are flags of train.py. Short runs climb a ladder: the threads of one process, its
memory allocator and its reading of records, then more devices and processes of this host; whether
more hosts are worth it is said at the end. On each rung all candidates run in turn; the worst are
left out after one run, the others run again. All train on batches of the same size, unless
--global_batch_sizes allows others. At the end the best and the default run in turn, and the best is
recommended only if it was faster.

Printed are the command to use, why, and a table of all runs; tune.json and tune.png are written to
--output_dir. --grid tries every combination instead, which takes long and shows what was missed.
"""

import contextlib
import ctypes.util
import itertools
import json
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Optional, Tuple

import psutil
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_float("budget_minutes", 15, "Time that all runs together may take.", 0.1)
flags.DEFINE_float("seconds", 4, "Training time of a short run; start and end come on top.", 0.5)
flags.DEFINE_list("global_batch_sizes", [], "Also tried; default: that of train.py's flags alone.")
flags.DEFINE_list("modes", ["tower", "mirrored", "horovod"], "Modes that are tried beside local.")
flags.DEFINE_string("output_dir", "tune", "Where tune.json and tune.png go.")
flags.DEFINE_bool("grid", False, "Try all combinations, at full length.")

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Flags of train.py that tune.py sets.
_OURS = (
    "distribution", "replicas_per_process", "intra_op_threads", "inter_op_threads", "use_amp",
    "omp_num_threads", "kmp_affinity", "num_parallel_reads", "model_dir", "checkpoint_dir",
    "max_steps", "num_epochs", "clear_existing_model", "servable_model_dir", "val_data_dir",
    "task_type", "export", "eval_every_steps", "early_stopping_patience", "save_checkpoints_secs",
    "save_checkpoints_steps", "learning_rate_decay_on_plateau",
)  # fmt: skip
_FEW = 60  # steps of the first run, from which the length of the others follows
_ENOUGH = 0.85  # of the best rate of a rung, for a second run
_BETTER = 1.03  # times the rate of the best so far that another one has to have
_BUSY = 0.85  # share of the CPU from which on a host is used up
_WAITING = 0.05  # share of waiting for records from which on reading is tuned
_SLOWER = 4  # times the training time of the best that a run may take


class BadInput(Exception):
    """What the user has to mend, in a sentence."""


class Candidate(NamedTuple):
    """A way to start train.py.

    Attributes:
        flags: ((name, value), ...) that are not the default's.
        processes: of horovodrun, 0 without it.
        preload: a library that replaces the memory allocator, or "".
    """

    flags: Tuple[Tuple[str, str], ...] = ()
    processes: int = 0
    preload: str = ""

    def with_flags(self, **more) -> "Candidate":
        """The candidate with some flags set."""
        given = {**dict(self.flags), **{name: str(value) for name, value in more.items()}}
        return self._replace(flags=tuple(sorted(given.items())))

    def command(self) -> List[str]:
        """The words that start train.py, without what is the same for all."""
        python = os.path.relpath(sys.executable) if _inside(sys.executable) else "python"
        env = [f"LD_PRELOAD={self.preload}"] if self.preload else []
        launcher = []
        if self.processes:
            horovodrun = os.path.join(os.path.dirname(python), "horovodrun")
            launcher = [horovodrun, "-np", str(self.processes)]
        return [*env, *launcher, python, os.path.relpath(ROOT / "train.py"), *self.words()]

    def words(self) -> List[str]:
        """The flags as words."""
        return [f"--{name}={value}" for name, value in self.flags]

    def label(self) -> str:
        """What tables call it."""
        given = dict(self.flags)
        parts = [given.pop("distribution", "local")]
        if self.processes:
            parts[0] += f" × {self.processes}"
        names = {
            "replicas_per_process": "replicas", "intra_op_threads": "intra",
            "inter_op_threads": "inter", "num_parallel_reads": "reads",
            "global_batch_size": "batch", "omp_num_threads": "OMP", "kmp_affinity": "KMP",
        }  # fmt: skip
        parts += [f"{names.get(name, name)} {value}" for name, value in given.items()]
        parts += [pathlib.Path(self.preload).name.split(".")[0]] if self.preload else []
        return ", ".join(parts)


class Run(NamedTuple):
    """A run of a candidate: its rung of the ladder, examples/s (0: it failed), report.json, and
    what it said where it failed."""

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


def _inside(path):
    return str(path).startswith(str(ROOT) + os.sep)


def main(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    try:
        words = arguments[1:]
        _check(words)
        _tune(words)
    except BadInput as error:
        print(f"tune.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _check(words):
    """Refuses flags that cannot be."""
    names = {word.lstrip("-").split("=")[0] for word in words if word.startswith("-")}
    if not names & {"training_data_dir"}:
        raise BadInput("--training_data_dir is missing: tune.py -- --training_data_dir=data/train")
    for name in sorted(names):
        if name in _OURS or name.startswith("no") and name[2:] in _OURS:
            raise BadInput(f"--{name} is set by tune.py itself; leave it out.")
    if {"batch_size", "global_batch_size"} <= names:
        raise BadInput("--batch_size and --global_batch_size are both given; leave one out.")
    for mode in FLAGS.modes:
        if mode not in ("tower", "mirrored", "horovod"):
            raise BadInput(f"--modes: {mode!r} is none of tower, mirrored, horovod.")
    for size in FLAGS.global_batch_sizes:
        if not size.isdigit() or int(size) < 1:
            raise BadInput(f"--global_batch_sizes: {size!r} is no number of records, like 4096.")


def _without_batch_size(words) -> Tuple[List[str], int]:
    """(train.py's flags but the batch size, the global batch that they ask for)."""
    kept, size, words = [], "1024", list(words)
    while words:
        word = words.pop(0)
        name, _, value = word.lstrip("-").partition("=")
        if name not in ("batch_size", "global_batch_size"):
            kept.append(word)
            continue
        size = value or (words.pop(0) if words else "")
        if not size.isdigit() or int(size) < 1:
            raise BadInput(f"--{name}={size} is no number of records, like 1024.")
    return kept, int(size)


def _machine() -> Machine:
    """Looks at this machine."""
    program = (
        "from deepfm.utilization import cores; from tensorflow.python import pywrap_tensorflow;"
        "print(int(cores()), int(pywrap_tensorflow.IsMklEnabled()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cores, mkl = map(int, done.stdout.split()[-2:])
    gpus = 0
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        gpus = done.stdout.count("GPU ") if done.returncode == 0 else 0
    name = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    return Machine(max(cores, 1), gpus, bool(mkl), _path_of(name) if name else "")


def _path_of(library) -> str:
    """The path of a shared library that the loader finds by name."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(library)
        with open("/proc/self/maps") as maps:
            return next((line.split()[-1] for line in maps if library in line), "")
    return ""


class Tuner:
    """Runs candidates, and keeps what they did.

    Args:
        words: train.py's flags that all share.
        work: an empty folder.
    """

    def __init__(self, words: List[str], work: pathlib.Path):
        self._words, self._work = words, work
        self._end = time.time() + 60 * FLAGS.budget_minutes
        self._longest = 0.0  # seconds that a run took
        self.runs: List[Run] = []
        self.steps_rate = 0.0  # examples/s from which the length of runs follows
        self.batch = 0
        self.out_of_time = False

    def has_time(self) -> bool:
        """Whether one more run fits into the budget."""
        left = self._end - time.time() > self._longest
        self.out_of_time |= not left
        return left

    def run(self, candidate: Candidate, rung: str, seconds: float) -> Run:
        """Runs train.py once, for about so many seconds of training."""
        batch = int(dict(candidate.flags).get("global_batch_size", self.batch))
        steps = max(_FEW, round(seconds * self.steps_rate / batch))
        folder = self._work / "model"
        command = [
            *(["horovodrun", "-np", str(candidate.processes)] if candidate.processes else []),
            sys.executable, str(ROOT / "train.py"), *self._words,
            f"--global_batch_size={self.batch}", *candidate.words(), f"--model_dir={folder}",
            "--clear_existing_model", f"--max_steps={steps}", "--num_epochs=1000000",
            f"--save_checkpoints_secs={1 << 30}",
        ]  # fmt: skip
        env = dict(os.environ)
        env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + env["PATH"]
        if candidate.preload:
            env["LD_PRELOAD"] = candidate.preload
        began = time.time()
        limit = 60 + 2 * self._longest + _SLOWER * seconds if self._longest else 3600
        code, said = _run(command, env, limit)
        self._longest = max(self._longest, time.time() - began)
        report = {}
        if code == 0:
            report = json.loads((folder / "report.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
        found = Run(candidate, rung, report.get("examples_per_second", 0.0), report, said)
        self.runs.append(found)
        best = max(self.runs, key=lambda run: run.rate)
        _show(self, found, best)
        return found

    def race(self, candidates: List[Candidate], rung: str) -> Optional[Candidate]:
        """The fastest of some candidates, the first where others are hardly faster.

        None where there was no time for any, or none ran.
        """
        rates = {}
        for candidate in dict.fromkeys(candidates):
            if self.has_time():
                rates[candidate] = [self.run(candidate, rung, FLAGS.seconds).rate]
        if not rates:
            return None
        best = max(r for (r,) in rates.values())
        good = [c for c, (rate,) in rates.items() if rate > 0 and rate >= _ENOUGH * best]
        for candidate in good if len(good) > 1 else ():
            if self.has_time():
                rates[candidate].append(self.run(candidate, rung, 2 * FLAGS.seconds).rate)
        if not good:
            return None
        first = candidates[0]
        mean = {c: statistics.mean(rates[c]) for c in good}
        fastest = max(good, key=mean.get)
        return fastest if mean[fastest] > _BETTER * mean.get(first, 0) else first

    def report_of(self, candidate: Candidate) -> dict:
        """report.json of the newest run of a candidate that succeeded."""
        return next((r.report for r in self.runs[::-1] if r.candidate == candidate and r.rate), {})


def _run(command, env, limit) -> Tuple[int, str]:
    """Runs a command; (its exit code, the last line it said). None of its processes outlives it."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return 1, f"took more than {limit:.0f} s"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    return code, "" if code == 0 else next(
        (line for line in lines if "train.py: " in line),
        lines[-1] if lines else f"exit code {code}",
    )


def _show(tuner, run, best):
    """One more run is done: a bar in a terminal, a line elsewhere."""
    rate = f"{run.rate:,.0f}/s" if run.rate else f"failed ({run.failure[:100]})"
    if not sys.stderr.isatty():
        logging.info("%s: %s: %s", run.rung, run.candidate.label(), rate)
        return
    spent = 1 - max(tuner._end - time.time(), 0) / (60 * FLAGS.budget_minutes)
    bar = "#" * round(20 * min(spent, 1))
    line = f"[{bar:<20}] {len(tuner.runs)} runs, best {best.rate:,.0f}/s ({best.candidate.label()})"
    sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()


def _threads(machine) -> List[Candidate]:
    """Threads inside an operator × operators side by side."""
    halves = sorted({1, max(machine.cores // 2, 1), machine.cores})
    found = [
        Candidate().with_flags(intra_op_threads=a, inter_op_threads=b)
        for a, b in itertools.product(halves, halves)
        if (a, b) != (max(machine.cores // 2, 1), machine.cores)  # the default
    ]
    if machine.mkl:
        affinities = ("granularity=fine,compact,1,0", "disabled")
        found += [
            Candidate().with_flags(omp_num_threads=n, kmp_affinity=affinity)
            for n, affinity in itertools.product(halves, affinities)
        ]
    return found


def _modes(machine, best: Candidate, batch: int) -> List[Candidate]:
    """More devices and processes of this host, each of which takes its part of a batch."""
    there = machine.gpus or machine.cores
    counts = sorted({n for n in (2, there // 2, there - 1, there) if 1 < n <= there})
    counts = [n for n in counts if batch % n == 0]
    found = []
    for mode in FLAGS.modes:
        if mode in ("tower", "mirrored"):
            found += [
                best.with_flags(distribution=mode, replicas_per_process=n)
                for n in ([1] if mode == "mirrored" else []) + counts
            ]
        if mode == "horovod":
            for n in counts:
                share = max(machine.cores // n, 1)
                alone = best._replace(
                    flags=tuple(f for f in best.flags if "op_threads" not in f[0]), processes=n
                )
                threads = {(share, share), (max(share // 2, 1), share)}
                found += [
                    alone.with_flags(distribution="horovod", intra_op_threads=a, inter_op_threads=b)
                    for a, b in sorted(threads)
                ]
    return found


def _grid(machine, batch, batches) -> List[Candidate]:
    """Every combination."""
    starts = [Candidate(), *_threads(machine)]
    if machine.allocator:
        starts += [start._replace(preload=machine.allocator) for start in starts]
    starts = [s.with_flags(num_parallel_reads=n) for s in starts for n in (1, 4, 8)]
    starts = [s.with_flags(global_batch_size=n) if n else s for s in starts for n in batches]
    found = list(starts)
    for start in starts:
        found += _modes(machine, start, int(dict(start.flags).get("global_batch_size", batch)))
    return list(dict.fromkeys(found))


def _climb(tuner, machine) -> Tuple[Candidate, List[str]]:
    """Climbs the ladder; (the best candidate, what was seen on the way)."""
    best, notes = Candidate(), []

    def race(rung, candidates):
        nonlocal best
        best = tuner.race([best, *candidates], rung) or best

    race("threads", _threads(machine))
    if machine.allocator:
        race("allocator", [best._replace(preload=machine.allocator)])
    report = tuner.report_of(best)
    wait = report.get("input_wait_share", 0.0)
    if wait >= _WAITING:
        race("input", [best.with_flags(num_parallel_reads=n) for n in (1, 2, 8)])
    else:
        notes.append(f"Input waits {100 * wait:.0f} % only, so reading was not tuned.")
    if machine.gpus:
        race("mixed precision", [best.with_flags(use_amp=True)])
    sizes = [int(n) for n in FLAGS.global_batch_sizes if int(n) != tuner.batch]
    if sizes:
        race("batch", [best.with_flags(global_batch_size=n) for n in sizes])
    batch = int(dict(best.flags).get("global_batch_size", tuner.batch))
    report = tuner.report_of(best)
    busy = report.get("gpu_utilization") or report.get("host_cpu_utilization", 0.0)
    what = "GPUs" if machine.gpus else f"{machine.cores} CPU cores"
    notes.append(f"One process keeps the {what} {100 * busy:.0f} % busy.")
    race("more devices", _modes(machine, best, batch))
    return best, notes


def _tune(words):
    words, batch = _without_batch_size(words)
    machine = _machine()
    logging.info(
        "%d CPU cores, %d GPUs%s; global batch %d; at most %g minutes.",
        machine.cores, machine.gpus, ", MKL" if machine.mkl else "", batch, FLAGS.budget_minutes,
    )  # fmt: skip
    output = pathlib.Path(FLAGS.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output_dir={output} cannot be made: {error.strerror}.") from error
    with tempfile.TemporaryDirectory(prefix="deepfm-tune-") as work:
        tuner = Tuner(words, pathlib.Path(work))
        tuner.batch = batch
        first = tuner.run(Candidate(), "default", 0)
        if not first.rate:
            raise BadInput(f"train.py does not run with these flags: {first.failure}")
        tuner.steps_rate = first.rate
        if FLAGS.grid:
            sizes = [int(n) for n in FLAGS.global_batch_sizes] or [0]
            best, notes = tuner.race(_grid(machine, batch, sizes), "grid") or Candidate(), []
        else:
            best, notes = _climb(tuner, machine)
        best, ratio = _compare(tuner, best)
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    _conclude(tuner, words, machine, best, ratio, notes, output)


def _compare(tuner, best) -> Tuple[Candidate, float]:
    """Runs the best and the default in turn; (what to recommend, its rate over the default's)."""
    default, ratios = Candidate(), []
    if best == default:
        return default, 1.0
    for _ in range(3):
        pair = [tuner.run(c, "final", 2 * FLAGS.seconds).rate for c in (best, default)]
        if all(pair):
            ratios.append(pair[0] / pair[1])
    ratio = statistics.median(ratios) if ratios else 0.0
    return (best, ratio) if ratio > 1 else (default, 1.0)


def _conclude(tuner, words, machine, best, ratio, notes, output):
    """Prints and writes what was found."""
    report = tuner.report_of(best)
    table = _table(tuner.runs, best)
    batch = dict(best.flags).get("global_batch_size", tuner.batch)
    command = [*best.command(), *words]
    if "global_batch_size" not in dict(best.flags):
        command.append(f"--global_batch_size={batch}")
    notes = [*notes, *_advice(report, machine, tuner)]
    found = {
        "command": " ".join(map(shlex.quote, command)),
        "flags": dict(best.flags),
        "processes": best.processes,
        "preload": best.preload,
        "times_the_default": ratio,
        "why": report.get("verdict", ""),
        "notes": notes,
        "runs": [
            {
                "rung": r.rung, "candidate": r.candidate.label(), "examples_per_second": r.rate,
                "failure": r.failure, **{name: r.report.get(name) for name in _SHOWN},
            }
            for r in tuner.runs
        ],
    }  # fmt: skip
    for name, content in (
        ("tune.json", (json.dumps(found, indent=1) + "\n").encode()),
        ("tune.png", _plot(tuner.runs, best)),
    ):
        (output / f".{name}").write_bytes(content)
        os.replace(output / f".{name}", output / name)
    print(table)
    print(f"\n{found['why']}")
    print("\n".join(notes))
    if best == Candidate():
        print("\nThe default is the best:\n")
    else:
        print(f"\n{ratio:.2f} times as fast as the default:\n")
    print(found["command"])
    print(f"\nAll runs: {output / 'tune.json'}, plotted in {output / 'tune.png'}.")


_SHOWN = ("input_wait_share", "host_cpu_utilization", "gpu_utilization", "peak_rss_bytes")


def _advice(report, machine, tuner) -> List[str]:
    """Whether the next rung of the ladder is worth it."""
    busy = report.get("gpu_utilization") or report.get("host_cpu_utilization", 0.0)
    found = []
    if tuner.out_of_time:
        found.append("The time was up before all was tried; --budget_minutes gives more.")
    if busy >= _BUSY:
        found.append(
            f"This host is used up ({100 * busy:.0f} %): the next rung is worth it, a larger host "
            "and then more of them (parameter servers or Horovod)."
        )
    else:
        found.append(
            f"This host is {100 * busy:.0f} % busy: a larger batch, or a host with fewer and "
            "faster cores, comes before more hosts."
        )
    return found


def _table(runs, best) -> str:
    """All candidates, fastest first, as a Markdown table."""
    by = {}
    for run in runs:
        by.setdefault(run.candidate, []).append(run)
    lines = ["| candidate | examples/s | runs | input wait | CPU | GPU | memory |"]
    lines.append("|---|---|---|---|---|---|---|")
    percent = lambda x: "" if x is None else f"{100 * x:.0f} %"
    for candidate, found in sorted(by.items(), key=lambda item: -_rate(item[1])):
        report = found[-1].report
        name = f"**{candidate.label()}**" if candidate == best else candidate.label()
        if not _rate(found):
            lines.append(f"| {name} | failed: {found[-1].failure[:80]} | {len(found)} | | | | |")
            continue
        lines.append(
            f"| {name} | {_rate(found):,.0f} | {len(found)} | "
            f"{percent(report.get('input_wait_share'))} | "
            f"{percent(report.get('host_cpu_utilization'))} | "
            f"{percent(report.get('gpu_utilization'))} | "
            f"{report.get('peak_rss_bytes', 0) / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def _rate(runs) -> float:
    return statistics.median(run.rate for run in runs)


def _plot(runs, best) -> bytes:
    """A bar for each candidate, in the order in which they were tried."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by: Dict[Candidate, List[Run]] = {}
    for run in runs:
        by.setdefault(run.candidate, []).append(run)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(by)), dpi=110)
    names = [candidate.label() for candidate in by]
    colors = ["tab:orange" if candidate == best else "tab:blue" for candidate in by]
    axes.barh(range(len(by)), [_rate(found) for found in by.values()], color=colors)
    for i, found in enumerate(by.values()):
        axes.plot([r.rate for r in found], [i] * len(found), "k.", markersize=4)
    axes.set_yticks(range(len(by)))
    axes.set_yticklabels(names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="examples/s (dots: single runs; orange: recommended)")
    figure.tight_layout()
    with io.BytesIO() as out:
        figure.savefig(out, format="png")
        pyplot.close(figure)
        return out.getvalue()


if __name__ == "__main__":
    app.run(main)
