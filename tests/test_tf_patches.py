"""A session ends well at its last record, and with an error if a file may not grow any further.

The limit on the size of files is the system's own (`ulimit -f`). A step fetches what Session.run
fetches, although it is prepared only once.
"""

import contextlib
import resource
import weakref

import pytest
from conftest import make_records, run_train, small_job, write_tfrecords

from deepfm.runtime import tf_patches
from deepfm.runtime.tf import tf

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
    with tf_patches.ended_by_input_alone(), v1.train.MonitoredSession(creator, [hook]) as session:
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
    [("eval", "report.eval.json"), ("infer", "predictions.txt"), ("export", "saved_model.pb")],
)
def test_a_job_that_cannot_write_fails(data, tmp_path, task, file):
    flags = small_job(data, tmp_path / "model", f"--infer_data_dir={data}")
    assert run_train(*flags).returncode == 0
    more = f"--task_type={task}", f"--servable_model_dir={tmp_path}/servable"
    check_failed(limited(4 << 10, *flags, *more), file)


@pytest.fixture
def fetches_of_steps():
    return tf_patches.FetchesOfSteps()


@pytest.fixture
def session(fetches_of_steps):
    """A session as FetchesOfSteps leaves it."""
    with tf.Graph().as_default(), v1.Session() as session:
        fetches_of_steps.after_create_session(session, None)
        yield session


def test_what_a_step_fetches_is_what_sessions_fetch(session, fetches_of_steps):
    count = v1.get_variable("count", [], tf.int32, v1.zeros_initializer(), use_resource=True)
    place = v1.placeholder_with_default(7, [])
    session.run(v1.global_variables_initializer())
    up, value = count.assign_add(1, read_value=False), count.read_value()
    one, hook = tf.constant(1), object()
    for i in range(1, 4):
        with_place = {"caller": [up, one], hook: place}
        assert session.run(with_place) == {"caller": [None, 1], hook: 7}
        assert session.run(with_place, {place: i}) == {"caller": [None, 1], hook: i}
        assert session.run({"caller": [up, one]}) == {"caller": [None, 1]}
        assert session.run({"caller": (one, {"a": [place]})}) == {"caller": (1, {"a": [7]})}
        assert session.run({"caller": [one, {"a": [place]}]}) == {"caller": [1, {"a": [7]}]}
        assert session.run({"caller": [one, place], "a": one}) == {"caller": [1, 7], "a": 1}
        assert session.run({"caller": value.name}, options=v1.RunOptions()) == {"caller": 3 * i}
        assert session.run([value, []]) == [3 * i, []]
        assert len(fetches_of_steps.ready) == 6


def test_an_error_of_a_step_tells_its_operation(session):
    wrong = tf.strings.to_number("x", name="the_wrong_one")
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the_wrong_one") as error:
            session.run({"caller": [wrong]})
        assert error.value.op is wrong.op


def test_a_trace_of_a_step_is_taken(session):
    found, one = v1.RunMetadata(), tf.constant(1)
    for options in (v1.RunOptions(), v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)):
        found_one = session.run({"caller": one}, options=options, run_metadata=found)
        assert found_one == {"caller": 1}
    assert found.step_stats.dev_stats


def test_a_session_of_which_steps_were_fetched_is_freed():
    with tf.Graph().as_default():
        session, hook = v1.Session(), tf_patches.FetchesOfSteps()
        hook.after_create_session(session, None)
        session.run({"caller": tf.constant(1)})
        hook.end(session)
        session.close()
        there = weakref.ref(session)
        del session
        assert there() is None  # before any collection of garbage
