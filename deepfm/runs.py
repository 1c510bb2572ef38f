"""Where in its data a run is, so that the same command goes on where it was interrupted.

A run is the training of a model on one data set; `--num_epochs` and evaluations count from its
beginning, also when it is interrupted and started again. `run.json` in model_dir says at which
steps it began and was started in another order; together with the global step of a checkpoint it
tells which records that checkpoint has seen:

    {"format_version": 1, "parts": [{"data": "1f6c...", "order": {"seed": 1, ...}, "run_step": 0,
                                     "step": 0, "epoch": 0, "steps_per_epoch": [977]}]}

A part is a stretch of a run in one order; its first step finds the data at the start of `epoch`.
Where processes keep their own pace it also has `steps_taken`: for each of the last checkpoints the
steps of each process in this part.
"""

import hashlib
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import tensorflow as tf
from absl import logging

from deepfm import datasets
from deepfm.entry import BadInput

FILE = "run.json"
_VERSION = 1


class Part(NamedTuple):
    """A stretch of a run in one order.

    Attributes:
        data: fingerprint of the data set.
        order: all that decides in which order, and in which batches, its records come.
        run_step: global step at which the run began.
        step: global step at which this part began.
        epoch: the epoch, from 0, with whose first record it began.
        steps_per_epoch: of each process, or None where the rows are not known.
        steps_taken: global step of a checkpoint -> the steps of each process in this part; empty
            where all take each step together.
    """

    data: str
    order: Dict[str, Any]
    run_step: int
    step: int
    epoch: int
    steps_per_epoch: Optional[List[int]]
    steps_taken: Dict[str, List[int]] = {}

    def taken(self, step: int) -> List[int]:
        """Steps of each process in this part up to a checkpoint."""
        return self.steps_taken.get(str(step)) or [step - self.step] * self.order["num_processes"]

    def place(self, taken: int, process: int):
        """(epoch, its steps that are done) of a process that took so many steps in this part."""
        if self.steps_per_epoch is None:
            return self.epoch, taken
        steps = max(self.steps_per_epoch[process], 1)
        return self.epoch + taken // steps, taken % steps


def fingerprint(data: datasets.DataSet, left_out: int) -> str:
    """Tells data sets apart: by the names and sizes of their files, or by the channel's name.

    Args:
        data: DataSet.
        left_out: bad records that are passed over.
    """
    files = [(os.path.basename(file.path), file.bytes) for file in data.files]
    what = repr((files, data.pipe and data.pipe.channel, left_out))
    return hashlib.sha1(what.encode()).hexdigest()


def order_of(config, num_processes: int) -> Dict[str, Any]:
    """What decides the order of an InputConfig's records."""
    names = "seed", "shuffle_buffer", "num_parallel_reads"
    return {
        **{name: getattr(config, name) for name in names},
        "batch_size": config.batch_size * config.replicas,
        "num_processes": num_processes,
        "cache": config.cache != "none",
    }


def begin(
    model_dir: str,
    step: int,
    data: str,
    order: Dict[str, Any],
    steps_per_epoch: Optional[Sequence[int]],
) -> Part:
    """The part of the run that training at a global step belongs to; notes it in run.json.

    Args:
        model_dir: a local folder.
        step: of the checkpoint that training goes on from, 0 without one.
        data, order, steps_per_epoch: as in Part.
    """
    parts = [part for part in _read(model_dir) if part.step <= step] if step else []
    now = Part(data, order, step, step, 0, steps_per_epoch and list(steps_per_epoch))
    last = parts[-1] if parts else None
    if last and last.data == data:
        if last.steps_per_epoch is None:  # the rows have been counted by now
            last = last._replace(steps_per_epoch=now.steps_per_epoch)
        if last.order == order and last.steps_per_epoch == now.steps_per_epoch:
            return last
        now = _in_new_order(last, now)
    elif step:
        logging.info(
            "The model of step %d was trained on other data: a new run begins with the first "
            "record of this.",
            step,
        )
    _write(model_dir, [*parts, now])
    return now


def _in_new_order(last, now):
    """The part that begins where the records of a run come in another order from now on."""
    differ = [name for name, value in now.order.items() if last.order.get(name) != value]
    names = ", ".join(differ) or "the number of records"
    places = [last.place(taken, i) for i, taken in enumerate(last.taken(now.step))]
    epoch = 0 if last.steps_per_epoch is None else min(places)[0]
    if max(places) > (epoch, 0):
        logging.warning(
            "The order of the records is another one than before (%s differs), so epoch %d begins "
            "again: some of its records are used twice.",
            names, epoch + 1,
        )  # fmt: skip
    return now._replace(run_step=last.run_step, epoch=epoch)


def note_steps(model_dir: str, step: int, taken: Sequence[int], keep: int):
    """Notes how many steps each process had taken in the newest part when a checkpoint was made.

    Args:
        model_dir: a local folder.
        step: of the checkpoint.
        taken: by rank.
        keep: checkpoints to remember; 0: all.
    """
    *parts, last = _read(model_dir)
    noted = {**last.steps_taken, str(step): list(taken)}
    names = sorted(noted, key=int)[-keep - 1 if keep else 0 :]
    _write(model_dir, [*parts, last._replace(steps_taken={n: noted[n] for n in names})])


def _read(model_dir) -> List[Part]:
    path = os.path.join(model_dir, FILE)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path) as f:
        text = f.read()
    try:
        found = json.loads(text)
        if found["format_version"] != _VERSION:
            raise ValueError(f"format_version {found['format_version']} is not {_VERSION}")
        return [_checked(Part(**part)) for part in found["parts"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(
            f"{path}: is not a run's state ({error!r}); delete it, and training begins with the "
            "first record of its data."
        ) from error


def _checked(part):
    """The part; ValueError where a field is not what it should be."""
    count = lambda x: isinstance(x, int) and x >= 0
    counts = lambda x: isinstance(x, list) and all(map(count, x)) and len(x) == processes
    processes = part.order["num_processes"]
    fine = {
        "data": isinstance(part.data, str),
        "run_step": count(part.run_step),
        "step": count(part.step),
        "epoch": count(part.epoch),
        "steps_per_epoch": part.steps_per_epoch is None or counts(part.steps_per_epoch),
        "steps_taken": all(map(counts, part.steps_taken.values())),
    }
    for name, is_fine in fine.items():
        if not is_fine:
            raise ValueError(f"{name} is {getattr(part, name)!r}")
    return part


def _write(model_dir, parts):
    content = {"format_version": _VERSION, "parts": [part._asdict() for part in parts]}
    datasets.write_whole(os.path.join(model_dir, FILE), json.dumps(content, indent=1) + "\n")
