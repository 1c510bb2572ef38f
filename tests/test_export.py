"""Exports in their numbered folders."""

import time

import pytest

from deepfm import export
from deepfm.data import records
from deepfm.runtime.tf import tf
from deepfm.state.serving import saved_model

v1 = tf.compat.v1
SCHEMA = records.Schema(3, 10)
STAMP = export.Stamp(1, "4567")


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    """The Estimator of a trained model that takes DeepFM's features but is not a DeepFM."""

    def model_fn(features, labels, mode):
        weight = v1.get_variable("weight", [], initializer=v1.ones_initializer())
        prob = tf.sigmoid(weight * tf.reduce_sum(features["feat_vals"], axis=1))
        loss, step = tf.reduce_sum(prob), v1.train.get_or_create_global_step()
        outputs = {"serving_default": tf.estimator.export.PredictOutput({"prob": prob})}
        outputs["examples"] = outputs["serving_default"]
        return tf.estimator.EstimatorSpec(
            mode, {"prob": prob}, loss, step.assign_add(1), export_outputs=outputs
        )

    def input_fn():
        return {"feat_ids": tf.zeros([1, 3], tf.int64), "feat_vals": tf.ones([1, 3])}, tf.ones([1])

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path_factory.mktemp("model")))
    estimator.train(input_fn, steps=1)
    return estimator


def save(estimator, folder, others=()):
    checkpoint = estimator.latest_checkpoint()
    said = {"format_version": 1, **STAMP._asdict()}
    write = lambda path: saved_model.write(path, estimator, checkpoint, SCHEMA, said)
    return export.add(str(folder), others, write)


def test_an_export_has_the_time_for_its_number(estimator, tmp_path):
    before = int(time.time())
    assert before <= int(save(estimator, tmp_path)) <= time.time()


def test_a_later_export_has_the_higher_number_though_the_clock_was_set_back(
    estimator, tmp_path, monkeypatch
):
    first = int(save(estimator, tmp_path))
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_ago)
    assert int(save(estimator, tmp_path)) == first + 1
    assert int(save(estimator, tmp_path, others=[str(first + 100), "mine", "x9"])) == first + 101
    assert len(list(tmp_path.iterdir())) == 3


def test_an_export_says_what_it_is_of(estimator, tmp_path):
    names = ["x", save(estimator, tmp_path)]
    assert export.find(str(tmp_path), names, STAMP) == f"{tmp_path}/{names[1]}"
    assert export.find(str(tmp_path), names, STAMP._replace(checkpoint="another")) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format_version": 2}', '{"format_version": 1, "model_id": "0123"}', "\xff"]
)
def test_an_export_that_says_nothing_of_the_kind_is_nobodys(tmp_path, text):
    (tmp_path / "1" / "assets.extra").mkdir(parents=True)
    (tmp_path / "1" / "assets.extra" / "deepfm.json").write_bytes(text.encode("latin1"))
    (tmp_path / "2").mkdir()
    assert not any(export.stamp_of(f"{tmp_path}/{name}") for name in "12")


@pytest.mark.parametrize(
    "part",
    ["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"],
)
def test_an_export_that_lacks_a_part_is_not_whole(estimator, tmp_path, part):
    path = tmp_path / save(estimator, tmp_path)
    assert export.is_whole(str(path))
    (path / part).unlink()
    assert not export.is_whole(str(path))


def test_models_have_digests_of_their_own(estimator):
    checkpoint = estimator.latest_checkpoint()
    before = export.digest(checkpoint, "sum")
    assert export.digest(checkpoint, "sum") == before
    estimator.train(lambda: ({"feat_vals": tf.ones([1, 3])}, tf.ones([1])), steps=1)
    others = [export.digest(checkpoint, "max"), export.digest(estimator.latest_checkpoint(), "sum")]
    assert len({before, *others}) == 3
