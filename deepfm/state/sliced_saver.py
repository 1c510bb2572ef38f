"""Reads large variables a slice at a time: to save them, and to see whether they are finite.

Reading a variable whose rows are updated copies it (TensorFlow's copy-on-read), and a checkpoint
reads all variables at once: without slices, saving a model takes twice its memory.
"""

import functools
from typing import Callable, Iterator, List, NamedTuple, Optional

from deepfm.runtime.tf import BaseResourceVariable, BulkSaverBuilder, tf

v1 = tf.compat.v1

SLICE_BYTES = 128 << 20  # bytes that are copied at once


class Slice(NamedTuple):
    """Some rows of a variable, or all of it.

    Attributes:
        bounds: as a checkpoint names them ("10 4 5,5:0,4": rows 5 to 9 of 10), "" for all.
        size: bytes.
        read: () -> tensor; makes the ops that read it.
    """

    bounds: str
    size: int
    read: Callable[[], tf.Tensor]


def slices_of(handle, shape, dtype, bounds: str = "") -> Iterator[Slice]:
    """Cuts a variable of more than SLICE_BYTES bytes into slices.

    Args:
        handle: resource tensor [].
        shape: TensorShape, fully known.
        dtype: the variable's.
        bounds: those of a variable that is a part of another one; it is not cut again.
    """
    size = shape.num_elements() * dtype.size
    if size <= SLICE_BYTES or bounds:
        yield Slice(bounds, size, functools.partial(_read, handle, dtype))
        return
    length, *others = shape.as_list()
    row = size // length
    step = max(SLICE_BYTES // row, 1)
    for begin in range(0, length, step):
        count = min(step, length - begin)
        offset = [begin] + [0] * len(others)
        info = tf.Variable.SaveSliceInfo("", [length, *others], offset, [count, *others])
        where = begin, begin + count
        yield Slice(info.spec, count * row, functools.partial(_read, handle, dtype, where))


def _read(handle, dtype, rows=None):
    """Reads a variable, or a range of its rows."""
    # On the variable's device, though the op that saves it is on the CPU: on any other device, the
    # read would be refused, or pull the variable there.
    with tf.device(None), tf.device(handle.device):
        if rows is None:
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        return tf.raw_ops.ResourceGather(resource=handle, indices=tf.range(*rows), dtype=dtype)


def sums(variable) -> List[tf.Tensor]:
    """The sum of each slice of a variable, one after the other: float32 []."""
    if not isinstance(variable, BaseResourceVariable):
        return [tf.reduce_sum(variable)]
    found = []
    for rows in slices_of(variable.handle, variable.shape, variable.dtype.base_dtype):
        with tf.control_dependencies(found[-1:]):
            found.append(tf.reduce_sum(rows.read()))
    return found


class Builder(BulkSaverBuilder):
    """Makes the ops that save variables one after the other, and large ones in slices.

    Each group of slices is saved as a checkpoint of its own; these are then merged into one that is
    read like any other. Like the parts of parameter servers, each slice names its rows.

    Args:
        make_notes: () -> {name: tensor}, saved with the variables, and read before any of them. A
            Saver neither needs nor restores them.
        absent: {name: value} of the variables that the checkpoint to restore lacks.
    """

    def __init__(self, make_notes: Callable[[], dict] = dict, absent: Optional[dict] = None):
        super().__init__()
        self._make_notes, self._absent = make_notes, absent or {}
        self._notes = None

    def save_op(self, filename_tensor, saveables):
        everything = [x for saveable in saveables for x in _slices(saveable)]
        if self._notes is None:  # the first of the parameter servers saves them
            self._notes = self._make_notes()
            notes = [(name, Slice("", 0, lambda x=x: x)) for name, x in self._notes.items()]
            everything = notes + everything
        groups, room = [], 0
        for name, rows in everything:
            if not groups or rows.size > room:
                groups.append([])
                room = SLICE_BYTES
            groups[-1].append((name, rows))
            room -= rows.size
        noted = list(self._notes.values())
        prefixes, saved = [], []
        for i, group in enumerate(groups):
            prefixes.append(tf.strings.join([filename_tensor, f"-{i}"]))
            with tf.control_dependencies(saved + noted):
                op = tf.raw_ops.SaveV2(
                    prefix=prefixes[-1],
                    tensor_names=[name for name, _ in group],
                    shape_and_slices=[rows.bounds for _, rows in group],
                    tensors=[rows.read() for _, rows in group],
                )
            saved = [op]
        with tf.control_dependencies(saved):
            return tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes,
                destination_prefix=filename_tensor,
                delete_old_dirs=False,
            )

    def bulk_restore(self, filename_tensor, saveables, preferred_shard, restore_sequentially):
        variable = lambda x: x.handle_op.op.name if hasattr(x, "handle_op") else x.name
        absent = [self._absent.get(variable(x)) for x in saveables]
        kept = [x for x, value in zip(saveables, absent) if value is None]
        more = preferred_shard, restore_sequentially
        restored = iter(super().bulk_restore(filename_tensor, kept, *more) if kept else ())
        return [
            next(restored) if value is None else value
            for x, value in zip(saveables, absent)
            for _ in x.specs
        ]


def _slices(saveable):
    """Yields (name in the checkpoint, Slice) of what a Saver saves."""
    handle = getattr(saveable, "handle_op", None)
    for spec in saveable.specs:
        if handle is None:  # a strategy's variable: each replica has its own
            yield spec.name, Slice(spec.slice_spec, 0, lambda spec=spec: spec.tensor)
            continue
        # The Saver's own tensor may have been read before the save, so read the variable.
        shape, dtype = tf.TensorShape(saveable.op.shape), spec.dtype.base_dtype
        for rows in slices_of(handle, shape, dtype, spec.slice_spec):
            yield spec.name, rows


def make_saver(keep_checkpoint_max: int, sharded: bool = True, **of_builder):
    """The Saver that Estimator makes by itself, but with a Builder of these arguments.

    Args:
        keep_checkpoint_max: number of newest checkpoints to keep; 0: all.
        sharded: whether each parameter server writes its part.
    """
    return v1.train.Saver(
        sharded=sharded, max_to_keep=keep_checkpoint_max, defer_build=True,
        save_relative_paths=True, builder=Builder(**of_builder),
    )  # fmt: skip
