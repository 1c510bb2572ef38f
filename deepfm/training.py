"""The training job: where in its data it begins, its steps, and how it ends."""

import contextlib

import tensorflow as tf
from absl import logging

from deepfm import estimators, model_config, open_data, settings
from deepfm.cluster.agreement import SameWeights
from deepfm.config import JobConfig
from deepfm.data import bad_records, datasets, identity, input_pipeline, reading, shares
from deepfm.errors import BadInput
from deepfm.evaluating import Evaluating, Rules
from deepfm.model import optimizers
from deepfm.runtime import interruption, remote_files, stopping, throughput, utilization
from deepfm.state import checkpoints, export, resume, saving
from deepfm.state import model_dir as model_folder
from deepfm.state.remote_model_dir import HandOver

_STEPS_OF_A_VERDICT = 100  # fewer are mostly the beginning
_REPORTED = 1000  # skipped records that report.json names


def train(job: JobConfig) -> dict:
    """Trains and evaluates; returns what report.json says of it.

    Raises:
        interruption.Interrupted: after a signal; the checkpoint of the last step is saved.
        BadInput: flags or data that the user has to mend.
    """
    mode, of_job = job.distribution, job.sagemaker
    chief, asked = mode.rank == 0, job.asked_model
    data = open_data.find("training_data_dir", job.input, mode, of_job)
    validation = open_data.find_validation(job.input, mode, of_job)
    config = model_config.to_train(asked, _kept_model(job), data, validation)
    estimators.check_fits_memory(
        config, mode, job.input.batch_size, job.optimizer,
        bool(job.eval_every_steps and job.input.val_data_dir),
    )  # fmt: skip
    job = job._replace(optimizer=optimizers.of_model(job.optimizer, config))
    schema = estimators.schema(config)
    damaged = bad_records.find_damaged(data, schema, job.input.max_bad_records)
    if not damaged:
        bad_records.check_first_records(data, schema)
    if validation:
        bad_records.check_first_records(validation, schema)
    settings.check_alike(job, config, data, validation, damaged)
    if job.clear_existing_model and chief:
        model_folder.clear(job.mirror.path if job.mirror else job.model_dir)
        checkpoints.claim(job.model_dir)
    share = open_data.share(data, job.input, mode, of_job)
    job = job._replace(input=share._replace(by_rows=data.rows is not None))
    # Only the chief looks: it may have just cleared the folder that others would read.
    step = mode.agree(estimators.global_step(job.model_dir) if chief else 0)
    # So that it need not read past what has been used, or past the end (_Training.last_step).
    if (step or mode.split_batches) and not data.pipe:
        data = datasets.count_rows(data)
    if chief:
        data = datasets.identified(data, resume.known_files(job.model_dir))
    rows = shares.rows_of_share(data, damaged, job.input)
    if rows is not None:
        job = job._replace(input=job.input._replace(rows_of_processes=mode.exchange(rows)))
    job, parts = _go_on(job, config, data, damaged, step)
    if chief and not step:  # a checkpoint that is there may be another model's
        model_config.keep(job.model_dir, config)
    elif chief:
        model_config.check_goes_on(asked, config)
    gpus = utilization.Gpus()
    model = estimators.Model(job.model_dir, config, mode, job.input.seed, trains=True)
    run = _Training(job, model, data, validation, step, parts, gpus)
    _log_start(job, data, config, damaged, step)
    if run.is_to_go_on():
        naming = bad_records.naming_bad_records(data, schema)
        input_fn = input_pipeline.make_input_fn(data, schema, job.input, damaged)
        estimator = estimators.in_training(
            model, job.optimizer, job.max_steps, job.log_steps, job.keep_checkpoint_max
        )
        watched = gpus.watched() if chief else contextlib.nullcontext()
        in_cache = reading.naming_damaged_cache(job.input.cache)
        with in_cache, naming, estimator as estimator, interruption.taking_steps(), watched:
            estimator.train(input_fn, hooks=run.hooks, max_steps=run.last_step)
            run.end_if_interrupted()
        _check_all_used(job, data, run)
    elif chief:
        estimators.check_fits(model)
    if chief and not run.interrupted:
        resume.end(job.model_dir, run.step)
    if chief and (run.progress.steps or not model_config.is_kept(job.model_dir)):
        model_config.keep(job.model_dir, config)
    report = run.report(data)
    report["training_data"] = {
        "name": data.name, "format": data.data_format, "files": len(data.files),
        "records": data.rows,
    }  # fmt: skip
    report.update(_skipped(damaged))
    if chief and job.servable_model_dir and job.export == "last":
        estimators.save_export(model, job.servable_model_dir, "last")
    return report


