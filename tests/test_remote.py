"""model_dir, data, exports and predictions on S3, with a server that fails in several ways."""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import threading
from concurrent import futures

import pytest
import s3_server
from conftest import (
    SMALL_MODEL,
    job_of,
    make_records,
    run_python,
    run_tool,
    run_train,
    started_python,
    wait_until,
    write_tfrecords,
)
from kills import killed_after
from s3_server import CUT, Folder, Proxy, any_of, first

from deepfm.data import datasets, identity
from deepfm.errors import BadInput
from deepfm.records import atomic_files, dataset_json
from deepfm.records.storage import arrow
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import best, checkpoints, damage, paths, remote_model_dir, saving

ROWS, STEPS = 640, 10  # records, and steps of an epoch of them
CHECKPOINT = r"model\.ckpt-\d+\.(data|index)"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of an S3 server whose bucket holds a data set under data/."""
    path = tmp_path_factory.mktemp("data") / "a.tfrecords"
    write_tfrecords(path, make_records(ROWS, seed=1))
    with s3_server.started() as port:
        Folder(port, "data").write("a.tfrecords", path.read_bytes())
        yield port


DATA = f"s3://{s3_server.BUCKET}/data"


def train_flags(folder, *more):
    return (
        *SMALL_MODEL, f"--training_data_dir={DATA}", f"--model_dir={folder.path}",
        "--batch_size=64", "--dropout=0", *more,
    )  # fmt: skip


def run(server, *flags, rule=lambda method, name: None, temporary=None, code=0):
    """Runs train.py with a Proxy to the server; the finished process, and the `proxy` in it."""
    with Proxy(server, rule) as proxy:
        env = dict(proxy.env, TMPDIR=str(temporary or tempfile.gettempdir()))
        done = run_train(*flags, env=env, code=code)
    done.proxy = proxy
    return done


def evaluate(server, folder, *more, **how):
    flags = "--task_type=eval", f"--val_data_dir={DATA}", f"--model_dir={folder.path}"
    return run(server, *flags, *more, **how).stderr


class Trained:
    """A model that was trained to S3 over a server with hiccups, and what was seen of it."""

    def __init__(self, server, temporary):
        self.folder, self.servable = Folder(server, "model"), Folder(server, "servable")
        self.temporary = temporary
        hiccups = any_of(
            first(3, 500, "PUT", CHECKPOINT), first(2, 403, "PUT", CHECKPOINT),
            first(1, CUT, "PUT", CHECKPOINT), first(1, 403, "PUT", "saved_model.pb"),
        )  # fmt: skip
        done = run(
            server, *train_flags(self.folder), f"--servable_model_dir={self.servable.path}",
            f"--val_data_dir={DATA}", "--num_epochs=4", "--save_checkpoints_steps=5",
            "--keep_checkpoint_max=2", temporary=temporary, rule=hiccups,
        )  # fmt: skip
        self.puts, self.requests = done.proxy.puts(), done.proxy.requests
        self.report = json.loads(self.folder.read("report.json"))


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    return Trained(server, tmp_path_factory.mktemp("temporary"))


def named(folder):
    """The checkpoints that the remote state file names, the newest first."""
    names = re.findall(r'"(model\.ckpt-\d+)"', folder.read("checkpoint").decode())
    return list(dict.fromkeys(names))


def fetched(local, there, keep):
    """A Mirror that has fetched what is there."""
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), keep)
    copies.fetch(os.listdir(str(there)))
    return copies


def step_of(folder):
    return json.loads(folder.read("report.json"))["global_step"]


def test_a_finished_job_leaves_everything_on_s3(trained):
    names = trained.folder.names()
    newest = f"model.ckpt-{4 * STEPS}"
    assert named(trained.folder)[0] == newest
    for end in ("index", "meta", "data-00000-of-00001"):
        assert f"{newest}.{end}" in names
    assert {"model.json", "report.json", "checkpoint"} < set(names)
    assert any(name.startswith("events.out") for name in names)
    assert any(name.startswith("eval/events.out") for name in names)
    assert not [name for name in names if "probe" in name]


def test_the_best_checkpoint_is_on_s3_too_and_used_from_there(server, trained):
    folder, step = trained.folder.copy("best-used"), trained.report["best"]["step"]
    ends = "data-00000-of-00001", "index", "meta"
    kept = {"best/checkpoint", *(f"best/model.ckpt-{step}.{end}" for end in ends)}
    assert {name for name in folder.names() if name.startswith("best/")} == kept
    assert f"Evaluation: step={step} " in evaluate(server, folder, "--checkpoint=best")


def test_every_record_is_read_from_s3(trained):
    assert trained.report["train"]["examples"] == 4 * ROWS
    assert trained.report["eval"]["examples"] == ROWS


def test_the_local_copy_is_gone_in_the_end(trained):
    assert not list(trained.temporary.glob("deepfm*"))


def test_the_state_file_is_written_after_the_checkpoint_that_it_names(trained):
    waiting = set()
    for name in trained.puts:
        name = name.split("/", 1)[1]
        if name == "checkpoint":
            # Without a new checkpoint, it leaves out those that have been deleted.
            assert not waiting or {"data-00000-of-00001", "index"} <= waiting
            waiting = set()
        elif name.startswith("model.ckpt-"):
            assert name.endswith("data-00000-of-00001") or any("data" in x for x in waiting)
            waiting.add(name.split(".")[-1])
    assert not waiting


def test_a_request_that_fails_is_made_again(trained):
    said = [said for _, _, said in trained.requests if said]
    assert sorted(map(str, said)) == ["403", "403", "403", "500", "500", "500", "cut"]


@pytest.mark.parametrize("kind, last", [("saved_model", "saved_model.pb"), ("npz", "weights.npz")])
def test_a_finished_command_exports_nothing_again(server, tmp_path, kind, last):
    folder, servable = Folder(server, f"{kind}-again"), Folder(server, f"servable-{kind}-again")
    servable.write("99999999999/saved_model.pb", b"another model's")
    flags = train_flags(folder, f"--servable_model_dir={servable.path}", f"--export_format={kind}")
    done = [run(server, *flags, temporary=tmp_path) for _ in range(2)]
    puts = [name for name in done[0].proxy.puts() if name.startswith(f"servable-{kind}-again/1")]
    assert puts[-1].endswith(last)
    numbers = {name.split("/")[0] for name in servable.names()}
    assert numbers == {"99999999999", "100000000000"}
    assert f"already exported at {servable.path}/100000000000." in done[-1].stderr


PUTS = """
import os, sys, threading
from deepfm.runtime import remote_files

