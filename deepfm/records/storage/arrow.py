"""Remote files through pyarrow: s3://, hdfs:// and viewfs://; see `places`.

S3 takes the settings that TensorFlow 1.15's client takes (docs/s3.md). An object is there once the
stream that writes it is closed. S3 cannot rename: `move` has the server copy the object and then
deletes the old one.
"""

import contextlib
import fnmatch
import functools
import io
import os
import posixpath
import re
import shutil
from typing import BinaryIO, Dict, Iterator, List, Tuple

import pyarrow
from pyarrow import fs

from deepfm.errors import BadInput, RemoteError
from deepfm.records.storage import places

# The environment variables that say how to reach S3.
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SETTINGS = ("S3_ENDPOINT", "S3_USE_HTTPS", "AWS_REGION", "S3_REGION")
_READ = 4 << 20  # bytes that a request asks for
_LARGEST_COPY = 5 << 30  # bytes that S3 copies in one request
_MAGIC = re.compile(r"[*?\[]")
_AWS_ERROR = re.compile(r"AWS Error .*")
_HDFS_ADVICE = "check the path, the name node and your permissions"


def environment() -> Dict[str, str]:
    """The variables of this process that say how to reach S3, for other processes."""
    return {name: os.environ[name] for name in CREDENTIALS + SETTINGS if os.environ.get(name)}


def _split(path):
    """(the file system, the path in it)."""
    scheme, _, rest = path.partition("://")
    rest = rest.rstrip("/")
    if scheme == "s3":
        if not rest.strip("/"):
            raise BadInput(f"{path} names no bucket; give s3://BUCKET/FOLDER.")
        return _s3(*(os.environ.get(name) for name in SETTINGS)), rest
    if scheme in ("hdfs", "viewfs"):
        authority, _, below = rest.partition("/")
        return _hdfs(scheme, authority), f"/{below}"
    raise BadInput(
        f"{path}: {scheme}:// cannot be read or written here; give a local path, or one that "
        "begins with s3://, hdfs:// or viewfs://."
    )


@functools.lru_cache(maxsize=4)
def _s3(endpoint, https, region, other_region):
    scheme = "http" if (https or "1").lower() in ("0", "false") else "https"
    places.check_s3_address()
    # Not in the background: a stream would hold all that the server has not taken yet.
    return fs.S3FileSystem(
        region=region or other_region or None, scheme=scheme, endpoint_override=endpoint or None,
        background_writes=False,
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _hdfs(scheme, authority):
    """Hadoop's client; an address without a host is that of fs.defaultFS."""
    address = f"{scheme}://{authority}"
    home = "HADOOP_HOME" if "HADOOP_HOME" in os.environ else "ARROW_LIBHDFS_DIR"
    lacks = [name for name in (home, "CLASSPATH") if not os.environ.get(name)]
    why = f"{' and '.join(lacks)} not set" if lacks else ""
    if not lacks:
        host, _, port = authority.partition(":")
        try:
            return fs.HadoopFileSystem(f"{scheme}://{host}" if host else "default", int(port or 0))
        except (OSError, ValueError) as error:
            why = _reason(error)
    raise BadInput(
        f"{address}: pyarrow cannot start Hadoop's client ({why}); on the driver and on every "
        "executor it needs Java, libhdfs.so (HADOOP_HOME, or ARROW_LIBHDFS_DIR) and "
        "CLASSPATH=$(hadoop classpath --glob)."
    )


def _reason(error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = _AWS_ERROR.search(lines[0])
    return (found[0] if found else lines[0]).rstrip(" .")


@contextlib.contextmanager
def _explained(path):
    """Makes one sentence, with the path, of what pyarrow raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno or 2, "No such file", path) from error
    except (OSError, pyarrow.ArrowException) as error:
        advice = places.S3_ADVICE if path.startswith("s3://") else _HDFS_ADVICE
        raise RemoteError(f"{path}: {_reason(error)}; {advice}.") from error


def _info(path):
    files, inner = _split(path)
    with _explained(path):
        return files.get_file_info(inner)


def open_file(path: str) -> BinaryIO:
    files, inner = _split(path)
    with _explained(path):
        return io.BufferedReader(files.open_input_file(inner), _READ)


def content(path: str) -> bytes:
    with _explained(path), open_file(path) as f:
        return f.read()


def size(path: str) -> int:
    found = _info(path)
    if found.type != fs.FileType.File:
        raise FileNotFoundError(2, "No such file", path)
    return found.size


def exists(path: str) -> bool:
    return _info(path).type != fs.FileType.NotFound


def is_dir(path: str) -> bool:
    """Whether there is a folder; raises BadInput if there is not even the bucket."""
    kind = _info(path).type
    bucket = "/".join(path.split("/")[:3])
    if path.startswith("s3://") and kind == fs.FileType.NotFound and not exists(bucket):
        raise BadInput(f"{path}: there is no bucket {bucket}; check the name and S3_ENDPOINT.")
    return kind == fs.FileType.Directory


def _listed(folder, recursive=False):
    """FileInfos of all in a folder; of folders in it too, if recursive."""
    files, inner = _split(folder)
    with _explained(folder):
        return files.get_file_info(
            fs.FileSelector(inner, allow_not_found=True, recursive=recursive)
        )


def names(folder: str) -> List[str]:
    return sorted(info.base_name for info in _listed(folder))


def walk(top: str) -> Iterator[Tuple[str, List[str], List[str]]]:
    inner = _split(top)[1]
    folders = {"": ([], [])}
    for info in _listed(top, recursive=True):
        above, _, name = info.path[len(inner) :].rpartition("/")
        is_file = info.type == fs.FileType.File
        folders.setdefault(above, ([], []))[is_file].append(name)
    for below, (inside, found) in sorted(folders.items()):
        yield top.rstrip("/") + below, sorted(inside), sorted(found)


def glob(pattern: str) -> List[str]:
    scheme, _, rest = pattern.partition("://")
    first, *parts = rest.split("/")
    paths = [f"{scheme}://{first}"]
    for i, part in enumerate(parts):
        if not _MAGIC.search(part):
            paths = [posixpath.join(path, part) for path in paths]
            continue
        paths = [
            posixpath.join(path, info.base_name)
            for path in paths
            for info in _listed(path)
            if fnmatch.fnmatchcase(info.base_name, part)
            and (info.type == fs.FileType.Directory or i == len(parts) - 1)
        ]
    plain = not (parts and _MAGIC.search(parts[-1]))
    return [path for path in paths if exists(path)] if plain else paths


def create(path: str) -> BinaryIO:
    """Opens a new file to write bytes; makes its folder."""
    files, inner = _split(path)
    with _explained(path):
        return files.open_output_stream(
            inner, compression=None
        )  # or it would see a .gz in the name


def make_dir(folder: str):
    """Does nothing: a file makes its folder."""


make_inner = make_dir


def remove(path: str):
    files, inner = _split(path)
    with _explained(path):
        files.delete_file(inner)


def move(source: str, target: str):
    files, old = _split(source)
    new = _split(target)[1]
    with _explained(target):
        if isinstance(files, fs.S3FileSystem) and files.get_file_info(old).size > _LARGEST_COPY:
            with open_file(source) as whole, create(target) as copy:
                shutil.copyfileobj(whole, copy, _READ)
            files.delete_file(old)
            return
        if not isinstance(files, fs.S3FileSystem) and exists(target):
            files.delete_file(new)
        files.move(old, new)


def delete(folder: str):
    files, inner = _split(folder)
    with _explained(folder):
        if files.get_file_info(inner).type != fs.FileType.NotFound:
            files.delete_dir(inner)
