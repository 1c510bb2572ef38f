"""Progress, throughput and checkpoints of a small training loop."""

import signal
import time

import numpy as np
import pytest
from conftest import job_of, mode_of

from deepfm import evaluation, training
from deepfm.errors import BadInput
from deepfm.modes.common.mode import Mode
from deepfm.runtime import interruption, tf_patches, throughput, utilization
from deepfm.runtime.tf import tf
from deepfm.state import saving

v1 = tf.compat.v1


def progress_hook(model_dir, last=None, every=100, rank=0):
    job = job_of(model_dir=str(model_dir), log_steps=every, distribution=mode_of(rank=rank))
    return throughput.ProgressHook(job, last)


def train(model_dir, steps, extra=(), rows=8, every=2, last=None, poison=None, summarize=True):
    """Runs `steps` steps of a loop that counts up one weight; returns the ProgressHook."""
    progress = progress_hook(model_dir, last, every=every, rank=int(not summarize))
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weight = v1.get_variable("weight", [3], initializer=v1.zeros_initializer())
        v1.add_to_collection(throughput.EXAMPLES, tf.constant([rows, 0, 0], tf.int64))
        grow = tf.constant(1.0)
        if poison is not None:
            grow = tf.where(tf.equal(step, poison), np.nan, 1.0)
        loss = tf.reduce_sum(weight) + 1.0
        v1.add_to_collection(v1.GraphKeys.LOSSES, loss)
        with tf.control_dependencies([loss, grow]):  # the step is read before it is counted up
            train_op = tf.group(weight.assign_add(tf.fill([3], grow)), step.assign_add(1))
        v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(sharded=True, defer_build=False))
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(model_dir),
            save_checkpoint_secs=None,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
            hooks=[progress, *extra, tf_patches.FetchesOfSteps()],
        ) as session:
            for _ in range(steps):
                session.run(train_op)
    return progress


def checkpointer(model_dir, every=100, rank=0, **kwargs):
    mode = mode_of(rank=rank)
    job = job_of(model_dir=str(model_dir), save_checkpoints_steps=every, distribution=mode)
    return saving.Checkpointer(job, **kwargs)


def test_throughput_counts_the_examples_of_every_step(tmp_path):
    found = train(tmp_path, 7, rows=5).throughput()
    assert found.examples == 35
    assert found.seconds > 0
    assert found.peak_rss_bytes > 1 << 20


def test_a_run_of_less_than_a_second_knows_how_busy_the_host_is(tmp_path, monkeypatch):
    busy = lambda: time.monotonic() * utilization.cores()  # all cores, by other processes
    monkeypatch.setattr(utilization, "busy_seconds", busy)
    assert train(tmp_path, 7).throughput().host_cpu_utilization > 0.9


