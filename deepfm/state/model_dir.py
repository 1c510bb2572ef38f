"""Who owns the files of a model_dir: those that train.py writes, and somebody else's.

Only train.py's own files are ever deleted, and no model is written where the job's data is.
"""

import os
import posixpath
import re

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput, listed
from deepfm.records import atomic_files, dataset_json
from deepfm.records.storage.places import is_remote
from deepfm.runtime import program, remote_files
from deepfm.runtime.tf import tf
from deepfm.state import best, checkpoints, growing, model_json

_HEX = r"[0-9a-f]{32}"
_EVENTS = re.compile(r"events\.out\.tfevents\..*")
# Names of what train.py, and TensorFlow for it, write into a model_dir.
_WHOLE = (
    r"(model|run|evaluations|model_id|timeline|report(\.(eval|importance|infer|export))?)\.json"
    r"|predictions\.(txt|csv)|checkpoint"
)
_OURS = re.compile(
    rf"{_WHOLE}|graph\.pbtxt|events\.out\.tfevents\..*"
    # What a kill left half-written.
    rf"|\.({_WHOLE})\.tmp-\d+|\.predictions\.\w+\.part-\d+|graph\.pbtxt\.tmp{_HEX}"
    rf"|\.reading-{atomic_files.ENDS}|\.(probe|shared)-{_HEX}"
)
_FOLDER = re.compile(
    rf"model\.ckpt-\d+_(temp_{_HEX}|whole)|\.reading-{atomic_files.ENDS}"
    r"|\.predictions\.parquet\.part-0\.(new|old)"
)
_EVALUATIONS = re.compile(r"eval(_\w+)?")  # folders of summaries
_PREDICTIONS = re.compile(rb"(key|file,row),probability\n(?s:.*)|((nan|\d(\.\d*)?(e-\d+)?)\n)*")
_PARTS = re.compile(r"part-\d{5}\.parquet")  # of predictions in a folder
_PATTERN = re.compile(r"[][*?\\]+")  # what TensorFlow takes for a pattern, not for a name
_HEAD = 1 << 12  # bytes


def clear(model_dir: str):
    """Deletes what train.py has written into a folder, local or remote; logs what it leaves there.

    Refuses (BadInput) a folder whose files are no model's.
    """
    names = remote_files.checked_names(model_dir, "model_dir")
    if not names:
        return
    if not any(_is_of_a_model(model_dir, name) for name in names):
        raise BadInput(
            f"--clear_existing_model: --model_dir={model_dir} has files, but no model; delete "
            "it yourself, or give another folder."
        )
    left = [name for name in sorted(names) if not _deleted(model_dir, name)]
    if left:
        logging.warning(
            "--clear_existing_model: keeping files in %s that train.py did not write: %s.",
            model_dir, listed(left),
        )  # fmt: skip


def _is_of_a_model(folder, name):
    """Whether a file shows that its folder holds a model."""
    if name != "model.json":
        return bool(_EVENTS.fullmatch(name) or checkpoints.by_name([name]))
    try:
        return bool(model_json.load(posixpath.join(folder, name)))
    except (BadInput, tf.errors.OpError):
        return False


def _deleted(folder, name):
    """Deletes a file or folder with one of our names; returns whether nothing of it is left."""
    path = posixpath.join(folder, name)
    if is_ours(name) and not _is_folder(path):
        tf.io.gfile.remove(path)
        return True
    if _FOLDER.fullmatch(name):
        tf.io.gfile.rmtree(path)
        return True
    if name == best.FOLDER and _is_folder(path):
        return best.clear(path)
    maps = re.compile(growing.FOLDER), growing.MAPS
    kinds = (_EVALUATIONS, _EVENTS), (re.compile(r"predictions\.parquet"), _PARTS), maps
    ours = next((files for folder, files in kinds if folder.fullmatch(name)), None)
    return bool(ours) and _is_folder(path) and remote_files.clear(path, ours.fullmatch)


def is_ours(name: str) -> bool:
    """Whether train.py, or TensorFlow for it, gives this name to what it writes there."""
    return checkpoints.is_part(name) or bool(_OURS.fullmatch(name))


