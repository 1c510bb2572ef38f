"""scripts/search.py: what it refuses, finds and prunes, and how it goes on after a kill."""

import contextlib
import json
import pathlib
import signal
import sqlite3
import subprocess
import sys
import sysconfig

import psutil
import pytest
from conftest import (
    ROOT,
    SCRIPT,
    SMALL_MODEL,
    evaluations,
    finish,
    held_train,
    run_python,
    run_train,
    started,
    wait_until,
)

from deepfm.config import InputConfig, ModelConfig, OptimizerConfig

PYTHON = ROOT / ".venv-search" / "bin" / "python"
# Trainings start programs, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(300)
with_optuna = pytest.mark.skipif(
    not PYTHON.exists(), reason="scripts/setup.sh --tests makes .venv-search"
)


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch):
    """Those of .venv, which has the same TensorFlow."""
    folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "deepfm_kernels"
    monkeypatch.setenv("DEEPFM_KERNELS_DIR", str(folder))


def search(data, output, *flags, trials=1, words=()):
    """The command of a search of small trainings, one at a time."""
    of_training = [*SMALL_MODEL, "--batch_size=64", "--dropout=0", f"--training_data_dir={data}"]
    of_search = [f"--output_dir={output}", f"--trials={trials}", "--parallel=1", *flags]
    return [
        PYTHON, "scripts/search.py", *of_search, "--", *of_training, f"--val_data_dir={data}",
        *words,
    ]  # fmt: skip


def held(command, folder, evaluations):
    """The command of a search whose trainings stay after some evaluations."""
    when = f"len(self.entries) == {evaluations}"
    train = held_train(folder, "deepfm.state.evaluations.History.keep", when)
    return [PYTHON, "-c", SCRIPT, PYTHON, train, *command[1:]]


def ended(command, code=0):
    """What a search writes, which has to end with a code."""
    return finish(started(command), timeout=280, code=code)


def kept(output):
    """[(state, its evaluations)] of the trials of a search, oldest first."""
    with contextlib.closing(sqlite3.connect(str(output / "search.db"))) as database:
        states = database.execute("select trial_id, state from trials order by 1").fetchall()
        of = "select intermediate_value from trial_intermediate_values where trial_id = ?"
        return [(state, [x for (x,) in database.execute(of, [i])]) for i, state in states]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--"], "--training_data_dir is missing; try search.py -- --training_data_dir=data/train"),
        (["--", "--training_data_dir=x"], "--val_data_dir is missing; try search.py -- --val_data"),
        (["--", "--model_dir=m"], "--training_data_dir is missing"),
        (["--trials=0", "--"], "--trials"),
        (["--minutes=x", "--"], "--minutes"),
    ],
)
@with_optuna
def test_refuses_wrong_flags_in_a_sentence(tmp_path, words, said):
    command = [PYTHON, "scripts/search.py", f"--output_dir={tmp_path}/out", *words]
    text = ended(command, code=2).stdout
    assert said in text and "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, words, said",
    [
        ([], ["--eval_every_steps=5"], "--eval_every_steps is set by search.py itself"),
        (["--tune=optimizer=adam"], [], "--tune=optimizer=adam is not a range or a choice; try"),
        (["--tune=dropout=0..0.5"], [], "--tune=dropout=0..0.5: --dropout is set already"),
        ([], ["--training_data_dir=nowhere"], "train.py does not run with these flags: train.py: "),
        (["--tune=optimizer=adam|adan"], ["--optimiser=x"], "train.py does not run with these "),
    ],
)
@with_optuna
def test_refuses_flags_of_trials_in_a_sentence(data, tmp_path, flags, words, said):
    text = ended(search(data, tmp_path, *flags, words=words), code=2).stdout
    assert said in text.splitlines()[-1] and "Traceback" not in text
    assert not (tmp_path / "best.flags").exists()


def test_without_optuna_a_sentence_says_how_to_get_it(tmp_path):
    command = [sys.executable, "scripts/search.py", f"--output_dir={tmp_path}/out", "--"]
    said = ended(command, code=2).stdout
    assert "has no Optuna; make .venv-search as docs/tuning.md says" in said


