"""What a job says: how much of it is done, which bad records it skips, and what it wrote."""

import itertools
import sys
import time
from typing import List

from absl import logging

from deepfm.errors import BadInput
from deepfm.records import data_file, frames, wire
from deepfm.records.data_file import DataFile
from deepfm.records.schema import BadRecord
from deepfm.records.storage import places
from deepfm.runtime import program

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_BARS = 0.1
WIDTH = 30  # of the bar


class Progress:
    """Counts how much of a job is done: in a terminal as a bar, else in a line every few seconds.

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
        if self._bar and now - self._told >= SECONDS_BETWEEN_BARS:
            self._told = now
            self._draw()
        elif not self._bar and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told, seconds = now, now - self._start
            logging.info(
                "%s: %.0f %% of %d %s in %.0f s, about %.0f s left.",
                self._title, 100 * self._done / self._total, self._total, self._unit, seconds,
                seconds * (self._total - self._done) / max(self._done, 1e-9),
            )  # fmt: skip

    def _draw(self, end=""):
        share = self._done / self._total
        bar = ("=" * int(WIDTH * share)).ljust(WIDTH, ".")
        line = f"\r{self._title} [{bar}] {share:4.0%} of {self._total:.0f} {self._unit}{end}"
        program.show(lambda: sys.stdout.write(line))

    def finish(self):
        """Fills the bar, in case rounding left it just short of the total, and ends its line."""
        if self._bar:
            self._done = self._total
            self._draw("\n")


class Skipping:
    """Skips bad records, up to --max_bad_records of them; one more ends the run.

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


def log_examples(files: List[DataFile]):
    """Logs the first two records as they are stored, a line each."""
    path = next((file.path for file in files if file.rows), None)
    if not path:  # this host has none
        return
    if path.endswith(data_file.LIBSVM):
        with places.of(path).open_file(path) as f:
            texts = [line.decode().strip() for line in itertools.islice(f, 2)]
    else:
        data, starts, ends = first_frames(path)
        texts = [_text(wire.features_of(data[a:b])) for a, b in zip(starts[:2], ends[:2])]
    for text in texts:
        logging.info("Example: %s", text if len(text) < 1000 else text[:996] + " ...")


def _text(features):
    there = (name for name in ("label", "weight", "counts", "ids", "values") if name in features)
    numbers = lambda feature: " ".join(f"{x:g}" for x in feature.floats or feature.int64s)
    return ", ".join(f"{name} {numbers(features[name])}" for name in there)


def first_frames(path):
    """(the first records of a TFRecord file, where they begin and where they end)."""
    found = next(frames.frames_of_file(path))
    return found.data, found.starts + frames.HEADER, found.ends - 4