def put(writer):
    for i in range(40):
        remote_files.put_text(writer * (100 + i), f"s3://bucket/side-by-side/{writer}{i}")

threads = [threading.Thread(target=put, args=(writer,)) for writer in sys.argv[1]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_and_processes_that_write_at_one_time_send_each_its_own(server):
    env = s3_server.environment(server)
    with contextlib.ExitStack() as stack:
        writing = [
            stack.enter_context(started_python("-c", PUTS, writers, env=env))
            for writers in ("ab", "cd")
        ]
        for process in writing:
            assert process.wait(timeout=60) == 0, process.stdout.read()
    folder = Folder(server, "side-by-side")
    for writer in "abcd":
        for i in range(40):
            assert folder.read(f"{writer}{i}") == writer.encode() * (100 + i)


ENDED_ON_THE_WAY = """
import shutil, sys
from deepfm.runtime import remote_files

def copy_half(source, target, size):
    target.write(source.read(5))
    raise SystemExit(143)  # as the handler of a signal does

shutil.copyfileobj = copy_half
remote_files.put(sys.argv[1], "s3://bucket/half/saved_model.pb")
"""


def test_a_copy_that_a_signal_ends_on_the_way_leaves_nothing_that_passes_for_whole(
    server, tmp_path
):
    (tmp_path / "whole").write_bytes(b"0123456789")
    words = "-c", ENDED_ON_THE_WAY, tmp_path / "whole"
    run_python(*words, env=s3_server.environment(server), code=143)
    assert Folder(server, "half").names() == []


def test_training_goes_on_from_s3_and_passes_over_a_half_copied_checkpoint(server, trained):
    folder = trained.folder.copy("resumed")
    folder.write("model.ckpt-999.data-00000-of-00001", b"half")
    done = run(server, *train_flags(folder, "--num_epochs=5"))
    assert "model.ckpt-999, which was not copied completely" in done.stderr
    assert step_of(folder) == 5 * STEPS
    assert not [name for name in folder.names() if "model.ckpt-999" in name]


@pytest.mark.table
def test_an_evaluation_takes_another_checkpoint_where_the_newest_is_deleted(server, trained):
    folder = trained.folder.copy("rotated")
    newest, *older = named(folder)
    there = "model.ckpt-7" if not older else older[0]
    for part in [name for name in folder.names() if name.startswith(f"{newest}.")]:
        folder.write(part.replace(newest, there), folder.read(part))

    def rotate(method, name):
        if method == "GET" and f"{newest}.data" in name:
            for part in [name for name in folder.names() if name.startswith(f"{newest}.")]:
                folder.delete(part)
            folder.write("checkpoint", f'model_checkpoint_path: "{there}"\n'.encode())

    assert "listing the folder again" in evaluate(server, folder, rule=rotate)


def test_evaluation_takes_the_newest_whole_checkpoint_and_leaves_the_others_alone(server, trained):
    folder = trained.folder.copy("damaged")
    older, *damaged = named(folder)[0], "model.ckpt-998", "model.ckpt-999"
    for newer in damaged:  # they may be on the way
        for end in ("index", "meta", "data-00000-of-00001"):
            folder.write(f"{newer}.{end}", folder.read(f"{older}.{end}"))
    state = "".join(f'all_model_checkpoint_paths: "{name}"\n' for name in (older, *damaged))
    folder.write("checkpoint", f'model_checkpoint_path: "{damaged[-1]}"\n{state}'.encode())
    missing, short = (f"{name}.data-00000-of-00001" for name in damaged)
    folder.delete(missing)
    folder.write(short, folder.read(short)[:-100])
    before = set(folder.names())
    said = evaluate(server, folder)
    assert all(f"{name}, which was not copied completely" in said for name in damaged)
    found = json.loads(folder.read("report.eval.json"))
    assert f"model.ckpt-{found['global_step']}" == older
    assert before <= set(folder.names())


def test_a_checkpoint_whose_reading_ends_early_is_read_again(server, trained):
    folder = trained.folder.copy("read-again")
    rule = any_of(first(1, 403, "GET", CHECKPOINT), first(1, CUT, "GET", CHECKPOINT))
    evaluate(server, folder, rule=rule)
    report = json.loads(folder.read("report.eval.json"))
    assert report["global_step"] == 4 * STEPS
    assert report["eval"]["log_loss"] == pytest.approx(trained.report["eval"]["log_loss"], abs=1e-6)


def test_fewer_records_than_remote_files_have_are_refused():
    files = [datasets.DataFile("s3://bucket/data/a.tfrecords", 100, 10, 1)]
    identity.check_all_read(files, 10, 10)
    with pytest.raises(remote_files.RemoteError, match="s3://bucket/data .*9 of 10 records"):
        identity.check_all_read(files, 10, 9)


def test_data_whose_reading_ends_early_is_not_taken_for_the_whole(server, tmp_path):
    folder = Folder(server, "data").copy("described")
    size = len(folder.read("a.tfrecords"))
    file = datasets.DataFile("a.tfrecords", size, ROWS, 1)
    dataset_json.write(str(tmp_path), 4, 50, [file])
    folder.write("dataset.json", (tmp_path / "dataset.json").read_bytes())
    reads = []

    def rule(method, name):
        reads.extend([name] * (method == "GET" and name.endswith("a.tfrecords")))
        return 403 if len(reads) > 15 else None  # in an epoch on the way

    done = run(
        server, *SMALL_MODEL, f"--training_data_dir={folder.path}", "--num_epochs=20",
        f"--model_dir={tmp_path}/model", "--batch_size=64", rule=rule, code=1,
    )  # fmt: skip
    assert re.search(
        rf"described could not be read to its end \(.*({20 * ROWS:,} records|a.tfrecords.*)\): its "
        "server stopped answering; check the path, the server",
        done.stderr.splitlines()[-1],
    )


def test_predictions_and_exports_are_made_from_s3_to_s3(server, trained):
    folder, out = trained.folder.copy("applied"), Folder(server, "out")
    flags = (f"--model_dir={folder.path}",)
    run(server, "--task_type=infer", f"--infer_data_dir={DATA}", *flags)
    run(server, "--task_type=export", f"--servable_model_dir={out.path}", *flags)
    assert len(folder.read("predictions.txt").split()) == ROWS
    assert any(name.endswith("/saved_model.pb") for name in out.names())


def test_predictions_may_lie_at_the_top_of_a_bucket(server, trained):
    path = f"s3://{s3_server.BUCKET}/predictions_at_the_top.txt"
    flags = f"--model_dir={trained.folder.path}", f"--infer_data_dir={DATA}"
    run(server, "--task_type=infer", f"--predictions_file={path}", *flags)
    _, _, body = s3_server.request(server, "GET", path[len("s3:/") :])
    assert len(body.split()) == ROWS


def test_clearing_deletes_the_remote_model_and_nothing_else(server, trained):
    folder = trained.folder.copy("cleared")
    mine = ("notes.txt", "eval/notes.txt", "best/saved_model.pb")
    for name in mine:
        folder.write(name, b"mine")
    old = {x for x in folder.names() if x.startswith(("model.ckpt-", "eval/events."))}
    done = run(server, *train_flags(folder, "--clear_existing_model"))
    assert step_of(folder) == STEPS
    assert named(folder) == [f"model.ckpt-{STEPS}"]
    assert not old & set(folder.names()) and len(old) > 3
    assert [folder.read(name) for name in mine] == [b"mine"] * 3
    assert "that train.py did not write: best, eval, notes.txt." in done.stderr


def test_training_ends_its_steps_while_the_first_upload_is_held_back(server):
    folder, asked, held = Folder(server, "slow"), threading.Event(), threading.Event()

    def rule(method, name):
        if not re.search(CHECKPOINT, name):
            return None
        asked.set()
        return held

    with Proxy(server, rule) as proxy:
        words = *train_flags(folder), "--num_epochs=3", "--save_checkpoints_steps=5"
        with started_python("train.py", *words, env=proxy.env) as process:
            lines = iter(process.stdout.readline, "")
            assert any(f"Trained {3 * STEPS} steps" in line for line in lines)
            assert not [name for name in folder.names() if "model.ckpt" in name]
            assert asked.wait(30)
            held.set()
            text = "".join(lines)
            assert process.wait(timeout=30) == 0, text
    assert named(folder)[0] == f"model.ckpt-{3 * STEPS}"
    assert len(named(folder)) <= 2, "those between the first and the last need not be copied"


def test_a_copy_that_fails_to_the_end_is_kept_and_the_job_fails(server, tmp_path):
    folder = Folder(server, "refused")
    refused = first(1000, 403, "PUT", CHECKPOINT)
    done = run(server, *train_flags(folder), temporary=tmp_path, rule=refused, code=1)
    (kept,) = tmp_path.glob("deepfm-model-*")
    last = done.stderr.splitlines()[-1]
    assert f"--model_dir={folder.path} cannot be written: UnknownError" in last
    assert last.endswith(f"the local copy is kept in {kept}.")
    assert tf.train.load_variable(str(kept), "global_step") == STEPS
    assert "checkpoint" not in folder.names()
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def without_server(tmp_path_factory):
    """Jobs whose server is down, side by side: flag that names it -> the finished job."""
    folder = tmp_path_factory.mktemp("down")
    local = {"--model_dir": folder / "model", "--training_data_dir": folder / "a.tfrecords"}
    write_tfrecords(local["--training_data_dir"], make_records(10))

    def job(down):
        places = {**local, down: DATA}
        flags = [f"{name}={path}" for name, path in places.items()]
        return run_train(*SMALL_MODEL, *flags, env=env)

    with socket.socket() as taken, futures.ThreadPoolExecutor() as pool:
        taken.bind(("127.0.0.1", 0))  # without listening
        env = s3_server.environment(taken.getsockname()[1])
        return dict(zip(local, pool.map(job, local)))


@pytest.mark.parametrize("down", ["--model_dir", "--training_data_dir"])
def test_a_server_that_is_down_is_said_in_one_sentence(without_server, down):
    done = without_server[down]
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"{down}={DATA} cannot be " in last
    assert f"no answer within {remote_files.DEADLINE} s" in last
    assert "Traceback" not in done.stderr


BUCKET = f"s3://{s3_server.BUCKET}"
REFUSED = [  # flags, the exit code, what is said
    (["--model_dir=s3://another/model"], 1, "=s3://another/model cannot be written.*NoSuchBucket"),
    *(([f"--{x}={BUCKET}"], 2, f"--{x}={BUCKET} is a whole bucket")
      for x in ("model_dir", "servable_model_dir")),
    *(([f"--training_data_dir={BUCKET}/{x}"], 2, f"_dir={BUCKET}/{re.escape(x)} is not a folder, ")
      for x in ("no_such_folder", "*.tfrecords")),
    (["--task_type=infer", f"--infer_data_dir={DATA}", "--predictions_format=parquet"], 2,
     r"--predictions_file={}/predictions\.parquet is remote; give a local folder, or"),
]  # fmt: skip


@pytest.mark.parametrize("flags, code, said", REFUSED)
def test_a_path_that_cannot_be_is_said_in_one_sentence(server, trained, flags, code, said):
    folder = trained.folder if "infer" in flags[0] else Folder(server, "x")
    done = run(server, *train_flags(folder), *flags, code=code)
    assert re.search(said.format(folder.path), done.stderr.splitlines()[-1])
    assert not (flags[0].endswith(BUCKET) and done.proxy.puts())


def test_nothing_but_our_own_lines_is_shown_and_no_file_is_read_beyond_its_end(server, trained):
    folder = trained.folder.copy("quiet")
    with Proxy(server) as proxy:
        env = {k: v for k, v in proxy.env.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
        flags = ("--task_type=eval", f"--val_data_dir={DATA}", f"--model_dir={folder.path}")
        done = run_train(*flags, env=env)
    assert done.returncode == 0, done.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in done.stderr.splitlines())
    index = f"quiet/{named(folder)[0]}.index"
    assert [method for method, name, _ in proxy.requests if name == index].count("GET") == 1


# Without a server: file:// is a scheme as well.


def test_a_probe_is_deleted_where_the_folder_cannot_be_listed(tmp_path, monkeypatch):
    def refuse(path):
        raise tf.errors.PermissionDeniedError(None, None, "not for you")

    monkeypatch.setattr(tf.io.gfile, "listdir", refuse)
    with pytest.raises(remote_files.RemoteError, match="PermissionDeniedError: not for you"):
        remote_files.checked_names(f"file://{tmp_path}", "model_dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["s3://bucket", "s3://bucket/", "s3://bucket/a, s3://other"])
def test_data_that_is_a_whole_bucket_is_refused(spec):
    with pytest.raises(BadInput, match="whole bucket.* e.g. --val_data_dir=s3://.*/val"):
        remote_files.check_readable(spec, "val_data_dir")


@pytest.mark.parametrize("flag", ["model_dir", "servable_model_dir"])
def test_an_address_with_a_scheme_is_told_without_one(tmp_path, monkeypatch, flag):
    monkeypatch.setenv("S3_ENDPOINT", "http://127.0.0.1:9000")
    asked = {"model_dir": str(tmp_path / "model"), flag: "s3://bucket/folder"}
    wanted = "without a scheme; try S3_ENDPOINT=127.0.0.1:9000 S3_USE_HTTPS=0."
    with pytest.raises(BadInput, match=wanted):
        paths.check(job_of(**asked))
    with pytest.raises(BadInput, match=wanted):
        remote_files.check_readable("s3://bucket/folder", "val_data_dir")
    with pytest.raises(BadInput, match=wanted):  # the tools
        arrow.exists("s3://bucket/folder")


def test_a_job_that_fails_leaves_nothing_of_what_it_was_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyError), remote_files.written("s3://bucket/folder") as local:
        os.mkdir(local)
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_list_without_what_was_just_written_is_no_empty_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.io.gfile, "listdir", lambda path: [])
    with pytest.raises(remote_files.RemoteError, match="cannot be written and listed"):
        remote_files.checked_names(f"file://{tmp_path}", "model_dir")


