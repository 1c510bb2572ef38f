"""Merges the dataset.json that each of several hosts wrote for its part of a data set into one.

    python -m data_tools.merge_metadata --input=data/shuffled

Parts beside the data files (dataset-00001-of-00004.json) are merged and deleted; a dataset.json in
a folder below --input is merged and stays. train.py reads parts without this step. Use it to check
that all files are there, or to have a single dataset.json when you copy the files elsewhere.
"""

import dataclasses
import json
import posixpath
from typing import Dict, Optional

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
import tensorflow as tf
from absl import logging

from data_tools.common import command_line
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.progress import Progress
from deepfm.data import dataset_json
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, remote_files


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, as plain values."""

    input: str = flag(
        "Comma list of folders to search, with those below, for dataset.json and its parts; local "
        "or s3://.",
        REQUIRED,
    )
    output_dir: Optional[str] = flag(
        "Where to write dataset.json: a folder that contains all --input folders. Default: the "
        "first of these."
    )
    overwrite: bool = flag("Replace the dataset.json in --output_dir.", default=False)


def main(options: Options):
    merge(options.input, options.output_dir, options.overwrite)


def merge(folders: str, output_dir: str = None, overwrite: bool = False) -> dict:
    """Merges the parts in folders, checks every file that they name, and returns the result.

    Raises:
        BadInput: a part is broken or missing or contradicts another, or a file that a part names
            is missing or has another size.
    """
    folders = [folder.strip().rstrip("/") for folder in folders.split(",")]
    output_dir = (output_dir or folders[0]).rstrip("/")
    for folder in folders:
        if folder != output_dir and not folder.startswith(f"{output_dir}/"):
            raise BadInput(
                f"--input={folder} is not below --output_dir={output_dir}, where dataset.json is "
                f"written; try --output_dir={posixpath.dirname(folder) or '.'}."
            )
    paths = sorted({path for folder in folders for path in _find(folder)})
    target = posixpath.join(output_dir, dataset_json.METADATA)
    if target in paths and not overwrite:
        raise BadInput(f"{target}: already exists; --overwrite replaces it.")
    parts = {path: dataset_json.read_part(path) for path in paths if path != target}
    if not parts:
        raise BadInput(f"{target}: the only dataset.json in --input; there is nothing to merge.")
    _check_complete(parts)
    _check_files(parts)
    merged = dataset_json.merge(
        {path: _named_from(output_dir, path, part) for path, part in parts.items()}
    )
    with remote_files.written(target) as local:
        atomic_files.write_whole(local, json.dumps(merged, indent=1) + "\n")
    for path in parts:
        if posixpath.dirname(path) == output_dir:
            tf.io.gfile.remove(path)
    logging.info(
        "Wrote %s: %d parts, %d files, %d rows, field_size %d, feature_size %d.",
        target, len(parts), len(merged["files"]), sum(f["rows"] for f in merged["files"].values()),
        merged["field_size"], merged["feature_size"],
    )  # fmt: skip
    return merged


def _find(folder):
    """The paths of the metadata in a folder and the folders below it."""
    found = [
        posixpath.join(place, name)
        for place, _, names in tf.io.gfile.walk(folder)
        for name in names
        if dataset_json.is_metadata(name) and "/." not in place[len(folder) :]
    ]
    if not found:
        raise BadInput(f"--input={folder}: has no dataset.json and no part of one.")
    return found


def _check_complete(paths):
    """Refuses (BadInput) numbered parts of which one is missing."""
    for path in paths:
        folder, name = posixpath.split(path)
        number = dataset_json.PART.fullmatch(name)
        for i in range(int(number.group(2)) if number else 0):
            other = posixpath.join(folder, f"dataset-{i:05d}-of-{number.group(2)}.json")
            if other not in paths:
                raise BadInput(f"{other}: is missing, though {name} is there; copy it here.")


def _check_files(parts):
    """Refuses (BadInput) a part that names a file which is missing or has another size."""
    entries = [(path, *item) for path, part in parts.items() for item in part["files"].items()]
    progress = Progress("Checking", len(entries), "files")
    for path, name, said in entries:
        file = posixpath.join(posixpath.dirname(path), name)
        if dataset_json.leads_outside(name) or not tf.io.gfile.exists(file):
            raise BadInput(f"{file}: is missing, though {path} names it; copy it there.")
        size = tf.io.gfile.stat(file).length
        if size != said["bytes"]:
            raise BadInput(
                f"{file}: has {size} bytes, but {path} says {said['bytes']}; copy it again."
            )
        progress.add(1)
    progress.finish()


def _named_from(output_dir: str, path: str, part: Dict) -> Dict:
    """The part with its files' names made relative to output_dir."""
    prefix = posixpath.dirname(path)[len(output_dir) :].lstrip("/")
    files = {posixpath.join(prefix, name): said for name, said in part["files"].items()}
    return {**part, "files": files}


if __name__ == "__main__":
    command_line.run(main, Options, sharded=False)
