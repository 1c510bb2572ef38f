"""The evaluation of a model: as a job, and for a training."""

import math
from typing import Tuple

from absl import logging

from deepfm import estimators, open_data
from deepfm.config import Share
from deepfm.data import bad_records, datasets
from deepfm.errors import BadInput
from deepfm.estimators import Model
from deepfm.model import groups, metrics
from deepfm.plan import Opened, apply_model
from deepfm.runtime import divergence, remote_files, stopping
from deepfm.state import resume


def evaluate(opened: Opened) -> dict:
    """Evaluates the model on --val_data_dir; returns its part of report.eval.json."""
    job = opened.job

    def check(data, model):
        if job.distribution.chief:
            open_data.warn_of_remembered(resume.still_there(job.model_dir, data.files), data.files)
        groups.check_fields(model.grouping, model.config.field_size)
        bad_records.check_first_records(data, estimators.schema(model.config, data))

    data, model = apply_model(opened, "val_data_dir", check)
    step, results, curves = evaluate_model(model, data)
    about = {"validation_data": open_data.described(data)}
    return {"global_step": step, "eval": results, "curves": curves, **about}


def evaluate_model(model: Model, data: datasets.DataSet) -> Tuple[int, dict, dict]:
    """Evaluates the model's checkpoint on every record once, and logs the stable line.

    Returns:
        (the checkpoint's global step, the results, the curves of metrics.Curves).
    """
    job, share = model.job, Share()
    if open_data.evaluates_alone(job):
        model = model._replace(job=job._replace(distribution=job.distribution.alone()))
    else:
        share = open_data.share(data, job)
    input_fn = estimators.input_of(model, data, share)

    def at(path):
        curves, slices = metrics.Curves(), groups.Slices()
        give_up = stopping.GiveUp(job.distribution.stop)
        session = [*estimators.session_hooks(model, path), give_up, curves, slices]
        naming = bad_records.naming_bad_records(data, estimators.schema(model.config, data))
        with naming, estimators.trained(model) as estimator:
            # Evaluations by other jobs than training write their summaries to eval_test/.
            name = None if model.trains else "test"
            found = estimator.evaluate(input_fn, hooks=session, checkpoint_path=path, name=name)
            return found, curves, slices

    found, curves, slices = estimators.of_checkpoint(model, at)
    results = {name: float(found[name]) for name in metrics.RESULTS}
    results["examples"] = int(results["examples"])
    remote_files.check_all_read(data.files, data.rows, results["examples"])
    results["loss"] = results.pop("mean_loss")
    _check_defined(data, results, found["global_step"])
    results.update(groups.of_report(model.grouping, found, slices.entries))
    results["saturated"] = curves.saturated
    divergence.warn_of_saturation(results["saturated"], data.name)
    logging.info(
        "Evaluation: step=%d examples=%d auc=%.6f log_loss=%.6f calibration=%.4f",
        found["global_step"], results["examples"], results["auc"], results["log_loss"],
        results["calibration"],
    )  # fmt: skip
    return int(found["global_step"]), results, curves.of_report


def _check_defined(data, results, step):
    """Refuses (BadInput) a log loss that is not finite; warns of an undefined AUC."""
    undefined = math.isnan(results["auc"])
    without_labels = data.weighted and undefined  # perhaps all weigh 0
    if results["examples"] and not (math.isfinite(results["log_loss"]) or without_labels):
        raise BadInput(
            f"{data.name}: the log loss of the model of step {step} is not a "
            "number, because a value in a record or a weight of the model is too large; "
            "--task_type=infer on these records names the first one without a prediction."
        )
    if without_labels:
        logging.warning(
            "The examples of %s that weigh more than 0 do not have both labels, so the AUC is "
            "undefined.",
            data.name,
        )
    elif undefined and results["examples"]:
        all_0 = results["positive_rate"] == 0
        logging.warning(
            "All %s labels of %s are %d, so %s undefined; check that the data have labels.",
            f"{results['examples']:,}", data.name, not all_0,
            "AUC and calibration are" if all_0 else "AUC is",
        )  # fmt: skip
