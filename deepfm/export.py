"""The export of a model as a SavedModel: as a job, and at the end of a training."""

import contextlib
import os
from typing import Optional, Tuple

from absl import logging

from deepfm import estimators, model_config, open_data
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model
from deepfm.runtime import remote_files
from deepfm.state import export as saved_model
from deepfm.state.serving import warm_up


def export(opened: Opened) -> dict:
    """Writes a SavedModel; returns its part of report.export.json."""
    job = opened.job
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; name a folder to export to.")
    _, model = apply_model(opened)
    validation = open_data.find_validation(job)
    path, step = save(model, job.servable_model_dir, validation, again=True)
    return {"export": path, "global_step": step}


def save(
    model: estimators.Model,
    target: str,
    validation: Optional[datasets.DataSet] = None,
    again: bool = False,
) -> Tuple[str, int]:
    """Writes a SavedModel into a new numbered folder of `target`, whole.

    Args:
        validation: whose first records become the requests with which a server warms up.
        again: whether to make an export that already exists there.

    Returns:
        (the path of the numbered folder, the global step).
    """
    config = model.config
    others = remote_files.checked_names(target, "servable_model_dir")
    feature_map = open_data.feature_map_of(model.job, config)
    depends_on = [config.pooling, config.multi_valued, config.hash_buckets, config.logit_offset]
    items = tuple(map(int, model.job.item_fields))
    depends_on += ["raw", *items] * bool(feature_map)
    wanted = estimators.schema(config)._replace(hash_buckets=config.hash_buckets or 0)

    def at(checkpoint):
        step, found = estimators.step_of(checkpoint), saved_model.digest(checkpoint, *depends_on)
        stamp = saved_model.Stamp(step, found, config.feature_map)
        there = None if again else saved_model.find(target, others, stamp)
        if there:
            saved_model.tidy(target)
            logging.info("The model of step %d is already exported at %s.", step, there)
            return there, step
        to_serve, rows = estimators.trained(model, to_serve=True), _first_rows(model, validation)
        with remote_files.written(target) as folder, to_serve as estimator:
            number = saved_model.save(
                estimator, checkpoint, folder, wanted, others, stamp, feature_map, items, rows
            )
        path = os.path.join(target, number)
        logging.info("Exported the model of step %d to %s.", step, path)
        return path, step

    return estimators.of_checkpoint(model, at)


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
