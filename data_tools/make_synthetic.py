"""Writes learnable LibSVM data, of any size, with a known best possible AUC.

    python -m data_tools.make_synthetic --output_dir=DIR --train_rows=1000000 --feature_size=10000

A row has Criteo's shape, `label id:value ... id:value`, one pair per field; planted_model.py says
how it is drawn. Ids start at 1: id 0 stays free for padding, so a table needs --feature_size rows.

The probability of each label is known, and so are the AUC and the log loss that no model can beat.
DIR/synthetic.json holds the flags that shape the data and, for each split, files, rows, positives,
positive_rate, mean_probability, best_auc (null where all labels are the same) and best_log_loss.

A longer split begins with the rows of a shorter one, however they are spread over files and hosts.
"""

import json
import os
import re
import time

import numpy as np
from absl import flags, logging

from data_tools.common import publishing, shards
from data_tools.common.planted_model import (
    BLOCK_ROWS,
    LEVELS,
    SPLITS,
    VALUE_STEPS,
    Shape,
    draw_block,
    make_planted_model,
)
from data_tools.common.progress import Progress
from data_tools.libsvm.line_format import LineFormat
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, program, remote_files

FLAGS = flags.FLAGS
SUMMARY = "synthetic.json"
SCRATCH = ".make_synthetic-"
OUTPUT = re.compile(r"(train|val|test)(-\d{5}-of-\d{5})?\.libsvm")


def define_flags():
    """Defines the flags of this program."""
    shards.define_flags()
    shape = Shape()
    flags.DEFINE_string("output_dir", None, "A local directory to write to.")
    for split, rows in zip(SPLITS, (1000000, 100000, 100000)):
        text = f"Rows of the split {split}; 0: do not write it."
        flags.DEFINE_integer(f"{split}_rows", rows, text, lower_bound=0)
    flags.DEFINE_integer(
        "num_files", 1, "Files per split and host; rows are spread evenly.", lower_bound=1
    )
    flags.DEFINE_integer(
        "seed", 1, "The same seed writes the same bytes.", lower_bound=0, upper_bound=2**32 - 1
    )
    flags.DEFINE_integer("field_size", shape.field_size, "id:value pairs in a row.", lower_bound=1)
    flags.DEFINE_integer(
        "numeric_fields", shape.numeric_fields, "Fields with one id and a value.", lower_bound=0
    )
    flags.DEFINE_integer("feature_size", shape.feature_size, "Largest id + 1.", lower_bound=1)
    text = "Share of label 1, about."
    flags.DEFINE_float(
        "positive_rate", shape.positive_rate, text, lower_bound=0.01, upper_bound=0.99
    )
    flags.DEFINE_bool(
        "rare",
        shape.rare,
        "Flatter popularity and real signal in every id: with one or two rows per id, a model that "
        "is not regularised overfits.",
    )
    flags.DEFINE_float(
        "zipf", shape.zipf, "How steeply popularity falls: P(rank) ~ rank^-zipf.", lower_bound=0
    )
    flags.DEFINE_bool("overwrite", False, "Replace the splits in --output_dir that are written.")


def main():
    if not FLAGS.output_dir:
        raise BadInput("--output_dir must be given.")
    shape = Shape(**{name: FLAGS[name].value for name in Shape._fields})
    rows = {split: FLAGS[f"{split}_rows"].value for split in SPLITS}
    share = shards.share()
    write_data(FLAGS.output_dir, FLAGS.seed, shape, rows, FLAGS.num_files, FLAGS.overwrite, share)


