"""dataset.json, which says what is in the files of a data set.

It sits beside the records:

    {"format_version": 1, "field_size": 39, "feature_size": 117581,
     "files": {"part-00000-of-00002.tfrecords": {"rows": 500, "bytes": 156500, "positives": 128},
               ...}}

It also has `"multi_valued": true` if a field of a record may hold several values or none,
`"weighted": true` if records may hold the weight of an example,
`"hash_buckets": N` if ids are hashes of strings (`records.hashed`), and `"feature_map": "1f6c..."`,
the fingerprint of a feature_map.json, if the ids come from one. If records were sampled by label,
"sampling_rates": {"negative": 0.1, "positive": 1.0} says what share of each label was kept. As
far as that is known, it says how the records were made (records/made.py): "ids", what decides the
ids, with a fingerprint; "value_ranges", the [smallest, largest] value of each field, null where it
has none; "unknown_shares", {column: share of its cells that the feature map does not know}.

An entry counts only if the file's name and size match. The dataset.json of a folder may also
describe files in subfolders, by their relative paths.
"""

import json
import os
import posixpath
import re
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from absl import logging

from deepfm.errors import BadInput, listed
from deepfm.records import made
from deepfm.records.data_file import SamplingRates
from deepfm.records.storage import places
from deepfm.runtime import atomic_files

METADATA = "dataset.json"
UNFINISHED = ".unfinished"  # marks a folder that may mix files of a new and an old data set
_PART = re.compile(r"dataset-\d{5}-of-\d{5}\.json")  # of one of several hosts, by an old version
FORMAT_VERSION = 1
_FINGERPRINT = re.compile("[0-9a-f]{8,64}")


def merge_rates(parts: List[Tuple[Optional[dict], Tuple[int, int]]]) -> Optional[SamplingRates]:
    """The SamplingRates of several parts together: records kept, over records before sampling.

    None if no part was sampled.

    Args:
        parts: for each part its "sampling_rates" (None if it was not sampled) and its (negatives,
            positives). A part without records of a label, as with rate 0, is left out for it.
    """
    if not any(rates for rates, _ in parts):
        return None
    parts = [(SamplingRates(**(rates or {})), rows) for rates, rows in parts]
    merged = []
    for label in (0, 1):
        kept = sum(rows[label] for _, rows in parts)
        before = sum(rows[label] / rates[label] for rates, rows in parts if rows[label])
        merged.append(kept / before if before else parts[0][0][label])
    return SamplingRates(*merged)


def names_in(folder):
    """The sorted names in a folder; none if the folder does not exist."""
    return places.of(folder).names(folder)


def is_metadata(name: str) -> bool:
    """Whether a file is, by its name, a dataset.json, or what an old version wrote for it."""
    return name == METADATA or bool(_PART.fullmatch(name))


def leads_outside(name: str) -> bool:
    """Whether a name in a dataset.json points outside its folder and the folders below."""
    return bool(re.search(r"(^|/)\.\.?(/|$)|^/", name))


def load(folder: str, names: Callable = names_in) -> Optional[dict]:
    """The content of a folder's dataset.json; None without one.

    Args:
        folder: local or s3://.
        names: folder -> the names in it.

    Raises:
        BadInput: it is broken, or in parts.
    """
    there = list(names(folder))
    part = next(filter(_PART.fullmatch, there), None)
    if part:
        raise BadInput(
            f"{posixpath.join(folder, part)}: left by an earlier version on several hosts; write "
            "the data anew, or delete the parts of dataset.json and let 'python -m "
            f"data_tools.inspect_dataset --data={folder} --write' count the records (it finds "
            "neither sampling rates nor the feature map)."
        )
    return _read(posixpath.join(folder, METADATA)) if METADATA in there else None


def _given(**more):
    """The entries that a dataset.json has only if they are set."""
    return {key: value for key, value in more.items() if value}


