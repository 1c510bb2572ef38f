"""The evaluations of a run, and what follows from them: the best one, the learning rate, the end.

They are kept in `evaluations.json` in model_dir. What follows is a function of that list alone, so
a run that was interrupted and started again decides as one that was not.
"""

import json
import math
import os
from typing import Any, Dict, List, Optional

import tensorflow as tf

from deepfm import datasets
from deepfm.entry import BadInput

FILE = "evaluations.json"
METRICS = ("auc", "log_loss")  # by which evaluations are compared


class History:
    """The evaluations of a run so far.

    Args:
        model_dir: where they are kept; None in processes that do not keep them.
        metric: of METRICS, by which they are compared.
        after: global step at which the run began; earlier ones are another run's.
        until: global step of the checkpoint that training goes on from; later ones are forgotten.
    """

    def __init__(self, model_dir: Optional[str], metric: str, after: int, until: int):
        self._path = model_dir and os.path.join(model_dir, FILE)
        self._sign = 1 if metric == "auc" else -1
        self._metric = metric
        found = _read(self._path) if self._path else []
        self.entries = [entry for entry in found if after < entry["step"] <= until]

    def add(self, step: int, results: Dict[str, Any]):
        """Takes in an evaluation's results, of which auc and log_loss are kept."""
        entry = {"step": step, **{name: results[name] for name in METRICS}}
        self.entries = [e for e in self.entries if e["step"] < step] + [entry]

    def keep(self, **more):
        """Writes evaluations.json; `more` is noted with the newest one."""
        self.entries[-1].update(more)
        datasets.write_whole(self._path, json.dumps(self.entries, indent=1) + "\n")

    def has(self, step: int) -> bool:
        """Whether there is an evaluation of a step."""
        return any(entry["step"] == step for entry in self.entries)

    @property
    def best(self) -> Optional[Dict[str, Any]]:
        """The first of the best evaluations."""
        return max(self.entries, key=self._goodness, default=None)

    def _goodness(self, entry):
        value = entry[self._metric]  # AUC is NaN where all labels are alike
        return float("-inf") if math.isnan(value) else self._sign * value

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        return len(self.entries) - 1 - self.entries.index(self.best) if self.entries else 0

    def decay(self, factor: float) -> float:
        """The product of `factor` over all evaluations whose AUC was no better than before."""
        decay, best = 1.0, None
        for entry in self.entries:
            if best is not None and entry["auc"] <= best:
                decay *= factor
            best = entry["auc"] if best is None else max(best, entry["auc"])
        return decay


def _read(path) -> List[Dict[str, Any]]:
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path) as f:
        text = f.read()
    try:
        found = json.loads(text)
        for entry in found:
            entry["step"] = int(entry["step"])
            for name in METRICS:
                entry[name] = float(entry[name])
            if not isinstance(entry.get("export", ""), str):
                raise ValueError(f"export is {entry['export']!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: is not a list of evaluations ({error!r}); delete it.") from error
    return found
