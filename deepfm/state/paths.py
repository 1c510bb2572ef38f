"""The paths that a job writes to: what cannot be written or found again is refused at the start.

No model is written where the job's data is.
"""

import os
import posixpath
import re

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput
from deepfm.records.storage.places import is_remote
from deepfm.runtime import program, remote_files

_EXPORTS = "servable_model_dir"
_PATTERN = re.compile(r"[][*?\\]+")  # what TensorFlow takes for a pattern, not for a name


def check(job: JobConfig):
    """Refuses paths that a job cannot read or write (the chief writes most), or that harm data.

    Raises:
        BadInput, RemoteError: the text names the path.
    """
    task, folder, named = job.task_type, job.model_dir, _outputs(job)
    chief = job.distribution.chief
    _check_names(named)
    if is_remote(folder):
        remote_files.check_is_folder(folder, "model_dir")
    check_apart(job)
    if "cache" in named:
        _check_writable(os.path.dirname(os.path.abspath(named["cache"])), "cache")
    if chief and "servable_model_dir" in named:
        _check_writable(job.servable_model_dir, "servable_model_dir")
    if chief and "predictions_file" in named:
        parent = posixpath.dirname(job.predictions_file) or "."
        _check_writable(parent, "predictions_file")
    if not chief or is_remote(folder):
        return
    closed = os.path.isdir(folder) and not os.access(folder, os.W_OK)
    if task == "infer" and closed and not job.predictions_file:
        raise BadInput(f"--model_dir={folder} cannot be written; give --predictions_file=PATH.")


def _check_writable(folder, flag):
    """Refuses a folder that cannot be written: raises RemoteError, or BadInput if it is local."""
    check = remote_files.check_writable if is_remote(folder) else program.make_output_dir
    check(folder, flag)


def _check_names(named):
    """Refuses (BadInput) names with which checkpoints and exports could be written but not read.

    Raises UnicodeEncodeError, which program.run explains, for one that is not UTF-8.
    """
    for flag, path in named.items():
        path.encode()
        if is_remote(path):
            remote_files.check_client(path)
        # Checkpoints of a remote model_dir are read where they have been fetched to.
        fetched = flag == "model_dir" and is_remote(path)
        if flag not in ("cache", "predictions_file") and not fetched:
            check_is_no_pattern(path, f"--{flag}")


def check_is_no_pattern(path: str, name: str):
    """Refuses (BadInput) the path of a folder or checkpoint that TensorFlow takes for a pattern."""
    better = _PATTERN.sub("_", path).rstrip("_")
    if _PATTERN.search(path):
        raise BadInput(
            f"{name}={path}: TensorFlow takes [ ] * ? and \\ for a pattern and would not find what "
            f"is saved there; rename it, or give another path, such as {better}."
        )


def _outputs(job):
    """{flag: the path that it names} of the flags that this job uses, but for those of its data."""
    flags = "model_dir", _EXPORTS, "predictions_file", "checkpoint"
    used = lambda flag: job.task_type in (JobConfig.settings[flag].tasks or [job.task_type])
    named = {flag: getattr(job, flag) for flag in filter(used, flags)}
    if job.task_type == "train" and job.input.cache not in ("none", "memory"):
        named["cache"] = job.input.cache
    return {flag: path for flag, path in named.items() if path}


def check_apart(job: JobConfig):
    """Refuses (BadInput) a model_dir that is a folder of the job's data, or one above it, and
    exports in a folder of data. Of other output inside one, which the next job would read as data,
    the chief warns."""
    with_slash = lambda path: posixpath.join(whole(path), "")
    for flag in ("training_data_dir", "val_data_dir", "infer_data_dir"):
        for place in map(str.strip, filter(None, (getattr(job.input, flag) or "").split(","))):
            # For a glob, the folder that all its matches have in common.
            is_folder = os.path.isdir(place)
            data = with_slash(place if is_folder else re.split(r"[*?\[]", place)[0])
            for name, path in _outputs(job).items():
                output, is_model = with_slash(path), name == "model_dir"
                if (is_model and data.startswith(output)) or (name == _EXPORTS and data == output):
                    above = ", or one above it" * is_model
                    raise BadInput(
                        f"--{name}={path} is the folder of --{flag}={place}{above}; give a folder "
                        "of its own."
                    )
                inside = is_folder and name != "checkpoint" and output.startswith(data)
                if inside and job.distribution.chief:
                    logging.warning(
                        "--%s=%s is inside --%s=%s, so the next job will read it as data; give a "
                        "path outside.",
                        name, path, flag, place,
                    )  # fmt: skip


def whole(path):
    """A path without links and without a slash at its end."""
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)
