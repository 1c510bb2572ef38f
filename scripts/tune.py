"""Finds the flags with which train.py is fastest on this machine, for your data and model.

    .venv/bin/python scripts/tune.py -- --training_data_dir=data/train
    .venv/bin/python scripts/tune.py --budget_minutes=30 --global_batch_sizes=1024,4096 -- \\
        --training_data_dir=data/train --embedding_size=16

The flags after `--` are train.py's. Short runs climb a ladder: the threads of one process, its
memory allocator and its reading of records, then more devices and processes of this host. On each
rung, all candidates run in turn; the worst are dropped after one run, the others run again. All
train on batches of the same size, unless --global_batch_sizes allows others. At the end the best
and the default run in turn, and the best is recommended only if it was faster.

The search keeps --budget_minutes: it begins no run that, judging by earlier ones, would not end in
time. If the time is short, each rung gets a share of it and tries its first candidates; the output
names what was left out. A budget in which nothing could be compared is refused after the first run.

The output is the command to use, the reason, what to try next, and a table of all runs, with the
cost of a million examples if --price_per_hour is among train.py's flags.
"""

import contextlib
import json
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, Tuple

import programs  # first
from programs import BadInput, check_list, need, program, run_program, training_flags, write_files

# isort: split
from absl import flags, logging
from tables_and_plots import markdown
from tune_candidates import Candidate, Run, devices, inputs, this_machine, threads

_MODES = ["tower", "mirrored", "horovod", "ps"]
FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_float("budget_minutes", 15, "Minutes that the whole search may take.", 0.1)
flags.DEFINE_float("seconds", 4,
    "Seconds of training in a short run, without its start and end; raise it if rates vary.", 0.5)
flags.DEFINE_list("global_batch_sizes", [],
    "Global batch sizes (records) to try too. Default: only that of train.py's flags.")
flags.DEFINE_list("modes", _MODES, "Modes of distribution to try besides local; may be empty.")
flags.DEFINE_string("output_dir", "tune", "Folder for tune.json.")
# fmt: on

# Flags of train.py that tune.py sets.
_OURS = (
    "distribution", "replicas_per_process", "intra_op_threads", "inter_op_threads", "use_amp",
    "omp_num_threads", "kmp_affinity", "num_parallel_reads", "num_parsers", "prefetch_batches",
    "model_dir", "checkpoint_dir",
    "max_steps", "num_epochs", "clear_existing_model", "servable_model_dir", "val_data_dir",
    "task_type", "export", "eval_every_steps", "early_stopping_patience", "save_checkpoints_secs",
    "save_checkpoints_steps", "learning_rate_decay_on_plateau", "learning_rate_decay_patience",
    "dist_mode", "num_threads", "ps_hosts", "cross_device_ops", "export_format",
)  # fmt: skip
_FEW = 100  # steps of the first run, which determines the length of the others; for a verdict
_ENOUGH = 0.85  # share of a rung's best rate that earns a second run
_BETTER = 1.03  # times the best rate so far that another candidate has to reach
_WAITING = 0.05  # share of waiting for records from which on reading is tuned
_SLOWER = 4  # times its expected time, plus a minute, that a run may take
_OTHER_START = 1.5  # times what runs took to start, at most: the estimate for another candidate
_PAIRS = 3  # times that the best and the default run in turn at the end
_FOR_PAIRS = 0.4  # share of the time, at most, for more than one such pair
_CONCLUSION = 1.0  # seconds for the table


def main(arguments):
    need("psutil", "tensorflow")
    program.handle_signals(lambda number, _: sys.exit(128 + number))  # ends running processes
    check_list("modes", _MODES, may_be_empty=True)
    check_list("global_batch_sizes", may_be_empty=True)
    words, batch = _read(arguments[1:])
    end = time.monotonic() + 60 * FLAGS.budget_minutes - _CONCLUSION
    machine = this_machine()
    logging.info(
        "%d CPU cores, %d GPUs%s; global batch %d; at most %g minutes.",
        machine.cores, machine.gpus, ", MKL" if machine.mkl else "", batch, FLAGS.budget_minutes,
    )  # fmt: skip
    output = pathlib.Path(FLAGS.output_dir)
    program.make_output_dir(output)
    with tempfile.TemporaryDirectory(prefix="deepfm-tune-") as work:
        tuner = Tuner(words, pathlib.Path(work), batch, end)
        best, ratio, notes = _search(tuner, machine)
    _conclude(tuner, words, best, ratio, notes, output)


