"""Counts how often each category of each field occurs, merges the counts and keeps them in files.

Merging is exact: the counts of several processes or hosts, in any order, add up to those of one.
"""

import collections
import glob
import json
import os
import zipfile
from typing import Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from data_tools.click_logs.column_kinds import SCALED, Column
from data_tools.click_logs.row_parser import LONG, MISSING
from data_tools.common import tallies
from deepfm.errors import BadInput

FORMAT_VERSION = 1
_OPTIONS = "dataset", "integers", "split", "split_by", "seed"  # options that counts depend on


class Counts(NamedTuple):
    """The counts of a field, without missing cells.

    Attributes:
        keys: uint64 [n], ascending; see row_parser.
        counts: int64 [n].
        long: {text of over 8 bytes: count}.
    """

    keys: np.ndarray
    counts: np.ndarray
    long: Dict[bytes, int]


def count(keys: np.ndarray, long: List[bytes]) -> Counts:
    """Counts the cells of a field, given their keys, uint64 [n], and the texts of LONG ones."""
    keys = keys[(keys != MISSING) & (keys != LONG)]
    return Counts(*np.unique(keys, return_counts=True), collections.Counter(long))


def add_up(columns: Sequence[Column], parts: Iterable[Sequence[Counts]]) -> List[Counts]:
    """The Counts of each field over all parts; a part has Counts for all fields, or is empty.

    For a scaled field, only the smallest and the largest integer are kept.
    """
    short = [tallies.Tally(np.uint64, only_extremes=c.kind == SCALED) for c in columns]
    long = [collections.Counter() for _ in columns]
    for part in parts:
        for tally, texts, counts in zip(short, long, part):
            tally.add(counts.keys, counts.counts)
            texts.update(counts.long)
    return [Counts(*tally.result(), dict(texts)) for tally, texts in zip(short, long)]


def save(path: str, about: dict, counts: List[Counts]):
    """Writes a file of counts; `about` says what was counted."""
    arrays = {"about": _bytes(json.dumps(dict(about, format_version=FORMAT_VERSION)).encode())}
    for i, field in enumerate(counts):
        texts = sorted(field.long)
        arrays[f"keys-{i}"], arrays[f"counts-{i}"] = field.keys, field.counts
        arrays[f"long-{i}"] = _bytes(b"\n".join(texts))  # no text holds a newline
        arrays[f"long_counts-{i}"] = np.array([field.long[t] for t in texts], np.int64)
    with open(path, "wb") as f:
        np.savez(f, **arrays)


def _bytes(text):
    return np.frombuffer(text, np.uint8)


def about(options, share: Tuple[int, int], files: Sequence) -> dict:
    """What a host's counts depend on: prepare_criteo.Options, its share, the input's DataFiles."""
    files = [[os.path.basename(file.path), file.bytes] for file in files]
    return {**{x: getattr(options, x) for x in _OPTIONS}, "share": [*share], "files": files}


def load_all(columns: Sequence[Column], mine: dict, options) -> Iterator[List[Counts]]:
    """Yields each host's counts; raises BadInput if they do not match `mine`, from `about`."""
    spec = options.counts or os.path.join(options.output_dir, "counts-*.npz")
    paths = sorted(glob.glob(spec))
    if not paths:
        raise BadInput(f"--counts={spec}: no file matches; run --step=count on each host first.")
    seen = set()
    for path in paths:
        said, counts = load(path, len(columns))
        for name in _OPTIONS:
            if said.get(name) != mine[name]:
                was = said.get(name)
                raise BadInput(f"{path}: was counted with --{name}={was}, not {mine[name]}.")
        index, number = said["share"]
        same_files = said.get("files", mine["files"]) == mine["files"]
        if not same_files and (not options.own_files or said["share"] == mine["share"]):
            raise BadInput(
                f"{path}: was counted on other files than those of --input={options.input}; count "
                "again (--step=count --overwrite)."
            )
        if number != len(paths) or index in seen:
            raise BadInput(
                f"--counts={spec}: {len(paths)} files, but {path} is number {index + 1} of "
                f"{number}; give each host's counts once."
            )
        seen.add(index)
        yield counts


def load(path: str, field_size: int):
    """(about, [Counts] of the fields) from a file of counts; raises BadInput if it is broken."""
    try:
        with np.load(path) as found:
            about = json.loads(found["about"].tobytes().decode())
            if about["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format_version {about['format_version']}, not {FORMAT_VERSION}")
            return about, [_field(found, i) for i in range(field_size)]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{path}: is not a file of counts ({reason}); count again.") from error


def _field(found, i):
    keys, counts = found[f"keys-{i}"], found[f"counts-{i}"]
    texts, long_counts = found[f"long-{i}"].tobytes(), found[f"long_counts-{i}"]
    texts = texts.split(b"\n") if texts else []
    if len(keys) != len(counts) or len(texts) != len(long_counts):
        raise ValueError(f"field {i} has {len(keys)} keys and {len(counts)} counts")
    return Counts(keys, counts, dict(zip(texts, long_counts.tolist())))
