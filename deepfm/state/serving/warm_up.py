"""Warm-up requests, which TensorFlow Serving answers itself before it serves a model.

They lie in assets.extra of an export, a TFRecord of tensorflow.serving.PredictionLog each:

    PredictionLog {PredictLog predict_log = 6}        PredictLog {PredictRequest request = 1}
    PredictRequest {ModelSpec model_spec = 1; map<string, TensorProto> inputs = 2}
    ModelSpec {string name = 1; string signature_name = 3}

https://www.tensorflow.org/tfx/serving/saved_model_warmup
https://github.com/tensorflow/serving/blob/master/tensorflow_serving/apis/prediction_log.proto
"""

from typing import Dict, Iterator, Tuple

import numpy as np

from deepfm.records import wire
from deepfm.runtime.tf import tf

FILE = "tf_serving_warmup_requests"
ROWS = 100


def write(path: str, signatures: Dict[str, Dict[str, tf.Tensor]], rows: Dict[str, np.ndarray]):
    """Writes a request for each signature that takes ids or raw rows.

    Args:
        signatures: {signature: its inputs}.
        rows: the model's features, a few rows of them.
    """
    with tf.io.TFRecordWriter(path) as writer:
        for name, inputs in _requests(signatures, rows):
            writer.write(_log(name, inputs))


def _requests(signatures, rows) -> Iterator[Tuple[str, Dict[str, np.ndarray]]]:
    """Yields (signature, {input: what to send}); raw rows are of missing cells."""
    n = len(rows["feat_ids"])
    nothing = {tf.string: b"", tf.float64: np.nan}
    for name, inputs in signatures.items():
        if set(inputs) == set(rows):
            yield name, rows
        elif set(inputs) == {"examples"}:
            yield name, {"examples": np.array(list(_examples(**rows)), object)}
        elif name in ("raw", "raw_typed", "candidates"):
            cells = lambda x: np.full(
                x.shape[0].value or n, nothing[x.dtype], x.dtype.as_numpy_dtype
            )
            yield name, {key: cells(x) for key, x in inputs.items()}


def _examples(feat_ids, feat_vals, feat_counts=None):
    for i, (ids, values) in enumerate(zip(feat_ids, feat_vals)):
        counts = None if feat_counts is None else feat_counts[i]
        n = len(ids) if counts is None else counts.sum()
        yield wire.write(0, ids[:n], values[:n], counts)


def _log(signature, inputs):
    """A serialized PredictionLog."""
    field = lambda number, content: wire.tag(number, len(content)) + content
    request = field(1, field(1, b"deepfm") + field(3, signature.encode()))
    for name, x in inputs.items():
        tensor = tf.make_tensor_proto(x).SerializeToString()
        request += field(2, field(1, name.encode()) + field(2, tensor))
    return field(6, field(1, request))
