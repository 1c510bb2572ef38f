"""The jobs: train, eval, infer, export."""

import json
import os
import time
from typing import Callable, Dict

from absl import logging

from deepfm import estimators, model_config, open_data, training
from deepfm.config import JobConfig
from deepfm.data import bad_records, input_pipeline
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, interruption, remote_files
from deepfm.state import checkpoints
from deepfm.state.model_dir import Paths
from deepfm.state.remote_model_dir import REPORT, at_hand

_OF_EVALUATIONS = "eval", "curves", "best", "stopped_early"  # of a report


def run(job: JobConfig):
    """Does the job and writes its report: report.json of training, else report.TASK.json.

    Raises:
        BadInput: flags or data that the user has to mend; the text says which and how.
        interruption.Interrupted: after SIGTERM or SIGINT.
    """
    if job.distribution.serve:
        job.distribution.serve()
        return
    if not job.model_dir:
        raise BadInput("--model_dir is missing; give the folder of the model, e.g. ./model.")
    job = _with_batch_size(job)
    chief, afresh = job.distribution.rank == 0, job.clear_existing_model
    try:
        with at_hand(_paths(job), chief, job.keep_checkpoint_max, afresh) as (paths, mirror):
            local = {name: getattr(paths, name) for name in ("model_dir", "predictions_file")}
            _run(job._replace(mirror=mirror, **local))
    except interruption.Interrupted as interrupted:
        mode = job.distribution
        # Launchers end the others as soon as one ends with a code other than 0; all wait for the
        # chief, which may have had a checkpoint to copy.
        if interrupted.together or (mode.rank == 0 and not mode.synchronous):
            mode.finish()
        raise


def _paths(job):
    data = "training_data_dir", "val_data_dir", "infer_data_dir"
    return Paths(
        job.task_type, job.model_dir, job.servable_model_dir, job.predictions_file,
        job.input.cache if job.input.cache not in ("none", "memory") else None,
        {flag: getattr(job.input, flag) for flag in data},
    )  # fmt: skip


def _run(job):
    mode = job.distribution
    job.sagemaker.check(mode.local_size)
    if mode.rank > 0 and mode.synchronous:
        logging.set_verbosity(logging.WARNING)
    job = job._replace(
        input=job.input._replace(
            process=mode.rank, in_step=mode.in_step,
            replicas=mode.replicas_per_process, split=mode.split_batches,
        )
    )  # fmt: skip
    started = time.monotonic()
    trains = job.task_type == "train"
    if mode.rank == 0:
        _warn_of_idle_flags(job)
        if trains:
            checkpoints.claim(job.model_dir)
        if not (trains and job.clear_existing_model):
            checkpoints.prepare(job.model_dir, tidy=trains)
    report = TASKS[job.task_type](job)
    if mode.rank == 0:
        _keep_report(job, {"seconds": time.monotonic() - started, **report})
    mode.finish()


# Tasks that take notice of a flag, of those that not all do.
_TAKE_NOTICE = {
    "training_data_dir": ("train",),
    "val_data_dir": ("train", "eval"),
    "infer_data_dir": ("infer",),
    "predictions_file": ("infer",),
    "servable_model_dir": ("train", "export"),
    "clear_existing_model": ("train",),
    "abandon_interrupted_run": ("train",),
}


def _warn_of_idle_flags(job):
    """Says which flags that the user has set change nothing here."""
    task = job.task_type
    for name, tasks in _TAKE_NOTICE.items():
        if name in job.given and task not in tasks:
            logging.warning("--%s does nothing with --task_type=%s.", name, task)
    folders = [(x or "").rstrip("/") for x in (job.input.training_data_dir, job.input.val_data_dir)]
    same = folders[0] and folders[0] == folders[1]
    if task == "train" and same:
        logging.warning(
            "--val_data_dir is --training_data_dir: the evaluations tell how well the model "
            "remembers these records, and not how good it is on others."
        )


def _keep_report(job, found):
    """Writes what a job has found out.

    Training that had nothing left to do keeps the report of the one that had, but for evaluations.
    """
    trains = job.task_type == "train"
    report = {
        "task_type": job.task_type,
        "distribution": job.distribution.name,
        "num_processes": job.distribution.num_processes,
        "num_replicas": job.distribution.num_replicas,
        "global_batch_size": job.global_batch,
        **found,
        "flags": job.flags,
    }
    name = REPORT if trains else f"report.{job.task_type}.json"
    path = os.path.join(job.model_dir, name)
    if trains and "training_seconds" not in found:
        anew = {key: found[key] for key in _OF_EVALUATIONS if key in found}
        report = {**report, **_report_of_step(path, found["global_step"]), **anew}
    if trains or os.access(job.model_dir, os.W_OK):
        atomic_files.write_json(path, report)
    else:
        logging.warning("%s is left out: it cannot be written there.", path)


