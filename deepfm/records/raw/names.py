"""The names of fields, and of the categories that their feature ids stand for.

They come from the feature_map.json that made the records, or else from the columns of the table, if
dataset.json has kept them. Where neither is known, a name is a number.
"""

import contextlib
import difflib
import functools
import os
import posixpath
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple

from deepfm.errors import BadInput, listed
from deepfm.records.storage import places

FILE = "feature_map.json"  # what reads it is loaded only for data that have one
ABOVE = 2  # prepare writes the map above the splits, in each of which a host may have a folder


class Names(NamedTuple):
    """What is known of a data set's names.

    Attributes:
        columns: the name of each field; (): unknown.
        fields: the Fields of its feature map; (): unknown.
    """

    columns: Tuple[str, ...] = ()
    fields: Tuple = ()

    def of_field(self, number: int) -> str:
        """The column of a field, else "field 2"."""
        return self.columns[number] if self.columns else f"field {number}"

    def of_value(self, number: int, value: Any) -> str:
        """The category of a feature id in a field, else what is given."""
        if not self.fields or not isinstance(value, int):
            return str(value)
        from deepfm.records.raw import feature_map

        return feature_map.name_of(self.fields[number], value)

    def number(self, word: str, flag: str) -> int:
        """The field that a word of a flag names: a number, or else a column.

        Raises:
            BadInput: no column has this name.
        """
        if word.isdigit():
            return int(word)
        if word in self.columns:
            return self.columns.index(word)
        if not self.columns:
            raise BadInput(
                f"--{flag}={word}: no {FILE} of these records lies in their folder or up to "
                f"{ABOVE} above it, so fields have no names; give numbers from 0, or copy the map "
                "there."
            )
        near = difflib.get_close_matches(word, self.columns, 3, 0.5)
        text = f"try {' or '.join(near)}" if near else f"there are {listed(self.columns)}"
        raise BadInput(f"--{flag}={word}: no column has this name; {text}.")


NO_NAMES = Names()


def of_data(paths: Iterable[str], fingerprint: Optional[str], ids: Optional[dict]) -> Names:
    """The Names of records.

    Args:
        paths: of their files, or of others that the same map may have made.
        fingerprint: of the feature map that made their ids; None: unknown.
        ids: the entry "ids" of dataset.json, if known.
    """
    found = map_of(paths, fingerprint)
    if found:
        return of_map(found)
    columns = (ids or {}).get("columns", ())
    return Names(tuple(x if isinstance(x, str) else x[0] or x[-1] for x in columns))


def of_map(found: Any) -> Names:
    """The Names of the fields of a FeatureMap."""
    return Names(tuple(field.name for field in found.fields), tuple(found.fields))


def map_of(paths: Iterable[str], fingerprint: Optional[str]) -> Optional[Any]:
    """The FeatureMap that made the ids of records, as `of_data`; None if it is not there."""
    return fingerprint and _kept_map(tuple(folders_of(paths)), fingerprint)


def folders_of(paths: Iterable[str]) -> List[str]:
    """The folders in which some files lie."""
    return sorted(set(map(posixpath.dirname, paths)))


def find_map(folders: Iterable[str], fingerprint: str) -> Optional[str]:
    """The path of the map with a fingerprint in some folders, or above them; None without one.

    What a map says of its fingerprint is believed; whoever uses its ids loads it by `load`.
    """
    from deepfm.records.raw import feature_map as maps

    for folder in folders:
        folder = folder if places.is_remote(folder) else os.path.abspath(folder)
        for _ in range(1 + ABOVE):
            path = posixpath.join(folder, FILE)
            if places.of(path).exists(path):
                said = maps.said(path).get("fingerprint")
                if said == fingerprint or said is None and load(path, fingerprint):
                    return path
            folder = posixpath.dirname(folder)
    return None


def load(path: str, fingerprint: str) -> Optional[Any]:
    """The FeatureMap in a file; None if that is none, or has another fingerprint."""
    from deepfm.records.raw import feature_map as maps

    with contextlib.suppress(ValueError):
        found = maps.load(path)
        return found if found.fingerprint() == fingerprint else None
    return None


@functools.lru_cache(maxsize=4)
def _kept_map(folders, fingerprint):
    path = find_map(folders, fingerprint)
    return path and load(path, fingerprint)
