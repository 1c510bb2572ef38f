"""The text of predictions."""

import ctypes
import functools

import numpy as np

from deepfm.kernels.build import library


@functools.lru_cache(maxsize=None)
def _lines():
    """Not an operator, so that a thread can call it beside a session."""
    function = ctypes.CDLL(library()).deepfm_lines
    function.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    function.restype = ctypes.c_int64
    return function


class Plain:
    """With TensorFlow's operators."""

    def lines(self, numbers):
        """The text of numbers, each as "%.9g" on a line of its own: float32 [n] -> str."""
        return "%.9g\n" * len(numbers) % tuple(numbers.tolist())


class Compiled:
    """As Plain, with the compiled operators."""

    def lines(self, numbers):
        numbers = np.ascontiguousarray(numbers, np.float32)
        text = np.empty(16 * len(numbers), np.uint8)
        size = _lines()(numbers.ctypes.data, len(numbers), text.ctypes.data)
        return text[:size].tobytes().decode("ascii")
