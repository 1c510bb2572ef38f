"""Which functions reach the files at a path, for code that reads and writes them all alike.

Local paths are the operating system's. Remote ones, s3:// and the like, are read through TensorFlow
by a program that has loaded it (runtime.storage.gfile), else read and written through pyarrow: the
data tools, and Spark's executors. Needs neither of them itself, nor absl.
"""

import contextlib
import os
import sys
from concurrent import futures
from typing import Any, Callable, Iterable, Iterator, List

from deepfm.errors import BadInput
from deepfm.records.storage import local

_THREADS = 16  # requests to a server at once
_clients = []  # at most one, which the program's start gives


def read_remote_by(client):
    """Has this program reach remote files through a module like `local` from now on."""
    _clients[:] = [client]


def is_remote(path: str) -> bool:
    """Whether a path has a scheme, such as s3://."""
    return "://" in (path or "")


def by_tensorflow(path: str) -> bool:
    """Whether the files at a path are reached through TensorFlow, and so can only be read."""
    return is_remote(path) and bool(_clients)


def of(path: str):
    """The module with the functions for a path (BadInput: none); `local` says what they are."""
    if not is_remote(path):
        return local
    if _clients:
        _clients[0].check_client(path)
        return _clients[0]
    try:
        from deepfm.records.storage import arrow
    except ImportError as error:
        raise BadInput(
            f"{path}: remote paths need pyarrow, which is not installed; run '{sys.executable} -m "
            "pip install pyarrow'."
        ) from error

    return arrow


def absolute(path: str) -> str:
    """The path as seen from any folder."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def appending(at_once: int) -> Iterator[Callable[[str, bytes], Any]]:
    """Yields a function (path, bytes) that appends to new files; makes them and their folders.

    Args:
        at_once: how many are open at once. For one more the first one is closed, for good.
    """
    with contextlib.ExitStack() as stack:
        opened = {}

        def append(path, data):
            if path not in opened:
                if len(opened) == at_once:
                    opened.pop(next(iter(opened))).close()
                opened[path] = stack.enter_context(of(path).create(path))
            opened[path].write(data)

        yield append


def each(path: str, work: Callable[[Any], Any], items: Iterable[Any]) -> List[Any]:
    """[work(item) for item in items]; at once where each waits for the server of `path`."""
    if not is_remote(path) or by_tensorflow(path):
        return [work(item) for item in items]
    with futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))
