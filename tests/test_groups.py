"""GAUC and slices against loops over the groups, over processes, and where they are told."""

import re
import shutil

import numpy as np
import pytest
import sklearn.metrics
from conftest import (
    evaluations,
    example,
    make_records,
    report,
    run_mode,
    run_python,
    run_train,
    small_job,
    small_training,
    write_payloads,
    write_tfrecords,
)

from deepfm.model import groups
from deepfm.records.raw.names import Names
from deepfm.runtime.tf import tf

v1 = tf.compat.v1


def examples(number, users, seed=0, digits=2):
    """(ids, labels, prob, log losses) of some examples; some scores are equal."""
    random = np.random.RandomState(seed)
    ids = random.zipf(1.5, number) % users
    prob = random.rand(number).astype(np.float32).round(digits)
    labels = (random.rand(number) < 0.3 + 0.4 * prob).astype(np.float32)
    p = prob.astype(np.float64).clip(1e-6, 1 - 1e-6)
    return ids.astype(np.int32), labels, prob, -np.log(np.where(labels > 0, p, 1 - p))


def auc_of(labels, prob, weights=None):
    """The AUC of scikit-learn; NaN if a label is missing or weighs nothing."""
    weights = np.ones(len(prob)) if weights is None else weights.astype(np.float64)
    both = all(weights[labels == label].any() for label in (0, 1))
    auc = sklearn.metrics.roc_auc_score
    return auc(labels, prob, sample_weight=weights) if both else float("nan")


def slow_gauc(ids, labels, prob, weights=None):
    """(GAUC, groups, examples), as the paper writes it: each group weighs as much as its examples,
    which are counted as they are."""
    weights = np.ones(len(prob)) if weights is None else weights
    total = weighted = number = count = 0
    for user in sorted(set(ids.tolist())):
        rows = ids == user
        auc = auc_of(labels[rows], prob[rows], weights[rows])
        if not np.isnan(auc):
            number, count = number + 1, count + rows.sum()
            total += weights[rows].sum(dtype=np.float64)
            weighted += weights[rows].sum(dtype=np.float64) * auc
    return (weighted / total if total else float("nan")), number, count


def weighted(number, users, whole=True):
    """The columns of `examples`, and weights, of which many are 0."""
    random = np.random.RandomState(number)
    weights = random.randint(0, 4, number) if whole else random.rand(number) * random.randint(0, 3)
    return (*examples(number, users, seed=number + users), weights.astype(np.float32))


def added(parts, number=1):
    """The state of Examples to which batches were added; with weights if they have five columns."""
    found = groups.Examples(number, weighted=len(parts[0]) == 5)
    for ids, labels, prob, *floats in parts:
        floats = [x.astype(np.float32) for x in floats]
        found.add(ids.reshape(-1, number), labels, prob, *floats)
    return found.state()


def in_parts(columns, sizes):
    cuts = np.cumsum(sizes)
    return list(zip(*(np.split(column, cuts) for column in columns)))