def test_the_first_trial_has_the_defaults_of_train_py():
    program = "import json, search; print(json.dumps(search._SPACE))"
    path = f"import sys; sys.path.insert(0, 'scripts'); {program}"
    space = json.loads(run_python("-c", path, code=0).stdout.splitlines()[-1])
    declared = {**ModelConfig.settings, **OptimizerConfig.settings, **InputConfig.settings}
    for name, (_, default) in space.items():
        setting = declared["batch_size" if name == "global_batch_size" else name]
        wanted = setting.default if setting.asked is ... else setting.asked
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        assert str(default) == ",".join(map(str, wanted)), name


@with_optuna
def test_finds_flags_that_train_as_it_says_and_goes_on_with_more_trials(data, tmp_path):
    output, words = tmp_path / "out", ["--num_epochs=1"]
    command = lambda trials: search(
        data, output, "--eval_every_records=320", trials=trials, words=words
    )
    assert "; 1 of 1 trials" in ended(command(1)).stdout
    said = ended(command(2)).stdout
    assert "; 2 of 2 trials" in said and "1 of 2" not in said
    assert [(state, len(found)) for state, found in kept(output)] == [("COMPLETE", 2)] * 2
    assert kept(output)[0] != kept(output)[1]
    best = max(max(found) for _, found in kept(output))
    text = (output / "best.flags").read_text()
    assert f"AUC {best:.6f}" in text and f"AUC {best:.6f}" in said
    assert "--eval_every_steps=5" in text.splitlines()
    assert (output / "search.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(output.glob("trial-*"))) == 1  # the best's model
    run_train(f"--flagfile={output}/best.flags", f"--model_dir={tmp_path}/model", code=0)
    found = [entry["auc"] for entry in evaluations(tmp_path / "model")]
    assert max(found) == pytest.approx(best, abs=1e-4)

    again = ended(command(2)).stdout  # nothing is left to do
    assert f"AUC {best:.6f}" in again and len(kept(output)) == 2
    words[0] = "--num_epochs=2"
    said = ended(command(3), code=2).stdout
    assert "has other flags" in said.splitlines()[-1] and len(kept(output)) == 2


_EARLIER = """
import sys
from optuna import create_study, trial
study = create_study(storage=f"sqlite:///{sys.argv[1]}", study_name="search", direction="maximize")
for i in range(5):
    study.add_trial(trial.create_trial(value=0.99, user_attrs={"folder": f"trial-{i}"},
                                       intermediate_values=dict.fromkeys(range(99), 0.99)))
"""


@with_optuna
def test_sigterm_ends_a_trial_that_is_worse_than_the_median(data, tmp_path):
    """Five trials before it reached .99, which it never does; left alone, it would take hours."""
    subprocess.run([PYTHON, "-c", _EARLIER, str(tmp_path / "search.db")], check=True)
    words = ["--num_epochs=100000", "--learning_rate=0"]
    said = ended(held(search(data, tmp_path, trials=6, words=words), tmp_path, 2), code=0).stdout
    assert "trial-5: AUC 0." in said and "pruned after 2 evaluations" in said
    state, found = kept(tmp_path)[-1]
    assert state == "PRUNED" and len(found) == 2
    assert "failed" not in said and not (tmp_path / "trial-5").exists()


@with_optuna
def test_a_search_that_was_killed_goes_on_where_it_was(data, tmp_path):
    command, path = search(data, tmp_path, words=["--num_epochs=6"]), tmp_path / "trial-0"
    made = lambda: len(evaluations(path)) if (path / "evaluations.json").exists() else 0
    for reached, (number, code) in enumerate(((signal.SIGTERM, 143), (signal.SIGKILL, -9)), 1):
        with started(held(command, tmp_path, reached)) as process:
            if number == signal.SIGTERM:
                assert wait_until(path.exists, 200)
                assert "another search runs there" in ended(command, code=2).stdout
            assert wait_until(lambda reached=reached: made() == reached, 200)
            trainings = psutil.Process(process.pid).children(recursive=True)
            (training,) = [x for x in trainings if "train.py" in " ".join(x.cmdline())]
            process.send_signal(number)
            assert wait_until(lambda training=training: not training.is_running(), 180)
            assert process.wait(timeout=180) == code
        state, found = kept(tmp_path)[-1]
        assert state == "RUNNING" and len(found) < 6 and not (tmp_path / "best.flags").exists()
    ended(command)
    *killed, (state, found) = kept(tmp_path)
    assert [x for x, _ in killed] == ["FAIL"] * 2 and state == "COMPLETE"
    assert len(found) == 6 and all(found[: len(before)] == before for _, before in killed)
