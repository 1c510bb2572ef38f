"""An example of weight 3 counts as three: in loss, gradients and batch norm."""

import numpy as np
import pytest
from conftest import (
    both_ops,
    go_back,
    job_of,
    make_records,
    mode_of,
    report,
    run_mode,
    run_train,
    scalars,
    write_payloads,
    write_tfrecords,
)
from mode_steps import check_same
from mode_steps import weights as checkpoint
from test_batch_norm import EPSILON
from test_model import config, named, numeric_gradient, numpy_logits, run_step
from test_modes_agree import dealt
from test_pipe_mode import channels  # noqa: F401  a fixture
from test_weighted_records import weighted_example

from deepfm.config import InputConfig
from deepfm.kernels.ops import TENSORFLOW
from deepfm.modes.common.mode import Mode
from deepfm.plan import Opened, apply_model
from deepfm.records.tfrecord import framed
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
F, V, B = 4, 12, 9


def examples(seed=0):
    """(ids [B, F], values [B, F], labels [B], weights [B])."""
    random = np.random.RandomState(seed)
    ids = random.randint(0, V, size=(B, F)).astype(np.int64)
    weights = np.float32([1, 3, 2, 1, 0, 2, 1, 3, 1])
    values = random.randn(B, F).astype(np.float32)
    return ids, values, (random.rand(B) > 0.5).astype(np.float32), weights


def repeated(ids, values, labels, weights):
    """Each example as often as it weighs, without weights."""
    return (*(np.repeat(x, weights.astype(int), axis=0) for x in (ids, values, labels)), None)


def step(batch, ops=TENSORFLOW, **changes):
    """(weights before, the gradients as a step of SGD shows them, the loss, moving averages)."""
    given = named(*batch[:3], example_weights=batch[3])
    before, after, loss, _ = run_step(config(**changes), given, ops=ops)
    moved = {name: x for name, x in after.items() if "moving" in name}
    found = {name: before[name] - after[name] for name in set(after) - set(moved)}
    return before, found, loss, moved


def by_the_paper(w, ids, values, labels, weights, batch_norm):
    """sum(weights * log loss) / sum(weights), with batch norm's weighted moments, in float64."""
    share = (weights / weights.sum())[:, np.newaxis]

    def normalize(hidden, i):
        mean = (share * hidden).sum(axis=0)
        variance = (share * (hidden - mean) ** 2).sum(axis=0)
        hidden = (hidden - mean) / np.sqrt(variance + EPSILON)
        return hidden * w[f"batch_norm_{i}/gamma"] + w[f"batch_norm_{i}/beta"]

    how = {"normalize": normalize} if batch_norm else {}
    logits = numpy_logits(w, ids, values, **how)
    return np.sum(share[:, 0] * (np.logaddexp(0, logits) - labels * logits))


@both_ops
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_step_follows_the_gradient_of_the_weighted_mean(batch_norm, ops):
    batch = examples()
    before, found, loss, _ = step(batch, ops, batch_norm=batch_norm)
    before = {name: x.astype(np.float64) for name, x in before.items()}
    in_double = [x.astype(np.float64) if x.dtype == np.float32 else x for x in batch]
    expected = lambda w: by_the_paper(w, *in_double, batch_norm)
    assert loss == pytest.approx(expected(before), rel=1e-5)
    for name, gradient in found.items():
        wanted = numeric_gradient(expected, before, name)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"batch_norm": True}, {"loss_type": "square_loss"}])
def test_weight_3_is_the_example_three_times(changes):
    batch = examples()
    _, found, loss, moved = step(batch, **changes)
    _, wanted, same_loss, also_moved = step(repeated(*batch), **changes)
    assert loss == pytest.approx(same_loss, rel=1e-6)
    found, wanted = {**found, **moved}, {**wanted, **also_moved}
    for name, expected in wanted.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_weights_leave_l2_as_it_is():
    batch = examples()
    changes = dict(l2_reg=0.3, l2_scope="table")
    heavier = (*batch[:3], 5 * batch[3])
    (_, found, loss, _), (_, wanted, same_loss, _) = (step(x, **changes) for x in (heavier, batch))
    assert loss == pytest.approx(same_loss, rel=1e-6)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_batch_that_weighs_nothing_has_no_loss_and_no_gradient(batch_norm):
    before, found, loss, moved = step(
        (*examples()[:3], np.zeros(B, np.float32)), batch_norm=batch_norm
    )
    assert loss == 0
    for name, gradient in found.items():
        assert not gradient.any(), name
    for name, average in moved.items():
        np.testing.assert_array_equal(average, before[name], err_msg=name)


