"""The jobs: train, eval, infer, export."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Dict

import numpy as np
from absl import logging

from deepfm import estimators, model_config, open_data, training
from deepfm.config import InputConfig, JobConfig
from deepfm.data import bad_records
from deepfm.errors import BadInput
from deepfm.kernels import compiled
from deepfm.model import groups
from deepfm.runtime import atomic_files, interruption, remote_files, sagemaker
from deepfm.runtime.storage import gfile
from deepfm.state import best, checkpoints, notes, resume
from deepfm.state.remote_model_dir import REPORT, at_hand

_OF_EVALUATIONS = "eval", "curves", "best", "stopped_early"  # entries of a report


def run(job: JobConfig, of_job: sagemaker.Job):
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
    job = _with_batch_size(job)
    processes = job.distribution.processes
    try:
        with at_hand(job, processes.chief) as (local, mirror):
            _run(local, of_job, mirror)
    except interruption.Interrupted as interrupted:
        # Launchers kill the other processes as soon as one exits with a code other than 0; so all
        # wait for the chief, which may still be copying a checkpoint.
        if interrupted.together or (processes.chief and not processes.synchronous):
            processes.finish()
        raise


def _run(job, of_job, mirror):
    processes = job.distribution.processes
    of_job.check(processes.local_size)
    if processes.synchronous and not processes.chief:
        logging.set_verbosity(logging.WARNING)
    started = time.monotonic()
    trains = job.task_type == "train"
    if processes.chief:
        _warn_of_idle_flags(job)
        if trains:
            checkpoints.claim(job.model_dir)
        if not (trains and job.clear_existing_model):
            checkpoints.prepare(job.model_dir, tidy=trains)
            notes.restore(job.model_dir)
    try:
        report = (
            training.train(job, of_job, mirror) if trains else TASKS[job.task_type](job, of_job)
        )
    except interruption.Interrupted:
        if trains and processes.chief and job.servable_model_dir:
            logging.info(
                "Nothing was exported; --task_type=export --checkpoint=%s does it.", job.export
            )
        raise
    if processes.chief:
        _keep_report(job, {"seconds": time.monotonic() - started, **report})
    processes.finish()


def _warn_of_idle_flags(job):
    """Warns of flags that the user has set and that this job ignores."""
    task = job.task_type
    for name, setting in {**JobConfig.settings, **InputConfig.settings}.items():
        tasks = setting.tasks
        if name == "val_data_dir" and not job.input.infer_data_dir:
            tasks += ("infer",)
        if name in job.given and tasks and task not in tasks:
            logging.warning("--%s has no effect with --task_type=%s.", name, task)


def _keep_report(job, found):
    """Writes the report of a job.

    Training that had nothing left to do keeps the earlier report, except for evaluations.
    """
    trains = job.task_type == "train"
    mode = job.distribution
    report = {
        "task_type": job.task_type,
        "distribution": mode.name,
        "num_processes": mode.processes.size,
        "num_replicas": mode.processes.size * mode.replicas.per_process,
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
        logging.warning("Not writing %s: its folder cannot be written.", path)


def _report_of_step(path, step):
    """The report of the training that led to a step; {} if there is none."""
    found = gfile.json_object(path)
    return found if found.get("global_step") == step else {}


def _with_batch_size(job):
    """The job with --global_batch_size divided among the replicas."""
    size, replicas = job.global_batch_size, job.distribution.replicas.in_step
    if not size:
        return job
    if size % replicas:
        raise BadInput(
            f"{replicas} replicas cannot share --global_batch_size={size} evenly; "
            f"try --global_batch_size={max(size // replicas, 1) * replicas}."
        )
    return job._replace(input=job.input._replace(batch_size=size // replicas))


def _eval(job, of_job):
    data, model = _trained_model(job, of_job, "val_data_dir")
    if job.distribution.processes.chief:
        open_data.warn_of_remembered(resume.still_there(job.model_dir, data.files), data.files)
    groups.check(model.grouping, model.config.field_size)
    if not open_data.evaluates_alone(job.input, job.distribution.processes):
        data = open_data.weighted_alike(data, job.distribution.processes)
    bad_records.check_first_records(data, estimators.schema(model.config, data))
    step, results, curves = estimators.evaluate(model, data, job, of_job)
    about = {"validation_data": open_data.described(data)}
    return {"global_step": step, "eval": results, "curves": curves, **about}


def _infer(job, of_job):
    given = job.input._replace(eval_on_all_ranks=False)
    validation = given.val_data_dir and not (given.infer_data_dir or of_job.pipe_mode)
    flag = "val_data_dir" if validation else "infer_data_dir"
    data, model = _trained_model(job._replace(input=given), of_job, flag)
    schema = estimators.schema(model.config, data)._replace(with_labels=False)
    bad_records.check_first_records(data, schema)
    processes, started = job.distribution.processes, time.monotonic()
    share = open_data.share(data, processes, of_job)
    input_fn = estimators.input_of(model, data, job, share, with_labels=False)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")
    if os.path.realpath(path) in {os.path.realpath(file.path) for file in data.files}:
        raise BadInput(f"--predictions_file={path} is one of the input files; give another path.")
    folder, name = os.path.split(path)
    parts = [os.path.join(folder, f".{name}.part-{rank}") for rank in range(processes.size)]
    part = parts[processes.rank] if parts[1:] else path

    def predict(checkpoint):
        rows, step = 0, checkpoint and estimators.step_of(checkpoint)
        naming = bad_records.naming_bad_records(data, schema)
        write = lambda prob: out.write(job.ops.lines(prob))
        with naming, remote_files.written(part) as local, atomic_files.open_whole(
            local
        ) as out, estimators.trained(model) as estimator, ThreadPoolExecutor(1) as writer:
            session_hooks = estimators.session_hooks(model, checkpoint)
            written = writer.submit(lambda: None)
            for batch in estimator.predict(
                input_fn, None, session_hooks, checkpoint, yield_single_examples=False
            ):
                bad = np.flatnonzero(~np.isfinite(batch["prob"]))
                if len(bad):
                    raise _unpredicted(data, rows + int(bad[0]), processes)
                written.result()  # raises what writing has raised
                written = writer.submit(write, batch["prob"])  # while the next one is computed
                rows += len(batch["prob"])
            written.result()
        return rows, step

    rows, step = estimators.of_checkpoint(model, predict)
    rows = processes.total(rows)  # all parts are written by now
    remote_files.check_all_read(data.files, data.rows, rows)
    if processes.size > 1 and processes.chief:
        atomic_files.join(path, parts)
    seconds = time.monotonic() - started
    logging.info("Wrote %d predictions to %s (%.0f/s).", rows, path, rows / seconds)
    return {
        "global_step": step,
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
        "infer_data": open_data.described(data),
    }


def _unpredicted(data, number, processes):
    """The error for a record of this process without a prediction."""
    record = f"{data.name}: record {number} of the part of rank {processes.rank}"
    record = record if processes.size > 1 else bad_records.place_of(data, number)
    return BadInput(
        f"{record}: the prediction is not a number, because a value in the record or a weight of "
        "the model is too large; correct the record, or train with a smaller --learning_rate."
    )


def _export(job, of_job):
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; name a folder to export to.")
    _, model = _trained_model(job, of_job)
    path, step = estimators.save_export(model, job.servable_model_dir, again=True)
    return {"export": path, "global_step": step}


def _trained_model(job, of_job, flag=None):
    """(the DataSet that a flag names, or None; the Model in model_dir)."""
    which = best.chosen(job.model_dir, job.checkpoint)
    best.of_checkpoint(job.model_dir, which, lambda path: None, hold=False)  # BadInput
    mode = job.distribution
    data = open_data.find(flag, job.input, mode.processes, of_job) if flag else None
    known = model_config.kept(job.model_dir, mode.processes.chief)
    config = model_config.of_trained(job, known, data)
    size = job.input.batch_size
    estimators.check_fits_memory(config, mode, size * estimators.batches_at_once(size))
    ops = compiled.of_model(job.ops)
    model = estimators.Model(
        job.model_dir, config, mode, job.input.seed, ops=ops, batch_size=size,
        checkpoint=which, grouping=groups.Grouping(job.gauc_field, job.slice_fields),
    )  # fmt: skip
    return data, model


TASKS: Dict[str, Callable[[JobConfig, sagemaker.Job], dict]] = {
    "eval": _eval,
    "infer": _infer,
    "export": _export,
}
