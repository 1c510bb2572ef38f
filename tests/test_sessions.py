"""A session ends well with its last record; a file that may not grow any more ends it as an error.

The limit on the size of files is the system's own (`ulimit -f`).
"""

import contextlib
import resource

import pytest
import tensorflow as tf
from conftest import make_records, run_train, small_job, write_tfrecords

from deepfm.runtime import sessions

v1 = tf.compat.v1


@contextlib.contextmanager
def largest_file(size):
    """In this block no file of this process may have more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def step(what, records=3, target=""):
    """Takes steps until a MonitoredSession ends; returns how many, each with its after_run."""

    class Hook(v1.train.SessionRunHook):
        taken = 0

        def after_run(self, run_context, run_values):
            self.taken += 1
            what(run_context.session)

    hook = Hook()
    following = v1.data.make_one_shot_iterator(tf.data.Dataset.range(records)).get_next()
    creator = v1.train.ChiefSessionCreator(master=target)
    with sessions.ended_by_input_alone(), v1.train.MonitoredSession(creator, [hook]) as session:
        while not session.should_stop():
            session.run(following)
    return hook.taken


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("server", [False, True])
def test_a_session_ends_well_with_its_last_record(server):
    target = tf.distribute.Server.create_local_server().target if server else ""
    assert step(lambda session: None, target=target) == 3


def test_an_op_that_cannot_write_fails_the_session(tmp_path):
    write = tf.io.write_file(str(tmp_path / "file"), tf.fill([], "x" * 9000))
    with largest_file(4096), pytest.raises(tf.errors.OutOfRangeError, match="File too large"):
        step(lambda session: session.run(write))


def test_a_hook_that_cannot_write_fails_the_session(tmp_path):
    def write(session):
        with tf.io.gfile.GFile(str(tmp_path / "file"), "w") as f:
            f.write("x" * 9000)

    with largest_file(4096), pytest.raises(tf.errors.OutOfRangeError, match="File too large"):
        step(write)


def test_sessions_outside_of_the_block_are_as_before(tmp_path):
    before = v1.train.MonitoredSession.__exit__
    step(lambda session: None)
    assert v1.train.MonitoredSession.__exit__ is before


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tfrecords(tmp_path_factory.mktemp("data") / "a.tfrecords", make_records(3000))


def limited(size, *flags):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return run_train(*flags, preexec_fn=limit)


def check_failed(done, file):
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert file in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "Trained " not in done.stderr


@pytest.mark.parametrize(
    "file, flags",
    [
        # The graph, which Python writes, and a table of 16 MB, which an op writes.
        ("model.ckpt-7.meta", []),
        pytest.param("model.ckpt-7_temp_", ["--feature_size=1000000"], marks=pytest.mark.table),
        pytest.param(
            "model.ckpt-7", ["--feature_size=1000000", "--distribution=mirrored"],
            marks=pytest.mark.table,
        ),
    ],
)  # fmt: skip
def test_training_that_cannot_save_fails(data, tmp_path, file, flags):
    more = "--val_data_dir=", "--save_checkpoints_steps=7", "--optimizer=sgd", *flags
    size = 8 << 20 if "--feature_size=1000000" in flags else 8 << 10
    check_failed(limited(size, *small_job(data, tmp_path / "model", *more)), file)


@pytest.mark.parametrize(
    "compiled", ["true", pytest.param("false", marks=pytest.mark.table)]
)  # fmt: skip
def test_training_whose_cache_cannot_grow_fails(data, tmp_path, compiled):
    more = f"--cache={tmp_path}/cache", "--num_epochs=2", f"--compiled_kernels={compiled}"
    done = limited(64 << 10, *small_job(data, tmp_path / "model", "--val_data_dir=", *more))
    check_failed(done, f"InternalError: {tmp_path}/cache-")


@pytest.mark.table
@pytest.mark.parametrize(
    "task, file",
    [
        ("eval", "report.eval.json"),
        ("infer", "predictions.txt"),
        ("export", "saved_model.pb"),
    ],
)
def test_a_job_that_cannot_write_fails(data, tmp_path, task, file):
    flags = small_job(data, tmp_path / "model", f"--infer_data_dir={data}")
    assert run_train(*flags).returncode == 0
    more = f"--task_type={task}", f"--servable_model_dir={tmp_path}/servable"
    check_failed(limited(4 << 10, *flags, *more), file)
