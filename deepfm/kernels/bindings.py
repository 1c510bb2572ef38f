"""The compiled operators of what costs a training step most apart from its matrix products.

TensorFlow's own do the same, in more time; with the same seed they draw the same records and drop
the same units.

Raw records are packed between them: string [2], the bytes of all of them, one after another, and
where each ends (csrc/packed.h).

B: records in a batch. F: fields. K: embedding size. N: values. U: distinct ids.
"""

import functools
import os

import tensorflow as tf
from tensorflow.python.data.util import random_seed
from tensorflow.python.ops.resource_variable_ops import variable_shape

from deepfm.kernels.build import library


@functools.lru_cache(maxsize=None)
def _ops():
    return tf.load_op_library(library())


def built() -> bool:
    """Whether the library is there and can be loaded."""
    if not os.path.exists(library()):
        return False
    try:
        _ops()
    except tf.errors.NotFoundError:  # built for another system
        return False
    return True


def zeros(shape):
    """float32 zeros of a table; its rows are found in less time than those of tf.zeros."""
    return _ops().deepfm_zeros(shape=tf.cast(shape, tf.int64))


def zeros_initializer(shape, dtype=tf.float32, partition_info=None):
    """`zeros` as a variable's initializer."""
    del dtype, partition_info
    return zeros(shape)


def unique(ids, dtype):
    """As tf.unique: int64 [N] -> (distinct ids, `dtype` [U]; which of them each is, int32 [N])."""
    return _ops().deepfm_unique(ids=ids, T=dtype)


def gather(table, indices):
    """Rows of a resource variable: int [U] -> float32 [U, ...]."""
    return _ops().deepfm_gather_rows(table=table.handle, indices=indices)


@tf.RegisterGradient("DeepfmGatherRows")
def _gather_grad(op, by_rows):
    table, indices = op.inputs
    shape = variable_shape(table, indices.dtype)
    return tf.IndexedSlices(by_rows, indices, shape), None


def look_up(weights, embeddings, where, x, field_size):
    """The MLP's input and the FM's terms of a batch.

    Args:
        weights: float32 [U].
        embeddings: float32 [U, K].
        where: int32 [N], the row of each value, N = B F.
        x: float32 [N], what each row is scaled by.
        field_size: F.

    Returns:
        (float32 [B, F K], the scaled embeddings; float32 [B], first_order + second_order).
    """
    scaled, fm, _ = _ops().deepfm_look_up(
        weights=weights, embeddings=embeddings, where=where, x=x, field_size=field_size
    )
    return scaled, fm


@tf.RegisterGradient("DeepfmLookUp")
def _look_up_grad(op, by_scaled, by_fm, _):
    weights, embeddings, where, x = op.inputs
    by_rows = _ops().deepfm_look_up_grad(
        weights=weights, embeddings=embeddings, where=where, x=x, sums=op.outputs[2],
        by_scaled=by_scaled, by_fm=by_fm, field_size=op.get_attr("field_size"),
    )  # fmt: skip
    return [*by_rows, None, None]


def relu_dropout(x, seed, dropped):
    """max(x, 0) with units dropped, `dropped` of 65,536; float32 [B, n], int64 [2] -> [B, n]."""
    return _ops().deepfm_relu_dropout(x=x, seed=seed, dropped=dropped)


@tf.RegisterGradient("DeepfmReluDropout")
def _relu_dropout_grad(op, by_y):
    dropped = op.get_attr("dropped")
    return _ops().deepfm_relu_dropout_grad(y=op.outputs[0], by_y=by_y, dropped=dropped), None


def adam(variable, m, v, grad, rate, beta1, beta2, epsilon, l2=0.0):
    """Adam of a resource variable, of its gradient + l2 * variable; returns the operation."""
    return _ops().deepfm_adam(
        variable=variable.handle, m=m.handle, v=v.handle, grad=grad, rate=rate, beta1=beta1,
        beta2=beta2, epsilon=epsilon, l2=l2,
    )  # fmt: skip


def adam_rows(variable, m, v, indices, grad, rate, beta1, beta2, epsilon, l2=0.0):
    """As `adam`, of some rows, which differ."""
    return _ops().deepfm_adam_rows(
        variable=variable.handle, m=m.handle, v=v.handle, indices=indices, grad=grad, rate=rate,
        beta1=beta1, beta2=beta2, epsilon=epsilon, l2=l2,
    )  # fmt: skip


def transpose(x):
    """float32 [m, n] -> [n, m]."""
    return _ops().deepfm_transpose(x=x)


def records(path, buffer_bytes, size, file_bytes=-1):
    """The records of a TFRecord file that is not compressed, in chunks of `size`, packed.

    Fails with DataLossError where the file is damaged, where it ends within a length, which
    tf.data.TFRecordDataset takes for its end, and where it has not `file_bytes` (below 0: any).
    """
    numbers = _int64s(buffer_bytes, size, file_bytes)
    return _dataset(_ops().deepfm_records(path, *numbers))


def chunks(dataset, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
    """As .unbatch().shuffle(shuffle_buffer, seed).skip(skip).take(take).batch(size), in this order.

    Args:
        dataset: of packed records.
        size: records of each chunk that comes out, apart from the last.
        shuffle_buffer: records among which the next one is drawn; 0 keeps the order.
        seed: int64 [] or int, of the shuffling.
        skip, take: int64 [] or int, records; all are taken below 0.

    Returns:
        A dataset of packed records.
    """
    seed, seed2 = random_seed.get_seed(seed) if shuffle_buffer > 1 else (1, 1)
    numbers = _int64s(size, shuffle_buffer, seed, seed2, skip, take)
    return _dataset(_ops().deepfm_chunks(tf.data.experimental.to_variant(dataset), *numbers))


def _int64s(*numbers):
    """int64 [] each. Not by a cast: grappler would make a constant of it, merge that with equal
    ones, as the -1 of a repeat(), and crash on these (tf.data's noop_elimination)."""
    return [tf.convert_to_tensor(number, tf.int64) for number in numbers]


def _dataset(variant):
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([2], tf.string))


def pack(strings):
    """Packs records: string [...] -> string [2]."""
    return _ops().deepfm_pack(records=strings)


def unpack(packed):
    """string [2] -> string [n]."""
    return _ops().deepfm_unpack(packed=packed)


def num_packed(packed):
    """int32 []: how many records there are."""
    return tf.strings.length(packed[1]) // 8


def parse(serialized, field_size, feature_size=None):
    """Parses packed records that are to the byte as `records.encode` writes them.

    Returns:
        (whether they all are, and hold what `records.check` asks for: bool []; labels float32 [B],
        ids int64 [B, F], values float32 [B, F], of no use where they are not).
    """
    return _ops().deepfm_parse(
        serialized=serialized, field_size=field_size, feature_size=feature_size or tf.int64.max
    )


def parse_lines(lines, field_size, feature_size=None, id_offset=0):
    """As `parse`, of packed LibSVM lines that are as most programs write them."""
    return _ops().deepfm_parse_lines(
        lines=lines, field_size=field_size, feature_size=feature_size or tf.int64.max,
        id_offset=id_offset,
    )  # fmt: skip


def split_lines(text):
    """(whether none of a text's lines is a comment or blank: bool []; its lines that are not
    empty, packed, of no use where one is)."""
    return _ops().deepfm_split_lines(text=text)
