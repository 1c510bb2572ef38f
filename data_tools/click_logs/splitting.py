"""Divides rows into training, validation and test rows: at random, in order, by time or by hash."""

import os
import zlib
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np

from data_tools.common import splitmix64
from deepfm.errors import BadInput

SPLITS = ("train", "valid", "test")


class Split(NamedTuple):
    """How the rows of a file are divided.

    Attributes:
        shares: the share of each of SPLITS; they sum to 1.
        by: draw, order, time:COLUMN or hash:COLUMN.
        seed: the seed of the draw, or of the hash.
        before: bytes of the files before this one, for order; rows if they are Parquet.
        total: bytes, or rows, of all files, for order.
        bounds: the key of the first time of each part but the first, for time.
    """

    shares: Tuple[float, ...] = (1.0, 0.0, 0.0)
    by: str = "draw"
    seed: int = 1
    before: int = 0
    total: int = 1
    bounds: Tuple[int, ...] = ()

    @property
    def column(self) -> Optional[str]:
        """The column whose cells decide; None if the place of a row does."""
        return self.by.partition(":")[2] or None


def shares_of(text: str) -> Tuple[float, ...]:
    """The shares that --split says; BadInput if they are none."""
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or shares[0] == 0 or not abs(sum(shares) - 1) <= 1e-6:
        raise BadInput(
            f"--split={text} must be three shares that sum to 1, the first above 0; try "
            "--split=0.8,0.1,0.1."
        )
    return shares


def split_of(
    split: Split, path: str, starts: np.ndarray, cells: Optional[np.ndarray] = None
) -> np.ndarray:
    """The index of each row's split, which depends only on its place or a cell, and the seed.

    Args:
        split: how the file is divided.
        path: the file; only its name counts, not its folder.
        starts: int64 [B], the byte of the file where each row begins; in Parquet its number. Text
            with a header has bytes, too: they give its rows the splits that they always had.
        cells: uint64 [B], the keys of the cells of split.column; see row_parser.

    Returns:
        int64 [B], indices of SPLITS.
    """
    if split.by.startswith("time:"):
        return np.searchsorted(np.array(split.bounds, np.uint64), cells, side="right")
    if split.by == "order":
        where = (split.before + starts) / split.total
    else:
        key = zlib.crc32(f"{split.seed} {os.path.basename(path)}".encode()) << 32
        x = (starts.view(np.uint64) + np.uint64(key)) * splitmix64.GAMMA
        if split.column:
            key = zlib.crc32(b"%d" % split.seed)
            x = np.where(cells == np.uint64(0), x, (cells ^ np.uint64(key)) * splitmix64.GAMMA)
        where = splitmix64.uniform(splitmix64.finalize(x))
    return np.searchsorted(np.cumsum(split.shares)[:-1], where, side="right")


def bounds_of(keys: np.ndarray, counts: np.ndarray, shares: Sequence[float]) -> Tuple[int, ...]:
    """The key of the first time of each part but the first, so that parts have about these shares.

    Rows of one time are in one part.

    Args:
        keys: uint64 [n], ascending, of times.
        counts: int64 [n], how many rows have each.
        shares: of each of SPLITS.
    """
    before = (np.cumsum(counts) - counts) / counts.sum()
    at = np.searchsorted(before, np.cumsum(shares)[:-1] - 1e-9)
    return tuple(np.append(keys, np.uint64(2**64 - 1))[at].tolist())
