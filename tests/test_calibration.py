"""--correct_calibration: predictions for the original data from a model of sampled data."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import make_records, report, run_train, small_job, write_libsvm

from data_tools import libsvm_to_tfrecord, rebalance
from deepfm.data import datasets
from deepfm.model.model_fn import logit_offset
from deepfm.records import dataset_json
from deepfm.records.dataset_json import SamplingRates
from deepfm.runtime.tf import tf

RATE = 0.1  # of the negatives


@pytest.mark.parametrize("rates", [(0.1, 1.0), (0.01, 3.0), (2.5, 0.5), (1.0, 1.0)])
def test_the_offset_gives_the_probability_of_the_paper(rates):
    """q = p / (p + (1 - p) / w), He et al. 2014, section 6.3, w the rate of the negatives."""
    logits = np.linspace(-9, 9, 50)
    p, w = 1 / (1 + np.exp(-logits)), rates[0] / rates[1]
    corrected = 1 / (1 + np.exp(-(logits + logit_offset(SamplingRates(*rates)))))
    np.testing.assert_allclose(corrected, p / (p + (1 - p) / w), rtol=1e-12)


def test_the_offset_undoes_sampling_by_bayes():
    """If positives are repeated, 100 positives and 900 negatives may become 200 and 90."""
    offset = logit_offset(SamplingRates(0.1, 2.0))
    assert 1 / (1 + np.exp(-(np.log(200 / 90) + offset))) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of train, sampled from all, and of val, which is not sampled."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows, seed in (("all", 20000, 1), ("val", 5000, 2)):
        path = write_libsvm(folder / f"{name}.libsvm", make_records(rows, seed=seed))
        options = libsvm_to_tfrecord.ConvertOptions(path, str(folder / name), feature_size=50)
        libsvm_to_tfrecord.convert(options)
    options = rebalance.RebalanceOptions(f"{folder}/all", f"{folder}/train", negative_rate=RATE)
    rebalance.rebalance(options)
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a model that was trained on train with the correction, and exported."""
    folder = tmp_path_factory.mktemp("trained")
    run_train(
        *small_job(data / "train", folder / "model", "--num_epochs=4", "--learning_rate=0.01"),
        f"--val_data_dir={data}/val", f"--servable_model_dir={folder}/servable",
        "--batch_size=128", "--eval_every_steps=10000", "--correct_calibration", code=0,
    )  # fmt: skip
    return folder


def predictions(folder, data, name):
    """What a job writes without any flag for a correction."""
    path = folder / name
    run_train(
        "--task_type=infer", f"--infer_data_dir={data}/val", f"--model_dir={folder}/model",
        f"--predictions_file={path}", code=0,
    )  # fmt: skip
    return np.loadtxt(str(path))


def test_evaluation_inference_and_export_are_corrected_and_training_is_not(data, trained):
    achieved = datasets.find(str(data / "train"), "data").sampling_rates
    kept = json.loads((trained / "model" / "model.json").read_text())
    assert kept["logit_offset"] == pytest.approx(np.log(achieved.negative))
    evaluated = report(trained / "model")["eval"]
    corrected = predictions(trained, data, "corrected.txt")

    # The model.json of an older version, or of a model that was trained without the flag.
    del kept["logit_offset"]
    (trained / "model" / "model.json").write_text(json.dumps(kept))
    p = predictions(trained, data, "plain.txt")
    np.testing.assert_allclose(corrected, p / (p + (1 - p) / achieved.negative), rtol=1e-5)

    labels = make_records(5000, seed=2)[0]
    assert corrected.mean() / labels.mean() == pytest.approx(1, abs=0.1)
    assert p.mean() / labels.mean() > 1.3
    assert evaluated["calibration"] == pytest.approx(corrected.mean() / labels.mean(), rel=1e-5)
    log_loss = -np.mean(np.log(np.where(labels == 1, corrected, 1 - corrected)))
    assert evaluated["log_loss"] == pytest.approx(log_loss, rel=1e-5)
    assert evaluated["loss"] == pytest.approx(log_loss, rel=1e-5)

    _, ids, values = make_records(5000, seed=2)
    (number,) = os.listdir(trained / "servable")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(
            session, ["serve"], str(trained / "servable" / number)
        )
        signature = loaded.signature_def["serving_default"]
        feed = {signature.inputs["feat_ids"].name: ids, signature.inputs["feat_vals"].name: values}
        served = session.run(signature.outputs["prob"].name, feed)
    np.testing.assert_allclose(served, corrected, rtol=1e-4)


def test_the_flag_is_refused_for_a_model_that_was_trained_without(data, trained, tmp_path):
    shutil.copytree(str(trained / "model"), str(tmp_path / "model"))
    kept = json.loads((tmp_path / "model" / "model.json").read_text())
    (tmp_path / "model" / "model.json").write_text(json.dumps({**kept, "logit_offset": 0.0}))
    done = run_train(
        "--task_type=eval", f"--val_data_dir={data}/val", f"--model_dir={tmp_path}/model",
        "--correct_calibration", code=2,
    )  # fmt: skip
    assert "was trained without" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("rates", [None, SamplingRates(0.0, 1.0)])
def test_the_flag_is_refused_where_no_rates_above_0_are_recorded(tmp_path, rates):
    path = write_libsvm(tmp_path / "a.libsvm", ([1.0] * 9, *make_records(9)[1:]))
    options = libsvm_to_tfrecord.ConvertOptions(path, str(tmp_path / "data"), feature_size=50)
    files = libsvm_to_tfrecord.convert(options)
    dataset_json.write(str(tmp_path / "data"), 4, 50, files, rates)
    job = small_job(tmp_path / "data", tmp_path / "model", "--correct_calibration")
    done = run_train(*job, code=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("train.py: --correct_calibration needs sampling rates above 0, but ")
    assert ("records rates (0.0, 1.0)" if rates else "records none") in last
    assert "Traceback" not in done.stderr
