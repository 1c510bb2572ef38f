"""Progress of a long job: a bar in a terminal, else a log line every few seconds."""

import sys
import time

import tensorflow as tf
from absl import logging

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts how much of a job is done.

    Args:
        title: what is being done, for the log lines.
        total: the size of the job in `unit`; taken as at least 1.
        unit: such as "MB" or "rows".
    """

    def __init__(self, title, total, unit):
        self._title, self._total, self._unit, self._done = title, max(total, 1), unit, 0
        self._start = self._logged = time.monotonic()
        self._bar = None
        if sys.stdout.isatty() and sys.stderr.isatty():
            self._bar = tf.keras.utils.Progbar(self._total, unit_name=unit)

    def add(self, amount):
        """Counts `amount` more as done."""
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if self._bar and sys.stdout.isatty():  # the terminal may have closed
            self._bar.update(self._done)
        elif now - self._logged >= SECONDS_BETWEEN_LINES:
            self._logged = now
            seconds = now - self._start
            logging.info(
                "%s: %.0f %% of %d %s in %.0f s, about %.0f s left.",
                self._title, 100 * self._done / self._total, self._total, self._unit, seconds,
                seconds * (self._total - self._done) / max(self._done, 1e-9),
            )  # fmt: skip

    def finish(self):
        """Fills the bar, in case rounding left it just short of the total."""
        if self._bar and self._done < self._total:
            self._bar.update(self._total)