def _kept_model(job):
    """{field: value} of the model that training goes on with, as the chief finds it; {} without."""
    found = {}
    goes_on = job.distribution.rank == 0 and not job.clear_existing_model
    if goes_on and tf.train.latest_checkpoint(job.model_dir):
        found = model_config.kept(job.model_dir)
    return job.distribution.agree(found)


def _go_on(job, config, data, damaged, step):
    """(the job, which begins with the first record not used; the RunParts that led there)."""
    mode = job.distribution
    steps = shares.steps_of_processes(job.input)
    skipped = sum(len(file.places) for file in damaged)
    order = resume.order_of(job.input, mode.num_processes, mode.synchronous, skipped)
    part = resume.RunPart("", order, 0, step, 0, steps, settings.of_run(job, config))
    position = resume.ResumePoint([part], [0] * mode.num_processes)
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


def _check_all_used(job, data, run):
    """Refuses that training has ended without having used each record as often as it should."""
    mode, config = job.distribution, job.input
    if not (run.progress.steps or data.rows or run.start_step):
        raise BadInput(f"{data.name} holds no records.")
    ended = not run.evaluating.stopped and (not job.max_steps or run.step < job.max_steps)
    if not mode.agree(int(ended)) or config.rows_of_processes is None:
        return
    rows = config.rows_of_processes[mode.rank]
    left = rows * (config.num_epochs - config.first_epoch) - config.used
    wanted = mode.total(max(left, 0))
    found = mode.total(run.progress.throughput().examples)
    if found != wanted:
        identity.check_unchanged(data)
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
    """The steps of a training job, and what is done beside them."""

    def __init__(self, job, model, data, validation, step, parts, gpus):
        self._job, self.start_step = job, step
        mode, chief, run_step = job.distribution, job.distribution.rank == 0, parts[-1].run_step
        self.interrupted = False  # in an epoch beyond --num_epochs
        epoch = shares.steps_per_epoch(job.input)
        by_epoch = epoch if job.input.num_epochs > 1 else 0
        eval_steps = (job.eval_every_steps or by_epoch or 0) if validation else 0
        rules = Rules(
            job.export, job.servable_model_dir, job.best_metric, job.early_stopping_patience,
            job.learning_rate_decay_on_plateau, job.optimizer.learning_rate,
        )  # fmt: skip
        rules.check(bool(eval_steps))
        share, together = job.input, mode
        if validation:
            share, together = open_data.share_of_evaluation(
                validation, job.input, mode, job.sagemaker
            )
        self.evaluating = Evaluating(rules, model, validation, share, together, run_step, step)
        if not mode.synchronous and not chief:
            eval_steps = 0
        # Copied before there is an export, which would be nobody's if this were lost by a kill.
        if chief and job.servable_model_dir and export.keep_model_id(job.model_dir) and job.mirror:
            job.mirror.copy_now(export.ID_FILE)
        first_step = 0 if job.eval_every_steps else run_step
        due = bool(eval_steps and step > run_step and (step - first_step) % eval_steps == 0)
        self.evaluating.make_up_for(step, due)
        left = epoch and epoch * (job.input.num_epochs - job.input.first_epoch)
        last = left and step + left - job.input.first_step
        last = min(filter(None, (last, job.max_steps)), default=None)
        # TensorFlow 1.15's iterator over several devices waits for ever now and then, where it
        # comes to the end of the data: about once in 200 runs on a busy machine.
        self.last_step = last if mode.split_batches else job.max_steps or None
        self.progress = throughput.ProgressHook(
            job.log_steps if chief or not mode.synchronous else 0,
            last, job.model_dir, mode.num_processes, mode.synchronous, gpus, chief,
        )  # fmt: skip
        wanted = lambda: self.evaluating.stopped or interruption.requested()
        checkpointer = saving.Checkpointer(
            job.model_dir,
            None if job.save_checkpoints_steps else job.save_checkpoints_secs,
            job.save_checkpoints_steps or None,
            eval_steps,
            lambda session, step: self.evaluating.on_the_way(session, step, self.progress),
            first_step=first_step,
            before_save=lambda: identity.check_unchanged(data),
            save=chief,
        )
        self.hooks = [
            *estimators.session_hooks(model),
            *mode.make_training_hooks(checkpointer.save_in_time),
            *([self._saver(parts)] if chief else []),
            self.progress,
            *([stopping.EndTogether()] if job.input.in_step and epoch is None else []),
            *filter(None, [self.evaluating.decay_hook()]),
            *([SameWeights(mode.gather, job.model_dir)] if mode.in_step else []),
            checkpointer,
            *([HandOver(job.mirror)] if job.mirror else []),
            stopping.StopTogether(wanted, mode.average, mode.anyone_stops),
        ]

    def is_to_go_on(self):
        """Whether there is anything left to train on; says so where there is not."""
        return bool(self._job.distribution.agree(int(self._is_left())))

    def _is_left(self):
        job, step = self._job, self.start_step
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
        elif self.evaluating.stopped:
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
            return self.start_step + self.progress.steps
        return estimators.global_step(self._job.model_dir)

    def _saver(self, parts):
        """What saves checkpoints, with notes of the run that they belong to."""
        job, mode = self._job, self._job.distribution
        return saving.SlicedSaving(
            job.model_dir,
            keep_checkpoint_max=job.keep_checkpoint_max,
            sharded=mode.saves_in_parts(job.model_dir),
            make_notes=resume.make_notes(parts, mode.count_steps),
        )

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
                    step - self.start_step, examples, found.seconds, rate,
                )  # fmt: skip
                if "verdict" in report:
                    logging.info("%s", report["verdict"])
        if not mode.synchronous:
            logging.info("This process took %d of the steps.", self.progress.steps)
        evaluating = self.evaluating
        if evaluating.data and (mode.synchronous or mode.rank == 0):
            if not evaluating.results or evaluating.results[0] != step:
                evaluating.evaluate(step)
            _, report["eval"], report["curves"] = evaluating.results
            if mode.rank == 0:
                report["best"] = evaluating.best
                report["stopped_early"] = evaluating.stopped
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
            data.format.faster, bool(data.pipe), config.cache != "none", config.num_epochs, reads
        )
        verdict = utilization.verdict(
            utilization.Run(
                **shares, gpu_utilization=found.gpu_utilization, advice=advice,
                num_processes=mode.num_processes, batch_size=config.batch_size,
                others=shares["host_cpu_utilization"] - ours if mode.synchronous else 0.0,
            )
        )  # fmt: skip
        return {**shares, "verdict": verdict}


