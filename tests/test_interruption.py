"""What a signal does to a process that never reaches the end of its step."""

import os
import sys

from conftest import finish, started

STUCK = """
import sys
sys.path.insert(0, ".")
from deepfm.runtime import interruption
interruption._PATIENCE = 1
interruption.install()
interruption.loaded()
import tensorflow as tf
with interruption.taking_steps(), tf.compat.v1.Session() as session:
    print("reads", flush=True)
    session.run(tf.io.read_file(sys.argv[1]))
"""


def test_a_step_whose_records_never_come_does_not_hold_up_the_end(tmp_path):
    os.mkfifo(tmp_path / "nobody_writes")
    context = started([sys.executable, "-c", STUCK, tmp_path / "nobody_writes"])
    with context as process:
        assert "reads" in process.stdout.readline()
        process.terminate()
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 143
    assert "the current step has not finished within 1 s" in text
    assert "Run the same command again to resume from the last one." in text


SAVES = (
    STUCK.replace("session.run(tf.io.read_file(sys.argv[1]))", "pass")
    + """
import time
with interruption.saving():
    print("saves", flush=True)
    time.sleep(4)
print("saved", interruption.requested(), flush=True)
"""
)


def test_a_model_that_takes_long_to_save_is_saved(tmp_path):
    with started([sys.executable, "-c", SAVES]) as process:
        assert "reads" in process.stdout.readline()
        assert "saves" in process.stdout.readline()
        process.terminate()
        text, _ = process.communicate(timeout=60)
    assert "saved True" in text


SWALLOWS = """
import os, signal, sys, time
sys.path.insert(0, ".")
from deepfm.runtime import interruption
interruption.install()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
except BaseException:
    pass
"""


def test_a_signal_while_modules_are_loaded_cannot_be_swallowed():
    done = finish(started([sys.executable, "-c", SWALLOWS]))
    assert done.returncode == 143
    assert "SIGTERM: ending now." in done.stdout