def _report_of_step(path, step):
    """What the report says of the training that led to a step, {} where there is none of it."""
    try:
        with open(path) as f:
            found = json.load(f)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("global_step") == step else {}


def _with_batch_size(job):
    """The job with --global_batch_size divided among the replicas."""
    size, replicas = job.global_batch_size, job.distribution.replicas_in_step
    if not size:
        return job
    if size % replicas:
        raise BadInput(
            f"{replicas} replicas cannot share --global_batch_size={size} evenly; "
            f"try {max(size // replicas, 1) * replicas}."
        )
    return job._replace(input=job.input._replace(batch_size=size // replicas))


def _eval(job):
    data, model = _trained_model(job, "val_data_dir")
    bad_records.check_first_records(data, estimators.schema(model.config))
    mode, of_job = job.distribution, job.sagemaker
    share, together = open_data.share_of_evaluation(data, job.input, mode, of_job)
    model = model._replace(distribution=together)
    step, results, curves = estimators.evaluate(model, data, share)
    return {"global_step": step, "eval": results, "curves": curves}


def _infer(job):
    data, model = _trained_model(job, "infer_data_dir")
    schema = estimators.schema(model.config)
    bad_records.check_first_records(data, schema, with_labels=False)
    mode, started = job.distribution, time.monotonic()
    share = open_data.share(data, job.input, mode, job.sagemaker)
    once = estimators.in_order(share)._replace(with_labels=False)
    input_fn = input_pipeline.make_input_fn(data, schema, once)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")
    if os.path.realpath(path) in {os.path.realpath(file.path) for file in data.files}:
        raise BadInput(f"--predictions_file={path} is one of the files to predict for.")
    folder, name = os.path.split(path)
    parts = [os.path.join(folder, f".{name}.part-{rank}") for rank in range(mode.num_processes)]
    part = parts[mode.rank] if parts[1:] else path

    def of_checkpoint(checkpoint):
        rows, step = 0, checkpoint and estimators.step_of(checkpoint)
        naming = bad_records.naming_bad_records(data, schema, with_labels=False)
        with naming, remote_files.written(part) as local, atomic_files.open_whole(
            local
        ) as out, estimators.trained(model) as estimator:
            session_hooks = estimators.session_hooks(model, checkpoint)
            for batch in estimator.predict(
                input_fn, None, session_hooks, checkpoint, yield_single_examples=False
            ):
                prob = batch["prob"]
                out.write("%.9g\n" * len(prob) % tuple(prob.tolist()))
                rows += len(prob)
        return rows, step

    rows, step = estimators.of_newest(model, of_checkpoint)
    rows = mode.total(rows)  # and so all parts are there
    remote_files.check_all_read(data.files, data.rows, rows)
    if mode.num_processes > 1 and mode.rank == 0:
        atomic_files.join(path, parts)
    seconds = time.monotonic() - started
    logging.info("Wrote %d predictions to %s (%.0f/s).", rows, path, rows / seconds)
    return {
        "global_step": step,
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
    }


def _export(job):
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; give the folder to export to.")
    _, model = _trained_model(job)
    path, step = estimators.save_export(model, job.servable_model_dir, "asked")
    return {"export": path, "global_step": step}


def _trained_model(job, flag=None):
    """(the DataSet that a flag names, or None; the Model of model_dir)."""
    checkpoints.of_newest(job.model_dir, lambda path: None, hold=False)  # or BadInput
    mode = job.distribution
    data = open_data.find(flag, job.input, mode, job.sagemaker) if flag else None
    known = model_config.kept(job.model_dir, mode.rank == 0)
    config = model_config.of_trained(job.asked_model, known, data)
    estimators.check_fits_memory(config, mode, job.input.batch_size)
    return data, estimators.Model(job.model_dir, config, mode, job.input.seed)


TASKS: Dict[str, Callable[[JobConfig], dict]] = {
    "train": training.train,
    "eval": _eval,
    "infer": _infer,
    "export": _export,
}
