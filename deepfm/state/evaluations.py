"""The evaluations of a run, and what they decide: the best one, the learning rate, the end.

They are kept in `evaluations.json` in model_dir. The decisions depend on that list alone, so an
interrupted and resumed run decides exactly as an uninterrupted one. Of earlier runs, the list keeps
the first and the last evaluation of each day, which decide nothing.
"""

import json
import math
import os
from typing import Any, Dict, List, Optional

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import refusing
from deepfm.records import atomic_files
from deepfm.records.storage.places import of as files_at
from deepfm.runtime.tf import tf

FILE = "evaluations.json"
METRICS = "auc", "log_loss", "gauc"  # that are kept; of GAUC, those that were asked for


def about(ids: Optional[Dict[str, Any]], feature_size: int, move) -> Dict[str, Any]:
    """What evaluations say of the day of data, whose dataset.json has these `ids`; {} without one.

    Args:
        move: the moving.Move of the rows to that day; None: it had been made before.
    """
    if "day" not in (ids or {}):
        return {}
    new = {"new": int(move.new.sum()), "gone": move.gone} if move else {}
    return {"day": ids["day"], "feature_size": feature_size, **new}


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
        about: what each entry of this run says besides, such as its day.

    Attributes:
        entries: the evaluations.
        earlier: those of the days of earlier runs.
        data: the fingerprint.
        lost: whether there were earlier ones that are unknown now.
    """

    def __init__(
        self, job: JobConfig, after: int, until: int, data: Optional[str] = None, known=None,
        about: Optional[Dict[str, Any]] = None,
    ):  # fmt: skip
        self.job, self._path, self.lost = job, os.path.join(job.model_dir, FILE), False
        self.earlier, self._about = [], about or {}
        if known:
            self.entries, self.data = known
            return
        kept, self.data = load(self._path), data
        own = lambda e: after < e["step"] <= until or e["step"] == after and e.get("first")
        self.entries = list(filter(own, kept))
        days = {(e["day"], bool(e.get("first"))): e for e in kept if "day" in e and not own(e)}
        self.earlier = [e for e in days.values() if e["step"] <= after]
        made = os.path.isdir(os.path.join(job.model_dir, "eval")) and until > after
        self.lost = made and not tf.io.gfile.exists(self._path)
        if self.lost:
            logging.warning(
                "%s is missing: the earlier evaluations of this run are unknown, so best "
                "model, early stopping and decay on a plateau start over.",
                self._path,
            )
        others = sum(not e.get("first") for e in self.entries) - len(self._compared)
        if others and not self._compared:
            logging.warning(
                "The validation data changed after %d evaluation%s: best model, early stopping "
                "and decay on a plateau start over.",
                others, "s" * (others > 1),
            )  # fmt: skip

    @property
    def _compared(self):
        """The evaluations on the present data, or without a note of their data (older versions)."""
        found = (e for e in self.entries if not e.get("first"))
        return [e for e in found if e.get("data", self.data) == self.data]

    def add(self, step: int, results: Dict[str, Any], first: bool = False):
        """Adds the results of an evaluation; keeps those of METRICS, gauc if there is one.

        Args:
            first: whether it is of the training data before the first step, and decides nothing.
        """
        entry = {"step": step, **{name: results[name] for name in METRICS if name in results}}
        entry.update(self._about)
        if first:
            self.entries = [*self.entries, {**entry, "first": True}]
            return
        if self.data:
            entry["data"] = self.data
        same = self._compared
        before = [e for e in self.entries if e["step"] < step or e not in same]
        self.entries = [*before, entry]

    def keep(self):
        """Writes evaluations.json."""
        atomic_files.write_json(self._path, [*self.earlier, *self.entries])

    @property
    def judged(self) -> bool:
        """Whether there is an evaluation from before the first step."""
        return any(entry.get("first") for entry in self.entries)

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
        """By how much the newest evaluation is better than all before; NaN if it is alone."""
        found = [_goodness(entry, self.job.best_metric) for entry in self._compared]
        return found[-1] - max(found[:-1]) if found[1:] else math.nan

    def decay(self) -> float:
        """What the learning rate is multiplied by, but for --min_learning_rate.

        It is --learning_rate_decay_on_plateau for every --learning_rate_decay_patience evaluations
        in a row that did not improve on the best before them on the same data.
        """
        job, rate = self.job, self.job.optimizer.learning_rate
        least = job.min_learning_rate / rate if rate else 0.0
        decay, best, data, waited = 1.0, None, None, 0
        for entry in (e for e in self.entries if not e.get("first")):
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
        entries = json.loads(files_at(path).content(path).decode())
        if not isinstance(entries, list):
            raise ValueError("no list")
        for entry in entries:
            entry["step"] = int(entry["step"])
            for name in {"auc", "log_loss"} | (set(METRICS) & set(entry)):
                entry[name] = float("nan" if entry[name] is None else entry[name])
            if not isinstance(entry.get("data", ""), str):
                raise ValueError(f"data is {entry['data']!r}")
    return entries
