"""Which lines of which raw files are one task, and which tasks are this host's."""

import os
from typing import Iterator, List, NamedTuple, Tuple

import tensorflow as tf

from data_tools.click_logs import raw_rows
from data_tools.click_logs.raw_rows import Part
from data_tools.click_logs.splitting import SPLITS, Split
from data_tools.common import line_blocks, shards
from deepfm.data import datasets
from deepfm.errors import BadInput

PIECE = 16 << 20  # bytes of a plain input that are one task, at least
MOST_PIECES = 1000  # of a large input: each becomes a file of its own


class Task(NamedTuple):
    """A part of a file, to count or to encode.

    Attributes:
        part: its lines.
        split: how its rows are divided.
        labels: whether they must have labels.
        name: of the files that it becomes, without suffix.
    """

    part: Part
    split: Split
    labels: bool
    name: str


class Source(NamedTuple):
    """What a flag says of raw input.

    Attributes:
        flag: its name.
        spec: its value.
        split: how rows are divided; `before` and `total` are filled in.
        labels: whether files must have labels.
    """

    flag: str
    spec: str
    split: Split
    labels: bool = True


class Reading(NamedTuple):
    """How raw files are written: see raw_rows.read_layout."""

    dataset: str
    delimiter: str = "auto"
    header: str = "auto"


def find(source: Source, own_files: bool = False) -> List[datasets.DataFile]:
    """The files of a source, in order; BadInput where they cannot be raw rows.

    Args:
        source: the source.
        own_files: whether no other host sees these files.
    """
    found = datasets.find(source.spec, source.flag, partial=own_files)
    if found.data_format != "libsvm":  # as everything is called that is no TFRecord
        raise BadInput(f"--{source.flag}={source.spec}: {found.files[0].path} is no text.")
    packed = next((f.path for f in found.files if f.path.endswith(".gz")), None)
    if packed and source.split.by == "order" and source.split.only is None:
        raise BadInput(
            f"{packed}: --split_by=order needs plain files; unpack it, or give --valid_input."
        )
    return found.files


def tasks(
    source: Source, files: List[datasets.DataFile], reading: Reading, share: Tuple[int, int]
) -> Iterator[Task]:
    """Yields the tasks of a source that are this host's share.

    Every host cuts the files alike: pieces of plain files, whole gzip files. Piece i is host
    i % number's; to find where its lines begin and end, a host reads a line at each end.

    Args:
        source: the source.
        files: from `find`.
        reading: how they are written.
        share: (index, number) of hosts.
    """
    total = sum(f.bytes for f in files)
    size = max(PIECE, total // MOST_PIECES)
    pieces = [
        (file, start, before)
        for file, before in _with_bytes_before(files)
        for start in ([0] if file.path.endswith(".gz") else range(0, file.bytes, size))
    ]
    layouts = {}
    for i, (file, start, before) in enumerate(pieces):
        if i % share[1] != share[0]:
            continue
        if file.path not in layouts:
            layouts[file.path] = raw_rows.read_layout(file.path, *reading, source.labels)
        last = i + 1 == len(pieces) or pieces[i + 1][0] is not file
        end = None if last else line_blocks.next_line(file.path, start + size)
        start = line_blocks.next_line(file.path, start) if start else 0
        if start == end or start >= tf.io.gfile.stat(file.path).length:  # inside one long line
            continue
        split = source.split._replace(before=before, total=total)
        name = f"part-{i:05d}-of-{len(pieces):05d}"
        part = Part(file.path, layouts[file.path], start, end)
        yield Task(part, split, source.labels, name)


def _with_bytes_before(files):
    before = 0
    for file in files:
        yield file, before
        before += file.bytes


def shard_folder(folder: str, split: int, share: Tuple[int, int]) -> str:
    """Where a host puts the files of a split: hosts that share a folder have one each in it."""
    return shards.folder(os.path.join(folder, SPLITS[split]), share)
