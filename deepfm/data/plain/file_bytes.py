"""What the bytes of a file show: its kind, its compression, and whether another holds the same."""

import contextlib
import os
import posixpath
import re
import struct
import zlib
from concurrent import futures
from typing import Callable, Iterable, Iterator, List, Sequence, Tuple

from deepfm.data.plain import data_file
from deepfm.data.plain.data_file import DataFile
from deepfm.errors import BadInput
from deepfm.runtime.storage import places

GZIP = b"\x1f\x8b"
_HEAD = 4096  # bytes
_THREADS = 16
_PARQUET, _CSV = "a Parquet table", "a CSV table"
_UNREADABLE = (".snappy", ".bz2", ".lz4", ".zst", ".deflate")  # what Hadoop's other codecs write
_TABLE = (
    "'python -m data_tools.prepare_criteo' reads raw columns, 'python -m "
    "data_tools.libsvm_to_tfrecord' columns of ids"
)
_UNPACK = "unpack it with '{}', or compress it with gzip and name it .gz"
_EXTRACT = "extract its files with '{}' and name those"
_OTHERS = {  # the first bytes of a file -> (its kind, what to do)
    b"\xfd7zXZ\0": ("an xz file", _UNPACK.format("xz -d")),
    b"BZh": ("a bzip2 file", _UNPACK.format("bzip2 -d")),
    b"(\xb5/\xfd": ("a Zstandard file", _UNPACK.format("zstd -d")),
    b"\x04\x22M\x18": ("an LZ4 file", _UNPACK.format("lz4 -d")),
    b"PK\3\4": ("a zip archive", _EXTRACT.format("unzip")),
    b"PAR1": (_PARQUET, _TABLE),
    b"ORC": ("an ORC table", "write it as Parquet or CSV, which the data tools read"),
    b"Obj\1": ("an Avro table", "write it as Parquet or CSV, which the data tools read"),
    **dict.fromkeys(
        (b"x\x01", b"x\x9c", b"x\xda"),
        ("ZLIB-compressed", "write it plain, or with GZIP and named .gz"),
    ),
}


def head(path: str, tables: bool = True) -> bytes:
    """The first bytes of a file, unpacked if it is gzip; none for the gzip of nothing.

    Args:
        path: local or remote.
        tables: whether it may be Parquet or CSV.

    Raises:
        BadInput: its name and compression disagree, or it is of a kind that is not read.
    """
    with places.of(path).open_file(path) as f:
        found = f.read(_HEAD)
    packed = found.startswith(GZIP)
    if path.endswith(".gz") and not packed:
        raise BadInput(f"{path}: is named .gz but is not gzip-compressed; rename or compress it.")
    if packed:
        with contextlib.suppress(zlib.error):  # whoever reads the file says where it is damaged
            found = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(found, _HEAD)
    kind, advice = _other_kind(found, tables)
    if kind:
        raise BadInput(f"{path}: by its first bytes {kind}{' in gzip' * packed}; {advice}.")
    if path.endswith(_UNREADABLE):
        codec = posixpath.splitext(path)[1]
        raise BadInput(f"{path}: {codec} cannot be read; write it plain or as .gz (codec gzip).")
    if packed and not path.endswith(".gz"):
        raise BadInput(f"{path}: is gzip-compressed; its name must end in .gz.")
    return found


def _other_kind(found, tables):
    """(the kind of a file that is not read, or "" if it may be; what to do), by its first bytes."""
    if data_file.KINDS["tfrecord"].begins(found[:12]):
        return "", ""
    if found[257:262] == b"ustar":
        return "a tar archive", _EXTRACT.format("tar -xf")
    kind, advice = next((x for magic, x in _OTHERS.items() if found.startswith(magic)), ("", ""))
    first = found.lstrip().partition(b"\n")[0].strip()
    if not kind and b":" not in first and re.search(rb"[,\t]", first):
        kind, advice = _CSV, _TABLE
    return ("", "") if tables and kind in (_PARQUET, _CSV) else (kind, advice)


def same_content(files: Sequence[DataFile]) -> List[List[DataFile]]:
    """The groups of files that hold the same bytes, unpacked.

    Files of different sizes are told apart without reading them, most others by their first bytes.
    """
    groups = [list(files)]
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        for key in (_size, lambda file: head(file.path), _checksum):
            groups = [x for group in groups if group[1:] for x in _alike(group, key, threads.map)]
    return [group for group in groups if group[1:]]


def in_both(
    files: Sequence[DataFile], others: Sequence[DataFile]
) -> Iterator[Tuple[DataFile, DataFile]]:
    """Yields (a file, one of `others` that holds the same bytes, unpacked)."""
    for group in same_content([*files, *others]):
        one = next((file for file in group if any(file is x for x in files)), None)
        other = next((file for file in group if any(file is x for x in others)), None)
        if one and other:
            yield one, other


def _alike(files: List[DataFile], key: Callable, each: Callable) -> Iterable[List[DataFile]]:
    """Files by what `key` finds; one that is named by two paths is the same unread."""
    if key is _checksum and len({os.path.realpath(file.path) for file in files}) == 1:
        return [files]
    found = {}
    for file, value in zip(files, each(key, files)):
        found.setdefault(value, []).append(file)
    return found.values()


def _trailer(file):
    """(the checksum, the size modulo 2^32) of what a gzip file holds."""
    with places.of(file.path).open_file(file.path) as f:
        f.seek(max(file.bytes - 8, 0))
        return struct.unpack("<II", f.read(8).rjust(8, b"\0"))


def _size(file):
    return _trailer(file)[1] if file.path.endswith(".gz") else file.bytes % (1 << 32)


def _checksum(file):
    if file.path.endswith(".gz"):
        return _trailer(file)[0]
    checksum = 0
    with places.of(file.path).open_file(file.path) as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            checksum = zlib.crc32(block, checksum)
    return checksum


def check_gzip(path: str):
    """Refuses (BadInput) a gzip file of which TensorFlow would read a part without an error.

    That happens sometimes with a truncated file, and always with one of several members (`cat a.gz
    b.gz`). Unpacks the file once; ignores files not named .gz.
    """
    if not path.endswith(".gz"):
        return
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip's header and trailer
    try:
        with places.of(path).open_file(path) as f:
            for block in iter(lambda: f.read(1 << 20), b""):
                unpack.decompress(block)
                if unpack.eof:
                    break
            more = unpack.unused_data or f.read(1)
    except zlib.error as error:
        raise BadInput(f"{path}: the gzip file is damaged ({error}); copy it again.") from error
    if not unpack.eof:
        raise BadInput(f"{path}: the gzip file is cut short; copy it again.")
    if more:
        raise several_members(path)


def several_members(path: str) -> BadInput:
    """The error for a gzip file of several members."""
    return BadInput(
        f"{path}: has several gzip members, of which TensorFlow reads only the first; rewrite it "
        "with 'zcat FILE | gzip > OTHER'."
    )
