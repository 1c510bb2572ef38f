"""A file of a data set: what is known of it, and what its bytes show: its format, its compression,
whether another holds the same. And what was sampled."""

import contextlib
import itertools
import os
import posixpath
import re
import struct
import zlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from deepfm.errors import BadInput
from deepfm.records import frames, libsvm_text
from deepfm.records.schema import Shape
from deepfm.records.storage import places
from deepfm.records.tfrecord import HEADER, is_header

TFRECORD = (".tfrecords", ".tfrecord", ".tfrecords.gz", ".tfrecord.gz")  # the first is written
CSV = tuple(x + y for x in (".csv", ".tsv") for y in ("", ".gz"))
PARQUET = (".parquet", ".pq")
LIBSVM = tuple(x + y for x in (".libsvm", ".svm", ".txt", ".libffm", ".ffm") for y in ("", ".gz"))
_HEAD = 4096  # bytes
_UNREADABLE = (".snappy", ".bz2", ".lz4", ".zst", ".deflate")  # what Hadoop's other codecs write
_OTHERS = {  # the first bytes of a file -> its kind
    b"\xfd7zXZ\0": "an xz file", b"BZh": "a bzip2 file", b"(\xb5/\xfd": "a Zstandard file",
    b"\x04\x22M\x18": "an LZ4 file", b"x\x01": "a ZLIB file", b"x\x9c": "a ZLIB file",
    b"x\xda": "a ZLIB file", b"PK\3\4": "a zip archive", b"PAR1": "a Parquet table",
    b"ORC": "an ORC table", b"Obj\1": "an Avro table",
}  # fmt: skip
_ADVICE = {  # by the last word of the kind
    "file": "unpack it, or compress it with gzip and name it .gz",
    "archive": "extract its files and name those",
    "table": "of CSV and Parquet, 'python -m data_tools.prepare' reads raw columns, 'python "
    "-m data_tools.libsvm_to_tfrecord' columns of ids",
}
SEVERAL = (
    "has several gzip members, of which TensorFlow reads only the first; rewrite it with 'zcat "
    "FILE | gzip > OTHER'."
)


class DataFile(NamedTuple):
    """A file of a data set. Without a dataset.json, rows and positives are None; identity, an
    identity.Identity, is None until the file has been identified."""

    path: str
    bytes: int
    rows: Optional[int] = None
    positives: Optional[int] = None
    identity: Optional[tuple] = None


class SamplingRates(NamedTuple):
    """Records kept per original record of each label; above 1 if they were repeated."""

    negative: float = 1.0
    positive: float = 1.0


class Kind(NamedTuple):
    """What tells a format from the others; a formats.Format has the same, and reads it.

    Attributes:
        title: its name in messages.
        suffixes: of its files; the first is the one that we write.
        begins: the first 12 bytes of a file -> whether the file may have this format.
        first_shape: path -> Shape of the file's first record.
    """

    name: str
    title: str
    suffixes: Tuple[str, ...]
    begins: Callable[[bytes], bool]
    first_shape: Callable[[str], Shape]


_OF_FRAMES = lambda head: is_header(head[:HEADER])
KINDS = {
    "tfrecord": Kind("tfrecord", "TFRecord", TFRECORD, _OF_FRAMES, frames.first_shape),
    "libsvm": Kind("libsvm", "LibSVM", LIBSVM, lambda head: True, libsvm_text.first_shape),
}


def is_named(path: str, kinds: Dict[str, Any]) -> bool:
    """Whether a file's name tells which of the kinds it has."""
    return any(path.endswith(kind.suffixes) for kind in kinds.values())


def kind_of(path: str, head: bytes, kinds: Dict[str, Any]):
    """The first of the kinds that a file has by its name, or else by its first 12 bytes."""
    by_name = (kind for kind in kinds.values() if path.endswith(kind.suffixes))
    by_bytes = (kind for kind in kinds.values() if kind.begins(head))
    return next(itertools.chain(by_name, by_bytes))


