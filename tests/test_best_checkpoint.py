"""Training keeps its best checkpoint, and --checkpoint says which one a job uses."""

import os
import re
import shutil

import numpy as np
import pytest
from conftest import job_of, make_records, run_train, write_tfrecords
from kills import killed_after
from tensorflow.io import gfile
from test_best_export import STEPS, data, history, job  # noqa: F401  a fixture
from test_checkpoints import save, used

from deepfm import export
from deepfm.errors import BadInput
from deepfm.state import best, checkpoints, damage, evaluations


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):  # noqa: F811
    """(the folder, the entry of the best evaluation, standard error)."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [f for f in job(data, folder) if not f.startswith(("--servable", "--export"))]
    usual = "--best_metric=log_loss", "--keep_checkpoint_max=1", "--num_epochs=6"
    done = run_train(*flags, *usual, code=0)
    found = min(history(folder), key=lambda entry: entry["log_loss"])
    assert found != history(folder)[-1], "it has not learnt them by heart"
    return folder, found, done.stderr


def use(trained, task, which, *more, code=0):
    words = f"--model_dir={trained[0]}/model", f"--checkpoint={which}"
    return run_train(f"--task_type={task}", *words, *more, code=code)


def evaluation(data, trained, which):  # noqa: F811
    done = use(trained, "eval", which, f"--val_data_dir={data[0]}/val.tfrecords")
    step, loss = re.search(r"Evaluation: step=(\d+) .*log_loss=([\d.]+)", done.stderr).groups()
    return int(step), float(loss)


def test_the_end_tells_of_the_last_and_of_the_best(trained):
    _, found, said = trained
    lines = re.findall(r"(Best e|E)valuation: step=(\d+) .*?log_loss=([\d.]+)", said)
    assert lines[-1] == ("Best e", str(found["step"]), f"{found['log_loss']:.6f}")
    assert [line for line in lines if line[0] == "E"][-1][1] == str(6 * STEPS)


def test_each_evaluates_as_it_did_in_training(data, trained):  # noqa: F811
    folder, found, _ = trained
    step, loss = evaluation(data, trained, "best")
    assert (step, loss) == (found["step"], pytest.approx(found["log_loss"], abs=1e-6))
    assert evaluation(data, trained, "last")[0] == 6 * STEPS
    path = folder / "model" / best.FOLDER / f"model.ckpt-{step}"
    assert evaluation(data, trained, path) == (step, loss)


def test_there_is_one_and_it_is_inferred_and_exported(data, trained, tmp_path):  # noqa: F811
    folder, found, _ = trained
    kept = {name.partition(".")[2].partition(".")[0] for name in os.listdir(folder / "model/best")}
    assert kept == {"", f"ckpt-{found['step']}"}  # and the state file
    predicted = {}
    for which in ("last", "best"):
        path = tmp_path / which
        infer = f"--infer_data_dir={data[0]}/val.tfrecords", f"--predictions_file={path}"
        use(trained, "infer", which, *infer)
        predicted[which] = np.loadtxt(path)
    labels = data[1][0]
    loss = lambda p: -np.mean(np.where(labels > 0, np.log(p), np.log(1 - p)))
    assert loss(predicted["best"]) == pytest.approx(found["log_loss"], abs=1e-5)
    assert loss(predicted["last"]) > loss(predicted["best"])
    done = use(trained, "export", "best", f"--servable_model_dir={tmp_path}/servable")
    assert f"the model of step {found['step']} to" in done.stderr


def test_a_checkpoint_that_is_not_there_is_refused(data, trained, tmp_path):  # noqa: F811
    validation = f"--val_data_dir={data[0]}/val.tfrecords"
    done = use(trained, "eval", "model.ckpt-7", validation, code=2)
    assert "--checkpoint=model.ckpt-7: there is no such checkpoint; give last, best" in done.stderr
    train_only = [f for f in job(data, tmp_path) if not f.startswith(("--val", "--ser", "--exp"))]
    plain = [f for f in train_only if not f.startswith("--eval")]
    run_train(*plain, "--num_epochs=1", code=0)
    done = use((tmp_path,), "eval", "best", validation, code=2)
    assert "has no best checkpoint, which training keeps if it evaluates" in done.stderr


@pytest.mark.parametrize("damage", ["bits", "cut", "missing"])
def test_a_damaged_checkpoint_is_named(data, trained, tmp_path, damage):  # noqa: F811
    shutil.copytree(str(trained[0] / "model"), str(tmp_path / "model"))
    (newest,) = (tmp_path / "model/best").glob("model.ckpt-*.data-00000-of-00001")
    content = newest.read_bytes()
    newest.unlink()
    if damage != "missing":
        newest.write_bytes(content[:90] if damage == "cut" else bytes(x ^ 1 for x in content))
    path = str(newest).rpartition(".")[0]
    flags = f"--val_data_dir={data[0]}/val.tfrecords", f"--servable_model_dir={tmp_path}/servable"
    for task, which in (("eval", "best"), ("export", path)):
        done = use((tmp_path,), task, which, *flags, code=2)
        assert f"{path} is damaged: " in done.stderr.splitlines()[-1]
        assert "looking for the bad record" not in done.stderr


def test_a_part_of_a_checkpoint_or_its_folder_is_no_checkpoint(data, trained):  # noqa: F811
    folder = trained[0] / "model"
    for path in (folder, folder / "best", *(folder / "best").iterdir()):
        with pytest.raises(BadInput, match=f"--checkpoint={path}: there is no such checkpoint"):
            best.of_checkpoint(str(folder), str(path), lambda path: None)


def killed_at_each_change(monkeypatch, action, check):
    """Ends action() before its first, second, ... change to a file; calls check() after each."""
    changes = (os, "link"), (os, "replace"), (os, "remove"), (gfile, "remove")
    for kept in range(100):
        ended = False
        with killed_after(monkeypatch, kept, *changes):
            action()
            ended = True
        check()
        if ended:
            return kept
    raise AssertionError("it never ends")


def test_a_kill_anywhere_leaves_a_whole_best_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "model", steps=(1, 2, 3))
    folder = tmp_path / "model" / best.FOLDER
    keep = lambda step: best.keep(str(folder.parent), f"{folder.parent}/model.ckpt-{step}")
    keep(1)

    def check():
        (name,) = checkpoints.read_state(str(folder)).names
        assert damage.first_damaged(f"{folder}/{name}") is None

    changes = killed_at_each_change(monkeypatch, lambda: keep(2), check)
    assert changes > 6 and used(folder) == 2
    assert {x[:12] for x in os.listdir(folder)} == {"checkpoint", "model.ckpt-2"}
    best.forget_later(str(folder.parent), 2)
    assert used(folder) == 2

    def cleared():
        for name in checkpoints.read_state(str(folder)).names if folder.exists() else ():
            assert damage.first_damaged(f"{folder}/{name}") is None

    killed_at_each_change(
        monkeypatch, lambda: folder.exists() and best.forget_later(str(folder.parent), 1), cleared
    )
    assert checkpoints.read_state(str(folder)).names == []


def test_a_damaged_best_checkpoint_is_deleted(tmp_path, caplog):
    save(tmp_path / "model", steps=(1, 2))
    folder = tmp_path / "model" / best.FOLDER
    best.keep(str(folder.parent), f"{folder.parent}/model.ckpt-1")
    best.forget_later(str(folder.parent), 2)
    assert used(folder) == 1
    (path,) = folder.glob("model.ckpt-1.data-*")
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))
    best.forget_later(str(folder.parent), 2)
    assert "best/model.ckpt-1, which is damaged." in caplog.text
    assert not folder.exists()


def test_a_best_checkpoint_that_only_the_state_file_names_is_not_taken_for_damaged(tmp_path):
    """A remote one is not fetched if nothing exports it."""
    folder = tmp_path / "model" / best.FOLDER
    folder.mkdir(parents=True)
    checkpoints.write_state(str(folder), ["model.ckpt-1"])
    best.forget_later(str(folder.parent), 2)
    assert best.step_of(str(folder)) == 1


def test_auto_is_the_best_of_this_run(data, trained):  # noqa: F811
    _, found, _ = trained
    done = use(trained, "eval", "auto", f"--val_data_dir={data[0]}/val.tfrecords")
    assert f"Using the best checkpoint of this run, of step {found['step']} (" in done.stderr
    assert f"Evaluation: step={found['step']} " in done.stderr


def test_the_best_of_an_earlier_run_is_not_taken_for_this_runs(data, trained, tmp_path):  # noqa: F811
    """The next day's records without validation data, then with."""
    folder, found, _ = trained
    shutil.copytree(str(folder / "model"), str(tmp_path / "model"))
    next_day = write_tfrecords(tmp_path / "next.tfrecords", make_records(64, seed=5))
    begins = 6 * STEPS
    flags = f"--training_data_dir={next_day}", f"--model_dir={tmp_path}/model"
    run_train(*flags, "--batch_size=32", code=0)
    validation = f"--val_data_dir={data[0]}/val.tfrecords"
    kept = f"{tmp_path}/model/best/model.ckpt-{found['step']}"
    for task, flag in (
        ("eval", validation), ("infer", f"--infer_data_dir={next_day}"),
        ("export", f"--servable_model_dir={tmp_path}/servable"),
    ):  # fmt: skip
        done = use((tmp_path,), task, "best", flag, code=2)
        assert f"of step {found['step']}, is an earlier run's; the present one began at step " in (
            done.stderr
        )
        assert f"{begins} " in done.stderr and f"--checkpoint={kept}." in done.stderr
    assert evaluation(data, (tmp_path,), kept)[0] == found["step"]
    assert evaluation(data, (tmp_path,), "auto")[0] == begins + 2

    servable = f"--servable_model_dir={tmp_path}/auto"
    done = run_train(
        *flags, "--batch_size=32", "--num_epochs=2", validation, servable, "--export=auto", code=0
    )
    assert f"The checkpoint of step {found['step']} in {tmp_path}/model/best is the best of an" in (
        done.stderr
    )
    mine = max(history(tmp_path), key=lambda entry: entry["auc"])
    assert evaluation(data, (tmp_path,), "best")[0] == mine["step"]
    (path,) = (tmp_path / "auto").iterdir()
    assert export.stamp_of(str(path)).global_step == mine["step"]


def test_an_export_by_auto_without_validation_data_is_the_last(data, tmp_path):  # noqa: F811
    flags = [f for f in job(data, tmp_path) if not f.startswith(("--val", "--exp", "--eval"))]
    run_train(*flags, "--export=auto", "--max_steps=3", code=0)
    (path,) = (tmp_path / "servable").iterdir()
    assert export.stamp_of(str(path)).global_step == 3


def test_a_best_checkpoint_of_other_validation_data_is_said_before_it_is_replaced(tmp_path, caplog):
    folder = job_of(model_dir=str(tmp_path))
    past = evaluations.History(folder, 0, 10, "old")
    past.add(10, {"auc": 0.8, "log_loss": 0.4})
    past.keep()
    (tmp_path / best.FOLDER).mkdir()
    checkpoints.write_state(str(tmp_path / best.FOLDER), ["model.ckpt-10"])
    for data_then, said in (("old", 0), ("new", 1)):
        best.say_if_replaced(str(tmp_path), evaluations.History(folder, 0, 10, data_then))
        assert caplog.text.count("The checkpoint of step 10 in") == said
