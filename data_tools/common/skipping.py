"""Skips bad records, up to --max_bad_records of them."""

from absl import logging

from deepfm.errors import BadInput
from deepfm.records.bad_record import BadRecord


class Skipping:
    """Counts bad records, and ends the run if there are too many.

    Args:
        limit: --max_bad_records.
        log: False if another pass over the same records logs them.

    Attributes:
        count: bad records so far.
    """

    def __init__(self, limit: int, log: bool = True):
        self._limit, self._log, self.count = limit, log, 0

    def add(self, record: BadRecord):
        """Logs a bad record; raises BadInput, which names it, if it is one too many."""
        self.count += 1
        if self.count > self._limit:
            told = [f"{self._limit} bad records were skipped before"] if self._limit else []
            told += [f"--max_bad_records={self.count} skips it"] if record.few else []
            raise BadInput(f"{record} ({'; '.join(told)})" if told else str(record))
        if self._log:
            text = "Skipping bad record %d (--max_bad_records=%d): %s"
            logging.warning(text, self.count, self._limit, record)

    def log_total(self):
        """Logs how many there were."""
        if self.count and self._log:
            logging.warning("Skipped %d bad records in total.", self.count)
