"""The training job: its steps, and how it ends."""

import contextlib
import functools
import os
import socket

from absl import logging

from deepfm import estimators, evaluation, export, model_config, open_data
from deepfm.data import bad_records, identity, input_pipeline, reading
from deepfm.data.reading import Source
from deepfm.errors import BadInput
from deepfm.model import embeddings, fresh_tables, optimizers
from deepfm.modes.common.agreement import SameWeights
from deepfm.plan import Opened, Plan, make_plan
from deepfm.runtime import interruption, throughput, utilization
from deepfm.runtime.divergence import LabelOrder, warn_of_saturation, warn_of_values
from deepfm.runtime.tf import tf
from deepfm.state import best, resume, saving

v1 = tf.compat.v1

_STEPS_OF_A_VERDICT = 100  # in fewer steps the start dominates


def train(opened: Opened) -> dict:
    """Trains and evaluates; returns its part of report.json.

    Raises:
        interruption.Interrupted: after a signal; the checkpoint of the last step is saved.
        BadInput: flags or data that the user has to fix.
    """
    plan = make_plan(opened)
    job, chief = plan.job, plan.job.distribution.chief
    training = _Training(plan)
    open_data.log_training(plan)
    if training.is_left():
        _take_steps(plan, training)
    elif chief:
        estimators.check_fits(plan.model)
        saving.delete_older(job.model_dir, job.keep_checkpoint_max)
    if chief and not training.interrupted:
        resume.end(job.model_dir, training.step)
    if chief and (training.progress.steps or not opened.known):
        model_config.keep(job.model_dir, plan.config)
    report = {**training.report(), "global_batch_size": job.global_batch}
    if job.auto:
        report["auto"] = plan.opened.chosen
    report["training_data"] = open_data.described(plan.data, plan.position.rows_of_processes)
    if plan.validation:
        report["validation_data"] = open_data.described(plan.validation)
    report.update(bad_records.reported(plan.damaged))
    if chief and job.servable_model_dir:
        kept = best.step_of(os.path.join(job.model_dir, best.FOLDER))  # None if it was damaged
        which = job.export if kept else "last"
        saved = best.of_checkpoint(job.model_dir, which, saving.model_of, hold=False)
        # Rows may have been added since the best one, if its run was interrupted.
        config = plan.config._replace(**model_config.as_saved(plan.config._asdict(), saved))
        model = plan.model._replace(checkpoint=which, config=config)
        export.save(model, job.servable_model_dir, plan.validation)
    return report


def _take_steps(plan, training):
    """Trains until the end, or until a signal ends it (interruption.Interrupted)."""
    job, position, mode = plan.job, plan.position, plan.job.distribution
    source = Source(plan.data, job.input, plan.share, position, plan.damaged, job.ops)
    schema = estimators.schema(plan.config, plan.data)
    ahead = functools.partial(embeddings.ahead, config=plan.config, ops=plan.ops)
    input_fn = input_pipeline.make_input_fn(source, schema, mode, ahead)
    optimizer = job.optimizer._replace(run_step=position.run_step, start_step=position.global_step)
    estimator = estimators.in_training(plan.model, optimizer, plan.ops)
    watched = contextlib.nullcontext()
    if mode.chief:
        warn_of_values(plan.data.made.get("value_ranges", ()))
        watched = training.progress.gpus.watched()
    naming = bad_records.naming_bad_records(plan.data, schema)
    in_cache, steps = reading.naming_damaged_cache(job.input.cache), mode.stop.taking_steps()
    with in_cache, naming, estimator as estimator, steps, watched, training.saved:
        estimator.train(input_fn, hooks=training.hooks, max_steps=job.max_steps or None)
        training.end_if_interrupted()
    _check_all_used(plan, training)


def _check_all_used(plan, run):
    """Fails (OSError) if training has ended without using each record as often as it should."""
    job, data, position = plan.job, plan.data, plan.position
    mode = job.distribution
    if not (run.progress.steps or data.rows or position.global_step):
        raise BadInput(f"{data.name} has no records.")
    # A worker that was killed may have claimed a step of --max_steps that it never took.
    claimed = 0 if mode.synchronous else mode.size - 1
    before_last = not job.max_steps or run.step + claimed < job.max_steps
    ended = not job.distribution.stop.early and before_last
    if not mode.agree(ended) or position.rows_of_processes is None:
        return
    rows = position.rows_of_processes[mode.rank]
    used = position.used(job.batch_of_process, mode.rank)
    left = rows * (job.input.num_epochs - position.epoch) - used
    wanted = mode.total(max(left, 0))
    found = mode.total(run.progress.throughput().examples)
    if found != wanted:
        identity.check_unchanged(data)
        identity.check_all_read(data.files, wanted, found)
        raise OSError(f"{data.name}: training used {found:,} records instead of {wanted:,}")


