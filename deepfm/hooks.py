"""What watches training: progress and throughput, checkpoints and evaluations, divergence."""

import array
import gc
import resource
import sys
import time
from typing import Callable, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm import interruption, pieces, utilization
from deepfm.entry import BadInput

v1 = tf.compat.v1

EXAMPLES = "deepfm_examples"  # collection: int64 [], the examples of each replica in a step
# Collection: float32 [2], the records of this step and of the next one, the mean of all processes.
ROWS_OF_STEPS = "deepfm_rows_of_steps"
_LOOK_SECONDS = 1.0  # between two looks at how busy the host is
_WORST = "deepfm_worst_weights"  # collection: what _worst_weights returns


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


class Progress(v1.train.SessionRunHook):
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
        self._worst = _worst_weights()

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


class FetchesOfSteps(v1.train.SessionRunHook):
    """Makes what a step fetches ready once, and not in every step.

    Session.run looks up all that it is to fetch, and whether the graph has grown, each time anew,
    while the processors wait for the next step. What is no step of a MonitoredSession, or is fed
    or traced, it fetches as before.
    """

    def __init__(self):
        self.ready = {}  # _identity of fetches -> (what fetches them, the fetches)

    def after_create_session(self, session, coord):
        run, ready = session.run, self.ready
        ready.clear()  # of a session that was lost

        def run_again(fetches, feed_dict=None, options=None, run_metadata=None):
            of_step = isinstance(fetches, dict) and "caller" in fetches
            if feed_dict or not of_step or (options is not None and options.ByteSize()):
                return run(fetches, feed_dict, options, run_metadata)
            key = _identity(fetches)
            if key not in ready:
                if len(ready) == _KINDS_OF_STEPS:
                    ready.clear()
                # With `fetches`: while these are kept, others cannot get their identities.
                ready[key] = session.make_callable(fetches), fetches
            return session._do_call(ready[key][0])  # so errors tell what Session.run's do

        session.run = run_again

    def end(self, session):
        # Or the session, and all that its variables take, would stay.
        session.__dict__.pop("run", None)
        self.ready.clear()


_KINDS_OF_STEPS = 16  # that fetches are kept ready for


def _identity(fetches):
    """Equal for fetches that are the same objects in lists and dicts of the same form."""
    if isinstance(fetches, (list, tuple)):
        return (type(fetches), *map(_identity, fetches))
    if isinstance(fetches, dict):
        return (type(fetches), *((key, _identity(fetches[key])) for key in fetches))
    return fetches if isinstance(fetches, str) else id(fetches)


class StopTogether(v1.train.SessionRunHook):
    """Stops training after the same step in all processes, once one of them is to stop.

    Args:
        wanted: () -> whether this process is to stop.
        average: (tensor, name) -> its mean over the processes that take each step together.
        anyone_stops: (whether this process is to stop) -> whether any is, for processes that do
            not; called after each step.
    """

    def __init__(self, wanted: Callable[[], bool], average: Callable, anyone_stops: Callable):
        self._wanted, self._average, self._anyone_stops = wanted, average, anyone_stops

    def begin(self):
        # Were 0 a constant, TensorFlow might compute the mean ahead, and not ask the others for it.
        zero = tf.cast(tf.timestamp() < 0, tf.float32)
        self._mine = v1.placeholder_with_default(zero, [], name="stop")
        self._share = self._average(self._mine, "stop")

    def before_run(self, run_context):
        if self._share is self._mine:
            return None
        return v1.train.SessionRunArgs(self._share, {self._mine: 1.0} if self._wanted() else None)

    def after_run(self, run_context, run_values):
        if (run_values.results or 0) > 0 or self._anyone_stops(self._wanted()):
            interruption.heard()
            run_context.request_stop()


class GiveUp(v1.train.SessionRunHook):
    """Ends an evaluation with interruption.Interrupted when a signal has asked training to stop."""

    def after_run(self, run_context, run_values):
        if interruption.requested():
            interruption.heard()
            raise interruption.Interrupted()


class EndTogether(v1.train.SessionRunHook):
    """Ends training at the same step in all processes, when none has records for the next one."""

    def begin(self):
        (self._rows,) = v1.get_collection(ROWS_OF_STEPS)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._rows)

    def after_run(self, run_context, run_values):
        this, following = run_values.results
        if not this:
            raise BadInput("The training channels hold no records, on any host.")
        if not following:
            run_context.request_stop()


