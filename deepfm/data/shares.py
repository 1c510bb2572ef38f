"""Which process reads which records, and in how many steps it uses them."""

import os
from typing import List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from absl import logging

from deepfm.config import InputConfig, Share
from deepfm.data import datasets

_BUFFERS = 4  # least number of times that a group of files fills the shuffle buffer


class Range(NamedTuple):
    """Records begin ... end - 1 of a file; if that is the `whole` file, end may be None."""

    path: str
    begin: int
    end: Optional[int]
    whole: bool


class Skipped(NamedTuple):
    """The bad records of a damaged file, {place: reason}, each skipped if no good one stands in."""

    path: str
    places: Mapping[str, str]
    stand_in: Optional[bytes] = None


def divide(
    files: Sequence[datasets.DataFile], damaged: Sequence[Skipped], num_shares: int
) -> List[List[Range]]:
    """Divides records evenly, to within one, and into whole files where that is even.

    The records of all files, one after the other, are cut into contiguous parts. A pure function
    of its arguments: all processes make the same plan.

    Args:
        files: DataFiles, with their rows unless there is only one share.
        damaged: files with bad records, which do not count.
    """
    bad = {file.path: len(file.places) for file in damaged if file.stand_in is None}
    rows = [None if f.rows is None else f.rows - bad.get(f.path, 0) for f in files]
    if num_shares == 1:
        return [[Range(file.path, 0, count, True) for file, count in zip(files, rows)]]
    cuts = [sum(rows) * i // num_shares for i in range(num_shares + 1)]
    shares = [[] for _ in range(num_shares)]
    first = 0  # number of the file's first record, counted over all files
    for file, count in zip(files, rows):
        for share, (low, high) in zip(shares, zip(cuts, cuts[1:])):
            begin, end = max(low - first, 0), min(high - first, count)
            if begin < end:
                share.append(Range(file.path, begin, end, end - begin == count))
        first += count
    return shares


def log_division(files: Sequence[datasets.DataFile], damaged: Sequence[Skipped], num_shares: int):
    """Logs which records each process reads."""
    if num_shares == 1:
        return
    for i, ranges in enumerate(divide(files, damaged, num_shares)):
        rows = sum(r.end - r.begin for r in ranges)
        name = lambda r: os.path.basename(r.path) + ("" if r.whole else f"[{r.begin}:{r.end}]")
        names = [name(r) for r in ranges]
        if len(names) > 4:
            names[2:-1] = [f"... {len(names) - 3} more ..."]
        logging.info("Process %d reads %s records: %s.", i, f"{rows:,}", ", ".join(names) or "-")


def groups(
    ranges: Sequence[Range], asked: InputConfig, by_rows: bool, epoch: int
) -> List[List[Range]]:
    """The ranges of an epoch in reading order, in groups that are read in parallel.

    Of `asked`, the seed, shuffle_buffer and num_parallel_reads count; for `by_rows` see Position.
    """
    if asked.shuffle_buffer > 1:
        order = np.random.RandomState([asked.seed, epoch]).permutation(len(ranges))
        ranges = [ranges[i] for i in order]
    grouped, rows = [[]], 0
    for r in ranges:
        if len(grouped[-1]) >= asked.num_parallel_reads and rows >= _BUFFERS * asked.shuffle_buffer:
            grouped.append([])
            rows = 0
        grouped[-1].append(r)
        rows += (r.end or 0) - r.begin if by_rows else 0
    if len(grouped) > 1 and rows < asked.shuffle_buffer:
        last = grouped.pop()
        grouped[-1] += last
    return [group for group in grouped if group]


def rows_of_share(
    data: datasets.DataSet, damaged: Sequence[Skipped], share: Share
) -> Optional[int]:
    """The number of records of an epoch in a share of a data set; None if unknown."""
    if data.rows is None:
        return None
    return sum(r.end - r.begin for r in divide(data.files, damaged, share.of)[share.index])


def steps_of_processes(
    rows_of_processes: Optional[Sequence[int]], size: int, in_step: bool
) -> Optional[List[int]]:
    """The steps of each process in an epoch, by rank, of `size` records each; None if the rows are
    unknown. For rows_of_processes see Position."""
    if rows_of_processes is None:
        return None
    steps = [-(-rows // size) for rows in rows_of_processes]
    return [max(steps)] * len(steps) if in_step else steps


def weights_of_steps(rows_of_processes: Sequence[int], size: int, rank: int):
    """float [steps of an epoch]: processes * (the batch's share of all records of the step)."""
    rows = np.array(rows_of_processes)
    steps = -(-rows.max() // size)
    parts = np.clip(rows - size * np.arange(steps)[:, np.newaxis], 0, size)  # [steps, processes]
    return parts[:, rank] * len(rows) / parts.sum(axis=1)
