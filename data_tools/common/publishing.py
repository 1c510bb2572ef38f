"""Gives the files of a new data set their final names, so that nobody reads a part of it as all.

With --overwrite it replaces an old data set: only files that these programs wrote. Until that is
done the folder holds UNFINISHED, and readers refuse the folder, also if the program was
killed in between. Signals are ignored meanwhile, because the work is all but done.

Before anything old goes, the new files are on the disk, and so is a list of what is left to do:
after a power cut, the next run into a local folder does that first (`finish`). Nothing is lost.

On Spark folders may be remote. A name on S3 is given by copying, which UNFINISHED covers as well.
"""

import contextlib
import json
import os
import pathlib
import re
import time
import uuid
from typing import Callable, Collection, Dict, List, Optional, Sequence, Tuple

from absl import logging

from deepfm.errors import BadInput
from deepfm.records import atomic_files, dataset_json
from deepfm.records.data_file import DataFile
from deepfm.records.dataset_json import METADATA, UNFINISHED
from deepfm.records.storage import places
from deepfm.runtime import program

# Tasks of a job that has failed may go on writing for a while: Spark ends their processes after two
# seconds. So long a remote folder is deleted again and again, in seconds:
_LATE, _PAUSE = 3.0, 0.5
_PATIENCE = 2.0  # seconds in which the processes of a killed run end
_TO_DO = "to_do.json"  # in a scratch folder: what _carry_out is to do, by paths from there
SUCCESS = "_SUCCESS"  # readers pass over names that begin with an underscore
# The names of our data files, except those of the converter without --num_files.
_OURS = re.compile(r"(shard-\d{5}-of-\d{5}/)?part-\d{5}-of-\d{5}\.(tfrecords|libsvm)(\.gz)?")
_OF_HOST = re.compile(r"shard-\d{5}-of-(\d{5})")


def check_hosts(folder: str, number: int, suffixes: Tuple[str, ...]):
    """Refuses (BadInput) a folder with data of another number of hosts: readers would take both.

    One host writes its files there; each of several makes a folder.
    """
    for name in places.of(folder).names(folder):
        of_host = _OF_HOST.fullmatch(name)
        if of_host:
            other = int(of_host.group(1)) != number
        else:
            other = number > 1 and name.endswith(suffixes)
        if other:
            hosts = f"{number} hosts" if number > 1 else "one host"
            raise BadInput(
                f"{os.path.join(folder, name)}: left by a run that was not on {hosts}; readers "
                "would mix it with the new data. Delete it, or give another --output_dir."
            )


def check_local(folder: str, first: str):
    """Refuses (BadInput) an --output_dir that is not local; `first` is what to do instead."""
    if places.is_remote(folder):
        raise BadInput(f"--output_dir={folder} is not local; {first}, then copy.")


def names_in(folder: str, suffixes: Tuple[str, ...]) -> List[str]:
    """The sorted names of the data and metadata in --output_dir; BadInput if it is not writable."""
    check_output_dir(folder)
    names = places.of(folder).names(folder)
    return [name for name in names if name == METADATA or name.endswith(suffixes)]


def check_output_dir(folder: str):
    """Refuses an --output_dir that cannot be made or written: BadInput, or a RemoteError."""
    if not places.is_remote(folder):
        made = _missing(folder)
        program.make_output_dir(folder)
        _remove_empty(made)
        finish(folder)
        return
    if folder.startswith("s3://") and "/" not in folder[len("s3://") :].rstrip("/"):
        raise BadInput(
            f"--output_dir={folder} is a whole bucket; give a folder in it, such as "
            f"--output_dir={folder.rstrip('/')}/data."
        )
    files, probe = places.of(folder), f"{folder.rstrip('/')}/.probe-{uuid.uuid4().hex}"
    there = files.exists(folder)
    with files.create(probe) as f:
        f.write(b"probe")
    files.remove(probe)
    if not there:
        files.delete(folder)  # pyarrow has left an object that means the folder


def _missing(folder):
    """The local folders that have to be made for a folder to be there, the innermost first."""
    path = pathlib.Path(os.path.abspath(folder))
    return [above for above in (path, *path.parents) if not above.exists()]


