"""The evaluations of a run, and what they decide: the best one, the learning rate, the end.

They are kept in `evaluations.json` in model_dir. The decisions depend on that list alone, so an
interrupted and resumed run decides exactly as an uninterrupted one.
"""

import json
import math
import os
from typing import Any, Dict, List, Optional

import tensorflow as tf
from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import refusing
from deepfm.records import atomic_files
from deepfm.runtime import remote_files

FILE = "evaluations.json"
METRICS = "auc", "log_loss", "gauc"  # that are kept; of GAUC, those that were asked for


def value(entry: Dict[str, Any], metric: str) -> float:
    """The value of a metric, one of --best_metric, in an evaluation."""
    if metric == "auc_minus_log_loss":
        return entry["auc"] - entry["log_loss"]
    return entry.get(metric, math.nan)  # an evaluation without --gauc_field has no gauc


def _goodness(entry, metric):
    """A metric's value such that more is better; NaN if it is undefined or unknown."""
    return -value(entry, metric) if metric == "log_loss" else value(entry, metric)


class History:
    """The evaluations of a run so far. Those on other data are kept, but not compared.

    Args:
        job: whose model_dir keeps them, and whose --best_metric compares them.
        after: global step at which the run began; earlier evaluations are another run's.
        until: global step of the checkpoint that training resumes from; later ones are dropped.
        data: fingerprint of the present validation data.
        known: [entries, data] of another process's History, instead of what is kept.

    Attributes:
        entries: the evaluations.
        data: the fingerprint.
        lost: whether there were earlier ones that are unknown now.
    """

    def __init__(
        self, job: JobConfig, after: int, until: int, data: Optional[str] = None, known=None
    ):
        self.job, self._path, self.lost = job, os.path.join(job.model_dir, FILE), False
        if known:
            self.entries, self.data = known
            return
        self.entries, self.data = load(self._path), data
        self.entries = [entry for entry in self.entries if after < entry["step"] <= until]
        made = os.path.isdir(os.path.join(job.model_dir, "eval")) and until > after
        self.lost = made and not tf.io.gfile.exists(self._path)
        if self.lost:
            logging.warning(
                "%s is missing: the earlier evaluations of this run are unknown, so best "
                "model, early stopping and decay on a plateau start over.",
                self._path,
            )
        others = len(self.entries) - len(self._compared)
        if others and not self._compared:
            logging.warning(
                "The validation data changed after %d evaluation%s: best model, early stopping "
                "and decay on a plateau start over.",
                others, "s" * (others > 1),
            )  # fmt: skip

    @property
    def _compared(self):
        """The evaluations on the present data, or without a note of their data (older versions)."""
        return [e for e in self.entries if e.get("data", self.data) == self.data]

    def add(self, step: int, results: Dict[str, Any]):
        """Adds the results of an evaluation; keeps those of METRICS, gauc if there is one."""
        entry = {"step": step, **{name: results[name] for name in METRICS if name in results}}
        if self.data:
            entry["data"] = self.data
        same = self._compared
        before = [e for e in self.entries if e["step"] < step or e not in same]
        self.entries = [*before, entry]

    def keep(self):
        """Writes evaluations.json."""
        atomic_files.write_json(self._path, self.entries)

    def has(self, step: int) -> bool:
        """Whether there is an evaluation of a step on the present data."""
        return any(entry["step"] == step for entry in self._compared)

    @property
    def best(self) -> Optional[Dict[str, Any]]:
        """The best evaluation: the last one that improved on all before it."""
        best, goodness = None, -math.inf
        for entry in self._compared:
            found = _goodness(entry, self.job.best_metric)
            if best is None or found > goodness + self.job.min_improvement:
                best, goodness = entry, -math.inf if math.isnan(found) else found
        return best

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        found = self._compared
        return len(found) - 1 - found.index(self.best) if found else 0

    @property
    def last_gain(self) -> float:
        """By how much the newest evaluation improved the metric; NaN if it is the only one."""
        found = [_goodness(entry, self.job.best_metric) for entry in self._compared[-2:]]
        return found[1] - found[0] if found[1:] else math.nan

    def decay(self) -> float:
        """What the learning rate is multiplied by, but for --min_learning_rate.

        It is --learning_rate_decay_on_plateau for every --learning_rate_decay_patience evaluations
        in a row that did not improve on the best before them on the same data.
        """
        job, rate = self.job, self.job.optimizer.learning_rate
        least = job.min_learning_rate / rate if rate else 0.0
        decay, best, data, waited = 1.0, None, None, 0
        for entry in self.entries:
            if entry.get("data", self.data) != data:
                best, data, waited = None, entry.get("data", self.data), 0
            goodness = _goodness(entry, job.learning_rate_decay_metric)
            if math.isnan(goodness):
                continue
            improved = best is None or goodness > best + job.min_improvement
            waited = 0 if improved else waited + 1
            if waited == job.learning_rate_decay_patience:
                lower = decay * job.learning_rate_decay_on_plateau
                decay, waited = max(lower, min(least, decay)), 0
            best = goodness if improved else best
        return decay


def load(path: str) -> List[Dict[str, Any]]:
    """The evaluations in a file, oldest first; none if it is missing."""
    if not tf.io.gfile.exists(path):
        return []
    with refusing(f"{path} is not a list of evaluations", "delete it"):
        entries = json.loads(remote_files.content(path).decode())
        for entry in entries:
            entry["step"] = int(entry["step"])
            for name in {"auc", "log_loss"} | (set(METRICS) & set(entry)):
                entry[name] = float("nan" if entry[name] is None else entry[name])
            if not isinstance(entry.get("data", ""), str):
                raise ValueError(f"data is {entry['data']!r}")
    return entries
