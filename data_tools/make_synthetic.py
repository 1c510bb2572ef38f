"""Writes learnable LibSVM data, of any size, with a known best possible AUC.

    python -m data_tools.make_synthetic --output_dir=DIR --train_rows=1000000 --feature_size=10000

A row looks like Criteo's, `label id:value ... id:value`, one pair per field; planted_model.py says
how it is drawn. Ids start at 1, because id 0 is for padding; a table needs --feature_size rows.

The probability of each label is known, and so are the AUC and the log loss that no model can beat.
DIR/synthetic.json holds the flags that shape the data and, for each split, files, rows, positives,
positive_rate, mean_probability, best_auc (null if all labels are the same) and best_log_loss.

A longer split begins with the rows of a shorter one.

With --days, it writes tables instead, as the logs of a shop: DIR/day-001.csv ... and columns.json
for prepare. Categories are born and die, and weights drift (days_of_rows.py); synthetic.json has an
entry for each day, with `new`, the number of categories that no day before has had.
"""

import dataclasses
import json
import os
import re
import time

from data_tools.common import check_python  # noqa: F401  says what to do if absl is missing

# isort: split
import numpy as np
from absl import logging

from data_tools.common import command_line, publishing
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.days_of_rows import LABEL, columns, each_day, table
from data_tools.common.days_of_rows import to_lines as csv_lines
from data_tools.common.planted_model import (
    BLOCK_ROWS,
    LEVELS,
    SPLITS,
    VALUE_STEPS,
    Shape,
    draw_block,
    least_feature_size,
    make_planted_model,
)
from data_tools.common.progress import Progress
from data_tools.libsvm.line_format import line_writer
from deepfm.errors import BadInput

SHAPE = Shape()  # the default
SUMMARY, COLUMNS = "synthetic.json", "columns.json"
OUTPUT = re.compile(r"(train|val|test)(-\d{5}-of-\d{5})?\.libsvm|day-\d{3}(-\d{5}-of-\d{5})?\.csv")


def _rows(split, default):
    return flag(f"Rows of the {split} split; 0: do not write it.", default, lower_bound=0)


@dataclasses.dataclass(frozen=True)
class SyntheticOptions:
    """The flags, as plain values."""

    # fmt: off
    output_dir: str = flag("Local directory for the files.", REQUIRED)
    train_rows: int = _rows("train", 1000000)
    val_rows: int = _rows("val", 100000)
    test_rows: int = _rows("test", 100000)
    seed: int = flag(
        "Random seed; the same seed and flags write the same bytes.",
        default=1, lower_bound=0, upper_bound=2**32 - 1)
    field_size: int = flag("Fields (id:value pairs) of each row.", SHAPE.field_size, lower_bound=1)
    numeric_fields: int = flag(
        "Fields with one id and a value in [0, 1], below --field_size; the others are categorical.",
        SHAPE.numeric_fields, lower_bound=0)
    feature_size: int = flag("Ids are below this number.", SHAPE.feature_size, lower_bound=1)
    positive_rate: float = flag(
        "Expected share of label 1.", SHAPE.positive_rate, lower_bound=0.01, upper_bound=0.99)
    rare: bool = flag(
        "Make ids more evenly popular, and rare ids as predictive as common ones. A model without "
        "regularization then overfits; use it to test regularization. Overrides --zipf.",
        SHAPE.rare)
    zipf: float = flag(
        "How steeply ids' popularity falls: P(rank) ~ rank^-zipf; not 1.",
        SHAPE.zipf, lower_bound=0)
    days: int = flag(
        "Write so many days of --train_rows rows each as tables, instead of splits; 0: splits.",
        default=0, lower_bound=0, upper_bound=999)
    new_ids_per_day: float = flag(
        "With --days, the share of each column's categories in whose place new ones come each day.",
        default=0.1, lower_bound=0.0, upper_bound=1.0)
    drift: float = flag(
        "With --days, how far weights move in a day: 0 not at all, 1 to others altogether.",
        default=0.0, lower_bound=0.0, upper_bound=1.0)
    overwrite: bool = flag("Replace all splits of an earlier run.", default=False)
    # fmt: on


def main(options: SyntheticOptions):
    command_line.this_host()
    write_data(options)


