"""On one of program.SIGNALS, finishes and saves the current step and exits with code 143.

During training steps, a signal is only noted, and stopping.StopTogether ends training after the
step. At any other time there is nothing to save, and the process ends at once. If a step does not
end, for example because its records never arrive, the process ends without it.

(mpirun passes SIGUSR1 on to its ranks and leaves them alone; it follows SIGTERM with SIGKILL.)
"""

import contextlib
import os
import signal
import sys
import threading
import time

from absl import logging

from deepfm.runtime import program

CODE = 128 + signal.SIGTERM
_PATIENCE = 60  # seconds that the current step may take
_TWICE = 2  # seconds after which a second signal means that the user will not wait

_state = {
    "signal": None, "at": 0.0, "loaded": False, "taking_steps": False, "heard": False,
    "saving": False,
}  # fmt: skip


class Interrupted(SystemExit):
    """Ends the process with exit code 143; `together`: as do all processes of the job."""

    def __init__(self, together: bool = False):
        super().__init__(CODE)
        self.together = together


def install():
    """Installs the handler of these signals; call it in the main thread."""
    _state.update(signal=None, loaded=False, taking_steps=False, heard=False)
    program.handle_signals(_handle)
    # Python runs a handler only when the main thread returns from TensorFlow, if ever; the byte in
    # this pipe is written at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), daemon=True).start()


def loaded():
    """Notes that all modules are loaded. Until then a signal ends the process on the spot, because
    code that is being imported may swallow an exception or turn it into another one."""
    _state["loaded"] = True


def requested() -> bool:
    """Whether a signal has asked training to stop."""
    return _state["signal"] is not None


@contextlib.contextmanager
def taking_steps(taken: bool = True):
    """In this block signals wait for the end of the step; `taken=False` suspends that within it."""
    before, _state["taking_steps"] = _state["taking_steps"], taken
    try:
        if before and requested():
            heard()
            raise Interrupted()
        yield
    finally:
        _state["taking_steps"] = before


@contextlib.contextmanager
def saving():
    """In this block, which saves the model, signals wait as long as it takes."""
    before = {name: _state[name] for name in ("saving", "taking_steps")}
    _state.update(saving=True, taking_steps=True)
    try:
        yield
    finally:
        _state.update(before)


def heard():
    """Notes that training is stopping, which may take as long as its checkpoint needs."""
    _state["heard"] = True


def _handle(number, _):
    program.leave_closed_terminal()
    # The kernel repeats SIGXCPU every second.
    repeated = number != signal.SIGXCPU and time.monotonic() - _state["at"] > _TWICE
    again = requested() and repeated
    if not requested():
        _state.update(signal=number, at=time.monotonic())
    name = signal.Signals(_state["signal"]).name
    if not _state["loaded"]:
        os.write(2, f"{os.path.basename(sys.argv[0])}: {name}: ending now.\n".encode())
        os._exit(CODE)
    if again or not _state["taking_steps"]:
        heard()
        logging.info("%s: ending now.", name)
        raise Interrupted()
    logging.info("%s: ending after this step and its checkpoint.", name)


def _wait(reader):
    """Ends the process if the main thread does not react to a signal."""
    while os.read(reader, 1)[0] not in program.SIGNALS:
        pass
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        time.sleep(0.5)
        if _state["saving"]:
            end = time.monotonic() + _PATIENCE
    if _state["heard"]:
        return
    logging.flush()
    sys.stderr.write(
        f"{os.path.basename(sys.argv[0])}: the current step has not finished within {_PATIENCE} s; "
        "ending without its checkpoint. Run the same command again to resume from the last one.\n"
    )
    sys.stderr.flush()
    os._exit(CODE)
