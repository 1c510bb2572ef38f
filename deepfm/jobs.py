"""The jobs: train, eval, infer, export."""

import json
import os
import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import tensorflow as tf
from absl import logging

from deepfm import (
    checkpoints,
    data_check,
    datasets,
    input_pipeline,
    interruption,
    job_data,
    job_model,
    optimizers,
    remote,
    sagemaker,
    training,
)
from deepfm.distribution import Distribution
from deepfm.entry import BadInput
from deepfm.mirror import Mirror, at_hand


class JobConfig(NamedTuple):
    """What a job is asked to do; the fields are the flags of the same names.

    Attributes:
        model: fields of ModelConfig that were given as flags, sizes None where not given.
        given: names of the fields of `model` that the user set.
        optimizer: OptimizerConfig.
        input: InputConfig of training.
        distribution: Distribution.
        sagemaker: sagemaker.Job.
        flags: {name: value} of all flags that are not at their defaults, for report.json.
        mirror: copies model_dir, which is then local, to where it was asked for; or None.
    """

    task_type: str
    model_dir: Optional[str]
    servable_model_dir: Optional[str]
    predictions_file: Optional[str]
    clear_existing_model: bool
    training_data_dir: Optional[str]
    val_data_dir: Optional[str]
    infer_data_dir: Optional[str]
    data_format: str
    max_bad_records: int
    max_steps: int
    log_steps: int
    save_checkpoints_steps: int
    save_checkpoints_secs: int
    keep_checkpoint_max: int
    eval_every_steps: int
    learning_rate_decay_on_plateau: float
    export: str
    best_metric: str
    early_stopping_patience: int
    global_batch_size: int
    eval_on_all_ranks: bool
    correct_calibration: bool
    model: Dict[str, Any]
    given: Tuple[str, ...]
    optimizer: optimizers.OptimizerConfig
    input: input_pipeline.InputConfig
    distribution: Distribution
    sagemaker: sagemaker.Job
    flags: Dict[str, Any]
    mirror: Optional[Mirror] = None


def run(job: JobConfig):
    """Does the job and writes report.json.

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
    started = time.time()
    trains = job.task_type == "train"
    if mode.rank == 0:
        if trains:
            checkpoints.claim(job.model_dir)
        if not (trains and job.clear_existing_model):
            checkpoints.prepare(job.model_dir, tidy=trains)
    report = TASKS[job.task_type](job)
    if mode.rank == 0:
        report = {
            "task_type": job.task_type,
            "distribution": job.distribution.name,
            "num_processes": job.distribution.num_processes,
            "num_replicas": job.distribution.num_replicas,
            "global_batch_size": job_model.global_batch(job),
            "seconds": time.time() - started,
            **report,
            "flags": job.flags,
        }
        path = os.path.join(job.model_dir, "report.json")
        datasets.write_whole(path, json.dumps(report, indent=1) + "\n")
    mode.finish()


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
    data_check.check_first_records(data, job_model.schema(config))
    results, curves = job_model.evaluate(job, data, config)
    step = job_model.global_step(job.model_dir)
    return {"global_step": step, "eval": results, "curves": curves}


def _infer(job):
    data, config = _for_a_trained_model(job, "infer_data_dir")
    schema = job_model.schema(config)
    data_check.check_first_records(data, schema, with_labels=False)
    once = job_model.in_order(job_data.with_share(job, data).input)._replace(with_labels=False)
    input_fn = input_pipeline.make_input_fn(data, schema, once)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")
    mode, started, rows = job.distribution, time.time(), 0
    part = path if mode.num_processes == 1 else f"{path}.part-{mode.rank}"
    naming = data_check.naming_bad_records(data, schema, with_labels=False)
    with naming, remote.written(part) as local, datasets.open_whole(
        local
    ) as out, job_model.estimator(job, config) as estimator:
        session_hooks = job_model.session_hooks(job)
        for batch in estimator.predict(input_fn, None, session_hooks, yield_single_examples=False):
            prob = batch["prob"]
            out.write("%.9g\n" * len(prob) % tuple(prob.tolist()))
            rows += len(prob)
    rows = mode.total(rows)  # and so all parts are there
    remote.check_all_read(data.files, data.rows, rows)
    if mode.num_processes > 1 and mode.rank == 0:
        datasets.join(path, [f"{path}.part-{rank}" for rank in range(mode.num_processes)])
    seconds = time.time() - started
    logging.info("Wrote %d predictions to %s (%.0f/s).", rows, path, rows / seconds)
    return {
        "global_step": job_model.global_step(job.model_dir),
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
    }


def _export(job):
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; give the folder to export to.")
    _need_checkpoint(job)
    return {
        "export": job_model.save_export(job, job_model.sizes(job)),
        "global_step": job_model.global_step(job.model_dir),
    }


def _need_checkpoint(job):
    if not tf.train.latest_checkpoint(job.model_dir):
        raise BadInput(
            f"--model_dir={job.model_dir} holds no checkpoint; train first (--task_type=train)."
        )


def _for_a_trained_model(job, flag):
    _need_checkpoint(job)
    data = job_data.find(job, flag)
    return data, job_model.sizes(job, data)


TASKS: Dict[str, Callable[[JobConfig], dict]] = {
    "train": training.train,
    "eval": _eval,
    "infer": _infer,
    "export": _export,
}
