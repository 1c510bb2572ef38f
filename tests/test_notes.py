"""What a checkpoint notes makes model.json, run.json and evaluations.json again."""

import json

import pytest
from conftest import make_records, report, run_train, small_job, write_tfrecords
from test_checkpoints import save

from deepfm.state import checkpoints, notes

FILES = "model.json", "run.json", "evaluations.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tfrecords(tmp_path_factory.mktemp("data") / "a.tfrecords", make_records(640))


@pytest.mark.parametrize("blank", [b"", bytes(300)], ids=["empty", "zeroed"])
def test_an_unattended_restart_makes_what_a_power_cut_emptied_again(data, tmp_path, blank):
    folder = tmp_path / "model"
    job = small_job(data, folder, "--eval_every_steps=4", "--num_epochs=2")
    assert run_train(*job, "--max_steps=13").returncode == 0
    before = {name: json.loads((folder / name).read_text()) for name in FILES}
    for name in FILES:
        (folder / name).write_bytes(blank)
    done = run_train(*job, code=0)
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


def test_what_no_checkpoint_notes_and_what_is_garbled_stays_as_it_is(data, tmp_path):
    folder = tmp_path / "old"
    save(folder)
    for name in FILES:
        (folder / name).write_bytes(b"")
    notes.restore(str(folder))
    assert [(folder / name).read_bytes() for name in FILES] == 3 * [b""]
    job = small_job(data, tmp_path / "new", "--eval_every_steps=4")
    assert run_train(*job).returncode == 0
    for name in FILES:
        (tmp_path / "new" / name).write_bytes(b"{")
    notes.restore(str(tmp_path / "new"))
    assert [(tmp_path / "new" / name).read_bytes() for name in FILES] == 3 * [b"{"]
    assert len(checkpoints.read_state(str(tmp_path / "new")).names) > 1
