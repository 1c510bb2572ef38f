"""What a killed run left under a temporary name, told from what another run is just making.

Whoever makes a temporary file or folder holds a lock on it. The lock ends with its process, however
that ends, so what has a temporary name and no lock is nobody's.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from typing import Iterator

from absl import logging

from deepfm.runtime import program

# Of a temporary name, behind its prefix: the number of a process, or what mkdtemp puts there.
ENDS = r"(\d+|[a-z0-9_]{8})"


def lock(fd: int) -> bool:
    """Takes the lock of an open file or folder; False where another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: there nothing can be told
        return False
    return True


def remove(folder: str, prefix: str):
    """Deletes what is in a folder under a temporary name with this prefix and is not being made."""
    for found in os.scandir(folder):
        if not re.fullmatch(re.escape(prefix) + ENDS, found.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process deletes it, too
            fd = os.open(found.path, os.O_RDONLY)
            try:
                if lock(fd):
                    delete(found.path)
            finally:
                os.close(fd)


def delete(path: str):
    """Deletes a file or a folder that a killed run left, and says so."""
    logging.info("Deleting %s, left by a run that was killed.", path)
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


@contextlib.contextmanager
def scratch(parent: str, prefix: str) -> Iterator[str]:
    """Yields a new folder in a folder, deleted at the end; removes those that killed runs left.

    Raises:
        OSError: nothing can be written there, or the body failed so; it always names a file.
    """
    remove(parent, prefix)
    path = tempfile.mkdtemp(prefix=prefix, dir=parent)
    fd = os.open(path, os.O_RDONLY)
    try:
        lock(fd)
        with naming(parent), program.before_end(lambda: shutil.rmtree(path, ignore_errors=True)):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


@contextlib.contextmanager
def naming(path: str):
    """Adds a path to an error of the system that names none: a full disk's, for example."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            raise OSError(error.errno, error.strerror, path) from error
        raise