def write_data(options: SyntheticOptions):
    """Writes all splits and synthetic.json; no file gets its final name before all are complete.

    Args:
        options: the flags.

    Raises:
        BadInput: these flags make no data, or output_dir already holds some.
    """
    start = time.monotonic()
    shape = Shape(*(getattr(options, name) for name in Shape._fields))
    rows = {split: getattr(options, f"{split}_rows") for split in SPLITS}
    rows = {split: count for split, count in rows.items() if count}
    if options.days:
        rows = {f"day-{i + 1:03d}": options.train_rows for i in range(options.days)}
    check(shape, rows)
    publishing.check_local(options.output_dir, "write to a local folder")
    publishing.check_hosts(options.output_dir, 1, (".libsvm",))
    output_dir = options.output_dir
    about = dict(shape._asdict(), seed=options.seed)
    old, splits = find_old(output_dir, options.overwrite), {}
    if options.days:
        about.update(new_ids_per_day=options.new_ids_per_day, drift=options.drift)
        days = each_day(options.seed, shape, options.new_ids_per_day, options.drift)
    else:
        model = make_planted_model(options.seed, shape)
        to_lines = line_writer(shape.feature_size, VALUE_STEPS)
    progress = Progress("Writing", sum(rows.values()), "rows")
    with publishing.scratch(output_dir, ".make_synthetic-") as scratch:
        for i, (split, count) in enumerate(rows.items()):
            name, more = f"{split}.{'csv' if options.days else 'libsvm'}", {}
            day, header = 0, b""
            if options.days:
                day, header = i + 1, ",".join([LABEL, *columns(shape)]).encode() + b"\n"
                model, texts, more["new"] = next(days)
                to_lines = csv_lines(shape, texts)
            path, split_of_rows = os.path.join(scratch, name), "train" if day else split
            how = options.seed, split_of_rows, count, path, progress, day, header
            splits[split] = dict(files=[name], **write_split(model, to_lines, *how), **more)
        progress.finish()
        if options.days:
            with open(os.path.join(scratch, COLUMNS), "w") as f:
                f.write(json.dumps(table(shape), indent=2) + "\n")
        with open(os.path.join(scratch, SUMMARY), "w") as f:
            f.write(json.dumps({**about, "splits": splits}, indent=2) + "\n")
        made = {name: os.path.join(scratch, name) for name in sorted(os.listdir(scratch))}
        publishing.publish(scratch, [(output_dir, made, old)])
    log_summary(splits, time.monotonic() - start)


def check(shape, rows):
    """Refuses (BadInput) an impossible shape, or no rows, {split: number}, at all."""
    numeric, fields = shape.numeric_fields, shape.field_size
    if fields <= numeric:
        raise BadInput(
            f"--field_size={fields} leaves no categorical field beside "
            f"--numeric_fields={numeric}; try --field_size={numeric + 1}."
        )
    smallest = least_feature_size(shape)
    if shape.feature_size < smallest:
        raise BadInput(
            f"--feature_size={shape.feature_size} is too small for {fields} fields, "
            f"{numeric} of them numeric; try --feature_size={smallest}."
        )
    if shape.zipf == 1 and not shape.rare:
        raise BadInput("--zipf=1 cannot be drawn from; try --zipf=1.01.")
    if not rows:
        raise BadInput("All splits have 0 rows: nothing to write; try --train_rows=1000.")


def find_old(output_dir, overwrite):
    """The names of an earlier run's files; BadInput if they may not be replaced."""
    old = list(filter(OUTPUT.fullmatch, publishing.names_in(output_dir, (".libsvm", ".csv"))))
    there = lambda name: os.path.exists(os.path.join(output_dir, name))
    old += [name for name in (SUMMARY, COLUMNS) if there(SUMMARY) and there(name)]
    if old and not overwrite:
        raise BadInput(f"--output_dir={output_dir} holds {old[0]}; --overwrite replaces it.")
    return old


def write_split(model, to_lines, seed, split, rows, path, progress, day=0, header=b""):
    """Writes the first rows of a split, or of a day, in order.

    Returns:
        best_possible for these rows.
    """
    counts = np.zeros((2, LEVELS), np.int64)
    with open(path, "wb") as f:
        f.write(header)
        for block, first in enumerate(range(0, rows, BLOCK_ROWS)):
            drawn = draw_block(model, seed, split, block, day)
            ids, values, probability, label = (column[: rows - first] for column in drawn)
            f.write(to_lines(ids, values, label))
            count_labels(counts, probability, label)
            progress.add(len(label))
    return best_possible(counts)


def count_labels(counts, probability, label):
    """Adds rows to counts, int64 [2, LEVELS]: negatives and positives of each true probability."""
    levels = (probability * LEVELS).astype(np.int64)
    for kind in (0, 1):
        counts[kind] += np.bincount(levels[label == kind], minlength=LEVELS)


def best_possible(counts):
    """The exact scores of the true probabilities, from the counts of `count_labels`.

    The AUC is the share of (positive, negative) pairs that are in order; ties count one half.
    """
    negatives, positives = counts
    probability = (np.arange(LEVELS) + 0.5) / LEVELS
    rows, pairs = int(counts.sum()), int(positives.sum()) * int(negatives.sum())
    in_order = np.sum(positives * (np.cumsum(negatives) - 0.5 * negatives))
    loss = -positives.dot(np.log(probability)) - negatives.dot(np.log1p(-probability))
    return {
        "rows": rows,
        "positives": int(positives.sum()),
        "positive_rate": float(positives.sum() / rows),
        "mean_probability": float(counts.sum(axis=0).dot(probability) / rows),
        "best_auc": float(in_order / pairs) if pairs else None,
        "best_log_loss": float(loss / rows),
    }


def log_summary(splits, seconds):
    """Logs what was written."""
    for split, best in splits.items():
        logging.info(
            "%s: %d rows, %.4f of them positive, best possible AUC %s, log loss %.6f.",
            split, best["rows"], best["positive_rate"],
            "none" if best["best_auc"] is None else f"{best['best_auc']:.6f}",
            best["best_log_loss"],
        )  # fmt: skip
    rows = sum(best["rows"] for best in splits.values())
    logging.info("Wrote %d rows in %.1f s: %.0f rows/s.", rows, seconds, rows / seconds)


if __name__ == "__main__":
    command_line.run(main, SyntheticOptions)
