"""Cuts the input into tasks, counts it, and decides how many records of each label are kept.

`options` is always RebalanceOptions, `data` a DataSet.
"""

import functools
from typing import Callable, List, Tuple

import numpy as np

from data_tools.common.progress import Skipping
from data_tools.rebalancing import selecting
from data_tools.rebalancing.selecting import ALL, Work
from deepfm.errors import BadInput
from deepfm.records import text_blocks
from deepfm.records.data_file import SamplingRates
from deepfm.records.text_blocks import LineRange


def rates(options, engine, data, work):
    """The SamplingRates that the flags give, or imply: --positive_share by the input's labels."""
    if options.positive_share is None:
        given = options.negative_rate, options.positive_rate
        return SamplingRates(*(1.0 if rate is None else rate for rate in given))
    labels = labels_of(data) or read_all(engine, data, work, "Counting", log=False)[0]
    negatives, positives = labels
    if not negatives or not positives:
        raise BadInput(
            f"--positive_share={options.positive_share}: the input has {negatives} negatives and "
            f"{positives} positives; it needs both."
        )
    odds = options.positive_share / (1 - options.positive_share)
    positive_rate = odds * negatives / positives  # with a negative_rate of 1
    if (positive_rate > 1) == options.oversample:
        return SamplingRates(1.0, positive_rate)
    return SamplingRates(1 / positive_rate, 1.0)


def parts(data):
    """LineRanges: TFRecord files, parts of text."""
    if data.data_format == "tfrecord":
        return [LineRange(file.path) for file in data.files]
    return list(filter(None, text_blocks.cut(data.files, text_blocks.TASK)))


def labels_of(data):
    """(negatives, positives) that dataset.json gives; None if it does not."""
    if data.rows is None:
        return None
    positives = sum(file.positives for file in data.files)
    return data.rows - positives, positives


def counted(engine, data, work: Work) -> Tuple[List[int], List[int], int]:
    """((negatives, positives) found, the records to write of each task, the largest id seen or -1).

    dataset.json says how many there are. Only if records are sampled or bad ones skipped, or of
    LibSVM text, whose tasks are parts of files, are they counted in a pass of their own.
    """
    if data.rows is None or work.rates != ALL or work.skip or work.schema is None:
        return read_all(engine, data, work, "Counting")
    return list(labels_of(data)), [file.rows for file in data.files], -1


def read_all(
    engine, data, work: Work, title: str, read: Callable = selecting.read, log: bool = True
) -> Tuple[List[int], List[int], int]:
    """Reads the records of a DataSet by selecting.read, perhaps with a `put`; returns as `counted`.

    Raises BadInput if a record is one bad one too many, always the same on Spark, or if there is
    nothing to write.
    """
    bad, tasks = Skipping(work.skip, log), range(len(work.inputs))
    every, rows = selecting.Facts(np.zeros(2, np.int64), 0, -1), [0] * len(tasks)
    size = sum(file.bytes for file in data.files)
    read = functools.partial(read, work=work)
    with engine.map(read, tasks, title, size, selecting.together, bad) as results:
        for task, _, facts in results:
            every = selecting.together(every, facts)
            rows[task] += facts.kept
    bad.log_total()
    check_rows(data, sum(every.before), every.kept, bad.count)
    return every.before.tolist(), rows, every.max_id


def check_rows(data, before, kept, bad):
    """Refuses (BadInput) data of whose good records, `before`, none are `kept`, or whose number of
    records, with the `bad` ones, is not that in dataset.json."""
    if not kept:
        what = "the sampling rates keep no record" if before else "holds no records"
        raise BadInput(f"{data.name}: {what}.")
    if data.rows is not None and before + bad != data.rows:
        raise BadInput(
            f"{data.name}: has {before + bad} records, dataset.json says {data.rows}; delete "
            "dataset.json, or write the data set again."
        )


def check_files(names, total):
    """Refuses (BadInput) more files than records."""
    if total < len(names):
        raise BadInput(
            f"--num_files={len(names)}: {total} records cannot fill {len(names)} files; try "
            f"--num_files={total}."
        )


def check_written(data, found, total):
    """Refuses files that are not even, of {name: (path, (records, positives))}: the input has other
    records than dataset.json says (BadInput), or than it had before."""
    n, rows = len(found), [records for _, (records, _) in found.values()]
    if rows != np.diff([total * i // n for i in range(n + 1)]).tolist():
        check_rows(data, sum(rows), True, 0)
        raise OSError(f"{data.name}: was written to while it was read; run the command again")


def rates_of_all(data, found, kept, rates):
    """The SamplingRates of the output relative to the original data; None if it is all there."""
    before = data.sampling_rates
    if not before and rates == ALL:
        return None
    achieved = [k / f if f else rate for k, f, rate in zip(kept, found, rates)]
    before = before or ALL
    return SamplingRates(*(float(a * b) for a, b in zip(achieved, before)))
