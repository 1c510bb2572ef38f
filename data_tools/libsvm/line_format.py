"""Rows as lines of LibSVM text, without a loop over them."""

import numpy as np


class LineFormat:
    """Writes rows whose values are whole numbers of 1 / steps, up to 1.

    Args:
        feature_size: ids lie below it.
        steps: of the values.
    """

    def __init__(self, feature_size: int, steps: int):
        self._steps = steps
        self._id_text = np.arange(feature_size).astype(f"S{len(str(feature_size))}")
        self._value_text = np.array([f"{i / steps:g}".encode() for i in range(steps + 1)])

    def text(self, ids, values, label) -> bytes:
        """The lines of int64 [B, F], float32 [B, F] and bool [B].

        They are records of fixed width, less the NULs that pad them.
        """
        id_text, value_text = self._id_text, self._value_text
        types = id_text.dtype, value_text.dtype
        pair = [("space", "S1"), ("id", types[0]), ("colon", "S1"), ("value", types[1])]
        record = [("label", "S1"), ("pairs", pair, ids.shape[1:]), ("newline", "S1")]
        rows = np.empty(len(ids), record)
        rows["label"] = np.where(label, b"1", b"0")
        rows["pairs"]["space"] = b" "
        rows["pairs"]["id"] = id_text[ids]
        rows["pairs"]["colon"] = b":"
        rows["pairs"]["value"] = value_text[np.rint(values * self._steps).astype(np.int64)]
        rows["newline"] = b"\n"
        return rows.tobytes().translate(None, b"\0")