def test_a_file_whose_reading_ends_early_is_no_copy(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"12345678")
    length = tf.io.gfile.stat(str(tmp_path / "a")).length
    (tmp_path / "a").write_bytes(b"1234")
    monkeypatch.setattr(tf.io.gfile, "stat", lambda path: type("", (), {"length": length}))
    with pytest.raises(OSError, match="4 of 8 bytes"):
        remote_files.get(f"file://{tmp_path}/a", str(tmp_path / "b"))


MAP = "feature_maps/0123456789abcdef.json"


@pytest.mark.parametrize("name", ["run.json", "best/checkpoint", "best/model.ckpt-3.index", MAP])
def test_what_was_fetched_in_part_is_not_copied_back(tmp_path, monkeypatch, name):
    local, there = make_remote(tmp_path, 3)
    (there / "best").mkdir()
    save_checkpoint(there / "best", 3)
    (there / "feature_maps").mkdir()
    (there / MAP).write_text("{}")
    (there / "run.json").write_text("{}")
    before, read = (there / name).read_bytes(), tf.io.gfile.GFile.read
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), 5)
    part = lambda self, size: read(self, size)[
        : 1 if self.name == f"file://{there}/{name}" else None
    ]
    monkeypatch.setattr(tf.io.gfile.GFile, "read", part)
    monkeypatch.setattr(remote_files, "_WAITS", ())
    monkeypatch.setattr(saving, "model_of", lambda path: {"feature_map": "0123456789abcdef"})
    with pytest.raises(remote_files.RemoteError):
        copies.fetch(os.listdir(str(there)))
        copies.fetch_best(["best"], whole=True)
        copies.fetch_maps(["feature_maps"])
    change_inode(local / "best" / "checkpoint")
    copies.close()
    assert (there / name).read_bytes() == before


