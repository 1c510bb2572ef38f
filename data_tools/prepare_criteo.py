"""Converts raw click logs (Criteo, Avazu, any table) to records: counts categories, writes ids.

    python -m data_tools.prepare_criteo --input=train.txt --output_dir=data/criteo --num_workers=8
    python -m data_tools.prepare_criteo --feature_map=data/criteo/feature_map.json \\
        --test_input=new.tsv --output_dir=data/new

Writes output_dir/train, valid and test, as far as there are rows for them, each with dataset.json,
and feature_map.json, which feature_map.py explains; it replaces nothing else. The vocabulary comes
from the training rows alone. The same rows and flags give the same ids and splits, whatever the
number of processes. With --feature_map several hosts can do it, each on files of its own; without
one, each would count only those, so data_tools.on_spark does it.
"""

import time
from typing import List

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split

from data_tools.click_logs import field_tables, output_folder, passes, vocabulary
from data_tools.click_logs.options import REMOVED, SCRATCH, Options, log_summary, plan
from data_tools.common import command_line, publishing, shards
from data_tools.common.shards import ALONE, Host
from data_tools.common.skipping import Skipping
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.runtime import memory

OF_A_PROCESS = 4 * 10**8  # bytes of a process without the vocabulary
LEAST = 10**8  # bytes for the vocabulary where hardly any are free


def main(options: Options):
    inputs = options.input, options.valid_input, options.test_input
    prepare(options, shards.this_host(*inputs, on_spark="prepare"))


def prepare(options: Options, host: Host = ALONE) -> List[datasets.DataFile]:
    """Does what the flags say, and returns the data files that were written.

    No file gets its final name in output_dir before all are complete.

    Args:
        options: the flags.
        host: this host.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    options, known, columns, cut, old = plan(options, host)
    every = [task for group in cut.values() for task in group]
    with publishing.scratch(options.output_dir, SCRATCH, host.number) as scratch:
        tables = field_tables.from_map(known) if known else _tables(cut["input"], columns, options)
        fingerprint = output_folder.write_map(tables, old, options, scratch)
        bad = Skipping(options.max_bad_records)
        written = passes.encode(
            every, tables, options.output_format, scratch, options.num_workers, bad
        )
        files = output_folder.publish(written, tables, fingerprint, old, options, host, scratch)
    log_summary(files, tables, fingerprint, time.monotonic() - start)
    output_folder.log_unknown(written, tables, options)
    return files


def _tables(tasks, columns, options):
    """The FieldTable of each field, from the counts of the training rows."""
    room = _room(options)
    bad = Skipping(options.max_bad_records, log=False)  # the second pass logs them
    counts = passes.count(tasks, columns, options.num_workers, bad, room)
    if not any(len(c.keys) or c.long for c in counts):
        raise BadInput(f"--input={options.input}: no training row holds a category.")
    room.check_ids(counts, options.min_count)
    return field_tables.from_counts(columns, counts, options.min_count)


def _room(options):
    """The Room for the vocabulary: --memory_mb, or what is free besides what processes take."""
    others = options.num_workers if options.num_workers > 1 else 0
    cluster = "use a cluster ('python -m data_tools.on_spark prepare')"
    if options.memory_mb:
        more = f"raise --memory_mb={options.memory_mb} if more is free, or {cluster}"
        return vocabulary.Room(options.memory_mb * 10**6, others, more)
    fewer = f"try fewer --num_workers than {others}, or " if others else ""
    free = int(0.9 * memory.available()) - OF_A_PROCESS * (1 + others)
    return vocabulary.Room(max(free, LEAST), others, fewer + cluster)


if __name__ == "__main__":
    command_line.run(main, Options, removed=REMOVED)