def _remove_empty(folders):
    """Removes local folders, as long as they are empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            os.rmdir(folder)


@contextlib.contextmanager
def _alone(folder):
    """Locks a local folder; BadInput if another run has."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _PATIENCE
        while not atomic_files.lock(opened, if_unknown=True):
            if time.monotonic() > end:
                raise BadInput(
                    f"--output_dir={folder}: another run is writing there; wait for it, or give "
                    "another folder."
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(opened)


@contextlib.contextmanager
def scratch(folder: str, prefix: str, hosts: int = 1):
    """Yields a new hidden folder in another one, to be deleted at the end.

    If the body fails, or a signal ends the program, the other folder goes too if it was made for
    this and is empty.

    Args:
        folder: the other one; a local folder is locked against other runs, unless several hosts
            write there.
        prefix: of the hidden folder's name.
        hosts: how many hosts write there.

    Raises:
        BadInput: another run is writing there.
        OSError: nothing can be written there, or the body raised one; it always names a file.
    """
    if places.is_remote(folder):
        with _remote_scratch(folder.rstrip("/"), prefix) as path:
            yield path
        return
    made = _missing(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        clean_up = atomic_files.before_end(lambda: _remove_empty(made))
        alone = _alone(folder) if hosts == 1 else contextlib.nullcontext()
        with alone, clean_up, atomic_files.scratch(folder, prefix) as path:
            yield path
    except BaseException:
        _remove_empty(made)
        raise


@contextlib.contextmanager
def _remote_scratch(folder, prefix):
    """As `scratch`; what killed runs left stays, because nothing tells it from a running one's."""
    files = places.of(folder)
    there = files.exists(folder)
    for name in files.names(folder):
        if name.startswith(prefix):
            logging.warning(
                "%s/%s: another run writes it, or left it when it was killed; delete it then.",
                folder, name,
            )  # fmt: skip
    path = f"{folder}/{prefix}{uuid.uuid4().hex[:8]}"

    def clean_up(seconds):
        end = time.monotonic() + seconds
        while True:
            files.delete(path)
            if not there and not files.names(folder):
                files.delete(folder)
            if time.monotonic() >= end:
                return
            time.sleep(_PAUSE)

    late = _LATE
    try:
        with atomic_files.before_end(lambda: clean_up(late)):
            yield path
        late = 0
    finally:
        try:
            clean_up(late)
        except OSError as error:
            logging.warning("%s could not be deleted: %s", path, error)


def replaced(
    folder: str, names: List[str], overwrite: bool, known: Collection[str] = ()
) -> List[str]:
    """The names of the files in a folder that a new data set replaces.

    Args:
        names: the sorted names of all files there that would be read with it.
        overwrite: whether they may be replaced.
        known: names of files that may be replaced whoever wrote them.

    Raises:
        BadInput: the folder holds files that may not be replaced, or that we did not write.
    """
    if not names:
        return []
    if not places.of(folder).exists(os.path.join(folder, UNFINISHED)):
        said = dataset_json.load(folder) or {"files": {}}
        for name in names:
            ours = os.path.basename(name) == METADATA or _OURS.fullmatch(name)
            if not (ours or name in said["files"] or name in known):
                raise BadInput(
                    f"{os.path.join(folder, name)}: dataset.json does not name this file, so it "
                    "will not be replaced; move it, or give another --output_dir."
                )
    if not overwrite:
        raise BadInput(f"{folder} already holds a data set ({names[0]}); --overwrite replaces it.")
    return names


def check_unchanged(folder: str, names: List[str], old: List[str]):
    """Refuses (BadInput) a local folder in which another run has written since `old` was listed."""
    if places.is_remote(folder):
        return
    there = lambda name: os.path.exists(os.path.join(folder, name))
    changed = [x for x in names if x not in old and there(x)] + [x for x in old if not there(x)]
    if changed:
        raise BadInput(
            f"{os.path.join(folder, changed[0])}: another run has written to this folder "
            "meanwhile; look at what it holds now, or give another --output_dir."
        )


def describe(
    folder: str, made: str, found: Dict[str, Tuple], write: Optional[Callable]
) -> Tuple[List[DataFile], Dict[str, str]]:
    """Writes the dataset.json of new files, if there are any.

    Args:
        folder: where they will be.
        made: the folder for dataset.json until then.
        found: {name: (path of the file now, (its rows, its positives, ...))}.
        write: (made, the DataFiles) -> None, writes dataset.json; None: there is to be none.

    Returns:
        (the DataFiles, by the paths that they will have; {name: path now} of all, for `publish`).
    """
    files, paths = places.of(made), {name: path for name, (path, _) in found.items()}
    sizes = places.each(made, files.size, list(paths.values()))
    described = [
        DataFile(os.path.join(folder, name), size, *facts[:2])
        for (name, (_, facts)), size in zip(found.items(), sizes)
    ]
    if described and write:
        files.make_dir(made)
        write(made, described)
        paths[METADATA] = os.path.join(made, METADATA)
    return described, paths


def publish(scratch: str, parts: Sequence[Tuple], more: Sequence[Tuple[str, str]] = ()):
    """Moves files to other folders on the same disk or server, in place of old files there.

    Args:
        scratch: the folder that holds them.
        parts: for each other folder (its path, {name: path now} of its new files, the names of the
            files there to delete).
        more: (path, new path) of further files.

    Raises:
        BadInput: another run has written there since the old files were listed.
    """
    for folder, paths, old in parts:
        check_unchanged(folder, list(paths), old)
    program.ignore_signals()
    files, remote = places.of(scratch), places.is_remote(scratch)
    marks = [os.path.join(part[0], UNFINISHED) for part in parts]
    gone = [os.path.join(part[0], name) for part in parts for name in set(part[2]) - set(part[1])]
    moves = [(now, os.path.join(part[0], name)) for part in parts for name, now in part[1].items()]
    moves += more
    if not remote:
        atomic_files.sync_all(scratch)
        near = lambda paths: [os.path.relpath(path, scratch) for path in paths]
        to_do = near(gone), list(map(near, moves)), near(marks)
        atomic_files.write_json(os.path.join(scratch, _TO_DO), to_do)
    for mark in marks:
        files.make_dir(os.path.dirname(mark))
        if remote:
            files.create(mark).close()
        else:  # so that `finish` knows whose it is
            atomic_files.write_whole(mark, os.path.basename(scratch))
    _carry_out(files, gone, moves, marks)


def copy(source: str, target: str):
    """Copies a file; a local one becomes a hard link where it can."""
    if not places.is_remote(target):
        with contextlib.suppress(OSError):  # it is remote, or on another disk
            os.link(source, target)
            return
    with places.of(target).create(target) as f:
        f.write(places.of(source).content(source))


def _carry_out(files, gone, moves, marks):
    place = marks[0] if marks else ""
    places.each(place, files.remove, gone)
    places.each(place, lambda pair: files.move(*pair), moves)
    folders = set() if places.is_remote(place) else {os.path.dirname(path) for _, path in moves}
    list(map(atomic_files.sync, folders))
    places.each(place, files.remove, marks)
    list(map(atomic_files.sync, folders))


def finish(folder: str) -> bool:
    """Finishes what a killed run had begun to publish from a folder; returns whether one had."""
    finished = False
    for name in [] if places.is_remote(folder) else places.names(folder):
        scratch = os.path.join(folder, name)
        if not (name.startswith(".") and os.path.exists(os.path.join(scratch, _TO_DO))):
            continue
        at = lambda path, scratch=scratch: os.path.normpath(os.path.join(scratch, path))
        gone, moves, marks = json.loads(places.content(os.path.join(scratch, _TO_DO)).decode())
        gone, marks = (list(filter(os.path.exists, map(at, paths))) for paths in (gone, marks))
        marks = [mark for mark in marks if places.content(mark) == name.encode()]
        left = [tuple(map(at, pair)) for pair in moves if os.path.exists(at(pair[0]))]
        opened = os.open(scratch, os.O_RDONLY)
        if marks and atomic_files.lock(opened):
            logging.warning("%s: finishing what a run that was killed had begun.", folder)
            _carry_out(places, gone, left, marks)
            finished = True
        os.close(opened)
    return finished


@contextlib.contextmanager
def succeeding(folder: str):
    """Marks a folder with _SUCCESS, as Spark does, once the body has published its data."""
    path, files = os.path.join(folder, SUCCESS), places.of(folder)
    with contextlib.suppress(FileNotFoundError):
        files.remove(path)
    yield
    files.create(path).close()