class _Training:
    """The steps of a training job, and what accompanies them.

    Attributes:
        evaluating: Evaluating; None without validation data.
        progress: the ProgressHook.
        hooks: all of training.
        saved: a context at whose end all checkpoints are on the disk.
        interrupted: whether it was, earlier, in an epoch beyond --num_epochs.
    """

    def __init__(self, plan: Plan):
        self._plan, self._job, self._position = plan, plan.job, plan.position
        job, position, mode = plan.job, plan.position, plan.job.distribution
        self._mode, step = mode, plan.position.global_step
        self.interrupted = False
        left = plan.epoch and plan.epoch * (job.input.num_epochs - position.epoch)
        last = left and step + left - position.step
        last = min(filter(None, (last, job.max_steps)), default=None)
        self.progress = throughput.ProgressHook(job, last)
        # If all take each step together, each process has a copy of the rate to set.
        self._decay = optimizers.DecayHook(plan.history) if mode.evaluates else None
        first_step = 0 if job.eval_every_steps else position.run_step
        eval_steps = plan.eval_steps if mode.evaluates else 0
        due = eval_steps and step > position.run_step and (step - first_step) % eval_steps == 0
        if job.evaluate_first and mode.evaluates:
            evaluation.judge(plan)
        self.evaluating = None
        if plan.validation:
            self.evaluating = evaluation.Evaluating(plan, self.progress, self._decay)
            self.evaluating.make_up_for(step, bool(due))
        self.hooks = self._make_hooks(eval_steps, first_step)

    def _make_hooks(self, eval_steps, first_step):
        """All hooks of training; the order counts."""
        plan, job, mode = self._plan, self._job, self._mode
        mirror = plan.opened.mirror
        steps, chief = plan.steps, mode.chief
        self._labels = LabelOrder(
            self.progress, job, plan.data.name,
            0 if self._position.step else steps and steps[mode.rank],
            job.input.num_epochs - self._position.epoch,
        )  # fmt: skip
        checkpointer = saving.Checkpointer(
            job,
            eval_steps,
            self.evaluating and self.evaluating.on_the_way,
            first_step,
            before_save=lambda: identity.check_unchanged(plan.data),
            after_save=mirror.hand_over if mirror else lambda: None,
        )
        self.saved = contextlib.closing(checkpointer)
        hooks = estimators.session_hooks(plan.model)
        if self._decay:  # before the servers' let workers begin
            hooks.append(self._decay)
        hooks += mode.make_hooks(checkpointer.save_in_time)
        if chief:
            hooks.append(self._saver())
        hooks += [self.progress, self._labels]
        if mode.in_step and plan.epoch is None:
            hooks.append(EndTogether())
        if job.reset_embeddings_each_epoch:
            hooks.append(self._fresh_tables())
        if mode.in_step:
            hooks.append(SameWeights(mode.gather, job.model_dir))
        return [*hooks, checkpointer, StopTogether(mode)]

    def _fresh_tables(self):
        """The hook for fresh tables in epochs after the first."""
        position, epoch = self._position, self._plan.epoch
        begin = position.global_step - position.step  # of the present epoch
        later = range(max(position.epoch, 1), self._job.input.num_epochs)
        begins = {begin + epoch * (i - position.epoch): i for i in later}
        return fresh_tables.FreshTables(self._plan.config, begins)

    def is_left(self):
        """Whether anything is left to train on; logs why if not."""
        job, position = self._job, self._position
        step = position.global_step
        if job.max_steps and step >= job.max_steps:
            logging.info(
                "Nothing to do: step %d has reached --max_steps=%d. Raise it to train longer.",
                step, job.max_steps,
            )  # fmt: skip
        elif self._mode.synchronous and position.epoch >= job.input.num_epochs:
            logging.info(
                "All %d epochs of this run are done (step %d); train longer with "
                "--num_epochs=%d, or from scratch with --clear_existing_model.",
                job.input.num_epochs, step, position.epoch + 1,
            )  # fmt: skip
            # A run that was given more epochs before, and killed in one of these, has not ended.
            self.interrupted = position[:2] != (job.input.num_epochs, 0)
        elif self._mode.stop.early:
            logging.info("Nothing to do: early stopping ended this run at step %d.", step)
        else:
            return True
        return False

    def end_if_interrupted(self):
        """Ends this process, together with all others, if a signal has ended training."""
        if not self._mode.total(self._mode.stop.signal is not None):
            return
        if self._mode.chief:
            logging.info(
                "Interrupted; saved the checkpoint of step %d. Run the same command again to "
                "resume.",
                estimators.global_step(self._job.model_dir),
            )
        raise interruption.Interrupted(together=True)

    @property
    def step(self):
        """The global step that training has reached; if asynchronous, the newest checkpoint's."""
        if self._mode.synchronous:
            return self._position.global_step + self.progress.steps
        return estimators.global_step(self._job.model_dir)

    def _saver(self):
        """The Saver of checkpoints, with notes on the run that they belong to."""
        plan, job, mode = self._plan, self._job, self._mode
        return saving.SlicedSaving(
            job.model_dir,
            keep_checkpoint_max=job.keep_checkpoint_max,
            sharded=mode.saves_in_parts(job.model_dir),
            make_notes=saving.make_notes(plan.parts, plan.config._asdict(), mode.count_steps),
        )

    def report(self):
        """The report of what was done, after an evaluation of the last step if it had none."""
        mode, step = self._mode, self.step
        report = {"global_step": step}
        found = self.progress.throughput()
        examples, rate = mode.total(found.examples), mode.total(found.examples_per_second)
        saturated, counted = map(mode.total, self.progress.saturated())
        saturated /= max(counted, 1)
        if examples:
            self._labels.check()
            loss = float(self.progress.recent_loss) if self.progress.steps else None
            report.update(
                found._asdict(), examples=examples, examples_per_second=rate,
                train={"loss": loss, "examples": examples, "saturated": saturated},
            )  # fmt: skip
            report["training_seconds"] = report.pop("seconds")
            report.update(self._limit(found, rate), **self.progress.profile)
            # The chief has saved the last checkpoint by now; the others do not know its step.
            if mode.evaluates:
                logging.info(
                    "Trained %d steps on %d examples in %.1f s: %.0f examples/s.",
                    step - self._position.global_step, examples, found.seconds, rate,
                )  # fmt: skip
                if "verdict" in report:
                    logging.info("%s", report["verdict"])
        if not mode.synchronous:
            logging.info("This process took %d of the steps.", self.progress.steps)
        if mode.chief and not self.evaluating:
            warn_of_saturation(saturated, "the training data")
            logging.info("How good this model is, is unknown: give --val_data_dir.")
        elif self.evaluating and mode.evaluates:
            if not self.evaluating.results or self.evaluating.results[0] != step:
                self.evaluating.evaluate(step)
            _, report["eval"], report["curves"] = self.evaluating.results
            if mode.chief:
                report["best"] = self.evaluating.history.best
                report["stopped_early"] = self._mode.stop.early
                self.evaluating.log_quality(step)
        return report

    def _limit(self, found, rate):
        """What report.json says about all processes' processors, and about what limits training."""
        job, mode, data = self._job, self._mode, self._plan.data
        names = set(mode.exchange(socket.gethostname()))
        hosts = max(len(names), mode.hosts)
        money, said = utilization.cost(job.price_per_hour, hosts, rate)
        shares = {
            name: mode.total(getattr(found, name)) / mode.size
            for name in ("input_wait_share", "host_cpu_utilization", "cpu_utilization")
        }
        ours = shares.pop("cpu_utilization") * mode.local_size
        if self.progress.steps < _STEPS_OF_A_VERDICT:
            return {**shares, **money}
        others = shares["host_cpu_utilization"] - ours if mode.synchronous else 0.0
        how, gpu = (data.format.faster, bool(data.pipe)), found.gpu_utilization
        verdict = utilization.verdict(job, *how, others, **shares, gpu_utilization=gpu)
        return {**shares, **money, "verdict": verdict + said}