def _log_start(job, data, config, damaged, step):
    rows = "an unknown number of" if data.rows is None else f"{data.rows:,}"
    source = f"{len(data.files)} file{'s' * (len(data.files) > 1)} ({data.data_format})"
    replicas = job.distribution.replicas_in_step
    logging.info(
        "Training on %s records, %s, %d fields, %s features; "
        "%d replica%s × %s = %s records in a batch.",
        rows, data.name if data.pipe else source, config.field_size,
        f"{config.feature_size:,}", replicas, "s" * (replicas > 1), f"{job.input.batch_size:,}",
        f"{job.global_batch:,}",
    )  # fmt: skip
    positives = [file.positives for file in data.files]
    if data.rows and None not in positives and sum(positives) in (0, data.rows):
        logging.warning(
            "All labels of %s are %d: from these nothing can be learned.", data.name,
            bool(sum(positives)),
        )  # fmt: skip
    if data.rows and job.global_batch > data.rows:
        logging.warning(
            "A batch is larger than the data: each step takes all %s records; try --batch_size=%d.",
            f"{data.rows:,}", max(data.rows // (10 * replicas), 1),
        )  # fmt: skip
    if not (data.pipe or data.sharded):
        shares.log_division(data.files, damaged, job.input.num_shares)
    if step:
        logging.info(
            "Going on at step %d, epoch %d, batch %d of this process.",
            step, job.input.first_epoch + 1, job.input.first_step + 1,
        )  # fmt: skip
