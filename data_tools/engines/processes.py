"""The processes of one machine, which work on tasks side by side: an engine.

They are forked, so they start at once and share imported modules in memory. No process outlives
the program: closing the results kills them, and they exit when their parent is gone.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from data_tools.common import publishing
from data_tools.common.progress import Progress, Skipping
from deepfm.records import atomic_files
from deepfm.records.schema import BadRecord
from deepfm.runtime import program


class Processes:
    """Processes of this machine.

    Args:
        number: how many; 1: this one.
        memory: bytes of records that they may hold, all together, to shuffle them.
        room: the vocabulary.Room for counting categories.

    Attributes:
        number: how many; None: not known.
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
    context = multiprocessing.get_context("fork")
    todo = enumerate(tasks)
    processes = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(atomic_files.before_end(lambda: _kill(processes)))
        stack.callback(_kill, processes)
        # Hold signals back, or one could arrive when a process has started but is not yet listed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, program.SIGNALS)
        try:
            for _ in range(min(num_workers, len(tasks))):
                ours, theirs = context.Pipe()
                arguments = (work, theirs, os.getpid())
                processes[ours] = context.Process(target=_serve, args=arguments, daemon=True)
                processes[ours].start()
                theirs.close()
                ours.send(next(todo))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from _collect(processes, todo)


def _kill(processes):
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.join()


def _collect(processes, todo):
    busy = set(processes)
    while busy:
        for pipe in connection.wait(busy):
            try:
                index, event, error, done = pipe.recv()
                task = next(todo, None) if done else None
                if task is not None:
                    pipe.send(task)
            except (EOFError, ConnectionError) as gone:
                process = processes[pipe]
                process.join()
                raise ChildProcessError(
                    f"worker process {process.pid} ended unexpectedly with exit code "
                    f"{process.exitcode} (-9: killed, maybe out of memory; try fewer --num_workers)"
                ) from gone
            if error is not None:
                raise error
            if not done:
                yield index, event
            elif task is None:
                busy.remove(pipe)


def _serve(work, pipe, parent):
    """A worker process: takes (index, task) from the pipe until it is killed."""
    program.handle_signals(signal.SIG_DFL)
    for number in program.FROM_TERMINAL:  # the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, program.SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            index, task = pipe.recv()
            try:
                for event in work(task):
                    pipe.send((index, event, None, False))
                pipe.send((index, None, None, True))
            except Exception as error:  # the parent raises it again
                pipe.send((index, None, error, True))


def _end_with(parent):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
