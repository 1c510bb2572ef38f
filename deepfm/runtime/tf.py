"""TensorFlow 1.15, or the same interface of TensorFlow 2.15: `tensorflow.compat.v1`.

What the two call otherwise is here; nothing else of this project imports tensorflow.
"""

import functools
import os
import threading

# oneDNN, which only 2.15 has on, adds up in another order.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# cuBLAS on cards of 8.0 or above else rounds the factors of a product to 10 bits.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A parent that has loaded TensorFlow 2 hands this down, and 1.15 would take it for an order.
os.environ.pop("TF2_BEHAVIOR", None)

# isort: split
# ruff: noqa: E402, F401
import tensorflow

import deepfm

VERSION = tensorflow.__version__
if not VERSION.startswith(("1.15.", "2.15.")):
    deepfm.refuse_python(f"has TensorFlow {VERSION}, not 1.15 or 2.15")
IS_2 = VERSION.startswith("2.")
tf = tensorflow.compat.v1 if IS_2 else tensorflow

# isort: split
from tensorflow.core.protobuf import tensor_bundle_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client import device_lib
from tensorflow.python.data.util import random_seed
from tensorflow.python.distribute import summary_op_util
from tensorflow.python.eager import profiler
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, variable_shape
from tensorflow.python.saved_model import loader_impl
from tensorflow.python.training import checkpoint_state_pb2, slot_creator
from tensorflow.python.training.optimizer import _var_key as key_of_slots
from tensorflow.python.training.saver import BulkSaverBuilder

if IS_2:
    from tensorflow.tsl.profiler.protobuf import trace_events_pb2
else:
    from tensorflow.core.protobuf import trace_events_pb2


def _as_1_15():
    """Has 2.15 behave as 1.15 does, where this program counts on it."""
    level = tf.get_logger().level
    tf.get_logger().setLevel("ERROR")  # it would warn that resource variables are off
    tf.disable_v2_behavior()
    tf.get_logger().setLevel(level)

    from tensorflow.python.client import _pywrap_events_writer
    from tensorflow.python.framework import error_interpolation
    from tensorflow.python.training import py_checkpoint_reader

    # A message begins with what failed, not with where that was defined.
    error_interpolation.interpolate_graph = lambda message, graph: message
    _raise(
        tf.errors.OutOfRangeError, py_checkpoint_reader.CheckpointReader, "get_tensor", IndexError
    )
    _raise(tf.errors.UnknownError, _pywrap_events_writer.EventsWriter, "Flush", RuntimeError)
    # The thread that writes summaries hands its error on to whoever waits for them.
    shown = threading.excepthook
    of_summaries = lambda failed: getattr(failed.thread, "name", "") == "EventLoggerThread"
    threading.excepthook = lambda failed: None if of_summaries(failed) else shown(failed)


def _raise(kind, owner, method, instead_of):
    """Has a method raise a TensorFlow error, in place of Python's."""
    call = getattr(owner, method)

    def called(self, *words):
        try:
            return call(self, *words)
        except instead_of as error:
            raise kind(None, None, str(error)) from error

    setattr(owner, method, called)


if IS_2:
    _as_1_15()


def no_autotuning(options: tf.data.Options):
    """Turns off the autotuning of a tf.data pipeline."""
    if IS_2:
        options.autotune.enabled = False
    else:
        options.experimental_optimization.autotune = False


def copy_here(variable):
    """The copy of a mirrored variable that this replica has."""
    return variable._get() if IS_2 else variable.get()


def summarize(name: str, value):
    """Adds a float32 [] to the summaries under exactly this name, whatever the name scope.

    With MirroredStrategy only the first replica does so.
    """
    if summary_op_util.skip_summary():
        return
    summary = tf.raw_ops.ScalarSummary(tags=name, values=value)
    tf.add_to_collection(tf.GraphKeys.SUMMARIES, summary)


@functools.lru_cache(maxsize=None)
def libsvm_decoder():
    """tf.contrib.libsvm's decode_libsvm (lines, num_features, label_dtype), or what does the same.

    Loading all of tf.contrib for it would take half a second.
    """
    if IS_2:
        return _decode_libsvm
    path = "contrib/libsvm/python/ops/_libsvm_ops.so"
    return tf.load_op_library(os.path.join(tf.sysconfig.get_lib(), path)).decode_libsvm


def _decode_libsvm(lines, num_features, label_dtype):
    words = tf.strings.split(lines, result_type="RaggedTensor")
    labels = tf.strings.to_number(words[:, :1].flat_values, out_type=label_dtype)
    pairs = words[:, 1:]
    parts = tf.strings.split(pairs.flat_values, ":", result_type="RaggedTensor")
    two = tf.debugging.assert_equal(parts.row_lengths(), tf.constant(2, tf.int64))
    labelled = tf.debugging.assert_positive(words.row_lengths())
    with tf.control_dependencies([two, labelled]):
        parts = tf.reshape(parts.flat_values, [-1, 2])
    ids = tf.strings.to_number(parts[:, 0], out_type=tf.int64)
    values = tf.strings.to_number(parts[:, 1], out_type=tf.float32)
    where = tf.stack([pairs.value_rowids(), ids], axis=1)
    return labels, where, values, tf.stack([tf.size(lines, out_type=tf.int64), num_features])


def forget_debug_names(builder):
    """Drops from a SavedModel what only 2.15 gives a variable: 1.15, too, shall load it."""
    for graph in builder._saved_model.meta_graphs:
        for node in graph.graph_def.node:
            node.attr.pop("debug_name", None)


def pipe_mode_dataset():
    """SageMaker's PipeModeDataset, whose library only Pipe mode needs."""
    from tensorflow.python.data.ops import dataset_ops

    before = dataset_ops.Dataset
    if IS_2:  # it derives from Dataset, and wants what v2 calls by that name
        dataset_ops.Dataset = dataset_ops.DatasetV2
    try:
        from sagemaker_tensorflow import PipeModeDataset
    finally:
        dataset_ops.Dataset = before
    return PipeModeDataset
