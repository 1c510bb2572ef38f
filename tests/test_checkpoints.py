"""Real checkpoints, damaged in every way that a kill or a disk can: which one is used?"""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import fill, job_of, run_train, small_job, started_train, wait_until
from kills import killed_after
from test_parameter_servers import addresses

from deepfm import plan
from deepfm.errors import BadInput
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints, damage, saving

v1 = tf.compat.v1


def save(folder, steps=(1, 2), servers=()):
    """Saves checkpoints whose variable `a` is the step everywhere, in a shard for each server."""
    folder.mkdir(exist_ok=True)
    with tf.Graph().as_default():
        parts = v1.fixed_size_partitioner(max(len(servers), 1))
        with tf.device(v1.train.replica_device_setter(len(servers))):
            # Whether other tests have enabled resource variables or not, as many shards.
            step = v1.get_variable(
                "global_step", [], tf.int64, v1.zeros_initializer(), trainable=False,
                collections=[v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.GLOBAL_STEP],
                use_resource=False,
            )  # fmt: skip
            a = v1.get_variable("a", [50, 3], partitioner=parts, use_resource=False)
        saver = v1.train.Saver(sharded=True, max_to_keep=9, save_relative_paths=True)
        with v1.Session(servers[0].target if servers else "") as session:
            for number in steps:
                session.run([part.assign(tf.fill(part.shape, float(number))) for part in a])
                session.run(step.assign(number))
                saver.save(session, str(folder / "model.ckpt"), global_step=number)


@pytest.fixture
def folder(tmp_path):
    """A folder with the whole checkpoints model.ckpt-1 and model.ckpt-2."""
    save(tmp_path / "model")
    return tmp_path / "model"


def used(folder):
    """The step of the checkpoint that TensorFlow finds, all of whose numbers are that; or None."""
    path = tf.train.latest_checkpoint(str(folder))
    if not path:
        return None
    step = int(tf.train.load_variable(path, "global_step"))
    assert (tf.train.load_variable(path, "a") == step).all()
    return step


def named(folder):
    return [os.path.basename(x) for x in tf.train.get_checkpoint_state(str(folder))
            .all_model_checkpoint_paths]  # fmt: skip


def cut(path, size=-1):
    with open(path, "r+b") as f:
        f.truncate(os.path.getsize(path) + size if size < 0 else size)


def test_a_model_dir_is_claimed_until_the_end_of_its_job(tmp_path):
    job, refused = job_of(model_dir=str(tmp_path / "model")), "another process is training there"
    for _ in range(2):
        with contextlib.ExitStack() as of_job:
            plan.open_model(job, of_job.enter_context)
            with pytest.raises(BadInput, match=refused):
                plan.open_model(job, of_job.enter_context)


def test_a_folder_that_another_start_removes_is_not_claimed(tmp_path, monkeypatch):
    removed_before = lambda *_, **__: (tmp_path / "model").rmdir() or True
    monkeypatch.setattr(checkpoints.atomic_files, "lock", removed_before)
    claimed = checkpoints.claimed(str(tmp_path / "model"))
    with pytest.raises(BadInput, match="another process is training there; wait for it"), claimed:
        pass


