"""Two trainings into one remote model_dir: the second is refused, or takes over from a dead one."""

import os
import re
import threading
import time
import types

import pytest
import s3_server
from conftest import finish, started_python, wait_until
from s3_server import Folder, Proxy
from test_remote import make_remote, save_checkpoint

from deepfm.errors import BadInput, RemoteError
from deepfm.runtime import owner, remote_files
from deepfm.state import remote_model_dir

BEAT = 2.0  # seconds: less than usual
# train.py with another BEAT.
QUICK = """
import runpy, sys
from deepfm.runtime import owner
owner.BEAT = float(sys.argv.pop(1))
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def train(beat, folder, data, env, *more):
    flags = (
        "--embedding_size=4", "--deep_layers=8,4", "--feature_size=50", "--batch_size=64",
        f"--training_data_dir={data}", f"--model_dir={folder.path}", "--num_epochs=100000",
        "--log_steps=100000", *more,
    )  # fmt: skip
    return started_python("-c", QUICK, str(beat), *flags, env=env)


@pytest.fixture(scope="module")
def server():
    with s3_server.started() as port, Proxy(port) as proxy:
        yield proxy


def test_a_second_training_is_refused_and_after_kill_9_the_same_command_goes_on(server, data):
    folder = Folder(server.port, "owned")
    with train(BEAT, folder, data, server.env, "--save_checkpoints_steps=100") as first:
        assert wait_until(lambda: "checkpoint" in folder.names() or first.poll() is not None, 60)
        # It watches for long: on a busy host a beat may be late.
        second = train(owner.BEAT, folder, data, server.env, "--clear_existing_model")
        second = finish(second, code=2)
        assert "another process is training there (" in second.stdout.splitlines()[-1]
        assert first.poll() is None and "checkpoint" in folder.names()
        first.kill()
        first.wait()
    reached = int(re.search(rb"ckpt-(\d+)", folder.read("checkpoint")).group(1))
    again = train(BEAT, folder, data, server.env, f"--max_steps={reached + 1000}")
    text = finish(again, code=0).stdout
    assert re.search(rf"has the mark of another training \(.* watching for {2 * BEAT:.0f} s ", text)
    assert int(re.search(r"Resuming at step (\d+)", text).group(1)) >= reached
    assert f"model.ckpt-{reached + 1000}.index" in folder.names()
    assert remote_files.MARK not in folder.names(), "it is gone when training has ended"


def test_an_owner_whose_mark_was_overwritten_ends_and_copies_nothing_more(server, data):
    folder = Folder(server.port, "taken")
    with train(0.5, folder, data, server.env, "--save_checkpoints_steps=100") as first:
        assert wait_until(lambda: "checkpoint" in folder.names(), 60)
        while first.poll() is None:  # its beat may be just about to write
            folder.write(remote_files.MARK, b'{"owner": "another", "host": "elsewhere"}')
            time.sleep(0.5)
        text, _ = first.communicate(timeout=60)
    assert first.returncode == 1, text
    last = text.splitlines()[-1]
    assert "another process is training there now, so this one ends; its model is kept" in last
    assert os.path.exists(os.path.join(re.search(r"kept in (\S+)\.", last).group(1), "checkpoint"))
    assert b"another" in folder.read(remote_files.MARK), "the mark of the other one stays"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "BEAT", 0.2)
    return f"file://{tmp_path}"


def killed(one):
    """An Owner as after kill -9: it beats no more."""
    one._ended.set()
    one._thread.join()
    return one


def test_a_live_owner_is_not_taken_over_and_a_dead_one_is(folder, monkeypatch):
    first = killed(owner.Owner(folder))
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: first.is_mine(write=True))
        with pytest.raises(BadInput, match="another process is training there"):
            owner.Owner(folder)
    assert first.is_mine()
    second = killed(owner.Owner(folder))
    assert second.is_mine() and not first.is_mine() and first.lost
    first.release()
    assert second._read() == second._mark, "the first one does not remove what is the second's"
    second.release()
    assert second._read() is None


def test_a_watch_ends_with_a_look_that_began_after_its_time(folder, monkeypatch):
    first, read, slow = killed(owner.Owner(folder)), owner.Owner._read, iter([False, True])
    now, asked = [0.0], types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    asked.monotonic = lambda: now[0]

    def read_slowly(self):
        found = read(self)
        if next(slow, False):
            now[0] += 3 * owner.BEAT
            first.is_mine(write=True)
        return found

    monkeypatch.setattr(owner, "time", asked)
    monkeypatch.setattr(owner.Owner, "_read", read_slowly)
    with pytest.raises(BadInput, match="another process is training there"):
        owner.Owner(folder)


def test_an_owner_that_finds_anothers_mark_never_writes_its_own_again(folder, tmp_path):
    first = owner.Owner(folder)
    write, checks = first._write, []

    def marked_by_another_in_the_middle_of_a_beat():
        (tmp_path / remote_files.MARK).write_text('{"owner": "another"}')
        checks.append(threading.Thread(target=first.is_mine))  # a checkpoint is to be copied
        checks[-1].start()
        checks[-1].join(0.5)
        write()

    first._write = marked_by_another_in_the_middle_of_a_beat
    assert wait_until(lambda: checks, 30)
    killed(first)
    for check in checks:
        check.join()
    assert first._read()["owner"] == ("another" if first.lost else first._mark["owner"])
    first.release()


def test_the_same_sagemaker_job_and_an_old_mark_are_not_waited_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "BEAT", 100.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setenv("TRAINING_JOB_NAME", "job-1")
    owner.Owner(folder)
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    with pytest.raises(pytest.fail.Exception, match="it waits"):
        owner.Owner(folder)
    monkeypatch.delenv("SM_CURRENT_HOST")
    owner.Owner(folder).release()
    (tmp_path / remote_files.MARK).write_text('{"owner": "of last week"}')
    os.utime(str(tmp_path / remote_files.MARK), (1e9, 1e9))
    owner.Owner(folder).release()


def test_a_folder_that_is_anothers_takes_no_more_checkpoints(tmp_path):
    local, there = make_remote(tmp_path, 3)
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), 5)
    copies.fetch(os.listdir(str(there)))
    copies.owner = killed(owner.Owner(f"file://{there}"))  # no beat finds the mark before
    (there / remote_files.MARK).write_text('{"owner": "another"}')
    save_checkpoint(local, 5)
    copies.hand_over()
    with pytest.raises(RemoteError, match="so this one ends; its model is kept in"):
        copies.close()
    assert {path.stem for path in there.glob("*.index")} == {"model.ckpt-3"}
    with pytest.raises(RemoteError):
        copies.hand_over()
