"""What a checkpoint notes makes model.json, run.json and evaluations.json again."""

import json
import shutil

import pytest
from conftest import report, run_train, small_job
from test_checkpoints import save

from deepfm.state import checkpoints, saving

FILES = "model.json", "run.json", "evaluations.json"


def job(data, folder):
    return small_job(data, folder, "--eval_every_steps=4", "--num_epochs=2")


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory):
    """The model_dir of a run that was interrupted at step 13."""
    folder = tmp_path_factory.mktemp("interrupted") / "model"
    run_train(*job(data, folder), "--max_steps=13", code=0)
    return folder


def test_an_unattended_restart_makes_what_a_power_cut_emptied_again(data, interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "model")
    before = {name: json.loads((folder / name).read_text()) for name in FILES}
    for name, blank in zip(FILES, (bytes(300), b"", bytes(300))):
        (folder / name).write_bytes(blank)
    done = run_train(*job(data, folder), code=0)
    for name in FILES:
        assert done.stderr.count(f"{folder}/{name} was empty; made it again from what") == 1
    after = {name: json.loads((folder / name).read_text()) for name in FILES}
    assert after["model.json"] == before["model.json"]
    assert after["evaluations.json"][:3] == before["evaluations.json"][:3]
    assert [entry["step"] for entry in after["evaluations.json"][:5]] == [4, 8, 12, 16, 20]
    (part,), (was,) = after["run.json"]["parts"], before["run.json"]["parts"]
    for name in ("data", "order", "run_step", "step", "epoch"):
        assert part[name] == was[name]
    assert report(folder)["global_step"] == 20


def test_what_no_checkpoint_notes_and_what_is_garbled_stays_as_it_is(interrupted, tmp_path):
    folder = tmp_path / "old"
    save(folder)
    for name in FILES:
        (folder / name).write_bytes(b"")
    saving.restore_files(str(folder))
    assert [(folder / name).read_bytes() for name in FILES] == 3 * [b""]
    new = shutil.copytree(interrupted, tmp_path / "new")
    for name in FILES:
        (new / name).write_bytes(b"{")
    saving.restore_files(str(new))
    assert [(new / name).read_bytes() for name in FILES] == 3 * [b"{"]
    assert len(checkpoints.read_state(str(new)).names) > 1
