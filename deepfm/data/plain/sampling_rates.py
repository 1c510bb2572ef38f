"""What share of the records of each label was kept."""

from typing import NamedTuple


class SamplingRates(NamedTuple):
    """Records kept per original record of each label; above 1 if they were repeated."""

    negative: float = 1.0
    positive: float = 1.0
