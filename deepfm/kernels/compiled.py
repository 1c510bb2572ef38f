"""The compiled operators, for the costliest work of a training step besides matrix products.

    python -m deepfm.kernels        builds them

ops.py says what each one does; TensorFlow's own operators do the same, more slowly.
"""

import ctypes
import functools
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.data.util import random_seed
from tensorflow.python.ops.resource_variable_ops import variable_shape

from deepfm.kernels import build
from deepfm.kernels.build import library
from deepfm.kernels.ops import CHUNK, TENSORFLOW, Ops

_SECONDS = 300  # that building may take before a job starts, on a busy host
_EACH = 30  # seconds between two lines that say that it goes on


@functools.lru_cache(maxsize=None)
def raw_ops():
    """The operators as loaded from the library; csrc/ describes their inputs."""
    return tf.load_op_library(library())


@functools.lru_cache(maxsize=None)
def _lines():
    function = ctypes.CDLL(library()).deepfm_lines
    function.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    function.restype = ctypes.c_int64
    return function


def built() -> bool:
    """Whether the library exists and can be loaded."""
    if not os.path.exists(library()):
        return False
    try:
        raw_ops()
    except tf.errors.NotFoundError:  # built for another system
        return False
    return True


def ready() -> bool:
    """Whether the library can be loaded, if need be after building it, once on each host."""
    if built():
        return True
    logging.info("Building the compiled kernels, once on this host, in at most %d s.", _SECONDS)
    try:
        _build()
        reason = "the library cannot be loaded"
    except (OSError, subprocess.SubprocessError) as error:
        reason = error
    if built():
        return True
    logging.warning(
        "The compiled kernels cannot be built (%s); training with TensorFlow's own operators takes "
        "about 3 times as long. Install g++, or build them before: `python -m deepfm.kernels`.",
        reason,
    )
    return False


def _build():
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build.build, _SECONDS)
        while not wait([building], _EACH).done:
            seconds = time.monotonic() - started
            logging.info("Still building the compiled kernels, for %.0f s now.", seconds)
    building.result()


