"""Runs a job, each of which is a file: training, evaluation, importance, inference, export."""

import contextlib
import os
import time
from typing import Callable, Dict

from absl import logging

from deepfm import evaluation, export, importance, inference, training
from deepfm.config import InputConfig, JobConfig
from deepfm.errors import BadInput
from deepfm.plan import Opened, open_model
from deepfm.records import atomic_files
from deepfm.runtime import interruption, remote_files
from deepfm.state import best
from deepfm.state.remote_model_dir import REPORT

# Entries of a report about evaluations, and flags that decide these.
_OF_EVALUATIONS = "eval", "curves", "best", "stopped_early", "validation_data"
_FLAGS_OF_THEM = "val_data_dir", "gauc_field", "slice_fields"


def run(job: JobConfig):
    """Does the job and writes its report: report.json for training, else report.TASK.json.

    Raises:
        BadInput: flags or data that the user has to fix; the text says which and how.
        interruption.Interrupted: after SIGTERM or SIGINT.
    """
    if job.distribution.serve:
        job.distribution.serve()
        return
    if not job.model_dir:
        raise BadInput("--model_dir is missing; name the model's folder: --model_dir=./model")
    if job.export_format == "npz" and job.task_type == "train" and not job.servable_model_dir:
        raise BadInput("--export_format=npz needs --servable_model_dir, a folder to export to.")
    job = _with_batch_size(job)
    mode = job.distribution
    try:
        with contextlib.ExitStack() as stack:
            _run(job, stack.enter_context)
    except interruption.Interrupted as interrupted:
        # Launchers kill the other processes as soon as one exits with a code other than 0; so all
        # wait for the chief, which may still be copying a checkpoint.
        if interrupted.together or (mode.chief and not mode.synchronous):
            mode.finish()
        raise


def _run(job, enter):
    mode, started = job.distribution, time.monotonic()
    if mode.synchronous and not mode.chief:
        logging.set_verbosity(logging.WARNING)
    if mode.chief:
        _warn_of_idle_flags(job)
    opened = open_model(job, enter)
    try:
        report = TASKS[job.task_type](opened)
    except interruption.Interrupted:
        exports = job.task_type == "train" and mode.chief and job.servable_model_dir
        if exports and best.step_of(opened.job.model_dir) is not None:
            # There may be no best checkpoint yet.
            which = "last" if job.export == "last" else best.AUTO
            logging.info("Nothing was exported; --task_type=export --checkpoint=%s does it.", which)
        raise
    if mode.chief:
        _keep_report(opened.job, {"seconds": time.monotonic() - started, **report})
    mode.finish()


def _warn_of_idle_flags(job):
    """Warns of flags that the user has set and that this job ignores."""
    task = job.task_type
    for name, setting in {**JobConfig.settings, **InputConfig.settings}.items():
        tasks = setting.tasks
        if name == "val_data_dir" and not job.input.infer_data_dir:
            tasks += ("infer",)
        if name in job.given and tasks and task not in tasks:
            logging.warning("--%s has no effect with --task_type=%s.", name, task)
    of_requests = {"train": {"item_fields"}, "export": {"item_fields", "val_data_dir"}}
    if job.export_format == "npz":
        for name in of_requests.get(task, set()) & set(job.given):
            logging.warning("--%s has no effect with --export_format=npz.", name)


def _keep_report(job, found):
    """Writes the report of a job.

    Training that had nothing left to do keeps the earlier report, except for evaluations.
    """
    trains = job.task_type == "train"
    mode = job.distribution
    report = {
        "task_type": job.task_type,
        "distribution": mode.name,
        "num_processes": mode.size,
        "num_replicas": mode.size * mode.replicas_per_process,
        "global_batch_size": job.global_batch,
        **found,
        "flags": job.flags,
    }
    name = REPORT if trains else f"report.{job.task_type}.json"
    path = os.path.join(job.model_dir, name)
    if trains and "training_seconds" not in found:
        anew = {key: found[key] for key in _OF_EVALUATIONS if key in found}
        report = {**report, **_report_of_step(path, found["global_step"]), **anew}
        if anew:
            flags = {**report["flags"], **{name: job.flags.get(name) for name in _FLAGS_OF_THEM}}
            report["flags"] = {name: x for name, x in flags.items() if x is not None}
    if trains or os.access(job.model_dir, os.W_OK):
        atomic_files.write_json(path, report)
    else:
        logging.warning("Not writing %s: its folder cannot be written.", path)


def _report_of_step(path, step):
    """The report of the training that led to a step; {} if there is none."""
    found = remote_files.json_object(path)
    return found if found.get("global_step") == step else {}


def _with_batch_size(job):
    """The job with --global_batch_size divided among the replicas."""
    size, replicas = job.global_batch_size, job.distribution.replicas_in_step
    if not size:
        return job
    if size % replicas:
        raise BadInput(
            f"{replicas} replicas cannot share --global_batch_size={size} evenly; "
            f"try --global_batch_size={max(size // replicas, 1) * replicas}."
        )
    return job._replace(input=job.input._replace(batch_size=size // replicas))


TASKS: Dict[str, Callable[[Opened], dict]] = {
    "train": training.train,
    "eval": evaluation.evaluate,
    "importance": importance.importance,
    "infer": inference.infer,
    "export": export.export,
}
