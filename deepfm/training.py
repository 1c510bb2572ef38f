"""The training job: where in its data it begins, evaluations on the way, and how it ends.

`job` is a jobs.JobConfig everywhere.
"""

import contextlib

import tensorflow as tf
from absl import logging

from deepfm import (
    checkpoints,
    data_check,
    evaluations,
    export,
    hooks,
    input_pipeline,
    interruption,
    job_data,
    job_model,
    optimizers,
    raw_records,
    remote,
    runs,
    utilization,
)
from deepfm.entry import BadInput
from deepfm.mirror import MODEL_FILE, HandOver

v1 = tf.compat.v1

_STEPS_OF_A_VERDICT = 100  # fewer are mostly the beginning
_REPORTED = 1000  # skipped records that report.json names


def train(job):
    """Trains and evaluates; returns what report.json says of it.

    Raises:
        interruption.Interrupted: after a signal; the checkpoint of the last step is saved.
        BadInput: flags or data that the user has to mend.
    """
    data = job_data.find(job, "training_data_dir")
    validation = job_data.find_validation(job)
    config = job_model.sizes(job, *filter(None, (data, validation)))
    schema = job_model.schema(config)
    mode = job.distribution
    damaged = data_check.find_damaged(data, schema, job.max_bad_records)
    if not damaged:
        data_check.check_first_records(data, schema)
    if validation:
        data_check.check_first_records(validation, schema)
    chief = mode.rank == 0
    if job.clear_existing_model and chief:
        _clear(job.mirror.path if job.mirror else job.model_dir)
        checkpoints.claim(job.model_dir)
    job = job_data.with_share(job, data)
    # Only the chief looks: it may have just cleared the folder that others would read.
    step = mode.agree(job_model.global_step(job.model_dir) if chief else 0)
    if step and not data.pipe:
        data = data_check.count_rows(data)  # so that it need not read past what has been used
    rows = input_pipeline.rows_of_share(data, damaged, job.input)
    if rows is not None:
        job = job._replace(input=job.input._replace(rows_of_processes=mode.exchange(rows)))
    job, run_step = _go_on(job, data, damaged, step)
    if chief and not step:  # a checkpoint that is there may be another model's
        job_model.keep_config(job, config)
    elif chief:
        job_model.check_goes_on(job, config)
    gpus = utilization.Gpus()
    run = _Training(job, validation, config, step, run_step, gpus)
    _log_start(job, data, config, damaged, step)
    if run.is_to_go_on():
        naming = data_check.naming_bad_records(data, schema)
        input_fn = input_pipeline.make_input_fn(data, schema, job.input, damaged)
        estimator = job_model.estimator(job, config, True)
        watched = gpus.watched() if chief else contextlib.nullcontext()
        with naming, estimator as estimator, interruption.taking_steps(), watched:
            estimator.train(input_fn, hooks=run.hooks, max_steps=job.max_steps or None)
            run.end_if_interrupted()
        if not (run.progress.steps or data.rows or step):
            raise BadInput(f"{data.name} holds no records.")
        _check_all_used(job, data, run)
    elif chief:
        job_model.check_fits(job, config)
    if chief and (run.progress.steps or not job_model.has_config(job)):
        job_model.keep_config(job, config)
    report = run.report(data)
    report["training_data"] = {
        "name": data.name, "format": data.data_format, "files": len(data.files),
        "records": data.rows,
    }  # fmt: skip
    report.update(_skipped(damaged))
    if chief and job.servable_model_dir and job.export == "last":
        job_model.save_export(job, config)
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


def _go_on(job, data, damaged, step):
    """(the job, which begins with the first record not used; the step at which its run began)."""
    mode = job.distribution
    steps = input_pipeline.steps_of_processes(job.input)
    order = runs.order_of(job.input, mode.num_processes)
    part = runs.Part("", order, 0, step, 0, steps)
    taken = [0] * mode.num_processes
    if mode.rank == 0:
        left_out = sum(len(file.places) for file in damaged)
        part = runs.begin(job.model_dir, step, runs.fingerprint(data, left_out), order, steps)
        taken = part.taken(step)
    part = part._replace(epoch=mode.agree(part.epoch), run_step=mode.agree(part.run_step))
    epoch, first_step = part.place(mode.steps_taken(taken), mode.rank)
    config = job.input._replace(first_epoch=epoch, first_step=first_step)
    return job._replace(input=config), part.run_step


