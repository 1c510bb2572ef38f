"""The training job: where in its data it begins, evaluations on the way, and how it ends.

`job` is a jobs.JobConfig everywhere.
"""

import contextlib
import os
import posixpath

import tensorflow as tf
from absl import logging

from deepfm import estimators, open_data
from deepfm.cluster.agreement import SameWeights, check_alike
from deepfm.data import data_check, datasets, input_pipeline, reading
from deepfm.errors import BadInput
from deepfm.model import optimizers
from deepfm.runtime import interruption, remote_files, stopping, throughput, utilization
from deepfm.state import checkpoints, evaluations, export, resume, saving
from deepfm.state import model_dir as model_folder
from deepfm.state.remote_model_dir import HandOver

v1 = tf.compat.v1

_STEPS_OF_A_VERDICT = 100  # fewer are mostly the beginning
_REPORTED = 1000  # skipped records that report.json names


def train(job):
    """Trains and evaluates; returns what report.json says of it.

    Raises:
        interruption.Interrupted: after a signal; the checkpoint of the last step is saved.
        BadInput: flags or data that the user has to mend.
    """
    data = open_data.find(job, "training_data_dir")
    validation = open_data.find_validation(job)
    config = estimators.sizes(job, *filter(None, (data, validation)), kept=_kept_model(job))
    job = job._replace(optimizer=optimizers.of_model(job.optimizer, config))
    schema = estimators.schema(config)
    mode = job.distribution
    damaged = data_check.find_damaged(data, schema, job.max_bad_records)
    if not damaged:
        data_check.check_first_records(data, schema)
    if validation:
        data_check.check_first_records(validation, schema)
    _check_alike(job, config, data, validation, damaged)
    chief = mode.rank == 0
    if job.clear_existing_model and chief:
        model_folder.clear(job.mirror.path if job.mirror else job.model_dir)
        checkpoints.claim(job.model_dir)
    job = open_data.with_share(job, data)
    job = job._replace(input=job.input._replace(by_rows=data.rows is not None))
    # Only the chief looks: it may have just cleared the folder that others would read.
    step = mode.agree(estimators.global_step(job.model_dir) if chief else 0)
    # So that it need not read past what has been used, or past the end (_Training.last_step).
    if (step or mode.split_batches) and not data.pipe:
        data = data_check.count_rows(data)
    if chief:
        data = datasets.identified(data, resume.known_files(job.model_dir))
    rows = input_pipeline.rows_of_share(data, damaged, job.input)
    if rows is not None:
        job = job._replace(input=job.input._replace(rows_of_processes=mode.exchange(rows)))
    job, parts = _go_on(job, config, data, damaged, step)
    if chief and not step:  # a checkpoint that is there may be another model's
        estimators.keep_config(job, config)
    elif chief:
        estimators.check_goes_on(job, config)
    gpus = utilization.Gpus()
    run = _Training(job, data, validation, config, step, parts, gpus)
    _log_start(job, data, config, damaged, step)
    if run.is_to_go_on():
        naming = data_check.naming_bad_records(data, schema)
        input_fn = input_pipeline.make_input_fn(data, schema, job.input, damaged)
        estimator = estimators.estimator(job, config, True)
        watched = gpus.watched() if chief else contextlib.nullcontext()
        in_cache = data_check.naming_damaged_cache(job.input.cache)
        with in_cache, naming, estimator as estimator, interruption.taking_steps(), watched:
            estimator.train(input_fn, hooks=run.hooks, max_steps=run.last_step)
            run.end_if_interrupted()
        if not (run.progress.steps or data.rows or step):
            raise BadInput(f"{data.name} holds no records.")
        _check_all_used(job, data, run)
    elif chief:
        estimators.check_fits(job, config)
    if chief and not run.interrupted:
        resume.end(job.model_dir, run.step)
    if chief and (run.progress.steps or not estimators.has_config(job)):
        estimators.keep_config(job, config)
    report = run.report(data)
    report["training_data"] = {
        "name": data.name, "format": data.data_format, "files": len(data.files),
        "records": data.rows,
    }  # fmt: skip
    report.update(_skipped(damaged))
    if chief and job.servable_model_dir and job.export == "last":
        estimators.save_export(job, config, "last")
    return report