def change_inode(path):
    if path.exists():
        shutil.copy2(str(path), f"{path}.tmp")
        os.replace(f"{path}.tmp", str(path))


def no_link(source, target):
    raise PermissionError(1, "Operation not permitted", source)


def test_a_file_system_without_links_or_with_changing_inodes_is_enough(tmp_path, monkeypatch):
    local, there = make_remote(tmp_path, 3)
    (there / "best").mkdir()
    save_checkpoint(there / "best", 3)
    before = sorted(os.listdir(str(there / "best")))
    monkeypatch.setattr(os, "link", no_link)
    copies = fetched(local, there, 5)
    copies.fetch_best(["best"], whole=False)
    change_inode(local / "best" / "checkpoint")
    save_checkpoint(local, 4)
    copies.hand_over()
    copies.close()
    assert sorted(os.listdir(str(there / "best"))) == before
    assert (there / "model.ckpt-4.index").exists()


def save_checkpoint(folder, step):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("x", initializer=7.0)
        session.run(variable.initializer)
        tf.compat.v1.train.Saver().save(session, str(folder / "model.ckpt"), step)


def test_older_checkpoints_are_kept_over_several_jobs_up_to_keep_checkpoint_max(tmp_path):
    local, there = tmp_path / "local", tmp_path / "there"
    there.mkdir()
    for step in (8, 9, 10, 11):
        local.mkdir()
        copies = fetched(local, there, 2)
        save_checkpoint(local, step)
        copies.hand_over()
        copies.close()
    assert {path.stem for path in there.glob("*.index")} == {"model.ckpt-10", "model.ckpt-11"}