def _read(path):
    with places.of(path).open_file(path) as f:
        text = f.read()
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique)
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise BadInput(
                f"{path}: format_version is {str(version)[:40]}, but this program reads "
                f"{FORMAT_VERSION}."
            )
        _check_numbers(content, 1, "field_size", "feature_size")
        if "hash_buckets" in content:
            _check_numbers(content, 2, "hash_buckets")
        for key in ("multi_valued", "weighted"):
            if not isinstance(content.get(key, False), bool):
                raise ValueError(f"{key} is {str(content[key])[:40]}")
        if not _FINGERPRINT.fullmatch(content.get("feature_map", "0" * 8)):
            raise ValueError(f"feature_map is {content['feature_map'][:40]}")
        for entry in content["files"].values():
            _check_numbers(entry, 0, "rows", "bytes", "positives")
            if entry["positives"] > entry["rows"]:
                raise ValueError(f"{entry['positives']} positives in {entry['rows']} rows")
        if "sampling_rates" in content:
            _check_rates(content["sampling_rates"], content["files"].values())
        made.check_entries(content)
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{path}: is not a dataset.json ({reason}); delete or remake it.") from error
    return content


def _unique(pairs):
    """A JSON object as a dict; refuses a repeated key, whose meaning would be ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _check_numbers(entry, least, *keys):
    for key in keys:
        number = entry[key]
        if type(number) is not int or not least <= number < 1 << 63:  # a bool is an int, too
            raise ValueError(f"{key} is {str(number)[:40]}")


def _rows_by_label(entries: Iterable[dict]) -> Tuple[int, int]:
    """(negatives, positives) in the files that entries of a dataset.json describe."""
    rows = [(entry["rows"], entry["positives"]) for entry in entries]
    positives = sum(ones for _, ones in rows)
    return sum(n for n, _ in rows) - positives, positives


def _check_rates(rates: dict, entries: Iterable[dict]):
    """Refuses (ValueError) sampling_rates that are not two rates or contradict the files' rows."""
    if set(rates) != set(SamplingRates._fields):
        raise ValueError(f"sampling_rates is {str(rates)[:60]}")
    rows = SamplingRates(*_rows_by_label(entries))
    for label, rate in rates.items():
        if type(rate) not in (int, float) or not 0 <= rate < 1 << 63:
            raise ValueError(f"the sampling rate {label} is {str(rate)[:40]}")
        if not rate and getattr(rows, label):
            raise ValueError(f"the sampling rate {label} is 0 and there are {label} rows")


def write(
    folder: str,
    field_size: int,
    feature_size: int,
    files: Iterable,
    sampling_rates: Optional[SamplingRates] = None,
    multi_valued: bool = False,
    hash_buckets: int = 0,
    feature_map: Optional[str] = None,
    weighted: bool = False,
    **how: Any,
):
    """Writes dataset.json into a folder, whole or not at all.

    Args:
        how: what is known of made.KEYS.
        files: its DataFiles; those of subfolders have paths that begin with `folder`.
    """
    inside = posixpath.join(folder, "")
    below = lambda p: p[len(inside) :] if p.startswith(inside) else os.path.basename(p)
    content = {
        "format_version": FORMAT_VERSION,
        "field_size": field_size,
        "feature_size": feature_size,
        **_given(
            multi_valued=multi_valued,
            weighted=weighted,
            hash_buckets=hash_buckets,
            feature_map=feature_map,
        ),
        "files": {
            below(f.path): {"rows": f.rows, "bytes": f.bytes, "positives": f.positives}
            for f in files
        },
        **_given(sampling_rates=sampling_rates and sampling_rates._asdict(), **how),
    }
    path, text = posixpath.join(folder, METADATA), json.dumps(content, indent=1) + "\n"
    text = re.sub(r"\[\s+([-+.e\d]+),\s+([-+.e\d]+)\s+\]", r"[\1, \2]", text)  # value_ranges
    if not places.is_remote(path):
        atomic_files.write_whole(path, text)
        return
    with places.of(path).create(path) as f:
        f.write(text.encode())


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
        if entry["bytes"] and not leads_outside(name)
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
    """Warns if the folders in paths show that those of some hosts are missing.

    Args:
        paths: paths of the files.
        name: name of the data in messages.
    """
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
