"""--evaluate_first: a day's rows are judged by yesterday's weights; what is kept of each day."""

import json
import shutil
from types import SimpleNamespace

import pytest
from conftest import evaluations, report, run_mode, run_python, run_train
from mode_steps import check_same
from test_days import prepared

FLAGS = (
    "--embedding_size=4", "--deep_layers=8", "--batch_size=32", "--learning_rate=0.01",
    "--num_epochs=2", "--dropout=0.3", "--learning_rate_decay_on_plateau=0.5",
    "--early_stopping_patience=3", "--evaluate_first",
)  # fmt: skip
ONE_EPOCH = "--num_epochs=1", "--learning_rate_decay_on_plateau=1", "--early_stopping_patience=0"
in_table = lambda *values: pytest.param(*values, marks=pytest.mark.table)


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """The folders of three days, a model of the first, one that went on with the second, and what
    their trainings said."""
    folder, outs = tmp_path_factory.mktemp("line"), []
    for day in range(3):
        outs.append(prepared(folder, day, outs[-1] if day else None, split="0.8,0.2,0"))
    said = train(outs, 0, folder / "model").stderr
    shutil.copytree(str(folder / "model"), str(folder / "grown"))
    grown_said = train(outs, 1, folder / "grown").stderr
    models = {"model": folder / "model", "grown": folder / "grown"}
    return SimpleNamespace(outs=outs, said=said, grown_said=grown_said, **models)


def words_of(outs, day, model, *more):
    data = f"--training_data_dir={outs[day]}/train", f"--val_data_dir={outs[day]}/valid"
    return (*FLAGS, *data, f"--model_dir={model}", *more)


def train(outs, day, model, *more, mode="local", **how):
    return run_mode(mode, *words_of(outs, day, model, *more), **{"code": 0, **how})


@pytest.fixture(scope="module")
def wanted(line):
    """The evaluation of the second day's rows by the model of the first."""
    judge = "--task_type=eval", f"--model_dir={line.model}", f"--val_data_dir={line.outs[1]}/train"
    run_train(*judge, code=0)
    return report(line.model, "eval")["eval"]


@pytest.fixture
def model(line, tmp_path):
    shutil.copytree(str(line.model), str(tmp_path / "model"))
    return tmp_path / "model"


def firsts(model):
    return [entry for entry in evaluations(model) if entry.get("first")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["local", in_table("tower"), "mirrored", "horovod", "ps"])
def test_the_days_rows_are_judged_by_the_weights_of_the_day_before(line, wanted, model, mode):
    said = line.grown_said
    if mode == "local":
        model = line.grown
    else:
        said = train(line.outs, 1, model, *ONE_EPOCH, mode=mode).stderr
    (entry,) = firsts(model)
    assert entry["auc"] == pytest.approx(wanted["auc"], abs=1e-6)
    assert entry["log_loss"] == pytest.approx(wanted["log_loss"], abs=1e-6)
    assert entry["day"] == "day 1" and entry["new"] > 0 and entry["gone"] >= 0
    assert said.index("before the first step on them") < said.index("step=")
    assert list(model.glob("eval_first/*tfevents*"))


@pytest.mark.parametrize("mode", ["local", in_table("horovod")])
def test_training_is_the_same_with_and_without(line, model, mode):
    first = line.grown
    if mode != "local":
        first = shutil.copytree(str(model), str(model.parent / "first")) and model.parent / "first"
        train(line.outs, 1, first, mode=mode)
    train(line.outs, 1, model, "--noevaluate_first", mode=mode)
    check_same(first, model)
    assert [e for e in evaluations(first) if not e.get("first")] == evaluations(model)
    assert report(first)["best"] == report(model)["best"]


def test_it_counts_for_no_best_no_early_stop_and_no_rate(line, model):
    """It is better than all that follow."""
    kept = evaluations(model)
    step = max(e["step"] for e in kept)
    entry = {"step": step, "auc": 1.0, "log_loss": 0.0, "day": "day 1", "first": True}
    (model / "evaluations.json").write_text(json.dumps([*kept, entry]))
    train(line.outs, 1, model, "--early_stopping_patience=1")
    assert [e for e in firsts(model) if e["day"] == "day 1"] == [entry]  # it was not made again
    assert report(model)["best"]["step"] > step and report(model)["best"]["auc"] < 1
    assert len([e for e in evaluations(model) if e["day"] == "day 1"]) > 2


KILL = """
import os, sys
sys.path.insert(0, ".")
from deepfm import evaluation
from deepfm.state import evaluations
from tensorflow.compat.v1.train import MonitoredSession
when, *words = sys.argv[1:]
die = lambda *_, **__: os._exit(9)
if when == "before it is kept":
    evaluations.History.keep = die
else:
    run, left = MonitoredSession.run, iter(range(12))  # some are of evaluations
    MonitoredSession.run = lambda *a, **b: run(*a, **b) if next(left, None) is not None else die()
sys.argv = ["train.py", *words]
import runpy
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("when, again", [("before it is kept", 1), ("after some steps", 0)])
def test_after_a_kill_it_is_neither_repeated_nor_made_of_other_weights(line, model, when, again):
    words = words_of(line.outs, 1, model, "--save_checkpoints_steps=2")
    run_python("-c", KILL, when, *words, code=9)
    said = run_train(*words, code=0).stderr
    assert said.count("before the first step on them") == again
    assert evaluations(model) == evaluations(line.grown)  # with what came and went
    check_same(model, line.grown)


def test_days_stay_in_the_evaluations_and_in_the_report(line, tmp_path):
    model = shutil.copytree(str(line.grown), str(tmp_path / "model")) and tmp_path / "model"
    kept = evaluations(model)
    train(line.outs, 2, model)
    found = evaluations(model)
    assert [(e["day"], bool(e.get("first"))) for e in found] == [
        ("day 0", False), ("day 1", True), ("day 1", False), ("day 2", True),
        ("day 2", False), ("day 2", False),
    ]  # fmt: skip
    assert found[:2] == kept[:2] and found[2] in kept[2:]
    assert len({e["feature_size"] for e in found}) == 3
    run_python("scripts/report.py", str(model), code=0)
    page = (model / "report" / "report.html").read_text()
    assert "<h2>Days</h2>" in page and "<th>auc before</th>" in page
    assert page.count("day 2") >= 1 and (model / "report" / "auc_by_day.png").exists()


def test_a_fresh_model_judges_nothing_and_a_channel_is_refused(line, tmp_path):
    assert "--evaluate_first: the model has learned nothing yet" in line.said
    refused = run_train(
        *FLAGS, "--pipe_mode", f"--model_dir={tmp_path}/m", f"--input_dir={tmp_path}", code=2
    )
    assert "--evaluate_first=True" in refused.stderr