def test_a_checkpoint_that_was_deleted_locally_is_copied_all_the_same(tmp_path):
    local, there = tmp_path / "local", tmp_path / "there"
    local.mkdir()
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), 5)
    save_checkpoint(local, 3)
    copies.hand_over()
    for path in local.glob("model.ckpt-*"):
        path.unlink()
    copies.close()
    assert tf.train.load_variable(str(there), "x") == 7.0


def test_while_the_server_is_down_one_checkpoint_waits_to_be_copied(tmp_path, monkeypatch):
    local = tmp_path / "local"
    local.mkdir()
    copies = remote_model_dir.Mirror(f"file://{tmp_path}/there", str(local), 5)
    (local / "run.json").write_text("{}")

    waiting = lambda: list(filter(str.isdigit, os.listdir(str(local / ".handed"))))

    def down(*_):
        raise OSError("down")

    with monkeypatch.context() as patch:
        patch.setattr(remote_files, "put", down)
        for step in (1, 2, 3):
            save_checkpoint(local, step)
            copies.hand_over()
            assert wait_until(lambda at=step: waiting() == [f"{at:09d}"], 60)
    copies.close()
    assert (tmp_path / "there" / "model.ckpt-3.index").exists()


def test_a_sentence_names_the_folder_that_was_asked_for(tmp_path):
    env = dict(os.environ, TMPDIR=str(tmp_path))
    path = f"file://{tmp_path}/none"
    flags = (f"--model_dir={path}", f"--val_data_dir={tmp_path}")
    done = run_train(*SMALL_MODEL, "--task_type=eval", *flags, env=env, code=2)
    assert f"--model_dir={path} has no checkpoint" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("deepfm*"))


