"""The importance job against an evaluation of files whose records were permuted by hand."""

import json

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    encoded,
    example,
    make_records,
    report,
    run_train,
    small_training,
    write_payloads,
    write_tfrecords,
)

from data_tools.common import planted_model
from deepfm import importance
from deepfm.data.datasets import DataSet
from deepfm.errors import BadInput
from deepfm.model.metrics import Evaluation
from deepfm.records.data_file import DataFile
from deepfm.runtime import memory

FIELDS, SEED, ROWS = 4, 3, 701


def lists(rows, seed):
    """[(label, ids of each field, values of each field, weight)], with 0 to 3 values a field."""
    random = np.random.RandomState(seed)
    records = []
    for _ in range(rows):
        counts = random.randint(0, 4, FIELDS)
        ids = [random.randint(1, 50, n).tolist() for n in counts]
        values = [random.rand(n).tolist() for n in counts]
        label = float(random.rand() < 1 / (1 + np.exp(-np.sin([sum(x) for x in ids]).sum())))
        records.append((label, ids, values, float(random.randint(0, 4))))
    return records


def single(rows, seed):
    """The same, with one value a field and no weights."""
    columns = make_records(rows, FIELDS, seed=seed)
    return [
        (y, [[i] for i in ids], [[x] for x in values], None) for y, ids, values in zip(*columns)
    ]


def write(path, records):
    payloads = []
    for label, ids, values, weight in records:
        counts = [len(x) for x in ids] if weight is not None else None
        payloads.append(example(label, sum(ids, []), sum(values, []), counts, weight))
    write_payloads(path, payloads)


def permuted(records, field, moved):
    """The records, of which each has in a field what another one had there."""
    swap = lambda mine, others: [*mine[:field], others[field], *mine[field + 1 :]]
    return [
        (label, swap(ids, records[i][1]), swap(values, records[i][2]), weight)
        for i, (label, ids, values, weight) in zip(moved, records)
    ]


@pytest.fixture(scope="module", params=[single, lists])
def trained(request, tmp_path_factory):
    """(a folder of data and a model, the records to evaluate on)."""
    folder = tmp_path_factory.mktemp("importance")
    write(folder / "train.tfrecords", request.param(1500, 1))
    records = request.param(ROWS, 2)
    write(folder / "val.tfrecords", records)
    run_train(
        *SMALL_MODEL, f"--training_data_dir={folder}/train.tfrecords", "--batch_size=64",
        f"--model_dir={folder}/model", "--num_epochs=3", "--learning_rate=0.02", code=0,
    )  # fmt: skip
    return folder, records


def apply(folder, task, data, *flags, code=0):
    words = f"--val_data_dir={data}", f"--model_dir={folder}/model", "--batch_size=64"
    return run_train(f"--task_type={task}", *words, *flags, code=code)


def test_it_is_what_evaluations_of_permuted_files_find(trained, tmp_path):
    folder, records = trained
    repeats = 2
    flags = f"--seed={SEED}", f"--importance_repeats={repeats}"
    done = apply(folder, "importance", folder / "val.tfrecords", *flags)
    found = report(folder / "model", "importance")
    apply(folder, "eval", folder / "val.tfrecords")
    whole = report(folder / "model", "eval")["eval"]
    assert found["eval"] == pytest.approx({k: whole[k] for k in found["eval"]}, abs=1e-9)
    of_fields = {x["field"]: x for x in found["importance"]}
    for field, repeat in [(0, 1), (3, 0)]:
        moved = importance.order(SEED, field, repeat, ROWS)
        write(tmp_path / "permuted.tfrecords", permuted(records, field, moved))
        apply(folder, "eval", tmp_path / "permuted.tfrecords")
        wanted = report(folder / "model", "eval")["eval"]
        entry = of_fields[field]
        drop, rise = entry["auc_drops"][repeat], entry["log_loss_rises"][repeat]
        assert whole["auc"] - drop == pytest.approx(wanted["auc"], abs=1e-9)
        assert whole["log_loss"] + rise == pytest.approx(wanted["log_loss"], abs=1e-9)
    for entry in found["importance"]:
        assert entry["auc_drop"] == pytest.approx(np.mean(entry["auc_drops"]))
        assert len(entry["log_loss_rises"]) == repeats
        assert f"field {entry['field']}" in done.stderr
    drops = [entry["auc_drop"] for entry in found["importance"]]
    assert drops == sorted(drops, reverse=True) and drops[0] > 0.005


def test_the_seed_decides_and_every_record_gives_its_value_once():
    orders = [importance.order(*arguments, 50) for arguments in ((1, 0, 0), (1, 0, 1), (2, 0, 0))]
    assert all(sorted(x) == list(range(50)) for x in orders)
    assert len({tuple(x) for x in orders}) == 3
    assert (importance.order(1, 0, 0, 50) == orders[0]).all()


