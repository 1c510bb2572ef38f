"""Writes lines of LibSVM and LibFFM text to the pieces of output files, with numpy alone.

On Spark it writes all lines, and on one machine those that TensorFlow has no decoder for.
"""

import re
from typing import Any, Callable, Iterator

import numpy as np

from data_tools.libsvm import pieces
from deepfm.errors import naming
from deepfm.records import codec, text_blocks
from deepfm.records.schema import Schema

_BLANK, _MINUS = b" -"
_NEGATIVE = re.compile(rb"\s*-")


def write(task, schema: Schema, put: Callable[[str, bytes], Any] = pieces.append_bytes) -> Iterator:
    """Writes the lines of a range to its pieces; yields what pieces.write does.

    Args:
        put: appends bytes to a path.
    """
    append = lambda path, text: _append(path, text, schema, put)
    accepts = lambda text: codec.decode_lines(text, schema) is not None
    return pieces.write(task, append, accepts, schema)


def _append(path, text, schema, put):
    """Appends the records of a text to a file; returns BlockFacts, or None if a line is bad."""
    batch = codec.decode_lines(text, schema)
    if batch is None:
        return None
    with naming(path):
        put(path, codec.encode(*batch)[0])
    negative = _negative(text)
    zero = bool((~negative & (batch.labels == 0)).any())
    return pieces.facts_of(batch, bool(negative.any()), zero)


def _negative(text):
    """Whether the label of each record of a text has a minus sign. bool [B]."""
    starts = text_blocks.record_starts(text)
    first = np.frombuffer(text, np.uint8)[starts]
    negative = first == _MINUS
    for i in np.flatnonzero(first <= _BLANK).tolist():
        negative[i] = bool(_NEGATIVE.match(text, starts[i]))
    return negative
