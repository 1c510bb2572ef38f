"""Which files make a data set, and dataset.json, which says what is in them.

dataset.json lies beside the records:

    {"format_version": 1, "field_size": 39, "feature_size": 117581,
     "files": {"part-00000-of-00002.tfrecords": {"rows": 500, "bytes": 156500, "positives": 128},
               ...}}

and `"multi_valued": true` where a field of a record may hold several values, or none,
`"hash_buckets": N` where ids are hashes of strings (`records.hashed`), and `"feature_map":
"1f6c..."`, its fingerprint, where they are those of a feature_map.json.

It is trusted only where a file's name and size match. Where records were sampled by label,
"sampling_rates": {"negative": 0.1, "positive": 1.0} says how many of each label were kept. Several
hosts that write a data set together write a part each, dataset-00001-of-00004.json and so on:
readers take all that lie beside the files for one. The dataset.json of a folder may also describe
files in folders below it, by the names that lead there.
"""

import contextlib
import functools
import json
import math
import os
import posixpath
import re
from typing import Callable, Dict, List, NamedTuple, Optional

import tensorflow as tf
from absl import logging

from deepfm.data import bad_records, identity, named_files
from deepfm.data.identity import Identity
from deepfm.data.named_files import PART, Found
from deepfm.data.pipe_mode import Pipe
from deepfm.data.sampling_rates import SamplingRates, check_rates, merge_rates, rows_by_label
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, remote_files

METADATA = "dataset.json"
UNFINISHED = (
    ".unfinished"  # in a folder some of whose files are a new data set's, others an old one's
)
FORMAT_VERSION = 1
SUFFIXES = {
    "tfrecord": (".tfrecords", ".tfrecord", ".tfrecords.gz", ".tfrecord.gz"),
    "libsvm": tuple(
        name + end for name in (".libsvm", ".svm", ".txt", ".libffm", ".ffm") for end in ("", ".gz")
    ),
}
_GZIP = b"\x1f\x8b"
_FINGERPRINT = re.compile("[0-9a-f]{8,64}")


class DataFile(NamedTuple):
    """A file of a data set; rows and positives are None where no dataset.json tells them, identity
    where nobody has looked yet."""

    path: str
    bytes: int
    rows: Optional[int] = None
    positives: Optional[int] = None
    identity: Optional[Identity] = None


class DataSet(NamedTuple):
    """The files of a data set in reading order, and what is known of them.

    Attributes:
        files: DataFiles that hold at least one byte, sorted by path.
        data_format: "tfrecord" or "libsvm".
        field_size: F, or None where neither dataset.json nor the first record tells.
        feature_size: rows of the embedding table, or None where no dataset.json tells.
        multi_valued: whether fields may hold several values, or none; None where no dataset.json
            tells.
        hash_buckets: of the strings that ids are hashes of; 0: ids are no hashes; None where no
            dataset.json tells.
        name: what messages call it.
        pipe: the channel that is read in place of files, or None.
        own_channel: whether no other process of this host sees these records.
        sharded: whether no other host sees them.
        sampling_rates: SamplingRates, or None where no dataset.json tells them.
        feature_map: fingerprint of the feature map that made the ids; None where no dataset.json
            tells one.
    """

    files: List[DataFile]
    data_format: str
    field_size: Optional[int]
    feature_size: Optional[int]
    multi_valued: Optional[bool] = None
    hash_buckets: Optional[int] = None
    name: str = ""
    pipe: Optional[Pipe] = None
    own_channel: bool = False
    sharded: bool = False
    sampling_rates: Optional[SamplingRates] = None
    feature_map: Optional[str] = None

    @property
    def rows(self):
        """Records in all files, or None where one file's count, or a channel's, is not known."""
        if self.pipe:
            return None
        counts = [f.rows for f in self.files]
        return None if None in counts else sum(counts)


def find(spec: str, flag: str, data_format: str = "auto", partial: bool = False) -> DataSet:
    """Finds the data that a flag names and refuses what cannot be data.

    Args:
        spec: a directory (searched through), a glob, or a comma list of these; local or s3://.
        flag: the flag's name, for messages.
        data_format: auto, tfrecord or libsvm.
        partial: whether a host may have only its part of the files that dataset.json names.

    Raises:
        BadInput: no file matches, all are empty, one that dataset.json names is gone, formats are
            mixed, a compressed file is not, or a local one may not be read.
    """
    try:
        return _find(spec, flag, data_format, partial)
    except (tf.errors.PermissionDeniedError, tf.errors.NotFoundError) as error:
        if remote_files.is_remote(spec):  # where that may be trouble of the server
            raise
        raise BadInput(f"--{flag}={spec}: {error.message}.") from error


