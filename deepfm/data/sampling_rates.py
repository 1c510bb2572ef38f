"""How many of the original records of each label a data set has, where it was sampled by label."""

from typing import Iterable, NamedTuple, Optional, Tuple


class SamplingRates(NamedTuple):
    """Records that were kept for each one of the original data; above 1: they were repeated."""

    negative: float
    positive: float


def merge_rates(
    parts: Iterable[Tuple[Optional[SamplingRates], Tuple[int, int]]],
) -> SamplingRates:
    """The SamplingRates of several parts together: what is left, over what there was.

    Args:
        parts: for each its SamplingRates, None where it was not sampled, and its (negatives,
            positives). A part that has none of a label, as with rate 0, does not count for it.
    """
    parts = [(rates or SamplingRates(1.0, 1.0), rows) for rates, rows in parts]
    merged = []
    for label in (0, 1):
        kept = sum(rows[label] for _, rows in parts)
        before = sum(rows[label] / rates[label] for rates, rows in parts if rows[label])
        merged.append(kept / before if before else parts[0][0][label])
    return SamplingRates(*merged)


def rows_by_label(entries: Iterable[dict]) -> Tuple[int, int]:
    """(negatives, positives) of the files that entries of a dataset.json describe."""
    rows = [(entry["rows"], entry["positives"]) for entry in entries]
    positives = sum(ones for _, ones in rows)
    return sum(n for n, _ in rows) - positives, positives


def check_rates(rates: dict, entries: Iterable[dict]):
    """Refuses (ValueError) sampling_rates that are no two rates, or not those of the files."""
    if set(rates) != set(SamplingRates._fields):
        raise ValueError(f"sampling_rates is {str(rates)[:60]}")
    rows = SamplingRates(*rows_by_label(entries))
    for label, rate in rates.items():
        if type(rate) not in (int, float) or not 0 <= rate < 1 << 63:
            raise ValueError(f"the sampling rate {label} is {str(rate)[:40]}")
        if not rate and getattr(rows, label):
            raise ValueError(f"the sampling rate {label} is 0 and there are {label} rows")
