"""GAUC and slices: an evaluation by the values of a field, such as users or places of an ad.

GAUC is the AUC within each value of a field, averaged over the values that occur with both labels,
each weighted by its examples:

    GAUC = sum_u n_u AUC_u / sum_u n_u

where an example of weight 3 counts as three: in n_u, in AUC_u, and in the figures of slices.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018,
https://arxiv.org/abs/1706.06978, section on metrics.

A group is the examples with one value, which is a feature id. Every example is kept until the end,
because only then is a group complete, whichever process has read it: in 12 bytes with one field,
and 4 more if it has a weight.

B: examples in the batch. f: fields asked for. n: examples of the evaluation.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from absl import logging

from deepfm.errors import BadInput
from deepfm.model import metrics
from deepfm.records.raw.names import NO_NAMES
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

MOST = 20  # slices of a field that are listed; the rest are one slice
NONE = -1  # the value of an example whose field is empty
RESULTS = ("gauc", "gauc_groups", "gauc_examples")  # groups with both labels, and their examples
_BLOCK = 1 << 20  # examples that are ranked at once; fewer take less memory
_WORST = 3  # slices that are logged
_CHANCE = 4  # nats by which a slice's predictions may be worse than its rate by chance


class Grouping(NamedTuple):
    """The fields by which an evaluation groups its examples.

    Attributes:
        gauc_field: number of the field whose values GAUC compares within; None: no GAUC.
        slice_fields: numbers of the fields whose largest values have metrics of their own.
    """

    gauc_field: Optional[int] = None
    slice_fields: Tuple[int, ...] = ()

    @property
    def fields(self):
        """All of these fields, each once."""
        asked = () if self.gauc_field is None else (self.gauc_field,)
        return tuple(sorted({*asked, *self.slice_fields}))


def check_fields(asked: Grouping, field_size: int):
    """Refuses (BadInput) fields that the records do not have."""
    for field in asked.fields:
        if field >= field_size:
            flag = "gauc_field" if field == asked.gauc_field else "slice_fields"
            raise BadInput(
                f"--{flag}={field}: the records have {field_size} fields; give a field from 0 to "
                f"{field_size - 1}."
            )


def values_of(features, field_size: int, fields):
    """The value of each example in some fields: the first, if a field has several; NONE if none.

    Args:
        features: as for `network`.
        field_size: F.
        fields: numbers of fields.

    Returns:
        int32 [B, f].
    """
    ids, fields = tf.cast(features["feat_ids"], tf.int32), list(fields)
    if "feat_counts" not in features:
        return tf.gather(tf.reshape(ids, [-1, field_size]), fields, axis=1)
    counts = tf.reshape(features["feat_counts"], [-1, field_size])
    first = tf.gather(tf.cumsum(counts, axis=1, exclusive=True), fields, axis=1)
    chosen = tf.gather(tf.pad(ids, [[0, 0], [0, 1]]), first, batch_dims=1)
    return tf.where(tf.gather(counts, fields, axis=1) > 0, chosen, tf.fill(tf.shape(chosen), NONE))


class Examples:
    """The examples of an evaluation so far.

    Args:
        number: f.
        weighted: whether they have weights.
    """

    def __init__(self, number: int, weighted: bool = False):
        floats = [np.zeros(0, np.float32)] * (1 + weighted)
        empty = np.zeros((0, number), np.int32), np.zeros(0, np.int32), *floats
        self._blocks = [empty]  # the others hold at least _BLOCK examples each
        self._batches, self._rows = [], 0

    def add(self, ids, labels, prob, log_losses, *weights):
        """Adds a batch: ids int32 [B, f], the others float32 [B]; prob is in [0, 1]."""
        # Not negative, so prob's bits are in its order; 1.0 has 30 bits, and only NaN has 31.
        scored = (prob.view(np.int32) << 1 | (labels > 0.5)) & 0x7FFFFFFF
        self._batches.append((ids.copy(), scored, *(x.copy() for x in (log_losses, *weights))))
        self._rows += len(labels)
        if self._rows >= _BLOCK:  # the memory of small arrays is not given back to the system
            self._blocks.append(_joined(self._batches))
            self._batches, self._rows = [], 0

    def state(self):
        """Hands out all examples: ids int32 [n, f], scored int32 [n], log losses float32 [n].

        `scored` is the bits of the float32 prediction, and below them the label. If they have
        weights, these follow, float32 [n].
        """
        blocks = self._blocks + self._batches
        self._blocks, self._batches, self._rows = blocks[:1], [], 0
        return _joined(blocks)


def _joined(blocks):
    """The columns of a list of blocks, which is emptied; no more than one column is held twice."""
    columns = [list(column) for column in zip(*blocks)]
    blocks.clear()
    return [np.concatenate(columns.pop(0)) for _ in range(len(columns))]


def gauc(ids, scored, weights=None) -> Tuple[float, int, int]:
    """GAUC by one field, exact; NaN if no group has both labels.

    Args:
        ids, scored: int32 [n], as of Examples.
        weights: float32 [n], or None.

    Returns:
        In the order of RESULTS; examples count once, whatever they weigh.
    """
    keys = ids.astype(np.int64)
    keys <<= 32
    keys |= scored
    examples, totals, aucs = _aucs(*_in_order(keys, weights))
    both = ~np.isnan(aucs)
    examples, totals, aucs = examples[both], totals[both], aucs[both]
    value = float(np.dot(totals, aucs) / totals.sum()) if len(aucs) else float("nan")
    return value, len(aucs), int(examples.sum())


def slices(ids, scored, log_losses, weights=None) -> List[Dict[str, Any]]:
    """The largest groups of one field, at most MOST, and all other examples as one.

    Args:
        ids, scored: int32 [n]; log_losses: float32 [n]; as of Examples.
        weights: float32 [n], or None.

    Returns:
        For each: value (an id, "none" or "others"), examples (each counts once, whatever it
        weighs), auc, log_loss, calibration, positive_rate; NaN for a figure that is undefined.
    """
    columns = [scored, log_losses] + [weights] * (weights is not None)
    of = lambda rows: _figures(*(column[rows] for column in columns))
    values, examples = np.unique(ids, return_counts=True)
    entries, others = [], np.ones(len(ids), np.bool_)
    for value in values[np.argsort(-examples, kind="stable")[:MOST]]:
        rows = ids == value
        others &= ~rows
        name = "none" if value == NONE else int(value)
        entries.append({"value": name, **of(rows)})
    if others.any():
        entries.append({"value": "others", **of(others)})
    return entries


def _figures(scored, log_losses, weights=None):
    """The figures of a slice, from the columns of its examples."""
    keys, ranked_weights = _in_order(scored.copy(), weights)
    (examples,), (weight,), (auc,) = _aucs(keys.astype(np.int64), ranked_weights)
    total = lambda column: column.sum(dtype=np.float64)
    if weights is not None:
        total = lambda column: np.dot(weights.astype(np.float64), column)
    predicted, positives = total((scored >> 1).view(np.float32)), total(scored & 1)
    return {
        "examples": int(examples),
        "auc": float(auc),
        "log_loss": float(total(log_losses) / weight) if weight else float("nan"),
        "calibration": float(predicted / positives) if positives else float("nan"),
        "positive_rate": float(positives / weight) if weight else float("nan"),
    }


def _in_order(keys, weights):
    """(keys, weights), both by ascending keys, which may be sorted in place."""
    if weights is None:
        keys.sort()
        return keys, None
    order = np.argsort(keys, kind="stable")
    return keys[order], weights[order]


def _aucs(keys, weights):
    """The AUC of each group.

    Args:
        keys: int64 [n], ascending: group << 32 | score << 1 | label.
        weights: float32 [n], or None.

    Returns:
        (examples int64 [groups], the sums of their weights, the AUCs float64 [groups]); NaN for a
        group without both labels.
    """
    parts, start = [], 0
    while start < len(keys):
        last = keys[min(start + _BLOCK, len(keys)) - 1]
        end = np.searchsorted(keys, last | 0xFFFFFFFF, side="right")  # groups stay together
        block = keys[start:end]
        groups, runs = _starts(block >> 32), _starts(block >> 1)  # of equal scores
        weight = 1 if weights is None else weights[start:end].astype(np.float64)
        labels = [np.add.reduceat((block & 1 == label) * weight, runs) for label in (0, 1)]
        firsts, examples = np.searchsorted(runs, groups), np.diff(np.append(groups, len(block)))
        total = np.add.reduceat(sum(labels), firsts)
        parts.append((examples, total, metrics.aucs(*labels, firsts)))
        start = end
    return [np.concatenate(column) for column in zip(*parts)] or [np.zeros(0, np.int64)] * 3


def _starts(numbers):
    """Where runs of equal numbers start; there is at least one number."""
    return np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))


def evaluation_ops(
    asked, ids, labels, logits, prob, gather=lambda tensor, name: tensor, weights=None
):
    """Estimator's eval_metric_ops of GAUC and slices.

    Args:
        asked: Grouping with a field.
        ids: int32 [B, f], the values of its fields.
        labels, logits, prob: float32 [B].
        gather, weights: as for metrics.evaluation_ops.

    Returns:
        {name: (value, update op)}: those of RESULTS, float64 [], with gauc_field; with
        slice_fields `slices`, string [], a Summary with a table for TensorBoard.
    """
    number, more = len(asked.fields), [weights] * (weights is not None)
    examples = Examples(number, weighted=bool(more))
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    add = v1.py_func(examples.add, [ids, labels, prob, losses, *more], [])
    types = [tf.int32, tf.int32, tf.float32, tf.float32]
    state = v1.py_func(examples.state, [], types[: 3 + len(more)])
    parts = ("ids", [None, number]), ("scored", [None]), ("log_losses", [None]), ("weights", [None])
    state = [
        gather(tf.ensure_shape(x, shape), f"groups_{name}")
        for x, (name, shape) in zip(state, parts)
    ]
    entries = []
    v1.add_to_collection(metrics.READ, entries)

    def read(ids, scored, log_losses, weights=None):
        of = lambda field: ids[:, asked.fields.index(field)]
        figures = np.zeros(len(RESULTS))
        if asked.gauc_field is not None:
            figures[:] = gauc(of(asked.gauc_field), scored, weights)
        entries[:] = [
            {"field": field, **of_value}
            for field in dict.fromkeys(asked.slice_fields)
            for of_value in slices(of(field), scored, log_losses, weights)
        ]
        return figures, _table(entries)

    figures, table = v1.py_func(read, state, [tf.float64, tf.string])
    figures, results = tf.ensure_shape(figures, [len(RESULTS)]), {}
    if asked.gauc_field is not None:
        results = {name: (figures[i], add) for i, name in enumerate(RESULTS)}
    if asked.slice_fields:
        results["slices"] = tf.ensure_shape(table, []), add
    return results


def _table(entries) -> bytes:
    """A serialized Summary with slices as a table, which TensorBoard shows under TEXT."""
    from tensorboard.plugins.text import summary

    if not entries:
        return b""
    rows = [list(entries[0]), ["---"] * len(entries[0])]
    as_text = lambda x: f"{x:.6g}" if isinstance(x, float) else str(x)
    rows += [map(as_text, of_value.values()) for of_value in entries]
    return summary.pb("slices", "\n".join(" | ".join(row) for row in rows)).SerializeToString()


def of_report(asked, results, entries, names=NO_NAMES) -> Dict[str, Any]:
    """What report.json says of an evaluation by groups; logs the GAUC and the worst slices.

    Args:
        results: what Estimator returned.
        entries: [{field, and as `slices`}] of all processes.
        names: Names of the fields; if they are known, each entry gets name and category.
    """
    report = {}
    if asked.slice_fields:
        if names.columns:
            words = lambda x: (names.of_field(x["field"]), names.of_value(x["field"], x["value"]))
            entries = [{**x, **dict(zip(["name", "category"], words(x)))} for x in entries]
        _log_worst(entries)
        report["slices"] = entries
    if asked.gauc_field is not None:
        figures = [float(results[RESULTS[0]]), *(int(results[name]) for name in RESULTS[1:])]
        report.update(zip(RESULTS, figures))
        logging.info(
            "GAUC of field %d%s: gauc=%.6f groups=%d examples=%d", asked.gauc_field,
            f", {names.of_field(asked.gauc_field)}" if names.columns else "", *figures,
        )  # fmt: skip
    return report


def _log_worst(entries):
    """Logs the slices whose log loss is most above that of predicting their own rate."""
    above = lambda x: x["log_loss"] - metrics.entropy(x["positive_rate"])
    worse = [x for x in entries if above(x) * x["examples"] > _CHANCE]  # and none that is NaN
    for x in sorted(worse, key=above, reverse=True)[:_WORST]:
        logging.info(
            "Worst slices: %s: log_loss=%.6f, by its own rate %.4f alone %.6f (calibration=%.4f "
            "examples=%d).",
            f"{x['name']}={x['category']}" if "name" in x else f"field {x['field']}: {x['value']}",
            x["log_loss"], x["positive_rate"], metrics.entropy(x["positive_rate"]),
            x["calibration"], x["examples"],
        )  # fmt: skip