@pytest.mark.parametrize("kept", range(1, 6))
def test_a_kill_while_older_checkpoints_are_deleted_there_leaves_nothing(
    tmp_path, monkeypatch, kept
):
    local, there = make_remote(tmp_path, 3, 12)
    checkpoints.write_state(str(there), ["model.ckpt-3", "model.ckpt-12"])
    copies = fetched(local, there, 2)
    copies._closing = True
    copies._wake.set()
    copies._thread.join()
    changes = (remote_files, "put_text"), (tf.io.gfile, "remove")
    with killed_after(monkeypatch, kept, *changes):
        save_checkpoint(local, 20)
        copies.hand_over()
        copies._copy()
    assert checkpoints.read_state(str(there)).names[-1] in ("model.ckpt-12", "model.ckpt-20")
    shutil.rmtree(local)
    local.mkdir()
    again = fetched(local, there, 2)
    for step in (30, 40):
        save_checkpoint(local, step)
        again.hand_over()
    again.close()
    assert len({path.name.split(".")[1] for path in there.glob("model.ckpt-*")}) == 2


def test_all_that_training_resumes_from_is_fetched(tmp_path):
    local, there = make_remote(tmp_path, 3)
    wanted = {"model.json", "run.json", "evaluations.json", "report.json"}
    for name in wanted:
        (there / name).write_text("{}")
    copies = fetched(local, there, 2)
    assert wanted < set(os.listdir(str(local)))
    copies.close()


