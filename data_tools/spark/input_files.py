"""Which files a flag names, on a machine without TensorFlow: as deepfm.data.datasets.find.

Paths are local, or of a folder that all machines share.
"""

import glob
import os
from typing import List, NamedTuple, Optional

from absl import logging

from deepfm.data import dataset_json
from deepfm.data.dataset_json import UNFINISHED, SamplingRates
from deepfm.data.plain import data_file
from deepfm.data.plain.data_file import DataFile
from deepfm.errors import BadInput

_GZIP = b"\x1f\x8b"
_UNREADABLE = (".snappy", ".bz2", ".lz4", ".zst", ".deflate")  # as deepfm.data.datasets


class DataSet(NamedTuple):
    """The files of a data set in reading order; see deepfm.data.datasets.DataSet."""

    files: List[DataFile]
    data_format: str
    name: str
    field_size: Optional[int] = None
    feature_size: Optional[int] = None
    multi_valued: Optional[bool] = None
    weighted: Optional[bool] = None
    hash_buckets: Optional[int] = None
    feature_map: Optional[str] = None
    sampling_rates: Optional[SamplingRates] = None

    @property
    def rows(self):
        """Records in all files; None if the count of any file is unknown."""
        counts = [file.rows for file in self.files]
        return None if None in counts else sum(counts)


def find(spec: str, flag: str) -> DataSet:
    """Finds the data that a flag names: directories, globs or files, separated by commas.

    Raises:
        BadInput: no file matches, all are empty, or the files do not belong together.
    """
    paths = sorted({path for part in spec.split(",") for path in _search(part.strip(), flag)})
    paths = list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]
    files = [DataFile(path, os.path.getsize(path)) for path in paths]
    for file in files:
        if not file.bytes:
            logging.warning("%s is empty (0 bytes) and adds no records.", file.path)
    files = [file for file in files if file.bytes]
    if not files:
        raise BadInput(f"{paths[0]}: empty (0 bytes), so --{flag}={spec} has no records.")
    found = {_format(file.path) for file in files}
    if len(found) > 1:
        raise BadInput(
            f"--{flag}={spec} mixes TFRecord and LibSVM files ({files[0].path}, {files[-1].path}); "
            "name files of one kind."
        )
    said = {}
    for folder in sorted({os.path.dirname(path) for path in paths}):
        _check_finished(folder, f"--{flag}={spec}")
        said[folder] = dataset_json.read(folder)
    described = [_described(file, said[os.path.dirname(file.path)]) for file in files]
    about = [m for _, m in described if m]
    merged = dataset_json.merge({f: m for f, m in said.items() if m}) if about else {}
    whole = len(about) == len(files)
    return DataSet(
        [file for file, _ in described],
        found.pop(),
        f"--{flag}={spec}",
        merged.get("field_size"),
        merged.get("feature_size"),
        merged.get("multi_valued", False) if about else None,
        merged.get("weighted", False) if about else None,
        merged.get("hash_buckets"),
        merged.get("feature_map") if whole else None,
        _rates(described) if whole else None,
    )


def _check_finished(folder, name):
    """Refuses (BadInput) a folder that a job is writing, or whose writing was cut short."""
    there = lambda mark: os.path.exists(os.path.join(folder, mark))
    if there(UNFINISHED):
        raise BadInput(
            f"{name}: writing the data set in {folder or '.'} was cut short ({UNFINISHED} is "
            "there); write it again with --overwrite."
        )
    if there("_temporary") and not there("_SUCCESS"):
        raise BadInput(
            f"{name}: the job that writes {folder or '.'} is still running or was cut short "
            "(_temporary is there, _SUCCESS is not); wait for it, or run it again."
        )


def _rates(described):
    return dataset_json.merge_rates(
        [(m.get("sampling_rates"), (f.rows - f.positives, f.positives)) for f, m in described]
    )


def _search(part, flag):
    if not part:
        raise BadInput(f"--{flag} has an empty entry; give a directory, a glob or a file.")
    if "://" in part:
        raise BadInput(
            f"--{flag}={part}: Spark's executors read local paths or a folder that all machines "
            "share; mount or copy the files."
        )
    if os.path.isdir(part):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(part) for name in names]
        found = [path for path in found if _holds_data(os.path.relpath(path, part))]
        if not found:
            raise BadInput(f"--{flag}={part}: the directory has no data files.")
        return found
    fixed = len(os.path.dirname(part.partition("*")[0]))
    found = [
        path
        for path in glob.glob(part)
        if (path == part or _holds_data(path[fixed:].lstrip("/"))) and os.path.isfile(path)
    ]
    if not found:
        raise BadInput(f"--{flag}={part}: no file matches.")
    return found


def _holds_data(path):
    """Whether a file found by a search holds data: it is neither hidden nor metadata."""
    names = path.split(os.sep)
    hidden = any(x.startswith(".") or (x.startswith("_") and "=" not in x) for x in names)
    return not hidden and not path.endswith((".json", ".md", ".crc"))


def _format(path):
    with open(path, "rb") as f:
        head = f.read(12)
    if path.endswith(".gz") and not head.startswith(_GZIP):
        raise BadInput(f"{path}: is named .gz but is not gzip-compressed; rename or compress it.")
    if path.endswith(_UNREADABLE):
        codec = os.path.splitext(path)[1]
        raise BadInput(f"{path}: {codec} cannot be read; write it plain or as .gz (codec gzip).")
    if head.startswith(_GZIP) and not path.endswith(".gz"):
        raise BadInput(f"{path}: is gzip-compressed; its name must end in .gz.")
    return "tfrecord" if path.endswith(data_file.TFRECORD) else "libsvm"


def _described(file, metadata):
    """(file with its counts, the metadata) if its folder's dataset.json describes it."""
    entry = metadata and metadata["files"].get(os.path.basename(file.path))
    if not entry:
        return file, None
    if entry["bytes"] != file.bytes:
        logging.warning(
            "%s has %d bytes, but %s says %d; ignoring its entry.",
            file.path, file.bytes, dataset_json.METADATA, entry["bytes"],
        )  # fmt: skip
        return file, None
    return file._replace(rows=entry["rows"], positives=entry["positives"]), metadata
