"""The jobs: train, eval, infer, export."""

import json
import os
import time
from typing import Callable, Dict

from absl import logging

from deepfm import estimators, open_data, training
from deepfm.config import JobConfig
from deepfm.data import data_check, datasets, input_pipeline
from deepfm.errors import BadInput
from deepfm.runtime import interruption, remote_files
from deepfm.state import checkpoints
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
    try:
        with at_hand(_with_batch_size(job)) as job:
            _run(job)
    except interruption.Interrupted as interrupted:
        mode = job.distribution
        # Launchers end the others as soon as one ends with a code other than 0; all wait for the
        # chief, which may have had a checkpoint to copy.
        if interrupted.together or (mode.rank == 0 and not mode.synchronous):
            mode.finish()
        raise


def _run(job):
    mode = job.distribution
    job.sagemaker.check(mode.local_size)
    if mode.rank > 0 and mode.synchronous:
        logging.set_verbosity(logging.WARNING)
    job = job._replace(
        input=job.input._replace(
            process=mode.rank, in_step=mode.synchronous and mode.num_processes > 1,
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
    task, mode = job.task_type, job.distribution
    for name, tasks in _TAKE_NOTICE.items():
        if name in job.given and task not in tasks:
            logging.warning("--%s does nothing with --task_type=%s.", name, task)
    asked = job.flags.get("replicas_per_process", mode.replicas_per_process)
    if task == "train" and asked != mode.replicas_per_process:
        logging.warning(
            "--replicas_per_process=%d does nothing with --distribution=%s; try tower or mirrored.",
            asked, mode.name,
        )  # fmt: skip
    if task == "train" and "cross_device_ops" in job.given and not mode.strategy:
        logging.warning("--cross_device_ops is of --distribution=mirrored; here it does nothing.")
    folders = [(x or "").rstrip("/") for x in (job.training_data_dir, job.val_data_dir)]
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
        "global_batch_size": estimators.global_batch(job),
        **found,
        "flags": job.flags,
    }
    name = REPORT if trains else f"report.{job.task_type}.json"
    path = os.path.join(job.model_dir, name)
    if trains and "training_seconds" not in found:
        anew = {key: found[key] for key in _OF_EVALUATIONS if key in found}
        report = {**report, **_report_of_step(path, found["global_step"]), **anew}
    if trains or os.access(job.model_dir, os.W_OK):
        datasets.write_json(path, report)
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
    data, config = _for_a_trained_model(job, "val_data_dir")
    data_check.check_first_records(data, estimators.schema(config))
    step, results, curves = estimators.evaluate(job, data, config)
    return {"global_step": step, "eval": results, "curves": curves}


def _infer(job):
    data, config = _for_a_trained_model(job, "infer_data_dir")
    schema = estimators.schema(config)
    data_check.check_first_records(data, schema, with_labels=False)
    once = estimators.in_order(open_data.with_share(job, data).input)._replace(with_labels=False)
    input_fn = input_pipeline.make_input_fn(data, schema, once)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")
    if os.path.realpath(path) in {os.path.realpath(file.path) for file in data.files}:
        raise BadInput(f"--predictions_file={path} is one of the files to predict for.")
    mode, started = job.distribution, time.monotonic()
    folder, name = os.path.split(path)
    parts = [os.path.join(folder, f".{name}.part-{rank}") for rank in range(mode.num_processes)]
    part = parts[mode.rank] if parts[1:] else path

    def of_checkpoint(checkpoint):
        rows, step = 0, checkpoint and estimators.step_of(checkpoint)
        naming = data_check.naming_bad_records(data, schema, with_labels=False)
        with naming, remote_files.written(part) as local, datasets.open_whole(
            local
        ) as out, estimators.estimator(job, config) as estimator:
            session_hooks = estimators.session_hooks(job, checkpoint)
            for batch in estimator.predict(
                input_fn, None, session_hooks, checkpoint, yield_single_examples=False
            ):
                prob = batch["prob"]
                out.write("%.9g\n" * len(prob) % tuple(prob.tolist()))
                rows += len(prob)
        return rows, step

    rows, step = estimators.of_newest(job, of_checkpoint)
    rows = mode.total(rows)  # and so all parts are there
    remote_files.check_all_read(data.files, data.rows, rows)
    if mode.num_processes > 1 and mode.rank == 0:
        datasets.join(path, parts)
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
    _need_checkpoint(job)
    path, step = estimators.save_export(job, estimators.sizes(job), "asked")
    return {"export": path, "global_step": step}


def _need_checkpoint(job):
    checkpoints.of_newest(job.model_dir, lambda path: None, hold=False)  # or BadInput


def _for_a_trained_model(job, flag):
    _need_checkpoint(job)
    data = open_data.find(job, flag)
    return data, estimators.sizes(job, data)


TASKS: Dict[str, Callable[[JobConfig], dict]] = {
    "train": training.train,
    "eval": _eval,
    "infer": _infer,
    "export": _export,
}
