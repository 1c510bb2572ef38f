"""The importance job: how much worse the model predicts if a field's values are permuted.

Permutation importance (Breiman, "Random Forests", Machine Learning 45, 2001, section 10): each
field in turn gives what it holds, ids and values, to another record, drawn at random, while all
else stays, labels and weights too. By how much AUC falls and log loss rises is what the model loses
without that field. Fields that say the same share their importance.

All records are held in memory, and one session computes them once for each field and once as they
are, in the batches of an evaluation: a pass finds what an evaluation of permuted files would.

n: records. F: fields. B: records in a batch. N: values of all records.
"""

import array
import itertools
import time
from typing import Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
from absl import logging

from deepfm import estimators, open_data
from deepfm.data import bad_records, datasets, identity
from deepfm.errors import BadInput
from deepfm.estimators import Model
from deepfm.evaluation import check_defined
from deepfm.model import metrics
from deepfm.plan import Opened, apply_model
from deepfm.runtime import memory
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

_SECONDS = 10  # between two lines
_OF_A_RECORD = 64  # bytes beside its values: label, weight, its place in an order, predictions
_ON_DISK = 5  # bytes of a value in a file that is not compressed, at least: a varint and a float


class Records(NamedTuple):
    """Records in memory.

    Attributes:
        ids: int32 [N], those of the first record's first field first; values: float32 [N].
        counts: int32 [n, F], how many values each field has; None: one each.
        labels: float32 [n].
        weights: float32 [n]; None: examples are not weighted.
    """

    ids: np.ndarray
    values: np.ndarray
    counts: Optional[np.ndarray]
    labels: np.ndarray
    weights: Optional[np.ndarray]


def importance(opened: Opened) -> dict:
    """Finds the importance of each field on --val_data_dir; returns report.importance.json."""
    opened.job.distribution.check_alone(opened.job.task_type)

    def check(data, model):
        if data.pipe:
            raise BadInput("--task_type=importance reads files; start it with input mode File.")
        bad_records.check_first_records(data, estimators.schema(model.config, data))

    data, model = apply_model(opened, "val_data_dir", check)
    data = datasets.count_rows(data)
    config, repeats = model.config, opened.job.importance_repeats
    check_memory(data, config.field_size, config.multi_valued)
    records = _read(model, data)
    (step, whole), *found = estimators.of_checkpoint(
        model, lambda path: _evaluations(model, data, records, path)
    )
    names = open_data.names_of(model.job, config, data)
    entries = []
    for field in range(config.field_size):
        of_field = [results for _, results in found[field * repeats : (field + 1) * repeats]]
        falls = [whole["auc"] - results["auc"] for results in of_field]
        rises = [results["log_loss"] - whole["log_loss"] for results in of_field]
        means = {"auc_drop": np.mean(falls).item(), "log_loss_rise": np.mean(rises).item()}
        of_repeats = {"auc_drops": falls, "log_loss_rises": rises}
        entries.append({"field": field, "name": names.of_field(field), **means, **of_repeats})
    entries.sort(key=lambda x: (np.nan_to_num(-x["auc_drop"]), -x["log_loss_rise"]))
    _log(entries, whole, repeats)
    about = {"validation_data": open_data.described(data), "importance_repeats": repeats}
    return {"global_step": step, "eval": whole, "importance": entries, **about}


