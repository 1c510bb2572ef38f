"""The training job: where in the data it begins, its steps, and how it ends."""

import contextlib
import os
import socket
from typing import Optional

import tensorflow as tf
from absl import logging

from deepfm import estimators, evaluating, model_config, open_data, settings
from deepfm.config import JobConfig, Position
from deepfm.data import bad_records, datasets, identity, input_pipeline, reading, shares
from deepfm.data.reading import Source
from deepfm.errors import BadInput
from deepfm.kernels import compiled
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import fresh_tables, groups, optimizers
from deepfm.modes.common import tf_config as clusters
from deepfm.modes.common.agreement import SameWeights
from deepfm.runtime import interruption, remote_files, sagemaker, stopping, throughput, utilization
from deepfm.runtime.divergence import LabelOrder, LargeValues, warn_of_saturation
from deepfm.state import best, hparams, notes, resume, saving
from deepfm.state import model_dir as model_folder
from deepfm.state.remote_model_dir import Mirror

_STEPS_OF_A_VERDICT = 100  # in fewer steps the start dominates
_REPORTED = 1000  # most skipped records that report.json lists


def train(job: JobConfig, of_job: sagemaker.Job, mirror: Optional[Mirror] = None) -> dict:
    """Trains and evaluates; returns its part of report.json.

    Args:
        of_job: the SageMaker job around it, if any.
        mirror: copies the local model_dir to the remote one that the user gave, if any.

    Raises:
        interruption.Interrupted: after a signal; the checkpoint of the last step is saved.
        BadInput: flags or data that the user has to fix.
    """
    mode, processes = job.distribution, job.distribution.processes
    chief = processes.chief
    ops = compiled.of_steps(job.ops, processes, mode.servers)
    data = open_data.find("training_data_dir", job.input, processes, of_job)
    validation = open_data.find_validation(job.input, processes, of_job)
    if chief and validation:
        open_data.warn_of_remembered(data.files, validation.files)
    if job.export == best.AUTO:
        exports_best = validation and job.servable_model_dir
        job = job._replace(export=best.FOLDER if exports_best else "last")
    config = model_config.to_train(job, _kept_model(job), data, validation)
    grouping = groups.Grouping(job.gauc_field, job.slice_fields)
    groups.check(grouping, config.field_size)
    estimators.check_fits_memory(
        config, mode, job.input.batch_size, job.optimizer,
        bool(job.eval_every_steps and job.input.val_data_dir),
    )  # fmt: skip
    job = job._replace(optimizer=optimizers.of_model(job.optimizer, config))
    schema = estimators.schema(config, data)
    data, damaged = bad_records.find_damaged(data, schema, job.input.max_bad_records)
    if not damaged:
        bad_records.check_first_records(data, schema)
    if validation:
        bad_records.check_first_records(validation, estimators.schema(config, validation))
    settings.check_alike(job, config, data, validation, damaged)
    data = open_data.weighted_alike(data, processes)
    schema = estimators.schema(config, data)
    if not job.input.eval_on_all_ranks:
        validation = open_data.weighted_alike(validation, processes)
    if job.clear_existing_model and chief:
        model_folder.clear(mirror.path if mirror else job.model_dir)
    share = open_data.share(data, processes, of_job)
    by_rows = data.rows is not None
    # Only the chief looks: it may have just cleared the folder that others would read.
    step = processes.agree(estimators.global_step(job.model_dir) if chief else 0)
    # With known rows it can skip what has been used, and knows the steps of an epoch and the last.
    by_epoch = bool(validation) and job.input.num_epochs > 1 and not job.eval_every_steps
    needs_rows = step or mode.replicas.strategy or job.reset_embeddings_each_epoch or by_epoch
    if needs_rows and not data.pipe:
        data = datasets.count_rows(data)
    elif by_epoch and data.pipe:
        logging.info("Pipe mode: one evaluation, at the end; --eval_every_steps=N makes more.")
    if chief:
        data = datasets.identified(data, resume.known_files(job.model_dir))
    rows = shares.rows_of_share(data, damaged, share)
    rows = rows if rows is None else processes.exchange(rows)
    position, parts = _go_on(job, config, ops, data, damaged, rows, by_rows, step)
    if chief and not step:  # an existing checkpoint may be another model's
        model_config.keep(job.model_dir, config)
    elif chief:
        model_config.check_goes_on(job, config)
    gpus = utilization.Gpus()
    model = estimators.Model(
        job.model_dir, config, mode, job.input.seed, trains=True, ops=compiled.of_model(job.ops),
        batch_size=job.input.batch_size, grouping=grouping,
    )  # fmt: skip
    run = _Training(job, of_job, mirror, model, data, validation, position, step, parts, gpus)
    open_data.log_training(job, data, config, damaged, share, position, step)
    if processes.agree(run.is_left()):
        naming = bad_records.naming_bad_records(data, schema)
        source = Source(data, job.input, share, position, damaged, job.ops)
        input_fn = input_pipeline.make_input_fn(source, schema, mode)
        optimizer = job.optimizer._replace(run_step=parts[-1].run_step, start_step=step)
        estimator = estimators.in_training(
            model, optimizer, ops, job.max_steps, job.log_steps, job.keep_checkpoint_max
        )
        if chief:
            hparams.begin(job, config, resumes=step > parts[-1].run_step)
        watched = gpus.watched() if chief else contextlib.nullcontext()
        in_cache, steps = reading.naming_damaged_cache(job.input.cache), interruption.taking_steps()
        with in_cache, naming, estimator as estimator, steps, watched, run.saved:
            estimator.train(input_fn, hooks=run.hooks, max_steps=run.last_step)
            run.end_if_interrupted()
        _check_all_used(job, data, position, run)
    elif chief:
        estimators.check_fits(model)
        saving.delete_older(job.model_dir, job.keep_checkpoint_max)
    if chief and not run.interrupted:
        resume.end(job.model_dir, run.step)
    if chief and (run.progress.steps or not model_config.is_kept(job.model_dir)):
        model_config.keep(job.model_dir, config)
    report = run.report(data)
    if chief and not run.interrupted:
        hparams.end(job.model_dir)
    report["training_data"] = open_data.described(data)
    if validation:
        report["validation_data"] = open_data.described(validation)
    report.update(_skipped(damaged))
    if chief and job.servable_model_dir:
        kept = best.step_of(os.path.join(job.model_dir, best.FOLDER))  # None if it was damaged
        model = model._replace(checkpoint=job.export if kept else "last")
        estimators.save_export(model, job.servable_model_dir)
    return report


