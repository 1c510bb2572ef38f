"""How the records of a data set were made, as far as its dataset.json says it: KEYS.

A `made` is {key: its entry}, without those that are unknown.
"""

import hashlib
import itertools
import json
from typing import Any, Dict, Optional, Tuple

from deepfm.errors import BadInput

KEYS = ("ids", "value_ranges", "unknown_shares")
ADVICE = "are they written as in training (3, not 3.0), and in the right columns?"
_SHOWN = 5  # columns in a sentence


def ids(**how) -> Dict[str, Any]:
    """The entry "ids": {what decides the ids: its value}, with a fingerprint of that."""
    how.pop("fingerprint", None)
    digest = hashlib.sha1(json.dumps(how, sort_keys=True).encode())
    return {**how, "fingerprint": digest.hexdigest()[:16]}


def ids_differ(one: Optional[dict], other: Optional[dict]) -> Optional[Tuple[str, str]]:
    """The first difference of two "ids", in words for each; None if they agree where both say.

    What only one says, such as the columns of a table, is no difference.
    """
    for key in sorted(set(one or ()) & set(other or ()) - {"fingerprint"}):
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
    """Columns with far more unknown cells than in training, in words; None if there are none."""
    shares, before = made.get("unknown_shares", {}), trained.get("unknown_shares", {})
    most = max(0.2, 1.5 * max(rows, 1) ** -0.5)
    above = [x for x in shares if x in before and shares[x] - before[x] > most]
    found = [f"{shares[x]:.1%} of column {x} (in training {before[x]:.1%})" for x in above]
    return ", ".join(found[:_SHOWN]) + " ..." * (len(found) > _SHOWN) if found else None


def check_entries(content: dict):
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
