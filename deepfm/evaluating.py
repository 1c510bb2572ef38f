"""Evaluations during training, and what follows from them.

They set the learning rate, keep the best model, and may stop training early.
"""

import tensorflow as tf
from absl import logging

from deepfm import evaluation
from deepfm.data import identity
from deepfm.model import metrics, optimizers
from deepfm.plan import Plan
from deepfm.runtime import interruption, throughput
from deepfm.state import best, evaluations

v1 = tf.compat.v1

_FEW_STEPS = 500  # a run of fewer has hardly begun to learn
_IMPROVES = 0.001  # a last evaluation better by more than this is not the end of learning


class Evaluating:
    """The evaluations of a run.

    Args:
        plan: of the training.
        progress: the ProgressHook of its steps.

    Attributes:
        results: (step, results, curves) of the newest evaluation; None before the first.
        data: DataSet, with the identities of its files, or None.
        history: evaluations.History.
        decay: the hook that sets the learning rate in this process; None if another process does.
    """

    def __init__(self, plan: Plan, progress: throughput.ProgressHook):
        self._job, self._model, self._progress = plan.job, plan.model, progress
        self._run_step = plan.position.run_step
        self._mode = mode = plan.job.distribution
        self.results, self.data, self._stop = None, plan.validation, mode.stop
        self.history = plan.history
        # If all take each step together, each process has a copy of the rate to set. It is set in
        # every run, because the checkpoint's belongs to another run or to other flags.
        self.decay = _Decay(plan.history) if mode.evaluates else None

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
            self.decay.set(session, after)
            rate = after * self._job.optimizer.learning_rate
            metric = self._job.learning_rate_decay_metric
            logging.info("%s did not improve: the learning rate is now %.3g.", metric, rate)
        self._progress.exclude(started)
        return self._stop.early

    def evaluate(self, step: int):
        """Evaluates the newest checkpoint, and keeps it if it is the best."""
        history = self.history
        identity.check_unchanged(self.data)
        _, results, curves = evaluation.evaluate_model(self._model, self.data)
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


class _Decay(v1.train.SessionRunHook):
    """Sets the variable that the learning rate is multiplied by, first as earlier evaluations have
    made it."""

    def __init__(self, history):
        self._history = history

    def begin(self):
        found = [v for v in v1.global_variables() if v.op.name == optimizers.DECAY]
        self._copies = [copy for v in found for copy in getattr(v, "values", [v])]  # of replicas

    def after_create_session(self, session, coord):
        self.set(session, self._history.decay())

    def set(self, session, value):
        for copy in self._copies:
            copy.load(value, session)