def _read(words) -> Tuple[List[str], int]:
    """(train.py's flags but the batch size, the global batch that they ask for)."""
    given = training_flags(words, _OURS, {"training_data_dir": "data/train"})
    sizes = {name: given.pop(name) for name in ("batch_size", "global_batch_size") if name in given}
    if len(sizes) == 2:
        raise BadInput("--batch_size and --global_batch_size are both given; leave one out.")
    for name, size in sizes.items():
        if not str(size).isdigit() or int(size) < 1:
            raise BadInput(f"--{name}={size} must be a number of records, such as 1024.")
    words = [f"--{name}={value}" for name, value in given.items()]
    return words, int(next(iter(sizes.values()), 1024))


class Tuner:
    """Runs candidates, and keeps what they did.

    Args:
        words: train.py's flags that all share.
        work: an empty folder.
        batch: the global batch that they ask for.
        end: when everything has to be done, on the clock of `now`.
    """

    def __init__(self, words: List[str], work: pathlib.Path, batch: int, end: float):
        self._words, self._work, self.batch, self.end = words, work, batch, end
        self._rate = 0.0  # examples/s of the default, from which the length of runs follows
        self._training = 0.0  # seconds of training in a run
        self._start = 0.0  # seconds that a run took, at most, beside its training
        self.runs: List[Run] = []
        self.left_out: List[Candidate] = []  # for which there was no time

    now = staticmethod(time.monotonic)

    def cost(self) -> float:
        """Seconds that a run will take, judging by earlier ones."""
        return _OTHER_START * self._start + self._training

    def run(self, candidate: Candidate, rung: str, end: float) -> Run:
        """Runs train.py once, for about --seconds of training; kills it at `end`."""
        began, limit = self.now(), end - self.now()
        if self.runs:
            limit = min(limit, 60 + _SLOWER * self.cost())
        steps = max(_FEW, round(FLAGS.seconds * self._rate / candidate.batch(self.batch)))
        report, failure = self.train(candidate, steps, limit)
        run = Run(candidate, rung, report.get("examples_per_second", 0.0), report, failure)
        if run.rate:
            training = report["training_seconds"]
            self._start = max(self._start, self.now() - began - training)
            self._training = self._training or max(training, FLAGS.seconds)
            self._rate = self._rate or run.rate
        self.runs.append(run)
        rate = f"{run.rate:,.0f}/s" if run.rate else f"failed ({failure[:100]})"
        left = max(self.end - self.now(), 0) / 60
        logging.info("%s: %s: %s; %.1f minutes left", rung, candidate.label(), rate, left)
        return run

    def train(self, candidate: Candidate, steps: int, limit: float) -> Tuple[dict, str]:
        """Runs train.py for `steps` steps: (report.json, "") or ({}, its error)."""
        folder = self._work / "model"
        words = (
            f"--global_batch_size={candidate.batch(self.batch)}", f"--model_dir={folder}",
            f"--max_steps={steps}", "--num_epochs=1000000", f"--save_checkpoints_secs={1 << 30}",
        )  # fmt: skip
        failure = _run(["env", *candidate.command(), *self._words, *words], limit)
        report = {} if failure else json.loads((folder / "report.json").read_text())
        shutil.rmtree(folder, ignore_errors=True)
        return report, failure

    def race(self, first: Candidate, others: List[Candidate], rung: str, end: float) -> Candidate:
        """The fastest of some candidates, which run until `end`; `first` if it is hardly slower."""
        others = [candidate for candidate in dict.fromkeys(others) if candidate != first]
        there_is_time = lambda runs=1: end - self.now() >= runs * self.cost()
        if not others or not there_is_time(2):
            self.left_out += others
            return first
        rates = {}
        for candidate in (first, *others):
            if there_is_time():
                rates[candidate] = [self.run(candidate, rung, end).rate]
            else:
                self.left_out.append(candidate)
        best = max(rate for (rate,) in rates.values())
        good = [c for c, (rate,) in rates.items() if rate > 0 and rate >= _ENOUGH * best]
        for candidate in good if len(good) > 1 else ():
            if there_is_time():
                rates[candidate].append(self.run(candidate, rung, end).rate)
        mean = {c: statistics.mean(filter(None, rates[c])) for c in good}  # 0: killed, or failed
        fastest = max(good, key=mean.get, default=first)
        return fastest if mean.get(fastest, 0) > _BETTER * mean.get(first, 0) else first

    def report_of(self, candidate: Candidate) -> dict:
        """report.json of the newest run of a candidate that succeeded."""
        return next((r.report for r in self.runs[::-1] if r.candidate == candidate and r.rate), {})


