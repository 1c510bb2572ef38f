"""Shows how training goes, and measures how fast."""

import array
import collections
import datetime
import gc
import json
import math
import os
import resource
import sys
import time
from typing import List, NamedTuple, Optional, Tuple

import numpy as np
from absl import logging

from deepfm.config import JobConfig
from deepfm.records import atomic_files
from deepfm.runtime import program, utilization
from deepfm.runtime.divergence import diverged, figures_of_weights
from deepfm.runtime.tf import profiler, tf, trace_events_pb2

v1 = tf.compat.v1

# Collection: int64 [3] of each replica, the examples of a step, and how many of these have label 1,
# and a prediction that is 0 or 1 to seven digits.
EXAMPLES = "deepfm_examples"
# Collection: the labels of each replica, which are there as soon as its records are.
ARRIVED = "deepfm_arrived"
# Collection: float32 [2], the records of this step and of the next, averaged over all processes.
ROWS_OF_STEPS = "deepfm_rows_of_steps"

_LOOK_SECONDS = 1.0  # between two samples of how busy the host is
# Of each mark: the time and the process's CPU time, both without evaluations, the time spent
# waiting for input (all in seconds), the global step, and the sums of EXAMPLES.
_FIGURES = 7
_LONGEST = 365 * 24 * 3600  # seconds to show as the time left


