"""Writes files whole or not at all, and deletes the temporary files that killed runs left.

What gets a name is on the disk before (`sync`), and the name is before anything older is deleted.

A process locks each temporary file or folder that it makes. The lock ends with the process, however
that ends, so a temporary file without a lock is left over. Where there are no locks, it stays.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from typing import Callable, Iterator, List, Tuple

from deepfm.errors import naming

_TRIES = 10  # to make a temporary file that no other process deletes
# How a temporary name ends, after its prefix: in a number, or in what mkdtemp puts there.
ENDS = r"(\d+|[a-z0-9_]{8})"
clean_ups: List[Callable[[], None]] = []  # what a signal does before it ends the program


def lock(fd: int, if_unknown: bool = False) -> bool:
    """Locks an open file or folder; returns False if another process holds the lock.

    On a file system without locks, returns `if_unknown`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return if_unknown
    return True


def sync(path: str):
    """Waits until a local file, or the names in a folder, are on the disk."""
    with naming(path), contextlib.ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fd)
            os.fsync(fd)
        except OSError as error:  # some folders cannot be read, and some file systems sync none
            if not os.path.isdir(path) or error.errno == errno.EIO:
                raise


def sync_all(folder: str):
    """Waits until all in a local folder are on the disk."""
    for root, _, names in os.walk(folder):
        for path in (*(os.path.join(root, name) for name in names), root):
            sync(path)


def replace(source: str, target: str):
    """Gives a local file another name in its file system, once it is on the disk."""
    sync(source)
    os.replace(source, target)
    sync(os.path.dirname(os.path.abspath(target)))


def remove(folder: str, prefix: str):
    """Deletes the temporary files with this prefix in a folder that no process is writing."""
    for found in os.scandir(folder):
        if not re.fullmatch(re.escape(prefix) + ENDS, found.name):
            continue
        # Another process deletes it, too; or it is of another user, whose it stays.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            fd = os.open(found.path, os.O_RDONLY)
            try:
                if lock(fd) and os.path.samestat(os.stat(found.path), os.fstat(fd)):
                    delete(found.path)
            finally:
                os.close(fd)


def delete(path: str):
    """Deletes a file or a folder that a killed run left, and logs that."""
    logging.getLogger("absl").info("Deleting %s, left by a run that was killed.", path)
    shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


@contextlib.contextmanager
def before_end(clean_up: Callable[[], None]):
    """In this context, a signal calls `clean_up()` before it ends the program."""
    clean_ups.append(clean_up)
    try:
        yield
    finally:
        clean_ups.remove(clean_up)


@contextlib.contextmanager
def scratch(parent: str, prefix: str) -> Iterator[str]:
    """Yields a new folder in `parent`, deleted at the end; removes those that killed runs left.

    Raises:
        OSError: nothing can be written there, or the body raised one; it always names a file.
    """
    remove(parent, prefix)
    path, fd = _locked(lambda: tempfile.mkdtemp(prefix=prefix, dir=parent), os.O_RDONLY)
    try:
        with naming(parent), before_end(lambda: _remove_scratch(path, parent, prefix)):
            yield path
    finally:
        _remove_scratch(path, parent, prefix)
        os.close(fd)


def _locked(make: Callable[[], str], flags: int) -> Tuple[str, int]:
    """Opens and locks a new temporary file or folder, at a path that make() returns.

    Before it is locked, other processes may take it for a leftover and delete it; then once more,
    under another name, which they have not seen.
    """
    for _ in range(_TRIES):
        path = make()
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            fd = os.open(path, flags, 0o666)
            with contextlib.suppress(FileNotFoundError):
                if lock(fd, if_unknown=True) and os.stat(path):  # it is there
                    return path, fd
            os.close(fd)
        time.sleep(0.01)
    path = make()
    return path, os.open(path, flags, 0o666)


def _remove_scratch(path, parent, prefix):
    """Removes a folder that others may still be writing to.

    A task of a Spark job that failed or was ended runs on for a while. So the folder first gets a
    name that no task knows: nothing new comes, and what was on its way goes the second time.
    """
    unknown = os.path.join(parent, f"{prefix}{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(path, unknown)
    for left in (unknown, path) * 2:
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def open_whole(path: str):
    """Opens a local text file for writing, which gets its name only when it is complete.

    Raises:
        OSError: it cannot be written; the error always names the file.
    """
    target = os.path.realpath(path)  # for a link, its target
    folder, name = os.path.split(target)
    prefix = f".{name}.tmp-"
    remove(folder, prefix)
    unused = lambda: os.path.join(folder, f"{prefix}{secrets.randbelow(10**7)}")
    with contextlib.ExitStack() as stack, naming(path):
        temporary, fd = _locked(unused, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        stack.callback(os.close, fd)
        try:
            with open(os.dup(fd), "w", encoding="utf-8") as f:  # the lock outlives f
                yield f
            replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)


def write_whole(path: str, text: str):
    """Writes a text file, whole or not at all."""
    with open_whole(path) as f:
        f.write(text)


def as_json(content) -> str:
    """The text of a JSON file, with null for NaN and infinity, which JSON lacks."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1) + "\n"


def write_json(path: str, content):
    """Writes JSON, whole or not at all."""
    write_whole(path, as_json(content))
