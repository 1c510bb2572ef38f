"""Apache Spark: an engine.

A task reads its input and writes its output itself, through paths that the driver and all executors
see: local mode, or a folder that all machines share. Its methods do what those of
processes.Processes do.
"""

import contextlib
import threading
from typing import Any, Callable, Iterable, List, Tuple

import numpy as np
from absl import logging

from data_tools.click_logs import vocabulary
from data_tools.common import publishing
from data_tools.common.progress import Skipping
from data_tools.engines import executors
from data_tools.engines.executors import BAD, REFUSED
from data_tools.engines.spark_session import job
from data_tools.rebalancing import sampling
from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.records.schema import BadRecord
from deepfm.records.storage import places

GROUP = 128 << 20  # bytes for a Spark task
SECONDS_TO_STOP = 10.0


class Spark:
    """A SparkSession, as an engine."""

    retries = True

    def __init__(self, session):
        self.session = session

    @contextlib.contextmanager
    def scratch(self, folder: str, prefix: str, hosts: int = 1):
        """publishing.scratch; before a signal deletes it, the tasks that write there are ended."""

        def stop():  # in a thread: this one may be in the midst of a call to Java
            stopping = threading.Thread(target=self.session.stop, daemon=True)
            stopping.start()
            stopping.join(SECONDS_TO_STOP)

        with publishing.scratch(folder, prefix, hosts) as path, atomic_files.before_end(stop):
            yield path

    def publishing(self, folder: str):
        return publishing.succeeding(folder)

    def folder(self, scratch: str) -> Callable[[], str]:
        path = places.absolute(scratch)
        return lambda: executors.own_folder(path)

    @contextlib.contextmanager
    def sharing(self, value: Any):
        sent = self.session.sparkContext.broadcast(value)
        yield lambda: sent.value
        sent.destroy()

    @contextlib.contextmanager
    def map(self, work, tasks, title, size, together, bad=None):
        found = lambda pairs: executors.joined(pairs, work, together)
        with job(self.session, title):
            triples = self._numbered(tasks, size).mapPartitions(found).collect()
        good = sift(triples, bad or Skipping(0))
        yield ((index, key, value) for index, (key, value) in good)

    def _numbered(self, tasks, size):
        """(index, task) of all tasks in partitions, each for one Spark task."""
        groups = self._groups(len(tasks), size)
        return self.session.sparkContext.parallelize(list(enumerate(tasks)), groups)

    def _groups(self, most, size):
        """How many Spark tasks do `most` tasks of `size` bytes: one for each GROUP, but at least
        two for each core, and no more than there are."""
        least = max(2 * self.session.sparkContext.defaultParallelism, -(-size // GROUP))
        return max(min(most, least), 1)

    def count(self, tasks, columns, min_count, size, bad):
        """As Processes.count; the counts of each Spark task go, in as many parts as there are tasks
        to add them up, through one shuffle, and only what is not rare comes to the driver."""
        parts = min(self._groups(len(tasks), size), 256)
        with job(self.session, "Counting"):
            numbered = self._numbered(tasks, size)
            counted = numbered.mapPartitions(lambda pairs: executors.count(pairs, columns, parts))
            add_up = lambda pairs: executors.add_up(pairs, columns, min_count)
            collected = counted.partitionBy(parts, int).mapPartitions(add_up).collect()
        counts = [found for _, found in sift(collected, bad)]
        seen = sum(n for n, _ in counts)
        logging.info("Counted %d categories.", seen)
        return seen, vocabulary.add_up(columns, (part for _, part in counts))

    def shuffle(self, data, work, rows, names):
        """As Processes.shuffle: the key of a record says which file it goes to, and Spark's shuffle
        brings it there and sorts each file, on disk where memory is short."""
        cuts, values = work.order.cuts(rows, len(names)), self._part_values(len(names))
        most = len(work.inputs)
        groups = self._groups(most, sum(file.bytes for file in data.files))
        scattered = self.session.range(0, most, 1, groups).mapInArrow(
            lambda x: executors.scatter(x, work, cuts, values), executors.RECORDS
        )
        sorted_ = scattered.repartition(len(values), "part").sortWithinPartitions("key")
        written = sorted_.mapInArrow(lambda x: executors.write_part(x, work), executors.WRITTEN)
        try:
            with job(self.session, "Shuffling"):
                found = {row.part: row for row in written.collect()}
        except BadInput:
            sampling.read_all(self, data, work, "Counting")  # names the first bad record
            raise
        rows = [found.get(value) for value in values.tolist()]
        facts = [(x.path, (x.rows, x.positives)) if x else (None, (0, 0)) for x in rows]
        return dict(zip(names, facts))

    def _part_values(self, n):
        """int32 [n]: for each partition, a number that `repartition` puts there."""
        numbers = self.session.range(64 * n + 64, numPartitions=1)
        rows = numbers.selectExpr("id", f"pmod(hash(cast(id as int)), {n}) as part").collect()
        values = {row.part: row.id for row in reversed(rows)}
        return np.array([values[part] for part in range(n)], np.int32)


def sift(triples: Iterable[Tuple[int, int, Any]], bad: Skipping) -> List[Tuple[int, Any]]:
    """The (index, result) among `executors.events` of all tasks, in order; counts the bad records.

    Raises:
        BadInput: a task refused its input, or a record is one bad one too many.
    """
    good = []
    for index, kind, event in sorted(triples, key=lambda item: item[0]):
        if kind == REFUSED:
            raise BadInput(event)
        if kind == BAD:
            bad.add(BadRecord(*event))
        else:
            good.append((index, event))
    return good
