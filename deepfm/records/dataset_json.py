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
far as that is known, it says how the records were made (KEYS): "ids", what decides the
ids, with a fingerprint; "value_ranges", the [smallest, largest] value of each field, null where it
has none; "unknown_shares", {column: share of its cells that the feature map does not know}. A
`made` is {key: its entry}, without those that are unknown.

An entry counts only if the file's name and size match. The dataset.json of a folder may also
describe files in subfolders, by their relative paths.
"""

import hashlib
import itertools
import json
import os
import posixpath
import re
from typing import Any, Collection, Dict, Iterable, List, Optional, Tuple

from deepfm.errors import BadInput, refusing
from deepfm.records import atomic_files
from deepfm.records.data_file import SamplingRates
from deepfm.records.storage import places

METADATA = "dataset.json"
UNFINISHED = ".unfinished"  # marks a folder that may mix files of a new and an old data set
KEYS = ("ids", "value_ranges", "unknown_shares")
_ADVICE = "are they written as in training (3, not 3.0), and in the right columns?"
FORMAT_VERSION = 1
_FINGERPRINT = re.compile("[0-9a-f]{8,64}")
_SHOWN = 5  # columns in a sentence


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


def load(folder: str) -> Optional[dict]:
    """The content of a folder's dataset.json, local or remote; None without one.

    Raises BadInput if it is broken.
    """
    if METADATA not in places.of(folder).names(folder):
        return None
    path = posixpath.join(folder, METADATA)
    with places.of(path).open_file(path) as f:
        text = f.read()
    with refusing(f"{path}: is not a dataset.json", "delete or remake it"):
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
        _check_entries(content)
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


def _check_rates(rates: dict, entries: Collection[dict]):
    """Refuses (ValueError) sampling_rates that are not two rates or contradict the files' rows."""
    if set(rates) != set(SamplingRates._fields):
        raise ValueError(f"sampling_rates is {str(rates)[:60]}")
    positives = sum(entry["positives"] for entry in entries)
    rows = SamplingRates(sum(entry["rows"] for entry in entries) - positives, positives)
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
        how: what is known of dataset_json.KEYS.
        files: its DataFiles; those of subfolders have paths that begin with `folder`.
    """
    inside = posixpath.join(folder, "")
    below = lambda p: p[len(inside) :] if p.startswith(inside) else os.path.basename(p)
    content = {
        "format_version": FORMAT_VERSION,
        "field_size": field_size,
        "feature_size": feature_size,
        "multi_valued": multi_valued,
        "weighted": weighted,
        "hash_buckets": hash_buckets,
        "feature_map": feature_map,
        "files": {
            below(f.path): {"rows": f.rows, "bytes": f.bytes, "positives": f.positives}
            for f in files
        },
        "sampling_rates": sampling_rates and sampling_rates._asdict(),
        **how,
    }
    content = {key: value for key, value in content.items() if value or key == "files"}
    path, text = posixpath.join(folder, METADATA), json.dumps(content, indent=1) + "\n"
    text = re.sub(r"\[\s+([-+.e\d]+),\s+([-+.e\d]+)\s+\]", r"[\1, \2]", text)  # value_ranges
    if not places.is_remote(path):
        atomic_files.write_whole(path, text)
        return
    with places.of(path).create(path) as f:
        f.write(text.encode())


def ids(**how) -> Dict[str, Any]:
    """The entry "ids": {what decides the ids: its value}, with a fingerprint of that."""
    how.pop("fingerprint", None)
    digest = hashlib.sha1(json.dumps(how, sort_keys=True).encode())
    return {**how, "fingerprint": digest.hexdigest()[:16]}


def ids_differ(one: Optional[dict], other: Optional[dict]) -> Optional[Tuple[str, str]]:
    """The first difference of two "ids", in words for each; None if they agree where both say.

    What only one says, such as the columns of a table, is no difference.
    """
    for key in sorted(set(one or ()) & set(other or ()) - {"fingerprint", "grew_from", "day"}):
        name, a, b = key, one[key], other[key]
        if a != b and isinstance(a, list) and isinstance(b, list):
            pairs = enumerate(itertools.zip_longest(a, b))
            i, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            name = f"{key}[{i}]"
        if a != b:
            texts = (f"{name} {json.dumps(x)[:60]}" for x in (a, b))
            prints = (f"(fingerprint {x['fingerprint']})" for x in (one, other))
            return tuple(map(" ".join, zip(texts, prints)))
    return None


def merge(parts: Dict[str, dict]) -> Dict[str, Any]:
    """The `made` of several {path: content of dataset.json}; BadInput if their ids differ."""
    distinct = {id(content): (path, content) for path, content in parts.items()}.values()
    (first, one), *others = distinct
    for path, content in others:
        differ = ids_differ(one.get("ids"), content.get("ids"))
        if differ:
            raise BadInput(
                f"{path}: its ids were made with {differ[1]}, those of {first} with {differ[0]}; "
                "make all in the same way, or read only one kind."
            )
    contents = [content for _, content in distinct]
    merged = {key: [x[key] for x in contents] for key in KEYS if all(key in x for x in contents)}
    if "ids" in merged:
        merged["ids"] = merged["ids"][0]
    if "value_ranges" in merged:
        of_fields = (list(filter(None, x)) for x in zip(*merged["value_ranges"]))
        widest = lambda pairs: [min(low for low, _ in pairs), max(high for _, high in pairs)]
        merged["value_ranges"] = [widest(pairs) if pairs else None for pairs in of_fields]
    if "unknown_shares" in merged:
        rows = [sum(file["rows"] for file in x["files"].values()) for x in contents]
        sums = {
            name: sum(n * shares.get(name, 0) for n, shares in zip(rows, merged["unknown_shares"]))
            for name in merged["unknown_shares"][0]
        }
        merged["unknown_shares"] = {name: x / max(sum(rows), 1) for name, x in sums.items()}
    return merged


def far_above(rows: int, made: Dict[str, Any], trained: Dict[str, Any]) -> Optional[str]:
    """A sentence if columns have far more unknown cells than in training; None if none has."""
    shares, before = made.get("unknown_shares", {}), trained.get("unknown_shares", {})
    most = max(0.2, 1.5 * max(rows, 1) ** -0.5)
    above = [x for x in shares if x in before and shares[x] - before[x] > most]
    found = [f"{shares[x]:.1%} of column {x} (in training {before[x]:.1%})" for x in above]
    shown = ", ".join(found[:_SHOWN]) + " ..." * (len(found) > _SHOWN)
    return f"the map does not know {shown}; {_ADVICE}" if found else None


def _check_entries(content: dict):
    """Refuses (ValueError) a dataset.json with an entry of KEYS that is none."""
    if "ids" in content and not isinstance(content["ids"]["fingerprint"], str):
        raise ValueError(f"ids is {str(content['ids'])[:40]}")
    ranges = content.get("value_ranges", [])
    numbers = list(content.get("unknown_shares", {}).values())
    for low, high in filter(None, ranges):
        numbers += [low, high]
    if len(ranges) not in (0, content["field_size"]) or not all(
        type(x) in (int, float) and abs(x) < 1e39 for x in numbers
    ):
        raise ValueError("value_ranges or unknown_shares are not numbers of the fields")