def _kept_model(job):
    """{field: value} of the model that training continues, as the chief finds it; {} if new."""
    processes = job.distribution.processes
    goes_on = processes.chief and not job.clear_existing_model
    there = goes_on and tf.train.latest_checkpoint(job.model_dir)
    return processes.agree(model_config.kept(job.model_dir) if there else {})


def _go_on(job, config, ops, data, damaged, rows, by_rows, step):
    """(the Position of the first unused record; the RunParts that led there)."""
    processes = job.distribution.processes
    steps = shares.steps_of_processes(rows, job.batch_of_process, processes.in_step)
    skipped = sum(len(file.places) for file in damaged)
    side_by_side = len(data.files) > 1 and job.input.num_parallel_reads > 1
    by_buffer = side_by_side and data.format.chunks_by_buffer
    order = resume.order_of(job.input, by_rows, job.distribution, skipped, by_buffer)
    now = {**settings.of_run(job, config), "compiled_kernels": ops is not TENSORFLOW}
    part = resume.RunPart("", order, 0, step, 0, steps, now)
    parts, taken = [part], [0] * processes.size
    if processes.chief:
        checkpoint = tf.train.latest_checkpoint(job.model_dir)
        abandon = job.abandon_interrupted_run
        total = None if rows is None else sum(rows)
        parts, taken = resume.begin(job.model_dir, checkpoint, step, data, part, total, abandon)
    part = parts[-1]
    found = part.epoch, part.run_step, part.order["by_rows"], taken
    epoch, run_step, by_rows, taken = processes.agree(found)
    part = part._replace(epoch=epoch, run_step=run_step)
    place = part.place(job.distribution.servers.steps_taken(taken), processes.rank)
    return Position(*place, rows, by_rows), [*parts[:-1], part]


def _check_all_used(job, data, position, run):
    """Fails (OSError) if training has ended without using each record as often as it should."""
    processes = job.distribution.processes
    if not (run.progress.steps or data.rows or run.start_step):
        raise BadInput(f"{data.name} has no records.")
    # A worker that was killed may have claimed a step of --max_steps that it never took.
    claimed = 0 if processes.synchronous else processes.size - 1
    before_last = not job.max_steps or run.step + claimed < job.max_steps
    ended = not run.evaluating.stopped and before_last
    if not processes.agree(ended) or position.rows_of_processes is None:
        return
    rows = position.rows_of_processes[processes.rank]
    used = position.used(job.batch_of_process, processes.rank)
    left = rows * (job.input.num_epochs - position.epoch) - used
    wanted = processes.total(max(left, 0))
    found = processes.total(run.progress.throughput().examples)
    if found != wanted:
        identity.check_unchanged(data)
        remote_files.check_all_read(data.files, wanted, found)
        raise OSError(f"{data.name}: training used {found:,} records instead of {wanted:,}")