class StopTogether(v1.train.SessionRunHook):
    """Stops training after the same step in all processes, once one of them wants to stop.

    Args:
        mode: the Mode, whose `stop` says whether this process wants to.
    """

    def __init__(self, mode):
        self._mode = mode

    def begin(self):
        # With a constant 0, TensorFlow might compute the mean in advance and never ask the others.
        zero = tf.cast(tf.timestamp() < 0, tf.float32)
        self._mine = v1.placeholder_with_default(zero, [], name="stop")
        self._share = self._mode.average(self._mine, "stop")

    def before_run(self, run_context):
        if self._share is self._mine:
            return None
        wanted = {self._mine: 1.0} if self._mode.stop.wanted else None
        return v1.train.SessionRunArgs(self._share, wanted)

    def after_run(self, run_context, run_values):
        told = run_values.results  # None if the step does not average
        if self._mode.anyone_stops() if told is None else told > 0:
            self._mode.stop.heard()
            run_context.request_stop()


class EndTogether(v1.train.SessionRunHook):
    """Ends training at the same step in all processes, when none has records for the next one."""

    def begin(self):
        (self._rows,) = v1.get_collection(throughput.ROWS_OF_STEPS)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._rows)

    def after_run(self, run_context, run_values):
        this, following = run_values.results
        if not this:
            raise BadInput("The training channels have no records on any host.")
        if not following:
            run_context.request_stop()