def write_data(output_dir, seed, shape, rows, num_files=1, overwrite=False, share=(0, 1)):
    """Writes all splits and synthetic.json; nothing has its final name before all are complete.

    Args:
        output_dir: a local directory, made if it is missing.
        seed: int.
        shape: Shape.
        rows: dict from split to its number of rows, on all hosts together; a split of 0 rows is not
            written.
        num_files: files per split.
        overwrite: replace what an earlier run wrote.
        share: (index of this host, number of hosts); several have a folder of their own each, whose
            synthetic.json is of its rows.

    Raises:
        BadInput: no data can be made from these arguments, or output_dir holds some already.
    """
    start = time.monotonic()
    rows = {split: count for split, count in rows.items() if count}
    check(shape, rows, num_files, share[1])
    publishing.check_hosts(output_dir, share[1], (".libsvm",))
    output_dir = shards.folder(output_dir, share)
    old, about = find_old(output_dir, rows, overwrite), dict(shape._asdict(), seed=seed)
    splits = find_kept(output_dir, rows, about)
    model = make_planted_model(seed, shape)
    lines = LineFormat(shape.feature_size, VALUE_STEPS)
    parts = {
        split: [count * (share[0] + i) // share[1] for i in (0, 1)] for split, count in rows.items()
    }
    progress = Progress("Writing", sum(end - begin for begin, end in parts.values()), "rows")
    with atomic_files.scratch(output_dir, SCRATCH) as scratch:
        for split, part in parts.items():
            names = [f"{split}.libsvm"]
            if num_files > 1:
                names = [f"{split}-{i:05d}-of-{num_files:05d}.libsvm" for i in range(num_files)]
            paths = [os.path.join(scratch, name) for name in names]
            best = write_split(model, lines, seed, split, part, paths, progress)
            splits[split] = dict(files=names, **best)
        with open(os.path.join(scratch, SUMMARY), "w") as f:
            f.write(json.dumps({**about, "splits": splits}, indent=2) + "\n")
        publishing.publish(scratch, sorted(os.listdir(scratch)), output_dir, old)
    log_summary({split: splits[split] for split in parts}, time.monotonic() - start)


def check(shape, rows, num_files, hosts=1):
    """Refuses a shape, or rows (dict by split), that no data can have."""
    numeric, fields = shape.numeric_fields, shape.field_size
    if fields <= numeric:
        raise BadInput(
            f"--field_size={fields} leaves no categorical field beside "
            f"--numeric_fields={numeric}; try --field_size={numeric + 1}."
        )
    smallest = 1 + numeric + 2 * (fields - numeric)  # padding, one id each, two ids each
    if shape.feature_size < smallest:
        raise BadInput(
            f"--feature_size={shape.feature_size} is too small for {fields} fields, "
            f"{numeric} of them numeric; try --feature_size={smallest}."
        )
    if not rows:
        raise BadInput("All splits have 0 rows, nothing to write; try --train_rows=1000.")
    for split, count in rows.items():
        if count < num_files * hosts:
            fewest = min(rows.values())
            fits = f"num_files={fewest // hosts}" if fewest >= hosts else f"num_shards={fewest}"
            of_hosts = f" of each of {hosts} hosts" if hosts > 1 else ""
            raise BadInput(
                f"--{split}_rows={count} cannot fill --num_files={num_files}{of_hosts}; "
                f"try --{fits}."
            )


def find_old(output_dir, rows, overwrite):
    """Makes output_dir; returns the names in it that the new splits (of rows) replace."""
    remote_files.check_writable(output_dir, "output_dir")
    found = find_splits(output_dir)
    old = [name for split in found if split in rows for name in found[split]]
    if os.path.exists(os.path.join(output_dir, SUMMARY)) and set(found) <= set(rows):
        old.append(SUMMARY)
    if old and not overwrite:
        raise BadInput(f"--output_dir={output_dir} holds {old[0]}; --overwrite replaces it.")
    return old


def find_splits(output_dir):
    """{split: names of its files} of what is there."""
    found = {}
    for match in filter(None, map(OUTPUT.fullmatch, sorted(os.listdir(output_dir)))):
        found.setdefault(match.group(1), []).append(match.group(0))
    return found


def find_kept(output_dir, rows, about):
    """What synthetic.json says of the splits that stay; BadInput where `about` is another model."""
    kept = sorted(set(find_splits(output_dir)) - set(rows))
    if not kept:
        return {}
    try:
        with open(os.path.join(output_dir, SUMMARY), encoding="utf-8") as f:
            said = json.load(f)
        if all(said[name] == value for name, value in about.items()):
            return {split: said["splits"][split] for split in kept}
        reason = "another seed or shape"
    except (OSError, ValueError, TypeError, KeyError):
        reason = "nobody knows which seed and shape"
    raise BadInput(
        f"--output_dir={output_dir} holds the split {kept[0]} of {reason}, and this run does not "
        "write it; give another folder, or delete it."
    )


def write_split(model, lines, seed, split, part, paths, progress):
    """Writes rows part[0] to part[1] - 1 of a split, in order, spread evenly over the files.

    Returns:
        best_possible of these rows.
    """
    counts = np.zeros((2, LEVELS), np.int64)
    begin, row, block = part[0], part[0], None
    for i, path in enumerate(paths):
        end = begin + (part[1] - begin) * (i + 1) // len(paths)
        with open(path, "wb") as f:
            while row < end:
                first = row % BLOCK_ROWS
                if first == 0 or block is None:
                    block = draw_block(model, seed, split, row // BLOCK_ROWS)
                last = min(first + end - row, BLOCK_ROWS)
                ids, values, probability, label = (column[first:last] for column in block)
                f.write(lines.text(ids, values, label))
                count_labels(counts, probability, label)
                progress.add(last - first)
                row += last - first
    return best_possible(counts)


def count_labels(counts, probability, label):
    """Adds rows to counts, int64 [2, LEVELS]: negatives and positives of each true probability."""
    levels = (probability * LEVELS).astype(np.int64)
    for kind in (0, 1):
        counts[kind] += np.bincount(levels[label == kind], minlength=LEVELS)


def best_possible(counts):
    """The exact scores of the true probability, from the counts of `count_labels`.

    The AUC is the share of (positive, negative) pairs that are in order, ties counted as one half.
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
            split,
            best["rows"],
            best["positive_rate"],
            "none" if best["best_auc"] is None else f"{best['best_auc']:.6f}",
            best["best_log_loss"],
        )
    rows = sum(best["rows"] for best in splits.values())
    logging.info("Wrote %d rows in %.1f s: %.0f rows/s.", rows, seconds, rows / seconds)


if __name__ == "__main__":
    define_flags()
    FLAGS.set_default("verbosity", logging.INFO)
    program.run(main, when_ended="; nothing was written")
