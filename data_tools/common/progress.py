"""What a job says: how much of it is done, which bad records it skips, and what it wrote."""

import itertools
import posixpath
import sys
import time
from typing import List

import numpy as np
from absl import logging

from deepfm.errors import BadInput
from deepfm.records import codec, data_file, dataset_json, frames
from deepfm.records.data_file import DataFile
from deepfm.records.schema import BadRecord, Schema
from deepfm.records.storage import places
from deepfm.runtime import program

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_BARS = 0.1
WIDTH = 30  # of the bar


class Progress:
    """Counts how much of a job is done: in a terminal as a bar, else in a line every few seconds.

    The total is the size of the job in `unit`, such as "MB" or "rows"; taken as at least 1.
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
        said = dataset_json.load(posixpath.dirname(path))
        weighted, several = (said.get(key, False) for key in ("weighted", "multi_valued"))
        schema = Schema(said["field_size"], multi_valued=several, weighted=weighted)
        data, starts, ends = first_frames(path)
        texts = _texts(codec.decode(data, starts[:2], ends[:2], schema))
    for text in texts:
        logging.info("Example: %s", text if len(text) < 1000 else text[:996] + " ...")


def _texts(batch):
    """Yields the numbers of each record, without those that fill up a row."""
    written = lambda x: f"{x:g}" if isinstance(x, np.floating) else str(x)
    for i in range(len(batch.labels)):
        label, ids, values, counts, weight = (x if x is None else np.ravel(x[i]) for x in batch)
        pairs = len(ids) if counts is None else counts.sum()
        shown = label, weight, counts, ids[:pairs], values[:pairs]
        texts = (x if x is None else " ".join(map(written, x)) for x in shown)
        names = "label", "weight", "counts", "ids", "values"
        yield ", ".join(f"{name} {text}" for name, text in zip(names, texts) if text is not None)


def first_frames(path):
    """(the first records of a TFRecord file, where they begin and where they end)."""
    found = next(frames.frames_of_file(path))
    return found.data, found.starts + frames.HEADER, found.ends - 4
