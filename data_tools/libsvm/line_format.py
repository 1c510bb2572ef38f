"""Formats rows as lines of LibSVM text without looping over them."""

import numpy as np


def line_writer(feature_size: int, steps: int):
    """Makes a function that formats rows: ids below feature_size, values that are multiples of
    1 / steps in [0, 1].

    Returns:
        (ids int64 [B, F], values float32 [B, F], labels bool [B]) -> the lines, bytes.
    """
    id_text = np.arange(feature_size).astype(f"S{len(str(feature_size))}")
    value_text = np.array([f"{i / steps:g}".encode() for i in range(steps + 1)])
    pair = [("space", "S1"), ("id", id_text.dtype), ("colon", "S1"), ("value", value_text.dtype)]

    def text(ids, values, labels):
        # Fixed-width records, from which the NUL padding is dropped at the end.
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
