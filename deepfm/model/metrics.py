"""Exact AUC, log loss and calibration, accumulated over batches of any size.

Scores are kept exactly (8 bytes per example; equal scores merged). `tf.metrics.auc` sorts them into
200 buckets instead, and its result is wrong if all predictions are near 0.
"""

import math
from typing import Dict, List

import numpy as np

from deepfm.runtime.tf import tf

v1 = tf.compat.v1

SATURATED = math.log(1e7)  # the size of a logit whose prediction is 0 or 1 to seven digits
SHARES = 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9  # thresholds in a report
LIMIT = 1 << 24  # distinct scores that are kept exactly; with more, neighbours are merged


class Evaluation:
    """The sums of an evaluation so far. Two can be merged, so several processes can share one.

    If it is `weighted`, an example of weight 3 counts as three do.
    """

    def __init__(self, weighted: bool = False):
        self._scores = np.zeros(0, np.float32)  # distinct, ascending
        # The number of labels 0 and 1 at each score, or the sums of their weights.
        self._counts = np.zeros((0, 2), np.float64 if weighted else np.int64)
        self._pending = []
        self._pending_rows = 0
        # Examples; weights, and weighted labels, probabilities, log losses and losses.
        self._sums = np.zeros(6)

    def add(self, labels, logits, prob, losses, weights=None):
        """Adds a batch; each argument is float32 [B], weights only if this Evaluation has them."""
        x, y = logits.astype(np.float64), labels.astype(np.float64)
        # log(1 + e^-|x|) + max(x, 0) - x y, which never overflows
        log_losses = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0) - x * y
        weight, total = len(y), lambda x: x.sum(dtype=np.float64)
        if weights is not None:
            weights = weights.astype(np.float64)
            weight, total = weights.sum(), lambda x: np.dot(weights, x)
        self._sums += (len(y), weight, *map(total, (y, prob, log_losses, losses)))
        self._pending.append((prob.copy(), labels > 0.5, weights))
        self._pending_rows += len(y)
        if self._pending_rows >= LIMIT:
            self._compact()

    def state(self):
        """The sums so far: (scores float32 [n], counts int64 [n, 2], sums float64 [1, 6]).

        With weights counts are float64.
        """
        self._compact()
        return self._scores, self._counts, self._sums[np.newaxis]

    def merge(self, scores, counts, sums):
        """Adds the states of other Evaluations, concatenated along their first axes."""
        self._compact()
        self._sums = self._sums + sums.sum(axis=0)
        self._combine(scores, counts)

    def _compact(self):
        if not self._pending:
            return
        scores, positive, weights = zip(*self._pending)
        scores, positive = np.concatenate(scores), np.concatenate(positive).astype(np.int64)
        counts = np.stack([1 - positive, positive], axis=1)
        if weights[0] is not None:
            weights = np.concatenate(weights)
            counts = (counts * weights[:, np.newaxis])[weights > 0]
            scores = scores[weights > 0]
        self._pending, self._pending_rows = [], 0
        self._combine(scores, counts)

    def _combine(self, scores, counts):
        scores = np.concatenate([self._scores, scores])
        counts = np.concatenate([self._counts, counts])
        order = np.argsort(scores, kind="stable")
        scores, counts = scores[order], counts[order]
        starts = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
        if len(starts) > LIMIT:
            starts = starts[::2]
        if len(scores):
            self._scores, self._counts = scores[starts], np.add.reduceat(counts, starts)

    def auc(self) -> float:
        """As `aucs`, exact up to LIMIT distinct scores."""
        self._compact()
        none = not len(self._counts)
        return math.nan if none else float(aucs(*self._counts.T, np.zeros(1, np.int64))[0])

    def roc(self, points: int = 200) -> List[List[float]]:
        """The ROC curve: [share of negatives, share of positives] above ever lower thresholds.

        From [0, 0] to [1, 1] through at most `points` others; empty if a class is missing.
        """
        above = self._above(points)
        if not len(above) or not above[-1].all():
            return []
        return [[0.0, 0.0]] + _rounded(above / above[-1])

    def precision_recall(self, points: int = 200) -> List[List[float]]:
        """The precision-recall curve: [recall, precision] above ever lower thresholds.

        Through at most `points` + 1 thresholds, down to recall 1; empty without positives.
        """
        above = self._above(points)
        if not len(above) or not above[-1, 1]:
            return []
        positives, examples = above[:, 1], above.sum(axis=1)
        return _rounded(np.stack([positives / positives[-1], positives / examples], axis=1))

    def _above(self, points=None):
        """[n, 2], the negatives and the positives above at most `points` + 1 thresholds, or all."""
        self._compact()
        above = np.cumsum(self._counts[::-1], axis=0)
        if points is None or not len(above):
            return above
        return above[np.unique(np.linspace(0, len(above) - 1, points + 1).astype(np.int64))]

    def saturated(self) -> float:
        """The share of the examples, by weight, whose prediction is 0 or 1 to seven digits."""
        self._compact()
        extreme = np.abs(self._scores.astype(np.float64) - 0.5) > 0.5 - 1e-7
        return float(self._counts[extreme].sum() / (self._counts.sum() or 1))

    def deciles(self) -> List[Dict[str, float]]:
        """Ten groups of equal size, by ascending prediction; equal predictions stay together.

        Returns:
            For each: examples (the sum of their weights), the mean prediction, and the share of
            positives.
        """
        self._compact()
        examples = self._counts.sum(axis=1)
        before = np.cumsum(examples) - examples
        # A score belongs to the group that holds the middle one of its examples.
        group = (10 * (before + examples / 2) / (examples.sum() or 1)).astype(np.int64)
        group = np.minimum(group, 9)  # rounding may reach 10
        found = []
        for i in np.unique(group):
            counts, scores = self._counts[group == i], self._scores[group == i]
            rows = counts.sum().item()
            mean = float(np.dot(counts.sum(axis=1), scores.astype(np.float64)) / rows)
            share = float(counts[:, 1].sum() / rows)
            found.append({"examples": rows, "prediction": mean, "positives": share})
        return found

    def thresholds(self) -> List[Dict[str, float]]:
        """What predicting 1 from a threshold on would mean, for some thresholds, descending.

        Returns:
            For each: threshold; share, that of the examples at or above it, by weight; precision
            and recall. They are SHARES of the examples, as far as equal predictions allow, and 0.5.
        """
        above, scores = self._above(), self._scores[::-1]
        if not len(above) or not above[-1, 1]:
            return []
        positives, examples = above[:, 1], above.sum(axis=1)
        figures = {"threshold": scores, "share": examples / examples[-1]}
        figures.update(precision=positives / examples, recall=positives / positives[-1])
        shares = np.searchsorted(figures["share"], SHARES)
        chosen = np.unique([*shares, np.sum(scores >= 0.5) - 1])
        return [{name: float(x[i]) for name, x in figures.items()} for i in chosen[chosen >= 0]]

    def curves(self) -> dict:
        """The curves in report.json: ROC, precision and recall, thresholds, and calibration by
        decile."""
        return {
            "roc": self.roc(), "precision_recall": self.precision_recall(),
            "thresholds": self.thresholds(), "deciles": self.deciles(),
        }  # fmt: skip

    def results(self):
        """float64 [6], in the order of RESULTS; NaN for a figure that is undefined."""
        examples, weight, labels, probabilities, log_loss, loss = self._sums
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = np.array([log_loss, probabilities, loss, labels])
            means = sums / [weight, labels, weight, weight]
        return np.concatenate([[self.auc()], means, [examples]])


