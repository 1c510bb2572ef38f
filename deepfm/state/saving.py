"""The hooks that save checkpoints, restore them, and refuse those of another model.

A checkpoint notes, as bytes beside the variables, the parts of its run (`resume`) and what
model.json says. No other program needs these tensors.
"""

import concurrent.futures
import json
import os
import time
import uuid
from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np
from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput, listed
from deepfm.records import atomic_files
from deepfm.runtime.divergence import diverged, figures_of_weights
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints, resume, sliced_saver

v1 = tf.compat.v1

MODEL = f"{resume.NOTES}model"


class Checkpointer(v1.train.CheckpointSaverHook):
    """Saves checkpoints of finite weights only, and evaluates some of them during training.

    Steps go on while a checkpoint is synced and gets its name, but for evaluations and the end.

    Processes other than the chief leave saving to it, and only evaluate with it.

    Args:
        eval_steps: steps between two evaluations, 0 for none.
        evaluate: (session, step) -> whether to stop training; called after the checkpoint of a step
            is saved. What it changes, a restart must change again: the step is not saved again.
        first_step: global step from which these steps are counted.
        before_save, after_save: called before each checkpoint is saved and after it is named.
    """

    def __init__(
        self,
        job: JobConfig,
        eval_steps: int = 0,
        evaluate: Optional[Callable] = None,
        first_step: int = 0,
        before_save: Callable[[], None] = lambda: None,
        after_save: Callable[[], None] = lambda: None,
    ):
        super().__init__(job.model_dir, save_steps=1)  # whose timer is not used
        self._job, self._model_dir, self._saves = job, job.model_dir, job.distribution.chief
        self._eval_steps, self._evaluate, self._first_step = eval_steps, evaluate, first_step
        self._before_save, self._after_save = before_save, after_save
        self._saved_step = self._next_evaluation = None  # global steps
        self._beside, self._naming = concurrent.futures.ThreadPoolExecutor(1), None

    def begin(self):
        if not self._saves:  # the parent would write to model_dir, which is the chief's
            self._global_step_tensor = v1.train.get_global_step()
            return
        super().begin()
        self._finite, self._weights = _all_finite(), figures_of_weights()

    def after_create_session(self, session, coord):
        # Unlike the parent, saves nothing yet: at the start there is nothing to lose.
        self._saved_step = session.run(self._global_step_tensor)
        self._last_timed = self._saved_step, time.monotonic()
        self._set_next_evaluation(self._saved_step)
        if self._saves:  # the newest one has just been restored
            delete_older(self._model_dir, self._get_saver().saver_def.max_to_keep)

    def after_run(self, run_context, run_values):
        if self._naming and self._naming.done():
            self.close()  # raises what it raised
        # The step fetched may be from before the increment.
        if self._is_time(run_values.results + 1):
            self.save_in_time(run_context.session)
        if self._eval_steps and run_values.results + 1 >= self._next_evaluation:
            step = int(run_context.session.run(self._global_step_tensor))
            if step < self._next_evaluation:
                return
            self._set_next_evaluation(step)
            self._save(run_context.session, step)
            if self._evaluate(run_context.session, step):
                run_context.request_stop()

    def _set_next_evaluation(self, step):
        if self._eval_steps:
            done = (step - self._first_step) // self._eval_steps
            self._next_evaluation = self._first_step + (done + 1) * self._eval_steps

    def _is_time(self, step):
        """Whether a periodic checkpoint is due, by the time or the steps since the last one.

        TensorFlow's SecondOrStepTimer goes by the time of day: with a clock set back by an hour, it
        saves no checkpoint for an hour.
        """
        last_step, last_time = self._last_timed
        if self._job.save_checkpoints_steps:
            return step >= last_step + self._job.save_checkpoints_steps
        due = last_time + self._job.save_checkpoints_secs
        return step != last_step and time.monotonic() >= due

    def save_in_time(self, session):
        """Saves a checkpoint if it is time; a process that waits between steps calls this too."""
        step = session.run(self._global_step_tensor)
        if self._is_time(step):
            self._last_timed = step, time.monotonic()
            self._save(session, step, wait=False)

    def end(self, session):
        self._save(session, session.run(self._global_step_tensor))

    def close(self):
        """Waits until every checkpoint that was written has its name."""
        naming, self._naming = self._naming, None
        if naming:
            naming.result()

    def _save(self, session, step, wait=True):
        self.close()
        there = step == self._saved_step and tf.train.latest_checkpoint(self._model_dir)
        if there or not self._saves:
            return
        if not session.run(self._finite):
            figures = session.run(self._weights)
            raise diverged(step, "the weights are not finite", figures, self._model_dir)
        self._before_save()
        self._saved_step = step
        with self._job.distribution.stop.saving():
            self._naming = self._beside.submit(self._name, self._write(session, step))
            if wait:
                self.close()

    def _write(self, session, step):
        """Writes a checkpoint into a folder of its own, for `add`; returns that."""
        path, saver = f"{self._save_path}-{step}", self._get_saver()
        made, ops = f"{path}_temp_{uuid.uuid4().hex}", saver.saver_def
        os.mkdir(made)
        prefix = os.path.join(made, os.path.basename(path))
        session.run(ops.save_tensor_name, {ops.filename_tensor_name: prefix})
        with session.graph.as_default():
            saver.export_meta_graph(f"{prefix}.meta")
        return made

    def _name(self, made):
        add(made, self._get_saver().saver_def.max_to_keep)
        self._after_save()


