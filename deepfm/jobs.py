"""The jobs: train, eval, infer, export."""

import contextlib
import json
import os
import tempfile
import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import tensorflow as tf
from absl import logging

from deepfm import (
    bad_records,
    checkpoints,
    data_check,
    datasets,
    export,
    hooks,
    input_pipeline,
    job_data,
    metrics,
    model,
    model_file,
    optimizers,
    records,
    remote,
    sagemaker,
    sizes,
)
from deepfm.distribution import Distribution
from deepfm.entry import BadInput
from deepfm.mirror import MODEL_FILE, HandOver, Mirror, at_hand

v1 = tf.compat.v1
v1.enable_resource_variables()  # a global step counts every step, also when workers add at once


class JobConfig(NamedTuple):
    """What a job is asked to do; the fields are the flags of the same names.

    Attributes:
        model: fields of ModelConfig that were given as flags, sizes None where not given.
        given: names of the fields of `model` that the user set.
        optimizer: OptimizerConfig.
        input: InputConfig of training.
        distribution: Distribution.
        sagemaker: sagemaker.Job.
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
    global_batch_size: int
    eval_on_all_ranks: bool
    model: Dict[str, Any]
    given: Tuple[str, ...]
    optimizer: optimizers.OptimizerConfig
    input: input_pipeline.InputConfig
    distribution: Distribution
    sagemaker: sagemaker.Job
    mirror: Optional[Mirror] = None


def run(job: JobConfig):
    """Does the job and writes report.json.

    Raises:
        BadInput: flags or data that the user has to mend; the text says which and how.
    """
    if job.distribution.serve:
        job.distribution.serve()
        return
    if not job.model_dir:
        raise BadInput("--model_dir is missing; give the folder of the model, e.g. ./model.")
    with at_hand(_with_batch_size(job)) as job:
        _run(job)


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
    if mode.rank == 0 and not (trains and job.clear_existing_model):
        checkpoints.prepare(job.model_dir, tidy=trains)
    report = TASKS[job.task_type](job)
    if mode.rank == 0:
        report = {
            "task_type": job.task_type,
            "distribution": job.distribution.name,
            "num_processes": job.distribution.num_processes,
            "num_replicas": job.distribution.num_replicas,
            "global_batch_size": _global_batch(job),
            "seconds": time.time() - started,
            **report,
        }
        path = os.path.join(job.model_dir, "report.json")
        datasets.write_whole(path, json.dumps(report, indent=1) + "\n")
    mode.finish()


def _global_batch(job):
    return job.input.batch_size * job.distribution.replicas_in_step


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


class _Training:
    """One training run: evaluations on the way, and what they change."""

    def __init__(self, job, validation, config):
        self._job = job
        self._evaluate = lambda: _evaluate(job, validation, config)
        self._validation = validation
        self._best_auc = None
        self._evaluated = None, None  # global step, results
        epoch = input_pipeline.steps_per_epoch(job.input)
        by_epoch = epoch if job.input.num_epochs > 1 else 0
        eval_steps = (job.eval_every_steps or by_epoch or 0) if validation else 0
        if job.learning_rate_decay_on_plateau < 1 and not eval_steps:
            raise BadInput(
                "--learning_rate_decay_on_plateau needs evaluations: give --val_data_dir and "
                "--eval_every_steps (by itself once per epoch where dataset.json tells the rows)."
            )
        mode = job.distribution
        # Only the chief looks: it may have just cleared the folder that others would read.
        self.first = mode.agree(_global_step(job.model_dir) if mode.rank == 0 else 0)
        last = epoch and self.first + epoch * job.input.num_epochs
        last = min(filter(None, (last, job.max_steps)), default=None)
        chief = mode.rank == 0
        if not mode.synchronous and not chief:
            eval_steps = 0
        self.progress = hooks.Progress(
            job.log_steps if chief or not mode.synchronous else 0, last, job.model_dir,
            mode.num_processes, mode.synchronous,
        )  # fmt: skip
        self.hooks = [
            *_session_hooks(job),
            *mode.make_training_hooks(job.model_dir, job.keep_checkpoint_max),
            self.progress,
            *([hooks.EndTogether()] if job.input.in_step and epoch is None else []),
            hooks.Checkpointer(
                job.model_dir,
                None if job.save_checkpoints_steps else job.save_checkpoints_secs,
                job.save_checkpoints_steps or None,
                eval_steps,
                self._evaluate_on_the_way,
                save=chief,
            ),
            *([HandOver(job.mirror)] if job.mirror else []),
        ]

    def _evaluate_on_the_way(self, session, step):
        started = time.time()
        results = self._evaluate()
        self._evaluated = step, results
        cut = self._cut_on_plateau(session, results["auc"])
        self.progress.exclude(time.time() - started)
        return cut

    def _cut_on_plateau(self, session, auc):
        """Cuts the learning rate where AUC is no better than before; whether it did."""
        factor = self._job.learning_rate_decay_on_plateau
        if self._best_auc is None or auc > self._best_auc:
            self._best_auc = auc
            return False
        if factor == 1:
            return False
        (decay,) = (v for v in v1.global_variables() if v.op.name == optimizers.DECAY)
        value = session.run(decay) * factor
        decay.load(value, session)
        rate = value * self._job.optimizer.learning_rate
        logging.info(
            "AUC %.6f, best %.6f: the learning rate is now %.3g.", auc, self._best_auc, rate
        )
        return True

    def report(self):
        """What was done, after an evaluation of the model as it is now."""
        mode = self._job.distribution
        step = self.first + self.progress.steps
        if not mode.synchronous:
            step = _global_step(self._job.model_dir)
        report = {"global_step": step}
        found = self.progress.throughput()
        examples, rate = mode.total(found.examples), mode.total(found.examples_per_second)
        if examples:
            loss = float(self.progress.recent_loss) if self.progress.steps else None
            report.update(
                found._asdict(), examples=examples, examples_per_second=rate,
                train={"loss": loss, "examples": examples},
            )  # fmt: skip
            report["training_seconds"] = report.pop("seconds")
            # The chief has saved the last checkpoint by now; the others cannot tell.
            if mode.synchronous or mode.rank == 0:
                logging.info(
                    "Trained %d steps on %d examples in %.1f s: %.0f examples/s.",
                    step - self.first, examples, found.seconds, rate,
                )  # fmt: skip
        if not mode.synchronous:
            logging.info("This process took %d of the steps.", self.progress.steps)
        if self._validation and (mode.synchronous or mode.rank == 0):
            at, results = self._evaluated
            report["eval"] = results if at == step else self._evaluate()
        return report


def _train(job):
    data = job_data.find(job, "training_data_dir")
    validation = job_data.find_validation(job)
    config = _sizes(job, *filter(None, (data, validation)))
    schema = _schema(config)
    mode = job.distribution
    damaged = data_check.find_damaged(data, schema, job.max_bad_records)
    if not damaged:
        data_check.check_first_records(data, schema)
    if validation:
        data_check.check_first_records(validation, schema)
    if job.clear_existing_model and job.distribution.rank == 0:
        _clear(job.mirror.path if job.mirror else job.model_dir)
    job = job_data.with_share(job, data)
    rows = input_pipeline.rows_of_share(data, damaged, job.input)
    if rows is not None:
        job = job._replace(input=job.input._replace(rows_of_processes=mode.exchange(rows)))
    training = _Training(job, validation, config)
    input_fn = input_pipeline.make_input_fn(data, schema, job.input, damaged)
    _log_start(job, data, config, damaged)
    if job.max_steps and training.first >= job.max_steps:
        logging.info("Step %d has reached --max_steps=%d already.", training.first, job.max_steps)
    else:
        naming = data_check.naming_bad_records(data, schema)
        with naming, _estimator(job, config, True) as estimator:
            estimator.train(input_fn, hooks=training.hooks, max_steps=job.max_steps or None)
        if not (training.progress.steps or data.rows):
            raise BadInput(f"{data.name} holds no records.")
    chief = mode.rank == 0
    if chief:
        tf.io.gfile.makedirs(job.model_dir)
        datasets.write_whole(_model_file(job), json.dumps(config._asdict(), indent=1) + "\n")
    report = training.report()
    report["skipped_records"] = sum(len(file.places) for file in damaged)
    ended = not job.max_steps or report["global_step"] < job.max_steps  # with its data
    if job.distribution.synchronous and ended:
        rows = job.input.rows_of_processes
        rows = rows and sum(rows) * job.input.num_epochs
        remote.check_all_read(data.files, rows, report.get("examples", 0))
    if job.servable_model_dir and chief:
        _save_export(job, config)
    return report


def _clear(model_dir):
    """Deletes a folder that is a model's, and no other."""
    names = remote.names(model_dir, "model_dir")
    if not names:
        return
    if not any(n in ("checkpoint", MODEL_FILE) or n.startswith("events.out.") for n in names):
        raise BadInput(
            f"--clear_existing_model: --model_dir={model_dir} holds files and none is a model's; "
            "delete it yourself, or give another folder."
        )
    tf.io.gfile.rmtree(model_dir)


