"""Whether the files that dataset.json names are the files that are read.

One that is gone is a part of the records that nobody would miss. But a list or a glob may leave
some out on purpose, and of a channel that is ShardedByS3Key each host has only its part.
"""

import fnmatch
import posixpath
import re
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Set

from absl import logging

from deepfm.errors import BadInput

PART = re.compile(r"dataset-(\d{5})-of-(\d{5})\.json")  # what one of several hosts writes
_SHOWN = 5  # names in a line of the log


class Found(NamedTuple):
    """What one entry of a flag's comma list finds.

    Attributes:
        spec: a directory, which is searched through, a glob or a file.
        is_directory: whether it is the first of these.
        paths: the files.
        folders: those that may hold a dataset.json of these files.
    """

    spec: str
    is_directory: bool
    paths: List[str]
    folders: List[str]

    def covers(self, path: str) -> bool:
        """Whether a path would be found if a file were there."""
        if self.is_directory:
            return path.startswith(posixpath.join(self.spec, ""))
        names, patterns = path.split("/"), self.spec.split("/")
        return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def leads_outside(name: str) -> bool:
    """Whether a name in a dataset.json is none of a file in its folder or in one below."""
    return bool(re.search(r"(^|/)\.\.?(/|$)|^/", name))


def check(
    flag: str,
    entries: Collection[Found],
    read: Set[str],
    said: Dict[str, dict],
    is_data: Callable[[str], bool],
    partial: bool,
):
    """Compares the files that are read with those that are named; logs a line for a difference.

    Args:
        flag: --name=value, for messages.
        entries: what the entries of its comma list find.
        read: the paths of the files that hold at least a byte.
        said: {folder: the content of its dataset.json}.
        is_data: whether a file is read where its folder is searched through, by its name.
        partial: whether a host has only its part of the files.

    Raises:
        BadInput: a file is named, asked for and not there.
    """
    named = {
        posixpath.join(folder, name): (folder, name)
        for folder, content in said.items()
        for name, entry in content["files"].items()
        if entry["bytes"] and not leads_outside(name)
    }
    asked = lambda path: is_data(named[path][1]) and any(entry.covers(path) for entry in entries)
    # A dataset.json that names nothing of what is read, or should be, is of other files.
    folders = {folder for path, (folder, _) in named.items() if path in read or asked(path)}
    absent = sorted(p for p, (folder, _) in named.items() if folder in folders and p not in read)
    gone = list(filter(asked, absent))
    if gone and not partial:
        more = f" and {len(gone) - 1} more" if gone[1:] else ""
        raise BadInput(
            f"{gone[0]}: is not there, or empty, though the dataset.json of {named[gone[0]][0]} "
            f"names it{more}; put it back, or list the files to read in {flag.partition('=')[0]}."
        )
    if absent:
        how = "this host has only its part" if gone else "leaves some out"
        there = len(read.intersection(named))
        logging.info(
            "%s: %s, %d of the %d files that dataset.json names; not read: %s.",
            flag, how, there, there + len(absent), _shown(absent),
        )  # fmt: skip
    within = tuple(posixpath.join(folder, "") for folder in folders)
    unknown = sorted(path for path in read if path not in named and path.startswith(within))
    if unknown:
        logging.warning("%s: dataset.json does not name %s, read as well.", flag, _shown(unknown))


def warn_of_missing_hosts(paths: Iterable[str], name: str, names: Callable[[str], Iterable[str]]):
    """Warns where files, by their folders or their own names, are of several hosts' but not all.

    Args:
        paths: of the files.
        name: what messages call the data.
        names: folder -> what lies in it.
    """
    found = {}
    for path in paths:
        match = re.search(r"(.*/|^)shard-(\d{5})-of-(\d{5})/", path)
        if match:
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for folder in {posixpath.dirname(path) for path in paths}:
        for part in filter(PART.fullmatch, names(folder)):
            index, number = map(int, re.findall(r"\d{5}", part))
            found.setdefault((posixpath.join(folder, ""), number), set()).add(index)
    for (folder, number), indices in sorted(found.items()):
        missing = sorted(set(range(number)) - indices)
        if missing:
            logging.warning(
                "%s: %s holds what %d of %d hosts have written; nothing is there of host %d%s.",
                name, folder or ".", len(indices), number, missing[0],
                " and others" if missing[1:] else "",
            )  # fmt: skip


def _shown(paths):
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
