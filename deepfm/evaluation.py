"""The evaluation of a model: as a job, and during a training.

A training's evaluations set the learning rate, keep the best model, and may stop it early.
"""

import math
from typing import Optional, Tuple

from absl import logging

from deepfm import estimators, open_data
from deepfm.config import Share
from deepfm.data import bad_records, datasets, identity
from deepfm.errors import BadInput
from deepfm.estimators import Model
from deepfm.model import groups, metrics
from deepfm.plan import Opened, Plan, apply_model
from deepfm.runtime import divergence, interruption, throughput
from deepfm.runtime.tf import tf
from deepfm.state import best, evaluations, resume

v1 = tf.compat.v1

_FEW_STEPS = 500  # a run of fewer has hardly begun to learn
_IMPROVES = 0.001  # a last evaluation better by more than this is not the end of learning


def evaluate(opened: Opened) -> dict:
    """Evaluates the model on --val_data_dir; returns its part of report.eval.json."""
    job = opened.job

    def check(data, model):
        if job.distribution.chief:
            open_data.warn_of_remembered(resume.still_there(job.model_dir, data.files), data.files)
        if model.grouping:
            groups.check_fields(model.grouping, model.config.field_size)
        bad_records.check_first_records(data, estimators.schema(model.config, data))

    data, model = apply_model(opened, "val_data_dir", check)
    step, results, curves = evaluate_model(model, data, name="test")
    about = {"validation_data": open_data.described(data)}
    return {"global_step": step, "eval": results, "curves": curves, **about}


def evaluate_model(
    model: Model, data: datasets.DataSet, damaged=(), name: Optional[str] = None
) -> Tuple[int, dict, dict]:
    """Evaluates the model's checkpoint on every record once, and logs the stable line.

    Args:
        damaged: the files of `data` with bad records, which are skipped.
        name: of the folder eval_NAME for its summaries; None: eval.

    Returns:
        (the checkpoint's global step, the results, metrics.Evaluation.curves).
    """
    job, share = model.job, Share()
    if open_data.evaluates_alone(job):
        model = model._replace(job=job._replace(distribution=job.distribution.alone()))
    else:
        share = open_data.share(data, job)
    input_fn = estimators.input_of(model, data, share, damaged)

    def at(path):
        read, give_up = metrics.Read(), GiveUp(job.distribution.stop)
        session = [*estimators.session_hooks(model, path), give_up, read]
        naming = bad_records.naming_bad_records(data, estimators.schema(model.config, data))
        with naming, estimators.trained(model) as estimator:
            found = estimator.evaluate(input_fn, hooks=session, checkpoint_path=path, name=name)
            return found, read.lists

    found, ((evaluation,), *slices) = estimators.of_checkpoint(model, at)
    results = {name: float(found[name]) for name in metrics.RESULTS}
    results["examples"] = int(results["examples"])
    rows = None if damaged else data.rows
    identity.check_all_read(data.files, rows, results["examples"])
    results["loss"] = results.pop("mean_loss")
    check_defined(data, results, found["global_step"])
    if model.grouping:
        names = open_data.names_of(job, model.config, data)
        results.update(groups.of_report(model.grouping, found, *slices, names=names))
    results["saturated"] = evaluation.saturated()
    divergence.warn_of_saturation(results["saturated"], data.name)
    logging.info(
        "Evaluation: step=%d examples=%d auc=%.6f log_loss=%.6f calibration=%.4f",
        found["global_step"], results["examples"], results["auc"], results["log_loss"],
        results["calibration"],
    )  # fmt: skip
    return int(found["global_step"]), results, evaluation.curves()


def check_defined(data, results, step):
    """Refuses (BadInput) a log loss that is not finite; warns of an undefined AUC."""
    undefined = math.isnan(results["auc"])
    without_labels = data.weighted and undefined  # perhaps all weigh 0
    if results["examples"] and not (math.isfinite(results["log_loss"]) or without_labels):
        raise BadInput(
            f"{data.name}: the log loss of the model of step {step} is not a "
            "number, because a value in a record or a weight of the model is too large; "
            "--task_type=infer on these records names the first one without a prediction."
        )
    if without_labels:
        logging.warning(
            "The examples of %s that weigh more than 0 do not have both labels, so the AUC is "
            "undefined.",
            data.name,
        )
    elif undefined and results["examples"]:
        all_0 = results["positive_rate"] == 0
        logging.warning(
            "All %s labels of %s are %d, so %s undefined; check that the data have labels.",
            f"{results['examples']:,}", data.name, not all_0,
            "AUC and calibration are" if all_0 else "AUC is",
        )  # fmt: skip


