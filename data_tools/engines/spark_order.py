"""Which output file each record goes to, so that files are equal and as on one machine.

A record's key is a function of its place and the seed (data_tools.rebalancing.selecting). So once
the number of records of each task is known, the keys at which the output files are cut follow
without reading a record: a histogram of the upper bits of all keys finds the cells in which the
cuts lie, and the keys in these cells, sorted, are counted to the exact ones.
"""

from typing import List, Sequence

import numpy as np

from data_tools.rebalancing.selecting import Order

CELL_BITS = 16  # upper bits of a key that choose its cell
CHUNK = 1 << 22  # keys made at once


def cuts(context, order: Order, rows: Sequence[int], num_files: int) -> np.ndarray:
    """The smallest key of each output file but the first. uint64 [num_files - 1], ascending.

    File i holds the records of the ranks from total * i // num_files on, ordered by keys.

    Args:
        context: the SparkContext.
        order: the Order.
        rows: the number of records to write of each task.
        num_files: at most the sum of `rows`.
    """
    ranks = [sum(rows) * i // num_files for i in range(1, num_files)]
    if not ranks:
        return np.zeros(0, np.uint64)
    chunks = [
        (task, first, min(CHUNK, n - first))
        for task, n in enumerate(rows)
        for first in range(0, n, CHUNK)
    ]
    spread = context.parallelize(chunks, min(len(chunks), 4 * context.defaultParallelism))
    counts = spread.mapPartitions(lambda part: [_histogram(order, part)]).treeReduce(np.add)
    below = np.concatenate([[0], np.cumsum(counts)])
    cells = np.searchsorted(below, ranks, side="right") - 1
    wanted = np.zeros(len(counts), bool)
    wanted[cells] = True
    keys = np.sort(np.concatenate(spread.map(lambda c: _keys_in(order, c, wanted)).collect()))
    # Of the sorted keys in the wanted cells, those before a cell's own:
    before = np.cumsum(np.where(wanted, counts, 0)) - np.where(wanted, counts, 0)
    return keys[before[cells] + ranks - below[cells]]


def _histogram(order, chunks):
    counts = np.zeros(1 << CELL_BITS, np.int64)
    for chunk in chunks:
        counts += np.bincount(_cells(order.keys(*chunk)), minlength=len(counts))
    return counts


def _keys_in(order, chunk, wanted):
    keys = order.keys(*chunk)
    return keys[wanted[_cells(keys)]]


def _cells(keys):
    return (keys >> np.uint64(64 - CELL_BITS)).astype(np.int64)


def rows_of_files(total: int, num_files: int) -> List[int]:
    """The number of records in each output file."""
    ends = [total * i // num_files for i in range(num_files + 1)]
    return np.diff(ends).tolist()
