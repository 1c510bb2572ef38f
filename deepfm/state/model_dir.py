"""Who owns the files of a model_dir: those that train.py writes, and somebody else's.

Only train.py's own files are ever deleted or written over.
"""

import os
import posixpath
import re

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput, listed
from deepfm.records import atomic_files, dataset_json
from deepfm.records.storage.places import is_remote
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import best, checkpoints, growing, model_json
from deepfm.state.paths import whole

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


def check_predictions_file(job: JobConfig):
    """Refuses (BadInput) to put predictions in place of something else."""
    path, in_folder = job.predictions_path, job.predictions_format == "parquet"
    if not (job.predictions_file or in_folder):
        return
    folder, name = posixpath.split(whole(path))
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
    elif folder == whole(job.model_dir) and is_ours(name) and not name.startswith("predictions."):
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
