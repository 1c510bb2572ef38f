"""What a signal does to a process that never reaches the end of its step."""

import fcntl
import os
import signal
import sys
import termios

from conftest import finish, report, run_python, small_training, started, started_python

from deepfm.state import checkpoints

STUCK = """
import sys
sys.path.insert(0, ".")
from deepfm.runtime import interruption
interruption._PATIENCE = 1
stop = interruption.Stop()
stop.install()
stop.loaded()
from deepfm.runtime.tf import tf
with stop.taking_steps(), tf.compat.v1.Session() as session:
    print("reads", flush=True)
    session.run(tf.io.read_file(sys.argv[1]))
"""


def test_a_step_whose_records_never_come_does_not_hold_up_the_end(tmp_path):
    os.mkfifo(tmp_path / "nobody_writes")
    with started_python("-c", STUCK, tmp_path / "nobody_writes") as process:
        assert "reads" in process.stdout.readline()
        process.terminate()
        text, _ = process.communicate(timeout=180)
        assert process.returncode == 143
    assert "the current step has not finished within 1 s" in text
    assert "Run the same command again to resume from the last one." in text


SAVES = (
    STUCK.replace("session.run(tf.io.read_file(sys.argv[1]))", "pass")
    + """
import time
with stop.saving():
    print("saves", flush=True)
    time.sleep(4)
print("saved", stop.wanted, flush=True)
"""
)


def test_a_model_that_takes_long_to_save_is_saved(tmp_path):
    with started_python("-c", SAVES) as process:
        assert "reads" in process.stdout.readline()
        assert "saves" in process.stdout.readline()
        process.terminate()
        text, _ = process.communicate(timeout=180)
    assert "saved True" in text


SWALLOWS = """
import os, signal, sys, time
sys.path.insert(0, ".")
from deepfm.runtime.interruption import Stop
Stop().install()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
except BaseException:
    pass
"""


def test_a_signal_while_modules_are_loaded_cannot_be_swallowed():
    done = finish(started([sys.executable, "-c", SWALLOWS]), code=143)
    assert "SIGTERM: ending now." in done.stdout


EACH = """
import os, signal, sys, time
sys.path.insert(0, ".")
from deepfm.runtime import interruption, program
for name in sys.argv[1:]:
    stop = interruption.Stop()
    stop.install()
    stop.loaded()
    with stop.saving():
        os.kill(os.getpid(), getattr(signal, name))
        print(name, stop.wanted, flush=True)
interruption._TWICE = 0
with stop.saving():
    os.kill(os.getpid(), signal.SIGXCPU)
    os.kill(os.getpid(), signal.SIGXCPU)
print("goes on")
"""
NAMES = "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGXCPU"


def test_each_signal_that_asks_for_the_end_waits_for_the_checkpoint():
    done = finish(started([sys.executable, "-c", EACH, *NAMES]))
    assert [line for line in done.stdout.splitlines() if "True" in line or "False" in line] == [
        f"{name} True" for name in NAMES
    ], done.stdout
    assert "goes on" in done.stdout  # the kernel repeats SIGXCPU


def test_a_signal_that_is_ignored_at_the_start_stays_so():
    """As SIGHUP under nohup; a shell's background jobs ignore SIGINT, which counts all the same."""

    def ignore():
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    names = "SIGHUP", "SIGQUIT", "SIGINT"
    done = finish(started([sys.executable, "-c", EACH, *names], preexec_fn=ignore))
    for name, asked in zip(names, (False, False, True)):
        assert f"{name} {asked}" in done.stdout


def in_terminal(flags, ignored=()):
    """(our side of a terminal, train.py running in it)."""
    ours, theirs = os.openpty()

    def take_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    outputs = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = [sys.executable, "train.py", "--log_steps=1", *flags]
    return ours, started(command, **outputs, preexec_fn=take_terminal)


def until_a_step(ours):
    text = b""
    while b"loss: " not in text:
        text += os.read(ours, 1000)


def test_training_is_saved_when_its_terminal_closes(data, tmp_path):
    model = tmp_path / "model"
    ours, context = in_terminal(small_training(data, model, "--num_epochs=100000"))
    with context as process:
        until_a_step(ours)
        os.close(ours)
        assert process.wait(timeout=180) == 143
    (name,) = checkpoints.read_state(str(model)).names
    assert checkpoints.step(name) >= 1


def test_training_that_ignores_the_end_of_its_terminal_goes_on(data, tmp_path):
    model = tmp_path / "model"
    ours, context = in_terminal(small_training(data, model, "--num_epochs=5"), [signal.SIGHUP])
    with context as process:
        until_a_step(ours)
        os.close(ours)
        assert process.wait(timeout=180) == 0
    assert report(model)["global_step"] == 50


CLOSED = """
import os, pty, sys
from deepfm.runtime import program

ours, theirs = pty.openpty()
sys.stdout = open(theirs, "w")
program.show(lambda: sys.stdout.write("seen"))
assert os.read(ours, 9) == b"seen"
def write():
    os.close(ours)  # after the look whether it is a terminal
    sys.stdout.write("lost")
program.show(write)
program.show(lambda: 1 / 0)
"""


def test_a_terminal_may_close_while_a_bar_is_written():
    run_python("-c", CLOSED, fresh=True, code=0)
