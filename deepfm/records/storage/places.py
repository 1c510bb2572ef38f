"""The files at a path: local ones by the functions of this module, remote ones by a module with
functions of the same names; see `of`. Local means of this machine, or of a folder that all share.

Remote files, s3:// and the like, are read through TensorFlow by a program that has loaded it
(runtime.remote_files), else read and written through pyarrow (`arrow`): the data tools, and
Spark's executors. This module needs neither of them, nor absl.
"""

import contextlib
import glob as globbing
import os
import shutil
import sys
from concurrent import futures
from typing import Any, BinaryIO, Callable, Iterable, Iterator, List, Tuple

from deepfm.errors import BadInput

S3_ADVICE = "check the path, the server and its permissions (AWS_REGION, AWS_*, S3_ENDPOINT)"
_THREADS = 16  # requests to a server at once
_clients = []  # at most one, which the program's start gives


def read_remote_by(client):
    """Has this program reach remote files through a module like this from now on."""
    _clients[:] = [client]


def is_remote(path: str) -> bool:
    """Whether a path has a scheme, such as s3://."""
    return "://" in (path or "")


def by_tensorflow(path: str) -> bool:
    """Whether the files at a path are reached through TensorFlow, and so can only be read."""
    return is_remote(path) and bool(_clients)


def of(path: str):
    """The module with the functions for a path (BadInput: none), which are those below."""
    if not is_remote(path):
        return sys.modules[__name__]
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


def check_s3_address():
    """Refuses (BadInput) an S3_ENDPOINT with a scheme: no client takes it."""
    address = os.environ.get("S3_ENDPOINT", "")
    scheme, separator, host = address.partition("://")
    if separator:
        raise BadInput(
            f"S3_ENDPOINT={address}: give HOST:PORT, without a scheme; try "
            f"S3_ENDPOINT={host.rstrip('/')} S3_USE_HTTPS={int(scheme == 'https')}."
        )


def absolute(path: str) -> str:
    """The path as seen from any folder."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def appending(at_once: int) -> Iterator[Callable[[str, bytes], Any]]:
    """Yields a function (path, bytes) that appends to new files; makes them and their folders.

    `at_once` are open; for one more the first one is closed, for good.
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


def open_file(path: str) -> BinaryIO:
    """Opens a file to read bytes."""
    return open(path, "rb")


def content(path: str) -> bytes:
    """All bytes of a file; raises OSError if it cannot be read."""
    with open(path, "rb") as f:
        return f.read()


def size(path: str) -> int:
    """The bytes of a file."""
    return os.path.getsize(path)


def exists(path: str) -> bool:
    """Whether there is a file or a folder."""
    return os.path.exists(path)


def is_dir(path: str) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)


def names(folder: str) -> List[str]:
    """The sorted names in a folder; none if there is no such folder."""
    return sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []


def walk(top: str) -> Iterator[Tuple[str, List[str], List[str]]]:
    """Yields (a folder, names of the folders in it, names of the files in it) from `top` down.

    It follows links to folders, unless one leads to a folder in which the link is.
    """

    def refuse(error):
        raise error

    for folder, folders, files in os.walk(top, onerror=refuse, followlinks=True):
        loops = {x for x in folders if _leads_up(os.path.join(folder, x))}
        folders[:] = [x for x in folders if x not in loops]
        yield folder, folders, files


def _leads_up(path):
    """Whether a path is a link to a folder in which it is."""
    inside = os.path.join(os.path.realpath(os.path.dirname(path)), "")
    return os.path.islink(path) and inside.startswith(os.path.join(os.path.realpath(path), ""))


def glob(pattern: str) -> List[str]:
    """The paths of files and folders that match a pattern."""
    return globbing.glob(pattern)


def create(path: str) -> BinaryIO:
    """Opens a new file to write bytes, in a folder that is there."""
    return open(path, "wb")


def make_dir(folder: str):
    """Makes a folder unless it is there, and those above it."""
    if folder:
        os.makedirs(folder, exist_ok=True)


def make_inner(folder: str):
    """Makes a folder unless it is there, but none above it: if those are gone, so is the job."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)


def remove(path: str):
    """Deletes a file; raises FileNotFoundError if there is none."""
    os.remove(path)


def move(source: str, target: str):
    """Gives a file another path on the same file system, in place of a file that is there."""
    os.replace(source, target)


def delete(folder: str):
    """Deletes a folder and all in it."""
    shutil.rmtree(folder)
