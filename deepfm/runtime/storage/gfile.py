"""Remote files through TensorFlow 1.15, for programs that have loaded it; see `places`."""

import json
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple

import tensorflow as tf

from deepfm.errors import BadInput

_with_client = {"s3", "file"}  # schemes


def check_client(path: str):
    """Refuses (BadInput) a path with a scheme for which this TensorFlow has no client."""
    scheme = path.partition("://")[0]
    if scheme in _with_client:
        return
    try:
        tf.io.gfile.stat(path)
    except (tf.errors.UnimplementedError, tf.errors.NotFoundError) as error:
        why = error.message.partition(" (file:")[0]
        if "not implemented" in why or "shared object" in why:
            raise BadInput(
                f"{path}: this TensorFlow has no client for {scheme}:// ({why}); give a local "
                "path, or one that begins with s3://."
            ) from error
    except tf.errors.OpError:
        pass  # whoever uses the path says what is wrong
    _with_client.add(scheme)


def open_file(path: str) -> BinaryIO:
    return tf.io.gfile.GFile(path, "rb")


def content(path: str) -> bytes:
    try:
        with open_file(path) as f:
            return f.read()
    except tf.errors.OpError as error:
        raise OSError(str(error)) from error


def json_object(path: str) -> Dict[str, Any]:
    """The JSON object in a file, local or remote; {} without one, or if it cannot be read."""
    try:
        found = json.loads(content(path).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def size(path: str) -> int:
    return tf.io.gfile.stat(path).length


def exists(path: str) -> bool:
    return tf.io.gfile.exists(path)


def is_dir(path: str) -> bool:
    return tf.io.gfile.isdir(path)


def names(folder: str) -> List[str]:
    try:
        return sorted(tf.io.gfile.listdir(folder))
    except tf.errors.NotFoundError:
        return []


def walk(top: str) -> Iterator[Tuple[str, List[str], List[str]]]:
    return tf.io.gfile.walk(top)


def glob(pattern: str) -> List[str]:
    try:
        return tf.io.gfile.glob(pattern)
    except tf.errors.NotFoundError:  # the folder of a glob does not exist
        return []
