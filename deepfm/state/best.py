"""The best checkpoint of a run, and which checkpoint a job applies: that, the newest, or another.

The best one is in `best/` in model_dir, where it stays when the original goes: its files are hard
links. The state file there names it as soon as all of them are there, and only
then do those of the one before go, so that a kill leaves one whole best checkpoint.
"""

import contextlib
import os
import shutil
from typing import Callable, Optional

from absl import logging

from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints, damage, evaluations, resume

v1 = tf.compat.v1

FOLDER = "best"
AUTO = "auto"  # the best checkpoint if it is of this run, else the last one
_TRIES = 10  # tries to read the newest checkpoint, if each is deleted before it is read


def keep(model_dir: str, path: str):
    """Makes the checkpoint at `path`, which is in model_dir, the best one."""
    folder, name = os.path.join(model_dir, FOLDER), os.path.basename(path)
    os.makedirs(folder, exist_ok=True)
    parts = checkpoints.by_name(os.listdir(model_dir))[name]
    with atomic_files.scratch(model_dir, ".reading-") as scratch:
        for part in parts:
            link(os.path.join(model_dir, part), os.path.join(scratch, part))
            atomic_files.replace(os.path.join(scratch, part), os.path.join(folder, part))
    checkpoints.write_state(folder, [name])
    for other in os.listdir(folder):
        if checkpoints.is_part(other) and other not in (checkpoints.STATE, *parts):
            os.remove(os.path.join(folder, other))


def link(source: str, target: str):
    """Makes a hard link to a file, or a copy where there are none."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def forget_later(model_dir: str, step: int):
    """Removes a best checkpoint of a later step than training continues from, or a damaged one."""
    folder = os.path.join(model_dir, FOLDER)
    if (step_of(folder) or 0) > step:
        clear(folder)
        return
    for name in checkpoints.read_state(folder).names:
        # Of a remote one that nothing exports, only the state file has been fetched.
        path, fetched = os.path.join(folder, name), checkpoints.by_name(os.listdir(folder))
        if fetched and damage.first_damaged(path):
            logging.warning("Deleting %s, which is damaged.", path)
            clear(folder)


def step_of(folder: str) -> Optional[int]:
    """The global step of the checkpoint that a state file names; None without one."""
    names = checkpoints.read_state(folder).names
    return checkpoints.step(names[-1]) if names else None


def clear(folder: str) -> bool:
    """Deletes the checkpoints of a best/ folder, local or remote; returns whether all is gone."""
    # The state file comes first: what it names is whole.
    return remote_files.clear(folder, checkpoints.is_part)


def say_if_replaced(model_dir: str, history: evaluations.History):
    """Warns that the run of this History will replace a best checkpoint that is not its own."""
    folder = os.path.join(model_dir, FOLDER)
    step = step_of(folder)
    if step is not None and not history.lost and not history.has(step):
        logging.warning(
            "The checkpoint of step %d in %s is the best of an earlier run, or was so on other "
            "validation data: the next evaluation replaces it. Copy it if you need it.",
            step, folder,
        )  # fmt: skip


def chosen(model_dir: str, which: str) -> str:
    """The checkpoint that a job uses, for `of_checkpoint`.

    Args:
        which: last, best, auto (the best one if it is of this run, else the last) or a path.

    Raises:
        BadInput: the best one is wanted, and it is an earlier run's.
    """
    folder = os.path.join(model_dir, FOLDER)
    step = step_of(folder)
    if which not in (FOLDER, AUTO) or step is None:
        return "last" if which == AUTO else which
    began = resume.began(model_dir)
    if step > began:
        last = step_of(model_dir)
        logging.info("Using the best checkpoint of this run, of step %d (last: %s).", step, last)
        return FOLDER
    if which == FOLDER:
        raise BadInput(
            f"--checkpoint=best: the best checkpoint, of step {step}, is an earlier run's; the "
            f"present one began at step {began} and has none yet, which takes --val_data_dir; give "
            f"--checkpoint=last, or --checkpoint={os.path.join(folder, f'model.ckpt-{step}')}."
        )
    return "last"


def of_checkpoint(model_dir: str, which: str, read: Callable, hold: bool = True):
    """Returns `read(path)` for a checkpoint of model_dir.

    Args:
        which: last, best, or the path of one.
        read: path -> anything; called again if it fails because the newest checkpoint is gone.
        hold: whether another process may delete it meanwhile; `read` then gets a hard link to it.

    Raises:
        BadInput: there is no such checkpoint.
    """
    folder = model_dir if which == "last" else os.path.join(model_dir, FOLDER)
    if which in ("last", FOLDER):
        if which == FOLDER and not checkpoints.read_state(folder).names:
            raise BadInput(
                f"--checkpoint=best: {model_dir} has no best checkpoint, which training keeps if "
                "it evaluates; give --checkpoint=last, or train with --val_data_dir."
            )
        newest = lambda: tf.train.latest_checkpoint(folder)
        with _naming_damage_of(newest) if hold else contextlib.nullcontext():
            return _of_newest(folder, read, hold)
    if not tf.io.gfile.exists(f"{which}.index"):
        known = [os.path.join(model_dir, name) for name in checkpoints.read_state(model_dir).names]
        raise BadInput(
            f"--checkpoint={which}: there is no such checkpoint; give last, best, auto or a path: "
            f"{', '.join(known) or 'there is none yet'}."
        )
    with _naming_damage_of(lambda: which):
        return read(which)


@contextlib.contextmanager
def _naming_damage_of(find):
    """Turns the error of reading a checkpoint, at `find()`, into a BadInput if it is damaged."""
    try:
        yield
    except (ValueError, OSError, tf.errors.OpError) as error:
        path = None if isinstance(error, BadInput) else find()
        if path:
            damage.refuse(path, error, "give another --checkpoint: last, best, or a path")
        raise


def _of_newest(model_dir, read, hold):
    """Returns `read(path)` for the newest checkpoint.

    If training deletes that before it is read, tries again with the then newest. Reads the state
    file itself, because tf.train.latest_checkpoint returns None for a checkpoint that is gone.

    Raises:
        BadInput: there is no checkpoint.
        OSError: each was deleted before it could be read.
    """
    for _ in range(_TRIES):
        named = checkpoints.read_state(model_dir).names
        if not named:
            raise BadInput(
                f"--model_dir={model_dir} has no checkpoint; train first (--task_type=train)."
            )
        path = os.path.join(model_dir, named[-1])
        try:
            with _held(path) if hold else contextlib.nullcontext(path) as held:
                return read(held)
        except BadInput:
            raise
        except (ValueError, tf.errors.OpError) as error:
            if v1.train.checkpoint_exists(path) or checkpoints.read_state(model_dir).names in (
                named,
                [],
            ):
                raise
            logging.info("%s was deleted before it was read; trying the newest one again.", path)
            deleted = error
    raise OSError(
        f"--model_dir={model_dir}: {_TRIES} times in a row the newest checkpoint was deleted "
        "before it was read; let training keep more (--keep_checkpoint_max) or save less often."
    ) from deleted


@contextlib.contextmanager
def _held(path):
    """Yields a hard link to a checkpoint, so that it stays readable if it is deleted.

    Yields its own path if it is deleted already, or if the folder allows no writing or no links.
    """
    folder, name = os.path.split(path)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(atomic_files.scratch(folder, ".reading-"))
            for part in checkpoints.by_name(os.listdir(folder))[name]:
                os.link(os.path.join(folder, part), os.path.join(scratch, part))
            path = os.path.join(scratch, name)
        except (OSError, KeyError):
            pass
        yield path