class _Compiled(Ops):
    """The compiled operators; TensorFlow's take over what these cannot handle."""

    packed = adds_l2 = keeps_rows = True

    def unique(self, ids, dtype):
        return raw_ops().deepfm_unique(ids, dtype)

    def gather(self, table, indices):
        rows = raw_ops().deepfm_gather_rows(table.handle, indices)
        rows.set_shape([None, *table.shape[1:]])
        return rows

    def look_up(self, weights, embeddings, where, x, counts, field_size, plain):
        if where is None or counts is not None:
            return plain()
        scaled, fm, _ = raw_ops().deepfm_look_up(weights, embeddings, where, x, field_size)
        scaled.set_shape([None, field_size * embeddings.shape[1]])
        return scaled, fm

    def first_layer(
        self, weights, embeddings, where, x, counts, kernel, field_size, pooling, whole
    ):
        units = kernel.shape[1].value
        most = largest_share(embeddings.shape[1].value, units)
        several = counts is not None
        if where is None or (several and pooling == "max") or most <= 0:
            return whole()
        pairs = raw_ops().deepfm_pairs(
            where, x, counts if several else tf.zeros([0], tf.int32), tf.shape(weights)[0],
            field_size=field_size, mean=several and pooling == "mean",
        )  # fmt: skip

        places = tf.size(counts if several else where)
        share = tf.size(pairs.rows) / tf.maximum(places, 1)  # the batch alone decides
        few = share < most
        if not several:
            y, fm = _of_pairs_or_values(weights, embeddings, kernel, where, x, pairs, few)
            return tf.ensure_shape(y, [None, units]), fm

        def distinct():
            y, fm, *_ = raw_ops().deepfm_first_layer(weights, embeddings, kernel, *pairs)
            return tf.ensure_shape(y, [None, units]), fm

        return tf.cond(few, distinct, whole)

    def applied_first_layer(self, weights, embeddings, ids, x, kernel, field_size):
        y, fm = raw_ops().deepfm_applied_first_layer(
            weights.handle, embeddings.handle, kernel, ids, x, field_size
        )
        return tf.ensure_shape(y, [None, kernel.shape[1].value]), fm

    def lines(self, numbers):
        numbers = np.ascontiguousarray(numbers, np.float32)
        text = np.empty(16 * len(numbers), np.uint8)
        size = _lines()(numbers.ctypes.data, len(numbers), text.ctypes.data)
        return text[:size].tobytes().decode("ascii")

    def relu_dropout(self, x, seed, dropped):
        return raw_ops().deepfm_relu_dropout(x, seed, dropped)

    def zeros(self, shape, dtype=tf.float32, partition_info=None):
        """Zeros whose rows are faster to reach than those of tf.zeros."""
        return raw_ops().deepfm_zeros(np.int64(tf.TensorShape(shape).as_list()))

    empty = zeros

    def clip_rows(self, table, indices, values, ratio, min_norm):
        clipped = raw_ops().deepfm_clip_rows(
            table.handle, indices, values, ratio=ratio, min_norm=min_norm
        )
        return tf.ensure_shape(clipped, [None, *table.shape[1:]])

    def adam(self, variable, m, v, grad, *numbers):
        return raw_ops().deepfm_adam(variable.handle, m.handle, v.handle, grad, *numbers)

    def adam_rows(self, variable, m, v, indices, grad, *numbers, l2=0.0):
        handles = variable.handle, m.handle, v.handle
        return raw_ops().deepfm_adam_rows(*handles, indices, grad, *numbers, l2=l2)

    def elapsed_adam(self, variable, m, v, seen, indices, grad, now, run_step, *numbers, l2):
        handles = variable.handle, m.handle, v.handle, seen.handle
        return raw_ops().deepfm_elapsed_adam_rows(
            *handles, indices, now, grad, *numbers, run_step=run_step, l2=l2
        )

    def ftrl(self, variable, accum, linear, grad, rate):
        return raw_ops().deepfm_ftrl(variable.handle, accum.handle, linear.handle, grad, rate)

    def ftrl_rows(self, variable, accum, linear, indices, grad, rate, l2=0.0):
        handles = variable.handle, accum.handle, linear.handle
        return raw_ops().deepfm_ftrl_rows(*handles, indices, grad, rate, l2=l2)

    def pack(self, strings):
        return strings.map(pack)

    def num_records(self, chunk):
        return tf.strings.length(chunk[1]) // 8

    def rechunked(self, chunks, size, shuffle_buffer=0, seed=1, skip=0, take=-1):
        seed, seed2 = random_seed.get_seed(seed) if shuffle_buffer > 1 else (1, 1)
        numbers = _int64s(size, shuffle_buffer, seed, seed2, skip, take)
        return _dataset(raw_ops().deepfm_chunks(tf.data.experimental.to_variant(chunks), *numbers))

    def read(self, path, buffer_bytes, file_bytes, plain):
        chunks = records_of(path, buffer_bytes, CHUNK, file_bytes)
        # The empty chunk makes a file take as many turns as with TensorFlow's own.
        return chunks.concatenate(tf.data.Dataset.from_tensors(self.no_records()))

    def parse(self, chunk, schema, plain):
        ops = raw_ops()
        read = ops.deepfm_parse_multi_valued if schema.multi_valued else ops.deepfm_parse
        *found, weights = read(
            chunk, schema.field_size, schema.limit, with_labels=schema.with_labels,
            num_weights=int(schema.with_weights),
        )  # fmt: skip
        return (*found, *weights)

    def parse_lines(self, chunk, schema, plain):
        if schema.pad:
            return plain(unpack(chunk), schema)
        good, *found, weights = raw_ops().deepfm_parse_lines(
            chunk, schema.field_size, schema.limit, schema.id_offset,
            num_weights=int(schema.weighted),
        )  # fmt: skip
        found += weights if schema.with_weights else []
        return tf.cond(good, lambda: tuple(found), lambda: plain(unpack(chunk), schema))


class _OnServers(_Compiled):
    """The compiled operators for variables in parts, on parameter servers that have them too."""

    keeps_rows = False
    gather = Ops.gather


class _BesideServers(_OnServers):
    """The compiled operators for a worker of parameter servers that do not have them."""

    adds_l2 = False
    zeros, empty = Ops.zeros, Ops.empty
    clip_rows, adam, adam_rows = Ops.clip_rows, Ops.adam, Ops.adam_rows
    elapsed_adam, ftrl, ftrl_rows = Ops.elapsed_adam, Ops.ftrl, Ops.ftrl_rows


COMPILED = _Compiled()
ON_SERVERS, BESIDE_SERVERS = _OnServers(), _BesideServers()


def of_steps(ops, mode):
    """The Ops of training steps in a Mode, if data are read with `ops`."""
    ops = of_model(ops)
    if not mode.partitioner or ops is not COMPILED:
        return ops
    return ON_SERVERS if mode.all_run(lambda: raw_ops().deepfm_zeros([0])) else BESIDE_SERVERS


def of_model(ops):
    """The Ops of a model that is applied, if data are read with `ops`: GPUs have TensorFlow's."""
    return TENSORFLOW if tf.config.experimental.list_physical_devices("GPU") else ops