class Throughput(NamedTuple):
    """How fast training was in the steady state, and what it used.

    Attributes:
        examples: those of this process, from the first step on.
        seconds: from the first step on, without evaluations.
        examples_per_second: steady state, after the first 100 steps or 10 % of them.
        input_wait_share: share of a step's time that was spent waiting for its records.
        cpu_utilization: CPU seconds / (wall seconds x cores that this process may use).
        host_cpu_utilization: the same for all processes of the host.
        gpu_utilization: of the host's GPUs, from nvidia-smi; None if unknown.
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


def _write_timeline(path: str, steps: int) -> dict:
    """Writes the profiler's Chrome trace of all threads; returns the operators' part of it."""
    trace = trace_events_pb2.Trace.FromString(profiler.stop())
    atomic_files.write_whole(path, json.dumps({"traceEvents": list(_chrome_events(trace))}))
    found = collections.defaultdict(lambda: [0, 0.0])  # calls; ms, without inner ones
    around = []  # (thread, end, name) of the events that the present one is inside of
    place = lambda e: (e.device_id, e.resource_id, e.timestamp_ps, -e.duration_ps, e.name.strip())
    for pid, tid, begin, lasted, name in sorted(map(place, trace.trace_events)):
        while around and (around[-1][0] != (pid, tid) or around[-1][1] <= begin):
            around.pop()
        if around:
            found[around[-1][2]][1] += lasted / 1e9
        around.append(((pid, tid), begin - lasted, name))
        found[name] = [found[name][0] + 1, found[name][1] - lasted / 1e9]
    waits = lambda name: name in ("SessionRun", "RunGraph") or name.isdigit()  # for all others
    found = {name: x for name, x in found.items() if not waits(name)}
    total = sum(ms for _, ms in found.values()) or 1.0
    operators = [
        dict(operator=name, calls=n / steps, ms=ms / steps, share=ms / total)
        for name, (n, ms) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    logging.info("Wrote the timeline of %d steps to %s.", steps, path)
    return {"profile": {"steps": steps, "operators": operators}}


def _chrome_events(trace):
    """The events of a trace as chrome://tracing and Perfetto read them, times in microseconds.

    TensorBoard's own converter is gone from the version beside TensorFlow 2.15.
    """
    for pid, device in trace.devices.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device.name}}
        for tid, thread in device.resources.items():
            of = {"pid": pid, "tid": tid, "args": {"name": thread.name}}
            yield {"ph": "M", "name": "thread_name", **of}
    for event in trace.trace_events:
        when = {"ts": event.timestamp_ps / 1e6, "dur": event.duration_ps / 1e6}
        of = {"pid": event.device_id, "tid": event.resource_id, "args": dict(event.args)}
        yield {"ph": "X", "name": event.name, **when, **of}


class ProgressHook(v1.train.SessionRunHook):
    """Shows progress, stops at a NaN loss, and measures throughput.

    In a terminal a bar with examples/s, loss and time left; elsewhere a line every --log_steps. The
    rate shown is that of all processes. The chief writes summaries and the timeline.

    Args:
        last_step: global step at which training ends; None if unknown.

    Attributes:
        steps: those of this process so far.
        gpus: the Gpus of this host.
        recent_loss: of the last step.
        profile: of _write_timeline.
    """

    def __init__(self, job: JobConfig, last_step: Optional[int] = None):
        mode = job.distribution
        self._every_steps = job.log_steps if mode.chief or not mode.synchronous else 0
        self._last_step, self._model_dir = last_step, job.model_dir
        self._processes, self._synchronous = mode.size, mode.synchronous
        self._summarizes, self.gpus, self.steps = mode.chief, utilization.Gpus(self._now), 0
        self._marks = array.array("d")  # _FIGURES at the start, and as many after each step
        self._busy = []  # (time without evaluations, utilization.busy_seconds), once a second
        self._look = -math.inf  # when the next of these is due
        self._to_profile, self._profile_from = job.profile_steps if mode.chief else (), None
        self.profile = {}
        self._excluded = [0.0, 0.0, 0.0]  # of evaluations, as a `moment`
        self._logged = 0  # own steps at the last line
        self._shown = None  # the _sample of the last line
        self._bar = None
        self.recent_loss = float("nan")

    def begin(self):
        examples = v1.get_collection(EXAMPLES)
        start = tf.timestamp()
        # Depends on `start` too: on busy processors it may be the later one.
        with tf.control_dependencies([start, *v1.get_collection(ARRIVED)]):
            wait = tf.timestamp() - start
        sums = tf.cast(tf.add_n(examples), tf.float64)
        loss = v1.get_collection(v1.GraphKeys.LOSSES)[-1]  # Estimator puts the spec's loss there
        numbers = [tf.cast(x, tf.float64) for x in (loss, wait, v1.train.get_global_step())]
        # One tensor, because each tensor fetched costs Python time at every step.
        self._numbers = tf.concat([tf.stack(numbers), sums], axis=0)
        self._weights = figures_of_weights()

    def after_create_session(self, session, coord):
        if self._marks:
            return  # the session was made again
        self._first_step = session.run(v1.train.get_global_step())
        self._look_closely(self._first_step)
        gc.freeze()  # the graph's objects stay, so the garbage collector need not scan them
        sums = 0.0, 0.0, 0.0
        self._marks.extend((time.monotonic(), time.process_time(), 0.0, self._first_step, *sums))
        # Launchers of several processes give each a terminal and prefix what it writes there.
        if self._every_steps and self._processes == 1 and sys.stdout.isatty():
            steps = self._last_step and self._last_step - self._first_step
            self._bar = tf.keras.utils.Progbar(
                steps, stateful_metrics=["loss", "examples/s"], unit_name="step"
            )

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._numbers)

    def after_run(self, run_context, run_values):
        # Both cores wait for what follows, so it is short.
        loss, wait, global_step, a, b, c = run_values.results.tolist()
        began, _, waited, before, sum_a, sum_b, sum_c = self._marks[-_FIGURES:]
        now = self._now()
        cpu = time.process_time() - self._excluded[2]
        # The clock may have been set meanwhile; a step cannot wait longer than it takes.
        waited += min(max(wait, 0.0), now - began)
        self.steps += 1
        # The fetched step may be from before this one, or include other processes' steps.
        step = self._first_step + self.steps if self._synchronous else int(global_step)
        self._marks.extend((now, cpu, waited, step, sum_a + a, sum_b + b, sum_c + c))
        if now >= self._look:
            self._busy.append(self._sample())
            self._look = now + _LOOK_SECONDS
        if not math.isfinite(loss):
            figures = run_context.session.run(self._weights)
            raise diverged(step, f"the loss is {loss}", figures, self._model_dir)
        self.recent_loss = loss
        if self._to_profile:
            self._look_closely(step)
        if self._bar:
            rate = round(self._rate(max(self.steps - 50, 0))[0])
            figures = step - self._first_step, [("loss", loss), ("examples/s", rate)]
            program.show(lambda: self._bar.update(*figures))
        if self._every_steps and step // self._every_steps > before // self._every_steps:
            self._tell(step, loss)

    def _look_closely(self, step, ends=False):
        """Starts or ends the profiler, after a step."""
        first, last = self._to_profile or (math.inf, math.inf)
        if self._profile_from is not None and (ends or step >= last):
            path, steps = os.path.join(self._model_dir, "timeline.json"), step - self._profile_from
            self.profile = _write_timeline(path, max(int(steps), 1))
            self._to_profile, self._profile_from = (), None
        elif self._to_profile and ends:
            logging.warning("--profile_steps: training took none of steps %d to %d.", first, last)
        elif self._profile_from is None and first - 1 <= step < last:
            profiler.start()
            self._profile_from = step

    def _now(self):
        """The time, without evaluations."""
        return time.monotonic() - self._excluded[0]

    def _sample(self):
        return self._marks[-_FIGURES], utilization.busy_seconds() - self._excluded[1]

    def exclude(self, started: Tuple[float, float, float]):
        """Excludes an evaluation that began at a `moment` from the throughput."""
        self.gpus.forget(started[0] - self._excluded[0])
        lasted = np.subtract(self.moment(), started)
        self._excluded = np.add(self._excluded, lasted).tolist()

    @staticmethod
    def moment() -> Tuple[float, float, float]:
        """(time, utilization.busy_seconds, CPU time of this process) as they are now."""
        return time.monotonic(), utilization.busy_seconds(), time.process_time()

    def end(self, session):
        # Of now, since the last step may have been followed by a checkpoint.
        self._busy.append(tuple(np.subtract(self.moment(), self._excluded)[:2]))
        self._look_closely(int(self._marks[-_FIGURES + 3]), ends=True)
        if self._bar:
            program.show(lambda: sys.stdout.write("\n"))
        if self._every_steps and self._summarizes:
            v1.summary.FileWriterCache.get(self._model_dir).flush()

    def _since(self, own_step):
        """By how much the figures have grown since one of this process's steps."""
        then = self._marks[_FIGURES * own_step : _FIGURES * (own_step + 1)]
        return np.subtract(self._marks[-_FIGURES:], then).tolist()

    def _rate(self, own_step):
        """(examples/s of all processes, global steps/s, share waited) since one of its steps."""
        seconds, _, waited, moved, examples, *_ = self._since(own_step)
        seconds = max(seconds, 1e-9)
        alike = self._processes if self._synchronous else moved / (self.steps - own_step)
        return examples * alike / seconds, moved / seconds, waited / seconds

    def _tell(self, step, loss):
        """Shows the steps since the last line, and writes a summary of them."""
        examples, steps, wait = self._rate(self._logged)
        self._logged = self.steps
        before, self._shown = self._shown or self._busy[0], self._sample()
        cpu = utilization.share_in_use([before, self._shown])
        gpu = self.gpus.share(before[0])
        shares = {"input_wait_share": wait, "host_cpu_utilization": cpu, "gpu_utilization": gpu}
        figures = {"examples_per_second": examples, **shares}
        if self._summarizes:
            values = [
                v1.Summary.Value(tag=f"speed/{name}", simple_value=x)
                for name, x in figures.items()
                if x is not None
            ]
            # Goes beside the model's summaries, through the writer of Estimator's hooks.
            writer = v1.summary.FileWriterCache.get(self._model_dir)
            writer.add_summary(v1.Summary(value=values), step)
        if self._bar:
            return
        named = ("CPU", cpu), ("GPU", gpu)
        in_use = "".join(f"  {name} {100 * x:.0f} %" for name, x in named if x is not None)
        left = ""
        if self._last_step and steps:
            seconds = min(max((self._last_step - step) / steps, 0), _LONGEST)
            left = f"  left {datetime.timedelta(seconds=round(seconds))}"
        logging.info(
            "step %d  loss %.5f  %.0f examples/s  input wait %.0f %%%s%s",
            step, loss, examples, 100 * wait, in_use, left,
        )  # fmt: skip

    def tenths(self, steps: int) -> List[List[float]]:
        """[examples, examples with label 1] of each tenth of this process's first steps."""
        at = (_FIGURES * i for i in np.linspace(0, steps, 11).astype(int))
        return np.diff([self._marks[i + 4 : i + 6] for i in at], axis=0).tolist()

    def saturated(self) -> Tuple[float, float]:
        """(saturated predictions, examples) of this process's last 100 steps."""
        if not self.steps:
            return 0.0, 0.0
        *_, examples, _, saturated = self._since(max(self.steps - 100, 0))
        return saturated, examples

    def throughput(self) -> Throughput:
        """The figures of this process's steps so far."""
        if not self.steps:
            return Throughput(0, 0.0, 0.0, 0.0, 0.0, 0.0, None, 0)
        skip = min(100, self.steps // 10)
        all_seconds, _, _, _, all_examples, *_ = self._since(0)
        seconds, cpu, waited, _, examples, *_ = self._since(skip)
        seconds = max(seconds, 1e-9)
        own = cpu / seconds / utilization.cores()
        began = self._marks[_FIGURES * skip]
        host = utilization.share_in_use(self._busy, began)
        return Throughput(
            int(all_examples), all_seconds, examples / seconds, waited / seconds, own,
            own if host is None else host, self.gpus.share(began + utilization.GPU_LOOK),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )  # fmt: skip
