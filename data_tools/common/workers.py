"""Runs a generator over tasks, in this process or in several, and passes on what it yields.

The processes are forked, so they start at once and share imported modules in memory. Fork before
the program's first TensorFlow session, whose threads do not survive a fork. No process outlives
the program: closing the results kills them, and they exit when their parent is gone.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import connection
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from data_tools.common.progress import Progress
from data_tools.common.skipping import Skipping
from deepfm.records.bad_record import BadRecord
from deepfm.runtime import program


@contextlib.contextmanager
def results(
    work: Callable[[Any], Iterator[Any]],
    tasks: Sequence[Any],
    num_workers: int,
    title: str,
    total: int,
    bad: Optional[Skipping] = None,
) -> Iterator[Iterator[Tuple[int, Any]]]:
    """What `run` yields, without the bad records, which `bad` counts; shows a progress bar.

    Args:
        work: yields (bytes done since the last one, result) and BadRecords.
        tasks, num_workers: as for `run`.
        title: the title of the bar.
        total: bytes to do in total.
        bad: counts the BadRecords.

    Yields:
        An iterator over (index of the task, result).
    """
    progress = Progress(title, total / 1e6, "MB")

    def good(events):
        for index, event in events:
            if isinstance(event, BadRecord):
                bad.add(event)
                continue
            done, result = event
            progress.add(done / 1e6)
            yield index, result

    with contextlib.closing(run(work, tasks, num_workers)) as events:
        yield good(events)
    progress.finish()


def one_thread_session(graph: tf.Graph) -> tf.compat.v1.Session:
    """A session with one thread: several processes, not threads, use the machine's cores."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
    )
    return tf.compat.v1.Session(graph=graph, config=config)


def native(function: Callable, *inputs: Tuple[tf.DType, List[Optional[int]]]) -> Callable:
    """Turns a function of tensors into one of arrays, which runs its ops in one thread.

    Args:
        function: tensors -> tensors to fetch.
        inputs: dtype and shape of each input tensor.
    """
    with tf.Graph().as_default() as graph:
        tensors = [tf.compat.v1.placeholder(*x) for x in inputs]
        fetched = function(*tensors)
    return one_thread_session(graph).make_callable(fetched, tensors)


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
        stack.enter_context(program.before_end(lambda: _kill(processes)))
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
