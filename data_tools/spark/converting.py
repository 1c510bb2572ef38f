"""convert on Spark: the same files, byte for byte, as data_tools.libsvm_to_tfrecord writes.

The ranges of lines or rows, and the pieces of output files that they become, are those of one
machine. With --num_files the rows of each range are counted first. Executors write the pieces, and
join those of an output file that has several.
"""

import functools
import time

from data_tools.common import publishing
from data_tools.common.skipping import Skipping
from data_tools.libsvm import line_writer, output_files, pieces, sources
from data_tools.libsvm.options import Options
from data_tools.libsvm.pieces import BlockFacts
from data_tools.spark import jobs, line_tasks
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import data_file
from deepfm.records.schema import Schema
from deepfm.records.storage import places

GROUP = 64 << 20  # bytes of text for a Spark task


def convert(spark, options: Options):
    """Does what the flags say; returns the DataFiles that were written.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: a job failed, or an output cannot be published.
    """
    start = time.monotonic()
    if options.split:
        raise BadInput(
            "--split does not work on Spark; leave it out, or convert on one machine "
            "(data_tools.libsvm_to_tfrecord)."
        )
    publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", tables=True, kinds=data_file.KINDS)
    source = sources.of(data, options, line_writer.write)
    ranges = source.ranges
    publishing.check_hosts(options.output_dir, 1, data_file.TFRECORD)
    old = output_files.prepare(data.files, options)
    with jobs.scratch(spark, options.output_dir, output_files.SCRATCH) as scratch:
        groups = jobs.groups(spark, len(ranges), sum(file.bytes for file in data.files), GROUP)
        must_count = pieces.must_count(source.schema, options)
        counts = _count(spark, source, groups) if must_count else None
        schema = source.complete(counts)
        tasks = pieces.plan(ranges, counts, options.num_files, "")
        names = output_files.names([r.path for r in ranges], options)
        outputs, every, parts = _write(
            spark, tasks, names, source, schema, options, scratch, groups
        )
        wholes = _join(spark, parts, options.compress, scratch)
        files = output_files.described(names, outputs, options, wholes)
        written = output_files.describe(scratch, schema, every, files, data, options, source.fields)
        with publishing.succeeding(options.output_dir):
            publishing.publish(scratch, [(options.output_dir, written, old, wholes)])
    seconds, by_column = time.monotonic() - start, "columns" in source.fields
    output_files.log_summary(files, schema, every, seconds, by_column)
    return files


def _count(spark, source, groups):
    """[(rows, most fields in a row)] of each range."""
    count_range = source.count
    work = lambda task: line_tasks.count(task, count_range)
    counted = jobs.results(spark, work, source.ranges, groups, "Counting rows", Skipping(0))
    return [found for _, found in counted]


def _write(spark, tasks, names, source, schema, options, scratch, groups):
    """Writes all pieces; returns (BlockFacts of each output, of all, {its name: its pieces})."""
    write_range, schema, scratch = source.write, tuple(schema), places.absolute(scratch)
    work = lambda task: line_tasks.write(task, write_range, schema, scratch)
    bad = Skipping(options.max_bad_records)
    results = jobs.results(spark, work, tasks, groups, "Converting", bad)
    outputs, parts = [pieces.NO_ROWS] * len(names), {}
    for _, (output, path, facts) in results:
        outputs[output] = pieces.together(outputs[output], BlockFacts(*facts))
        parts.setdefault(names[output], []).append(path)
    every = functools.reduce(pieces.together, outputs)
    if every.negative and every.zero:
        raise BadInput(source.mixed_labels(Schema(*schema)))
    if every.max_id < 0:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    bad.log_total()
    return outputs, every, parts


def _join(spark, parts, compress, scratch):
    """{name of an output file: its path in scratch}; parts: {name: paths of its pieces}."""
    whole = {} if compress else {name: paths[0] for name, paths in parts.items() if not paths[1:]}
    tasks = [(name, paths) for name, paths in parts.items() if name not in whole]
    folder = places.absolute(scratch)
    work = lambda task: line_tasks.join(task, compress, folder)
    if tasks:
        title = "Compressing" if compress else "Joining"
        joined = jobs.results(spark, work, tasks, len(tasks), title, Skipping(0))
        whole.update((tasks[index][0], path) for index, path in joined)
    return whole