def make_remote(tmp_path, *steps):
    """A remote folder of checkpoints; and an empty local one."""
    local, there = tmp_path / "local", tmp_path / "there"
    there.mkdir()
    for step in steps:
        save_checkpoint(there, step)
    local.mkdir()
    return local, there


@pytest.mark.parametrize("text", [None, b"", b"garbage", b"\xff\xfe"])
def test_a_lost_remote_state_file_loses_no_checkpoint(tmp_path, text):
    local, there = make_remote(tmp_path, 3, 12)
    (there / "checkpoint").unlink()
    if text is not None:
        (there / "checkpoint").write_bytes(text)
    copies = fetched(local, there, 5)
    assert tf.train.latest_checkpoint(str(local)) == str(local / "model.ckpt-12")
    copies.close()
    assert {path.stem for path in there.glob("*.index")} == {"model.ckpt-3", "model.ckpt-12"}


def test_a_whole_checkpoint_that_the_remote_state_file_does_not_name_stays(tmp_path, caplog):
    local, there = make_remote(tmp_path, 3, 12)
    save_checkpoint(there, 20)
    (there / "model.ckpt-20.index").unlink()  # the rest of a copy that did not end
    (there / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-3"\n')
    copies = fetched(local, there, 1)
    assert tf.train.latest_checkpoint(str(local)) == str(local / "model.ckpt-3")
    assert "there/model.ckpt-12, which checkpoint does not name." in caplog.text
    assert "there/model.ckpt-20, which was not copied completely." in caplog.text
    save_checkpoint(local, 5)
    copies.hand_over()
    copies.close()
    assert {path.stem for path in there.glob("*.index")} == {"model.ckpt-5", "model.ckpt-12"}
    assert not list(there.glob("model.ckpt-20*"))


def test_a_best_checkpoint_that_training_has_put_there_since_it_was_fetched_stays(tmp_path):
    local, there = make_remote(tmp_path, 12)
    (there / "best").mkdir()
    save_checkpoint(there / "best", 3)
    reader = remote_model_dir.Mirror(f"file://{there}", str(local), 1)
    reader.fetch_best(["best"], whole=True)
    assert (local / "best" / "model.ckpt-3.index").exists()
    for path in (there / "best").iterdir():
        path.unlink()
    save_checkpoint(there / "best", 12)
    reader.close()
    assert {path.stem for path in (there / "best").glob("*.index")} == {"model.ckpt-12"}
    assert tf.train.latest_checkpoint(str(there / "best")) == str(there / "best" / "model.ckpt-12")


def test_what_names_a_file_is_copied_after_it_whenever_a_better_checkpoint_comes(
    tmp_path, monkeypatch
):
    writes = "put", "put_bytes"

    def keep_evaluated(local, step):
        for part in ("data-00000-of-00001", "index", "meta"):
            (local / f"model.ckpt-{step}.{part}").write_text(str(step))
        best.keep(str(local), str(local / f"model.ckpt-{step}"))
        atomic_files.write_json(str(local / "evaluations.json"), [{"step": step}])
        for name in "best/checkpoint", "evaluations.json":  # all within a tick of the clock
            os.utime(str(local / name), (1e9, 1e9))

    def put_and_look(put, *how):
        put(*how)
        folder = there / "best"
        for name in checkpoints.read_state(str(folder)).names:
            assert damage.has_all_parts(name, os.listdir(str(folder)))
        if (there / "evaluations.json").exists():
            (evaluated,) = json.loads((there / "evaluations.json").read_text())
            assert evaluated["step"] <= best.step_of(str(folder))

    for name in writes:
        look = functools.partial(put_and_look, getattr(remote_files, name))
        monkeypatch.setattr(remote_files, name, look)
    for moment in itertools.count():
        local, there, better = tmp_path / f"local{moment}", tmp_path / f"there{moment}", [6]
        local.mkdir()
        copies = remote_model_dir.Mirror(f"file://{there}", str(local), 2)
        keep_evaluated(local, 3)
        changes = (os, "listdir"), (os, "link"), *((remote_files, name) for name in writes)
        come = lambda to=local, left=better: left and keep_evaluated(to, left.pop())
        with killed_after(monkeypatch, moment, *changes, end=come):
            copies._copy()
        copies.close()
        assert best.step_of(str(there / "best")) == (3 if better else 6)
        if better:  # the copy had ended before
            break
    assert moment > 10


def test_a_feature_map_is_copied_before_a_checkpoint_which_may_name_it(tmp_path, monkeypatch):
    (local, there), copied = make_remote(tmp_path), []
    monkeypatch.setattr(remote_files, "put", lambda source, target: copied.append(target))
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), 2)
    (local / "feature_maps").mkdir()
    (local / "feature_maps" / "0123456789abcdef.json").write_text("{}")
    save_checkpoint(local, 3)
    copies.hand_over()
    copies.close()
    assert copied[0].endswith(".json") and ".data-" in copied[1]


