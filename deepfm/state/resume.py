"""How far a run is in its data, so that the same command resumes where it was interrupted.

A run is the training of a model on one data set; `--num_epochs` and evaluations count from its
beginning, even if it is interrupted and resumed. A run has parts: stretches in which its records
come in one order. The parts and the global step determine which records a checkpoint has seen. Each
checkpoint holds the parts that led to it and, if processes keep their own pace, the steps that each
had taken in the last part (`notes`). `run.json` in model_dir has the parts for people to read, and
what no checkpoint can know:

    {"format_version": 3, "parts": [{"data": "1f6c...", "order": {"seed": 1, ...}, "run_step": 0,
                                     "step": 0, "epoch": 0, "steps_per_epoch": [977], ...}],
     "files": [["/data/1.tfrecords", 1024, "whole-77e1...", "..."]], "ended": 977}

`files` are those of the last part (identity.Identity); `ended` is the step at which training
finished by itself.
"""

import contextlib
import hashlib
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from absl import logging

from deepfm.config import JobConfig
from deepfm.config.setting import ORDER, of_kinds
from deepfm.data import datasets
from deepfm.data.identity import Identity
from deepfm.errors import BadInput, refusing
from deepfm.records import atomic_files
from deepfm.records.data_file import DataFile
from deepfm.records.storage.places import of as files_at
from deepfm.runtime.tf import tf

FILE = "run.json"
NOTES = "deepfm_run/"  # how the names of these tensors in a checkpoint begin
PARTS, STEPS = f"{NOTES}parts", f"{NOTES}steps_of_processes"
_VERSION = 3


class RunPart(NamedTuple):
    """A stretch of a run in which the records come in one order.

    Attributes:
        data: fingerprint of the data set.
        order: everything that determines the order and the batches of its records.
        run_step: global step at which the run began.
        step: global step at which this part began.
        epoch: the epoch, from 0, with whose first record this part began.
        steps_per_epoch: of each process; None if the number of rows is unknown.
        settings: {flag: value} of the flags that may change during a run; "auto": {flag: value} of
            what --auto chose; "of_day": what evaluations.about says; "job": SageMaker's, if known.
    """

    data: str
    order: Dict[str, Any]
    run_step: int
    step: int
    epoch: int
    steps_per_epoch: Optional[List[int]]
    settings: Dict[str, Any] = {}

    def place(self, taken: int, process: int):
        """(epoch, steps done in it) of a process that has taken `taken` steps in this part."""
        if self.steps_per_epoch is None:
            return self.epoch, taken
        steps = max(self.steps_per_epoch[process], 1)
        return self.epoch + taken // steps, taken % steps


class _Known(NamedTuple):
    """What model_dir says about its runs.

    Attributes:
        parts: the newest one last.
        files: {path: Identity} of the last part's data; {} if unknown.
        ended: global step at which training last finished by itself; 0: it never did, None:
            unknown.
        steps: of each process in the last part, if the checkpoint has counted them.
        noted: the parts in run.json, which may have begun after the checkpoint.
    """

    parts: List[RunPart]
    files: Dict[str, Identity]
    ended: Optional[int]
    steps: Optional[List[int]]
    noted: Sequence[RunPart] = ()


def fingerprint(data: datasets.DataSet, others: Sequence[Sequence] = ()) -> str:
    """Identifies a data set, by names, sizes and checksums of its files or by its channel; `others`
    are told_apart, of the parts that other hosts have."""
    files = told_apart(data)
    if data.sharded:  # however many hosts divide them
        files = sorted([*files, *map(tuple, others)])
    return digest((files, data.pipe and data.pipe.channel))


def told_apart(data: datasets.DataSet) -> List[tuple]:
    """(name, size, checksum) of each file of a data set."""
    return [(os.path.basename(file.path), *file.identity[:2]) for file in data.files]


def digest(value) -> str:
    """A hash that identifies a value."""
    return hashlib.sha1(repr(value).encode()).hexdigest()