def _kept_model(job):
    """{field: value} of the model that training goes on with, as the chief finds it; {} without."""
    found = {}
    if job.distribution.rank == 0 and not job.clear_existing_model:
        found = estimators.kept_config(job) if tf.train.latest_checkpoint(job.model_dir) else {}
    return job.distribution.agree(found)


def _go_on(job, config, data, damaged, step):
    """(the job, which begins with the first record not used; the runs.Parts that led there)."""
    mode = job.distribution
    steps = input_pipeline.steps_of_processes(job.input)
    skipped = sum(len(file.places) for file in damaged)
    order = resume.order_of(job.input, mode.num_processes, mode.synchronous, skipped)
    part = resume.Part("", order, 0, step, 0, steps, _settings(job, config))
    position = resume.Position([part], [0] * mode.num_processes)
    if mode.rank == 0:
        checkpoint = tf.train.latest_checkpoint(job.model_dir)
        abandon = job.abandon_interrupted_run
        position = resume.begin(job.model_dir, checkpoint, step, data, part, abandon)
    part = position.part
    part = part._replace(epoch=mode.agree(part.epoch), run_step=mode.agree(part.run_step))
    epoch, first_step = part.place(mode.steps_taken(position.taken), mode.rank)
    config = job.input._replace(
        first_epoch=epoch,
        first_step=first_step,
        by_rows=bool(mode.agree(int(part.order["by_rows"]))),
    )
    return job._replace(input=config), [*position.parts[:-1], part]


def _several(mode):
    """Whether several processes take each step together."""
    return mode.synchronous and mode.num_processes > 1


def _check_alike(job, config, data, validation, damaged):
    """Refuses (BadInput) processes that take each step together with other flags or other data."""
    if not _several(job.distribution):
        return
    names = (
        "max_steps", "eval_every_steps", "learning_rate_decay_on_plateau", "best_metric",
        "early_stopping_patience", "eval_on_all_ranks",
    )  # fmt: skip
    of_input = "batch_size", "num_epochs", "shuffle_buffer", "num_parallel_reads", "seed"
    mine = {
        **config._asdict(), **_settings(job, config), "use_amp": job.optimizer.use_amp,
        **{name: getattr(job.input, name) for name in of_input},
        **{name: getattr(job, name) for name in names},
        "val_data_dir": bool(validation),
    }  # fmt: skip
    for name in ("hash_buckets", "feature_map"):  # a host may have a part without dataset.json
        if mine[name] is None:
            del mine[name]
    if not (data.pipe or data.sharded or data.own_channel):
        bad = {file.path: len(file.places) for file in damaged}
        files = [(os.path.basename(f.path), f.bytes, f.rows, bad.get(f.path)) for f in data.files]
        mine["training_data_dir"] = f"{len(files)} files, {resume.digest(files)}"
    check_alike(mine, job.distribution.exchange)


