"""Fields of several values: the records, and the model against the paper's formulas in numpy."""

import dataclasses
import functools

import numpy as np
import pytest
import test_model
from conftest import example, report, run_mode, run_train, small_job, small_training, write_payloads
from exported import answering
from mode_steps import check_same, weights
from test_model import named, numeric_gradient, numpy_logits, run_step

from data_tools import inspect_dataset, libsvm_to_tfrecord
from deepfm.config import ModelConfig
from deepfm.data import formats
from deepfm.data.records import Schema
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.records import wire
from deepfm.runtime.tf import tf
from deepfm.state.serving import saved_model

v1 = tf.compat.v1
F, V = 4, 12
COUNTS = np.int32([[1, 1, 1, 1], [3, 0, 2, 1], [0, 0, 0, 0], [2, 2, 2, 2], [1, 0, 1, 5]])


def batch(counts=COUNTS, seed=0):
    """(ids [B, M], values [B, M], counts, labels); what fills up a row is not 0."""
    random = np.random.RandomState(seed)
    shape = len(counts), counts.sum(axis=1).max()
    ids = random.randint(0, V, shape).astype(np.int64)
    labels = (random.rand(len(counts)) > 0.5).astype(np.float32)
    return ids, random.randn(*shape).astype(np.float32), counts, labels


def parsed(serialized, schema=None):
    schema = schema or Schema(F, multi_valued=True)
    with tf.Graph().as_default(), v1.Session() as session:
        return session.run(formats.TFRECORD.parse(tf.constant(serialized), schema))


# One hidden layer, so that probabilities tell the logits.
config = functools.partial(test_model.config, deep_layers=(5,), dropout=(0.0,))