def _run(command, limit) -> str:
    """Runs a command; returns its error, or "". None of its processes outlives it."""
    import psutil

    lines = []
    process, reader = programs.start(command, lines.append)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return f"took more than {limit:.0f} s"
    finally:
        with contextlib.suppress(psutil.Error):
            if process.poll() is None:  # otherwise its number may be another one's by now
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
        programs.end([(process, reader)])
    return programs.reason(lines, code) if code else ""


def _rungs(tuner, machine):
    """[(name of a rung, function: the best candidate so far -> the rung's candidates)]."""
    sizes = [int(n) for n in FLAGS.global_batch_sizes]
    waits = lambda best: tuner.report_of(best).get("input_wait_share", 0.0) >= _WAITING
    allocators = [machine.allocator] if machine.allocator else []
    tried = {
        "threads": lambda best: threads(machine),
        "allocator": lambda best: [best._replace(preload=path) for path in allocators],
        "input": lambda best: [best.with_flags(**n) for n in inputs(machine) if waits(best)],
        "mixed precision": lambda best: [best.with_flags(use_amp=True)] * bool(machine.gpus),
        "batch": lambda best: [
            best.with_flags(global_batch_size=n) for n in sizes if n != tuner.batch
        ],
        "more devices": lambda best: devices(machine, FLAGS.modes, best, best.batch(tuner.batch)),
    }
    return list(tried.items())


def _climb(tuner, machine, end) -> Candidate:
    """The best candidate of the ladder; rungs share the time until `end` by their candidates."""
    best, rungs = Candidate(), _rungs(tuner, machine)
    for i, (rung, _) in enumerate(rungs):
        candidates, *later = (beside(best) for _, beside in rungs[i:])
        weight, *weights = (len(x) + 1 if x else 0 for x in (candidates, *later))
        share = weight / max(weight + sum(weights), 1)
        best = tuner.race(best, candidates, rung, tuner.now() + share * (end - tuner.now()))
    return best


def _search(tuner, machine) -> Tuple[Candidate, float, List[str]]:
    """(the best candidate, how many times as fast as the default it is, what was seen)."""
    default, notes = Candidate(), []
    first = tuner.run(default, "default", tuner.end)
    if not first.rate:
        more = "; raise --budget_minutes" if tuner.now() >= tuner.end else ""
        raise BadInput(f"train.py does not run with these flags: {first.failure}{more}")
    pairs = int(_FOR_PAIRS * (tuner.end - tuner.now()) / (2 * tuner.cost()))
    pairs = min(max(pairs, 1), _PAIRS)
    best = _climb(tuner, machine, tuner.end - pairs * 2 * tuner.cost())
    if len(tuner.runs) == 1 and tuner.left_out:
        budget = FLAGS.budget_minutes
        raise BadInput(
            f"--budget_minutes={budget:g} is too short to compare anything, as a run may "
            f"take {tuner.cost():.0f} s here; try --budget_minutes={2 * budget:g}."
        )
    if tuner.left_out:
        labels = [candidate.label() for candidate in tuner.left_out]
        notes.append(
            f"There was no time for {len(labels)} candidate(s) ({'; '.join(labels[:3])}"
            f"{', ...' if labels[3:] else ''}); a larger --budget_minutes tries more."
        )
    best, ratio = _compare(tuner, best, notes)
    return best, ratio, notes