def _check_all_used(job, data, run):
    """Refuses that training has ended without having used each record as often as it should."""
    mode, config = job.distribution, job.input
    ended = not run.stopped and (not job.max_steps or run.step < job.max_steps)
    if not mode.agree(int(ended)) or config.rows_of_processes is None:
        return
    rows = config.rows_of_processes[mode.rank]
    left = rows * (config.num_epochs - config.first_epoch) - config.used
    wanted = mode.total(max(left, 0))
    found = mode.total(run.progress.throughput().examples)
    if found != wanted:
        data_check.check_unchanged(data)
        remote.check_all_read(data.files, wanted, found)
        raise OSError(f"{data.name}: training used {found:,} records in place of {wanted:,}")


def _skipped(damaged):
    """What report.json says of the records that were passed over."""
    bad = [
        {"file": file.path, "place": place.lstrip(":").strip(), "reason": reason}
        for file in damaged
        for place, reason in file.places.items()
    ]
    return {"skipped_records": len(bad), "skipped": bad[:_REPORTED]}


class _Training:
    """The steps of a training job, its evaluations on the way, and what these change."""

    def __init__(self, job, validation, config, step, run_step, gpus):
        self._job, self._validation, self._config = job, validation, config
        mode = job.distribution
        chief = mode.rank == 0
        self._first = step
        self._results = None  # of the newest evaluation: its step, results and curves
        self.stopped = False  # by --early_stopping_patience
        epoch = input_pipeline.steps_per_epoch(job.input)
        by_epoch = epoch if job.input.num_epochs > 1 else 0
        eval_steps = (job.eval_every_steps or by_epoch or 0) if validation else 0
        for name, asked in (
            ("learning_rate_decay_on_plateau", job.learning_rate_decay_on_plateau < 1),
            ("early_stopping_patience", job.early_stopping_patience > 0),
        ):
            if asked and not eval_steps:
                raise BadInput(
                    f"--{name} needs evaluations: give --val_data_dir and --eval_every_steps (by "
                    "itself once per epoch where dataset.json tells the rows)."
                )
        if job.export == "best" and not (validation and job.servable_model_dir):
            raise BadInput("--export=best needs --val_data_dir and --servable_model_dir.")
        self._history = evaluations.History(
            job.model_dir if chief else None, job.best_metric, run_step, step
        )
        if not mode.synchronous and not chief:
            eval_steps = 0
        self._evaluate_missing(step, run_step, eval_steps)
        left = epoch and epoch * (job.input.num_epochs - job.input.first_epoch)
        last = left and step + left - job.input.first_step
        self.progress = hooks.Progress(
            job.log_steps if chief or not mode.synchronous else 0,
            min(filter(None, (last, job.max_steps)), default=None),
            job.model_dir, mode.num_processes, mode.synchronous, gpus, chief,
        )  # fmt: skip
        wanted = lambda: self.stopped or interruption.requested()
        checkpointer = hooks.Checkpointer(
            job.model_dir,
            None if job.save_checkpoints_steps else job.save_checkpoints_secs,
            job.save_checkpoints_steps or None,
            eval_steps,
            self._evaluate_on_the_way,
            first_step=0 if job.eval_every_steps else run_step,
            before_save=self._note_steps,
            save=chief,
        )
        self.hooks = [
            *job_model.session_hooks(job),
            *mode.make_training_hooks(
                job.model_dir, job.keep_checkpoint_max, checkpointer.save_in_time
            ),
            self.progress,
            *([hooks.EndTogether()] if job.input.in_step and epoch is None else []),
            *([_SetDecay(self._decay())] if chief and self._decay() is not None else []),
            checkpointer,
            *([HandOver(job.mirror)] if job.mirror else []),
            hooks.StopTogether(wanted, mode.average, mode.anyone_stops),
        ]

    def is_to_go_on(self):
        """Whether there is anything left to train on; says so where there is not."""
        return bool(self._job.distribution.agree(int(self._is_left())))

    def _is_left(self):
        job, step = self._job, self._first
        if job.max_steps and step >= job.max_steps:
            logging.info("Step %d has reached --max_steps=%d already.", step, job.max_steps)
        elif job.distribution.synchronous and job.input.first_epoch >= job.input.num_epochs:
            logging.info(
                "All %d epochs of this run are done (step %d); --num_epochs=%d goes on, "
                "--clear_existing_model starts afresh.",
                job.input.num_epochs, step, job.input.num_epochs + 1,
            )  # fmt: skip
        elif self.stopped:
            logging.info("This run has been stopped early already, at step %d.", step)
        else:
            return True
        return False

    def end_if_interrupted(self):
        """Ends the process, with all others, where a signal has ended training."""
        mode = self._job.distribution
        if not mode.total(int(interruption.requested())):
            return
        if mode.rank == 0:
            logging.info(
                "Interrupted; the checkpoint of step %d is saved. The same command again goes on.",
                job_model.global_step(self._job.model_dir),
            )
        raise interruption.Interrupted(together=True)

    @property
    def step(self):
        """The global step that training has come to; where each takes its own the chief knows."""
        if self._job.distribution.synchronous:
            return self._first + self.progress.steps
        return job_model.global_step(self._job.model_dir)

    def _note_steps(self, step):
        """Before a checkpoint is saved: notes where each process is, where each is elsewhere."""
        job = self._job
        if not job.distribution.synchronous:
            taken = job.distribution.steps_now()
            runs.note_steps(job.model_dir, step, taken, job.keep_checkpoint_max)

    def _evaluate_missing(self, step, run_step, eval_steps):
        """Makes the evaluation that was due at the checkpoint that training goes on from."""
        mode = self._job.distribution
        first = 0 if self._job.eval_every_steps else run_step
        due = eval_steps and step > run_step and (step - first) % eval_steps == 0
        missing = int(bool(due) and not self._history.has(step))
        if mode.agree(missing) if mode.synchronous else missing:
            self._evaluate(step)
        self._take_stock(step)

    def _evaluate_on_the_way(self, session, step):
        """Evaluates a step's checkpoint; (whether that changed a variable, whether to stop)."""
        started = self.progress.moment()
        before = self._decay()
        if self._job.distribution.synchronous:
            with interruption.taking_steps(False):  # the checkpoint is there
                self._evaluate(step)
        else:
            try:  # the others take steps meanwhile, for which there is no checkpoint
                self._evaluate(step, [hooks.GiveUp()])
            except interruption.Interrupted:
                return False, True
        self._take_stock(step)
        after = self._decay()
        if after is not None and after != before:
            _set_decay(session, after)
            rate = after * self._job.optimizer.learning_rate
            logging.info("AUC is no better than before: the learning rate is now %.3g.", rate)
        self.progress.exclude(started)
        return after != before, self.stopped

    def _evaluate(self, step, more_hooks=()):
        """Evaluates the newest checkpoint, and exports it where it is the best."""
        job, history = self._job, self._history
        results, curves = job_model.evaluate(job, self._validation, self._config, more_hooks)
        self._results = step, results, curves
        history.add(step, results)
        if job.distribution.rank == 0:
            exported = {}
            if job.export == "best" and history.best["step"] == step:
                exported = {"export": self._export_best(step)}
            history.keep(**exported)

    def _export_best(self, step):
        """Exports the newest checkpoint in place of the one that was best before."""
        job = self._job
        path = job_model.save_export(job, self._config)
        for entry in self._history.entries:
            if entry["step"] < step and "export" in entry:
                export.remove(job.servable_model_dir, entry.pop("export"))
        return path

    def _take_stock(self, step):
        """Decides whether to stop early, in all processes alike."""
        job, mode = self._job, self._job.distribution
        patience, history = job.early_stopping_patience, self._history
        if not patience:
            return
        stop = int(history.since_best >= patience)
        self.stopped = bool(mode.agree(stop) if mode.synchronous else stop)
        if self.stopped and mode.rank == 0:
            logging.info(
                "Stopping early at step %d: %d evaluations since step %d have not been better "
                "(%s %.6f).",
                step, history.since_best, history.best["step"], job.best_metric,
                history.best[job.best_metric],
            )  # fmt: skip

    def _decay(self):
        """What the learning rate is to be multiplied by, None where evaluations do not tell."""
        factor = self._job.learning_rate_decay_on_plateau
        return self._history.decay(factor) if factor < 1 else None

    def report(self, data):
        """What was done, after an evaluation of the model as it is now."""
        mode, step = self._job.distribution, self.step
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
            report.update(self._limit(data, found))
            # The chief has saved the last checkpoint by now; the others cannot tell.
            if mode.synchronous or mode.rank == 0:
                logging.info(
                    "Trained %d steps on %d examples in %.1f s: %.0f examples/s.",
                    step - self._first, examples, found.seconds, rate,
                )  # fmt: skip
                if "verdict" in report:
                    logging.info("%s", report["verdict"])
        if not mode.synchronous:
            logging.info("This process took %d of the steps.", self.progress.steps)
        if self._validation and (mode.synchronous or mode.rank == 0):
            if not self._results or self._results[0] != step:
                self._evaluate(step)
            _, report["eval"], report["curves"] = self._results
            if mode.rank == 0:
                report["best"] = self._history.best
                report["stopped_early"] = self.stopped
        return report

    def _limit(self, data, found):
        """What report.json says of the processors of all processes, and of what the limit was."""
        job, mode = self._job, self._job.distribution
        shares = {
            name: mode.total(getattr(found, name)) / mode.num_processes
            for name in ("input_wait_share", "host_cpu_utilization", "cpu_utilization")
        }
        ours = shares.pop("cpu_utilization") * mode.local_size
        if self.progress.steps < _STEPS_OF_A_VERDICT:
            return shares
        config, reads = job.input, job.input.num_parallel_reads
        advice = utilization.reading_advice(
            data.data_format, bool(data.pipe), config.cache != "none", config.num_epochs, reads
        )
        verdict = utilization.verdict(
            utilization.Run(
                **shares, gpu_utilization=found.gpu_utilization, advice=advice,
                num_processes=mode.num_processes, batch_size=config.batch_size,
                others=shares["host_cpu_utilization"] - ours if mode.synchronous else 0.0,
            )
        )  # fmt: skip
        return {**shares, "verdict": verdict}


