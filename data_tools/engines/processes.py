"""The processes of one machine, which work on tasks side by side: an engine."""

import contextlib
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from data_tools.common import publishing
from data_tools.common.progress import Progress, Skipping
from deepfm.records.schema import BadRecord


class Processes:
    """Processes of this machine.

    Args:
        number: how many; 1: this one.
        memory: bytes of records that they may hold, all together, to shuffle them.
        room: the vocabulary.Room for counting categories.

    Attributes:
        retries: whether a task may be tried again, so that what it reads has to stay.
    """

    retries = False

    def __init__(self, number: int = 1, memory: int = 512 << 20, room=None):
        self.number, self.memory, self.room = number, memory, room

    def scratch(self, folder: str, prefix: str, hosts: int = 1):
        """A context: a new hidden folder in another one; see publishing.scratch."""
        return publishing.scratch(folder, prefix, hosts)

    def publishing(self, folder: str):
        """A context in which the data set of a folder is put in place."""
        return contextlib.nullcontext()

    def folder(self, scratch: str) -> Callable[[], str]:
        """A function that a task calls for a folder in `scratch`, where it may write new files."""
        return lambda: scratch

    def sharing(self, value: Any):
        """A context: a function that returns `value` to every task."""
        return contextlib.nullcontext(lambda: value)

    @contextlib.contextmanager
    def map(
        self,
        work: Callable[[Any], Iterator[Any]],
        tasks: Sequence[Any],
        title: str,
        size: int,
        together: Callable[[Any, Any], Any],
        bad: Optional[Skipping] = None,
    ) -> Iterator[Iterator[Tuple[int, Any, Any]]]:
        """Calls `work` on every task, and shows the progress.

        Args:
            work: yields BadRecords and (bytes read since the last one, key, value).
            tasks: the arguments to call it with.
            title: what is being done.
            size: bytes to read in total.
            together: joins two values of a key; an engine may pass on those of a task joined.
            bad: counts the BadRecords.

        Yields:
            An iterator over (index of the task, key, value).

        Raises:
            BadInput: a task refused its input, or a record is one bad one too many.
        """
        progress = Progress(title, size / 1e6, "MB")

        def good(events):
            for index, event in events:
                if isinstance(event, BadRecord):
                    bad.add(event)
                    continue
                done, key, value = event
                progress.add(done / 1e6)
                yield index, key, value

        with contextlib.closing(run(work, tasks, self.number)) as events:
            yield good(events)
        progress.finish()

    def count(self, tasks, columns, min_count: int, size: int, bad: Skipping):
        """Counts the categories of RawSlices' training rows.

        Returns:
            (categories, Counts of each field, perhaps without those that are rarer than min_count).

        Raises:
            BadInput: one bad row too many, or the categories take more than the room.
        """
        from data_tools.click_logs import slices, vocabulary  # which other jobs need not load

        with self.map(slices.count_rows, tasks, "Counting", size, None, bad) as results:
            counts = vocabulary.add_up(columns, (found for _, _, found in results), self.room)
        seen = sum(field.distinct() for field in counts)
        if seen and self.room:
            self.room.check_ids(counts, min_count)
        return seen, counts

    def shuffle(self, data, work, rows: Sequence[int], names: Sequence[str]):
        """Writes the records of a DataSet that `work` chooses, in its order, to even files.

        Args:
            work: selecting.Work.
            rows: how many records there are to write of each task.

        Returns:
            {name: (path now, (records, positives))} of the files, in the order of `names`.
        """
        from data_tools.rebalancing import shuffling

        return shuffling.shuffle(self, data, work, rows, names)


def run(
    work: Callable[[Any], Iterator[Any]], tasks: Sequence[Any], num_workers: int
) -> Iterator[Tuple[int, Any]]:
    """Yields (index of the task, event) for every event that `work(task)` yields.

    Events of one task keep their order; with several processes, those of different tasks mix.
    Tasks start in order. Close the iterator to stop all of them.

    Args:
        work: a generator function; with several processes its events and exceptions are pickled.
        tasks: the arguments to call it with, one each.
        num_workers: number of processes; 1: work in this one.

    Raises:
        OSError: a process was killed, or ran out of memory.
        Exception: whatever `work` raises.
    """
    if num_workers <= 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            for event in work(task):
                yield index, event
        return
    from data_tools.engines import pool  # which one process does without

    yield from pool.run(work, tasks, num_workers)
