"""Progress of a long job: a bar in a terminal, else a log line every few seconds."""

import sys
import time

from absl import logging

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_BARS = 0.1
WIDTH = 30  # of the bar


class Progress:
    """Counts how much of a job is done.

    Args:
        title: what is being done.
        total: the size of the job in `unit`; taken as at least 1.
        unit: such as "MB" or "rows".
    """

    def __init__(self, title, total, unit):
        self._title, self._total, self._unit, self._done = title, max(total, 1), unit, 0
        self._start = self._told = time.monotonic()
        self._bar = sys.stdout.isatty() and sys.stderr.isatty()

    def add(self, amount):
        """Counts `amount` more as done."""
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if now - self._told >= (SECONDS_BETWEEN_BARS if self._bar else SECONDS_BETWEEN_LINES):
            self._told = now
            self._tell(now - self._start)

    def _tell(self, seconds):
        share = self._done / self._total
        if self._bar and sys.stdout.isatty():  # the terminal may have closed
            bar = ("=" * int(WIDTH * share)).ljust(WIDTH, ".")
            sys.stdout.write(
                f"\r{self._title} [{bar}] {share:4.0%} of {self._total:.0f} {self._unit}"
            )
            sys.stdout.flush()
        elif not self._bar:
            logging.info(
                "%s: %.0f %% of %d %s in %.0f s, about %.0f s left.",
                self._title, 100 * share, self._total, self._unit, seconds,
                seconds * (self._total - self._done) / max(self._done, 1e-9),
            )  # fmt: skip

    def finish(self):
        """Fills the bar, in case rounding left it just short of the total, and ends its line."""
        if self._bar and sys.stdout.isatty():
            self._done = self._total
            self._tell(0)
            sys.stdout.write("\n")