def _find(spec, flag, data_format, partial):
    entries = [_search(entry.strip(), flag) for entry in spec.split(",")]
    paths = sorted({path for entry in entries for path in entry.paths})
    folders = {posixpath.dirname(path) for path in paths}
    folders = sorted(folders.union(*(entry.folders for entry in entries)))
    for folder in folders:
        if tf.io.gfile.exists(posixpath.join(folder, UNFINISHED)):
            raise BadInput(
                f"--{flag}={spec}: {folder or '.'} holds a part of a data set, whose writing was "
                f"cut short ({UNFINISHED} says so); write it again with --overwrite."
            )
    names = functools.lru_cache(maxsize=None)(_names)
    named_files.warn_of_missing_hosts(paths, f"--{flag}={spec}", names)
    files, empty, seen = [], [], set()
    for path in paths:
        same = path if remote_files.is_remote(path) else os.path.realpath(path)
        if same in seen:
            logging.warning("%s: is named twice (--%s=%s) and read once.", path, flag, spec)
            continue
        seen.add(same)
        size = tf.io.gfile.stat(path).length
        (files if size else empty).append(DataFile(path, size))
    if not files:
        raise BadInput(f"{empty[0].path}: is empty (0 bytes), --{flag}={spec} holds no records.")
    for file in empty:
        logging.warning("%s is empty (0 bytes) and adds no records.", file.path)
    formats = {_format(file.path) if data_format == "auto" else data_format for file in files}
    if len(formats) > 1:
        raise BadInput(
            f"--{flag}={spec} mixes TFRecord and LibSVM files ({files[0].path}, {files[-1].path}); "
            + (
                f"name one kind, with a glob such as '{spec.rstrip('/')}/*.tfrecords'."
                if "," not in spec
                else "name files of one kind."
            )
        )
    said = {folder: read_metadata(folder, names) for folder in folders}
    said = {folder: metadata for folder, metadata in said.items() if metadata}
    there = set(paths) - {file.path for file in empty}
    named_files.check(f"--{flag}={spec}", entries, there, said, _holds_data, partial)
    tops = [entry.spec.rstrip("/") for entry in entries]
    described = [_described(file, tops, said) for file in files]
    metadata = [m for _, m in described if m]
    return DataSet(
        [file for file, _ in described],
        formats.pop(),
        _agreed(metadata, "field_size", flag),
        max((m["feature_size"] for m in metadata), default=None),
        any(m.get("multi_valued") for m in metadata)
        or (None if len(metadata) < len(files) else False),
        _agreed([{"hash_buckets": 0, **m} for m in metadata], "hash_buckets", flag),
        f"--{flag}={spec}",
        sampling_rates=_sampling_rates(described),
        feature_map=_feature_map(described, flag),
    )


def _feature_map(described, flag):
    """The fingerprint that files have, from [(file, its metadata or None)]; None unless all do."""
    found = _agreed([m for _, m in described if m], "feature_map", flag)
    without = [file.path for file, m in described if not (m and m.get("feature_map"))]
    if found and without:
        logging.warning(
            "--%s: its ids are those of feature map %s; whether those of %s are, too, no %s tells.",
            flag, found, without[0], METADATA,
        )  # fmt: skip
    return None if without else found


def identified(data: DataSet, known: Optional[Dict[str, Identity]] = None) -> DataSet:
    """The data set with the identity of every file; `known` as in identity.identify."""
    found = identity.identify([file.path for file in data.files], known)
    return data._replace(files=[f._replace(identity=x) for f, x in zip(data.files, found)])


def _names(folder):
    """What lies in a folder; nothing where there is none."""
    try:
        return sorted(tf.io.gfile.listdir(folder or "."))
    except tf.errors.NotFoundError:
        return []


def _search(part, flag) -> Found:
    """What an entry of a flag finds; BadInput where that is nothing."""
    if not part:
        raise BadInput(f"--{flag} has an empty entry; give a directory, a glob or a file.")
    if tf.io.gfile.isdir(part):
        return _search_folder(part, flag)
    # TensorFlow begins what it finds in the current folder so.
    pattern = part if posixpath.dirname(part) else posixpath.join(".", part)
    fixed = len(posixpath.dirname(re.split(r"[*?\[]", pattern)[0]))
    try:
        found = [
            path
            for path in tf.io.gfile.glob(pattern)
            if (path == pattern or _holds_data(path[fixed:])) and not tf.io.gfile.isdir(path)
        ]
    except tf.errors.NotFoundError:  # the folder of a glob is not there
        found = []
    folder = posixpath.dirname(part)
    if not found and os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise BadInput(f"--{flag}={part}: {folder} may not be read (permission denied).")
    if not found:
        raise BadInput(f"--{flag}={part}: no file matches.")
    return Found(pattern, False, found, [])


