"""dataset.json, which says what is in the files of a data set.

It lies beside the records:

    {"format_version": 1, "field_size": 39, "feature_size": 117581,
     "files": {"part-00000-of-00002.tfrecords": {"rows": 500, "bytes": 156500, "positives": 128},
               ...}}

and `"multi_valued": true` where a field of a record may hold several values, or none,
`"hash_buckets": N` where ids are hashes of strings (`records.hashed`), and `"feature_map":
"1f6c..."`, its fingerprint, where they are those of a feature_map.json.

It is trusted only where a file's name and size match. Where records were sampled by label,
"sampling_rates": {"negative": 0.1, "positive": 1.0} says how many of each label were kept. Several
hosts that write a data set together write a part each, dataset-00001-of-00004.json and so on:
readers take all that lie beside the files for one. The dataset.json of a folder may also describe
files in folders below it, by the names that lead there.
"""

import json
import os
import posixpath
import re
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import tensorflow as tf
from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime import atomic_files

METADATA = "dataset.json"
PART = re.compile(r"dataset-(\d{5})-of-(\d{5})\.json")  # what one of several hosts writes
FORMAT_VERSION = 1
_SHOWN = 5  # names in a line of the log
_FINGERPRINT = re.compile("[0-9a-f]{8,64}")


class SamplingRates(NamedTuple):
    """Records that were kept for each one of the original data; above 1: they were repeated."""

    negative: float = 1.0
    positive: float = 1.0


def merge_rates(parts: List[Tuple[Optional[dict], Tuple[int, int]]]) -> Optional[SamplingRates]:
    """The SamplingRates of several parts together: what is left, over what there was.

    None where none of them was sampled.

    Args:
        parts: for each its "sampling_rates", None where it was not sampled, and its (negatives,
            positives). A part that has none of a label, as with rate 0, does not count for it.
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
    """What lies in a folder; nothing where there is none."""
    try:
        return sorted(tf.io.gfile.listdir(folder or "."))
    except tf.errors.NotFoundError:
        return []


def is_metadata(name: str) -> bool:
    """Whether a file is a dataset.json, or a part of one, by its name."""
    return name == METADATA or bool(PART.fullmatch(name))


def leads_outside(name: str) -> bool:
    """Whether a name in a dataset.json is none of a file in its folder or in one below."""
    return bool(re.search(r"(^|/)\.\.?(/|$)|^/", name))


def read(folder: str, names: Callable = names_in) -> Optional[dict]:
    """The dataset.json of a folder, made of its parts where it lies there in parts; None without.

    Args:
        folder: local or s3://.
        names: folder -> what lies in it.

    Raises:
        BadInput: one is broken, or two contradict one another.
    """
    found = [posixpath.join(folder, name) for name in filter(is_metadata, names(folder))]
    parts = {path: read_part(path) for path in found}
    return merge(parts) if parts else None


def merge(parts: Dict[str, dict]) -> dict:
    """One dataset.json made of several, by their paths, which messages name.

    field_size and hash_buckets have to be the same, and feature_map where it is told; feature_size
    becomes the largest; see also merge_rates.
    """
    (first, merged), *others = parts.items()
    files, owners = dict(merged["files"]), dict.fromkeys(merged["files"], first)
    of_map = {part["feature_map"]: path for path, part in parts.items() if "feature_map" in part}
    if len(of_map) > 1:
        (one, path), (other, another), *_ = of_map.items()
        raise BadInput(
            f"{another}: its ids come from feature map {other}, those of {path} from {one}; "
            "these are not parts of one data set."
        )
    for path, part in others:
        for key in ("field_size", "hash_buckets"):
            if part.get(key) != merged.get(key):
                raise BadInput(
                    f"{path}: {key} {part.get(key)}, but {first} has {merged.get(key)}: these are "
                    "not parts of one data set."
                )
        for name, entry in part["files"].items():
            if files.setdefault(name, entry) != entry:
                raise BadInput(
                    f"{path}: contradicts {owners[name]} about {name}; delete one of the two."
                )
            owners.setdefault(name, path)
    rates = merge_rates(
        [(x.get("sampling_rates"), _rows_by_label(x["files"].values())) for x in parts.values()]
    )
    return {
        "format_version": FORMAT_VERSION,
        "field_size": merged["field_size"],
        "feature_size": max(part["feature_size"] for part in parts.values()),
        "files": files,
        **_told(
            multi_valued=any(part.get("multi_valued") for part in parts.values()),
            hash_buckets=merged.get("hash_buckets"),
            feature_map=next(iter(of_map), None),
            sampling_rates=rates and rates._asdict(),
        ),
    }


def _told(**more):
    """What a dataset.json says only where there is something to say."""
    return {key: value for key, value in more.items() if value}


def read_part(path: str) -> dict:
    """A dataset.json, or a part of one; BadInput where it is broken."""
    with tf.io.gfile.GFile(path, "rb") as f:
        text = f.read()
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
        version = found["format_version"]
        if version != FORMAT_VERSION:
            raise BadInput(
                f"{path}: format_version is {str(version)[:40]}, but this program reads "
                f"{FORMAT_VERSION}."
            )
        _check_numbers(found, 1, "field_size", "feature_size")
        if "hash_buckets" in found:
            _check_numbers(found, 2, "hash_buckets")
        if not isinstance(found.get("multi_valued", False), bool):
            raise ValueError(f"multi_valued is {str(found['multi_valued'])[:40]}")
        if not _FINGERPRINT.fullmatch(found.get("feature_map", "0" * 8)):
            raise ValueError(f"feature_map is {found['feature_map'][:40]}")
        for entry in found["files"].values():
            _check_numbers(entry, 0, "rows", "bytes", "positives")
            if entry["positives"] > entry["rows"]:
                raise ValueError(f"{entry['positives']} positives of {entry['rows']} rows")
        if "sampling_rates" in found:
            _check_rates(found["sampling_rates"], found["files"].values())
    except BadInput:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{path}: is not a dataset.json ({reason}); delete or remake it.") from error
    return found


def _unique(pairs):
    """A JSON object as a dict; of a key that is there twice nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _check_numbers(entry, least, *keys):
    for key in keys:
        number = entry[key]
        if type(number) is not int or not least <= number < 1 << 63:  # a bool is an int, too
            raise ValueError(f"{key} is {str(number)[:40]}")