def largest_share(width, units):
    """The share of distinct (field, id) pairs up to which the first layer is faster on these.

    A line through the shares at which both took the same time, on an AMD EPYC with AVX2: .37 with
    embeddings of 32 and 128 units, .43 with 32 and 256, .23 with 16 and 64, .19 with 8 and 32.
    Below 0 for small layers, whose pairs need not even be looked for.
    """
    return 0.48 - 2.9 * (width + units) / (width * units)


def _of_pairs_or_values(weights, embeddings, kernel, where, x, pairs, few):
    """The first layer and the FM of fields with one value each.

    Its gradient chooses once more between distinct pairs and the whole matrix. TensorFlow's own
    gradient of a choice fills a zero gradient for each path not taken, and adds it: as many bytes
    as the rows and the kernel have.

    Args:
        weights, embeddings, kernel, where, x: as for Ops.first_layer.
        pairs: outputs of DeepfmPairs.
        few: bool [], whether to use them.

    Returns:
        (float32 [B, H]; float32 [B]), as Ops.first_layer.
    """
    field_size = kernel.shape[0].value // embeddings.shape[1].value

    @tf.custom_gradient
    def layer(*inputs):
        weights, embeddings, kernel = inputs

        def of_pairs():
            return raw_ops().deepfm_first_layer(*inputs, *pairs)

        def of_values():
            scaled, fm, sums = raw_ops().deepfm_look_up(weights, embeddings, where, x, field_size)
            return tf.matmul(scaled, kernel), fm, sums, scaled

        y, fm, sums, kept = tf.cond(few, lambda: list(of_pairs()), lambda: list(of_values()))

        def gradient(by_y, by_fm):
            def back_to_pairs():
                return raw_ops().deepfm_first_layer_grad(*inputs, *pairs, sums, by_y, by_fm, kept)

            def back_to_values():
                by_scaled = tf.matmul(by_y, kernel, transpose_b=True)
                by_kernel = tf.transpose(tf.matmul(by_y, kept, transpose_a=True))
                by_rows = raw_ops().deepfm_look_up_grad(
                    weights, embeddings, where, x, sums, by_scaled, by_fm, field_size
                )
                return [*by_rows, by_kernel]

            return tf.cond(few, lambda: list(back_to_pairs()), back_to_values)

        return (y, fm), gradient

    return layer(weights, embeddings, kernel)


def pack(strings):
    """Packs records: string [...] -> string [2]."""
    return raw_ops().deepfm_pack(strings)


def unpack(chunk):
    """string [2] -> string [n]."""
    return raw_ops().deepfm_unpack(chunk)


def records_of(path, buffer_bytes, size, file_bytes=-1):
    """The records of an uncompressed TFRecord file, in packed chunks of `size`.

    Fails with DataLossError if the file is damaged, if it ends inside a length, which
    tf.data.TFRecordDataset takes for its end, or if it is not `file_bytes` long (below 0: any).
    """
    numbers = _int64s(buffer_bytes, size, file_bytes)
    return _dataset(raw_ops().deepfm_records(path, *numbers))


def _int64s(*numbers):
    """Each number as int64 []. Not by a cast: grappler would fold it into a constant, merge that
    with equal ones, such as the -1 of a repeat(), and crash (tf.data's noop_elimination)."""
    return [tf.convert_to_tensor(number, tf.int64) for number in numbers]


def _dataset(variant):
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([2], tf.string))


@tf.RegisterGradient("DeepfmGatherRows")
def _gather_grad(op, by_rows):
    table, indices = op.inputs
    shape = variable_shape(table, indices.dtype)
    return tf.IndexedSlices(by_rows, indices, shape), None


@tf.RegisterGradient("DeepfmLookUp")
def _look_up_grad(op, by_scaled, by_fm, _):
    by_rows = raw_ops().deepfm_look_up_grad(
        *op.inputs, op.outputs[2], by_scaled, by_fm, op.get_attr("field_size")
    )
    return [*by_rows, None, None]


@tf.RegisterGradient("DeepfmFirstLayer")
def _first_layer_grad(op, by_y, by_fm, *_):
    _, _, sums, projected = op.outputs
    by_inputs = raw_ops().deepfm_first_layer_grad(*op.inputs, sums, by_y, by_fm, projected)
    return [*by_inputs] + [None] * (len(op.inputs) - 3)


@tf.RegisterGradient("DeepfmReluDropout")
def _relu_dropout_grad(op, by_y):
    dropped = op.get_attr("dropped")
    return raw_ops().deepfm_relu_dropout_grad(op.outputs[0], by_y, dropped), None
