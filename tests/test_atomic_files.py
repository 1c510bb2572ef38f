"""A file under its final name is complete, despite kills, full disks and read-only folders."""

import contextlib
import itertools
import os
import signal
import subprocess
import time

import pytest
from conftest import (
    await_files,
    fill,
    make_records,
    run_tool,
    run_train,
    small_job,
    started_python,
    write_tfrecords,
)
from kills import killed_after

from data_tools.common import publishing
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import atomic_files, dataset_json
from deepfm.runtime import program


def begun(action):
    """Runs action() in a process of its own; a function that waits for its exit code, or minus the
    signal that ended it."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            action()
            os._exit(0)
        os._exit(1)

    def ended():
        _, status = os.waitpid(pid, 0)
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    return ended


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# Killed.


def write_data_set(folder, rows, files=3):
    folder.mkdir(parents=True)
    described = []
    for i in range(files):
        path = write_tfrecords(folder / f"part-{i}.tfrecords", make_records(rows, seed=rows))
        described.append(datasets.DataFile(path, os.path.getsize(path), rows, 1))
    dataset_json.write(str(folder), 4, 50, described)
    return sorted(os.listdir(str(folder)))


def test_what_is_published_together_is_old_or_new_or_refused_wherever_it_is_killed(tmp_path):
    """A process is killed before the first, the second ... change that it makes."""
    seen, code = [], None
    while code != 0:
        steps = len(seen)
        top = tmp_path / str(steps)
        scratch = top / ".scratch"
        parts, more = [], [(str(scratch / "map"), str(top / "map"))]
        for name in "ab":
            old = write_data_set(top / name, 5)
            new = write_data_set(scratch / name, 7, files=2)
            made = {x: str(scratch / name / x) for x in new}
            parts.append((str(top / name), made, old))
        (top / "map").write_text("15")
        (scratch / "map").write_text("14")

        def publish(steps=steps, scratch=scratch, parts=parts, more=more):
            changes = (os, "remove"), (os, "replace")
            with killed_after(pytest.MonkeyPatch(), steps, *changes, end=die):
                publishing.publish(str(scratch), parts, more)

        def read(top=top):
            for name in "ab":
                rows = None
                try:
                    rows = datasets.find(str(top / name), "data").rows
                    assert (top / "map").read_text() == str(rows)
                except BadInput as error:
                    refused = ".unfinished is there); write it again with --overwrite"
                    assert refused in str(error) or "has no data files" in str(error)
                yield rows

        code = begun(publish)()
        assert code in (0, -signal.SIGKILL)
        seen.append(tuple(read()))
        # The next run into that folder finishes it.
        assert publishing.finish(str(top)) == (None in seen[-1])
        assert tuple(read()) == ((14, 14) if None in seen[-1] else seen[-1])
    assert seen[:3] == 3 * [(15, 15)]  # the list of what is to do and the marks come first
    ways = [(15, 15), (None, 15), (None, None), (14, None), (14, 14)]
    assert [way for way, _ in itertools.groupby(seen)] == ways and len(seen) > 15


def test_a_scratch_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path):
    def make():
        with atomic_files.scratch(str(tmp_path), ".tool-") as path:
            open(os.path.join(path, "file"), "w").close()
            die()

    assert begun(make)() == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    (tmp_path / ".tool-mine").write_text("no temporary name")
    with atomic_files.scratch(str(tmp_path), ".tool-") as first:
        found = sorted(os.listdir(tmp_path))
        assert found == sorted([os.path.basename(first), ".tool-mine"]) != sorted([left, found[1]])
        with atomic_files.scratch(str(tmp_path), ".tool-") as second:
            assert os.path.isdir(first) and os.path.isdir(second)
    assert os.listdir(tmp_path) == [".tool-mine"]


def test_processes_that_make_temporary_files_in_one_folder_leave_each_other_alone(tmp_path):
    def work():
        end = time.time() + 1
        while time.time() < end:
            with atomic_files.scratch(str(tmp_path), ".reading-") as scratch:
                os.mkdir(os.path.join(scratch, "a"))
            atomic_files.write_whole(str(tmp_path / "file"), "x")

    running = [begun(work) for _ in range(3)]
    assert [ended() for ended in running] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_a_file_have_temporary_files_of_their_own(tmp_path):
    path = tmp_path / "file"  # the second is as a process of the same number on another host
    with atomic_files.open_whole(str(path)) as f:
        f.write("the first")
        f.flush()
        atomic_files.write_whole(str(path), "the second")
        assert path.read_text() == "the second"
    assert path.read_text() == "the first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_leftover_that_may_not_be_opened_or_deleted_stays(tmp_path, monkeypatch):
    (tmp_path / ".reading-abcdefgh").mkdir()
    real = os.open

    def refused(path, *more, **named):
        if str(path).endswith("abcdefgh"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refused)
    atomic_files.remove(str(tmp_path), ".reading-")
    assert (tmp_path / ".reading-abcdefgh").exists()


def test_a_scratch_folder_goes_though_another_process_still_writes_to_it(tmp_path):
    def write():
        with contextlib.suppress(OSError):  # until the folder is gone
            for i in range(5000):
                os.mkdir(f"{path}/{i}")

    with atomic_files.scratch(str(tmp_path), ".scratch-") as path:
        ended = begun(write)
        while not os.path.exists(f"{path}/100"):
            time.sleep(0.001)
    assert ended() == 0
    assert os.listdir(str(tmp_path)) == []


def test_what_was_on_its_way_into_a_scratch_folder_goes_with_it(tmp_path, monkeypatch):
    rmdir, late = os.rmdir, ["late"]

    def remove(path, **named):
        if late:
            os.mkdir(os.path.join(path, late.pop()))
        rmdir(path, **named)

    monkeypatch.setattr(os, "rmdir", remove)
    with atomic_files.scratch(str(tmp_path), ".scratch-"):
        pass
    assert os.listdir(str(tmp_path)) == [] == late


def test_a_file_whose_writing_is_killed_keeps_its_old_content_and_leaves_no_data(tmp_path):
    path = tmp_path / "dataset.json"
    path.write_text("old")
    write_tfrecords(tmp_path / "a.tfrecords", make_records(3))

    def write():
        with atomic_files.open_whole(str(path)) as f:
            f.write("half of the ne")
            f.flush()
            die()

    assert begun(write)() == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3
    path.unlink()
    for spec in (tmp_path, tmp_path / "*"):
        (file,) = datasets.find(str(spec), "data").files
        assert file.path == f"{tmp_path}/a.tfrecords"
    atomic_files.write_whole(str(path), "new")
    assert sorted(os.listdir(tmp_path)) == ["a.tfrecords", "dataset.json"]


def test_a_glob_reads_no_metadata_and_nothing_hidden_but_what_it_names(tmp_path):
    for name in ("a.libsvm", ".scratch/b.libsvm", ".c.libsvm", "dataset.json", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1 1:1\n")
    find = lambda spec: [
        f.path[len(str(tmp_path)) + 1 :] for f in datasets.find(spec, "data").files
    ]
    (tmp_path / "dataset.json").unlink()
    for spec in ("*", "*/*,{}/*", "[a-z]*", "?.libsvm"):
        with contextlib.suppress(BadInput):  # */* matches nothing that holds data
            assert find(f"{tmp_path}/" + spec.format(tmp_path)) == ["a.libsvm"]
    assert find(f"{tmp_path}/.scratch/*") == [".scratch/b.libsvm"]
    assert find(f"{tmp_path}/.c.libsvm") == [".c.libsvm"]


def synthetic(folder, rows):
    words = f"--output_dir={folder}", f"--train_rows={rows}", "--val_rows=0", "--test_rows=0"
    return ("make_synthetic", *words)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_tool_that_is_ended_leaves_nothing_that_the_next_run_does_not_clean(tmp_path, number):
    name, *words = synthetic(tmp_path, 100_000_000)
    with started_python("-m", f"data_tools.{name}", *words, fresh=True) as process:
        await_files(process, f"{tmp_path}/.make_synthetic-*/train.libsvm")
        assert process.poll() is None
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == 143
        last = "make_synthetic.py: ended by SIGTERM; nothing was written."
        assert text.splitlines()[-1] == last
        assert "Traceback" not in text
        assert os.listdir(tmp_path) == []
        return
    with pytest.raises(BadInput, match="has no data files"):
        datasets.find(str(tmp_path), "data")
    done = run_tool(*synthetic(tmp_path, 100), code=0)
    assert "left by a run that was killed" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["synthetic.json", "train.libsvm"]


# No room, no permission.


def test_a_file_that_finds_no_room_keeps_its_old_content_and_is_named(small_disk):
    path = small_disk / "report.json"
    path.write_text("old")
    for left in (0, 4096, 40960):
        filling = fill(small_disk, left)
        with pytest.raises(OSError, match="No space left on device: '.*report.json'"):
            atomic_files.write_whole(str(path), "new" * 800000)
        assert path.read_text() == "old"
        assert sorted(os.listdir(small_disk)) == ["filling", "report.json"]
        filling.unlink()


def test_a_tool_that_finds_no_room_says_so_and_leaves_nothing(small_disk):
    """As test_libsvm_to_tfrecord.py, where a process of several finds none."""
    done = run_tool(*synthetic(small_disk / "out", 50_000), timeout=100, code=1)
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert f"{small_disk}/out" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (small_disk / "out").exists()


def refusal(folder):
    with pytest.raises(BadInput, match="^--model_dir: ") as error:
        program.make_output_dir(str(folder), "model_dir")
    return str(error.value)


def test_a_folder_under_a_file_is_refused_with_its_flag(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        assert f"{folder} cannot be written" in refusal(folder)


def test_a_folder_that_is_read_only_is_refused_with_its_flag(small_disk):
    (small_disk / "model").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "model", small_disk / "other"):
        assert f"{folder} cannot be written (Read-only file system)" in refusal(folder)


def test_a_job_finds_at_its_start_that_model_dir_cannot_be_written(data):
    done = run_train(*small_job(data, f"{data}/model"), code=2)
    assert f"--model_dir: {data}/model cannot be written" in done.stderr.splitlines()[-1]
    assert "Training on" not in done.stderr
