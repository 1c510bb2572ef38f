"""Rows as lines of LibSVM text, without a loop over them."""

import numpy as np


def line_writer(feature_size: int, steps: int):
    """Makes a function that writes rows whose values are whole numbers of 1 / steps, up to 1.

    Args:
        feature_size: ids lie below it.
        steps: of the values.

    Returns:
        (ids int64 [B, F], values float32 [B, F], labels bool [B]) -> the lines, bytes.
    """
    id_text = np.arange(feature_size).astype(f"S{len(str(feature_size))}")
    value_text = np.array([f"{i / steps:g}".encode() for i in range(steps + 1)])
    pair = [("space", "S1"), ("id", id_text.dtype), ("colon", "S1"), ("value", value_text.dtype)]

    def text(ids, values, labels):
        # Records of fixed width, less the NULs that pad them.
        record = [("label", "S1"), ("pairs", pair, ids.shape[1:]), ("newline", "S1")]
        rows = np.empty(len(ids), record)
        rows["label"] = np.where(labels, b"1", b"0")
        rows["pairs"]["space"] = b" "
        rows["pairs"]["id"] = id_text[ids]
        rows["pairs"]["colon"] = b":"
        rows["pairs"]["value"] = value_text[np.rint(values * steps).astype(np.int64)]
        rows["newline"] = b"\n"
        return rows.tobytes().translate(None, b"\0")

    return text