def _settings(job, config):
    """{flag: value} of what may change between an interruption and the next start."""
    names = "dropout", "l2_reg", "l2_scope", "batch_norm_decay", "lazy_updates"
    chosen = job.optimizer
    settings = {
        "optimizer": chosen.name, "learning_rate": chosen.learning_rate,
        "clip_norm": chosen.clip_norm, **{name: getattr(config, name) for name in names},
        "learning_rate_decay_on_plateau": job.learning_rate_decay_on_plateau,
    }  # fmt: skip
    return {name: list(x) if isinstance(x, tuple) else x for name, x in settings.items()}


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
        remote_files.check_all_read(data.files, wanted, found)
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

    def __init__(self, job, data, validation, config, step, parts, gpus):
        self._job, self._validation, self._config = job, validation, config
        run_step = parts[-1].run_step
        mode = job.distribution
        chief = mode.rank == 0
        self._first = step
        self._results = None  # of the newest evaluation: its step, results and curves
        self.stopped = False  # by --early_stopping_patience
        self.interrupted = False  # in an epoch beyond --num_epochs
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
        if chief and validation:
            self._validation = validation = datasets.identified(validation)
        self._history = evaluations.History(
            job.model_dir, job.best_metric, run_step, step,
            resume.fingerprint(validation) if chief and validation else None,
            mode.agree if mode.synchronous else lambda entries: entries, chief,
        )  # fmt: skip
        if not mode.synchronous and not chief:
            eval_steps = 0
        self._run_step = run_step
        # Copied before there is an export, which would be nobody's if this were lost by a kill.
        if chief and job.servable_model_dir and export.keep_model_id(job.model_dir) and job.mirror:
            job.mirror.copy_now(export.ID_FILE)
        self._evaluate_missing(step, run_step, eval_steps)
        if chief and job.export == "best":
            self._remove_exports_but_the_best()
        left = epoch and epoch * (job.input.num_epochs - job.input.first_epoch)
        last = left and step + left - job.input.first_step
        last = min(filter(None, (last, job.max_steps)), default=None)
        # TensorFlow 1.15's iterator over several devices waits for ever now and then, where it
        # comes to the end of the data: about once in 200 runs on a busy machine.
        self.last_step = last if mode.split_batches else job.max_steps or None
        self.progress = throughput.Progress(
            job.log_steps if chief or not mode.synchronous else 0,
            last, job.model_dir, mode.num_processes, mode.synchronous, gpus, chief,
        )  # fmt: skip
        # Where all take each step together, each process has a copy of it to set.
        decays = self._decay() is not None and (mode.synchronous or chief)
        self._decay_hook = _Decay(self._decay()) if decays else None
        wanted = lambda: self.stopped or interruption.requested()
        checkpointer = saving.Checkpointer(
            job.model_dir,
            None if job.save_checkpoints_steps else job.save_checkpoints_secs,
            job.save_checkpoints_steps or None,
            eval_steps,
            self._evaluate_on_the_way,
            first_step=0 if job.eval_every_steps else run_step,
            before_save=lambda: data_check.check_unchanged(data),
            save=chief,
        )
        self.hooks = [
            *estimators.session_hooks(job),
            *mode.make_training_hooks(checkpointer.save_in_time),
            *([self._saver(parts)] if chief else []),
            self.progress,
            *([stopping.EndTogether()] if job.input.in_step and epoch is None else []),
            *filter(None, [self._decay_hook]),
            *([SameWeights(mode.gather, job.model_dir)] if _several(mode) else []),
            checkpointer,
            *([HandOver(job.mirror)] if job.mirror else []),
            stopping.StopTogether(wanted, mode.average, mode.anyone_stops),
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
                job.input.num_epochs, step, job.input.first_epoch + 1,
            )  # fmt: skip
            # One that was asked for more epochs, and killed in one of these, has not ended.
            done = job.input.num_epochs, 0
            self.interrupted = (job.input.first_epoch, job.input.first_step) != done
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
                estimators.global_step(self._job.model_dir),
            )
        raise interruption.Interrupted(together=True)

    @property
    def step(self):
        """The global step that training has come to; where each takes its own the chief knows."""
        if self._job.distribution.synchronous:
            return self._first + self.progress.steps
        return estimators.global_step(self._job.model_dir)

    def _saver(self, parts):
        """What saves checkpoints, with notes of the run that they belong to."""
        job, mode = self._job, self._job.distribution
        return saving.SaveInPieces(
            job.model_dir,
            keep_checkpoint_max=job.keep_checkpoint_max,
            sharded=mode.saves_in_parts(job.model_dir),
            make_notes=resume.make_notes(parts, mode.count_steps),
        )

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
                self._evaluate(step, [stopping.GiveUp()])
            except interruption.Interrupted:
                return False, True
        self._take_stock(step)
        after = self._decay()
        if after is not None and after != before:
            self._decay_hook.set(session, after)
            rate = after * self._job.optimizer.learning_rate
            logging.info("AUC is no better than before: the learning rate is now %.3g.", rate)
        self.progress.exclude(started)
        return after != before, self.stopped

    def _evaluate(self, step, more_hooks=()):
        """Evaluates the newest checkpoint, and exports it where it is the best."""
        job, history = self._job, self._history
        data_check.check_unchanged(self._validation)
        _, results, curves = estimators.evaluate(job, self._validation, self._config, more_hooks)
        self._results = step, results, curves
        exports = [entry["export"] for entry in history.entries if "export" in entry]
        history.add(step, results)
        if job.distribution.rank == 0:
            exported = {}
            if job.export == "best" and history.best["step"] == step:
                exported = {"export": self._export_best(exports)}
            history.keep(**exported)

    def _export_best(self, before):
        """Exports the newest checkpoint in place of those that were best before, at these paths."""
        job, mine = self._job, export.model_id(self._job.model_dir)
        path, _ = estimators.save_export(job, self._config, "best")
        for entry in self._history.entries:
            entry.pop("export", None)
        for other in before:
            said = export.stamp_of(other)
            if other != path and not (said and said.model_id != mine):
                export.remove(job.servable_model_dir, other)
        self._remove_other_exports(path)
        return path

    def _remove_exports_but_the_best(self):
        """Removes what this run has exported and a kill kept it from noting, or from removing."""
        path = (self._history.best or {}).get("export", "")
        in_folder = posixpath.dirname(path) == self._job.servable_model_dir.rstrip("/")
        if in_folder and export.is_whole(path):
            self._remove_other_exports(path)

    def _remove_other_exports(self, path):
        """Removes the exports that this run has made as the best ones, but one."""
        if self._history.lost:
            return
        folder, mine = self._job.servable_model_dir, export.model_id(self._job.model_dir)
        for other, said in export.find(folder, remote_files.names(folder, "servable_model_dir")):
            of_run = said.model_id == mine and said.global_step > self._run_step
            another = posixpath.basename(other) != posixpath.basename(path)
            if of_run and said.kind == "best" and another:
                export.remove(folder, other)

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


