"""Cuts the input into tasks, and decides how many records of each label are kept.

`options` is always an Options.
"""

import numpy as np

from data_tools.common import line_blocks, splitmix64
from data_tools.common.line_blocks import LineRange
from deepfm.errors import BadInput
from deepfm.records.data_file import SamplingRates


def rates(options, count):
    """The SamplingRates that the flags give or imply.

    Args:
        options: Options.
        count: () -> (negatives, positives) of the input; called for --positive_share.
    """
    if options.positive_share is None:
        given = options.negative_rate, options.positive_rate
        return SamplingRates(*(1.0 if rate is None else rate for rate in given))
    negatives, positives = count()
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
    whole = data.data_format == "tfrecord"
    cut = lambda f: [LineRange(f.path)] if whole else line_blocks.cut(f.path, f.bytes)
    return [lines for file in data.files for lines in cut(file)]


def labels_of(data):
    """(negatives, positives) that dataset.json gives; None if it does not."""
    if data.rows is None:
        return None
    positives = sum(file.positives for file in data.files)
    return data.rows - positives, positives


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