def _rows_by_label(entries: Iterable[dict]) -> Tuple[int, int]:
    """(negatives, positives) of the files that entries of a dataset.json describe."""
    rows = [(entry["rows"], entry["positives"]) for entry in entries]
    positives = sum(ones for _, ones in rows)
    return sum(n for n, _ in rows) - positives, positives


def _check_rates(rates: dict, entries: Iterable[dict]):
    """Refuses (ValueError) sampling_rates that are no two rates, or not those of the files."""
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
    name: str = METADATA,
    multi_valued: bool = False,
    hash_buckets: int = 0,
    feature_map: Optional[str] = None,
):
    """Writes dataset.json into a folder, whole or not at all; `files` are DataFiles of it."""
    content = {
        "format_version": FORMAT_VERSION,
        "field_size": field_size,
        "feature_size": feature_size,
        **_told(multi_valued=multi_valued, hash_buckets=hash_buckets, feature_map=feature_map),
        "files": {
            os.path.basename(f.path): {"rows": f.rows, "bytes": f.bytes, "positives": f.positives}
            for f in files
        },
        **_told(sampling_rates=sampling_rates and sampling_rates._asdict()),
    }
    atomic_files.write_whole(posixpath.join(folder, name), json.dumps(content, indent=1) + "\n")


def check_named(
    flag: str,
    covers: Callable[[str], bool],
    read: Set[str],
    said: Dict[str, dict],
    is_data: Callable[[str], bool],
    partial: bool,
):
    """Compares the files that are read with those that are named; logs a line for a difference.

    One that is gone is a part of the records that nobody would miss. But a list or a glob may leave
    some out on purpose, and of a channel that is ShardedByS3Key each host has only its part.

    Args:
        flag: --name=value, for messages.
        covers: whether it asks for a file, by its path.
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
    asked = lambda path: is_data(named[path][1]) and covers(path)
    # A dataset.json that names nothing of what is read, or should be, is of other files.
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
            flag, how, there, there + len(absent), _shown(absent),
        )  # fmt: skip
    within = tuple(posixpath.join(folder, "") for folder in folders)
    unknown = sorted(path for path in read if path not in named and path.startswith(within))
    if unknown:
        logging.warning(
            "%s: also reading %s, which dataset.json does not name.", flag, _shown(unknown)
        )


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
                "%s: %s has the parts of %d of %d hosts; missing: host %d%s.",
                name, folder or ".", len(indices), number, missing[0],
                " and others" if missing[1:] else "",
            )  # fmt: skip


def _shown(paths):
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
