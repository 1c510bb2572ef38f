"""The export of a model, as a SavedModel or as its weights: a job, and the end of a training.

Each export is a folder whose name is a number, as TensorFlow Serving expects it, and says which
checkpoint it is of. So several models can share an export folder.
"""

import contextlib
import hashlib
import os
import re
import time
from typing import Callable, Iterable, NamedTuple, Optional, Tuple

from absl import logging

from deepfm import estimators, model_config, open_data
from deepfm.config.setting import OF_DATA, STAYS, of_kinds
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model
from deepfm.records import atomic_files
from deepfm.records.raw import names
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import growing
from deepfm.state.serving import npz, saved_model, warm_up

_SCRATCH = ".export-"  # what the folder begins with in which one is made
_VERSION = 1
_NUMBER = re.compile(r"[0-9]{1,18}")


class Stamp(NamedTuple):
    """Which checkpoint an export is of.

    Attributes:
        global_step: its step.
        checkpoint: its `digest`.
        feature_map: fingerprint of the feature map whose ids it takes; None: unknown.
    """

    global_step: int
    checkpoint: str
    feature_map: Optional[str] = None


def export(opened: Opened) -> dict:
    """Writes an export; returns its part of report.export.json."""
    job = opened.job
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; name a folder to export to.")
    _, model = apply_model(opened)
    validation = None if job.export_format == "npz" else open_data.find_validation(job)
    path, step = save(model, job.servable_model_dir, validation, again=True)
    return {"export": path, "global_step": step}


def save(
    model: estimators.Model,
    target: str,
    validation: Optional[datasets.DataSet] = None,
    again: bool = False,
) -> Tuple[str, int]:
    """Writes an export into a new numbered folder of `target`, whole.

    Args:
        validation: whose first records become the requests with which a server warms up.
        again: whether to make an export that already exists there.

    Returns:
        (the path of the numbered folder, the global step).
    """
    others = remote_files.checked_names(target, "servable_model_dir")
    if model.job.export_format == "npz":
        write, depends_on = _weights(model)
    else:
        write, depends_on = _saved_model(model, validation)

    def at(checkpoint):
        step, found = estimators.step_of(checkpoint), digest(checkpoint, *depends_on)
        stamp = Stamp(step, found, model.config.feature_map)
        there = None if again else find(target, others, stamp)
        if there:
            if os.path.isdir(target):
                atomic_files.remove(target, _SCRATCH)
            logging.info("The model of step %d is already exported at %s.", step, there)
            return there, step
        said = {"format_version": _VERSION, **stamp._asdict()}
        with remote_files.written(target) as folder:
            number = add(folder, others, lambda made: write(made, checkpoint, said))
        path = os.path.join(target, number)
        logging.info("Exported the model of step %d to %s.", step, path)
        return path, step

    return estimators.of_checkpoint(model, at)


def digest(checkpoint: str, *more) -> str:
    """Identifies a model by its tensors' checksums and by whatever else an export depends on."""
    with open(f"{checkpoint}.index", "rb") as f:
        return hashlib.sha1(f.read() + repr(more).encode()).hexdigest()


def find(folder: str, names: Iterable[str], stamp: Stamp) -> Optional[str]:
    """The path of the oldest complete export with a stamp, of those with these names."""
    numbers = sorted(filter(_NUMBER.fullmatch, names), key=int)
    paths = (os.path.join(folder, number) for number in numbers)
    return next((x for x in paths if stamp_of(x) == stamp and is_whole(x)), None)


def stamp_of(path: str) -> Optional[Stamp]:
    """The stamp of an export; None if it has none that this version can read."""
    abouts = (os.path.join(path, form.ABOUT) for form in (saved_model, npz))
    said = next(filter(None, map(remote_files.json_object, abouts)), {})
    if said.get("format_version") != _VERSION or "checkpoint" not in said:
        return None
    return Stamp(*map(said.get, Stamp._fields))