class _SetDecay(v1.train.SessionRunHook):
    """Sets what the learning rate is multiplied by to what the evaluations so far make it."""

    def __init__(self, decay):
        self._value = decay

    def after_create_session(self, session, coord):
        _set_decay(session, self._value)


def _set_decay(session, value):
    (decay,) = (v for v in v1.global_variables() if v.op.name == optimizers.DECAY)
    decay.load(value, session)


def _log_start(job, data, config, damaged, step):
    rows = "an unknown number of" if data.rows is None else f"{data.rows:,}"
    source = f"{len(data.files)} file{'s' * (len(data.files) > 1)} ({data.data_format})"
    replicas = job.distribution.replicas_in_step
    logging.info(
        "Training on %s records, %s, %d fields, %s features; "
        "%d replica%s × %s = %s records in a batch.",
        rows, data.name if data.pipe else source, config.field_size,
        f"{config.feature_size:,}", replicas, "s" * (replicas > 1), f"{job.input.batch_size:,}",
        f"{job_model.global_batch(job):,}",
    )  # fmt: skip
    if not (data.pipe or data.sharded):
        raw_records.log_division(data.files, damaged, job.input.num_shares)
    if step:
        logging.info(
            "Going on at step %d, epoch %d, batch %d of this process.",
            step, job.input.first_epoch + 1, job.input.first_step + 1,
        )  # fmt: skip
