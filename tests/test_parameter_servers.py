"""Parameter servers in real processes: uneven data, ends, losses, checkpoints that move."""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import s3_server
import warm
from conftest import (
    ROOT,
    UNEVEN,
    finish,
    held_train,
    make_records,
    report,
    run_cluster,
    run_train,
    small_job,
    small_training,
    started,
    started_cluster,
    started_python,
    until,
    wait_until,
    write_own_ids,
    write_tfrecords,
)

from deepfm.modes import ps
from deepfm.modes.common.board import RELEASED, Board
from deepfm.runtime import interruption
from deepfm.runtime.tf import tf

pytestmark = pytest.mark.timeout(300)  # whole clusters
LARGE = "--feature_size=100000", "--embedding_size=8", "--batch_norm"


def evaluation(model_dir, task=None):
    return pytest.approx(report(model_dir, task)["eval"], abs=1e-6)


def counted(model_dir):
    """The steps of each process that the newest checkpoint has counted."""
    path = tf.train.latest_checkpoint(str(model_dir))
    return tf.train.load_variable(path, "deepfm_run/steps_of_processes").tolist()


def step_of(model_dir):
    return int(tf.train.load_variable(str(model_dir), "global_step"))


@pytest.fixture(scope="module")
def trained(uneven, tmp_path_factory):
    """The model_dir of a chief, 2 workers and 3 servers that trained 2 epochs, and their text."""
    model_dir = tmp_path_factory.mktemp("ps") / "model"
    more = (*LARGE, "--num_epochs=2", "--learning_rate=0.01", "--eval_every_steps=36")
    done = run_cluster(*small_job(uneven, model_dir, *more), servers=3, workers=2, code=0)
    return model_dir, done.stderr


def test_uneven_files_train_every_record_once_and_all_steps_are_saved(trained):
    found = report(trained[0])
    assert found["distribution"] == "ps"  # chosen by auto
    assert found["num_processes"] == 3
    assert found["global_batch_size"] == 64
    assert found["examples"] == 2 * sum(UNEVEN)
    assert found["global_step"] == 2 * 3 * 6  # 376 records of each process, batch 64
    assert counted(trained[0]) == [12, 12, 12]  # and not the run that found no batch


def test_all_processes_end_by_themselves(trained):
    _, text = trained
    for i in (0, 1, 2):
        assert re.search(rf"ps {i} .*Parameter server {i}: the job is done", text)
    assert re.findall(r"(chief|worker) \d .*Trained (\d+) steps", text) == [("chief", "36")]
    assert len(re.findall("This process took [1-9][0-9]* of the steps", text)) == 3


def test_the_chief_evaluates_all_records_as_one_process_does(trained, uneven):
    model_dir, _ = trained
    together = evaluation(model_dir)
    run_train("--task_type=eval", f"--val_data_dir={uneven}", f"--model_dir={model_dir}", code=0)
    assert report(model_dir, "eval")["eval"] == together


def test_one_record_is_enough_for_two_processes(tmp_path):
    write_tfrecords(tmp_path / "one.tfrecords", make_records(1))
    run_cluster(*small_training(tmp_path / "one.tfrecords", tmp_path / "model"), code=0)
    assert report(tmp_path / "model")["examples"] == 1


def test_a_checkpoint_means_the_same_on_any_number_of_servers(trained, uneven, tmp_path):
    model_dir = shutil.copytree(str(trained[0]), str(tmp_path / "model")) and tmp_path / "model"
    expected = evaluation(model_dir)
    for step, run in ((40, run_train), (45, functools.partial(run_cluster, servers=2))):
        # A learning rate of 0 moves nothing, the decay of 1 no statistics of batch norm.
        still = small_job(
            uneven, model_dir, *LARGE, "--learning_rate=0", "--batch_norm_decay=1",
            "--l2_reg=0", "--num_epochs=100", f"--max_steps={step}",
        )  # fmt: skip
        run(*still, code=0)
        assert report(model_dir)["eval"] == expected
        assert step_of(model_dir) == report(model_dir)["global_step"] == step  # and none beyond


def test_three_servers_hold_equal_parts_of_large_tables(trained):
    _, text = trained
    assert float(re.search(r"MB; max/min ([0-9]+[.][0-9]+)", text).group(1)) <= 1.1
    shards = re.findall(r"ps [012] holds, in bytes: .*fm_v/part_([012]) ([0-9,]+)[.,]", text)
    assert sorted(shards)[0] == ("0", "1,066,688") and len(shards) == 3
    sizes = re.search(r"Parameter servers hold (.*) MB", text).group(1).split(", ")
    assert len(sizes) == 3
    assert sum(map(float, sizes)) > 3 * 4 * 9 * 0.1  # Adam keeps two moments of each weight


