"""The export of a model, as a SavedModel or as its weights: a job, and the end of a training."""

import contextlib
import os
from typing import Optional, Tuple

from absl import logging

from deepfm import estimators, model_config, open_data
from deepfm.config.setting import OF_DATA, STAYS, of_kinds
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model
from deepfm.records.raw import names
from deepfm.runtime import remote_files
from deepfm.state import export as exports
from deepfm.state import growing
from deepfm.state.serving import npz, warm_up


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
        step, found = estimators.step_of(checkpoint), exports.digest(checkpoint, *depends_on)
        stamp = exports.Stamp(step, found, model.config.feature_map)
        there = None if again else exports.find(target, others, stamp)
        if there:
            exports.tidy(target)
            logging.info("The model of step %d is already exported at %s.", step, there)
            return there, step
        with remote_files.written(target) as folder:
            make = lambda made: write(made, checkpoint, stamp)
            number = exports.save(folder, others, make)
        path = os.path.join(target, number)
        logging.info("Exported the model of step %d to %s.", step, path)
        return path, step

    return estimators.of_checkpoint(model, at)


def _saved_model(model, validation):
    """(a function that writes a checkpoint as a SavedModel, what else that depends on)."""
    config = model.config
    feature_map, _ = _feature_map(model.job, config, "takes no raw rows")
    depends_on = [config.pooling, config.multi_valued, config.hash_buckets, config.logit_offset]
    items = tuple(map(int, model.job.item_fields))
    depends_on += ["raw", *items] * bool(feature_map)
    wanted = estimators.schema(config)._replace(hash_buckets=config.hash_buckets or 0)

    def write(path, checkpoint, stamp):
        more = feature_map, items, _first_rows(model, validation)
        with estimators.trained(model, to_serve=True) as estimator:
            exports.write_saved_model(path, estimator, checkpoint, wanted, stamp, *more)

    return write, depends_on


def _weights(model):
    """The same, as arrays."""
    _, map_path = _feature_map(model.job, model.config, "comes without a feature map")
    about = {**of_kinds([model.config], STAYS, OF_DATA), "activation": "relu"}
    about["batch_norm_epsilon"] = model.config.batch_norm_epsilon

    def write(path, checkpoint, stamp):
        shapes = estimators.check_fits(model, checkpoint)
        said = {**exports.as_said(stamp), **about}
        npz.write(path, checkpoint, shapes, said, map_path)

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
