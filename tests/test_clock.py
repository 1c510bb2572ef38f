"""A clock that is set back or forward an hour harms no checkpoint, throughput or wait of a job."""

import re
import time

import pytest
from conftest import ROOT, job_of
from test_hooks import checkpointer, train

from deepfm.runtime.tf import tf
from deepfm.state import saving

v1 = tf.compat.v1
SECONDS = 10  # that a step takes here


class Clock(v1.train.SessionRunHook):
    """The clocks that a job sees: one that runs on, and the time of day, set back at each step."""

    def __init__(self, monkeypatch):
        self.passed, self.set_back = 0.0, 0.0
        real = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: real + self.passed)
        monkeypatch.setattr(time, "time", lambda: 1.8e9 + self.passed - self.set_back)

    def before_run(self, run_context):
        self.passed += SECONDS
        self.set_back += 3600


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def saved(model_dir):
    states = tf.train.get_checkpoint_state(str(model_dir)).all_model_checkpoint_paths
    return [int(path.split("-")[-1]) for path in states]


def test_checkpoints_are_saved_in_time_though_the_clock_is_set_back(tmp_path, clock):
    job = job_of(model_dir=str(tmp_path), save_checkpoints_secs=3 * SECONDS)
    train(tmp_path, 10, extra=[clock, saving.Checkpointer(job)])
    assert saved(tmp_path) == [3, 6, 9, 10]


def test_a_checkpoint_is_saved_once_in_its_number_of_steps(tmp_path):
    train(tmp_path, 10, extra=[checkpointer(tmp_path, 4)])
    assert saved(tmp_path) == [4, 8, 10]


def test_throughput_is_that_of_the_seconds_that_have_passed(tmp_path, clock):
    found = train(tmp_path, 7, rows=5, extra=[clock]).throughput()
    assert found.seconds == pytest.approx(7 * SECONDS)
    assert found.examples_per_second == pytest.approx(5 / SECONDS)


@pytest.mark.parametrize("jump, share", [(-3600.0, 0.0), (3600.0, 1.0)])
def test_a_step_waits_for_its_records_no_longer_than_it_takes(
    tmp_path, monkeypatch, clock, jump, share
):
    times = iter([0.0, jump])  # of a clock that is set between the two looks of each step
    monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(next(times), tf.float64))
    assert train(tmp_path, 7, extra=[clock]).throughput().input_wait_share == share


def test_no_program_measures_by_the_time_of_day():
    programs = [
        path
        for folder in ("deepfm", "data_tools", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(programs) > 50
    found = [path.name for path in programs if re.search(r"\btime\.time\(", path.read_text())]
    # export.py names a folder as servers expect it, owner.py compares with a stamp of S3's.
    assert sorted(found) == ["export.py", "owner.py"]