def check_memory(data: datasets.DataSet, field_size: int, multi_valued: bool):
    """Refuses (BadInput) records that do not fit into the memory that is free."""
    places = data.rows * field_size
    values = max(places, sum(x.bytes for x in data.files) // _ON_DISK) if multi_valued else places
    needed = (8 * values + 4 * places * multi_valued) * 17 // 16  # arrays grow by a sixteenth
    needed += _OF_A_RECORD * data.rows
    free = memory.available()
    if needed > free:
        raise BadInput(
            f"{data.name}: --task_type=importance holds all {data.rows:,} records in memory, which "
            f"takes {needed / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free; give a part of "
            f"the files, with about {int(data.rows * free / needed * 0.8):,} records."
        )


def _read(model, data) -> Records:
    """The records of a data set."""
    kinds = {"feat_ids": "i", "feat_vals": "f", "feat_counts": "i", "label": "f"}
    columns = {name: array.array(x) for name, x in {**kinds, "example_weights": "f"}.items()}
    for features, labels in estimators.batches(model, data):
        if "feat_counts" in features:
            width = features["feat_ids"].shape[1]
            there = np.arange(width) < features["feat_counts"].sum(axis=1, keepdims=True)
            features.update((x, features[x][there]) for x in ("feat_ids", "feat_vals"))
        for name, block in {**features, "label": labels}.items():  # grows in place, not in a copy
            columns[name].frombytes(block.astype(columns[name].typecode).tobytes())
    ids, values, counts, labels, weights = map(np.asarray, columns.values())
    identity.check_all_read(data.files, data.rows, len(labels))
    counts = counts.reshape(-1, model.config.field_size) if len(counts) else None
    return Records(ids, values, counts, labels, weights if len(weights) else None)


def order(seed: int, field: int, repeat: int, rows: int) -> np.ndarray:
    """The record, int64 [rows], from which each takes what a field holds."""
    return np.random.RandomState([seed, field, repeat]).permutation(rows)


def features_of(
    records: Records, field_size: int, size: int, field: int = 0, moved: Optional[np.ndarray] = None
) -> Iterator[dict]:
    """Yields the features of all records, in batches of `size`.

    Args:
        field, moved: a field, and the record from which each takes it; None: its own.
    """
    if records.counts is not None:
        yield from _features_of_lists(records, size, field, moved)
        return
    columns = [x.reshape(-1, field_size) for x in records[:2]]
    of_field = moved is not None and [column[moved, field] for column in columns]
    for start in range(0, len(records.labels), size):
        rows = slice(start, start + size)
        ids, values = columns[0][rows].astype(np.int64), columns[1][rows].copy()
        if of_field:
            ids[:, field], values[:, field] = of_field[0][rows], of_field[1][rows]
        yield {"feat_ids": ids, "feat_vals": values}


def _features_of_lists(records, size, field, moved):
    """As `features_of`, if a field may hold several values."""
    n = len(records.labels)
    moved = np.arange(n) if moved is None else moved
    ends = np.cumsum(records.counts.sum(axis=1, dtype=np.int64))
    for start in range(0, n, size):
        rows = np.arange(start, min(start + size, n))
        counts, firsts = _places(records.counts, ends, rows)
        of_others = _places(records.counts, ends, moved[rows])
        counts[:, field], firsts[:, field] = (x[:, field] for x in of_others)
        lengths, of_fields = counts.sum(axis=1), counts.ravel()
        # Where each value of the batch is, one after the other.
        before = np.repeat(np.cumsum(of_fields) - of_fields, of_fields)
        places = np.repeat(firsts.ravel(), of_fields) + np.arange(len(before)) - before
        shape = len(rows), lengths.max()
        there = np.arange(shape[1]) < lengths[:, np.newaxis]
        ids, values = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        ids[there], values[there] = records.ids[places], records.values[places]
        yield {"feat_ids": ids, "feat_vals": values, "feat_counts": counts}


def _places(counts, ends, rows):
    """(the counts of some records, the place of the first value of each of their fields)."""
    of_rows = counts[rows]
    through = np.cumsum(of_rows, axis=1, dtype=np.int64)
    return of_rows, ends[rows, np.newaxis] - through[:, -1:] + through - of_rows


def _evaluations(model: Model, data, records: Records, path) -> List[Tuple[int, dict]]:
    """(global step, results) of the records as they are, and of each repeat of each field."""
    job, config = model.job, model.config
    repeats = range(job.importance_repeats)
    passes = [None, *itertools.product(range(config.field_size), repeats)]
    rows, step = len(records.labels), estimators.step_of(path)
    size = job.input.batch_size * estimators.batches_at_once(job.input.batch_size)

    def batches():
        for each in passes:
            moved = each and order(job.input.seed, *each, rows)
            yield from features_of(records, config.field_size, size, each and each[0], moved)

    def input_fn():
        types = {"feat_ids": tf.int64, "feat_vals": tf.float32}
        shapes = dict.fromkeys(types, [None, None if config.multi_valued else config.field_size])
        if config.multi_valued:
            types["feat_counts"], shapes["feat_counts"] = tf.int32, [None, config.field_size]
        return tf.data.Dataset.from_generator(batches, types, shapes).prefetch(4)

    found = []
    with estimators.trained(model) as estimator:
        hooks = estimators.session_hooks(model, path)
        predictions = estimator.predict(input_fn, None, hooks, path, yield_single_examples=False)
        for i in range(len(passes)):
            found.append((step, _results(records, predictions, size)))
            now = time.monotonic()
            if not i:
                check_defined(data, found[0][1], step)
                started = told = now  # the first has begun with the session
            if now - told > _SECONDS:
                told, left = now, (now - started) / i * (len(passes) - i - 1)
                logging.info("Importance: %d of %d passes, %.0f s left.", i + 1, len(passes), left)
    return found


def _results(records, predictions, size):
    """The results of an evaluation of the next predictions of all records."""
    evaluation = metrics.Evaluation(records.weights is not None)
    for start in range(0, len(records.labels), size):
        rows, batch = slice(start, start + size), next(predictions)
        prob = batch["prob"]
        weights = [] if records.weights is None else [records.weights[rows]]
        evaluation.add(records.labels[rows], batch["logits"], prob, prob, *weights)
    results = dict(zip(metrics.RESULTS, evaluation.results().tolist()))
    results.pop("mean_loss")
    return {**results, "examples": int(results["examples"])}


def _log(entries, whole, repeats):
    """Logs the importances as a table."""
    logging.info(
        "Importance on %s examples (auc=%.6f log_loss=%.6f), permuted %s each:",
        f"{whole['examples']:,}", whole["auc"], whole["log_loss"],
        "once" if repeats == 1 else f"{repeats} times",
    )  # fmt: skip
    width = max(len(x["name"]) for x in entries)
    logging.info("%s  AUC falls by  log loss rises by", "field".ljust(width))
    for x in entries:
        name = x["name"].ljust(width)
        logging.info("%s %13.6f %18.6f", name, x["auc_drop"], x["log_loss_rise"])