@pytest.mark.parametrize("task", [pytest.param("eval", marks=pytest.mark.table), "infer"])
def test_other_jobs_are_the_chiefs_alone(trained, uneven, tmp_path, task):
    model_dir, _ = trained
    done = run_cluster(
        f"--task_type={task}", f"--val_data_dir={uneven}", f"--infer_data_dir={uneven}",
        f"--model_dir={model_dir}", f"--predictions_file={tmp_path}/predictions.txt", code=0,
    )  # fmt: skip
    assert report(model_dir, task)["examples" if task == "infer" else "eval"]
    assert f"Only the chief runs --task_type={task}" in done.stderr


def test_training_that_has_reached_max_steps_ends_at_once(trained, uneven):
    run_cluster(*small_training(uneven, trained[0], *LARGE, "--max_steps=36"), code=0)
    assert report(trained[0])["global_step"] == 36


def processes_of(launcher, job):
    """The train.py processes of a job that a launcher has started."""
    wanted = {"type": job, "index": 0}
    found = []
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, KeyError):
            if json.loads(child.environ()["TF_CONFIG"])["task"] == wanted:
                found.append(child)
    return found


@pytest.mark.parametrize("killed", ["all", pytest.param("worker", marks=pytest.mark.table)])
def test_a_killed_job_that_is_started_again_skips_no_record(tmp_path, killed):
    rows, batch, rate, every = 3000, 10, 1e-5, 50
    write_own_ids([tmp_path / "a.tfrecords"], [rows])
    flags = (
        f"--training_data_dir={tmp_path}/a.tfrecords", f"--model_dir={tmp_path}/model",
        f"--feature_size={rows}", "--embedding_size=2", "--deep_layers=2", "--dropout=0",
        "--embedding_init_stddev=0", "--l2_reg=0", "--optimizer=sgd", f"--learning_rate={rate}",
        f"--batch_size={batch}", f"--save_checkpoints_steps={every}", "--log_steps=1",
    )  # fmt: skip
    # Each stays two thirds of the way: the job cannot end before it is killed.
    train = held_train(tmp_path, "deepfm.training.StopTogether.after_run", "calls == 100")
    with started_cluster(*flags, python=warm.PYTHON, train=train) as launcher:
        until(launcher.stdout, r"step [678]\d ")
        assert wait_until((tmp_path / "model" / "checkpoint").exists, 180)
        if killed == "all":
            children = psutil.Process(launcher.pid).children(recursive=True)
            assert len(children) == 3
            launcher.kill()  # which ends all that it has started
            _, alive = psutil.wait_procs(children, timeout=180)
            assert not alive
        else:
            processes_of(launcher, killed)[0].kill()
        launcher.communicate(timeout=180)
    held, noted = step_of(tmp_path / "model"), sum(counted(tmp_path / "model"))
    assert noted <= held
    run_cluster(*flags, workers=1, code=0)
    moved = np.abs(tf.train.load_variable(str(tmp_path / "model"), "fm_w")) / (rate * 0.5 / batch)
    uses = np.rint(moved)
    assert uses.min() == 1
    # A step that was not counted is taken again; and one of each process was on its way.
    assert (uses - 1).sum() <= (held - noted + 2) * batch <= (every + 2) * batch


def test_a_step_counts_after_its_updates_and_begins_after_its_claim():
    mode = ps.Ps.__new__(ps.Ps)
    mode.size, mode.rank = 2, 1
    with tf.Graph().as_default():
        batch = {"feat_ids": tf.constant([[1]])}, tf.constant([1.0])
        features, labels = mode._begin_step(*batch, max_steps=5)
        for tensor in (features["feat_ids"], labels):
            (claim,) = tensor.op.control_inputs
            assert claim.type == "ResourceCountUpTo" and claim.get_attr("limit") == 5
            assert {x.op for x in tf.nest.flatten(batch)} == set(claim.control_inputs)
        updated = tf.no_op("updated")
        assert updated in mode._end_step(updated).control_inputs


def test_a_worker_that_is_killed_and_started_again_goes_on(uneven, tmp_path):
    model_dir = tmp_path / "model"
    endless = small_training(uneven, model_dir, "--num_epochs=100000", "--log_steps=1")
    with started_cluster(*endless, restarts=1, python=warm.PYTHON) as launcher:
        killed, text = False, ""
        for line in launcher.stdout:
            text += line
            if re.match(r"worker 0 .*step [0-9]+ ", line):
                if not killed:
                    processes_of(launcher, "worker")[0].kill()
                    killed = True
                elif "worker 0 ended with code -9; starting it again" in text:
                    launcher.terminate()
                    break
        text += launcher.communicate(timeout=180)[0]
        assert launcher.returncode == 143, text
    assert "has not answered" not in text
    (step,) = re.findall(r"chief 0 .*saved the checkpoint of step (\d+)", text)
    taken = counted(model_dir)
    # The step of which it was killed in the middle may have counted on one side only.
    assert min(taken) > 0 and 0 <= int(step) - sum(taken) <= 1