def judge(plan: Plan):
    """Evaluates the training data by the weights that the run begins with, once."""
    step, history, mode = plan.position.global_step, plan.history, plan.job.distribution
    if history.judged:
        return
    if step != plan.position.run_step or not step:
        why = "this run has taken steps" if step else "the model has learned nothing yet"
        logging.info("--evaluate_first: %s, so nothing is evaluated first.", why)
        return
    logging.info("The training data, before the first step on them:")
    _, results, _ = evaluate_model(plan.model, plan.data, plan.damaged, name="first")
    history.add(step, results, first=True)
    if mode.synchronous:
        history.entries = mode.agree(history.entries)
    if mode.chief:
        history.keep()


class Evaluating:
    """The evaluations of a run.

    Args:
        plan: of a training with validation data.
        progress: the ProgressHook of its steps.
        decay: the optimizers.DecayHook, if this process evaluates.

    Attributes:
        results: (step, results, curves) of the newest evaluation; None before the first.
        history: evaluations.History.
    """

    def __init__(self, plan: Plan, progress: throughput.ProgressHook, decay):
        self._job, self._model, self._run_step = plan.job, plan.model, plan.position.run_step
        self._mode, self._progress, self._decay = plan.job.distribution, progress, decay
        self.results, self._data, self._stop = None, plan.validation, self._mode.stop
        self.history = plan.history

    def make_up_for(self, step: int, due: bool):
        """Makes an evaluation that was due at the checkpoint from which training continues."""
        if due and not self.history.has(step):
            self.evaluate(step)
        self._take_stock(step)

    def on_the_way(self, session, step: int):
        """Evaluates a step's checkpoint; returns whether to stop."""
        started = self._progress.moment()
        before = self.history.decay()
        if self._mode.synchronous:
            with self._stop.taking_steps(False):  # the checkpoint is already saved
                self.evaluate(step)
        else:
            try:  # the others take steps meanwhile that no checkpoint holds yet
                self.evaluate(step)
            except interruption.Interrupted:
                return True
        self._take_stock(step)
        after = self.history.decay()
        if after != before and not self._stop.early:
            self._decay.set(session, after)
            rate = after * self._job.optimizer.learning_rate
            metric = self._job.learning_rate_decay_metric
            logging.info("%s did not improve: the learning rate is now %.3g.", metric, rate)
        self._progress.exclude(started)
        return self._stop.early

    def evaluate(self, step: int):
        """Evaluates the newest checkpoint, and keeps it if it is the best."""
        history = self.history
        identity.check_unchanged(self._data)
        _, results, curves = evaluate_model(self._model, self._data)
        self.results = step, results, curves
        history.add(step, results)
        if self._mode.synchronous:  # if not, the chief decides alone
            history.entries = self._mode.agree(history.entries)  # so that all conclude the same
        if self._mode.chief:
            if history.best["step"] == step:
                folder = self._job.model_dir
                best.keep(folder, tf.train.latest_checkpoint(folder))
            history.keep()

    def log_quality(self, step: int):
        """Says at the end of a run what would improve it, and last, how good its best model is."""
        job, history, rate = self._job, self.history, self.results[1]["positive_rate"]
        asked = job.input
        better = min(asked.batch_size, 128), max(asked.num_epochs, 10)
        if self._stop.early or job.max_steps:
            pass  # the user's own end
        elif step - self._run_step < _FEW_STEPS and better != asked[:2]:
            logging.info(
                "%d steps are few: try --batch_size=%d --num_epochs=%d.",
                step - self._run_step, *better,
            )  # fmt: skip
        elif history.last_gain > _IMPROVES:
            logging.info(
                "The last evaluation still improved %s by %.4f: try --num_epochs=%d.",
                job.best_metric, history.last_gain, 2 * asked.num_epochs,
            )  # fmt: skip
        logging.info(
            "Best evaluation: step=%d auc=%.6f log_loss=%.6f (--checkpoint=best); by the positive "
            "rate %.4f alone: auc=0.5 log_loss=%.6f",
            history.best["step"], history.best["auc"], history.best["log_loss"],
            rate, metrics.entropy(rate),
        )  # fmt: skip

    def _take_stock(self, step):
        """Decides whether to stop early."""
        history, patience = self.history, self._job.early_stopping_patience
        if not patience:
            return
        self._stop.early = history.since_best >= patience
        if self._stop.early and self._mode.chief:
            metric = self._job.best_metric
            logging.info(
                "Stopping early at step %d: %d evaluations without improvement since step %d "
                "(%s %.6f).",
                step, history.since_best, history.best["step"], metric,
                evaluations.value(history.best, metric),
            )  # fmt: skip


class GiveUp(v1.train.SessionRunHook):
    """Ends an evaluation with interruption.Interrupted when a signal has come, though training
    goes on in other processes meanwhile."""

    def __init__(self, stop: interruption.Stop):
        self._stop = stop

    def after_run(self, run_context, run_values):
        self._stop.give_up()