def head(path: str, tables: bool = True) -> bytes:
    """The first bytes of a file, unpacked if it is gzip; none for the gzip of nothing.

    Raises BadInput if its name and compression disagree, or if it is of a kind that is not read;
    with `tables`, Parquet and CSV are.
    """
    with places.of(path).open_file(path) as f:
        begin = f.read(_HEAD)
    packed = begin.startswith(b"\x1f\x8b")
    if path.endswith(".gz") and not packed:
        raise BadInput(f"{path}: is named .gz but is not gzip-compressed; rename or compress it.")
    if packed:
        with contextlib.suppress(zlib.error):  # whoever reads the file says where it is damaged
            begin = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(begin, _HEAD)
    kind = _other_kind(begin)
    if kind and not (tables and kind in ("a Parquet table", "a CSV table")):
        advice = _ADVICE[kind.split()[-1]]
        raise BadInput(f"{path}: by its first bytes {kind}{' in gzip' * packed}; {advice}.")
    if path.endswith(_UNREADABLE):
        codec = posixpath.splitext(path)[1]
        raise BadInput(f"{path}: {codec} cannot be read; write it plain or as .gz (codec gzip).")
    if packed and not path.endswith(".gz"):
        raise BadInput(f"{path}: is gzip-compressed; its name must end in .gz.")
    return begin


def is_parquet(path: str) -> bool:
    """Whether a file is Parquet, by its name or else by its first bytes."""
    if path.endswith(PARQUET):
        return True
    with places.of(path).open_file(path) as f:
        return f.read(4) == b"PAR1"


def _other_kind(begin):
    """The kind of a file that holds neither TFRecords nor LibSVM text, by its first bytes."""
    if KINDS["tfrecord"].begins(begin[:12]):
        return None
    if begin[257:262] == b"ustar":
        return "a tar archive"
    lines = (line.partition(b"#")[0].strip() for line in begin.split(b"\n"))
    first = next(filter(None, lines), b"")  # LibSVM has comments
    cells = b":" not in first and re.search(rb"[,\t]", first)
    named = (kind for magic, kind in _OTHERS.items() if begin.startswith(magic))
    return next(named, "a CSV table" if cells else None)


def same_content(files: Sequence[DataFile]) -> List[List[DataFile]]:
    """The groups of files that hold the same bytes, unpacked.

    Files of different sizes are told apart without reading them, most others by their first bytes.
    """
    groups = [list(files)]
    size = lambda x: _trailer(x)[1] if x.path.endswith(".gz") else x.bytes % (1 << 32)
    for key in (size, lambda file: head(file.path), _checksum):
        alike = {}
        for i, group in enumerate(group for group in groups if group[1:]):
            is_one = len({os.path.realpath(file.path) for file in group}) == 1  # under two paths
            read = (lambda _: None) if is_one else key
            for file, value in zip(group, places.each(group[0].path, read, group)):
                alike.setdefault((i, value), []).append(file)
        groups = list(alike.values())
    return [group for group in groups if group[1:]]


def in_both(
    files: Sequence[DataFile], others: Sequence[DataFile]
) -> Iterator[Tuple[DataFile, DataFile]]:
    """Yields (a file, one of `others` that holds the same bytes, unpacked)."""
    for group in same_content([*files, *others]):
        yield from zip(*([x for x in group if x in side][:1] for side in (files, others)))


def _trailer(file):
    """(the checksum, the size modulo 2^32) of what a gzip file holds."""
    with places.of(file.path).open_file(file.path) as f:
        f.seek(max(file.bytes - 8, 0))
        return struct.unpack("<II", f.read(8).rjust(8, b"\0"))


def _checksum(file):
    return _trailer(file)[0] if file.path.endswith(".gz") else crc32_of(file.path)


def crc32_of(path: str) -> int:
    """The CRC-32 of a file's bytes."""
    checksum = 0
    with places.of(path).open_file(path) as f:
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
        raise BadInput(f"{path}: {SEVERAL}")
