"""model.json: the ModelConfig that a model was trained with, for the jobs that follow."""

import json
from typing import Any, Dict

import tensorflow as tf

from deepfm.config import CHOICES, ModelConfig
from deepfm.errors import BadInput

FILE = "model.json"


def read(path: str) -> Dict[str, Any]:
    """Reads a model.json: {field of ModelConfig: value}, without unknown fields.

    Raises:
        BadInput: the file is not a model.json, or a field has a value that it may not have.
    """
    try:
        with tf.io.gfile.GFile(path, "rb") as f:
            found = json.loads(f.read().decode())
        found = {k: v for k, v in found.items() if k in ModelConfig._fields}
        for name, value in found.items():
            if not _fits(name, value):
                raise ValueError(f"{name} may not be {str(value)[:40]}")
    except (ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(
            f"{path} is not a model.json ({reason}); delete it and give the model's flags."
        ) from error
    return found


def _fits(name, value):
    """Whether a field of ModelConfig may have a value."""
    if name in CHOICES:
        return value in CHOICES[name]
    if isinstance(ModelConfig._field_defaults.get(name), bool):
        return isinstance(value, bool)
    if name in ("deep_layers", "dropout"):
        single = {"deep_layers": _is_size, "dropout": lambda x: _is_number(x) and x < 1}[name]
        return isinstance(value, list) and bool(value) and all(map(single, value))
    if name in ("field_size", "feature_size", "embedding_size"):
        return _is_size(value)
    if name in ("hash_buckets", "l2_reg_deep") and value is None:
        return True
    if name == "feature_map":
        return value is None or isinstance(value, str)
    if name == "ids":
        return value is None or isinstance(value, dict) and "fingerprint" in value
    if name == "logit_offset":
        return type(value) in (int, float) and _is_number(abs(value))
    return _is_number(value) and (name not in ("seed", "hash_buckets") or isinstance(value, int))


def _is_size(value):
    return _is_number(value) and isinstance(value, int) and value > 0


def _is_number(value):
    """Whether a value is a finite number of at least 0, and not a bool, an int to isinstance."""
    return type(value) in (int, float) and 0 <= value < 1 << 63
