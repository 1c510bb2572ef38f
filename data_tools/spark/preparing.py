"""prepare on Spark: the same files, byte for byte, as data_tools.prepare_criteo writes.

Slices of the raw files are read twice, as on one machine. The counts of each Spark task go, in as
many parts as there are tasks to add them up, through one shuffle; only the categories that are not
rare come to the driver, which numbers them and sends the tables to all executors.
"""

import os
import time

from absl import logging

from data_tools.click_logs import field_tables, output_folder, slices, vocabulary
from data_tools.click_logs import options as flags
from data_tools.click_logs.options import Options
from data_tools.click_logs.splitting import SPLITS
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import publishing
from data_tools.common.shards import ALONE
from data_tools.common.skipping import Skipping
from data_tools.libsvm.pieces import BlockFacts
from data_tools.spark import jobs, row_tasks
from deepfm.errors import BadInput
from deepfm.records.storage import places

GROUP = 128 << 20  # bytes of raw rows for a Spark task


def prepare(spark, options: Options):
    """Does what the flags say; returns the DataFiles that were written.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: a job failed, or an output cannot be published.
    """
    start = time.monotonic()
    options, known, columns, cut, old = flags.plan(options, ALONE)
    every = [task for group in cut.values() for task in group]
    with jobs.scratch(spark, options.output_dir, flags.SCRATCH) as scratch:
        if known:
            tables = field_tables.from_map(known)
        else:
            tables = _tables(spark, cut["input"], columns, options)
        fingerprint = output_folder.write_map(tables, old, options, scratch)
        written, paths = _encode(spark, every, tables, options, places.absolute(scratch))
        with publishing.succeeding(options.output_dir):
            files = output_folder.publish(
                written, tables, fingerprint, old, options, ALONE, scratch, paths
            )
    flags.log_summary(files, tables, fingerprint, time.monotonic() - start)
    output_folder.log_unknown(written, tables, options)
    return files


def _groups(spark, tasks):
    return jobs.groups(spark, len(tasks), sum(slices.size(task.lines) for task in tasks), GROUP)


def _tables(spark, tasks, columns, options):
    """The FieldTable of each field, from the counts of all training rows."""
    groups = _groups(spark, tasks)
    about = row_tasks.Vocabulary(columns, options.min_count, min(groups, 256))
    with jobs.job(spark, "Counting"):
        numbered = spark.sparkContext.parallelize(list(enumerate(tasks)), groups)
        counted = numbered.mapPartitions(lambda pairs: row_tasks.count(pairs, about))
        parts = counted.partitionBy(about.parts, int)
        collected = parts.mapPartitions(lambda pairs: row_tasks.add_up(pairs, about)).collect()
    events = [content for kind, content in collected if kind == row_tasks.EVENT]
    # The second pass logs the bad rows.
    jobs.sift(events, Skipping(options.max_bad_records, log=False))
    counts = [content for kind, content in collected if kind == row_tasks.COUNTS]
    seen = sum(n for n, _ in counts)
    if not seen:
        raise BadInput(f"--input={options.input}: no training row holds a category.")
    fields = ([Counts(*field) for field in part] for _, part in counts)
    tables = field_tables.from_counts(
        columns, vocabulary.add_up(columns, fields), options.min_count
    )
    logging.info("Counted %d categories.", seen)
    return tables


def _encode(spark, tasks, tables, options, scratch):
    """Writes all rows.

    Returns:
        {(index of the split, name of the file): BlockFacts}, and {the same: path}.
    """
    sent = spark.sparkContext.broadcast(tables)
    output_format = options.output_format
    work = lambda task: row_tasks.encode(task, sent.value, output_format, scratch)
    bad = Skipping(options.max_bad_records)
    results = jobs.results(spark, work, tasks, _groups(spark, tasks), "Encoding", bad)
    bad.log_total()
    sent.destroy()
    written, paths = {}, {}
    for _, (split, name, found, folder) in results:
        written[split, name] = BlockFacts(*found)
        paths[split, name] = os.path.join(folder, SPLITS[split], name)
    return written, paths