@pytest.mark.parametrize("number, users", [(1, 1), (2, 1), (700, 1), (700, 40), (700, 690)])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize("kind", ["without weights", "whole weights", "any weights"])
def test_gauc_is_that_of_a_loop_over_the_groups(monkeypatch, number, users, block, kind):
    monkeypatch.setattr(groups, "_BLOCK", block)
    columns = weighted(number, users, kind == "whole weights")
    columns = columns[:4] if kind == "without weights" else columns
    ids, scored, _, *weights = added(in_parts(columns, [number // 3]))
    found = groups.gauc(ids[:, 0], scored, *weights)
    wanted = slow_gauc(*columns[:3], *columns[4:])
    assert found[1:] == wanted[1:]
    assert found[0] == pytest.approx(wanted[0], abs=1e-12, nan_ok=True)


def test_groups_of_a_single_label_do_not_count():
    ids = np.int32([1, 1, 2, 2, 3, 3, 3])
    labels = np.float32([0, 0, 1, 1, 0, 1, 1])
    prob = np.float32([0.9, 0.1, 0.2, 0.3, 0.5, 0.4, 0.6])
    ids, scored, _ = added([(ids, labels, prob, prob)])
    assert groups.gauc(ids[:, 0], scored) == (0.5, 1, 3)
    value, number, count = groups.gauc(ids[:4, 0], scored[:4])
    assert np.isnan(value) and (number, count) == (0, 0)
    assert np.isnan(groups.gauc(ids[:0, 0], scored[:0])[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0])
def test_scores_that_hardly_differ_are_told_apart(scale):
    prob = np.float32(scale) * (1 - np.arange(8, dtype=np.float32) * 2**-22)
    assert len(set(prob.tolist())) == 8
    labels = np.float32([0, 1, 1, 0, 1, 0, 0, 1])
    ids, scored, _ = added([(np.zeros(8, np.int32), labels, prob, prob)])
    wanted = sklearn.metrics.roc_auc_score(labels, prob.astype(np.float64) / scale)
    assert groups.gauc(ids[:, 0], scored)[0] == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("make", [examples, weighted])
def test_it_does_not_matter_which_process_reads_the_records_of_a_group(make):
    columns = make(900, 50)
    whole = added([columns])
    shares = [added(in_parts(part, [31, 64])) for part in in_parts(columns, [100, 0, 500])]
    together = [np.concatenate(column) for column in zip(*shares)]
    found, wanted = (groups.gauc(x[0][:, 0], x[1], *x[3:]) for x in (together, whole))
    assert found == (wanted if make == examples else pytest.approx(wanted, abs=1e-12))


@pytest.mark.parametrize("make, size", [(examples, 12), (weighted, 16)])
def test_an_example_takes_12_bytes_with_one_field_and_4_more_with_a_weight(make, size):
    assert sum(column.nbytes for column in added([make(100, 9)])) == 100 * size


def test_slices_are_the_metrics_of_the_largest_groups_and_of_all_others():
    columns = ids, labels, prob, log_losses = examples(3000, 60, digits=3)
    values, counts = np.unique(ids, return_counts=True)
    assert len(values) > groups.MOST + 5
    state = added(in_parts(columns, [700, 13]))
    found = groups.slices(state[0][:, 0], *state[1:])
    assert len(found) == groups.MOST + 1 and found[-1]["value"] == "others"
    named = [entry["value"] for entry in found[:-1]]
    assert counts[np.isin(values, named)].min() >= counts[~np.isin(values, named)].max()
    assert [entry["examples"] for entry in found[:-1]] == sorted(
        counts[np.isin(values, named)], reverse=True
    )
    assert sum(entry["examples"] for entry in found) == 3000
    for entry in found:
        rows = ids == entry["value"] if entry["value"] != "others" else ~np.isin(ids, named)
        assert entry["examples"] == rows.sum()
        assert entry["auc"] == pytest.approx(auc_of(labels[rows], prob[rows]), nan_ok=True)
        assert entry["log_loss"] == pytest.approx(log_losses[rows].mean(), rel=1e-6)
        ratio = prob[rows].mean() / labels[rows].mean() if labels[rows].any() else float("nan")
        assert entry["calibration"] == pytest.approx(ratio, rel=1e-5, nan_ok=True)


def test_the_log_names_the_worst_slices(caplog):
    from absl import logging

    ids, labels, _, _ = examples(3000, 4, seed=1)
    prob = np.full(3000, labels.mean(), np.float32)
    prob[ids == 2] = 1 - 0.9 * labels[ids == 2].mean()  # much too high or too low
    prob[ids == 3] = labels[ids == 3].mean()
    log_losses = -np.log(np.where(labels > 0, prob, 1 - prob))
    state = added([(ids, labels, prob, log_losses)])
    entries = [{"field": 0, **x} for x in groups.slices(state[0][:, 0], *state[1:])]
    entries += [{**entries[0], "field": 1, "examples": 1, "log_loss": 2.0}]  # may be chance
    known = Names(("class", "user"))
    logging.set_verbosity(logging.INFO)
    report = groups.of_report(groups.Grouping(None, (0, 1)), {}, entries, known)
    said = [x.getMessage() for x in caplog.records if "Worst" in x.getMessage()]
    assert said[0].startswith("Worst slices: class=2: log_loss=") and len(said) <= 3
    assert not any("class=3" in x or "user=" in x for x in said)
    assert [x["name"] for x in report["slices"]] == ["class"] * (len(entries) - 1) + ["user"]


def test_few_slices_leave_no_others():
    ids, *figures = added([examples(50, 3)])
    assert {entry["value"] for entry in groups.slices(ids[:, 0], *figures)} == {0, 1, 2}


def test_of_a_field_with_several_values_the_first_counts_and_none_is_a_group_of_its_own():
    counts = np.int32([[1, 2, 0], [0, 0, 0], [0, 1, 3], [2, 0, 1]])
    ids = np.int64([[5, 6, 7, 0], [0, 0, 0, 0], [8, 1, 2, 3], [4, 4, 9, 0]])
    wanted = []
    for row, of_fields in zip(ids.tolist(), counts):
        starts = [of_fields[:f].sum() for f in range(3)]
        wanted.append([row[s] if n else groups.NONE for s, n in zip(starts, of_fields)])
    with tf.Graph().as_default(), v1.Session() as session:
        features = {"feat_ids": tf.constant(ids), "feat_counts": tf.constant(counts)}
        assert session.run(groups.values_of(features, 3, (0, 1, 2))).tolist() == wanted
        assert session.run(groups.values_of(features, 3, (2,))).tolist() == [w[2:] for w in wanted]
        empty = {"feat_ids": tf.constant(ids[:1, :0]), "feat_counts": tf.zeros([1, 3], tf.int32)}
        assert session.run(groups.values_of(empty, 3, (0, 2))).tolist() == [[groups.NONE] * 2]
        plain = {"feat_ids": tf.constant(ids)}
        assert session.run(groups.values_of(plain, 4, (1, 3))).tolist() == ids[:, [1, 3]].tolist()


def test_fields_are_read_once_although_both_flags_name_them():
    assert groups.Grouping(2, (0, 2)).fields == (0, 2)
    assert groups.Grouping().fields == ()


# Weights.


def test_an_example_of_weight_3_counts_in_gauc_and_slices_as_three_do():
    columns = weighted(3000, 60)
    times = columns[4].astype(int)
    ids, scored, log_losses, weights = added([columns])
    same_ids, *same = added([[np.repeat(x, times) for x in columns[:4]]])
    found = groups.gauc(ids[:, 0], scored, weights)
    wanted = groups.gauc(same_ids[:, 0], same[0])
    assert found[:2] == pytest.approx(wanted[:2], abs=1e-12)
    assert (
        found[2]
        < wanted[2]
        == sum(
            times[columns[0] == user].sum()
            for user in set(columns[0].tolist())
            if len(set(columns[1][(columns[0] == user) & (times > 0)].tolist())) == 2
        )
    )
    of_values = {x["value"]: x for x in groups.slices(same_ids[:, 0], *same)}
    entries = groups.slices(ids[:, 0], scored, log_losses, weights)
    assert sum(x["examples"] for x in entries) == 3000  # those of weight 0 too
    compared = [x for x in entries[:-1] if x["value"] in of_values]
    assert len(compared) > 15  # the largest by number, which are not all the largest by weight
    for entry in compared:
        for name in ("auc", "log_loss", "calibration"):
            wanted = of_values[entry["value"]][name]
            assert entry[name] == pytest.approx(wanted, abs=1e-9, nan_ok=True), name


def test_a_group_loses_no_digits_beside_others_that_weigh_more():
    ids, labels, prob, log_losses = examples(300, 3, seed=5)
    light, heavy = np.float32(1e-30), np.float32(1e30)
    weights = np.where(ids == 2, light, heavy) * np.where(labels > 0.5, np.float32(1e-6), 1)
    weights = weights.astype(np.float32)
    keys, scored, log_losses, weights = added([(ids, labels, prob, log_losses, weights)])
    for entry in groups.slices(keys[:, 0], scored, log_losses, weights):
        rows = ids == entry["value"]
        assert entry["auc"] == pytest.approx(auc_of(labels[rows], prob[rows]), abs=1e-9)
    lonely = ids == 2
    keys[keys == 1] = 0  # sorted before the light group
    _, totals, aucs = groups._aucs(
        *groups._in_order(keys[:, 0].astype(np.int64) << 32 | scored, weights)
    )
    assert totals[1] == pytest.approx(weights[lonely].sum(dtype=np.float64), rel=1e-12)
    assert aucs[1] == pytest.approx(auc_of(labels[lonely], prob[lonely]), abs=1e-9)


def test_a_label_that_weighs_nothing_is_not_there():
    ids, labels = np.int32([1, 1, 1, 2, 2]), np.float32([0, 1, 0, 0, 1])
    prob = np.float32([0.5, 0.25, 0.1, 0.3, 0.6])
    weights = np.float32([1, 0, 1, 0, 0])
    ids, scored, log_losses, weights = added([(ids, labels, prob, prob, weights)])
    value, number, count = groups.gauc(ids[:, 0], scored, weights)
    assert np.isnan(value) and (number, count) == (0, 0)
    first, second = groups.slices(ids[:, 0], scored, log_losses, weights)
    assert (first["value"], first["examples"]) == (1, 3)
    assert np.isnan([first["auc"], first["calibration"]]).all()
    assert first["log_loss"] == pytest.approx(0.3)
    assert second["examples"] == 2
    assert np.isnan([second[name] for name in ("auc", "log_loss", "calibration")]).all()


# The program.

FIELDS = "--gauc_field=2", "--slice_fields=0,2,0"  # 0 counts once
ROWS = 700


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a folder of data and a model that was trained with GAUC; the records; standard error)."""
    folder = tmp_path_factory.mktemp("groups")
    write_tfrecords(folder / "train.tfrecords", make_records(2000, seed=1))
    records = make_records(ROWS, seed=2)
    for i, part in enumerate((slice(0, 150), slice(150, 151), slice(151, ROWS))):
        write_tfrecords(folder / f"val-{i}.tfrecords", [column[part] for column in records])
    more = f"--val_data_dir={folder}/val-*", "--learning_rate=0.01", "--best_metric=gauc"
    flags = small_training(folder / "train.tfrecords", folder / "model", "--num_epochs=2", *more)
    done = run_train(*flags, *FIELDS, code=0)
    return folder, records, done.stderr


def evaluate(folder, *flags, mode="local", data="val-*", code=0):
    words = f"--val_data_dir={folder}/{data}", f"--model_dir={folder}/model"
    return run_mode(mode, "--task_type=eval", *words, *flags, code=code)


@pytest.fixture(scope="module")
def predicted(trained):
    folder, _, _ = trained
    run_train(
        "--task_type=infer", f"--infer_data_dir={folder}/val-*", f"--model_dir={folder}/model",
        f"--predictions_file={folder}/prob", code=0,
    )  # fmt: skip
    return np.loadtxt(str(folder / "prob")).astype(np.float32)


def test_the_report_holds_the_gauc_of_the_predictions(trained, predicted):
    folder, (labels, ids, _), said = trained
    found = report(folder / "model")["eval"]
    gauc, number, count = slow_gauc(ids[:, 2], labels, predicted)
    assert found["gauc"] == pytest.approx(gauc, abs=1e-6)
    assert (found["gauc_groups"], found["gauc_examples"]) == (number, count)
    line = f"GAUC of field 2: gauc={found['gauc']:.6f} groups={number} examples={count}"
    assert line in said
    for field in (0, 2):
        of_field = [e for e in found["slices"] if e["field"] == field]
        assert sum(e["examples"] for e in of_field) == ROWS
        for entry in of_field[:-1]:
            rows = ids[:, field] == entry["value"]
            auc = auc_of(labels[rows], predicted[rows])
            wanted = None if np.isnan(auc) else pytest.approx(auc, abs=1e-6)
            assert (entry["examples"], entry["auc"]) == (rows.sum(), wanted)
    total = sum(e["examples"] * e["log_loss"] for e in found["slices"] if e["field"] == 0)
    assert total / ROWS == pytest.approx(found["log_loss"], abs=1e-6)


def test_two_processes_find_what_one_finds(trained):
    folder, _, _ = trained
    evaluate(folder, *FIELDS)
    alone = report(folder / "model", "eval")["eval"]
    evaluate(folder, *FIELDS, mode="horovod")
    together = report(folder / "model", "eval")
    assert together["num_processes"] == 2
    slices, others = together["eval"].pop("slices"), alone.pop("slices")
    assert together["eval"] == pytest.approx(alone, abs=1e-6)
    assert len(slices) == len(others) == 42
    for found, wanted in zip(slices, others):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_the_evaluation_line_is_the_same_and_the_last_with_and_without_groups(trained):
    folder, _, _ = trained
    lines = [evaluate(folder, *flags).stderr.splitlines() for flags in ((), FIELDS)]
    last = [re.sub(r"^\S+ ", "", line[-1]) for line in lines]
    assert last[0] == last[1] and last[0].startswith("Evaluation: step=64 examples=700 auc=0.")
    assert not any("GAUC" in line for line in lines[0])
    assert "GAUC of field 2" in lines[1][-2]


def test_tensorboard_reads_the_gauc_and_the_slices(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, _ = trained
    found = EventAccumulator(str(folder / "model" / "eval"))
    found.Reload()
    entry = evaluations(folder / "model")[-1]
    assert found.Scalars("gauc")[-1].value == pytest.approx(entry["gauc"], abs=1e-6)
    assert found.Scalars("gauc")[-1].step == entry["step"]
    assert "gauc_groups" in found.Tags()["scalars"]
    assert list(found.PluginTagToContent("text")) == ["slices/0"]
    table = found.Tensors("slices/0")[-1].tensor_proto.string_val[0].decode()
    assert table.startswith("field | value | examples | auc")
    assert len(table.splitlines()) == 2 + 42


def test_the_best_checkpoint_may_go_by_gauc(trained):
    folder, _, _ = trained
    history = evaluations(folder / "model")
    best = max(history, key=lambda entry: entry["gauc"])
    assert report(folder / "model")["best"] == best


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--gauc_field=4"], "--gauc_field=4: the records have 4 fields; give a field from 0 to 3"),
        (["--slice_fields=1,9"], "--slice_fields=9: the records have 4 fields; give a field from"),
        (
            ["--gauc_field=-1"],
            "--gauc_field=-1: no feature_map.json of these records lies in their",
        ),
        (["--slice_fields=1,a"], "--slice_fields=a: no feature_map.json of these records lies in"),
    ],
)
def test_a_field_that_does_not_exist_is_refused(trained, flags, said):
    assert said in evaluate(trained[0], *flags, code=2).stderr


def test_training_refuses_them_too(trained, tmp_path):
    flags = small_training(trained[0] / "train.tfrecords", tmp_path / "model")
    for flag, said in (
        ("--gauc_field=4", "give a field from 0 to 3"),
        ("--best_metric=gauc", "--best_metric=gauc needs the field of users: add --gauc_field=N."),
        ("--learning_rate_decay_metric=gauc", "add --gauc_field=N."),
    ):
        done = run_train(*flags, flag, code=2)
        assert said in done.stderr


def test_fields_of_several_values_are_grouped_in_the_program_too(tmp_path):
    random = np.random.RandomState(4)
    counts = random.randint(0, 4, (300, 3))
    ids = [random.randint(1, 9, n.sum()) for n in counts]
    labels = random.randint(0, 2, 300).astype(np.float32)
    columns = zip(labels, ids, map(np.ones_like, ids), counts)
    write_payloads(tmp_path / "a.tfrecords", [example(*record) for record in columns])
    job = small_job(tmp_path / "a.tfrecords", tmp_path / "model", "--gauc_field=1")
    run_train(*job, "--slice_fields=1", "--learning_rate=0.1", code=0)
    infer = "--task_type=infer", f"--infer_data_dir={tmp_path}/a.tfrecords"
    assert run_train(*infer, f"--model_dir={tmp_path}/model").returncode == 0
    prob = np.loadtxt(str(tmp_path / "model/predictions.txt")).astype(np.float32)
    values = np.array([row[n[0]] if n[1] else groups.NONE for row, n in zip(ids, counts)])
    found = report(tmp_path / "model")["eval"]
    wanted = slow_gauc(values, labels, prob)
    assert [found[name] for name in groups.RESULTS] == [pytest.approx(wanted[0]), *wanted[1:]]
    (none,) = [entry for entry in found["slices"] if entry["value"] == "none"]
    assert none["examples"] == (counts[:, 1] == 0).sum()


def test_the_page_of_a_run_shows_its_slices(trained, tmp_path):
    folder, _, _ = trained
    shutil.copytree(str(folder / "model"), str(tmp_path / "model"))
    run_python("scripts/report.py", tmp_path / "model", code=0)
    page = (tmp_path / "model/report/report.html").read_text()
    assert "GAUC" in page
    for field in (0, 2):
        assert f"<h2>Slices by the ids of field {field}</h2>" in page
    assert page.count("<td>others</td>") >= 2
