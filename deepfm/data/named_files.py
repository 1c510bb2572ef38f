"""Whether the files that a job reads are those that their dataset.json names."""

import posixpath
import re
from typing import Callable, Dict, Iterable, Set

from absl import logging

from deepfm.errors import BadInput, listed


def check_named(
    flag: str,
    covers: Callable[[str], bool],
    read: Set[str],
    said: Dict[str, dict],
    is_data: Callable[[str], bool],
    partial: bool,
):
    """Compares the files that are read with those in dataset.json; logs a line for a difference.

    Without this, records in a missing file would go unnoticed. But a list or a glob may leave files
    out on purpose, and of a ShardedByS3Key channel each host has only its part.

    Args:
        flag: --name=value, for messages.
        covers: path -> whether the flag asks for that file.
        read: paths of the files that hold at least one byte.
        said: {folder: content of its dataset.json}.
        is_data: name -> whether such a file is read when its folder is searched.
        partial: whether a host has only its part of the files.

    Raises:
        BadInput: a file is in dataset.json, the flag asks for it, and it is missing.
    """
    named = {
        posixpath.join(folder, name): (folder, name)
        for folder, content in said.items()
        for name, entry in content["files"].items()
        if entry["bytes"] and not re.search(r"(^|/)\.\.?(/|$)|^/", name)  # outside its folder
    }
    asked = lambda path: is_data(named[path][1]) and covers(path)
    # A dataset.json that names no file that is read, or should be, describes other data.
    folders = {folder for path, (folder, _) in named.items() if path in read or asked(path)}
    absent = sorted(p for p, (folder, _) in named.items() if folder in folders and p not in read)
    gone = list(filter(asked, absent))
    if gone and not partial:
        more = f" and {len(gone) - 1} more" if gone[1:] else ""
        raise BadInput(
            f"{gone[0]}: missing or empty, but the dataset.json of {named[gone[0]][0]} names "
            f"it{more}; put it back, or list the files to read in {flag.partition('=')[0]}."
        )
    if absent:
        how = "this host has only its part" if gone else "leaves some out"
        there = len(read.intersection(named))
        logging.info(
            "%s: %s; reading %d of the %d files that dataset.json names. Not read: %s.",
            flag, how, there, there + len(absent), listed(absent),
        )  # fmt: skip
    within = tuple(posixpath.join(folder, "") for folder in folders)
    unknown = sorted(path for path in read if path not in named and path.startswith(within))
    if unknown:
        logging.warning(
            "%s: also reading %s, which dataset.json does not name.", flag, listed(unknown)
        )


def warn_of_missing_hosts(paths: Iterable[str], name: str):
    """Warns if the folders in paths show that those of some hosts are missing."""
    hosts = {}
    for path in paths:
        match = re.search(r"(.*/|^)shard-(\d{5})-of-(\d{5})/", path)
        if match:
            hosts.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (folder, number), indices in sorted(hosts.items()):
        missing = sorted(set(range(number)) - indices)
        if missing:
            logging.warning(
                "%s: %s has the parts of %d of %d hosts; missing: host %d%s.",
                name, folder or ".", len(indices), number, missing[0],
                " and others" if missing[1:] else "",
            )  # fmt: skip
