"""The best checkpoint of a run, in `best/` in model_dir, where it stays when the original goes.

Its files are hard links. The state file there names it as soon as all of them are there, and only
then do those of the one before go, so that a kill leaves one whole best checkpoint.
"""

import contextlib
import os
import posixpath
import shutil
from typing import Callable

import tensorflow as tf
from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime import atomic_files
from deepfm.state import checkpoints

v1 = tf.compat.v1

FOLDER = checkpoints.BEST


def keep(model_dir: str, path: str):
    """Makes the checkpoint at `path`, which is in model_dir, the best one."""
    folder, name = os.path.join(model_dir, FOLDER), os.path.basename(path)
    os.makedirs(folder, exist_ok=True)
    parts = checkpoints.by_name(os.listdir(model_dir))[name]
    with atomic_files.scratch(model_dir, ".reading-") as scratch:
        for part in parts:
            _link(os.path.join(model_dir, part), os.path.join(scratch, part))
            atomic_files.replace(os.path.join(scratch, part), os.path.join(folder, part))
    checkpoints.write_state(folder, [name])
    for other in os.listdir(folder):
        if checkpoints.is_part(other) and other not in (checkpoints.STATE, *parts):
            os.remove(os.path.join(folder, other))


def _link(source, target):
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def forget_later(model_dir: str, step: int):
    """Removes a best checkpoint of a later step than training continues from, or a damaged one."""
    folder = os.path.join(model_dir, FOLDER)
    names = checkpoints.read_state(folder).names
    if names and checkpoints.step(names[-1]) > step:
        clear(folder)
    elif names and checkpoints.first_damaged(os.path.join(folder, names[-1])):
        again, path = "deleting it", os.path.join(model_dir, names[-1])
        if not checkpoints.problem(path):
            again = f"making it again from {path}"
        logging.warning("%s is damaged: %s.", os.path.join(folder, names[-1]), again)
        clear(folder) if again == "deleting it" else keep(model_dir, path)


def clear(folder: str) -> bool:
    """Deletes the checkpoints of a best/ folder, local or remote; returns whether all is gone."""
    names = [name.rstrip("/") for name in tf.io.gfile.listdir(folder)]
    # The state file goes first: what it names is whole.
    for name in sorted(filter(checkpoints.is_part, names), key=lambda x: x != checkpoints.STATE):
        tf.io.gfile.remove(posixpath.join(folder, name))
    if not all(map(checkpoints.is_part, names)):
        return False
    if tf.io.gfile.isdir(folder):  # S3 has no empty folders
        tf.io.gfile.rmtree(folder)
    return True


def of_checkpoint(model_dir: str, which: str, read: Callable, hold: bool = True):
    """Returns `read(path)` for a checkpoint of model_dir.

    Args:
        which: last, best, or the path of one.
        read, hold: as for checkpoints.of_newest.

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
        with checkpoints.naming_damage_of(newest) if hold else contextlib.nullcontext():
            return checkpoints.of_newest(folder, read, hold)
    if not tf.io.gfile.exists(f"{which}.index"):
        known = [os.path.join(model_dir, name) for name in checkpoints.read_state(model_dir).names]
        raise BadInput(
            f"--checkpoint={which}: there is no such checkpoint; give last, best, or a path: "
            f"{', '.join(known) or 'there is none yet'}."
        )
    with checkpoints.naming_damage_of(lambda: which):
        return read(which)