def check_paths(job: JobConfig):
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
    if chief:
        warn_inside(job)
    if "cache" in named:
        _check_writable(os.path.dirname(os.path.abspath(named["cache"])), "cache")
    if "predictions_file" in named or (task == "infer" and job.predictions_format == "parquet"):
        check_predictions_file(job)
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
    if task == "train":
        _check_writable(folder, "model_dir")


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


def check_predictions_file(job: JobConfig):
    """Refuses (BadInput) to put predictions in place of something else."""
    path, in_folder = job.predictions_path, job.predictions_format == "parquet"
    folder, name = posixpath.split(_whole(path))
    said = None
    if os.path.isdir(path) and not in_folder:
        said = "is a folder; give the name of a file"
    elif in_folder and is_remote(path):
        said = "is remote; give a local folder, or --predictions_format=csv"
    elif os.path.isfile(path) and in_folder:
        said = "is a file; give the name of a folder"
    elif os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        said = "is not a regular file; give the name of one"
    elif name == dataset_json.METADATA:
        said = "is a file that describes data; give another name"
    elif os.path.exists(path) and not _holds_predictions(path):
        said = "holds something other than predictions; give another name, or delete it"
    elif folder == _whole(job.model_dir) and is_ours(name) and not name.startswith("predictions."):
        said = "is a file of the model; give another name"
    if said:
        raise BadInput(f"--predictions_file={path} {said}.")


def _holds_predictions(path):
    """Whether a file begins as predictions do, or is empty; of a folder, whether all files are."""
    if os.path.isdir(path):
        return all(map(_PARTS.fullmatch, os.listdir(path)))
    with open(path, "rb") as f:
        head = f.read(_HEAD)
    lines = head[: head.rfind(b"\n") + 1]
    return not head or bool(lines and _PREDICTIONS.fullmatch(lines))


def _is_folder(path):
    return not os.path.islink(path) and tf.io.gfile.isdir(path)


def _places_of_data(job):
    """Yields (flag, each place that it lists)."""
    for flag in ("training_data_dir", "val_data_dir", "infer_data_dir"):
        for place in filter(None, (getattr(job.input, flag) or "").split(",")):
            yield flag, place.strip()


def _outputs(job):
    """{flag: the path that it names} of the flags that this job uses, but for those of its data."""
    flags = "model_dir", "servable_model_dir", "predictions_file", "checkpoint"
    used = lambda flag: job.task_type in (JobConfig.settings[flag].tasks or [job.task_type])
    named = {flag: getattr(job, flag) for flag in filter(used, flags)}
    if job.task_type == "train" and job.input.cache not in ("none", "memory"):
        named["cache"] = job.input.cache
    return {flag: path for flag, path in named.items() if path}


def check_apart(job: JobConfig):
    """Refuses (BadInput) a model_dir that is a folder of the job's data, or one above it, and
    exports in a folder of data."""
    model = posixpath.join(_whole(job.model_dir), "")
    exports = _outputs(job).get("servable_model_dir")
    for flag, place in _places_of_data(job):
        # For a glob, the folder that all its matches have in common.
        fixed = place if os.path.isdir(place) else re.split(r"[*?\[]", place)[0]
        fixed = posixpath.join(_whole(fixed), "")
        if fixed.startswith(model):
            raise BadInput(
                f"--model_dir={job.model_dir} is the folder of --{flag}={place}, or one above "
                "it; give a folder of its own, such as ./model."
            )
        if exports and fixed == posixpath.join(_whole(exports), ""):
            raise BadInput(
                f"--servable_model_dir={exports} is the folder of --{flag}={place}; give a folder "
                "of its own, such as ./servable."
            )


def warn_inside(job: JobConfig):
    """Warns of output inside a folder of data, where the next job would read it as data."""
    for flag, place in _places_of_data(job):
        folder = posixpath.join(_whole(place), "")
        for name, path in _outputs(job).items():
            inside = posixpath.join(_whole(path), "").startswith(folder)
            if name != "checkpoint" and inside and os.path.isdir(folder):
                logging.warning(
                    "--%s=%s is inside --%s=%s, so the next job will read it as data; give a "
                    "path outside.",
                    name, path, flag, place,
                )  # fmt: skip


def _whole(path):
    """A path without links and without a slash at its end."""
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)