def test_the_launcher_ends_all_and_returns_the_code_of_the_first_that_failed(uneven, tmp_path):
    flags = small_training(uneven, tmp_path / "model", "--feature_size=3")
    assert "feature id" in run_cluster(*flags, code=2).stderr


def test_a_signal_while_the_launcher_starts_processes_ends_them(uneven, tmp_path):
    program = """if True:
        import os, runpy, signal, sys
        sys.path[0] = "scripts"
        import programs
        start = programs.start
        programs.start = lambda *how, **more: [
            start(*how, **more), os.kill(os.getpid(), signal.SIGINT)
        ][0]
        runpy.run_path("scripts/local_cluster.py", run_name="__main__")
    """
    flags = small_training(uneven, tmp_path / "model")
    done = finish(started([sys.executable, "-c", program, "--", *flags]), code=143)
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def tasks(config, *flags, folders=None, of_servers=(), missing=(), fresh=()):
    """{(job, index): process} of a TF_CONFIG cluster without the launcher.

    Args:
        config: {job: addresses}.
        flags: train.py's; those `of_servers` are the servers' alone.
        folders: {job: the folder it runs in}.
        missing: jobs that do not start.
        fresh: the (job, index) that start Python, as of run_train.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for job, addresses in config.items():
            for index in range(len(addresses) * (job not in missing)):
                task = {"cluster": config, "task": {"type": job, "index": index}}
                more = of_servers if job == "ps" else ()
                found[job, index] = stack.enter_context(
                    started_python(
                        ROOT / "train.py", *flags, *more,
                        cwd=(folders or {}).get(job, ROOT), stderr=subprocess.PIPE,
                        env={**os.environ, "TF_CONFIG": json.dumps(task)},
                        fresh=(job, index) in fresh,
                    )
                )  # fmt: skip
        yield found


def addresses(count):
    """Free ports of this machine."""
    found = set()
    while len(found) < count:
        found.add(f"127.0.0.1:{s3_server.free_port()}")
    return sorted(found)


def test_the_articles_scripts_start_with_their_own_flags(tmp_path):
    for name, rows in (("training/tr", 300), ("val/te", 50)):
        (tmp_path / name).parent.mkdir()
        write_tfrecords(tmp_path / f"{name}.tfrecords", make_records(rows))
    # As its launch notebook gives them, which SageMaker's toolkit sorts.
    script = {
        "batch_norm": "False", "batch_norm_decay": "0.9", "batch_size": "64", "deep_layers": "8,4",
        "dropout": "0.5,0.5", "embedding_size": "4", "enable_s3_shard": "False",
        "feature_size": "50", "field_size": "4", "l2_reg": "0.0001", "learning_rate": "0.0005",
        "log_steps": "1000", "loss_type": "log_loss", "model_dir": tmp_path / "model",
        "num_CPUs": "2", "num_GPUs": "0", "num_epochs": "1", "num_threads": "2",
        "optimizer": "Adam", "perform_shuffle": "0", "pipe_mode": "0", "task_type": "train",
        "training_channel_name": "training", "training_data_dir": tmp_path / "training",
        "val_data_dir": tmp_path / "val",
    }  # fmt: skip
    words = lambda more: [x for n, v in sorted({**script, **more}.items()) for x in (f"--{n}", v)]
    a = addresses(3)
    hosts = {"dist_mode": "2", "ps_hosts": a[0], "worker_hosts": ",".join(a[1:])}
    with contextlib.ExitStack() as stack:
        processes = []
        for job, index in (("ps", "0"), ("worker", "0"), ("worker", "1")):
            task = words({**hosts, "job_name": job, "task_index": index})
            processes.append(stack.enter_context(started_python("train.py", *task)))
        texts = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    found = report(tmp_path / "model")
    assert found["distribution"] == "ps" and found["num_processes"] == 2
    assert found["examples"] == 300 and found["eval"]["examples"] == 50
    assert found["flags"]["intra_op_threads"] == found["flags"]["num_cpus"] == 2
    done = run_train(*words({"dist_mode": "0", "task_type": "infer"}))
    assert done.returncode == 0 and "--val_data_dir has no" not in done.stderr, done.stderr
    assert len((tmp_path / "model" / "predictions.txt").read_text().splitlines()) == 50


@pytest.mark.parametrize("lost", [pytest.param(("worker", 0), marks=pytest.mark.table), ("ps", 1)])
def test_losing_a_process_ends_the_others_within_a_minute_with_a_sentence(uneven, tmp_path, lost):
    a = addresses(4)
    config = {"master": a[:1], "worker": a[1:2], "ps": a[2:]}  # the chief's other name
    args = small_training(uneven, tmp_path, "--num_epochs=1000000", "--log_steps=20")
    with tasks(config, *args, fresh=[lost]) as processes:  # the one killed is no stand-in
        until(processes["worker", 0].stderr, "step ")
        processes.pop(lost).kill()
        last = time.time() + 60
        for task, process in processes.items():
            _, text = process.communicate(timeout=max(1, last - time.time()))
            assert process.returncode == 1, (task, text)
            assert "has not answered for" in text.splitlines()[-1]


@pytest.mark.table
def test_a_chief_that_never_starts_ends_the_others_with_a_sentence(uneven, tmp_path):
    a = addresses(3)
    config = {"chief": a[:1], "worker": a[1:2], "ps": a[2:]}
    with tasks(config, *small_training(uneven, tmp_path), missing=["chief"]) as processes:
        for process in processes.values():
            _, text = process.communicate(timeout=180)
            assert process.returncode == 1
            assert "chief 0 (" in text.splitlines()[-1] and "has not answered" in text


def test_servers_that_have_the_kernels_hold_and_update_variables_with_them(trained):
    model_dir, text = trained
    assert "does not have the compiled kernels" not in text
    meta = tf.compat.v1.MetaGraphDef()
    with open(tf.train.latest_checkpoint(str(model_dir)) + ".meta", "rb") as f:
        meta.ParseFromString(f.read())
    ops = {node.op for node in meta.graph_def.node}
    assert {"DeepfmZeros", "DeepfmAdam", "DeepfmElapsedAdamRows"} <= ops


def test_where_the_servers_do_not_see_model_dir_the_chief_writes_checkpoints_whole(
    uneven, tmp_path
):
    """These servers do not have the compiled kernels either."""
    a = addresses(3)
    hosts = [tmp_path / "host 1", tmp_path / "host 2"]
    for host in hosts:
        host.mkdir()
    folders = {"chief": hosts[0], "ps": hosts[1]}
    args = small_training(uneven, "model")  # relative, so each process has one of its own
    how = {"folders": folders, "of_servers": ["--nocompiled_kernels"]}
    with tasks({"chief": a[:1], "ps": a[1:]}, *args, **how) as found:
        _, text = found["chief", 0].communicate(timeout=180)
        assert found["chief", 0].returncode == 0, text
        assert f"ps 0 ({a[1]}) does not see --model_dir=model" in text
        assert f"ps 0 ({a[1]}) does not have the compiled kernels" in text
    assert not (hosts[1] / "model").exists()
    (data,) = (hosts[0] / "model").glob("model.ckpt-*.data-*")
    assert data.name.endswith("-00000-of-00001")
    checkpoint = tf.train.latest_checkpoint(str(hosts[0] / "model"))
    assert tf.train.load_variable(checkpoint, "fm_v").shape == (50, 4)  # of both servers


def test_a_port_that_is_taken_is_named(uneven, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = {"chief": [f"127.0.0.1:{port}"], "ps": addresses(1)}
        task = {"cluster": config, "task": {"type": "chief", "index": 0}}
        env = {**os.environ, "TF_CONFIG": json.dumps(task)}
        done = run_train(*small_job(uneven, tmp_path / "model"), env=env)
    assert done.returncode == 2
    assert f"chief 0 cannot listen on port {port}" in done.stderr.splitlines()[-1]


def test_a_value_that_comes_just_before_the_end_of_the_job_is_read():
    server = tf.distribute.Server({"ps": ["127.0.0.1:0"]}, "ps", 0)
    board = Board(server, ["/job:ps"])
    look, looks = board.posted, []

    def posted(name):
        found = look(name)
        looks.append(name)
        if len(looks) == 1:  # and while this process is held up:
            board.post("value", 7)
            board.post(RELEASED)
        return found

    board.posted = posted
    assert board.read("value") == 7
    with pytest.raises(interruption.Interrupted):
        board.read("another")


def test_a_session_that_is_made_anew_ends_the_process():
    count = ps._OneSession()
    count.after_create_session(None, None)
    with pytest.raises(OSError, match="run the same command again to resume"):
        count.after_create_session(None, None)