def test_summaries_tell_the_speed_at_every_line(tmp_path):
    train(tmp_path, 5, every=2)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    found = {
        (event.step, value.tag): value.simple_value
        for event in v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    names = ["examples_per_second", "input_wait_share"]
    wanted = {(step, f"speed/{name}") for step in (2, 4) for name in names}
    assert wanted <= set(found)
    assert found[2, "speed/examples_per_second"] > 0


def test_a_step_cannot_have_waited_for_less_than_no_time(tmp_path):
    with tf.Graph().as_default() as graph:
        v1.train.get_or_create_global_step()
        v1.add_to_collection(throughput.EXAMPLES, tf.constant([8, 0, 0], tf.int64))
        v1.add_to_collection(v1.GraphKeys.LOSSES, v1.get_variable("weight", []))
        progress_hook(tmp_path).begin()
        begin, end = (op for op in graph.get_operations() if op.type == "Timestamp")
    assert begin in end.control_inputs


def test_an_evaluations_seconds_are_not_training_seconds(tmp_path):
    def evaluate(session, step):
        progress.gpus._read(["40"])
        started = progress.moment()
        while time.process_time() < started[2] + 0.5:
            pass
        progress.gpus._read(["90"])
        progress.exclude(started)
        return False

    progress = progress_hook(tmp_path)
    hook = checkpointer(tmp_path, eval_steps=3, evaluate=evaluate)
    shared = train(tmp_path, 6, extra=[progress, hook])
    assert progress.throughput().seconds < shared.throughput().seconds - 0.4
    # Nor is its CPU time, or a process would have used more than all cores.
    assert progress.throughput().cpu_utilization <= 1.1
    # What it made GPUs do is no training, either.
    assert progress.gpus.share() == pytest.approx(0.4)


def test_the_progress_line_tells_the_time_left(tmp_path, caplog):
    with caplog.at_level("INFO", logger="absl"):
        train(tmp_path, 4, last=10)
    lines = [r.getMessage() for r in caplog.records if "examples/s" in r.getMessage()]
    assert len(lines) == 2
    assert lines[1].startswith("step 4 ") and "left 0:00:0" in lines[1]


def test_a_very_late_end_is_no_trouble_to_the_progress_line(tmp_path, caplog):
    with caplog.at_level("INFO", logger="absl"):
        train(tmp_path, 4, last=10**18)
    assert "left 365 days" in caplog.text


def test_a_checkpoint_is_saved_at_the_end_and_none_at_the_start(tmp_path):
    train(tmp_path, 3, extra=[checkpointer(tmp_path)])
    states = tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths
    assert [path.split("-")[-1] for path in states] == ["3"]


def test_evaluations_see_the_checkpoint_of_their_step(tmp_path):
    seen = []

    def evaluate(session, step):
        seen.append((step, tf.train.load_variable(str(tmp_path), "global_step")))
        return False

    train(tmp_path, 7, extra=[checkpointer(tmp_path, eval_steps=3, evaluate=evaluate)])
    assert seen == [(3, 3), (6, 6)]


def test_a_nan_loss_names_the_step_and_the_last_good_checkpoint(tmp_path):
    with pytest.raises(
        BadInput, match=r"step 6: the loss is nan; the weights weight are worst, .*model.ckpt-4"
    ):
        train(tmp_path, 9, poison=4, extra=[checkpointer(tmp_path, every=4)])


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    with pytest.raises(
        BadInput, match="step 5: the weights are not finite; the weights weight are worst, 3 of 3 "
    ):
        train(tmp_path, 5, poison=4, extra=[checkpointer(tmp_path)])
    assert tf.train.latest_checkpoint(str(tmp_path)) is None


def test_an_evaluation_may_stop_training_at_its_step(tmp_path):
    hook = checkpointer(tmp_path, eval_steps=2, evaluate=lambda _, step: step == 4)
    with pytest.raises(RuntimeError, match="Run called even after should_stop"):
        train(tmp_path, 9, extra=[hook])
    assert tf.train.load_variable(str(tmp_path), "global_step") == 4


def test_one_who_wants_to_stop_stops_after_the_step(tmp_path):
    mode, steps = Mode(), []

    class Steps(v1.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            steps.append(0)
            mode.stop.early = len(steps) > 2

    hook = training.StopTogether(mode)
    with pytest.raises(RuntimeError, match="Run called even after should_stop"):
        train(tmp_path, 9, extra=[Steps(), hook])
    assert len(steps) == 3


def test_a_process_that_leaves_saving_to_the_chief_writes_nothing_but_evaluates(tmp_path):
    seen = []
    hook = checkpointer(
        tmp_path, every=2, eval_steps=3, evaluate=lambda _, step: seen.append(step), rank=1
    )
    train(tmp_path, 6, extra=[hook], summarize=False)
    assert seen == [3, 6]
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_is_given_up_when_a_signal_has_come(tmp_path):
    stop, seen = interruption.Stop(), []

    class Steps(v1.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            seen.append(1)
            stop.signal = signal.SIGTERM if len(seen) == 3 else None

    with pytest.raises(interruption.Interrupted):
        train(tmp_path, 5, extra=[Steps(), evaluation.GiveUp(stop)])
    assert len(seen) == 3
