"""--auto chooses settings by the number of records, says so, and keeps to it."""

import json
import re

import pytest
from conftest import make_records, report, run_horovod, run_train, write_libsvm, write_tfrecords

from deepfm.config import auto

ROWS = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of records to train on and to evaluate, of 4 fields and 50 features."""
    folder = tmp_path_factory.mktemp("data")
    write_tfrecords(folder / "train.tfrecords", make_records(ROWS))
    write_tfrecords(folder / "valid.tfrecords", make_records(100, seed=1))
    write_libsvm(folder / "other.libsvm", make_records(2 * ROWS))
    return folder


@pytest.fixture(scope="module")
def flags(folder):
    """model_dir -> flags of a training with --auto."""
    return lambda model_dir, *more, data="train.tfrecords": [
        f"--training_data_dir={folder / data}", f"--val_data_dir={folder / 'valid.tfrecords'}",
        f"--model_dir={model_dir}", "--auto", "--feature_size=50", *more,
    ]  # fmt: skip


def kept(model_dir):
    return json.loads((model_dir / "run.json").read_text())["parts"][-1]["settings"]["auto"]


def copied(done):
    """The flags that a training logged to copy."""
    (line,) = re.findall(r"--auto for [\d,]+ records: (.*)", done.stderr)
    return line.split()


def test_the_logged_flags_train_the_same_model_and_two_ranks_choose_alike(flags, tmp_path):
    auto, copy, two = (tmp_path / name for name in ("auto", "copy", "two"))
    done = run_train(*flags(auto, "--num_epochs=2"))
    again = run_train(*set(flags(copy, "--num_epochs=2")) - {"--auto"}, *copied(done))
    last = lambda done: done.stderr.rpartition("Best evaluation: ")[2]
    assert "auc=" in last(done) and last(done) == last(again)
    assert (auto / "model.json").read_text() == (copy / "model.json").read_text()
    found = report(auto)
    assert found["global_batch_size"] == found["auto"]["global_batch_size"]
    assert found["auto"]["rows"] == ROWS
    words = flags(two, "--num_epochs=2", "--max_steps=4")
    words[words.index("--auto")] = "--auto_settings"  # horovodrun takes --auto for --autotune
    assert copied(run_horovod(2, *words, code=0)) == copied(done)
    assert report(two)["global_batch_size"] == found["global_batch_size"]


def test_what_is_given_is_not_chosen(flags, tmp_path):
    given = "--batch_size=100", "--dropout=0.1,0.2,0.3", "--num_epochs=1", "--optimizer=sgd"
    names = {word.partition("=")[0] for word in copied(run_train(*flags(tmp_path / "m", *given)))}
    assert names == {"--embedding_size", "--l2_reg", "--export", "--best_metric"}
    found = report(tmp_path / "m")
    assert (found["global_batch_size"], found["global_step"]) == (100, -(-ROWS // 100))
    model = json.loads((tmp_path / "m" / "model.json").read_text())
    assert (model["deep_layers"], model["dropout"]) == ([256, 128, 64], [0.1, 0.2, 0.3])


def test_a_run_that_goes_on_keeps_to_what_was_chosen(flags, tmp_path):
    """As if the rule had become another one in between."""
    model = tmp_path / "model"
    run_train(*flags(model, "--max_steps=3"))
    path = model / "run.json"
    content = json.loads(path.read_text())
    content["parts"][-1]["settings"]["auto"].update(learning_rate=0.002, num_epochs=2)
    path.write_text(json.dumps(content))
    done = run_train(*flags(model))
    assert {"--learning_rate=0.002", "--num_epochs=2"} <= set(copied(done))
    assert kept(model)["learning_rate"] == 0.002
    assert report(model)["global_step"] == 2 * ROWS // kept(model)["global_batch_size"]
    width = json.loads((model / "model.json").read_text())["embedding_size"]
    done = run_train(*flags(model, "--max_steps=12", data="other.libsvm"))
    assert "--learning_rate=0.002" not in copied(done)
    assert f"--embedding_size={width}" in copied(done)
    assert kept(model)["rows"] == 2 * ROWS


@pytest.mark.parametrize("rows", [1, 100, 19_999, 20_000, 10**6, 10**10])
def test_the_rule_has_a_value_for_any_number_of_records(rows):
    found = auto.rule(rows)
    assert 64 <= found["global_batch_size"] <= 1024 and 3 <= found["num_epochs"] <= 30