def _search_folder(top, flag):
    paths, folders = [], []
    for folder, _, names in tf.io.gfile.walk(top):
        below = folder[len(top) :]
        paths += [posixpath.join(folder, x) for x in names if _holds_data(posixpath.join(below, x))]
        if "/." not in below and any(is_metadata(x) or x == UNFINISHED for x in names):
            folders.append(posixpath.dirname(posixpath.join(folder, METADATA)))
    if not paths:
        raise BadInput(f"--{flag}={top}: the directory holds no data files.")
    return Found(top, True, paths, folders)


def _holds_data(path):
    """Whether a file that was not asked for by its name holds data: not hidden, and no metadata."""
    name = posixpath.basename(path)
    hidden = path.startswith(".") or "/." in path or name.startswith("_")
    return not hidden and not name.endswith((".json", ".md", ".crc"))


def _format(path):
    """The format that a file's name tells, or else its first bytes; checks compression."""
    with tf.io.gfile.GFile(path, "rb") as f:
        head = f.read(12)
    if path.endswith(".gz") and not head.startswith(_GZIP):
        raise BadInput(f"{path}: is named .gz but is not gzip-compressed; rename or compress it.")
    if head.startswith(_GZIP) and not path.endswith(".gz"):
        raise BadInput(f"{path}: is gzip-compressed; its name must end in .gz.")
    for data_format, suffixes in SUFFIXES.items():
        if path.endswith(suffixes):
            return data_format
    return "tfrecord" if bad_records.looks_like_tfrecord(head) else "libsvm"


def _described(file, tops, said):
    """(file with its counts, metadata) from the dataset.json that describes it, of {folder: its}.

    That lies beside the file, or in the folder of `tops` that was searched through.
    """
    folder = posixpath.dirname(file.path)
    above = (top for top in tops if folder.startswith(f"{top}/"))
    for top in (folder, *above):
        metadata = said.get(top)
        entry = metadata and metadata["files"].get(file.path[len(top) :].lstrip("/"))
        if not entry:
            continue
        if entry["bytes"] != file.bytes:
            logging.warning(
                "%s has %d bytes, %s says %d: not trusted.",
                file.path, file.bytes, METADATA, entry["bytes"],
            )  # fmt: skip
            return file, None
        return file._replace(rows=entry["rows"], positives=entry["positives"]), metadata
    return file, None


def _sampling_rates(described):
    """The SamplingRates of files, from [(file, its metadata or None)]; None where none are told."""
    rates = [m and m.get("sampling_rates") for _, m in described]
    if not any(rates):
        return None
    unknown = [file.path for file, m in described if not m]
    if unknown:
        logging.warning(
            "The sampling rates are not known: no %s describes %s.", METADATA, unknown[0]
        )
        return None
    rows = ((f.rows - f.positives, f.positives) for f, _ in described)
    return merge_rates(zip((r and SamplingRates(**r) for r in rates), rows))


def _agreed(metadata, key, flag):
    values = sorted({m[key] for m in metadata if m.get(key) is not None})
    if len(values) > 1:
        raise BadInput(f"--{flag}: the data sets have different {key}: {values}.")
    return values[0] if values else None


def is_metadata(name: str) -> bool:
    """Whether a file is a dataset.json, or a part of one, by its name."""
    return name == METADATA or bool(PART.fullmatch(name))


def read_metadata(folder: str, names: Callable = _names) -> Optional[dict]:
    """The dataset.json of a folder, made of its parts where it lies there in parts; None without.

    Args:
        folder: local or s3://.
        names: folder -> what lies in it.

    Raises:
        BadInput: one is broken, or two contradict one another.
    """
    found = [posixpath.join(folder, name) for name in filter(is_metadata, names(folder))]
    parts = {path: read_part(path) for path in found}
    return merge_metadata(parts) if parts else None


def merge_metadata(parts: Dict[str, dict]) -> dict:
    """One dataset.json made of several, by their paths, which messages name.

    field_size and hash_buckets have to be the same, and feature_map where it is told; feature_size
    becomes the largest; see also merge_rates.
    """
    (first, merged), *others = parts.items()
    files, owners = dict(merged["files"]), dict.fromkeys(merged["files"], first)
    of_map = {part["feature_map"]: path for path, part in parts.items() if "feature_map" in part}
    if len(of_map) > 1:
        (one, path), (other, another), *_ = of_map.items()
        raise BadInput(
            f"{another}: has the ids of feature map {other}, but {path} those of {one}: these are "
            "not parts of one data set."
        )
    for path, part in others:
        for key in ("field_size", "hash_buckets"):
            if part.get(key) != merged.get(key):
                raise BadInput(
                    f"{path}: {key} {part.get(key)}, but {first} has {merged.get(key)}: these are "
                    "not parts of one data set."
                )
        for name, entry in part["files"].items():
            if files.setdefault(name, entry) != entry:
                raise BadInput(f"{path}: says of {name} other than {owners[name]}; delete one.")
            owners.setdefault(name, path)
    content = {
        "format_version": FORMAT_VERSION,
        "field_size": merged["field_size"],
        "feature_size": max(part["feature_size"] for part in parts.values()),
        "files": files,
    }
    if any(part.get("multi_valued") for part in parts.values()):
        content["multi_valued"] = True
    if "hash_buckets" in merged:
        content["hash_buckets"] = merged["hash_buckets"]
    if of_map:
        content["feature_map"] = next(iter(of_map))
    rates = [part.get("sampling_rates") for part in parts.values()]
    if any(rates):
        rows = [rows_by_label(part["files"].values()) for part in parts.values()]
        merged_rates = merge_rates(zip((r and SamplingRates(**r) for r in rates), rows))
        content["sampling_rates"] = merged_rates._asdict()
    return content


