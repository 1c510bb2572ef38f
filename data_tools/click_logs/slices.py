"""Which lines of which raw files are one task, and which tasks are this host's."""

import functools
import itertools
from typing import Iterator, List, NamedTuple, Tuple

from data_tools.click_logs import row_parser
from data_tools.click_logs.row_parser import Layout
from data_tools.click_logs.splitting import Split
from data_tools.common import line_blocks
from data_tools.common.line_blocks import LineRange
from deepfm.data import datasets, formats
from deepfm.errors import BadInput

MOST = 1000  # slices of a large input: each becomes a file of its own


class RawSlice(NamedTuple):
    """Lines of a raw file, to count or to encode: what is one task.

    Attributes:
        lines: which.
        layout: how they are written.
        split: how its rows are divided.
        name: of the files that it becomes, without suffix.
    """

    lines: LineRange
    layout: Layout
    split: Split
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


def find(source: Source, own_files: bool = False) -> List[datasets.DataFile]:
    """The files of a source, in order; BadInput where they cannot be raw rows.

    Args:
        source: the source.
        own_files: whether no other host sees these files.
    """
    found = datasets.find(source.spec, source.flag, partial=own_files)
    if found.format is not formats.LIBSVM:  # as everything is called that is no TFRecord
        raise BadInput(f"--{source.flag}={source.spec}: {found.files[0].path} is no text.")
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

    Every host cuts the files alike: slices of plain files, whole gzip files. Slice i is host
    i % number's; to find where its lines begin and end, a host reads a line at each end.

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
    read_layout = functools.lru_cache(maxsize=1)(row_parser.read_layout)
    for i, (path, start, before) in enumerate(slices):
        if i % share[1] != share[0]:
            continue
        layout = read_layout(path, source.labels, options)
        lines = line_blocks.lines_from(path, start, start + size)
        if lines:
            split = source.split._replace(before=before, total=total)
            name = f"part-{i:05d}-of-{len(slices):05d}"
            yield RawSlice(lines, layout, split, name)