def order_of(
    job: JobConfig, by_rows: bool, data: datasets.DataSet, damaged: Sequence
) -> Dict[str, Any]:
    """What determines the order of the records.

    Args:
        by_rows: as in Position.
        damaged: the files of `data` with bad records that are skipped.
    """
    asked, mode = job.input, job.distribution
    side_by_side = len(data.files) > 1 and asked.num_parallel_reads > 1
    by_buffer = side_by_side and data.format.chunks_by_buffer
    return {
        **({"read_buffer_bytes": asked.read_buffer_bytes} if by_buffer else {}),
        **of_kinds([asked], ORDER),
        "by_rows": by_rows,
        "batch_size": job.batch_of_process,
        "num_processes": mode.size,
        "cache": asked.cache != "none",
        "synchronous": mode.synchronous,
        "skipped": sum(len(file.places) for file in damaged),
    }


def known_files(model_dir: str) -> Dict[str, Identity]:
    """{path: Identity} of the files that the last run of model_dir was trained on."""
    return _read(model_dir).files


def chosen(model_dir: str) -> Dict[str, Any]:
    """What --auto chose for the last run of model_dir; {} if nothing."""
    parts = _read(model_dir).parts
    return parts[-1].settings.get("auto", {}) if parts else {}


def still_there(model_dir: str, like: Sequence[DataFile]) -> List[DataFile]:
    """The files that the last run of model_dir was trained on, as far as they may equal `like`."""
    sizes, known = {file.bytes for file in like}, {}
    with contextlib.suppress(BadInput):  # training says what is wrong with run.json
        known = known_files(model_dir)
    files = [DataFile(path, was.bytes) for path, was in known.items() if was.bytes in sizes]
    return [file for file in files if tf.io.gfile.exists(file.path)]


def begin(
    model_dir: str,
    checkpoint: Optional[str],
    step: int,
    data: datasets.DataSet,
    now: RunPart,
    rows: Optional[int] = None,
    abandon: bool = False,
    others: Sequence[Sequence] = (),
) -> Tuple[List[RunPart], List[int]]:
    """Finds the place in a run from which training resumes, and notes it in run.json.

    Args:
        checkpoint: the one that training resumes from, or None.
        step: its global step, 0 without one.
        data: with the identities of its files.
        now: the part that would begin here; its data, run_step, step and epoch are ignored.
        rows: records of an epoch, of all processes; None if unknown.
        abandon: whether an interrupted run on other data may be given up.
        others: of `fingerprint`.

    Returns:
        (all parts that led here, the last being the one that training continues; the steps that
        each process has taken in that one).

    Raises:
        BadInput: an interrupted run used other data, and may not be given up.
    """
    known = _known(model_dir, checkpoint, step)
    now = now._replace(data=fingerprint(data, others), run_step=step, step=step, epoch=0)
    noted = known.noted[-1:]
    if noted and noted[0].data == now.data:  # what an earlier start has moved stays where it is
        of_day = {**noted[0].settings.get("of_day", {}), **now.settings.get("of_day", {})}
        now = now._replace(settings={**now.settings, "of_day": of_day})
    job = data.pipe and os.environ.get("TRAINING_JOB_NAME")
    now = now._replace(settings={**now.settings, **({"job": job} if job else {})})
    nothing = [0] * now.order["num_processes"]
    last, before = (known.parts[-1], known.parts[:-1]) if known.parts else (None, [])
    # To another job, a channel may bring anything; but SageMaker starts a lost job again.
    over = data.pipe and step and known.ended == step
    if last and last.data == now.data and not (over and last.settings.get("job", "") != job):
        now, last = _alike(now, last, rows)
        taken = _taken(last, step, known.steps)
        same_steps = last.steps_per_epoch == now.steps_per_epoch
        if taken is not None and last.order == now.order and same_steps:
            parts = [*before, last._replace(settings=now.settings)]
        else:
            parts, taken = [*known.parts, _in_new_order(last, now, taken)], nothing
    else:
        _check_new_run(model_dir, known, step, data, abandon)
        parts, taken = [*known.parts, now], nothing
    _write(model_dir, known._replace(parts=parts, files=_identities(data)))
    return parts, taken


