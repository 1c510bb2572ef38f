"""Gives the files of a new data set their final names, so that nobody reads a part of it as all.

With --overwrite it replaces an old data set: only files that these programs wrote. Until that is
done the folder holds UNFINISHED, and readers refuse the folder, also if the program was
killed in between. Signals are ignored meanwhile, because the work is all but done.
"""

import contextlib
import os
import re
from typing import Collection, List, Tuple

from deepfm.data import dataset_json
from deepfm.data.dataset_json import UNFINISHED
from deepfm.errors import BadInput
from deepfm.runtime import program

SUCCESS = "_SUCCESS"  # readers pass over names that begin with an underscore
# The names of our data files, except those of the converter without --num_files.
_OURS = re.compile(r"(shard-\d{5}-of-\d{5}/)?part-\d{5}-of-\d{5}\.(tfrecords|libsvm)(\.gz)?")
_OF_HOST = re.compile(r"shard-\d{5}-of-(\d{5})")


def check_hosts(folder: str, number: int, suffixes: Tuple[str, ...]):
    """Refuses (BadInput) a folder with data of another number of hosts: readers would take both.

    Args:
        folder: where one host writes its files, or each of several hosts makes a folder.
        number: the number of hosts.
        suffixes: the suffixes of data files.
    """
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
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


def names_in(folder: str, suffixes: Tuple[str, ...], first: str) -> List[str]:
    """Makes --output_dir and returns the sorted names of the data and metadata in it.

    Raises BadInput if it is not writable, or not local; `first` is what to do before copying.
    """
    if "://" in folder:
        raise BadInput(f"--output_dir={folder} is not local; {first} to a local folder, then copy.")
    program.make_output_dir(folder)
    names = sorted(os.listdir(folder))
    return [name for name in names if dataset_json.is_metadata(name) or name.endswith(suffixes)]


def replaced(
    folder: str, names: List[str], overwrite: bool, known: Collection[str] = ()
) -> List[str]:
    """The names of the files in a folder that a new data set replaces.

    Args:
        folder: where the new data set goes.
        names: the sorted names of all files there that would be read with it.
        overwrite: whether they may be replaced.
        known: names of files that may be replaced whoever wrote them.

    Raises:
        BadInput: the folder holds files that may not be replaced, or that we did not write.
    """
    if not names:
        return []
    if not os.path.exists(os.path.join(folder, UNFINISHED)):
        said = dataset_json.read(folder) or {"files": {}}
        for name in names:
            ours = dataset_json.is_metadata(os.path.basename(name)) or _OURS.fullmatch(name)
            if not (ours or name in said["files"] or name in known):
                raise BadInput(
                    f"{os.path.join(folder, name)}: dataset.json does not name this file, so it "
                    "will not be replaced; move it, or give another --output_dir."
                )
    if not overwrite:
        raise BadInput(f"{folder} already holds a data set ({names[0]}); --overwrite replaces it.")
    return names


def mark(folder: str):
    """Marks a folder, made if missing, so that readers refuse it until `publish` is done."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, UNFINISHED), "w"):
        pass


def publish(scratch: str, names: List[str], folder: str, old: List[str]):
    """Moves files to another folder on the same disk, in place of old files there.

    Args:
        scratch: the folder that holds them.
        names: their names.
        folder: the folder to move them to.
        old: the names of the files there to delete.
    """
    program.ignore_signals()
    mark(folder)
    for name in old:
        os.remove(os.path.join(folder, name))
    for name in names:
        os.replace(os.path.join(scratch, name), os.path.join(folder, name))
    os.remove(os.path.join(folder, UNFINISHED))


@contextlib.contextmanager
def succeeding(folder: str):
    """Marks a folder with _SUCCESS, as Spark does, once the body has published its data."""
    path = os.path.join(folder, SUCCESS)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    yield
    with open(path, "w"):
        pass