def aucs(negatives, positives, firsts):
    """The area under the ROC curve of each group: P(score of a positive > of a negative).

    A tie counts half: it is the Mann-Whitney U statistic over the product of the class sizes.

    Args:
        negatives, positives: [n], int64 or float64: the number of labels 0 and 1, or the sums of
            their weights, at each distinct score, ascending within a group.
        firsts: int64 [groups], where each group begins.

    Returns:
        float64 [groups]; NaN for a group without both labels.
    """
    along = lambda of_groups: np.repeat(of_groups, np.diff(np.append(firsts, len(negatives))))
    whole = [np.add.reduceat(x, firsts) for x in (negatives, positives)]
    pairs = 1.0 * whole[0] * whole[1]
    both = pairs > 0
    if negatives.dtype.kind == "f" or pairs.max() > 1 << 61:
        # As shares, which leaves an AUC as it is, sums over groups lose no digits, however much
        # other groups weigh.
        negatives, positives = (
            x / along(np.where(total > 0, total, 1))
            for x, total in zip((negatives, positives), whole)
        )
        both, pairs = (whole[0] > 0) & (whole[1] > 0), np.ones(len(firsts))
    upto = np.cumsum(negatives)
    upto -= along((upto - negatives)[firsts])
    twice = np.add.reduceat(positives * (2 * upto - negatives), firsts)
    return np.divide(twice, 2 * pairs, out=np.full(len(firsts), math.nan), where=both)


def entropy(rate: float) -> float:
    """The log loss of predicting the share of positives, `rate`, for every example."""
    return sum(-p * math.log(p) for p in (rate, 1 - rate) if p)


def _rounded(curve):
    return [[round(float(x), 6) for x in point] for point in curve]


class Read(v1.train.SessionRunHook):
    """Holds what a session of evaluation has read, of all processes, once it has ended.

    Attributes:
        lists: [the Evaluation], and with groups.evaluation_ops the slices.
    """

    def begin(self):
        self.lists = v1.get_collection(READ)


READ = "deepfm_evaluation"  # collection: lists that receive what is read at the end

# calibration: mean prediction / mean label; mean_loss: the --loss_type, without L2; positive_rate:
# the mean label
RESULTS = ("auc", "log_loss", "calibration", "mean_loss", "positive_rate", "examples")


def evaluation_ops(labels, logits, prob, losses, gather=lambda tensor, name: tensor, weights=None):
    """Estimator's eval_metric_ops: they add every batch to one Evaluation and read it at the end.

    Args:
        labels, logits, prob, losses: float32 [B].
        gather: (tensor, name) -> those of all processes, along the first axis; all must read.
        weights: float32 [B], the weight of each example; None: all weigh 1.

    Returns:
        {name of RESULTS: (value float64 [], update op)}.
    """
    weighted = weights is not None
    evaluation = Evaluation(weighted)
    batch = [labels, logits, prob, losses] + [weights] * weighted
    add = v1.py_func(evaluation.add, batch, [])
    counted = tf.float64 if weighted else tf.int64
    state = v1.py_func(evaluation.state, [], [tf.float32, counted, tf.float64])
    parts = ("scores", [None]), ("counts", [None, 2]), ("sums", [1, 6])
    state = [gather(tf.ensure_shape(x, shape), name) for x, (name, shape) in zip(state, parts)]

    read_so_far = []
    v1.add_to_collection(READ, read_so_far)

    def read(*whole):
        everyones = Evaluation(weighted)
        everyones.merge(*whole)
        read_so_far[:] = [everyones]
        return everyones.results()

    results = tf.ensure_shape(v1.py_func(read, state, tf.float64), [len(RESULTS)])
    return {name: (results[i], add) for i, name in enumerate(RESULTS)}
