"""Joins the parts of files, on any engine."""

import contextlib
import functools
import gzip
import posixpath
from typing import Dict, Iterator, List, Tuple

from deepfm.errors import naming
from deepfm.records.storage import places

COPY = 1 << 20  # bytes copied at once
GZIP_LEVEL = 4


def join(
    engine, files: Dict[str, List[str]], compress: bool, scratch: str, size: int
) -> Dict[str, str]:
    """Joins the parts of each file in order; {name: path of the whole}.

    Args:
        engine: who does it.
        files: {name: paths of its parts}.
        compress: whether to compress them.
        scratch: the folder to write to.
        size: bytes of all.
    """
    wholes = {} if compress else {name: parts[0] for name, parts in files.items() if not parts[1:]}
    tasks = [(name, parts) for name, parts in files.items() if name not in wholes]
    work = functools.partial(
        _join, compress=compress, folder=engine.folder(scratch), remove=not engine.retries
    )
    if tasks:
        title = "Compressing" if compress else "Joining"
        with engine.map(work, tasks, title, size, lambda _, path: path) as results:
            wholes.update((name, path) for _, name, path in results)
    return wholes


def _join(task, compress, folder, remove) -> Iterator[Tuple[int, str, str]]:
    name, parts = task
    whole = posixpath.join(folder(), name)
    files = places.of(whole)
    with naming(whole), files.create(whole) as raw, compressed(raw, compress) as f:
        for part in parts:
            with files.open_file(part) as copied:
                for block in iter(lambda copied=copied: copied.read(COPY), b""):
                    f.write(block)
                    yield len(block), name, whole
            if remove:
                files.remove(part)


def compressed(raw, compress: bool):
    """A file that writes to an open one, with or without compression.

    One gzip member per file: TensorFlow reads the first and ignores the rest.
    """
    if not compress:
        return contextlib.nullcontext(raw)
    return gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0)
