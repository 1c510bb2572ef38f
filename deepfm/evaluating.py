"""The evaluations of a training on its way, and what follows from them.

That is the learning rate, an early end, and the export of the best model.
"""

import posixpath
from typing import NamedTuple, Optional

import tensorflow as tf
from absl import logging

from deepfm import estimators
from deepfm.config import Distribution, InputConfig
from deepfm.data import datasets, identity
from deepfm.errors import BadInput
from deepfm.model import optimizers
from deepfm.runtime import interruption, remote_files, stopping, throughput
from deepfm.state import evaluations, export, resume

v1 = tf.compat.v1


class Rules(NamedTuple):
    """What is to follow from evaluations; the fields are the flags of the same names.

    Attributes:
        learning_rate: as used, which decays.
    """

    export: str
    servable_model_dir: Optional[str]
    best_metric: str
    early_stopping_patience: int
    learning_rate_decay_on_plateau: float
    learning_rate: float

    def check(self, evaluates: bool):
        """Refuses (BadInput) what needs evaluations, which there will be or not."""
        for name, asked in (
            ("learning_rate_decay_on_plateau", self.learning_rate_decay_on_plateau < 1),
            ("early_stopping_patience", self.early_stopping_patience > 0),
        ):
            if asked and not evaluates:
                raise BadInput(
                    f"--{name} needs evaluations: give --val_data_dir and --eval_every_steps (by "
                    "itself once per epoch where dataset.json tells the rows)."
                )


class Evaluating:
    """The evaluations of a run.

    Args:
        rules: Rules.
        model: Model, which is trained.
        data: DataSet to evaluate on, or None.
        share: InputConfig with the records of it that this process reads.
        together: Distribution whose processes evaluate together.
        run_step: global step at which the run began.
        step: global step that training goes on from.

    Attributes:
        results: of the newest evaluation: its step, results and curves; None before the first.
        stopped: whether training is to end, by --early_stopping_patience.
        data: DataSet, with the identities of its files.
    """

    def __init__(
        self,
        rules: Rules,
        model: estimators.Model,
        data: Optional[datasets.DataSet],
        share: InputConfig,
        together: Distribution,
        run_step: int,
        step: int,
    ):
        self.rules, self._model, self._share, self._run_step = rules, model, share, run_step
        self._mode, self._together = model.distribution, model._replace(distribution=together)
        self.results, self.stopped, self.data = None, False, data
        chief = self._mode.rank == 0
        if rules.export == "best" and not (data and rules.servable_model_dir):
            raise BadInput("--export=best needs --val_data_dir and --servable_model_dir.")
        if chief and data:
            self.data = datasets.identified(data)
        self._history = evaluations.History(
            model.model_dir, rules.best_metric, run_step, step,
            resume.fingerprint(self.data) if chief and data else None,
            self._mode.agree if self._mode.synchronous else lambda entries: entries, chief,
        )  # fmt: skip

    @property
    def best(self):
        """The best evaluation so far, or None."""
        return self._history.best

    def make_up_for(self, step: int, due: bool):
        """Makes the evaluation that was due at the checkpoint that training goes on from."""
        mode = self._mode
        missing = int(due and not self._history.has(step))
        if mode.agree(missing) if mode.synchronous else missing:
            self.evaluate(step)
        self._take_stock(step)
        if mode.rank == 0 and self.rules.export == "best":
            self._remove_exports_but_the_best()

    def decay_hook(self) -> Optional["_Decay"]:
        """What sets the learning rate in this process, None where nothing does."""
        # Where all take each step together, each process has a copy of it to set.
        decays = self._decay() is not None and (self._mode.synchronous or self._mode.rank == 0)
        self._decay_hook = _Decay(self._decay()) if decays else None
        return self._decay_hook

    def on_the_way(self, session, step: int, progress: throughput.ProgressHook):
        """Evaluates a step's checkpoint; (whether that changed a variable, whether to stop)."""
        started = progress.moment()
        before = self._decay()
        if self._mode.synchronous:
            with interruption.taking_steps(False):  # the checkpoint is there
                self.evaluate(step)
        else:
            try:  # the others take steps meanwhile, for which there is no checkpoint
                self.evaluate(step, [stopping.GiveUp()])
            except interruption.Interrupted:
                return False, True
        self._take_stock(step)
        after = self._decay()
        if after is not None and after != before:
            self._decay_hook.set(session, after)
            rate = after * self.rules.learning_rate
            logging.info("AUC is no better than before: the learning rate is now %.3g.", rate)
        progress.exclude(started)
        return after != before, self.stopped

    def evaluate(self, step: int, more_hooks=()):
        """Evaluates the newest checkpoint, and exports it where it is the best."""
        history = self._history
        identity.check_unchanged(self.data)
        _, results, curves = estimators.evaluate(self._together, self.data, self._share, more_hooks)
        self.results = step, results, curves
        exports = [entry["export"] for entry in history.entries if "export" in entry]
        history.add(step, results)
        if self._mode.rank == 0:
            exported = {}
            if self.rules.export == "best" and history.best["step"] == step:
                exported = {"export": self._export_best(exports)}
            history.keep(**exported)

    def _export_best(self, before):
        """Exports the newest checkpoint in place of those that were best before, at these paths."""
        target, mine = self.rules.servable_model_dir, export.model_id(self._model.model_dir)
        path, _ = estimators.save_export(self._model, target, "best")
        for entry in self._history.entries:
            entry.pop("export", None)
        for other in before:
            said = export.stamp_of(other)
            if other != path and not (said and said.model_id != mine):
                export.remove(target, other)
        self._remove_other_exports(path)
        return path

    def _remove_exports_but_the_best(self):
        """Removes what this run has exported and a kill kept it from noting, or from removing."""
        path = (self._history.best or {}).get("export", "")
        in_folder = posixpath.dirname(path) == self.rules.servable_model_dir.rstrip("/")
        if in_folder and export.is_whole(path):
            self._remove_other_exports(path)

    def _remove_other_exports(self, path):
        """Removes the exports that this run has made as the best ones, but one."""
        if self._history.lost:
            return
        folder, mine = self.rules.servable_model_dir, export.model_id(self._model.model_dir)
        for other, said in export.find(folder, remote_files.names(folder, "servable_model_dir")):
            of_run = said.model_id == mine and said.global_step > self._run_step
            another = posixpath.basename(other) != posixpath.basename(path)
            if of_run and said.kind == "best" and another:
                export.remove(folder, other)

    def _take_stock(self, step):
        """Decides whether to stop early, in all processes alike."""
        mode, history, patience = self._mode, self._history, self.rules.early_stopping_patience
        if not patience:
            return
        stop = int(history.since_best >= patience)
        self.stopped = bool(mode.agree(stop) if mode.synchronous else stop)
        if self.stopped and mode.rank == 0:
            metric = self.rules.best_metric
            logging.info(
                "Stopping early at step %d: %d evaluations since step %d have not been better "
                "(%s %.6f).",
                step, history.since_best, history.best["step"], metric, history.best[metric],
            )  # fmt: skip

    def _decay(self):
        """What the learning rate is to be multiplied by, None where evaluations do not tell."""
        factor = self.rules.learning_rate_decay_on_plateau
        return self._history.decay(factor) if factor < 1 else None


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
