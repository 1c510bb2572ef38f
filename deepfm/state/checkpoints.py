"""Which checkpoint of a model_dir a job uses: the newest whole one, whatever a kill left there.

A checkpoint is PREFIX.data-0000i-of-0000N, PREFIX.index and PREFIX.meta. saving.add syncs these in
PREFIX_temp_*/, which then becomes PREFIX_whole/; moves them to their place; names PREFIX in the
state file `checkpoint`; and deletes the oldest. TensorFlow trusts the state file: if that is
missing or unreadable, training would start from scratch and overwrite what is there.
"""

import contextlib
import os
import posixpath
import re
from typing import Dict, Iterable, List, NamedTuple

from absl import logging

from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.runtime import program
from deepfm.runtime.tf import checkpoint_state_pb2, tf
from deepfm.state import damage

v1 = tf.compat.v1

STATE = "checkpoint"  # TensorFlow's name of the file that names the checkpoints
_PART = re.compile(r"(model\.ckpt-\d+)\.(?:index|meta|data-\d{5}-of-\d{5})")
WHOLE = "_whole"  # ends the name of the folder of a checkpoint that is on the disk, but has no name
_TEMPORARY = re.compile(
    r"model\.ckpt-\d+(_temp_[0-9a-f]{32}|\..*\.tempstate\d+|\.meta\.tmp[0-9a-f]{32})"
    r"|checkpoint\.tmp[0-9a-f]{32}"
)
_WHOLE = re.compile(rf"model\.ckpt-\d+{WHOLE}")


class State(NamedTuple):
    """What a state file says.

    Attributes:
        names: of the checkpoints, without a folder, the one to use last; [] if the file is missing
            or unreadable.
        here: whether all of these checkpoints are in the state file's own folder.
    """

    names: List[str]
    here: bool


@contextlib.contextmanager
def claimed(model_dir: str):
    """In this context, a local folder, made if it is missing (until a BadInput), is locked.

    Raises:
        BadInput: another training has locked it, or it cannot be written.
    """
    made = not os.path.isdir(model_dir)
    program.make_output_dir(model_dir, "model_dir")
    atomic_files.sync(os.path.dirname(os.path.abspath(model_dir)))
    folder = os.open(model_dir, os.O_RDONLY)
    try:
        # The process that had the lock may have removed the folder, as below.
        if not (atomic_files.lock(folder, if_unknown=True) and os.path.isdir(model_dir)):
            raise BadInput(
                f"--model_dir={model_dir}: another process is training there; wait for it, or give "
                "another folder."
            )
        try:
            yield
        except BadInput:
            if made:
                with contextlib.suppress(OSError):  # there is something in it
                    os.rmdir(model_dir)
            raise
    finally:
        os.close(folder)


def prepare(model_dir: str, tidy: bool):
    """Makes the newest whole checkpoint of a local folder the one that TensorFlow finds.

    Incomplete checkpoints stay where they are; the log names them, and the state file does not.

    Args:
        model_dir: the folder; it need not exist.
        tidy: also end what a kill cut short. Only for the job that saves there: any other may see a
            save in progress.

    Raises:
        BadInput: there are checkpoints, and none is whole.
    """
    if not os.path.isdir(model_dir):
        return
    if tidy:
        _finish(model_dir)
    state = read_state(model_dir)
    if not tidy and state.here and not damage.problem(os.path.join(model_dir, state.names[-1])):
        return
    names = by_step(os.listdir(model_dir))
    problems = {x: damage.problem(os.path.join(model_dir, x)) for x in [*names, *state.names]}
    if not tidy and read_state(model_dir) != state:  # a job that saves maintains its own state file
        return
    whole = [x for x in state.names if not problems[x]] or [x for x in names if not problems[x]]
    broken = [f"{x} ({problems[x]})" for x in problems if problems[x]]
    if broken and not whole:
        raise BadInput(
            f"--model_dir={model_dir} has no complete checkpoint: {'; '.join(broken)}; put back "
            "what is missing, give another folder, or train from scratch with "
            "--clear_existing_model."
        )
    for text in broken:
        logging.warning("%s: ignoring %s and using %s.", model_dir, text, whole[-1])
    if not whole or state == State(whole, True):
        return
    if not state.here or state.names[-1:] != whole[-1:]:
        logging.warning("%s: the file %s now names %s.", model_dir, STATE, whole[-1])
    write_state(model_dir, whole)