def _alike(now, last, rows):
    """(now, last), both on the same data, each completed with what the other one knows."""
    if last.steps_per_epoch is None and rows is not None and last.order["num_processes"] == 1:
        # They have been counted by now. Several processes would have counted them then.
        before = rows + now.order["skipped"] - last.order.get("skipped", now.order["skipped"])
        last = last._replace(steps_per_epoch=[-(-before // last.order["batch_size"])])
    _log_settings(last.settings, now.settings)
    order = {**now.order, **last.order}  # an older version noted less
    # Files stay divided as at the beginning, whatever is known of them by now.
    now = now._replace(order={**now.order, "by_rows": order["by_rows"]})
    return now, last._replace(order=order)


def _taken(part, step, counted) -> Optional[List[int]]:
    """Steps of each process in a part up to a checkpoint; None if they were not counted."""
    processes = part.order["num_processes"]
    if part.order["synchronous"]:
        return [step - part.step] * processes
    if step == part.step:
        return [0] * processes
    return counted if counted and len(counted) == processes else None


def _in_new_order(last, now, taken):
    """The part that begins now, because a run's records come in another order from here on."""
    if taken is None:
        logging.warning(
            "It is unknown how many steps each process took, so epoch %d starts over: some of "
            "its records are used twice.",
            last.epoch + 1,
        )
        return now._replace(run_step=last.run_step, epoch=last.epoch)
    differ = [
        f"{name} was {last.order.get(name)} and is {value}"
        for name, value in now.order.items()
        if last.order.get(name) != value
    ]
    places = [last.place(steps, i) for i, steps in enumerate(taken)]
    epoch = last.epoch if last.steps_per_epoch is None else min(places)[0]
    if max(places) > (epoch, 0):
        logging.warning(
            "The order of the records changed (%s), so epoch %d starts over: some of its "
            "records are used twice.",
            ", ".join(differ) or "the number of records differs", epoch + 1,
        )  # fmt: skip
    return now._replace(run_step=last.run_step, epoch=epoch)


def _log_settings(before, now):
    """Logs the settings that differ from those of the run so far."""
    changed = [
        f"--{name}={_as_flag(value)} (before: {_as_flag(before[name])})"
        for name, value in now.items()
        if name in before and before[name] != value and name not in ("auto", "of_day", "job")
    ]
    if changed:
        logging.info("Resuming with %s.", ", ".join(changed))


def _as_flag(value):
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _check_new_run(model_dir, known, step, data, abandon):
    """Logs that a new run begins; refuses to give up an interrupted run on other data."""
    if not step:
        return
    if not known.parts:
        logging.warning(
            "%s of --model_dir=%s is missing, and the checkpoint does not say which records it "
            "has seen: starting a new run from the first record.",
            FILE, model_dir,
        )  # fmt: skip
    elif known.ended == step or abandon:
        logging.info(
            "The model of step %d was trained on %s: starting a new run from the first record of "
            "this data.", step, "what an earlier job read" if data.pipe else "other data",
        )  # fmt: skip
    else:
        raise BadInput(
            f"{_difference(known.files, data)}, and the run of --model_dir={model_dir} was "
            f"interrupted at step {step}. To finish it, put the old data back; to begin a new run "
            "on this data with the weights so far, add --abandon_interrupted_run."
        )


def _difference(before, data):
    """What differs between the files of a run and those of a data set, in a few words."""
    name = os.path.basename
    old, new = ({name(path): x[:2] for path, x in y.items()} for y in (before, _identities(data)))
    for file in data.files:
        if old and name(file.path) not in old:
            return f"{file.path} is not among the files that this run began with"
        if old and old[name(file.path)] != file.identity[:2]:
            return f"{file.path} has changed since this run began"
    gone = [path for path in before if name(path) not in new]
    return f"{gone[0]} is gone" if gone else f"{data.name} is not the data that this run began with"


def _identities(data):
    return {file.path: file.identity for file in data.files}


def end(model_dir: str, step: int):
    """Notes that training finished by itself."""
    known = _read(model_dir)
    if known.parts:
        _write(model_dir, known._replace(ended=step))


def began(model_dir: str) -> int:
    """The global step at which the run of the newest checkpoint began; -1: unknown."""
    path = tf.train.latest_checkpoint(model_dir)
    try:
        reader = path and tf.train.load_checkpoint(path)
        return _parts_in(reader)[-1].run_step if path and reader.has_tensor(PARTS) else -1
    except (ValueError, tf.errors.OpError):  # whoever reads the checkpoint says what is damaged
        return -1


def _parts_in(reader):
    text = reader.get_tensor(PARTS).tobytes().decode()
    return [_checked(RunPart(**part)) for part in json.loads(text)]


def _known(model_dir, checkpoint, step) -> _Known:
    """What is known of the runs that led to a checkpoint."""
    if not checkpoint:
        return _Known([], {}, 0, None)
    known, reader = _read(model_dir), tf.train.load_checkpoint(checkpoint)
    if reader.has_tensor(PARTS):
        parts = _parts_in(reader)
        if not known.parts:
            logging.warning(
                "%s of --model_dir=%s is missing; resuming from what the checkpoint notes.",
                FILE, model_dir,
            )  # fmt: skip
        same = known.parts and known.parts[-1].data == parts[-1].data
        known = known._replace(parts=parts, files=known.files if same else {})
    known = known._replace(parts=[part for part in known.parts if part.step <= step])
    if reader.has_tensor(STEPS):
        known = known._replace(steps=reader.get_tensor(STEPS).tolist())
    if known.ended is None and known.parts:  # run.json is lost
        last, taken = known.parts[-1], _taken(known.parts[-1], step, known.steps)
        places = [last.place(steps, i) for i, steps in enumerate(taken or [])]
        whole = bool(places) and all(place[1] == 0 for place in places)
        known = known._replace(ended=step if whole else 0)
    return known


def _read(model_dir) -> _Known:
    """What run.json says."""
    path = os.path.join(model_dir, FILE)
    if not tf.io.gfile.exists(path):
        return _Known([], {}, None, None)
    advice = "delete it, and training resumes from what its checkpoint notes"
    with refusing(f"{path} is not a run's state", advice):
        content = json.loads(files_at(path).content(path).decode())
        if content["format_version"] != _VERSION:
            raise ValueError(f"format_version {content['format_version']} is not {_VERSION}")
        files = {str(path): Identity(*identity) for path, *identity in content["files"]}
        parts = [_checked(RunPart(**part)) for part in content["parts"]]
        return _Known(parts, files, content["ended"], None, parts)


def _checked(part):
    """Returns the part; raises ValueError if a field has a wrong type or value."""
    count = lambda x: isinstance(x, int) and x >= 0
    counts = lambda x: isinstance(x, list) and all(map(count, x)) and len(x) == processes
    processes = part.order["num_processes"]
    fine = {
        "data": isinstance(part.data, str),
        "run_step": count(part.run_step),
        "step": count(part.step),
        "epoch": count(part.epoch),
        "steps_per_epoch": part.steps_per_epoch is None or counts(part.steps_per_epoch),
        "settings": isinstance(part.settings, dict),
    }
    for name, is_fine in fine.items():
        if not is_fine:
            raise ValueError(f"{name} is {getattr(part, name)!r}")
    return part


def _write(model_dir, known):
    content = {
        "format_version": _VERSION,
        "parts": [part._asdict() for part in known.parts],
        "files": [[path, *identity] for path, identity in known.files.items()],
        "ended": known.ended,
    }
    atomic_files.write_json(os.path.join(model_dir, FILE), content)