# Whole runs.

GLOBAL_BATCH, ROWS = 24, 5 * 24 + 13
WEIGHTS = np.resize(np.repeat(np.float32([1, 2, 3]), 8), ROWS)  # no two halves weigh the same
FLAGS = (
    "--embedding_size=4", "--deep_layers=8,4", "--feature_size=50", "--shuffle_buffer=0",
    "--num_parallel_reads=1", "--log_steps=1", "--dropout=0", "--embedding_init_stddev=0.3",
    "--batch_norm", "--optimizer=sgd", "--learning_rate=0.1", "--l2_reg=0.001",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the weighted records in order (1.tfrecords), dealt to 2 processes
    (2.tfrecords), and each as often as it weighs, without weights (repeated.tfrecords)."""
    folder = tmp_path_factory.mktemp("weighted")
    records = make_records(ROWS)
    for processes in (1, 2):
        *columns, weights = dealt([*records, WEIGHTS], processes, GLOBAL_BATCH)
        payloads = [weighted_example(x, [w]) for x, w in zip(zip(*columns), weights)]
        write_payloads(folder / f"{processes}.tfrecords", payloads)
    times = [np.repeat(x, WEIGHTS.astype(int), axis=0) for x in records]
    write_tfrecords(folder / "repeated.tfrecords", times)
    write_tfrecords(folder / "plain.tfrecords", records)
    return folder


def train(mode, data, model_dir, *flags, file="1", size=GLOBAL_BATCH):
    """The losses of the steps, the variables after them, and the evaluation of all records."""
    run_mode(
        mode, *FLAGS, f"--training_data_dir={data}/{file}.tfrecords",
        f"--val_data_dir={data}/{file}.tfrecords", f"--model_dir={model_dir}",
        f"--global_batch_size={size}", *flags, code=0,
    )  # fmt: skip
    losses = [x for (tag, _), x in sorted(scalars(model_dir).items()) if tag == "log_loss"]
    return losses, checkpoint(model_dir), report(model_dir)["eval"]


@pytest.fixture(scope="module")
def locally(data):
    return train("local", data, data / "local")


def check(found, wanted, atol=1e-6, examples=ROWS):
    (losses, after, results), (same_losses, same_after, same_results) = found, wanted
    assert len(losses) == len(same_losses) == 6
    np.testing.assert_allclose(losses, same_losses, atol=atol)
    check_same(after, same_after, atol)
    assert results["examples"] == ROWS and same_results["examples"] == examples
    for name in ("auc", "log_loss", "calibration", "loss"):
        assert results[name] == pytest.approx(same_results[name], abs=atol), name


def test_a_run_is_that_of_repeated_records(data, locally, tmp_path):
    wanted = train("local", data, tmp_path, file="repeated", size=2 * GLOBAL_BATCH)
    check(locally, wanted, examples=int(WEIGHTS.sum()))


FIELDS = "--gauc_field=0", "--slice_fields=0,2"


def evaluation(data, model_dir, *flags, mode="local", file="1"):
    """(results, curves) of an evaluation with GAUC and slices."""
    run_mode(
        mode, "--task_type=eval", f"--val_data_dir={data}/{file}.tfrecords",
        f"--model_dir={model_dir}", *FIELDS, *flags, code=0,
    )  # fmt: skip
    found = report(model_dir, "eval")
    return found["eval"], found["curves"]


def slices_of(results, field):
    return {x["value"]: x for x in results["slices"] if x["field"] == field}


def test_gauc_slices_and_curves_of_a_model_are_those_of_repeated_records(data, locally):
    model_dir = data / "local"
    wanted, same_curves = evaluation(data, model_dir, file="repeated")
    on_two = evaluation(data, model_dir, file="2", mode="horovod")
    unweighted, _ = evaluation(data, model_dir, "--noexample_weights")
    assert abs(unweighted["gauc"] - wanted["gauc"]) > 1e-4
    for found, curves in (evaluation(data, model_dir), on_two):
        assert found["gauc"] == pytest.approx(wanted["gauc"], abs=1e-6)
        assert found["gauc_groups"] == wanted["gauc_groups"]
        assert found["gauc_examples"] == unweighted["gauc_examples"]
        for name in ("roc", "precision_recall"):
            np.testing.assert_allclose(curves[name], same_curves[name], atol=2e-6, err_msg=name)
        for field in (0, 2):
            entries, same = slices_of(found, field), slices_of(wanted, field)
            assert sum(x["examples"] for x in entries.values()) == ROWS
            compared = (set(entries) & set(same)) - {"others"}
            assert len(compared) > 10
            for value in compared:
                for name in ("auc", "log_loss", "calibration"):
                    approximate = same[value][name] and pytest.approx(same[value][name], abs=2e-6)
                    assert entries[value][name] == approximate, (field, value, name)


@pytest.mark.parametrize(  # Horovod trains from channels, below.
    "mode", ["tower", "mirrored", "ps", pytest.param("horovod", marks=pytest.mark.table)]
)
def test_every_mode_agrees_with_local(data, locally, tmp_path, mode):
    check(train(mode, data, tmp_path, file="2" if mode == "horovod" else "1"), locally)


def test_channels_of_unequal_length_agree_with_local(request, data, locally, tmp_path):
    make = request.getfixturevalue("channels")
    payloads = list(v1.io.tf_record_iterator(str(data / "2.tfrecords")))
    first, second = (
        b"".join(map(framed, x)) for x in (payloads[: ROWS // 2], payloads[ROWS // 2 :])
    )
    flags = make(training=first, training_1=second, evaluation=first + second)
    words = *flags, *FLAGS, "--enable_data_multi_path", "--example_weights"
    check(train("horovod", data, tmp_path / "model", *words), locally)


def test_hosts_with_other_data_agree_on_whether_these_are_weighted(tmp_path):
    path = write_tfrecords(tmp_path / "plain.tfrecords", make_records(8))
    others = mode_of(size=2, exchange=lambda told: [told, [None, [True, {}]]])
    for mode, weighted in ((others, True), (Mode(), False)):
        job = job_of(distribution=mode, input=InputConfig(val_data_dir=str(path)))
        known = {"field_size": 4, "feature_size": 50}
        data, _ = apply_model(Opened(job, None, known, 0, "last"), "val_data_dir")
        assert data.weighted == weighted


def test_weights_can_be_ignored(data, tmp_path):
    found = train("local", data, tmp_path / "1", "--noexample_weights")
    wanted = train("local", data, tmp_path / "2", file="plain")
    check(found, wanted, 0)


@pytest.mark.parametrize("mode", [pytest.param("local", marks=pytest.mark.table), "tower"])
def test_weights_of_0_are_records_of_an_epoch_too(tmp_path, mode):
    weights = [[0.0], [1.0], [0.0]] * 20
    payloads = [weighted_example(x, w) for x, w in zip(zip(*make_records(60)), weights)]
    write_payloads(tmp_path / "1.tfrecords", payloads[:-1] + payloads[:1])
    run_train(
        *FLAGS, f"--training_data_dir={tmp_path}/1.tfrecords", "--global_batch_size=2",
        f"--model_dir={tmp_path}/model", f"--distribution={mode}", "--replicas_per_process=2",
        code=0,
    )  # fmt: skip
    assert report(tmp_path / "model")["examples"] == 60


def test_an_interrupted_run_on_weighted_data_ends_with_the_same_bits(data, tmp_path):
    flags = (
        *FLAGS, "--optimizer=adam", f"--training_data_dir={data}/1.tfrecords", "--num_epochs=3",
        f"--model_dir={tmp_path}", "--global_batch_size=24", "--shuffle_buffer=50",
        "--save_checkpoints_steps=8",
    )  # fmt: skip
    run_train(*flags, code=0)
    whole = checkpoint(tmp_path)
    go_back(tmp_path, 8)
    run_train(*flags, code=0)
    check_same(tmp_path, whole)


def test_a_bad_weight_ends_a_job_with_one_sentence(data, tmp_path):
    payloads = [weighted_example(x, [1.0]) for x in zip(*make_records(5))]
    payloads[3] = weighted_example(next(zip(*make_records(1))), [-2.0])
    write_payloads(tmp_path / "1.tfrecords", payloads)
    flags = f"--training_data_dir={tmp_path}/1.tfrecords", f"--model_dir={tmp_path}/model"
    done = run_train(*FLAGS, *flags, code=2)
    assert "1.tfrecords: record 3 at byte" in done.stderr
    assert "weight -2 is not a finite number of at least 0" in done.stderr