def _eval(job):
    data, config = _for_a_trained_model(job, "val_data_dir")
    data_check.check_first_records(data, _schema(config))
    return {"global_step": _global_step(job.model_dir), "eval": _evaluate(job, data, config)}


def _evaluate(job, data, config):
    """Evaluates the newest checkpoint on every record once, and logs the stable line."""
    schema = _schema(config)
    job = _alone(job) if job_data.evaluates_alone(job) else job_data.with_share(job, data)
    once = _in_order(job.input)
    input_fn = input_pipeline.make_input_fn(data, schema, once)
    with data_check.naming_bad_records(data, schema), _estimator(job, config) as estimator:
        found = estimator.evaluate(input_fn, hooks=_session_hooks(job))
    results = {name: float(found[name]) for name in metrics.RESULTS}
    results["examples"] = int(results["examples"])
    remote.check_all_read(data.files, data.rows, results["examples"])
    results["loss"] = results.pop("mean_loss")
    logging.info(
        "Evaluation: step=%d examples=%d auc=%.6f log_loss=%.6f calibration=%.4f",
        found["global_step"], results["examples"], results["auc"], results["log_loss"],
        results["calibration"],
    )  # fmt: skip
    return results


def _infer(job):
    data, config = _for_a_trained_model(job, "infer_data_dir")
    schema = _schema(config)
    data_check.check_first_records(data, schema, with_labels=False)
    once = _in_order(job_data.with_share(job, data).input)._replace(with_labels=False)
    input_fn = input_pipeline.make_input_fn(data, schema, once)
    path = job.predictions_file or os.path.join(job.model_dir, "predictions.txt")
    mode, started, rows = job.distribution, time.time(), 0
    part = path if mode.num_processes == 1 else f"{path}.part-{mode.rank}"
    naming = data_check.naming_bad_records(data, schema, with_labels=False)
    with naming, remote.written(part) as local, datasets.open_whole(local) as out, _estimator(
        job, config
    ) as estimator:
        session_hooks = _session_hooks(job)
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
        "global_step": _global_step(job.model_dir),
        "examples": rows,
        "examples_per_second": rows / seconds,
        "predictions_file": path,
    }


