"""How many records of each label are kept, so that the labels are balanced.

`options` is a rebalance.Options everywhere.
"""

import contextlib
import functools

import numpy as np

from data_tools.common import workers
from data_tools.common.progress import Progress
from data_tools.rebalancing import record_blocks, shuffling
from deepfm.data.sampling_rates import SamplingRates
from deepfm.errors import BadInput


def rates(data, tasks, schema, options):
    """The SamplingRates that the flags ask for."""
    if options.positive_share is None:
        given = options.negative_rate, options.positive_rate
        return SamplingRates(*(1.0 if rate is None else rate for rate in given))
    negatives, positives = _count(data, tasks, schema, options)
    if not negatives or not positives:
        raise BadInput(
            f"--positive_share={options.positive_share}: the input has {negatives} negatives and "
            f"{positives} positives; it needs both."
        )
    odds = options.positive_share / (1 - options.positive_share)
    positive_rate = odds * negatives / positives  # beside a negative_rate of 1
    if (positive_rate > 1) == options.oversample:
        return SamplingRates(1.0, positive_rate)
    return SamplingRates(1 / positive_rate, 1.0)


def _count(data, tasks, schema, options):
    """(negatives, positives) of the input: as dataset.json tells, else after a look at all."""
    if data.rows is not None:
        positives = sum(file.positives for file in data.files)
        return data.rows - positives, positives
    progress = Progress("Counting", sum(file.bytes for file in data.files) / 1e6, "MB")
    count = functools.partial(_count_part, schema=schema, max_bad_records=options.max_bad_records)
    rows = np.zeros(2, np.int64)
    with contextlib.closing(workers.run(count, tasks, options.num_workers)) as events:
        for _, (read, found) in events:
            rows += found
            progress.add(read / 1e6)
    progress.finish()
    return rows.tolist()


def _count_part(task, schema, max_bad_records):
    for event in record_blocks.read(task.part, schema, max_bad_records):
        if isinstance(event, record_blocks.Block):
            yield event.read, by_label(event.positive)


def by_label(positive):
    """int64 [2]: negatives and positives."""
    return np.bincount(positive.astype(np.int64), minlength=2)


def choose(positive, key, rates):
    """The records to keep, each as often as its rate says, rounded up or down at random.

    Args:
        positive: bool [n].
        key: uint64 [n], random (see data_tools.rebalancing.shuffling).
        rates: SamplingRates.

    Returns:
        What to index arrays [n] with.
    """
    if rates == SamplingRates(1.0, 1.0):
        return slice(None)
    rate = np.where(positive, rates.positive, rates.negative)
    whole = np.floor(rate)
    copies = whole + (shuffling.uniform(key) < rate - whole)
    return np.repeat(np.arange(len(positive)), copies.astype(np.int64))


def rates_of_all(data, found, kept, rates):
    """The SamplingRates of the output against the original data; None where all is as it was."""
    before = data.sampling_rates
    if not before and rates == SamplingRates(1.0, 1.0):
        return None
    achieved = [k / f if f else rate for k, f, rate in zip(kept, found, rates)]
    before = before or SamplingRates(1.0, 1.0)
    return SamplingRates(*(float(a * b) for a, b in zip(achieved, before)))