@pytest.mark.parametrize("pooling, scope", [("sum", "batch"), ("mean", "batch"), ("max", "table")])
def test_pooled_fields_follow_the_numeric_gradient_of_the_papers_loss(pooling, scope):
    ids, values, counts, labels = batch()
    made = config(pooling=pooling, lazy_updates=pooling == "sum", l2_scope=scope)
    before, after, _, logits = run_step(made, named(ids, values, labels, feat_counts=counts))
    before = {name: x.astype(np.float64) for name, x in before.items()}

    def loss(w):
        found = numpy_logits(w, ids, values, counts, pooling)
        return np.mean(np.logaddexp(0, found) - labels * found)

    wanted = numpy_logits(before, ids, values, counts, pooling)
    np.testing.assert_allclose(logits, wanted, rtol=1e-3, atol=1e-3)
    for name in ("fm_w", "fm_v", "deep_0/kernel"):
        gradient = numeric_gradient(loss, before, name)
        step = before[name] - after[name]
        np.testing.assert_allclose(step, gradient, rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_one_value_of_each_field_is_the_same_model(pooling):
    ids, values, counts, labels = batch(np.ones([7, F], np.int32))
    made = config(pooling=pooling, l2_reg=0.1)
    fixed = run_step(made, named(ids, values, labels))
    pooled = run_step(made, named(ids, values, labels, feat_counts=counts))
    np.testing.assert_allclose(fixed[3], pooled[3], rtol=1e-5)
    for name, value in fixed[1].items():
        np.testing.assert_allclose(pooled[1][name], value, atol=1e-5, err_msg=name)


MULTI = Schema(F, 50, multi_valued=True)


@pytest.mark.parametrize(
    "record, schema, words",
    [
        ((1, [1, 2], [1, 1], [1, 0, 1]), MULTI, ["expected 4 counts, found 3"]),
        ((1, [1, 2], [1, 1], [1, 0, 0, 2]), MULTI, ["expected 3 ids, found 2"]),
        ((1, [1, 2, 3], [1, 1], [1, 0, 0, 2]), MULTI, ["expected 3 values, found 2"]),
        ((1, [1, 2], [1, 1], [3, -1, 0, 0]), MULTI, ["counts hold -1"]),
        ((1, [1, 2], [1, 1], [1 << 62, 1 << 62, 1 << 62, (1 << 62) + 2]), MULTI, ["ids"]),
        ((1, [1, 50], [1, 1], [2, 0, 0, 0]), MULTI, ["feature id 50"]),
        ((1, [1, 2, 3], [1, 1, 1]), MULTI, ["expected 4 ids, found 3"]),
        ((2, [], [], [0, 0, 0, 0]), MULTI, ["label"]),
        ((1, [1] * 4, [1] * 4, [2, 1, 1, 0]), Schema(F), ["field 0 has 2 values"]),
    ],
)
def test_a_bad_record_is_refused_and_explained(record, schema, words):
    serialized = example(*record)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.DataLossError)):
        parsed([serialized], schema)
    reason = wire.explain(serialized, schema)
    assert reason and all(word in reason for word in words), reason


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a data set of fields of several values, without a dataset.json."""
    random = np.random.RandomState(3)
    folder = tmp_path_factory.mktemp("multi")
    payloads = []
    for _ in range(500):
        counts = random.randint(0, 4, F)
        ids = random.randint(1, 50, counts.sum())
        label = float(np.sin(ids).sum() > 0)
        payloads.append(example(label, ids, random.rand(len(ids)) + 0.5, counts))
    write_payloads(folder / "a.tfrecords", payloads)
    return folder


def test_the_data_set_is_described(data):
    found = inspect_dataset.inspect(str(data))
    assert (found["rows"], found["field_size"], found["shortest_row"]) == (500, F, 0)
    assert found["multi_valued"]
    counts = parsed([x for _, x, _ in formats.TFRECORD.numbered(str(data / "a.tfrecords"))])[0]
    counts = counts["feat_counts"]
    assert [field["values"] for field in found["fields"]] == counts.sum(axis=0).tolist()
    assert [field["rows"] for field in found["fields"]] == (counts > 0).sum(axis=0).tolist()


# All records in each step, so that their order does not matter.
FLAGS = (
    "--global_batch_size=500", "--num_epochs=15", "--learning_rate=0.02", "--l2_reg=0.01",
    "--pooling=mean", "--embedding_init_stddev=0.3",
)  # fmt: skip


def train(mode, data, model_dir, *more):
    flags = small_training(data, model_dir, *FLAGS, *more)
    run_mode(mode, *(flag for flag in flags if not flag.startswith("--batch_size")), code=0)


@pytest.fixture(scope="module")
def locally(data, tmp_path_factory):
    """(the folder of a model that was trained and exported in local mode, its report)."""
    folder = tmp_path_factory.mktemp("local")
    more = f"--servable_model_dir={folder}/export", f"--val_data_dir={data}"
    train("local", data, folder, "--eval_every_steps=15", *more)
    return folder, report(folder)


def test_jobs_after_training_take_them(data, locally, tmp_path):
    run_train(
        "--task_type=infer", f"--model_dir={locally[0]}", f"--infer_data_dir={data}",
        f"--predictions_file={tmp_path}/p.txt", code=0,
    )  # fmt: skip
    predicted = np.loadtxt(str(tmp_path / "p.txt"))
    assert len(predicted) == 500 == locally[1]["eval"]["examples"]
    (export,) = (locally[0] / "export").iterdir()
    serialized = [x for _, x, _ in formats.TFRECORD.numbered(str(data / "a.tfrecords"))]
    features, _ = parsed(serialized)
    with answering(export) as ask:
        for prob in (
            ask("serving_default", features),
            ask("examples:serving_default", {"examples": serialized}),
        ):
            np.testing.assert_allclose(prob, predicted, rtol=1e-4, atol=1e-5)


def test_an_export_checks_values_but_not_what_pads_a_row():
    schema = Schema(2, 9, multi_valued=True)
    ids, values = np.int64([[1, 2, -7], [8, 99, 99]]), np.float32([[1, 2, np.nan], [3, 4, 5]])
    feed = {"feat_ids": ids, "feat_vals": values, "feat_counts": np.int32([[2, 0], [0, 1]])}
    with tf.Graph().as_default(), v1.Session() as session:
        given = {name: v1.placeholder(x.dtype, [None, None], name) for name, x in feed.items()}
        checked = saved_model._checked(given, schema)
        run = lambda: session.run(checked, {given[name]: x for name, x in feed.items()})
        np.testing.assert_array_equal(run()["feat_ids"], ids)
        for name, place, bad, said in (
            ("feat_ids", (1, 0), 9, "feature id not in [0, 9)"),
            ("feat_vals", (1, 0), np.inf, "not a finite number"),
            ("feat_counts", (1, 0), 3, "feat_counts do not fit"),
            ("feat_counts", (1, 0), -1, "feat_counts do not fit"),
        ):
            good = feed[name][place]
            feed[name][place] = bad
            with pytest.raises(tf.errors.InvalidArgumentError) as error:
                run()
            assert said in error.value.message and "[in row] [1]" in error.value.message
            feed[name][place] = good


@pytest.mark.parametrize("multi_valued", [True, False])
def test_serving_hashes_strings_as_the_converter_does(tmp_path, multi_valued):
    random = np.random.RandomState(0)
    letters = np.array(list("abcXYZ019_-=/.|é中"))
    strings = np.array(["".join(random.choice(letters, 12)) for _ in range(10000)])
    strings = strings.reshape(5000, 2)
    text = "".join(f"1 {one}:1 {other}:1\n" for one, other in strings)
    (tmp_path / "a.libsvm").write_text(text)
    options = libsvm_to_tfrecord.ConvertOptions(str(tmp_path / "a.libsvm"), str(tmp_path / "data"))
    (file,) = libsvm_to_tfrecord.convert(dataclasses.replace(options, hash_buckets=20000))
    serialized = [payload for _, payload, _ in formats.TFRECORD.numbered(file.path)]
    stddev = {"embedding_init_stddev": 1.0, "multi_valued": multi_valued}
    config = ModelConfig(2, 20000, 3, (4,), (0.0,), **stddev)
    made = make_model_fn(config, None, Mode())
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.get_or_create_global_step()
        features = {"feat_ids": tf.zeros([1, 2], tf.int64), "feat_vals": tf.ones([1, 2])}
        made(features, None, tf.estimator.ModeKeys.PREDICT)
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "model" / "model.ckpt"))
    trained = tf.estimator.Estimator(made, str(tmp_path / "model"))
    schema = Schema(2, 20000, multi_valued=multi_valued, hash_buckets=20000)
    saved_model.write(str(tmp_path / "export"), trained, trained.latest_checkpoint(), schema, {})
    with answering(tmp_path / "export") as ask:
        ones = np.ones([5000, 2])
        inputs = {"feat_strings": strings, "feat_vals": ones}
        inputs.update({"feat_counts": ones} if multi_valued else {})
        by_strings = ask("strings:serving_default", inputs)
        by_examples = ask("examples:serving_default", {"examples": serialized})
    assert len(set(by_examples)) > 4900  # so that another id is another probability
    np.testing.assert_allclose(by_strings, by_examples, rtol=1e-6)


@pytest.mark.parametrize("task", ["train", "eval"])
def test_a_model_is_not_used_with_another_pooling(data, locally, task):
    before = (locally[0] / "model.json").read_text()
    flags = {
        "train": small_job(data, locally[0]),
        "eval": (f"--val_data_dir={data}", f"--model_dir={locally[0]}"),
    }[task]
    done = run_train(*flags, f"--task_type={task}", "--pooling=max", code=2)
    assert "--pooling=max, but the model of --model_dir=" in done.stderr
    assert "was trained with --pooling=mean; give that value, or another" in done.stderr
    assert (locally[0] / "model.json").read_text() == before


@pytest.mark.parametrize(
    "mode", ["tower", pytest.param("mirrored", marks=pytest.mark.table), "horovod"]
)
def test_every_mode_agrees_with_local(data, locally, tmp_path, mode):
    train(mode, data, tmp_path)
    assert weights(tmp_path)["global_step"] == 15
    check_same(tmp_path, locally[0], atol=1e-4, rtol=1e-7)
