"""rebalance on Spark: the same files, byte for byte, as data_tools.rebalance writes.

One pass over the records. Each gets the key of its place; the key says which file it goes to, and
Spark's shuffle brings it there and sorts each file, on disk where memory is short. How many records
there are, which decides the keys at which files are cut, dataset.json says. Only if records are
sampled or bad ones skipped, or of LibSVM text, are they counted in a pass of their own.
"""

import os
import time

import numpy as np

from data_tools.common import publishing
from data_tools.common.skipping import Skipping
from data_tools.rebalancing import output_files, plain_blocks, sampling
from data_tools.rebalancing.options import Options, check
from data_tools.spark import jobs, order, record_tasks
from data_tools.spark.record_tasks import Work
from deepfm.data import dataset_json, datasets
from deepfm.data.dataset_json import SamplingRates
from deepfm.errors import BadInput
from deepfm.records import data_file, libsvm_text
from deepfm.records.storage import places

ALL = SamplingRates(1.0, 1.0)  # every record once
GROUP = 64 << 20  # bytes of small files that one Spark task reads


def rebalance(spark, options: Options):
    """Does what the flags say; returns the DataFiles that were written.

    Raises:
        BadInput: a record or a flag is wrong.
        OSError: a job failed, or an output cannot be published.
    """
    start = time.monotonic()
    check(options)
    finished = publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", kinds=data_file.KINDS)
    is_text = data.data_format == "libsvm"
    first = lambda data: datasets.first_record(data, plain_blocks.first_shape)
    schema = None if is_text else output_files.schema(data, first)
    shape_of = libsvm_text.first_shape
    weighted = datasets.is_weighted(data, shape_of) if is_text else schema.weighted
    names = output_files.names(data, options)
    output_files.check_apart(data, options, finished)
    old = output_files.prepare(data, options)
    with jobs.scratch(spark, options.output_dir, ".rebalance-") as scratch:
        work = Work(
            *map(list, zip(*sampling.parts(data))), schema, weighted, options.max_bad_records, ALL,
            order.Order(options.seed, options.shuffle), options.compress, places.absolute(scratch),
        )  # fmt: skip
        rates = sampling.rates(
            options, lambda: sampling.labels_of(data) or _counted(spark, data, work)[0]
        )
        work = work._replace(rates=rates)
        before, rows, max_id = _rows(spark, data, work)
        sampling.check_files(names, sum(rows))
        files, paths = _write(spark, data, rows, names, work, options.output_dir)
        ones = sum(file.positives for file in files)
        kept, written = [sum(rows) - ones, ones], list(names)
        described = data.rows is not None and data.field_size  # LibSVM text has no other source
        if schema or described:
            written.append(dataset_json.METADATA)
            dataset_json.write(
                scratch, schema.field_size if schema else described,
                max(data.feature_size or 0, max_id + 1), files,
                sampling.rates_of_all(data, before, kept, rates),
                multi_valued=bool(schema and schema.multi_valued),
                hash_buckets=data.hash_buckets or 0, feature_map=data.feature_map,
                weighted=weighted, **data.made,
            )  # fmt: skip
        with publishing.succeeding(options.output_dir):
            publishing.publish(scratch, [(options.output_dir, written, old, paths)])
    output_files.log_summary(before, kept, len(files), time.monotonic() - start)
    return files


def _rows(spark, data, work):
    """((negatives, positives) of the input, records to write of each file, largest id decoded)."""
    if data.rows is None or work.rates != ALL or work.skip or work.schema is None:
        return _counted(spark, data, work)
    return sampling.labels_of(data), [file.rows for file in data.files], -1


def _counted(spark, data, work):
    """As `_rows`, by reading all records; the first bad one too many is always the same."""
    bad = Skipping(work.skip)
    count = lambda task: record_tasks.count(task, work)
    tasks = range(len(work.inputs))
    counted = jobs.results(spark, count, tasks, _groups(spark, data, tasks), "Counting", bad)
    bad.log_total()
    found, rows, max_id = np.zeros(2, np.int64), [0] * len(tasks), -1
    for task, (before, kept, largest) in counted:
        found += before
        rows[task] += kept
        max_id = max(max_id, largest)
    sampling.check_rows(data, sum(found), sum(rows), bad.count)
    return found.tolist(), rows, max_id


def _groups(spark, data, tasks):
    return jobs.groups(spark, len(tasks), sum(file.bytes for file in data.files), GROUP)


def _write(spark, data, rows, names, work, output_dir):
    """Writes the output files; returns (their DataFiles, {name: path in the scratch folder})."""
    context = spark.sparkContext
    with jobs.job(spark, "Cutting"):
        cuts = order.cuts(context, work.order, rows, len(names))
        values = _part_values(spark, len(names))
    tasks = range(len(rows))
    tasks = context.parallelize([(task,) for task in tasks], _groups(spark, data, tasks))
    tasks = spark.createDataFrame(tasks, "task int")
    scattered = tasks.mapInArrow(
        lambda x: record_tasks.scatter(x, work, cuts, values), record_tasks.RECORDS
    )
    sorted_ = scattered.repartition(len(names), "part").sortWithinPartitions("key")
    try:
        with jobs.job(spark, "Shuffling"):
            written = sorted_.mapInArrow(
                lambda x: record_tasks.write_part(x, work), record_tasks.WRITTEN
            ).collect()
    except BadInput:
        _counted(spark, data, work)  # names the first bad record, not one that was met first
        raise
    part_of = {value: part for part, value in enumerate(values.tolist())}
    by_part = {part_of[row.part]: row for row in written}
    wanted = order.rows_of_files(sum(rows), len(names))
    if [by_part[i].rows if i in by_part else 0 for i in range(len(names))] != wanted:
        sampling.check_rows(data, sum(row.rows for row in written), True, 0)
    rows = [by_part[part] for part in range(len(names))]
    files = [
        data_file.DataFile(os.path.join(output_dir, name), row.bytes, row.rows, row.positives)
        for name, row in zip(names, rows)
    ]
    return files, {name: row.path for name, row in zip(names, rows)}


def _part_values(spark, n):
    """int32 [n]: for each partition, a number that `repartition` puts there."""
    numbers = spark.range(64 * n + 64, numPartitions=1)
    rows = numbers.selectExpr("id", f"pmod(hash(cast(id as int)), {n}) as part").collect()
    values = {row.part: row.id for row in reversed(rows)}
    return np.array([values[part] for part in range(n)], np.int32)