def read_part(path: str) -> dict:
    """A dataset.json, or a part of one; BadInput where it is broken."""
    with tf.io.gfile.GFile(path, "rb") as f:
        text = f.read()
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
        version = found["format_version"]
        if version != FORMAT_VERSION:
            raise BadInput(
                f"{path}: format_version {str(version)[:40]}, this program reads {FORMAT_VERSION}."
            )
        for key in ("field_size", "feature_size"):
            _check_number(found, key, least=1)
        if "hash_buckets" in found:
            _check_number(found, "hash_buckets", least=2)
        if not isinstance(found.get("multi_valued", False), bool):
            raise ValueError(f"multi_valued is {str(found['multi_valued'])[:40]}")
        if not _FINGERPRINT.fullmatch(found.get("feature_map", "0" * 8)):
            raise ValueError(f"feature_map is {found['feature_map'][:40]}")
        for entry in found["files"].values():
            for key in ("rows", "bytes", "positives"):
                _check_number(entry, key, least=0)
            if entry["positives"] > entry["rows"]:
                raise ValueError(f"{entry['positives']} positives of {entry['rows']} rows")
        if "sampling_rates" in found:
            check_rates(found["sampling_rates"], found["files"].values())
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{path}: is not a dataset.json ({reason}); delete or remake it.") from error
    return found


def _unique(pairs):
    """A JSON object as a dict; of a key that is there twice nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _check_number(entry, key, least):
    number = entry[key]
    if type(number) is not int or not least <= number < 1 << 63:  # a bool is an int to isinstance
        raise ValueError(f"{key} is {str(number)[:40]}")


def write_metadata(
    folder: str,
    field_size: int,
    feature_size: int,
    files: List[DataFile],
    sampling_rates: Optional[SamplingRates] = None,
    name: str = METADATA,
    multi_valued: bool = False,
    hash_buckets: int = 0,
    feature_map: Optional[str] = None,
):
    """Writes dataset.json into a folder, whole or not at all; `files` are of that folder."""
    content = {
        "format_version": FORMAT_VERSION,
        "field_size": field_size,
        "feature_size": feature_size,
        **({"multi_valued": True} if multi_valued else {}),
        **({"hash_buckets": hash_buckets} if hash_buckets else {}),
        **({"feature_map": feature_map} if feature_map else {}),
        "files": {
            os.path.basename(f.path): {"rows": f.rows, "bytes": f.bytes, "positives": f.positives}
            for f in files
        },
    }
    if sampling_rates:
        content["sampling_rates"] = sampling_rates._asdict()
    write_whole(posixpath.join(folder, name), json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def open_whole(path: str):
    """Opens a local text file for writing that has its name only when it is complete.

    Raises:
        OSError: it cannot be written; it is named also where the system's error names no file.
    """
    target = os.path.realpath(path)  # of a link what it leads to
    folder, name = os.path.split(target)
    prefix = f".{name}.tmp-"
    atomic_files.remove(folder, prefix)
    temporary = os.path.join(folder, f"{prefix}{os.getpid()}")
    try:
        with atomic_files.naming(path):
            with open(temporary, "w", encoding="utf-8") as f:
                atomic_files.lock(f.fileno())
                yield f
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def write_whole(path: str, text: str):
    """Writes a text file, whole or not at all."""
    with open_whole(path) as f:
        f.write(text)


def write_json(path: str, content):
    """Writes JSON, whole or not at all; null in place of numbers that it has no words for."""
    write_whole(path, json.dumps(_finite(content), indent=1) + "\n")


def _finite(content):
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def join(path: str, parts: List[str]):
    """Puts text files together in order, whole or not at all, and removes them."""
    with remote_files.written(path) as local, open_whole(local) as whole:
        for part in parts:
            with tf.io.gfile.GFile(part) as f:
                for text in iter(lambda f=f: f.read(1 << 20), ""):
                    whole.write(text)
    for part in parts:
        tf.io.gfile.remove(part)
