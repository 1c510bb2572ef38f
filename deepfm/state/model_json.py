"""model.json: the ModelConfig that a model was trained with, for the jobs that follow."""

import json
from typing import Any, Dict

from deepfm.config import ModelConfig
from deepfm.errors import refusing
from deepfm.runtime.tf import tf

FILE = "model.json"


def load(path: str) -> Dict[str, Any]:
    """Reads a model.json: {field of ModelConfig: value}, without unknown fields.

    Raises:
        BadInput: the file is not a model.json, or a field has a value that it may not have.
    """
    advice = "delete it and give the model's flags"
    with tf.io.gfile.GFile(path, "rb") as f, refusing(f"{path} is not a model.json", advice):
        content = json.loads(f.read().decode())
        content = {k: v for k, v in content.items() if k in ModelConfig._fields}
        for name, value in content.items():
            if not _fits(ModelConfig.settings[name], value):
                raise ValueError(f"{name} may not be {str(value)[:40]}")
    return content


def _fits(setting, value):
    """Whether a field of ModelConfig may have a value."""
    if value is None:
        return setting.optional
    if setting.many:
        return isinstance(value, list) and bool(value) and all(_is_one(setting, x) for x in value)
    return _is_one(setting, value)


def _is_one(setting, value):
    """The same, of a single value; of numbers, only finite ones, and no bool, an int to Python."""
    if setting.choices:
        return value in setting.choices
    if setting.type in (bool, str):
        return isinstance(value, setting.type)
    if setting.type not in (int, float):
        return isinstance(value, dict) and "fingerprint" in value  # ids
    is_number = type(value) is int or type(value) is setting.type
    return is_number and abs(value) < 1 << 63 and setting.allows(value)
