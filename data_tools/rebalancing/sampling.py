"""Decides how many records of each label are kept, to balance the labels.

`options` is always a rebalance.Options.
"""

import functools

import numpy as np

from data_tools.common import splitmix64, workers
from data_tools.rebalancing import record_blocks
from deepfm.data.dataset_json import SamplingRates
from deepfm.errors import BadInput


def rates(data, tasks, schema, options):
    """The SamplingRates that the flags give or imply."""
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
    positive_rate = odds * negatives / positives  # with a negative_rate of 1
    if (positive_rate > 1) == options.oversample:
        return SamplingRates(1.0, positive_rate)
    return SamplingRates(1 / positive_rate, 1.0)


def _count(data, tasks, schema, options):
    """(negatives, positives) of the input, from dataset.json, else by reading all of it."""
    if data.rows is not None:
        positives = sum(file.positives for file in data.files)
        return data.rows - positives, positives
    size = sum(file.bytes for file in data.files)
    count = functools.partial(_count_slice, schema=schema, max_bad_records=options.max_bad_records)
    with workers.results(count, tasks, options.num_workers, "Counting", size) as results:
        return sum((found for _, found in results), np.zeros(2, np.int64)).tolist()


def _count_slice(task, schema, max_bad_records):
    for block in record_blocks.read(task, schema, max_bad_records):
        if isinstance(block, record_blocks.RecordBlock):
            yield block.read, by_label(block.positive)


def by_label(positive):
    """int64 [2]: negatives and positives."""
    return np.bincount(positive.astype(np.int64), minlength=2)


def choose(positive, key, rates):
    """The records to keep, each `rate` times, rounded up or down at random.

    Args:
        positive: bool [n].
        key: uint64 [n], random (see data_tools.rebalancing.shuffling).
        rates: SamplingRates.

    Returns:
        An index into arrays [n]; copies repeat.
    """
    if rates == SamplingRates(1.0, 1.0):
        return slice(None)
    rate = np.where(positive, rates.positive, rates.negative)
    whole = np.floor(rate)
    copies = whole + (splitmix64.uniform(key) < rate - whole)
    return np.repeat(np.arange(len(positive)), copies.astype(np.int64))


def rates_of_all(data, found, kept, rates):
    """The SamplingRates of the output relative to the original data; None if it is all there."""
    before = data.sampling_rates
    if not before and rates == SamplingRates(1.0, 1.0):
        return None
    achieved = [k / f if f else rate for k, f, rate in zip(kept, found, rates)]
    before = before or SamplingRates(1.0, 1.0)
    return SamplingRates(*(float(a * b) for a, b in zip(achieved, before)))