def add(made: str, keep: int):
    """Gives a checkpoint, in PREFIX_temp_*/, its place and name; deletes all but the newest `keep`.

    After a power cut, either the new one is named and whole, or what was there before is.
    """
    atomic_files.sync_all(made)
    prefix, folder = made.rpartition("_temp_")[0], os.path.dirname(made)
    whole = f"{prefix}{checkpoints.WHOLE}"
    os.rename(made, whole)  # from here on, a start finishes what a kill cuts short
    atomic_files.sync(folder)
    checkpoints.put(whole)
    delete_older(folder, keep)


def delete_older(folder: str, keep: int):
    """Deletes all checkpoints but the newest `keep`; 0: none. A start finishes what a kill left."""
    names = checkpoints.read_state(folder).names
    old = names[:-keep] if keep else []
    if old:  # the state file names them until they are gone, so that a kill leaves nothing of them
        for other in old:
            checkpoints.delete(folder, other)
        checkpoints.write_state(folder, names[len(old) :])


def _all_finite():
    """bool []: whether all weights are finite, without copying them whole."""
    finite = []
    for variable in v1.trainable_variables():
        with tf.device(variable.device):  # so that the weights need not be sent
            finite += [tf.math.is_finite(x) for x in sliced_saver.sums(variable)]
    return tf.reduce_all(finite)


class CheckShapes(v1.train.SessionRunHook):
    """Refuses a model_dir whose checkpoint is another model's, and names what differs.

    The checkpoint is at `path`; None: the newest.
    """

    def __init__(self, model_dir: str, path: Optional[str] = None):
        self._model_dir, self._path = model_dir, path

    def begin(self):
        path = self._path or tf.train.latest_checkpoint(self._model_dir)
        if not path:
            return
        shapes = dict(tf.train.list_variables(path))
        wanted = dict(map(_saved_as, _variables()))
        differ = [
            f"{name} is {shapes[name]}, these flags make it {shape}"
            for name, shape in wanted.items()
            if name in shapes and list(shapes[name]) != shape
        ]
        needed = {_saved_as(variable)[0] for variable in v1.trainable_variables()}
        missing = [name for name in wanted if name not in shapes and name in needed]
        differ += [f"it lacks {listed(missing, 3)}"] if missing else []
        if differ:
            raise BadInput(
                f"--model_dir={self._model_dir} holds another model's checkpoint: "
                + "; ".join(differ)
                + ". Give the flags it was trained with, another --model_dir, "
                "or --clear_existing_model."
            )


class SlicedSaving(v1.train.SessionRunHook):
    """Saves and restores checkpoints in slices, and saves notes with them.

    Variables that the checkpoint lacks, such as the slots of another optimizer, start at their
    initial values.

    Args:
        of_saver: arguments of sliced_saver.make_saver.
    """

    def __init__(self, model_dir: str, **of_saver):
        self._model_dir, self._of_saver = model_dir, of_saver

    def begin(self):
        path, absent, fresh = tf.train.latest_checkpoint(self._model_dir), {}, set()
        saved = {name for name, _ in tf.train.list_variables(path)} if path else ()
        for variable in _variables() if path else ():
            name = _saved_as(variable)[0]
            if name not in saved:
                absent[variable.op.name] = variable.initial_value
                fresh.add(name)
        if fresh:
            logging.info(
                "The checkpoint comes from another --optimizer or --l2_scope: %s start at their "
                "initial values.",
                ", ".join(sorted(fresh)),
            )
        savers = v1.get_collection_ref(v1.GraphKeys.SAVERS)  # Estimator's, not built yet
        savers[:] = [sliced_saver.make_saver(absent=absent, **self._of_saver)]


def _variables():
    """The variables that a checkpoint holds: all but MirroredStrategy's copies."""
    return [v for v in v1.global_variables() if "/replica_" not in v.op.name]


def _saved_as(variable):
    """(name, shape) in a checkpoint, which holds the parts of a variable as one."""
    part = variable._get_save_slice_info()
    if part:
        return part.full_name, list(part.full_shape)
    return variable.op.name, variable.shape.as_list()


def make_notes(
    parts: Sequence[resume.RunPart], config: Dict[str, Any], count: Optional[Callable] = None
):
    """Makes the function that makes the tensors which a checkpoint holds about its run.

    Args:
        parts: all so far, the last being the one that is trained now.
        config: what model.json says.
        count: () -> int64 [processes], the steps of each in this part, if these differ.

    Returns:
        () -> {name: tensor}.
    """
    text, model = json.dumps([part._asdict() for part in parts]), as_note(config)

    def make():
        notes = {resume.PARTS: tf.constant(_bytes(text)), MODEL: tf.constant(model)}
        return {**notes, resume.STEPS: count()} if count else notes

    return make


def model_of(path: str) -> Dict[str, Any]:
    """What model.json said when the checkpoint at `path` was saved; {} if that is unknown."""
    try:
        reader = tf.train.load_checkpoint(path)
        text = reader.get_tensor(MODEL).tobytes() if reader.has_tensor(MODEL) else b"{}"
        return json.loads(text.decode())
    except (ValueError, tf.errors.OpError):  # whoever reads the checkpoint says what is damaged
        return {}


def as_note(content) -> np.ndarray:
    """The bytes with which a checkpoint notes what a JSON file says."""
    return _bytes(atomic_files.as_json(content))


def _bytes(text):
    return np.frombuffer(text.encode(), np.uint8)
