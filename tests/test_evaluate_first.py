"""--evaluate_first: a day's rows are judged by yesterday's weights; what is kept of each day."""

import json
import shutil

import pytest
from conftest import evaluations, report, run_mode, run_python, run_train
from mode_steps import check_same
from test_days import prepared

FLAGS = (
    "--embedding_size=4", "--deep_layers=8", "--batch_size=32", "--learning_rate=0.01",
    "--num_epochs=2",
)  # fmt: skip
MODES = "local", "tower", "mirrored", "horovod", "ps"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """(the folders of three days, a model of the first)."""
    folder, outs = tmp_path_factory.mktemp("line"), []
    for day in range(3):
        outs.append(prepared(folder, day, outs[-1] if day else None, split="0.8,0.2,0"))
    train(outs, 0, folder / "model")
    return outs, folder / "model"


def words_of(outs, day, model, *more):
    data = f"--training_data_dir={outs[day]}/train", f"--val_data_dir={outs[day]}/valid"
    return (*FLAGS, *data, f"--model_dir={model}", *more)


def train(outs, day, model, *more, mode="local", **how):
    return run_mode(mode, *words_of(outs, day, model, *more), **{"code": 0, **how})


@pytest.fixture
def model(line, tmp_path):
    shutil.copytree(str(line[1]), str(tmp_path / "model"))
    return tmp_path / "model"


def firsts(model):
    return [entry for entry in evaluations(model) if entry.get("first")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_the_days_rows_are_judged_by_the_weights_of_the_day_before(line, model, mode):
    outs, _ = line
    judge = "--task_type=eval", f"--model_dir={model}", f"--val_data_dir={outs[1]}/train"
    run_train(*judge, code=0)
    wanted = report(model, "eval")["eval"]
    said = train(outs, 1, model, "--evaluate_first", mode=mode).stderr
    (entry,) = firsts(model)
    assert entry["auc"] == pytest.approx(wanted["auc"], abs=1e-6)
    assert entry["log_loss"] == pytest.approx(wanted["log_loss"], abs=1e-6)
    assert entry["day"] == "day 1" and entry["new"] > 0 and entry["gone"] >= 0
    assert said.index("before the first step on them") < said.index("step=")
    assert list(model.glob("eval_first/*tfevents*"))


@pytest.mark.parametrize("mode", ["local", "horovod"])
def test_training_is_the_same_with_and_without(line, model, mode):
    outs, _ = line
    shutil.copytree(str(model), str(model.parent / "other"))
    flags = "--dropout=0.3", "--learning_rate_decay_on_plateau=0.5", "--early_stopping_patience=3"
    train(outs, 1, model, "--evaluate_first", *flags, mode=mode)
    train(outs, 1, model.parent / "other", *flags, mode=mode)
    check_same(model, model.parent / "other")
    own = [e for e in evaluations(model) if not e.get("first")]
    assert own == evaluations(model.parent / "other")
    assert report(model)["best"] == report(model.parent / "other")["best"]


def test_it_counts_for_no_best_no_early_stop_and_no_rate(line, model):
    """It is better than all that follow."""
    outs, _ = line
    kept = evaluations(model)
    step = max(e["step"] for e in kept)
    entry = {"step": step, "auc": 1.0, "log_loss": 0.0, "day": "day 1", "first": True}
    (model / "evaluations.json").write_text(json.dumps([*kept, entry]))
    flags = "--learning_rate_decay_on_plateau=0.5", "--early_stopping_patience=1"
    train(outs, 1, model, "--evaluate_first", "--num_epochs=3", *flags)
    assert [e for e in firsts(model) if e["day"] == "day 1"] == [entry]  # it was not made again
    assert report(model)["best"]["step"] > step and report(model)["best"]["auc"] < 1
    assert len([e for e in evaluations(model) if e["day"] == "day 1"]) > 2


KILL = """
import os, sys
sys.path.insert(0, ".")
from deepfm import evaluation
from deepfm.state import evaluations
from tensorflow.compat.v1.train import MonitoredSession
from tensorflow.estimator import Estimator
when, *words = sys.argv[1:]
die = lambda *_, **__: os._exit(9)
if when == "before it is kept":
    evaluations.History.keep = die
elif when == "before the first step":
    Estimator.train = die
elif when == "after some steps":
    run, left = MonitoredSession.run, iter(range(12))  # some are of evaluations
    MonitoredSession.run = lambda *a, **b: run(*a, **b) if next(left, None) is not None else die()
sys.argv = ["train.py", *words]
import runpy
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "when, again",
    [("before it is kept", 1), ("before the first step", 0), ("after some steps", 0)],
)
def test_after_a_kill_it_is_neither_repeated_nor_made_of_other_weights(line, model, when, again):
    outs, _ = line
    shutil.copytree(str(model), str(model.parent / "whole"))
    words = words_of(outs, 1, model, "--evaluate_first", "--save_checkpoints_steps=2")
    run_python("-c", KILL, when, *words, fresh=True, code=9)
    said = run_train(*words, code=0).stderr
    assert said.count("before the first step on them") == again
    train(outs, 1, model.parent / "whole", "--evaluate_first")
    assert evaluations(model) == evaluations(model.parent / "whole")  # with what came and went
    check_same(model, model.parent / "whole")


def test_days_stay_in_the_evaluations_and_in_the_report(line, model):
    outs, _ = line
    for day in (1, 2):
        train(outs, day, model, "--evaluate_first")
    kept = evaluations(model)
    assert [(e["day"], bool(e.get("first"))) for e in kept] == [
        ("day 0", False), ("day 1", True), ("day 1", False), ("day 2", True),
        ("day 2", False), ("day 2", False),
    ]  # fmt: skip
    assert len({e["feature_size"] for e in kept}) == 3
    run_python("scripts/report.py", str(model), fresh=True, code=0)
    page = (model / "report" / "report.html").read_text()
    assert "<h2>Days</h2>" in page and "<th>auc before</th>" in page
    assert page.count("day 2") >= 1 and (model / "report" / "auc_by_day.png").exists()
    (model / "evaluations.json").write_bytes(b"")  # a power cut
    train(outs, 2, model, "--evaluate_first")
    assert evaluations(model)[:4] == kept[:4]


def test_a_fresh_model_judges_nothing_and_a_channel_is_refused(line, tmp_path):
    outs, _ = line
    said = train(outs, 0, tmp_path / "new", "--evaluate_first").stderr
    assert "--evaluate_first: the model has learned nothing yet" in said
    refused = run_train(
        *FLAGS, "--evaluate_first", "--pipe_mode", f"--model_dir={tmp_path}/m",
        f"--input_dir={tmp_path}", code=2,
    )  # fmt: skip
    assert "--evaluate_first=True" in refused.stderr
