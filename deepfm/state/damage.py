"""What is wrong with a checkpoint."""

import os
from typing import Iterable, Optional

import numpy as np
from google.protobuf.message import DecodeError

from deepfm.errors import BadInput
from deepfm.runtime.tf import tensor_bundle_pb2, tf

v1 = tf.compat.v1

_HEADER = 256  # bytes; the header of an index is shorter


def has_all_parts(name: str, parts: Iterable[str]) -> bool:
    """Whether the index of a checkpoint is among its files, and all files of data."""
    shards = [int(part[-5:]) for part in parts if part[-9:-5] == "-of-"]
    return name + ".index" in parts and bool(shards) and len(shards) >= max(shards)


def problem(path: str) -> Optional[str]:
    """What is wrong with a checkpoint, in a few words, or None if it is whole.

    Reads its index and its global step; counts only the bytes of the other tensors.
    """
    name = os.path.basename(path)
    if not os.path.exists(f"{path}.index"):
        return f"{name}.index is missing"
    try:
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        shards = _num_shards(f"{path}.index")
    except (tf.errors.OpError, OSError, ValueError, IndexError, DecodeError):
        return f"{name}.index is damaged"
    size = 0
    for file in (f"{path}.data-{i:05d}-of-{shards:05d}" for i in range(shards)):
        try:
            size += os.path.getsize(file)
        except FileNotFoundError:
            return f"{os.path.basename(file)} is missing"
    wanted = sum(int(np.prod(shapes[x], dtype=np.int64)) * dtypes[x].size for x in shapes)
    if size != wanted and tf.string not in dtypes.values():
        return f"its data has {size} of {wanted} bytes"
    try:
        reader.get_tensor(v1.GraphKeys.GLOBAL_STEP)
    except tf.errors.NotFoundError:
        return None  # it is another program's checkpoint
    except tf.errors.OpError:
        return "its global step is damaged"
    return None


def _num_shards(index):
    """The number of data files, from the first entry of an index, the one with an empty key."""
    with open(index, "rb") as f:
        head = f.read(_HEADER)
    shared, key, size = head[:3]  # bytes
    if shared or key:
        raise ValueError("the first key is not empty")
    return tensor_bundle_pb2.BundleHeaderProto.FromString(head[3 : 3 + size]).num_shards


def first_damaged(path: str) -> Optional[str]:
    """The first missing or damaged tensor of a checkpoint, or None; reads the whole checkpoint."""
    name = "its index"
    try:
        reader = tf.train.load_checkpoint(path)
        for name in sorted(reader.get_variable_to_shape_map()):
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError):
        return name
    return None


def refuse(path: str, error: Exception, advice: str):
    """Raises BadInput for an error of reading a checkpoint, if that is damaged."""
    damaged = first_damaged(path)
    if damaged:
        raise BadInput(f"{path} is damaged: {damaged} cannot be read; {advice}.") from error