def _export(job):
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; give the folder to export to.")
    _need_checkpoint(job)
    return {"export": _save_export(job, _sizes(job)), "global_step": _global_step(job.model_dir)}


def _save_export(job, config):
    """Writes a SavedModel into a new numbered folder, whole or not at all; returns its path."""
    with remote.written(job.servable_model_dir) as folder, _estimator(job, config) as estimator:
        number = export.save(estimator, folder, _schema(config))
    path = os.path.join(job.servable_model_dir, number)
    logging.info("Exported the model of step %d to %s.", _global_step(job.model_dir), path)
    return path


TASKS: Dict[str, Callable[[JobConfig], dict]] = {
    "train": _train,
    "eval": _eval,
    "infer": _infer,
    "export": _export,
}


@contextlib.contextmanager
def _estimator(job, config, training=False):
    """The Estimator of a model; made anew for each use, for it keeps nothing but its folder.

    Processes other than the chief get a folder of their own, which is deleted afterwards.
    """
    mode = job.distribution
    with contextlib.ExitStack() as stack:
        folder = job.model_dir
        if mode.rank > 0:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        with _tf_config(mode.tf_config if training else None):
            run_config = tf.estimator.RunConfig(
                model_dir=folder,
                tf_random_seed=job.input.seed,
                save_summary_steps=job.log_steps,
                keep_checkpoint_max=job.keep_checkpoint_max,
                session_config=mode.session_config,
                log_step_count_steps=None,
                train_distribute=mode.strategy if training else None,
                device_fn=mode.device_fn if training else None,
            )
        model_fn = model.make_model_fn(config, job.optimizer, mode)
        if training:
            model_fn = mode.wrap_model_fn(model_fn)
        stack.enter_context(checkpoints.naming_damage(folder))
        yield tf.estimator.Estimator(model_fn, config=run_config)


