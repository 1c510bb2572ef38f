"""Files at remote paths: s3://, and any other scheme that tf.io.gfile knows.

The functions up to `glob` are those of `places`, for programs that have loaded TensorFlow.

TensorFlow 1.15's S3 client mistakes trouble for absence: if the server is down or denies access, a
folder seems to be missing, and if it stops answering, a file seems to end early. So a listing is
trusted only if it shows a file that was just written, and a copy only if it has the right size.
"""

import contextlib
import fcntl
import io
import json
import os
import posixpath
import shutil
import tempfile
import threading
import time
import uuid
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Tuple

from absl import logging

from deepfm.errors import BadInput, RemoteError
from deepfm.records.storage.places import S3_ADVICE, check_s3_address, is_remote
from deepfm.runtime.tf import IS_2, tf

DEADLINE = 15  # seconds for a server's first answer
TROUBLE = (tf.errors.OpError, OSError)
_WAITS = (1, 2, 4)  # seconds between tries, each of which TensorFlow's client repeats for 25 s
_BLOCK = 1 << 20  # bytes
_S3 = "s3://"
MARK = ".training"  # in a model_dir, of the training that owns it; no part of the model
_with_client = {"file"} if IS_2 else {"s3", "file"}  # schemes


def check_client(path: str):
    """Refuses (BadInput) a scheme for which this TensorFlow has no client, or an S3_ENDPOINT that
    none takes."""
    scheme = path.partition("://")[0]
    if scheme == "s3":
        check_s3_address()
    if scheme in _with_client:
        return
    try:
        tf.io.gfile.stat(path)
    except (tf.errors.UnimplementedError, tf.errors.NotFoundError) as error:
        why = error.message.partition(" (file:")[0]
        if "not implemented" in why or "shared object" in why:
            raise BadInput(
                f"{path}: this TensorFlow has no client for {scheme}:// ({why}); give a local "
                f"path, or {'use TensorFlow 1.15 for s3://' if IS_2 else 'one that begins with s3://'}."
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


def cause(error: Exception) -> str:
    """What an error says, in one line."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = text.strip(" :\n").splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_is_folder(path: str, flag: str):
    """Refuses (BadInput) a whole bucket, which TensorFlow 1.15 cannot list."""
    if _is_bucket(path):
        bucket = path[len(_S3) :].rstrip("/") or "bucket"
        raise BadInput(
            f"--{flag}={path} is a whole bucket, which TensorFlow 1.15 cannot list; give a folder "
            f"in it, e.g. --{flag}={_S3}{bucket}/{flag.partition('_')[0]}."
        )


def _is_bucket(path):
    return path.startswith(_S3) and "/" not in path[len(_S3) :].rstrip("/")


def check_readable(spec: str, flag: str):
    """Raises RemoteError if the server of remote data gives no answer; "not there" is an answer.

    Raises BadInput if TensorFlow would have to list a whole bucket for it.
    """
    paths = [path.strip() for path in spec.split(",") if is_remote(path)]
    for path in paths:
        check_client(path)
        check_is_folder(path, flag)
    _in_time(lambda: tf.io.gfile.exists(paths[0]), f"--{flag}={spec} cannot be read")
    for path in paths:
        folder, _ = posixpath.split(path.rstrip("/"))
        if _is_bucket(folder) and not tf.io.gfile.isdir(path):
            raise BadInput(
                f"--{flag}={path} is not a folder, or may not be read; TensorFlow 1.15 cannot list "
                "the files at the top of a bucket: put them into a folder."
            )


def ended_early(name: str, what: str) -> RemoteError:
    """The error for remote data that could not be read to its end; `what` says how far."""
    return RemoteError(
        f"{name} could not be read to its end ({what}): its server stopped answering; {S3_ADVICE}."
    )


def check_writable(folder: str, flag: str):
    """Raises RemoteError if a remote folder cannot be written.

    Raises BadInput if it is a whole bucket and `flag` names a folder.
    """
    if flag != "predictions_file":  # a file, which may be at the top of a bucket
        check_is_folder(folder, flag)
    _probe(folder, lambda name: None, f"--{flag}: {folder} cannot be written")


def checked_names(folder: str, flag: str) -> List[str]:
    """The names in a folder; [] if there is no such folder.

    Raises RemoteError if it is remote and cannot be written and listed.
    """
    if not is_remote(folder):
        return tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    check_is_folder(folder, flag)

    def look(name):
        found = [x.rstrip("/") for x in tf.io.gfile.listdir(folder)]
        if name not in found:
            raise OSError("the listing lacks a file that was just written")
        return [x for x in found if x and not x.startswith((".probe-", MARK))]

    return _probe(folder, look, f"--{flag}={folder} cannot be written and listed")


def _probe(folder, look, what):
    """Returns look(name) while a file of that name is in a remote folder, as `_in_time` does."""
    name = f".probe-{uuid.uuid4().hex}"
    path = posixpath.join(folder, name)

    def probe():
        put_text("probe", path)
        try:
            return look(name)
        finally:
            tf.io.gfile.remove(path)

    return _in_time(probe, what)


def clear(folder: str, is_ours: Callable[[str], bool]) -> bool:
    """Deletes our files in a folder, local or remote, by name; returns whether all is gone."""
    names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    for name in filter(is_ours, names):
        tf.io.gfile.remove(posixpath.join(folder, name))
    if not all(map(is_ours, names)):
        return False
    if tf.io.gfile.isdir(folder):  # S3 has no empty folders
        tf.io.gfile.rmtree(folder)
    return True


def _in_time(action, what):
    """Returns action(); raises RemoteError if it fails or takes longer than DEADLINE."""
    results, errors = [], []

    def run():
        try:
            results.append(action())
        except TROUBLE as error:
            errors.append(error)

    # A client that is retrying cannot be stopped, so its thread is left behind.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    if results:
        return results[0]
    why = cause(errors[0]) if errors else f"no answer within {DEADLINE} s"
    raise RemoteError(f"{what}: {why}; {S3_ADVICE}.")


def retrying(action: Callable[[], None], what: str):
    """Runs action() until it succeeds; raises RemoteError when all tries have failed."""
    for wait in (*_WAITS, None):
        try:
            action()
            return
        except TROUBLE as error:
            if wait is None:
                raise RemoteError(f"{what}: {cause(error)}") from error
            logging.warning("%s: %s; trying again.", what, cause(error))
        time.sleep(wait)


def put(local: str, path: str):
    """Copies a local file to a remote path."""
    with open(local, "rb") as source:
        _write(source, path)


def put_text(text: str, path: str):
    """Writes a text to a remote path."""
    put_bytes(text.encode(), path)


def put_bytes(content: bytes, path: str):
    """The same, of bytes."""
    _write(io.BytesIO(content), path)


def _write(source, path):
    """Copies an open file to a remote path.

    Closes the target only once all is written, and not when an exception, such as a signal's,
    passes through: closing sends what there is, which would then pass for the whole.
    """
    target = tf.io.gfile.GFile(path, "wb")
    try:
        _open(target, path)
    except tf.errors.NotFoundError:  # S3 has no folders; elsewhere they have to be made
        tf.io.gfile.makedirs(posixpath.dirname(path))
        _open(target, path)
    shutil.copyfileobj(source, target, _BLOCK)
    target.close()


def _open(target, path):
    """Opens a remote file for writing, one on S3 in a millisecond of its own.

    TensorFlow 1.15's S3 client buffers writes in a file in /tmp that it names after the
    millisecond. Two files opened in the same millisecond, by any threads or processes of a machine,
    share that buffer: the client sends a mixture of both, or waits for bytes that never come.
    """
    with contextlib.ExitStack() as stack:
        if path.startswith(_S3):
            folder = os.open("/tmp", os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
            stack.callback(time.sleep, 0.002)
        target.write(b"")


def get(path: str, local: str):
    """Copies a remote file to a local path; raises OSError if it could not be read whole."""
    size, unfinished = tf.io.gfile.stat(path).length, local + ".tmp"
    with tf.io.gfile.GFile(path, "rb") as source, open(unfinished, "wb") as target:
        for start in range(0, size, _BLOCK):  # S3 refuses to read beyond the end
            block = source.read(min(_BLOCK, size - start))
            target.write(block)
            if not block:
                break
    if os.path.getsize(unfinished) != size:
        raise OSError(f"{path}: {os.path.getsize(unfinished)} of {size} bytes could be read")
    os.replace(unfinished, local)


@contextlib.contextmanager
def written(path: str):
    """Yields where to write a file or a folder; if the path is remote, copies it there at the end.

    A folder is copied file by file, saved_model.pb last, so that no SavedModel is there half.
    If the copying fails, RemoteError says where the local copy is kept.
    """
    if not is_remote(path):
        yield path
        return
    folder = tempfile.mkdtemp(prefix="deepfm-")
    local = os.path.join(folder, posixpath.basename(path.rstrip("/")))
    try:
        yield local
    except BaseException:
        shutil.rmtree(folder)
        raise
    try:
        for source in [local] if os.path.isfile(local) else _files(local):
            target = path + source[len(local) :]
            retrying(lambda s=source, t=target: put(s, t), f"{target} cannot be written")
    except RemoteError as error:
        raise RemoteError(f"{error}; the local copy is kept at {local}.") from error
    shutil.rmtree(folder)


def _files(folder):
    """The paths of all files in a local folder, saved_model.pb last."""
    paths = [os.path.join(root, x) for root, _, found in os.walk(folder) for x in found]
    return sorted(paths, key=lambda path: (path.endswith("saved_model.pb"), path))
