"""The identity of a file: its size and a checksum of its content, not its name, folder or age.

A data set of up to 256 MiB is read whole. Of a larger one, 2,048 blocks of 16 KiB are read, spread
evenly over each file and at least 4 per file; so a large file that differs only in a few records
between these blocks, at the same size, counts as unchanged. Of remote files 64 blocks are read
instead, and the modification time counts as well.

A local file whose modification and change times are as recorded is not read again.
"""

import concurrent.futures
import hashlib
import os
import posixpath
from typing import List, Mapping, NamedTuple, Optional, Sequence, Tuple

from absl import logging

from deepfm.errors import BadInput
from deepfm.records.storage.places import is_remote
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf

_WHOLE = 256 << 20  # bytes; a data set up to this size is read whole
_BLOCK = 16 << 10  # bytes
_BLOCKS, _LEAST = 2048, 4  # blocks of a larger data set, and of each of its files
_REMOTE_BLOCKS = 64
_REMOTE_FILES = 1024  # most remote files whose content is read
_READ = 1 << 20  # bytes to read at once
_THREADS = 16


class Identity(NamedTuple):
    """The identity of a file when it was last read.

    Attributes:
        bytes: its size.
        checksum: checksum of its content or of blocks of it, with the number of blocks.
        stamp: the file system's times; while they stay the same, so does the rest.
    """

    bytes: int
    checksum: str
    stamp: str


def identify(paths: Sequence[str], known: Optional[Mapping[str, Identity]]) -> List[Identity]:
    """The Identities of the files of a data set.

    Args:
        paths: local or s3://.
        known: path -> Identity from an earlier call; a file with the same stamp is not read again.
    """
    known = known or {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        stats = list(threads.map(_stat, paths))
        total = sum(size for size, _ in stats)
        every = -(-len(paths) // _REMOTE_FILES)
        blocks = []
        for i, (path, (size, _)) in enumerate(zip(paths, stats)):
            if is_remote(path):
                blocks.append(0 if i % every else max(_REMOTE_BLOCKS * size // max(total, 1), 1))
            else:
                blocks.append(None if total <= _WHOLE else max(_BLOCKS * size // total, _LEAST))
        return list(threads.map(_identify, paths, stats, blocks, map(known.get, paths)))


def _stat(path) -> Tuple[int, str]:
    """(bytes, stamp)."""
    if is_remote(path):
        status = tf.io.gfile.stat(path)
        return status.length, str(status.mtime_nsec)
    status = os.stat(path)
    # A program can set the modification time back, but not the change time.
    return status.st_size, f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"


def _identify(path, stat, blocks, known) -> Identity:
    """The Identity of a file, reading at most `blocks` blocks of it; None reads all."""
    size, stamp = stat
    whole = blocks is None or size <= blocks * _BLOCK
    kind = "whole" if whole else str(blocks)
    if known and known[::2] == stat and known.checksum.startswith(f"{kind}-"):
        return known
    digest = hashlib.blake2b(digest_size=12)
    with tf.io.gfile.GFile(path, "rb") if is_remote(path) else open(path, "rb") as f:
        if whole:
            for block in iter(lambda: f.read(_READ), b""):
                digest.update(block)
        else:
            for i in range(blocks):
                f.seek((size - _BLOCK) * i // max(blocks - 1, 1))
                digest.update(f.read(_BLOCK))
    checksum = f"{kind}-{digest.hexdigest()}"
    return Identity(size, f"{checksum}-{stamp}" if is_remote(path) else checksum, stamp)


def differing(identities: Mapping[str, Identity]) -> Optional[str]:
    """The path of a file that is gone or has changed; None if all are the same.

    Files that cannot be read count as unchanged, because a server that refuses a remote file may
    also call it missing. Whoever reads on gets the error.

    Args:
        identities: path -> Identity from `identify`.
    """
    try:
        now = identify(list(identities), identities)
    except (OSError, tf.errors.OpError):
        local = (path for path in identities if not is_remote(path))
        return next((path for path in local if not os.path.exists(path)), None)
    for (path, was), found in zip(identities.items(), now):
        if was[:2] != found[:2]:
            return path
    return None


def check_unchanged(data):
    """Refuses (BadInput) files that are gone or have changed since the job began.

    Compares the sizes of local files, and the content of files that were identified.
    """
    local = [file for file in data.files if not is_remote(file.path)]
    changed = differing({f.path: f.identity for f in data.files if f.identity})
    for file in local:
        if not tf.io.gfile.exists(file.path):
            raise BadInput(f"{file.path}: deleted since the job began.")
        size = tf.io.gfile.stat(file.path).length
        if size != file.bytes:
            raise BadInput(
                f"{file.path}: had {file.bytes:,} bytes when the job began and has {size:,} now; "
                "train on files that nobody writes to."
            )
    if changed:
        raise BadInput(
            f"{changed}: replaced since the job began; train on files that nobody writes to."
        )


def check_all_read(files: Sequence, rows: Optional[int], read: int):
    """Raises RemoteError if fewer than all `rows` (None: unknown) of remote DataFiles were read."""
    if not files or not is_remote(files[0].path):
        return
    folder = posixpath.dirname(files[0].path)
    if rows is None:
        logging.warning(
            "No dataset.json in %s gives the number of rows: if the server stopped answering "
            "for a while, records may be missing without an error.",
            folder,
        )
    elif read < rows:
        raise remote_files.ended_early(folder, f"{read:,} of {rows:,} records")