def is_whole(path: str) -> bool:
    """Whether an export exists and is complete."""
    there = lambda form: tf.io.gfile.exists(os.path.join(path, form.FILE))
    if remote_files.is_remote(path):  # where these files are copied last
        return there(npz) or there(saved_model)
    return (npz if there(npz) else saved_model).is_whole(path)


def add(folder: str, others: Iterable[str], write: Callable[[str], None]) -> str:
    """Writes an export into a new numbered subfolder, whole or not at all.

    Args:
        folder: a local folder, made if it is missing.
        others: names of further exports, which the new number has to exceed.
        write: makes the export in a new folder, whose path it is given.

    Returns:
        The number: the time in seconds, or one more than the highest there if the clock has been
        set back, because servers load the highest.
    """
    os.makedirs(folder, exist_ok=True)
    with atomic_files.scratch(folder, _SCRATCH) as scratch:
        made, now = os.path.join(scratch, "export"), int(time.time())
        write(made)
        there = [int(name) for name in (*os.listdir(folder), *others) if _NUMBER.fullmatch(name)]
        number = str(max(now, max(there, default=0) + 1))
        atomic_files.sync_all(made)
        os.rename(made, os.path.join(folder, number))
        atomic_files.sync(folder)
    return number


def _saved_model(model, validation):
    """(a function that writes a checkpoint as a SavedModel, what else that depends on)."""
    config = model.config
    feature_map, _ = _feature_map(model.job, config, "takes no raw rows")
    depends_on = [config.pooling, config.multi_valued, config.hash_buckets, config.logit_offset]
    items = tuple(map(int, model.job.item_fields))
    depends_on += ["raw", *items] * bool(feature_map)
    wanted = estimators.schema(config)._replace(hash_buckets=config.hash_buckets or 0)

    def write(path, checkpoint, said):
        rows = _first_rows(model, validation)
        with estimators.trained(model, to_serve=True) as estimator:
            saved_model.write(path, estimator, checkpoint, wanted, said, feature_map, items, rows)

    return write, depends_on


def _weights(model):
    """The same, as arrays."""
    _, map_path = _feature_map(model.job, model.config, "comes without a feature map")
    about = {**of_kinds([model.config], STAYS, OF_DATA), "activation": "relu"}
    about["batch_norm_epsilon"] = model.config.batch_norm_epsilon

    def write(path, checkpoint, said):
        shapes = estimators.check_fits(model, checkpoint)
        npz.write(path, checkpoint, shapes, {**said, **about}, map_path)

    return write, ["npz", about, bool(map_path)]


def _feature_map(job, config, lack):
    """(the FeatureMap of a model, its path), if model_dir has it or the folders of the records that
    it has seen; else (None, None), and the log says what the export lacks."""
    wanted = config.feature_map
    if not wanted:
        return None, None
    found, path = growing.kept_map(job.model_dir, wanted), growing.path_of(job.model_dir, wanted)
    if not found:
        paths = open_data.paths_seen(job)
        found = names.map_of(paths, wanted)
        path = found and names.find_map(names.folders_of(paths), wanted)
    if not found:
        logging.info(
            "The export %s: the %s that made this model's ids (fingerprint %s) is "
            "neither in model_dir nor in the folder of its training data or up to %d above it.",
            lack, names.FILE, wanted, names.ABOVE,
        )  # fmt: skip
    return found, path


def _first_rows(model, data):
    """The features of the first records of a data set; None if there are none, if they come from a
    channel, which is read once, or if their ids are of another feature map."""
    if not data or data.pipe:
        return None
    if model_config.moves(model.config._asdict(), data.feature_map):
        logging.info("%s has the ids of another feature map: no warm-up requests.", data.name)
        return None
    with contextlib.closing(estimators.batches(model, data)) as batches:
        features, _ = next(batches, ({}, None))
    features.pop("example_weights", None)
    return {name: x[: warm_up.ROWS] for name, x in features.items()} or None
