"""Reads up to eight digits at once, for many texts.

https://johnnylee-sde.github.io/Fast-numeric-string-to-int/: one multiplication each joins the bytes
of a word, then pairs, then groups of four.
"""

from typing import Tuple

import numpy as np


def eight(words: np.ndarray, shift: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The numbers that are in words, and whether they are numbers.

    Args:
        words: uint64, digits as text, the last in the highest byte, zeros below the first.
        shift: uint64, the bits below the first digit.

    Returns:
        (int64, bool), with the shape of words.
    """
    x = words ^ (np.uint64(0x3030303030303030) << shift)
    good = (((x + np.uint64(0x7676767676767676)) | x) & np.uint64(0x8080808080808080)) == 0
    x = (x * np.uint64(2561)) >> np.uint64(8) & np.uint64(0x00FF00FF00FF00FF)
    x = (x * np.uint64(6553601)) >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF)
    return ((x * np.uint64(42949672960001)) >> np.uint64(32)).view(np.int64), good
