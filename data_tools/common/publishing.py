"""Gives the files of a new data set their final names, so that no part of it is taken for all.

An old one is replaced where that is asked for: what these programs have written, and no other file.
While that lasts, and when it is cut short, the folder holds datasets.UNFINISHED, and readers refuse
it. A signal comes too late then: it would end what is as good as done.
"""

import os
import re
from typing import Collection, List, Tuple

from deepfm.data import dataset_json, datasets
from deepfm.errors import BadInput
from deepfm.runtime import program, remote_files

# How these programs call data, but for the converter without --num_files.
_OURS = re.compile(r"(shard-\d{5}-of-\d{5}/)?part-\d{5}-of-\d{5}\.(tfrecords|libsvm)(\.gz)?")


_OF_HOST = re.compile(r"shard-\d{5}-of-(\d{5})")


def check_hosts(folder: str, number: int, suffixes: Tuple[str, ...]):
    """Refuses (BadInput) a folder with data of another number of hosts: readers would take both.

    Args:
        folder: where each of several hosts puts a folder of its own, or one its files.
        number: of hosts.
        suffixes: of data files.
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
                f"{os.path.join(folder, name)}: is not of {hosts}, "
                "and would be read with them; delete it, or give another --output_dir."
            )


def names_in(folder: str, suffixes: Tuple[str, ...], first: str) -> List[str]:
    """Makes --output_dir, and returns the names of the data and metadata in it, sorted.

    BadInput where it is not local, which says what to do `first`, or cannot be written.
    """
    if remote_files.is_remote(folder):
        raise BadInput(f"--output_dir={folder} is not local; {first}, then copy it there.")
    remote_files.check_writable(folder, "output_dir")
    names = sorted(os.listdir(folder))
    return [name for name in names if dataset_json.is_metadata(name) or name.endswith(suffixes)]


def replaced(
    folder: str, names: List[str], overwrite: bool, known: Collection[str] = ()
) -> List[str]:
    """The names of what lies in a folder and a new data set replaces.

    Args:
        folder: where it shall be.
        names: of all there that would be read with it, sorted.
        overwrite: whether it may be replaced.
        known: names of files that are to be replaced whoever has written them.

    Raises:
        BadInput: something is there and is not to be replaced, or is not ours.
    """
    if not names:
        return []
    if not os.path.exists(os.path.join(folder, datasets.UNFINISHED)):
        said = dataset_json.read(folder) or {"files": {}}
        for name in names:
            ours = dataset_json.is_metadata(os.path.basename(name)) or _OURS.fullmatch(name)
            if not (ours or name in said["files"] or name in known):
                raise BadInput(
                    f"{os.path.join(folder, name)}: is no file that dataset.json names, so it is "
                    "not replaced; move it, or give another --output_dir."
                )
    if not overwrite:
        raise BadInput(f"{folder} holds a data set ({names[0]}); --overwrite replaces it.")
    return names


def mark(folder: str):
    """Has readers refuse a folder, which is made if it is missing, until `publish` is done."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, datasets.UNFINISHED), "w"):
        pass


def publish(scratch: str, names: List[str], folder: str, old: List[str]):
    """Moves files from a folder to another of the same disk, in place of others there.

    Args:
        scratch: where they are.
        names: their names.
        folder: where they shall be.
        old: the names there that they replace.
    """
    program.ignore_signals()
    mark(folder)
    for name in old:
        os.remove(os.path.join(folder, name))
    for name in names:
        os.replace(os.path.join(scratch, name), os.path.join(folder, name))
    os.remove(os.path.join(folder, datasets.UNFINISHED))
