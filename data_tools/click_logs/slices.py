"""Which lines of which raw files are one task, and which tasks are this host's."""

import functools
from typing import Callable, Iterator, List, NamedTuple, Tuple

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
        labels: whether they must have labels.
        name: of the files that it becomes, without suffix.
    """

    lines: LineRange
    layout: Layout
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
    if packed and source.split.by == "order" and source.split.only is None:
        raise BadInput(
            f"{packed}: --split_by=order needs plain files; unpack it, or give --valid_input."
        )
    return found.files


def cut(
    source: Source,
    files: List[datasets.DataFile],
    read_layout: Callable[..., Layout],
    share: Tuple[int, int],
) -> Iterator[RawSlice]:
    """Yields the slices of a source that are this host's share.

    Every host cuts the files alike: slices of plain files, whole gzip files. Slice i is host
    i % number's; to find where its lines begin and end, a host reads a line at each end.

    Args:
        source: the source.
        files: from `find`.
        read_layout: of a path and labels, row_parser's.
        share: (index, number) of hosts.
    """
    total = sum(f.bytes for f in files)
    size = max(line_blocks.TASK, total // MOST)
    slices = [
        (file.path, start, before)
        for file, before in _with_bytes_before(files)
        for start in range(0, 1 if file.path.endswith(".gz") else file.bytes, size)
    ]
    read_layout = functools.lru_cache(maxsize=1)(read_layout)
    for i, (path, start, before) in enumerate(slices):
        if i % share[1] != share[0]:
            continue
        layout = read_layout(path, labels=source.labels)
        if path.endswith(".gz"):
            lines = LineRange(path)
        else:
            lines = line_blocks.lines_from(path, start, start + size)
        if lines:
            split = source.split._replace(before=before, total=total)
            name = f"part-{i:05d}-of-{len(slices):05d}"
            yield RawSlice(lines, layout, split, source.labels, name)


def _with_bytes_before(files):
    before = 0
    for file in files:
        yield file, before
        before += file.bytes