def _skipped(damaged):
    """What report.json says about the records that were skipped."""
    bad = [
        {"file": file.path, "place": place.lstrip(":").strip(), "reason": reason}
        for file in damaged
        for place, reason in file.places.items()
    ]
    return {"skipped_records": len(bad), "skipped": bad[:_REPORTED]}


class _Training:
    """The steps of a training job, and what accompanies them."""

    def __init__(self, job, of_job, mirror, model, data, validation, position, step, parts, gpus):
        self._job, self._position, self.start_step = job, position, step
        self._processes = processes = job.distribution.processes
        mode, chief, run_step = job.distribution, processes.chief, parts[-1].run_step
        self.interrupted = False  # whether it was, earlier, in an epoch beyond --num_epochs
        steps = parts[-1].steps_per_epoch  # of each process
        epoch = steps and (steps[0] if processes.in_step else sum(steps))
        by_epoch = epoch if job.input.num_epochs > 1 else 0
        fresh = self._fresh_tables(model.config, epoch) if job.reset_embeddings_each_epoch else None
        eval_steps = (job.eval_every_steps or by_epoch or 0) if validation else 0
        evaluating.check(job, bool(eval_steps))
        self.evaluating = evaluating.Evaluating(job, of_job, model, validation, run_step, step)
        if not processes.evaluates:
            eval_steps = 0
        first_step = 0 if job.eval_every_steps else run_step
        due = bool(eval_steps and step > run_step and (step - first_step) % eval_steps == 0)
        self.evaluating.make_up_for(step, due)
        left = epoch and epoch * (job.input.num_epochs - position.epoch)
        last = left and step + left - position.step
        last = min(filter(None, (last, job.max_steps)), default=None)
        # TensorFlow 1.15's iterator over several devices sometimes hangs at the end of the data:
        # about once in 200 runs on a busy machine.
        self.last_step = last if mode.replicas.strategy else job.max_steps or None
        self.progress = throughput.ProgressHook(
            job.log_steps if chief or not processes.synchronous else 0, last,
            job.model_dir, processes.size, processes.synchronous, gpus, chief, job.profile_steps,
        )  # fmt: skip
        self._labels = LabelOrder(
            self.progress, processes, data.name, job.input.shuffle_buffer,
            steps and steps[processes.rank] - position.step, job.input.num_epochs - position.epoch,
            open_data.all_alike(data) is None,
        )  # fmt: skip
        ranges = data.made.get("value_ranges")
        wanted = lambda: self.evaluating.stopped or interruption.requested()
        checkpointer = saving.Checkpointer(
            job.model_dir,
            None if job.save_checkpoints_steps else job.save_checkpoints_secs,
            job.save_checkpoints_steps or None,
            eval_steps,
            lambda session, step: self.evaluating.on_the_way(session, step, self.progress),
            first_step=first_step,
            before_save=lambda: identity.check_unchanged(data),
            after_save=mirror.hand_over if mirror else lambda: None,
            notes=lambda: notes.evaluated(self.evaluating.history.entries),
            save=chief,
        )
        self.saved = contextlib.closing(checkpointer)
        self.hooks = [
            *estimators.session_hooks(model),
            *filter(None, [self.evaluating.decay_hook()]),  # before the servers' let workers begin
            *mode.servers.make_hooks(checkpointer.save_in_time),
            *([self._saver(parts, model.config)] if chief else []),
            *([LargeValues(job.batch_of_process, ranges)] if chief else []),
            self.progress,
            self._labels,
            *([stopping.EndTogether()] if processes.in_step and epoch is None else []),
            *filter(None, [fresh]),
            *([SameWeights(mode.replicas.gather, job.model_dir)] if processes.in_step else []),
            checkpointer,
            stopping.StopTogether(wanted, mode.replicas.average, mode.servers.anyone_stops),
        ]

    def _fresh_tables(self, config, epoch):
        """The hook for fresh tables in epochs after the first, of `epoch` steps (None: unknown)."""
        if not self._processes.synchronous:
            raise BadInput(
                "--reset_embeddings_each_epoch needs processes that take each step together, but "
                "here one may be an epoch ahead of another; leave it out."
            )
        if epoch is None:
            raise BadInput(
                "--reset_embeddings_each_epoch needs the number of records in an epoch, which is "
                "unknown in Pipe mode; leave it out, or read files."
            )
        position, epochs = self._position, self._job.input.num_epochs
        begin = self.start_step - position.step  # of the present epoch
        later = range(max(position.epoch, 1), epochs)
        begins = {begin + epoch * (i - position.epoch): i for i in later}
        return fresh_tables.FreshTables(config, begins)

    def is_left(self):
        """Whether anything is left to train on; logs why if not."""
        job, position, step = self._job, self._position, self.start_step
        if job.max_steps and step >= job.max_steps:
            logging.info(
                "Nothing to do: step %d has reached --max_steps=%d. Raise it to train longer.",
                step, job.max_steps,
            )  # fmt: skip
        elif self._processes.synchronous and position.epoch >= job.input.num_epochs:
            logging.info(
                "All %d epochs of this run are done (step %d); train longer with "
                "--num_epochs=%d, or from scratch with --clear_existing_model.",
                job.input.num_epochs, step, position.epoch + 1,
            )  # fmt: skip
            # A run that was given more epochs before, and killed in one of these, has not ended.
            self.interrupted = position[:2] != (job.input.num_epochs, 0)
        elif self.evaluating.stopped:
            logging.info("Nothing to do: early stopping ended this run at step %d.", step)
        else:
            return True
        return False

    def end_if_interrupted(self):
        """Ends this process, together with all others, if a signal has ended training."""
        if not self._processes.total(interruption.requested()):
            return
        if self._processes.chief:
            logging.info(
                "Interrupted; saved the checkpoint of step %d. Run the same command again to "
                "resume.",
                estimators.global_step(self._job.model_dir),
            )
        raise interruption.Interrupted(together=True)

    @property
    def step(self):
        """The global step that training has reached; if asynchronous, the newest checkpoint's."""
        if self._processes.synchronous:
            return self.start_step + self.progress.steps
        return estimators.global_step(self._job.model_dir)

    def _saver(self, parts, config):
        """The Saver of checkpoints, with notes on the run that they belong to."""
        job, servers = self._job, self._job.distribution.servers
        return saving.SlicedSaving(
            job.model_dir,
            optimizers.RENAMED,
            keep_checkpoint_max=job.keep_checkpoint_max,
            sharded=servers.saves_in_parts(job.model_dir),
            make_notes=notes.make_notes(parts, config._asdict(), servers.count_steps),
        )

    def report(self, data):
        """The report of what was done, after an evaluation of the last step if it had none."""
        processes, step = self._processes, self.step
        report = {"global_step": step}
        found = self.progress.throughput()
        examples, rate = processes.total(found.examples), processes.total(found.examples_per_second)
        if examples:
            self._labels.check()
            loss = float(self.progress.recent_loss) if self.progress.steps else None
            saturated = self.progress.saturated()
            report.update(
                found._asdict(), examples=examples, examples_per_second=rate,
                train={"loss": loss, "examples": examples, "saturated": saturated},
            )  # fmt: skip
            report["training_seconds"] = report.pop("seconds")
            report.update(self._limit(data, found, rate), **self.progress.profile)
            # The chief has saved the last checkpoint by now; the others do not know its step.
            if processes.evaluates:
                logging.info(
                    "Trained %d steps on %d examples in %.1f s: %.0f examples/s.",
                    step - self.start_step, examples, found.seconds, rate,
                )  # fmt: skip
                if "verdict" in report:
                    logging.info("%s", report["verdict"])
        if not processes.synchronous:
            logging.info("This process took %d of the steps.", self.progress.steps)
        if processes.chief and not self.evaluating.data:
            warn_of_saturation(self.progress.saturated(), "the training data")
            logging.info("How good this model is, is unknown: give --val_data_dir.")
        elif self.evaluating.data and processes.evaluates:
            if not self.evaluating.results or self.evaluating.results[0] != step:
                self.evaluating.evaluate(step)
            _, report["eval"], report["curves"] = self.evaluating.results
            if processes.chief:
                report["best"] = self.evaluating.history.best
                report["stopped_early"] = self.evaluating.stopped
                self.evaluating.log_quality(step)
        return report

    def _limit(self, data, found, rate):
        """What report.json says about all processes' processors, and about what limits training."""
        job, processes = self._job, self._processes
        names, servers = set(processes.exchange(socket.gethostname())), job.distribution.servers
        hosts = max(len(names), clusters.hosts(servers.tf_config))
        money, said = utilization.cost(job.price_per_hour, hosts, rate)
        shares = {
            name: processes.total(getattr(found, name)) / processes.size
            for name in ("input_wait_share", "host_cpu_utilization", "cpu_utilization")
        }
        ours = shares.pop("cpu_utilization") * processes.local_size
        if self.progress.steps < _STEPS_OF_A_VERDICT:
            return {**shares, **money}
        config, reads = job.input, job.input.num_parallel_reads
        advice = utilization.reading_advice(data.format.faster, bool(data.pipe), reads)
        verdict = utilization.verdict(
            **shares, gpu_utilization=found.gpu_utilization, advice=advice,
            num_processes=processes.size, batch_size=config.batch_size,
            others=shares["host_cpu_utilization"] - ours if processes.synchronous else 0.0,
            use_amp=job.optimizer.use_amp,
        )  # fmt: skip
        return {**shares, **money, "verdict": verdict + said}