def _compare(tuner, best, notes) -> Tuple[Candidate, float]:
    """Runs the best and the default in turn; (what to recommend, its rate over the default's)."""
    default, ratios = Candidate(), []
    for _ in range(_PAIRS if best != default else 0):
        if tuner.end - tuner.now() >= 2 * tuner.cost():
            pair = [tuner.run(candidate, "final", tuner.end).rate for candidate in (best, default)]
            ratios += [pair[0] / pair[1]] if all(pair) else []
    if best != default and tuner.runs[-1].rung != "final":
        notes.append(f"There was no time to run {best.label()} and the default again.")
    ratio = statistics.median(ratios) if ratios else 0.0
    return (best, ratio) if ratio > 1 else (default, 1.0)


def _conclude(tuner, words, best, ratio, notes, output):
    """Prints and writes what was found."""
    command = [*best.command(), *words]
    if "global_batch_size" not in dict(best.flags):
        command.append(f"--global_batch_size={tuner.batch}")
    result = {
        "command": " ".join(map(shlex.quote, command)),
        "flags": dict(best.flags),
        "processes": best.processes,
        "preload": best.preload,
        "times_the_default": ratio,
        "why": tuner.report_of(best).get("verdict", ""),
        "notes": notes,
        "runs": [
            {
                "rung": r.rung, "candidate": r.candidate.label(), "examples_per_second": r.rate,
                "failure": r.failure, **{name: r.report.get(name) for name in _SHOWN},
            }
            for r in tuner.runs
        ],
    }  # fmt: skip
    runs = {}  # candidate -> its runs, in the order in which they were tried
    for run in tuner.runs:
        runs.setdefault(run.candidate, []).append(run)
    write_files(output, {"tune.json": (json.dumps(result, indent=1) + "\n").encode()})
    times = f"{ratio:.2f} times as fast as the default"
    print(
        _table(runs, best), f"\n{result['why']}", *notes,
        f"\n{'The default is the best' if best == Candidate() else times}:\n",
        result["command"],
        f"\nAll runs: {output / 'tune.json'}.", sep="\n",
    )  # fmt: skip


_SHOWN = ("input_wait_share", "host_cpu_utilization", "gpu_utilization", "peak_rss_bytes")


def _table(runs: Dict[Candidate, List[Run]], best) -> str:
    """All candidates, fastest first, as a Markdown table."""
    cost, rows = "cost_per_million_examples", []  # reported with --price_per_hour
    priced = any(cost in run.report for tried in runs.values() for run in tried)
    percent = lambda x: "" if x is None else f"{100 * x:.0f} %"
    rate = lambda tried: statistics.median([run.rate for run in tried if run.rate] or [0.0])
    for candidate, tried in sorted(runs.items(), key=lambda item: -rate(item[1])):
        name = f"**{candidate.label()}**" if candidate == best else candidate.label()
        reports = [run.report for run in tried if run.rate]
        failed = len(tried) - len(reports)
        count = f"{len(tried)}, {failed} failed" if failed else str(len(tried))
        if reports:
            *shares, memory = map(reports[-1].get, _SHOWN)
            told = [*map(percent, shares), f"{(memory or 0) / 2**30:.1f} GiB"]
            told += [f"{reports[-1][cost]:.3g}"] if priced else []
            rows.append((name, f"{rate(tried):,.0f}", count, *told))
        else:
            rows.append((name, f"failed: {tried[-1].failure[:80]}", count, *[""] * (4 + priced)))
    titles = "candidate", "examples/s", "runs", "input wait", "CPU", "GPU", "memory"
    return markdown([*titles, *["cost of a million"] * priced], rows)


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