def _clock(seconds):
    minutes, seconds = divmod(int(max(seconds, 0) + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def diverged(step, what, worst, model_dir):
    """The error for a model that is no longer finite; `worst` is what _worst_weights gives."""
    kept = tf.train.latest_checkpoint(model_dir)
    state = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved before"
    name, bad, size, largest = worst
    where = f"the weights {name.decode()} are worst, "
    where += f"{bad:,} of {size:,} are not finite" if bad else f"the largest is {largest:.3g}"
    return BadInput(
        f"step {step}: {what}; {where}; {state}. Try a smaller --learning_rate, or --clip_norm=10."
    )


class _Timer:
    """Tells when to save: a number of seconds or of steps after the last time.

    In place of TensorFlow's SecondOrStepTimer, which goes by the time of day: while that has been
    set back an hour, an hour without a checkpoint.
    """

    def __init__(self, seconds: Optional[int], steps: Optional[int]):
        self._seconds, self._steps = seconds, steps
        self._last_step, self._last_time = 0, time.monotonic()

    def should_trigger_for_step(self, step):
        if self._seconds is None:
            return step >= self._last_step + self._steps
        return step != self._last_step and time.monotonic() >= self._last_time + self._seconds

    def update_last_triggered_step(self, step):
        self._last_step, self._last_time = step, time.monotonic()


class Checkpointer(v1.train.CheckpointSaverHook):
    """Saves checkpoints of finite weights only, and evaluates some of them on the way.

    Args:
        model_dir: where checkpoints go.
        save_secs, save_steps: the interval between two; one of them is None.
        eval_steps: steps between two evaluations, 0 for none.
        evaluate: (session, step) -> (whether it changed a variable, so that the checkpoint is made
            anew; whether training is to stop); called when the checkpoint of a step is there.
        first_step: global step from which these steps are counted.
        before_save: called before each checkpoint is saved.
        save: False in processes that leave saving to the chief and only evaluate with it.
    """

    def __init__(
        self,
        model_dir: str,
        save_secs: Optional[int],
        save_steps: Optional[int],
        eval_steps: int = 0,
        evaluate: Optional[Callable] = None,
        first_step: int = 0,
        before_save: Callable[[], None] = lambda: None,
        save: bool = True,
    ):
        super().__init__(model_dir, save_secs=save_secs, save_steps=save_steps)
        self._timer = _Timer(save_secs, save_steps)
        self._eval_steps = eval_steps
        self._evaluate = evaluate
        self._model_dir = model_dir
        self._saved_step = None
        self._next_evaluation = None  # global step
        self._first_step, self._before_save = first_step, before_save
        self._saves = save

    def begin(self):
        if not self._saves:  # the parent would write to model_dir, which is the chief's
            self._global_step_tensor = v1.train.get_global_step()
            return
        super().begin()
        self._finite, self._worst = _all_finite(), _worst_weights()

    def after_create_session(self, session, coord):
        # Unlike the parent, saves nothing yet: at the start there is nothing that could be lost.
        self._saved_step = session.run(self._global_step_tensor)
        self._timer.update_last_triggered_step(self._saved_step)
        self._set_next_evaluation(self._saved_step)
        if self._saves:
            self._summary_writer.add_graph(v1.get_default_graph())

    def after_run(self, run_context, run_values):
        super().after_run(run_context, run_values)
        # The step that was fetched may be from before its increment.
        if self._eval_steps and run_values.results + 1 >= self._next_evaluation:
            step = int(run_context.session.run(self._global_step_tensor))
            if step < self._next_evaluation:
                return
            self._set_next_evaluation(step)
            self._save(run_context.session, step)
            changed, stop = self._evaluate(run_context.session, step)
            if changed:
                self._saved_step = None
                self._save(run_context.session, step)
            if stop:
                run_context.request_stop()

    def _set_next_evaluation(self, step):
        if self._eval_steps:
            done = (step - self._first_step) // self._eval_steps
            self._next_evaluation = self._first_step + (done + 1) * self._eval_steps

    def save_in_time(self, session):
        """Saves a checkpoint where the last one is old enough, for one who waits between steps."""
        step = session.run(self._global_step_tensor)
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            self._save(session, step)

    def end(self, session):
        self._save(session, session.run(self._global_step_tensor))

    def _save(self, session, step):
        if not self._saves:
            return False
        if step == self._saved_step and tf.train.latest_checkpoint(self._model_dir):
            return False
        if not session.run(self._finite):
            worst = session.run(self._worst)
            raise diverged(step, "the weights are not finite", worst, self._model_dir)
        self._before_save()
        self._saved_step = step
        return super()._save(session, step)


def _all_finite():
    """bool []: whether all weights are finite, without a copy of their size."""
    finite = []
    for variable in v1.trainable_variables():
        with tf.device(variable.device):  # so that it need not travel
            finite += [tf.math.is_finite(x) for x in pieces.sums(variable)]
    return tf.reduce_all(finite)


def _worst_weights():
    """(name string [], how many of its numbers are not finite, size, the largest: int64, int64,
    float32 []) of the variable with the largest share of numbers that are not finite, or where
    all are finite with the largest number."""
    if v1.get_collection(_WORST):  # made by another hook
        return tuple(v1.get_collection(_WORST))
    found = []
    for variable in v1.trainable_variables():
        with tf.device(variable.device):
            finite = tf.math.is_finite(variable)
            bad = tf.size(finite, out_type=tf.int64) - tf.math.count_nonzero(finite)
            largest = tf.reduce_max(tf.abs(variable))
            found.append((bad, tf.size(finite, out_type=tf.int64), largest))
    bad, size, largest = map(tf.stack, zip(*found))
    share = tf.cast(bad, tf.float64) / tf.cast(size, tf.float64)
    worst = tf.cond(tf.reduce_any(bad > 0), lambda: tf.argmax(share), lambda: tf.argmax(largest))
    names = tf.constant([variable.op.name for variable in v1.trainable_variables()])
    for column in (names, bad, size, largest):
        v1.add_to_collection(_WORST, column[worst])
    return tuple(v1.get_collection(_WORST))


class CheckShapes(v1.train.SessionRunHook):
    """Refuses a model_dir whose checkpoint is another model's, and names what differs.

    Args:
        model_dir: the folder.
        path: of the checkpoint; None: the newest.
    """

    def __init__(self, model_dir: str, path: Optional[str] = None):
        self._model_dir, self._path = model_dir, path

    def begin(self):
        path = self._path or tf.train.latest_checkpoint(self._model_dir)
        if not path:
            return
        found = dict(tf.train.list_variables(path))
        wanted = dict(map(_saved_as, _variables()))
        differ = [
            f"{name} is {found[name]}, these flags make it {shape}"
            for name, shape in wanted.items()
            if name in found and list(found[name]) != shape
        ]
        needed = {_saved_as(variable)[0] for variable in v1.trainable_variables()}
        missing = [name for name in wanted if name not in found and name in needed]
        if differ or missing:
            raise BadInput(
                f"--model_dir={self._model_dir} holds another model's checkpoint: "
                + "; ".join(differ + _absent(missing))
                + ". Give the flags it was trained with, another --model_dir, "
                "or --clear_existing_model."
            )


class SaveInPieces(v1.train.SessionRunHook):
    """Has checkpoints saved and restored in pieces, and notes saved with them.

    What the checkpoint to restore lacks begins at its initial value: the slots of an optimizer that
    it was not trained with.

    Args:
        model_dir: where checkpoints are.
        of_saver: arguments of pieces.make_saver.
    """

    def __init__(self, model_dir: str, **of_saver):
        self._model_dir, self._of_saver = model_dir, of_saver

    def begin(self):
        path, absent = tf.train.latest_checkpoint(self._model_dir), {}
        if path:
            found = {name for name, _ in tf.train.list_variables(path)}
            absent = {v.op.name: v for v in _variables() if _saved_as(v)[0] not in found}
        if absent:
            logging.info(
                "The checkpoint is of another optimizer: %s start at their initial values.",
                ", ".join(sorted({_saved_as(v)[0] for v in absent.values()})),
            )
        savers = v1.get_collection_ref(v1.GraphKeys.SAVERS)  # Estimator's, not built yet
        savers[:] = [pieces.make_saver(absent=absent, **self._of_saver)]


def _variables():
    """The variables of a checkpoint; MirroredStrategy keeps copies that are none."""
    return [v for v in v1.global_variables() if "/replica_" not in v.op.name]


def _saved_as(variable):
    """(name, shape) in a checkpoint, which knows nothing of the parts of a variable."""
    part = variable._get_save_slice_info()
    if part:
        return part.full_name, list(part.full_shape)
    return variable.op.name, variable.shape.as_list()


def _absent(names: List[str]):
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"it lacks {', '.join(names[:3])}{more}"] if names else []
