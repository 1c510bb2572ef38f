"""Shows how training goes, and measures how fast."""

import array
import gc
import resource
import sys
import time
from typing import NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm.runtime import utilization
from deepfm.runtime.divergence import diverged, worst_weights

v1 = tf.compat.v1

EXAMPLES = "deepfm_examples"  # collection: int64 [], the examples of each replica in a step


_LOOK_SECONDS = 1.0  # between two looks at how busy the host is


class Throughput(NamedTuple):
    """How fast training was in the steady state, and what it used.

    Attributes:
        examples: of this process, from the first step on.
        seconds: from the first step on, without evaluations.
        examples_per_second: steady state, after the first 100 steps or 10 % of them.
        input_wait_share: of the time of a step that was spent waiting for its records.
        cpu_utilization: CPU seconds / (wall seconds x cores that this process may use).
        host_cpu_utilization: the same of all processes of the host.
        gpu_utilization: of the host's GPUs, by nvidia-smi; None where it tells nothing.
        peak_rss_bytes: largest resident memory of this process.
    """

    examples: int
    seconds: float
    examples_per_second: float
    input_wait_share: float
    cpu_utilization: float
    host_cpu_utilization: float
    gpu_utilization: Optional[float]
    peak_rss_bytes: int


class ProgressHook(v1.train.SessionRunHook):
    """Shows progress, stops at a NaN loss, and measures throughput.

    In a terminal a bar with examples/s, loss and time left; elsewhere a line every `every_steps`.

    Args:
        every_steps: steps between two lines; 0 shows nothing.
        last_step: global step at which training ends, or None where that is not known.
        model_dir: where the checkpoints are.
        processes: that train together; what is shown is the rate of all.
        synchronous: whether every step is a step of all processes.
        gpus: of this host.
        summarize: whether summaries are written, which one process does.
    """

    def __init__(
        self,
        every_steps: int,
        last_step: Optional[int],
        model_dir: str,
        processes: int = 1,
        synchronous: bool = True,
        gpus: Optional[utilization.Gpus] = None,
        summarize: bool = True,
    ):
        self._every_steps = every_steps
        self._last_step = last_step
        self._model_dir = model_dir
        self._processes = processes
        self._synchronous = synchronous
        # Of each step: its end (s), CPU time (s), wait for input (s), examples, the global step.
        self._ends, self._cpu = array.array("d"), array.array("d")
        self._waits, self._examples = array.array("d"), array.array("q")
        self._global_steps = array.array("q")
        self._busy = []  # (time without evaluations, utilization.busy_seconds), once a second
        self._gpus = gpus or utilization.Gpus()
        self._summarizes = summarize
        self._excluded, self._excluded_busy, self._excluded_cpu = 0.0, 0.0, 0.0
        self._logged = 0  # own steps at the last line
        self._shown = None  # the _sample of the last line, and what the GPUs had told by then
        self._bar = None
        self.recent_loss = float("nan")

    def begin(self):
        examples = v1.get_collection(EXAMPLES)
        start = tf.timestamp()
        # `start` as well: where the processors are busy, it may be the later one.
        with tf.control_dependencies([start, *examples]):
            wait = tf.timestamp() - start
        rows = tf.add_n(examples)
        loss = v1.get_collection(v1.GraphKeys.LOSSES)[-1]  # Estimator puts the spec's loss there
        numbers = [loss, rows, wait, v1.train.get_global_step()]
        # As one tensor: each one that is fetched costs a step Python's time.
        self._numbers = tf.stack([tf.cast(number, tf.float64) for number in numbers])
        self._worst = worst_weights()

    def after_create_session(self, session, coord):
        if self._ends:
            return  # a session made anew
        self._first_step = session.run(v1.train.get_global_step())
        gc.freeze()  # the graph's objects stay; Python need not look through them again and again
        self._begin, self._begin_cpu = time.monotonic(), time.process_time()
        # Launchers of several processes give each a terminal and prefix what it writes there.
        if self._every_steps and self._processes == 1 and sys.stdout.isatty():
            steps = self._last_step and self._last_step - self._first_step
            self._bar = tf.keras.utils.Progbar(
                steps, stateful_metrics=["loss", "examples/s"], unit_name="step"
            )

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._numbers)

    def after_run(self, run_context, run_values):
        loss, rows, wait, global_step = run_values.results.tolist()
        rows, global_step = int(rows), int(global_step)
        self._ends.append(time.monotonic() - self._excluded)
        # TensorFlow's clock may have been set meanwhile; a step waits for less than it takes.
        began = self._ends[-2] if len(self._ends) > 1 else self._begin
        wait = min(max(wait, 0.0), self._ends[-1] - began)
        self._cpu.append(time.process_time() - self._excluded_cpu)
        self._look()
        self._waits.append(wait)
        self._examples.append(rows)
        # What was fetched may be from before the step, or have others' steps in it.
        step = self._first_step + len(self._ends) if self._synchronous else global_step
        before = self._global_steps[-1] if self._global_steps else self._first_step
        self._global_steps.append(step)
        if not np.isfinite(loss):
            raise diverged(
                step, f"the loss is {loss}", run_context.session.run(self._worst), self._model_dir
            )
        self.recent_loss = loss
        if self._bar:
            self._bar.update(
                step - self._first_step,
                [("loss", loss), ("examples/s", round(self._rate(50)[0]))],
            )
        if self._every_steps and step // self._every_steps > before // self._every_steps:
            self._tell(step, loss)

    def _look(self):
        """Notes how busy the host has been, once a second."""
        if not self._busy or self._ends[-1] - self._busy[-1][0] >= _LOOK_SECONDS:
            self._busy.append(self._sample())

    def _sample(self):
        return self._ends[-1], utilization.busy_seconds() - self._excluded_busy

    def exclude(self, started: Tuple[float, float, float]):
        """Takes an evaluation, which began at a `moment`, out of the throughput."""
        seconds, busy, cpu = (now - then for now, then in zip(self.moment(), started))
        self._excluded += seconds
        self._excluded_busy += busy
        self._excluded_cpu += cpu

    @staticmethod
    def moment() -> Tuple[float, float, float]:
        """(time, utilization.busy_seconds, CPU time of this process) as they are now."""
        return time.monotonic(), utilization.busy_seconds(), time.process_time()

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return len(self._ends)

    def end(self, session):
        if self._bar:
            sys.stdout.write("\n")
        if self._every_steps and self._summarizes:
            v1.summary.FileWriterCache.get(self._model_dir).flush()

    def _rate(self, steps):
        """(examples/s of all processes, global steps/s, share waited) over the last own steps."""
        n = len(self._ends)
        start = self._ends[n - 1 - steps] if n > steps else self._begin
        first = self._global_steps[n - 1 - steps] if n > steps else self._first_step
        seconds = max(self._ends[-1] - start, 1e-9)
        moved = self._global_steps[-1] - first
        alike = self._processes if self._synchronous else moved / min(n, steps)
        examples = sum(self._examples[-steps:]) * alike
        return examples / seconds, moved / seconds, sum(self._waits[-steps:]) / seconds

    def _tell(self, step, loss):
        """Shows the steps since the last line, and writes a summary of them."""
        examples, steps, wait = self._rate(len(self._ends) - self._logged)
        self._logged = len(self._ends)
        cpu, gpu = self._in_use()
        shares = {"input_wait_share": wait, "host_cpu_utilization": cpu, "gpu_utilization": gpu}
        if self._summarizes:
            self._summarize(step, {"examples_per_second": examples, **shares})
        if self._bar:
            return
        named = ("CPU", cpu), ("GPU", gpu)
        in_use = "".join(f"  {name} {100 * x:.0f} %" for name, x in named if x is not None)
        left = ""
        if self._last_step and steps:
            left = f"  left {_clock((self._last_step - step) / steps)}"
        logging.info(
            "step %d  loss %.5f  %.0f examples/s  input wait %.0f %%%s%s",
            step, loss, examples, 100 * wait, in_use, left,
        )  # fmt: skip

    def _in_use(self):
        """(busy share of the CPU, of the GPUs) since the last line; None where not known."""
        before, told = self._shown or (self._busy[0], 0)
        now = self._sample()
        self._shown = now, self._gpus.count()
        return utilization.share_in_use([before, now]), self._gpus.share(told)

    def _summarize(self, step, figures):
        """Writes scalars beside those of the model; the writer is the one of Estimator's hooks."""
        values = [
            v1.Summary.Value(tag=f"speed/{name}", simple_value=x)
            for name, x in figures.items()
            if x is not None
        ]
        v1.summary.FileWriterCache.get(self._model_dir).add_summary(v1.Summary(value=values), step)

    def throughput(self) -> Throughput:
        """The figures of this process's steps so far."""
        steps = len(self._ends)
        if not steps:
            return Throughput(0, 0.0, 0.0, 0.0, 0.0, 0.0, None, 0)
        skip = min(100, steps // 10)
        ends = np.array([self._begin, *self._ends])[skip:]
        cpu = np.array([self._begin_cpu, *self._cpu])[skip:]
        seconds = max(ends[-1] - ends[0], 1e-9)
        own = float((cpu[-1] - cpu[0]) / seconds / utilization.cores())
        host = utilization.share_in_use(self._busy, ends[0])
        return Throughput(
            int(sum(self._examples)),
            float(self._ends[-1] - self._begin),
            float(sum(self._examples[skip:]) / seconds),
            float(sum(self._waits[skip:]) / seconds),
            own,
            own if host is None else host,
            self._gpus.share(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def _clock(seconds):
    minutes, seconds = divmod(int(max(seconds, 0) + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
