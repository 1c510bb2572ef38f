"""A pool of processes, which yield what they find as they find it.

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

from deepfm.records import atomic_files
from deepfm.runtime import program


def run(work, tasks, num_workers):
    """As processes.run."""
    context = multiprocessing.get_context("fork")
    todo = enumerate(tasks)
    processes = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(atomic_files.before_end(lambda: _kill(processes)))
        stack.callback(_kill, processes)
        with _signals_held_back():  # or one could come when a process is started, but not known
            for _ in range(min(num_workers, len(tasks))):
                ours, theirs = context.Pipe()
                arguments = (work, theirs, os.getpid())
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                processes[ours] = process
                theirs.close()
                with _named(process):
                    ours.send(next(todo))
        yield from _collect(processes, todo)


@contextlib.contextmanager
def _signals_held_back():
    """In this context, program.SIGNALS wait, whichever thread the system hands them to.

    Blocking them would not do: a thread that another library has started does not block them. In a
    child that is forked here, they have their effect, but for those from the terminal.
    """
    if threading.current_thread() is not threading.main_thread():  # it handles them
        yield
        return
    came, process = [], os.getpid()

    def note(number, _):
        if os.getpid() == process:
            came.append(number)
        elif number not in program.FROM_TERMINAL:
            os._exit(128 + number)

    handlers = {number: signal.getsignal(number) for number in program.SIGNALS}
    try:
        for number in program.SIGNALS:
            if handlers[number] not in (signal.SIG_IGN, None):
                signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        for number in came:
            os.kill(os.getpid(), number)


def _kill(processes):
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.join()


@contextlib.contextmanager
def _named(process):
    """In this context, a worker that is gone is named."""
    try:
        yield
    except (EOFError, OSError) as gone:  # the latter also in the middle of a message
        process.join()
        raise ChildProcessError(
            f"worker process {process.pid} ended unexpectedly with exit code {process.exitcode} "
            "(-9: killed, maybe out of memory; try fewer --num_workers)"
        ) from gone


def _collect(processes, todo):
    busy = set(processes)
    while busy:
        for pipe in connection.wait(busy):
            with _named(processes[pipe]):
                index, event, error, done = pipe.recv()
            task = next(todo, None) if done else None
            if task is not None:
                with _named(processes[pipe]):
                    pipe.send(task)
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
