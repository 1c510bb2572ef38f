"""Divides rows into training, validation and test rows, at random or in order."""

import os
import zlib
from typing import NamedTuple, Tuple

import numpy as np

from data_tools.common import splitmix64

SPLITS = ("train", "valid", "test")


class Split(NamedTuple):
    """How the rows of a file are divided.

    Attributes:
        shares: the share of each of SPLITS; they sum to 1.
        by: draw or order.
        seed: the seed of the draw.
        before: bytes of the files before this one, for order; rows if they are Parquet.
        total: bytes, or rows, of all files, for order.
    """

    shares: Tuple[float, ...] = (1.0, 0.0, 0.0)
    by: str = "draw"
    seed: int = 1
    before: int = 0
    total: int = 1


def split_of(split: Split, path: str, starts: np.ndarray) -> np.ndarray:
    """The index of each row's split, which depends only on the row's place and the seed.

    Args:
        split: how the file is divided.
        path: the file; only its name counts, not its folder.
        starts: int64 [B], the byte of the file where each row begins; in Parquet its number. Text
            with a header has bytes, too: they give its rows the splits that they always had.

    Returns:
        int64 [B], indices of SPLITS.
    """
    if split.by == "order":
        where = (split.before + starts) / split.total
    else:
        key = zlib.crc32(f"{split.seed} {os.path.basename(path)}".encode()) << 32
        x = (starts.view(np.uint64) + np.uint64(key)) * splitmix64.GAMMA
        where = splitmix64.uniform(splitmix64.finalize(x))
    return np.searchsorted(np.cumsum(split.shares)[:-1], where, side="right")