class _Decay(v1.train.SessionRunHook):
    """Sets what the learning rate is multiplied by; at first to what the evaluations make it.

    Args:
        value: of the beginning.
    """

    def __init__(self, value):
        self._value = value

    def begin(self):
        """Makes the ops, of each replica's copy: a graph that runs cannot get any more."""
        found = [v for v in v1.global_variables() if v.op.name == optimizers.DECAY]
        copies = [copy for v in found for copy in getattr(v, "values", [v])]
        self._given = v1.placeholder(tf.float32, [])
        self._set = [
            tf.raw_ops.AssignVariableOp(resource=copy.handle, value=self._given) for copy in copies
        ]

    def after_create_session(self, session, coord):
        self.set(session, self._value)

    def set(self, session, value):
        session.run(self._set, {self._given: value})


def _log_start(job, data, config, damaged, step):
    rows = "an unknown number of" if data.rows is None else f"{data.rows:,}"
    source = f"{len(data.files)} file{'s' * (len(data.files) > 1)} ({data.data_format})"
    replicas = job.distribution.replicas_in_step
    logging.info(
        "Training on %s records, %s, %d fields, %s features; "
        "%d replica%s × %s = %s records in a batch.",
        rows, data.name if data.pipe else source, config.field_size,
        f"{config.feature_size:,}", replicas, "s" * (replicas > 1), f"{job.input.batch_size:,}",
        f"{estimators.global_batch(job):,}",
    )  # fmt: skip
    positives = [file.positives for file in data.files]
    if data.rows and None not in positives and sum(positives) in (0, data.rows):
        logging.warning(
            "All labels of %s are %d: from these nothing can be learned.", data.name,
            bool(sum(positives)),
        )  # fmt: skip
    if data.rows and estimators.global_batch(job) > data.rows:
        logging.warning(
            "A batch is larger than the data: each step takes all %s records; try --batch_size=%d.",
            f"{data.rows:,}", max(data.rows // (10 * replicas), 1),
        )  # fmt: skip
    if not (data.pipe or data.sharded):
        reading.log_division(data.files, damaged, job.input.num_shares)
    if step:
        logging.info(
            "Going on at step %d, epoch %d, batch %d of this process.",
            step, job.input.first_epoch + 1, job.input.first_step + 1,
        )  # fmt: skip
