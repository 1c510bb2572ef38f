"""train.py as its users run it: train, eval, infer, export, and its answers to bad input."""

import gzip
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    example,
    make_records,
    report,
    run_train,
    shared_data,
    small_training,
    started_train,
    until,
    write_libsvm,
    write_tfrecords,
)
from exported import answering
from mode_steps import check_same

from deepfm import jobs
from deepfm.config import InputConfig
from deepfm.data.datasets import DataFile
from deepfm.model.metrics import Evaluation
from deepfm.records import dataset_json
from deepfm.runtime.tf import tf


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, a trained and exported model: (folder, records of test.tfrecords)."""
    folder = tmp_path_factory.mktemp("trained")
    write_tfrecords(folder / "train.tfrecords", make_records(3000, seed=1))
    test = make_records(700, seed=2)
    write_tfrecords(folder / "test.tfrecords", test)
    done = run_train(
        *small_training(folder / "train.tfrecords", folder / "model"), "--num_epochs=3",
        f"--val_data_dir={folder}/test.tfrecords", f"--servable_model_dir={folder}/servable",
        "--learning_rate=0.01", "--eval_every_steps=141", code=0,
    )  # fmt: skip
    (folder / "stderr").write_text(done.stderr)
    return folder, test


def report_of(folder, task=None):
    return report(folder / "model", task)


def predictions(folder):
    return np.loadtxt(str(folder / "model" / "predictions.txt"))


def infer(folder, *flags):
    run_train(
        "--task_type=infer", f"--infer_data_dir={folder}/test.tfrecords",
        f"--model_dir={folder}/model", *flags, code=0,
    )  # fmt: skip
    return predictions(folder)


def test_training_learns_and_ends_with_the_stable_evaluation_line(trained):
    folder, test = trained
    last = [x for x in (folder / "stderr").read_text().splitlines() if "Evaluation:" in x][-1]
    words = dict(word.split("=") for word in last.split("Evaluation: ")[1].split())
    assert list(words) == ["step", "examples", "auc", "log_loss", "calibration"]
    assert int(words["step"]) == 3 * 47
    assert int(words["examples"]) == 700
    assert float(words["auc"]) > 0.6


def test_evaluation_counts_every_record_once_whatever_the_batch(trained):
    folder, test = trained
    found = [report_of(folder)["eval"]]  # of batches of 64
    run_train(
        "--task_type=eval", f"--val_data_dir={folder}/test.tfrecords",
        f"--model_dir={folder}/model", "--batch_size=256", code=0,
    )  # fmt: skip
    found.append(report_of(folder, "eval")["eval"])
    for result in found:
        assert result["examples"] == 700
        assert result["log_loss"] == pytest.approx(found[0]["log_loss"], abs=1e-6)
        assert result["auc"] == pytest.approx(found[0]["auc"], abs=1e-6)


@pytest.fixture(scope="module")
def inferred(trained):
    """The probabilities of test.tfrecords."""
    return infer(trained[0], "--batch_size=64")


def test_inference_gives_one_probability_per_record_and_agrees_with_evaluation(trained, inferred):
    folder, test = trained
    prob = inferred
    assert prob.shape == (700,)
    evaluation = Evaluation()
    logits = np.log(prob / (1 - prob))
    evaluation.add(test[0], logits, prob.astype(np.float32), logits)
    assert evaluation.auc() == pytest.approx(report_of(folder)["eval"]["auc"], abs=1e-6)


def test_inference_keeps_the_order_of_the_records(trained, inferred, tmp_path):
    folder, (labels, ids, values) = trained
    write_tfrecords(tmp_path / "back.tfrecords", (labels[::-1], ids[::-1], values[::-1]))
    run_train(
        "--task_type=infer", f"--infer_data_dir={tmp_path}", f"--model_dir={folder}/model",
        f"--predictions_file={tmp_path}/back.txt", code=0,
    )  # fmt: skip
    backward = np.loadtxt(str(tmp_path / "back.txt"))
    np.testing.assert_allclose(backward[::-1], inferred, atol=1e-6)


@pytest.mark.parametrize("task, flag", [("infer", "infer_data_dir"), ("eval", "val_data_dir")])
def test_a_record_whose_prediction_is_not_a_number_is_refused(trained, tmp_path, task, flag):
    labels, ids, values = make_records(20, seed=2)
    values[7] = 1e25
    write_tfrecords(tmp_path / "a.tfrecords", (labels, ids, values))
    done = run_train(
        f"--task_type={task}", f"--{flag}={tmp_path}/a.tfrecords",
        f"--model_dir={trained[0]}/model", f"--predictions_file={tmp_path}/found.txt", code=2,
    )  # fmt: skip
    sentence = {
        "infer": "a.tfrecords: record 7 at byte .*: the prediction is not a number",
        "eval": "a.tfrecords: the log loss of the model of step 141 is not a number",
    }
    assert re.search(sentence[task], done.stderr.splitlines()[-1]), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.tfrecords"]


def test_both_signatures_of_the_export_answer_as_infer_does(trained, inferred):
    folder, (labels, ids, values) = trained
    (export,) = (folder / "servable").iterdir()
    assert export.name.isdigit()
    feeds = requests(labels, ids, values)
    with answering(export) as ask:
        assert ask.signatures == set(feeds)
        for name, feed in feeds.items():
            np.testing.assert_allclose(ask(name, feed), inferred, atol=1e-6)


def requests(labels, ids, values):
    """{signature: its inputs} of some records."""
    examples = [example(*record) for record in zip(labels, ids, values)]
    return {
        "serving_default": {"feat_ids": ids, "feat_vals": values},
        "examples:serving_default": {"examples": examples},
    }


BAD_ROWS = {
    "id": (lambda ids, values: ids.__setitem__((3, 1), 50), "feature id not in [0, 50)"),
    "negative": (lambda ids, values: ids.__setitem__((3, 0), -1), "feature id not in [0, 50)"),
    "nan": (lambda ids, values: values.__setitem__((3, 2), np.nan), "not a finite number"),
}


@pytest.mark.parametrize("spoil, said", BAD_ROWS.values(), ids=BAD_ROWS)
def test_an_export_names_the_bad_row_of_a_request(trained, spoil, said):
    folder, (labels, ids, values) = trained
    ids, values = ids[:5].copy(), values[:5].copy()
    spoil(ids, values)
    for name, feed in requests(labels, ids, values).items():
        message = refusal_of_export(folder, name, feed)
        assert said in message and "[in row] [3]" in message


def test_an_export_names_the_row_whose_example_has_another_type(trained):
    folder, (labels, ids, values) = trained
    good = [example(*record) for record in zip(labels[:4], ids, values)]
    for name, found in (("values", "int64_list"), ("ids", "float_list"), ("ids", "")):
        record = tf.train.Example.FromString(good[0])
        record.features.feature[name].Clear()
        if found:
            getattr(record.features.feature[name], found).value.extend([1, 2, 3, 4])
        feed = {"examples": [*good[:2], record.SerializeToString(), *good[2:]]}
        message = refusal_of_export(folder, "examples:serving_default", feed)
        assert "ids (int64) and values (float)" in message and "[in row] [2]" in message


def refusal_of_export(folder, name, feed):
    """The message with which the exported model refuses a request."""
    (path,) = (folder / "servable").iterdir()
    with answering(path) as ask, pytest.raises(tf.errors.InvalidArgumentError) as error:
        ask(name, feed)
    return error.value.message


def train_other(data, model_dir):
    run_train(
        *SMALL_MODEL, f"--training_data_dir={data}", f"--model_dir={model_dir}", "--batch_size=64",
        "--seed=5", code=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def other(trained):
    """The folder of `trained`, with another model in it that was never evaluated."""
    train_other(trained[0] / "train.tfrecords", trained[0] / "other")
    return trained[0]


def test_the_report_holds_what_the_design_promises(other):
    folder = other
    found = report(folder / "other")
    assert found["task_type"] == "train"
    assert found["distribution"] == "local"
    assert found["num_processes"] == found["num_replicas"] == 1
    assert found["global_batch_size"] == 64
    assert found["global_step"] == 47
    assert found["examples"] == found["train"]["examples"] == 3000
    for name in ("seconds", "examples_per_second", "cpu_utilization", "peak_rss_bytes"):
        assert found[name] > 0, name
    assert 0 <= found["input_wait_share"] <= 1


def test_libsvm_is_read_directly_with_the_same_result(other, tmp_path):
    write_libsvm(tmp_path / "train.libsvm", make_records(3000, seed=1))
    train_other(tmp_path / "train.libsvm", tmp_path / "model")
    check_same(tmp_path / "model", other / "other", atol=1e-5, rtol=1e-7)


def test_local_mode_needs_no_environment_and_loads_no_other_platform(trained, tmp_path):
    folder, _ = trained
    probe = tmp_path / "sitecustomize.py"
    probe.write_text(
        "import atexit, sys\n"
        "atexit.register(lambda: sys.stderr.write('LOADED ' + ' '.join("
        "m for m in ('horovod', 'sagemaker_tensorflow') if m in sys.modules) + '\\n'))\n"
    )
    env = {k: os.environ[k] for k in ("PATH", "HOME")}
    done = run_train(
        *SMALL_MODEL, f"--training_data_dir={folder}/train.tfrecords",
        f"--model_dir={tmp_path}/model", env={**env, "PYTHONPATH": str(tmp_path)}, code=0,
    )  # fmt: skip
    assert "LOADED \n" in done.stderr


# Bad input: exit code 2, one sentence that names the cause.


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--field_size=5"], "train.tfrecords: record 0 at byte 0: expected 5 ids, found 4"),
        (["--feature_size=40"], "is not below feature_size 40"),
        (["--training_data_dir={}/flipped.tfrecords"], "flipped.tfrecords: record 1 at byte"),
        (["--training_data_dir={}/cut.tfrecords"], "cut.tfrecords: record 2999 at byte"),
        (["--training_data_dir={}/cut.tfrecords.gz"], "cut.tfrecords.gz: the gzip file is cut"),
        (["--training_data_dir={}/damaged.tfrecords.gz"], "gz: the gzip file is damaged"),
        (["--training_data_dir={}/two.tfrecords.gz"], "two.tfrecords.gz: has several gzip members"),
        (["--training_dta_dir=x"], "training_data_dir"),
        (["--deep_layers=8,4", "--dropout=0.1,0.2,0.3"], "has 3 values for 2 hidden layers"),
        (["--dropout=1.5"], "--dropout=1.5"),
        (["--embedding_size=8", "--model_dir={}/model"], "--embedding_size=8, but the model of"),
        (["--optimizer=sgd", "--learning_rate=1e30"], "step 2: the loss is "),
        (["--batch_size=0"], "--batch_size=0"),
        (["--cowclip_ratio=-1"], "--cowclip_ratio=-1"),
        (["--gauc_field=1", "--val_data_dir="], "need records: give --val_data_dir."),
        (["--l2_scope=elapsed", "--optimizer=sgd"], "it needs --optimizer=adam and --lazy_updates"),
        (["--l2_scope=elapsed", "--nolazy_updates"], "try --l2_scope=batch."),
        (["--cowclip_ratio=1", "--l2_scope=table"], "adds it to all rows; try --l2_scope=batch."),
        (["--cowclip_ratio=1", "--cowclip_min_norm=0"], "try --cowclip_min_norm=1e-5."),
        (["--optimizer=ftrl", "--learning_rate=0"], "=ftrl divides by its rate: --learning_rate"),
        (["--optimizer=adadelta"], "adam|adagrad|sgd|momentum|ftrl"),
        (["--task_type=eval", "--val_data_dir={}/test.tfrecords"], "has no checkpoint"),
        (["--task_type=infer", "--infer_data_dir={}/test.tfrecords"], "has no checkpoint"),
        (["--task_type=export", "--servable_model_dir={}/x"], "has no checkpoint"),
        (["--learning_rate_decay_on_plateau=0.1"], "needs evaluations"),
        (["--training_data_dir="], "--training_data_dir is missing"),
        (["--clear_existing_model", "--model_dir={}/model/.."], "is the folder of --train"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_sentence(bad_files, tmp_path, flags, sentence):
    data, given = bad_files / "train.tfrecords", [flag.format(bad_files) for flag in flags]
    done = run_train(*small_training(data, tmp_path / "model", *given))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert sentence in last
    assert "Traceback" not in done.stderr
    if "model_dir" not in " ".join(flags):
        assert not tf.train.latest_checkpoint(str(tmp_path / "model"))
    left = tmp_path / "model"
    assert not left.exists() or list(left.iterdir()), "an empty folder"


@pytest.fixture(scope="module")
def bad_files(trained):
    """The folder of `trained`, with damaged copies of its training data."""
    folder, _ = trained
    whole = (folder / "train.tfrecords").read_bytes()
    frame = len(whole) // 3000
    flipped = bytearray(whole)
    flipped[frame + 40] ^= 1
    (folder / "flipped.tfrecords").write_bytes(bytes(flipped))
    (folder / "cut.tfrecords").write_bytes(whole[:-7])
    packed = gzip.compress(whole)
    (folder / "cut.tfrecords.gz").write_bytes(packed[:-1000])
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 1
    (folder / "damaged.tfrecords.gz").write_bytes(bytes(damaged))
    (folder / "two.tfrecords.gz").write_bytes(packed + packed)
    return folder


def test_max_bad_records_skips_that_many_and_reports_them(bad_files, tmp_path):
    data = f"{bad_files}/flipped.tfrecords,{bad_files}/cut.tfrecords"
    flags = small_training(data, tmp_path / "model")
    refused = run_train(*flags, "--max_bad_records=1", code=2)
    assert "flipped.tfrecords: record 1 at" in refused.stderr.splitlines()[-1]
    run_train(*flags, "--max_bad_records=2", code=0)
    assert report_of(tmp_path)["skipped_records"] == 2
    assert report_of(tmp_path)["examples"] == 5998


def test_a_model_of_real_criteo_rows_learns(tmp_path):
    data = shared_data("criteo_sample/va.tfrecords")
    run_train(
        f"--training_data_dir={data}", f"--val_data_dir={data}", "--feature_size=117581",
        f"--model_dir={tmp_path}/model", "--num_epochs=2", "--batch_size=256", code=0,
    )  # fmt: skip
    assert report_of(tmp_path)["eval"]["auc"] > 0.75


@pytest.mark.parametrize(
    "what, sentence",
    [("grows", "train on files that nobody writes to"), ("vanishes", "deleted since")],
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, what, sentence):
    path = tmp_path / "a.tfrecords"
    write_tfrecords(path, make_records(640))
    more = "--num_epochs=100000", "--log_steps=1", "--save_checkpoints_steps=5"
    with started_train(*small_training(path, tmp_path / "model", *more)) as process:
        until(process.stdout, "step 20 ")
        if what == "grows":
            with open(path, "ab") as f:
                f.write(path.read_bytes()[:1000])
        else:
            path.unlink()
        text, _ = process.communicate(timeout=180)
    assert process.returncode == 2, text
    last = text.splitlines()[-1]
    assert last.startswith(f"train.py: {path}: ") and sentence in last
    assert tf.train.load_variable(str(tmp_path / "model"), "global_step") >= 15


@pytest.mark.parametrize(
    "given, more, said",
    [
        (["infer_data_dir"], {}, "--infer_data_dir has no effect with --task_type=train."),
        (["training_data_dir"], {"task_type": "eval"}, "--training_data_dir has no effect with"),
        (["training_data_dir", "val_data_dir", "servable_model_dir"], {}, None),
        (["val_data_dir"], {"task_type": "eval", "val_data_dir": "a"}, None),
        (["val_data_dir"], {"task_type": "infer"}, None),  # the article's scripts predict it
        (
            ["val_data_dir"],
            {"task_type": "infer", "infer_data_dir": "c"},
            "--val_data_dir has no effect with --task_type=infer.",
        ),
        (
            ["val_data_dir"],
            {"task_type": "export", "export_format": "npz"},
            "--val_data_dir has no effect with --export_format=npz.",
        ),
        (["val_data_dir"], {"export_format": "npz"}, None),
        (["item_fields"], {"export_format": "npz"}, "--item_fields has no effect with"),
        (["export_format"], {"task_type": "infer", "export_format": "npz"}, "--export_format has"),
    ],
)
def test_flags_that_do_nothing_are_said(caplog, given, more, said):
    more = dict(more)
    validation, predicted = more.pop("val_data_dir", "b"), more.pop("infer_data_dir", None)
    data = InputConfig(1, training_data_dir="a", val_data_dir=validation, infer_data_dir=predicted)
    asked = {"task_type": "train", "export_format": "saved_model", "input": data, **more}
    job = SimpleNamespace(given=given, **asked)
    jobs._warn_of_idle_flags(job)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_a_batch_larger_than_the_data_is_said(tmp_path):
    data = write_tfrecords(tmp_path / "a.tfrecords", make_records(40))
    dataset_json.write(
        str(tmp_path), 4, 50, [DataFile(data, os.path.getsize(data), rows=40, positives=20)]
    )
    done = run_train(
        *SMALL_MODEL, f"--training_data_dir={tmp_path}/*s", f"--model_dir={tmp_path}/model", code=0
    )
    assert "every step uses all 40 records; try --batch_size=4." in done.stderr


def test_a_report_is_kept_for_the_step_that_it_tells_of_alone(tmp_path):
    path = tmp_path / "report.json"
    for text, kept in (
        (json.dumps({"global_step": 7, "examples": 5}), {"global_step": 7, "examples": 5}),
        (json.dumps({"global_step": 6, "examples": 5}), {}),  # of a run before
        ("[", {}),
        ("[]", {}),
    ):
        path.write_text(text)
        assert jobs._report_of_step(str(path), 7) == kept
