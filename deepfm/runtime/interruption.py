"""Whether training is to stop: after early stopping, or on one of program.SIGNALS.

On a signal, the process finishes and saves the current step and exits with code 143. During
training steps it is only noted, and training.StopTogether ends training after the step. At any
other time there is nothing to save, and the process ends at once. If a step does not end, for
example because its records never arrive, the process ends without it.

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


class Interrupted(SystemExit):
    """Ends the process with exit code 143; `together`: as do all processes of the job."""

    def __init__(self, together: bool = False):
        super().__init__(CODE)
        self.together = together


class Stop:
    """Whether training in this process is to stop, and what a signal may interrupt until then.

    Attributes:
        signal: the number of the signal that has asked for it, or None.
        early: whether --early_stopping_patience asks for it.
    """

    def __init__(self):
        self.signal, self.early = None, False
        self._at, self._loaded, self._heard = 0.0, False, False
        self._taking_steps = self._saving = False

    def install(self):
        """Installs the handler of these signals; call it in the main thread."""
        program.handle_signals(self._handle)
        # Python runs a handler only when the main thread returns from TensorFlow, if ever; the byte
        # in this pipe is written at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, args=(reader,), daemon=True).start()

    def loaded(self):
        """Notes that all modules are loaded. Until then a signal ends the process on the spot,
        because code that is being imported may swallow an exception or turn it into another one."""
        self._loaded = True

    @property
    def wanted(self) -> bool:
        """Whether this process wants training to stop."""
        return self.early or self.signal is not None

    @contextlib.contextmanager
    def taking_steps(self, taken: bool = True):
        """In this block signals wait for the end of the step; `taken=False` suspends that."""
        before, self._taking_steps = self._taking_steps, taken
        try:
            if before:
                self.give_up()
            yield
        finally:
            self._taking_steps = before

    @contextlib.contextmanager
    def saving(self):
        """In this block, which saves the model, signals wait as long as it takes."""
        before = self._saving, self._taking_steps
        self._saving = self._taking_steps = True
        try:
            yield
        finally:
            self._saving, self._taking_steps = before

    def heard(self):
        """Notes that training is stopping, which may take as long as its checkpoint needs."""
        self._heard = True

    def give_up(self):
        """Ends what may be ended at once (Interrupted) if a signal has come."""
        if self.signal is not None:
            self.heard()
            raise Interrupted()

    def _handle(self, number, _):
        program.leave_closed_terminal()
        # The kernel repeats SIGXCPU every second.
        repeated = number != signal.SIGXCPU and time.monotonic() - self._at > _TWICE
        again = self.signal is not None and repeated
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()
        name = signal.Signals(self.signal).name
        if not self._loaded:
            os.write(2, f"{os.path.basename(sys.argv[0])}: {name}: ending now.\n".encode())
            os._exit(CODE)
        if again or not self._taking_steps:
            self.heard()
            logging.info("%s: ending now.", name)
            raise Interrupted()
        logging.info("%s: ending after this step and its checkpoint.", name)

    def _wait(self, reader):
        """Ends the process if the main thread does not react to a signal."""
        while os.read(reader, 1)[0] not in program.SIGNALS:
            pass
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            time.sleep(0.5)
            if self._saving:
                end = time.monotonic() + _PATIENCE
        if self._heard:
            return
        program.end_at_once(
            f"the current step has not finished within {_PATIENCE} s; ending without its "
            "checkpoint. Run the same command again to resume from the last one.",
            CODE,
        )