def _finish(folder):
    """Ends what a kill cut short: saving, reading or deleting a checkpoint."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            atomic_files.delete(os.path.join(folder, name))
        elif _WHOLE.fullmatch(name):
            put(os.path.join(folder, name))
    for place in filter(os.path.isdir, (folder, os.path.join(folder, "best"))):
        atomic_files.remove(place, ".reading-")
    state, there = read_state(folder), set(os.listdir(folder))
    gone = [x for x in state.names[:-1] if f"{x}.index" not in there]
    if gone and state.here and not damage.problem(os.path.join(folder, state.names[-1])):
        for name in gone:
            logging.info("Deleting the rest of %s, which a kill left.", name)
            delete(folder, name)
        write_state(folder, [name for name in state.names if name not in gone])


def read_state(folder: str, name: str = STATE) -> State:
    """Reads a state file, which may be missing, empty or garbled."""
    try:
        state = v1.train.get_checkpoint_state(folder, name)
    except (ValueError, tf.errors.OpError):
        state = None
    if not state:
        return State([], False)
    used = state.model_checkpoint_path
    paths = [x for x in state.all_model_checkpoint_paths if x != used] + [used]
    here = all(
        posixpath.normpath(posixpath.dirname(x)) == posixpath.normpath(folder) for x in paths
    )
    return State([posixpath.basename(path) for path in paths], here)


def write_state(folder: str, names: List[str]):
    """Writes a state file; the last of the names is the one to use."""
    state = checkpoint_state_pb2.CheckpointState(
        model_checkpoint_path=names[-1], all_model_checkpoint_paths=names
    )
    atomic_files.write_whole(os.path.join(folder, STATE), str(state))


def put(made: str):
    """Gives a checkpoint in PREFIX_whole/, which is on the disk, its place and name."""
    folder, name = os.path.split(made[: -len(WHOLE)])
    for part in sorted(os.listdir(made)):  # .data-*, .index, .meta
        os.replace(os.path.join(made, part), os.path.join(folder, part))
    atomic_files.sync(folder)
    write_state(folder, [*(x for x in read_state(folder).names if x != name), name])
    os.rmdir(made)  # last, since whoever waits for the name looks at it


def delete(folder: str, name: str):
    """Deletes the files of a checkpoint, the index first: without it, nobody takes it for one."""
    for part in sorted(by_name(os.listdir(folder)).get(name, []), key=lambda x: x[-6:] != ".index"):
        os.remove(os.path.join(folder, part))


def is_part(name: str) -> bool:
    """Whether a file or folder of a model_dir is part of a checkpoint, saved or being saved."""
    return name == STATE or any(x.fullmatch(name) for x in (_PART, _TEMPORARY, _WHOLE))


def by_name(names: Iterable[str]) -> Dict[str, List[str]]:
    """checkpoint -> the names of its files."""
    parts = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match:
            parts.setdefault(match.group(1), []).append(name)
    return parts


def by_step(names: Iterable[str]) -> List[str]:
    """The checkpoints that have more than a .meta file, the oldest first."""
    parts = by_name(x for x in names if not x.endswith(".meta"))
    return sorted(parts, key=step)


def step(name: str) -> int:
    """The global step in a checkpoint's name; -1 without one."""
    digits = re.search(r"\d*$", name).group()
    return int(digits) if digits else -1


@contextlib.contextmanager
def naming_damage(model_dir: str):
    """Turns the error of restoring a damaged checkpoint into a BadInput that names it."""
    try:
        yield
    except tf.errors.DataLossError as error:
        path = tf.train.latest_checkpoint(model_dir)
        if path and (error.op is None or error.op.type == "RestoreV2"):  # else about a record
            name = os.path.basename(path)
            older = [x for x in read_state(model_dir).names if x != name]
            more = f" to resume from {older[-1]}" if older else ""
            advice = f"delete {name}.* and run the same command again{more}, or train from scratch"
            damage.refuse(path, error, f"{advice} with --clear_existing_model")
        raise
