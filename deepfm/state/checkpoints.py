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
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional

import numpy as np
from absl import logging
from google.protobuf.message import DecodeError

from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.runtime.tf import checkpoint_state_pb2, tensor_bundle_pb2, tf

v1 = tf.compat.v1

STATE = "checkpoint"  # TensorFlow's name of the file that names the checkpoints
_PART = re.compile(r"(model\.ckpt-\d+)\.(?:index|meta|data-\d{5}-of-\d{5})")
WHOLE = "_whole"  # ends the name of the folder of a checkpoint that is on the disk, but has no name
_TEMPORARY = re.compile(
    r"model\.ckpt-\d+(_temp_[0-9a-f]{32}|\..*\.tempstate\d+|\.meta\.tmp[0-9a-f]{32})"
    r"|checkpoint\.tmp[0-9a-f]{32}"
)
_WHOLE = re.compile(rf"model\.ckpt-\d+{WHOLE}")
_HEADER = 256  # bytes; the header of an index is shorter
_TRIES = 10  # tries to read the newest checkpoint, if each is deleted before it is read


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
    """In this context, a local folder, made if it is missing, is locked.

    Raises:
        BadInput: another training has locked it.
    """
    os.makedirs(model_dir, exist_ok=True)
    atomic_files.sync(os.path.dirname(os.path.abspath(model_dir)))
    folder = os.open(model_dir, os.O_RDONLY)
    try:
        if not atomic_files.lock(folder, if_unknown=True):
            raise BadInput(
                f"--model_dir={model_dir}: another process is training there; wait for it, or give "
                "another folder."
            )
        yield
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
    if not tidy and state.here and not problem(os.path.join(model_dir, state.names[-1])):
        return
    names = by_step(os.listdir(model_dir))
    problems = {x: problem(os.path.join(model_dir, x)) for x in [*names, *state.names]}
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
    if gone and state.here and not problem(os.path.join(folder, state.names[-1])):
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


def problem(path: str) -> Optional[str]:
    """What is wrong with a checkpoint, in a few words, or None if it is whole.

    Reads its index and its global step; counts only the bytes of the other tensors.
    """
    name = os.path.basename(path)
    if not os.path.exists(f"{path}.index"):
        return f"{name}.index is missing"
    try:
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        shards = _num_shards(f"{path}.index")
    except (tf.errors.OpError, OSError, ValueError, IndexError, DecodeError):
        return f"{name}.index is damaged"
    size = 0
    for file in (f"{path}.data-{i:05d}-of-{shards:05d}" for i in range(shards)):
        try:
            size += os.path.getsize(file)
        except FileNotFoundError:
            return f"{os.path.basename(file)} is missing"
    wanted = sum(int(np.prod(shapes[x], dtype=np.int64)) * dtypes[x].size for x in shapes)
    if size != wanted and tf.string not in dtypes.values():
        return f"its data has {size} of {wanted} bytes"
    try:
        reader.get_tensor(v1.GraphKeys.GLOBAL_STEP)
    except tf.errors.NotFoundError:
        return None  # it is another program's checkpoint
    except tf.errors.OpError:
        return "its global step is damaged"
    return None


def _num_shards(index):
    """The number of data files, from the first entry of an index, the one with an empty key."""
    with open(index, "rb") as f:
        head = f.read(_HEADER)
    shared, key, size = head[:3]  # bytes
    if shared or key:
        raise ValueError("the first key is not empty")
    return tensor_bundle_pb2.BundleHeaderProto.FromString(head[3 : 3 + size]).num_shards


def of_newest(model_dir: str, read: Callable, hold: bool = True):
    """Returns `read(path)` for the newest checkpoint.

    If training deletes that before it is read, tries again with the then newest. Reads the state
    file itself, because tf.train.latest_checkpoint returns None for a checkpoint that is gone.

    Args:
        model_dir: a local folder.
        read: path -> anything; called again if it fails because the checkpoint is gone.
        hold: whether another process may delete it meanwhile; `read` then gets a hard link to it.

    Raises:
        BadInput: there is no checkpoint.
        OSError: each was deleted before it could be read.
    """
    for _ in range(_TRIES):
        named = read_state(model_dir).names
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
            if v1.train.checkpoint_exists(path) or read_state(model_dir).names in (named, []):
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
            for part in by_name(os.listdir(folder))[name]:
                os.link(os.path.join(folder, part), os.path.join(scratch, part))
            path = os.path.join(scratch, name)
        except (OSError, KeyError):
            pass
        yield path


def first_damaged(path: str) -> Optional[str]:
    """The first missing or damaged tensor of a checkpoint, or None; reads the whole checkpoint."""
    name = "its index"
    try:
        reader = tf.train.load_checkpoint(path)
        for name in sorted(reader.get_variable_to_shape_map()):
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError):
        return name
    return None


@contextlib.contextmanager
def naming_damage_of(find: Callable[[], Optional[str]]):
    """Turns the error of reading a checkpoint, at `find()`, into a BadInput if it is damaged."""
    try:
        yield
    except (ValueError, OSError, tf.errors.OpError) as error:
        path = None if isinstance(error, BadInput) else find()
        damaged = path and first_damaged(path)
        if not damaged:
            raise
        raise BadInput(
            f"{path} is damaged: {damaged} cannot be read; give another --checkpoint: last, best, "
            "or a path."
        ) from error


@contextlib.contextmanager
def naming_damage(model_dir: str):
    """Turns the error of reading a damaged checkpoint into a BadInput that names it."""
    try:
        yield
    except tf.errors.DataLossError as error:
        if error.op is not None and error.op.type != "RestoreV2":  # it is about a record
            raise
        path = tf.train.latest_checkpoint(model_dir)
        damaged = path and first_damaged(path)
        if not damaged:
            raise
        name = os.path.basename(path)
        older = [x for x in read_state(model_dir).names if x != name]
        more = f" to resume from {older[-1]}" if older else ""
        raise BadInput(
            f"{path} is damaged: the checksum of {damaged} is wrong; delete {name}.* and run "
            f"the same command again{more}, or train from scratch with --clear_existing_model."
        ) from error