def prepare(folder, tidy=True):
    """Prepares a folder; returns what is logged."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(checkpoints.logging, "warning", lambda text, *x: lines.append(text % x))
        checkpoints.prepare(str(folder), tidy)
    return lines


@pytest.mark.parametrize("tidy", [True, False])
def test_whole_checkpoints_are_left_as_they_are(folder, tidy):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert prepare(folder, tidy) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize(
    "text", [None, b"", b"garbage", b"\xff\xfe\0", b'model_checkpoint_path: "m']
)
def test_a_state_file_that_is_lost_is_made_again(folder, text, tidy):
    (folder / "checkpoint").unlink()
    if text is not None:
        (folder / "checkpoint").write_bytes(text)
    (line,) = prepare(folder, tidy)
    assert "model.ckpt-2" in line
    assert used(folder) == 2
    assert named(folder) == ["model.ckpt-1", "model.ckpt-2"]


DATA = "model.ckpt-2.data-00000-of-00001"
DAMAGE = {
    "index missing": (lambda f: (f / "model.ckpt-2.index").unlink(), "index is missing"),
    "index empty": (lambda f: cut(f / "model.ckpt-2.index", 0), "index is damaged"),
    "index cut": (lambda f: cut(f / "model.ckpt-2.index"), "index is damaged"),
    "data missing": (lambda f: (f / DATA).unlink(), f"{DATA} is missing"),
    "data empty": (lambda f: cut(f / DATA, 0), "0 of 608 bytes"),
    "data one byte short": (lambda f: cut(f / DATA), "607 of 608 bytes"),
    "all missing": (lambda f: [x.unlink() for x in f.glob("model.ckpt-2.*")], "index is missing"),
}


@pytest.mark.parametrize("state", ["named", "no state"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over(folder, damage, state):
    break_it, reason = DAMAGE[damage]
    break_it(folder)
    if state == "no state":
        (folder / "checkpoint").unlink()
    text = "\n".join(prepare(folder))
    if (damage, state) != ("all missing", "no state"):  # these leave no trace of it
        assert "model.ckpt-2 (" in text and reason in text and "using model.ckpt-1." in text
    assert used(folder) == 1
    assert named(folder) == ["model.ckpt-1"]


def test_every_byte_that_the_index_lacks_is_noticed(folder):
    whole = (folder / "model.ckpt-2.index").read_bytes()
    for i in range(len(whole)):
        (folder / "model.ckpt-2.index").write_bytes(
            whole[:i] + bytes([whole[i] ^ 64]) + whole[i + 1 :]
        )
        found = damage.problem(str(folder / "model.ckpt-2"))
        if found is None:  # no harm done
            assert (tf.train.load_variable(str(folder / "model.ckpt-2"), "a") == 2).all()


def parameter_servers(count):
    """Parameter servers that live as long as this process."""
    cluster = {"ps": addresses(count)}
    return [tf.distribute.Server(cluster, "ps", i) for i in range(count)]


@pytest.mark.parametrize("damage", [None, "missing", "short"])
def test_each_shard_of_a_parameter_servers_checkpoint_counts(tmp_path, damage):
    save(tmp_path, servers=parameter_servers(3))
    shards = sorted(tmp_path.glob("model.ckpt-2.data-*"))
    assert len(shards) == 3
    if damage == "missing":
        shards[1].unlink()
    elif damage == "short":
        cut(shards[-1])
    prepare(tmp_path)
    assert used(tmp_path) == (1 if damage else 2)


def test_shards_of_an_older_save_with_other_servers_do_not_count(folder):
    cut(folder / DATA)
    for i in range(2):
        (folder / f"model.ckpt-2.data-0000{i}-of-00002").write_bytes(bytes(304))
    prepare(folder)
    assert used(folder) == 1


def test_what_a_killed_save_left_is_deleted_and_nothing_else(folder):
    kept = {path.name for path in folder.iterdir()} | {"my_temp_notes", "model.ckpt-1.tempting"}
    uid = "0123456789abcdef" * 2
    (folder / f"model.ckpt-3_temp_{uid}").mkdir()
    (folder / f"model.ckpt-3_temp_{uid}" / "part-00000-of-00001.index").touch()
    for name in (
        "my_temp_notes", "model.ckpt-1.tempting", f"checkpoint.tmp{uid}",
        f"model.ckpt-3.meta.tmp{uid}", "model.ckpt-3.data-00000-of-00001.tempstate123456",
    ):  # fmt: skip
        (folder / name).touch()
    checkpoints.prepare(str(folder), tidy=False)  # a job that evaluates leaves it to who saves
    assert (folder / f"model.ckpt-3_temp_{uid}").exists()
    checkpoints.prepare(str(folder), tidy=True)
    assert {path.name for path in folder.iterdir()} == kept
    assert used(folder) == 2


def test_a_kill_while_an_older_checkpoint_is_deleted_leaves_nothing_of_it(folder, monkeypatch):
    (folder / ".reading-1234").mkdir()  # a killed job's
    (folder / "best" / ".reading-abcdefgh").mkdir(parents=True)
    for kept in range(20):
        made, ended = folder / f"model.ckpt-{9 + kept}_temp_{32 * 'a'}", False
        save(made, steps=(9 + kept,))
        (made / "checkpoint").unlink()

        with killed_after(monkeypatch, kept, (os, "remove")):
            saving.add(str(made), 2)
            ended = True
        checkpoints.prepare(str(folder), True)
        assert used(folder) == 9 + kept
        assert set(checkpoints.by_name(os.listdir(folder))) == set(named(folder))
        if ended:
            break
    assert ended and len(named(folder)) == 2
    assert not list(folder.glob("**/.reading-*"))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_whose_naming_a_kill_cut_short_is_used(folder, monkeypatch, is_first):
    for left in range(5):  # three files, the state file, the folder in which it was made
        copy = folder.parent / f"copy{left}"
        copy.mkdir() if is_first else shutil.copytree(str(folder), str(copy))
        made = copy / f"model.ckpt-3_temp_{32 * 'a'}"
        save(made, steps=[3])
        (made / "checkpoint").unlink()
        with killed_after(monkeypatch, left, (os, "replace"), (os, "rmdir")):
            saving.add(str(made), 9)
        assert list(copy.glob("*_whole"))
        if not is_first:
            prepare(copy, tidy=False)
            assert used(copy) == (2 if left < 4 else 3)  # it may still be being written
        assert prepare(copy) == []
        assert used(copy) == 3 and not list(copy.glob("*_whole"))
        assert named(copy) == [f"model.ckpt-{i}" for i in range(1, 4) if i == 3 or not is_first]


def test_who_goes_back_to_an_older_checkpoint_by_hand_gets_it(folder):
    text = (folder / "checkpoint").read_text()
    for going_back in (
        text.replace('model.ckpt-2"', 'model.ckpt-1"', 1),
        'model_checkpoint_path: "model.ckpt-1"\n',
    ):  # fmt: skip
        (folder / "checkpoint").write_text(going_back)
        prepare(folder)
        assert used(folder) == 1


def test_a_moved_folder_uses_its_own_checkpoints_though_the_old_ones_are_still_there(folder):
    copy = folder.parent / "copy"
    shutil.copytree(str(folder), str(copy))
    paths = [str(folder / f"model.ckpt-{i}") for i in (1, 2)]
    v1.train.update_checkpoint_state(str(copy), paths[1], paths)
    save(folder, steps=[1, 2])
    prepare(copy)
    assert tf.train.latest_checkpoint(str(copy)) == str(copy / "model.ckpt-2")
    assert named(copy) == ["model.ckpt-1", "model.ckpt-2"]


def test_a_folder_without_a_whole_checkpoint_is_refused_by_the_names_in_it(folder):
    for name in ("model.ckpt-1.index", DATA):
        (folder / name).unlink()
    with pytest.raises(
        BadInput, match="model.ckpt-1.index is missing.*00001 is missing.*--clear_ex"
    ):
        prepare(folder)


def test_a_folder_that_is_not_there_or_empty_is_no_models(tmp_path):
    prepare(tmp_path / "none")
    prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Real jobs.


def kill_while_saving(data, folder, seconds):
    """Kills a training run that saves each step, some seconds after its second checkpoint."""
    flags = "--save_checkpoints_steps=1", "--num_epochs=1000", "--keep_checkpoint_max=3"
    before = newest_whole(folder)
    with started_train(*small_job(data, folder, *flags)) as process:
        saved = lambda: map(checkpoints.step, checkpoints.read_state(str(folder)).names)
        assert wait_until(lambda: max(saved(), default=0) >= before + 2, 180, 0.001)
        time.sleep(seconds)
        process.kill()


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "model"
    kill_while_saving(data, folder, 1)
    assert len(list(folder.glob("model.ckpt-*.index"))) > 1
    return folder


@pytest.fixture
def model(killed, tmp_path):
    """The model_dir of a run that was killed while it saved checkpoint after checkpoint."""
    shutil.copytree(str(killed), str(tmp_path / "model"))
    return tmp_path / "model"


def files_of(folder, names):
    """The files of checkpoints, which a kill may leave on the way to their place, in PREFIX_whole/.

    Not those of best/, whose checkpoint may be the newest too.
    """
    found = *folder.glob(f"model.ckpt-{names}"), *folder.glob(f"*_whole/model.ckpt-{names}")
    return [path for path in found if path.is_file()]


def newest_whole(folder):
    """The newest checkpoint that can be read from end to end, the slow and obvious way."""
    found = [0]
    with tempfile.TemporaryDirectory() as copies:
        for path in files_of(folder, "*"):
            shutil.copy(str(path), copies)
        for index in Path(copies).glob("*.index"):
            path = str(index)[: -len(".index")]
            with contextlib.suppress(tf.errors.OpError, ValueError):
                for name, _ in tf.train.list_variables(path):
                    tf.train.load_variable(path, name)
                found.append(int(path.rpartition("-")[2]))
    return max(found)


def check_goes_on(data, folder):
    """Training goes on from the newest checkpoint that can be read; what was cut short is gone."""
    step = newest_whole(folder)
    done = run_train(
        *small_job(data, folder, f"--max_steps={step + 2}", "--num_epochs=1000"), code=0
    )
    assert "Trained 2 steps" in done.stderr, done.stderr
    assert not list(folder.glob("*temp*")) and not list(folder.glob("*.tmp*"))
    return step


def test_a_run_that_is_killed_while_it_saves_goes_on(data, model):
    check_goes_on(data, model)


def test_training_goes_on_where_the_state_file_is_empty_and_the_newest_is_cut(data, model):
    (model / "checkpoint").write_bytes(b"")
    step = newest_whole(model)
    (newest,) = files_of(model, f"{step}.data-*")
    cut(newest, -100)
    assert 0 < check_goes_on(data, model) < step


def test_a_flipped_bit_is_refused_in_one_sentence_that_names_checkpoint_and_cure(data, model):
    prepare(model)
    name = os.path.basename(tf.train.latest_checkpoint(str(model)))
    path = model / f"{name}.data-00000-of-00001"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    done = run_train(*small_job(data, model), code=2)
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"{model}/{name} is damaged" in last
    assert f"delete {name}.* and run the same command again" in last
    for path in model.glob(f"{name}.*"):
        path.unlink()
    prepare(model)
    older = tf.train.latest_checkpoint(str(model))
    assert f"to resume from {os.path.basename(older)}" in last
    assert damage.first_damaged(older) is None


def test_training_that_finds_no_room_keeps_the_last_checkpoint_and_goes_on_later(
    data, model, small_disk
):
    step = newest_whole(model)
    folder = small_disk / "model"
    shutil.copytree(str(model), str(folder), ignore=shutil.ignore_patterns("events*", "*.meta"))
    filling = fill(small_disk, 8192)
    done = run_train(*small_job(data, folder, f"--max_steps={step + 2}"), code=1)
    said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert "No space left on device" in said[-1]
    assert "Traceback" not in done.stderr
    assert newest_whole(folder) == step
    filling.unlink()
    check_goes_on(data, folder)


@pytest.mark.table
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_over_and_over_while_it_saves_goes_on(data, tmp_path):
    random, step = np.random.RandomState(1), 0
    for _ in range(30):
        kill_while_saving(data, tmp_path / "model", random.rand() * 0.5)
        assert check_goes_on(data, tmp_path / "model") >= step
        step = newest_whole(tmp_path / "model")
