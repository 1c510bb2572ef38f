"""Measures training and inference against what they replace.

    .venv/bin/python scripts/benchmark.py
    .venv/bin/python scripts/benchmark.py --what=training --feature_sizes=117581,1000000 --rounds=3
    .venv/bin/python scripts/benchmark.py --what=training,inference --output_dir=benchmark

Each pair runs in turn, `--rounds` times, and its ratio is the median of the rounds' ratios: on a
shared machine, you can trust a ratio and not a single time.

Training is `train.py` as its user runs it, with the default flags, against the article's
configuration (--lazy_updates=false --l2_scope=table). Where `scripts/setup.sh --peers` has made
.venv-peers, training, inference and prepare also run against a careful user's PyTorch, onnxruntime,
TensorFlow 2.x, pandas and Polars (peers.py). Inference is measured from files
to predictions, without its start. What a step costs depends on the share of a batch's (field, id)
pairs that are distinct; by default, the data repeats as Criteo's log does.

Each mode runs against one process on one core, each row of the article's table against its first.
What fails is listed below the table, and the exit code is 1. Of accuracy, a round is a seed.

It prints the Markdown tables of the pages; --output_dir stores the figures as JSON, with the last
report of each program. --write_pages puts the figures into README and docs.
"""

import json
import math
import os
import pathlib
import statistics
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import programs  # first
from programs import program

# isort: split
import pages
from absl import flags, logging
from measures import MEASURES

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_list("what", ",".join(MEASURES), "What to measure; the default is all there is.")
flags.DEFINE_integer("rounds", 3, "How often each pair is measured; more on a busy machine.", 1)
flags.DEFINE_list("feature_sizes", "117581,1000000,10000000",
    "Numbers of feature ids to measure with; article takes the first, accuracy none.")
flags.DEFINE_integer("rows", 400000, "Training records to generate; more make runs longer.", 10000)
flags.DEFINE_string("output_dir", None, "Folder for benchmark.json. Default: none.")
flags.DEFINE_bool("write_pages", False,
    "Replace what docs/figures.json holds of each measure, and the figures in README and docs.")
# fmt: on


def main(_):
    programs.check_list("what", MEASURES)
    programs.check_list("feature_sizes")
    if FLAGS.output_dir:
        program.make_output_dir(FLAGS.output_dir)
    figures = {}
    with tempfile.TemporaryDirectory() as work:
        for what in FLAGS.what:
            measured = MEASURES[what](pathlib.Path(work))
            pairs = list(measured) if what == "accuracy" else [_in_turn(*x) for x in measured]
            words = [f"--what={what}", *_shaping()]
            figures[what] = pages.figures_of(pairs, FLAGS.rounds, words)
            print(pages.table({what: figures[what]}), flush=True)
            if FLAGS.write_pages:
                pages.keep(what, figures[what])
    pairs = [pair for of_measure in figures.values() for pair in of_measure["pairs"]]
    failed = [(pair, reason) for pair in pairs for reason in pair.get("failed", ())]
    for pair, reason in failed:
        print(f"{pair['row']}, {pair['column']}: {reason}")
    if FLAGS.output_dir:
        content = {"benchmark.json": json.dumps(figures, indent=1).encode()}
        programs.write_files(pathlib.Path(FLAGS.output_dir), content)
    return bool(failed)


def _shaping():
    """The words of this command that decide what is measured."""
    given = [FLAGS[x] for x in ("rounds", "feature_sizes", "rows")]
    return [f"--{x.name}={x.serialize().partition('=')[2]}" for x in given if x.present]


def _in_turn(row, column, ours, other_name, other):
    """The figure of two functions, run in turn; each returns a report.json."""
    pairs = []
    for i in range(FLAGS.rounds):
        pairs.append((_tried(ours), _tried(other)))
        a, b = (report["examples_per_second"] for report in pairs[-1])
        logging.info("%s, %s, round %d: %.1f/s, %s %.1f/s", row, column, i + 1, a, other_name, b)
    sides = [[report for report in side if "failed" not in report] for side in zip(*pairs)]
    rates = [[report["examples_per_second"] for report in side] for side in zip(*pairs)]
    return {
        "row": row,
        "column": column,
        "other_name": other_name,
        "ours": statistics.median(rates[0]),
        "other": statistics.median(rates[1]),
        "ratios": [a / b for a, b in zip(*rates)],
        "cpu": [statistics.median(map(_cpu_seconds_per_million, side)) for side in sides if side],
        "reports": [side[-1] for side in sides if side],
        "failed": sorted({run["failed"] for pair in pairs for run in pair if "failed" in run}),
    }


def _cpu_seconds_per_million(report):
    cores = len(os.sched_getaffinity(0))
    return 1e6 * cores * report["cpu_utilization"] / report["examples_per_second"]


def _tried(run):
    """What run() returns; if a program has failed, the reason, without a rate."""
    try:
        return run()
    except SystemExit as error:
        command, *lines = str(error).splitlines()
        code = command.rpartition(": ")[2]
        reasons = [f"{code}: {line}" for line in lines if "train.py: " in line]
        return {"examples_per_second": math.nan, "failed": (reasons or [command])[0]}


if __name__ == "__main__":
    programs.run_program(main)