@contextlib.contextmanager
def _tf_config(text):
    """TF_CONFIG as RunConfig is to see it, whatever the environment of this process holds."""
    kept = os.environ.pop("TF_CONFIG", None)
    if text:
        os.environ["TF_CONFIG"] = text
    try:
        yield
    finally:
        os.environ.pop("TF_CONFIG", None)
        if kept is not None:
            os.environ["TF_CONFIG"] = kept


def _alone(job):
    """The job of a process that evaluates by itself, and reads all records."""
    return job._replace(
        input=job.input._replace(num_shares=1, share=0),
        distribution=job.distribution._replace(gather=Distribution().gather),
    )


def _session_hooks(job):
    """The hooks of every session: the checkpoint fits the model, and all processes have it."""
    mode = job.distribution
    check = [hooks.CheckShapes(job.model_dir)] if mode.rank == 0 else []
    return [*check, *mode.make_hooks()]


def _in_order(config):
    """Every record once, in order, in batches that are not divided among replicas."""
    return config._replace(
        num_epochs=1, shuffle_buffer=0, cache="none", num_parallel_reads=1, replicas=1, split=False,
        in_step=False,
    )  # fmt: skip


def _need_checkpoint(job):
    if not tf.train.latest_checkpoint(job.model_dir):
        raise BadInput(
            f"--model_dir={job.model_dir} holds no checkpoint; train first (--task_type=train)."
        )


def _for_a_trained_model(job, flag):
    _need_checkpoint(job)
    data = job_data.find(job, flag)
    return data, _sizes(job, data)


def _model_file(job):
    return os.path.join(job.model_dir, MODEL_FILE)


def _sizes(job, *data_sets):
    """The ModelConfig: what was given, else the trained model's, else what the data tells."""
    fields = dict(job.model)
    if job.task_type != "train" and tf.io.gfile.exists(_model_file(job)):
        kept = model_file.read(_model_file(job))
        fields.update({k: v for k, v in kept.items() if k in fields and k not in job.given})
    for name in ("field_size", "feature_size"):
        told = [getattr(d, name) for d in data_sets if getattr(d, name)]
        fields[name] = fields[name] or max(told, default=None)
        if name == "field_size" and data_sets and not fields[name] and data_sets[0].files:
            first = data_sets[0]
            fields[name] = bad_records.first_width(first.files[0].path, first.data_format)
        if not fields[name]:
            raise BadInput(
                f"--{name} is missing and no dataset.json beside the data tells it (in Pipe mode "
                "none can); `python -m data_tools.inspect_dataset --data=...` finds it."
            )
    layers = tuple(fields["deep_layers"])
    dropout = tuple(fields["dropout"])
    if len(dropout) not in (1, len(layers)):
        raise BadInput(
            f"--dropout has {len(dropout)} values for {len(layers)} hidden layers "
            f"(--deep_layers={','.join(map(str, layers))}); give 1 or {len(layers)}."
        )
    fields["deep_layers"] = layers
    fields["dropout"] = dropout * len(layers) if len(dropout) == 1 else dropout
    config = model.ModelConfig(**fields)
    sizes.check(config, one_machine=not job.distribution.partitioner)
    return config


def _schema(config):
    return records.Schema(config.field_size, config.feature_size)


def _global_step(model_dir):
    path = tf.train.latest_checkpoint(model_dir)
    return int(tf.train.load_variable(path, "global_step")) if path else 0


def _log_start(job, data, config, damaged):
    rows = "an unknown number of" if data.rows is None else f"{data.rows:,}"
    source = f"{len(data.files)} file{'s' * (len(data.files) > 1)} ({data.data_format})"
    replicas = job.distribution.replicas_in_step
    logging.info(
        "Training on %s records, %s, %d fields, %s features; "
        "%d replica%s × %s = %s records in a batch.",
        rows, data.name if data.pipe else source, config.field_size,
        f"{config.feature_size:,}", replicas, "s" * (replicas > 1), f"{job.input.batch_size:,}",
        f"{_global_batch(job):,}",
    )  # fmt: skip
    if not (data.pipe or data.sharded):
        input_pipeline.log_division(data.files, damaged, job.input.num_shares)