@pytest.mark.parametrize("step, kept", [(12, True), (13, False)])
def test_a_remote_best_checkpoint_of_a_later_step_goes_as_a_local_one(tmp_path, step, kept):
    local, there = make_remote(tmp_path, 12)
    (there / "best").mkdir()
    save_checkpoint(there / "best", step)
    copies = fetched(local, there, 1)
    copies.fetch_best(["best"], whole=True)
    copies.forget_later_best()
    assert (local / "best" / f"model.ckpt-{step}.index").exists() == kept  # to be exported
    copies.close()
    assert (there / "best").exists() == kept


def test_a_damaged_checkpoint_goes_whether_a_state_file_names_it_or_none_is_there(tmp_path, caplog):
    local, there = make_remote(tmp_path, 3, 12)
    (there / "checkpoint").unlink()
    data = there / "model.ckpt-12.data-00000-of-00001"
    data.write_bytes(bytes(x ^ 1 for x in data.read_bytes()))
    copies = fetched(local, there, 5)
    assert "there/model.ckpt-12, which was not copied completely." in caplog.text
    copies.close()
    assert {path.stem for path in there.glob("*.index")} == {"model.ckpt-3"}


def test_a_remote_folder_whose_checkpoints_are_all_damaged_is_refused_and_kept(tmp_path):
    local, there = make_remote(tmp_path, 3)
    (there / "model.ckpt-3.index").write_bytes(b"")
    names = set(os.listdir(str(there)))
    copies = remote_model_dir.Mirror(f"file://{there}", str(local), 5)
    with pytest.raises(BadInput, match=r"has no complete checkpoint: model.ckpt-3 \(files are"):
        copies.fetch(list(names))
    copies.close()
    assert set(os.listdir(str(there))) == names


@pytest.mark.parametrize(
    "name, flags",
    [("libsvm_to_tfrecord", ()), ("rebalance", ("--num_files=2",)), ("inspect_dataset", None)],
)
def test_the_tools_read_s3_without_tensorflow(server, tmp_path, name, flags):
    folder = Folder(server, f"tools-{name}")
    text = "".join(f"{i % 2} {i % 7 + 1}:1 9:0.5\n" for i in range(300))
    folder.write("a.libsvm", text.encode())
    (tmp_path / "a.libsvm").write_text(text)
    found = []
    for top in (folder.path, str(tmp_path)):
        words = [f"--data={top}/a.libsvm", "--json"]
        if flags is not None:
            to = tmp_path / f"out{len(found)}"
            words = [f"--input={top}/a.libsvm", f"--output_dir={to}", *flags]
        done = run_tool(name, *words, fresh=True, env=s3_server.environment(server), code=0)
        made = [path.read_bytes() for path in sorted(tmp_path.glob(f"out{len(found)}/*"))]
        found.append((done.stdout.replace(top, ""), made))
    assert found[0] == found[1] and found[0] != ("", [])
