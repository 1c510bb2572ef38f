"""Cuts raw files into tasks, picks this host's tasks, and reads their rows."""

import contextlib
import functools
import itertools
from typing import Iterator, List, NamedTuple, Tuple, Union

from data_tools.click_logs import row_parser
from data_tools.click_logs.row_parser import Layout, Rows
from data_tools.click_logs.splitting import Split
from data_tools.common import line_blocks
from data_tools.common.line_blocks import LineRange
from deepfm.data import datasets, formats
from deepfm.data.plain.bad_record import BadRecord
from deepfm.errors import BadInput

MOST = 1000  # slices at most, about, of a large input: each becomes a file


class RawSlice(NamedTuple):
    """One task: lines of a raw file to count or to encode.

    Attributes:
        lines: the LineRange.
        layout: the layout of the file.
        split: how its rows are divided.
        name: the name of the files made from it, without suffix.
    """

    lines: LineRange
    layout: Layout
    split: Split
    name: str


class Source(NamedTuple):
    """A flag that names raw input.

    Attributes:
        flag: the name of the flag.
        spec: its value.
        split: how rows are divided; `cut` fills in `before` and `total`.
        labels: whether the files must have labels.
    """

    flag: str
    spec: str
    split: Split
    labels: bool = True


def find(source: Source, own_files: bool = False) -> List[datasets.DataFile]:
    """The files of a source, in order; raises BadInput if they cannot be raw rows.

    Args:
        source: the source.
        own_files: whether no other host sees these files.
    """
    found = datasets.find(source.spec, source.flag, partial=own_files)
    if found.format is not formats.LIBSVM:  # anything but TFRecord is taken for LibSVM
        raise BadInput(f"--{source.flag}={source.spec}: {found.files[0].path} is not text.")
    packed = next((f.path for f in found.files if f.path.endswith(".gz")), None)
    if packed and source.split.by == "order":
        raise BadInput(
            f"{packed}: --split_by=order needs plain files; unpack it, or give --valid_input."
        )
    return found.files


def cut(
    source: Source, files: List[datasets.DataFile], options, share: Tuple[int, int]
) -> Iterator[RawSlice]:
    """Yields the slices of a source that are this host's share.

    Every host cuts the files in the same way: plain files into slices, gzip files not at all. Slice
    i belongs to host i % number, which reads a line at each end to find the slice's whole lines.

    Args:
        source: the source.
        files: from `find`.
        options: prepare_criteo.Options.
        share: (index, number) of hosts.
    """
    total = sum(f.bytes for f in files)
    size = max(line_blocks.TASK, total // MOST)
    slices = [
        (file.path, start, before)
        for file, before in zip(files, itertools.accumulate([0, *(f.bytes for f in files)]))
        for start in range(0, 1 if file.path.endswith(".gz") else file.bytes, size)
    ]
    layout_of = functools.lru_cache(maxsize=1)(read_layout)
    for i, (path, start, before) in enumerate(slices):
        if i % share[1] != share[0]:
            continue
        layout = layout_of(path, source.labels, options)
        lines = line_blocks.lines_from(path, start, start + size)
        if lines:
            split = source.split._replace(before=before, total=total)
            name = f"part-{i:05d}-of-{len(slices):05d}"
            yield RawSlice(lines, layout, split, name)


def read_layout(path: str, labels: bool, options) -> Layout:
    """The layout of a file; see row_parser.layout_of."""
    with contextlib.closing(line_blocks.read_blocks(LineRange(path))) as blocks:
        _, text, _ = next(blocks, (0, b"", 0))
    return row_parser.layout_of(text, labels, options)


def read_rows(lines: LineRange, layout: Layout) -> Iterator[Tuple[int, Union[Rows, BadRecord]]]:
    """Yields (bytes of the file read, Rows or a BadRecord) for the lines, block by block."""
    first, before = line_blocks.numbering(lines), 0
    try:
        for start, text, size in line_blocks.read_blocks(lines):
            number = lambda before=before: first() + before
            for block in row_parser.parse_block(lines.path, start, text, layout, number):
                yield 0 if isinstance(block, BadRecord) else size, block
            before += text.count(b"\n")
    except BadInput as error:
        raise BadInput(f"{str(error).rstrip('.')} after line {before}.") from error
