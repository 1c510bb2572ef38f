"""Reads large variables a piece at a time: to save them, and to see whether they are finite.

A variable whose rows are updated is copied by whoever reads it (TensorFlow's copy-on-read), and the
variables of a checkpoint are all read at once: a model took twice its memory whenever it was saved.
"""

from typing import Callable, Iterator, List, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable
from tensorflow.python.training.saver import BulkSaverBuilder

v1 = tf.compat.v1

PIECE = 128 << 20  # bytes that are copied at once


class Piece(NamedTuple):
    """Some rows of a variable, or all of it.

    Attributes:
        bounds: as a checkpoint names them ("10 4 5,5:0,4": rows 5 to 9 of 10), "" for all.
        size: bytes.
        read: () -> tensor; makes the ops that read it.
    """

    bounds: str
    size: int
    read: Callable[[], tf.Tensor]


def of(handle, shape, dtype) -> Iterator[Piece]:
    """Cuts a variable of more than PIECE bytes into pieces.

    Args:
        handle: resource tensor [].
        shape: TensorShape, fully known.
        dtype: of its numbers.
    """
    row = _size(shape[1:], dtype)
    step = max(PIECE // row, 1)
    for begin in range(0, int(shape[0]), step):
        count = min(step, int(shape[0]) - begin)

        def read(begin=begin, count=count):
            # Where the variable is, though the op that saves it is on the CPU: one that asked for
            # another device than the variable's would be refused, or draw the variable there.
            with tf.device(None), tf.device(handle.device):
                where = tf.range(begin, begin + count)
                return tf.raw_ops.ResourceGather(resource=handle, indices=where, dtype=dtype)

        offset = [begin] + [0] * (len(shape) - 1)
        extent = [count, *shape.as_list()[1:]]
        info = tf.Variable.SaveSliceInfo("", shape.as_list(), offset, extent)
        yield Piece(info.spec, count * row, read)


def sums(variable) -> List[tf.Tensor]:
    """The sum of each piece of a variable, one after the other: float32 []."""
    shape, dtype = variable.shape, variable.dtype.base_dtype
    if _size(shape, dtype) <= PIECE or not isinstance(variable, BaseResourceVariable):
        return [tf.reduce_sum(variable)]
    found = []
    for piece in of(variable.handle, shape, dtype):
        with tf.control_dependencies(found[-1:]):
            found.append(tf.reduce_sum(piece.read()))
    return found


def _size(shape, dtype):
    return shape.num_elements() * dtype.size


class Builder(BulkSaverBuilder):
    """Makes the ops that save variables one after the other, and large ones in pieces.

    Each group of pieces is a checkpoint of its own, and these are then merged into one, which is
    read like any other: as with parameter servers' parts, a piece knows whose rows it holds.
    """

    def save_op(self, filename_tensor, saveables):
        groups, room = [], 0
        for saveable in saveables:
            for name, piece in _pieces(saveable):
                if piece.size > room:
                    groups.append([])
                    room = PIECE
                groups[-1].append((name, piece))
                room -= piece.size
        prefixes, saved = [], []
        for i, group in enumerate(groups):
            prefixes.append(tf.strings.join([filename_tensor, f"-{i}"]))
            with tf.control_dependencies(saved):
                op = tf.raw_ops.SaveV2(
                    prefix=prefixes[-1],
                    tensor_names=[name for name, _ in group],
                    shape_and_slices=[piece.bounds for _, piece in group],
                    tensors=[piece.read() for _, piece in group],
                )
            saved = [op]
        with tf.control_dependencies(saved):
            return tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes,
                destination_prefix=filename_tensor,
                delete_old_dirs=False,
            )


def _pieces(saveable):
    """Yields (name in the checkpoint, Piece) of what a Saver saves."""
    for spec in saveable.specs:
        shape, dtype = tf.TensorShape(saveable.op.shape), spec.dtype.base_dtype
        size = _size(shape, dtype)
        if size > PIECE and not spec.slice_spec and hasattr(saveable, "handle_op"):
            for piece in of(saveable.handle_op, shape, dtype):
                yield spec.name, piece
        else:
            yield spec.name, Piece(spec.slice_spec, size, lambda spec=spec: spec.tensor)


def make_saver(keep_checkpoint_max: int):
    """What Estimator makes by itself, with a Builder."""
    return v1.train.Saver(
        sharded=True,
        max_to_keep=keep_checkpoint_max,
        defer_build=True,
        save_relative_paths=True,
        builder=Builder(),
    )