def test_it_runs_in_one_process_alone(trained):
    said = "--task_type=importance runs in one process, with one replica; give --distribution=local"
    folder, _ = trained
    done = apply(folder, "importance", folder / "val.tfrecords", "--distribution=tower", code=2)
    assert said in done.stderr


def test_records_that_the_memory_does_not_hold_are_refused_before_they_are_read(monkeypatch):
    data = DataSet([DataFile("missing.tfrecords", 10**9, 10**7, 5)], "tfrecord", 39, 50, name="D")
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    said = "D: .* holds all 10,000,000 records in memory, .* 1.0 GB"
    for multi_valued in (False, True):
        with pytest.raises(BadInput, match=said):
            importance.check_memory(data, 39, multi_valued)
    monkeypatch.setattr(memory, "available", lambda: 10**7 * 12 * 39)
    importance.check_memory(data, 39, False)


# Against the planted probabilities of synthetic data.

_TRAIN, _VAL, _PASSES = 12, 2, 5  # blocks, blocks, repeats


def blocks(model, split, number):
    """(ids, values, labels) of the first blocks of a split."""
    drawn = [planted_model.draw_block(model, SEED, split, i) for i in range(number)]
    ids, values, _, labels = (np.concatenate(column) for column in zip(*drawn))
    return ids, values, labels.astype(np.float32)


def auc(labels, prob):
    evaluation = Evaluation()
    zeros = np.zeros(len(labels), np.float32)
    evaluation.add(labels, zeros, prob.astype(np.float32), zeros)
    return evaluation.auc()


def planted_drops(model, ids, values, labels):
    """[F, repeats]: the falls of AUC of the planted probabilities, by the same permutations."""
    whole = auc(labels, planted_model.true_probability(model, ids, values))
    drops = np.zeros([ids.shape[1], _PASSES])
    for field, repeat in np.ndindex(*drops.shape):
        moved = importance.order(SEED, field, repeat, len(ids))
        own = ids[:, field].copy(), values[:, field].copy()
        ids[:, field], values[:, field] = own[0][moved], own[1][moved]
        prob = planted_model.true_probability(model, ids, values)
        drops[field, repeat] = whole - auc(labels, prob)
        ids[:, field], values[:, field] = own
    return drops


def test_fields_are_in_the_order_of_the_planted_model(tmp_path):
    shape = planted_model.Shape(8, 2, 300)
    model = planted_model.make_planted_model(SEED, shape)
    for split, number in (("train", _TRAIN), ("val", _VAL)):
        ids, values, labels = blocks(model, split, number)
        write_payloads(tmp_path / f"{split}.tfrecords", encoded(labels, ids, values))
    run_train(
        f"--training_data_dir={tmp_path}/train.tfrecords", f"--model_dir={tmp_path}/model",
        "--feature_size=300", "--batch_size=256", "--num_epochs=2", "--embedding_size=8",
        "--deep_layers=32", "--dropout=0", "--learning_rate=0.003", code=0,
    )  # fmt: skip
    flags = f"--seed={SEED}", f"--importance_repeats={_PASSES}"
    apply(tmp_path, "importance", tmp_path / "val.tfrecords", *flags)
    of_fields = {x["field"]: x for x in report(tmp_path / "model", "importance")["importance"]}
    found = np.array([of_fields[field]["auc_drops"] for field in range(8)])
    wanted = planted_drops(model, ids, values, labels)
    first = lambda drops, a, b: drops[a].mean() > drops[b].mean()
    agree = [
        first(found, a, b) == first(wanted, a, b)
        for a, b in zip(*np.triu_indices(8, 1))
        if all(apart(drops[a], drops[b]) for drops in (found, wanted))
    ]
    assert len(agree) >= 15  # of 28 pairs of fields
    assert 2 * np.mean(agree) - 1 >= 0.9  # Kendall's tau


def apart(one, other):
    """Whether the intervals of two means, of two standard errors, do not overlap."""
    half = lambda x: 2 * x.std(ddof=1) / np.sqrt(len(x))
    return abs(one.mean() - other.mean()) > half(one) + half(other)


def test_the_report_has_null_where_a_figure_is_undefined(tmp_path):
    labels, ids, values = make_records(100)
    data = write_tfrecords(tmp_path / "a.tfrecords", (labels, ids, values))
    run_train(*small_training(data, tmp_path / "model"), code=0)
    ones = write_tfrecords(tmp_path / "ones.tfrecords", (np.ones_like(labels), ids, values))
    done = apply(tmp_path, "importance", ones)
    assert "so the AUC" in done.stderr or "AUC is undefined" in done.stderr
    text = (tmp_path / "model" / "report.importance.json").read_text()
    entry = json.loads(text)["importance"][0]
    assert "NaN" not in text and entry["auc_drop"] is None and entry["log_loss_rise"] is not None
