"""The files of this machine, or of a folder that all machines share.

`arrow` has the same functions for remote paths, and `gfile` those that read.
"""

import contextlib
import glob as globbing
import os
import shutil
from typing import BinaryIO, Iterator, List, Tuple


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
