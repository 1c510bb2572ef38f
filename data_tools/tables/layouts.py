"""What the columns of a table with encoded ids are, by their names or by a JSON file.

Without a file, the columns have the names of a record's features: label, ids, values, counts and
weight, of which ids, values and counts hold lists. A table without ids has the id of one field in
each column beside label and weight; the index that pandas writes is none. A file names any others
(column_kinds.py).
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from deepfm.errors import BadInput
from deepfm.records.raw import column_kinds
from deepfm.records.raw.column_kinds import (
    COUNTS,
    ID,
    IDS,
    LABEL,
    LISTS,
    VALUE,
    VALUES,
    WEIGHT,
)  # fmt: skip

_ADVICE = {
    IDS: "a list of integers, as list<int64>",
    COUNTS: "a list of integers, as list<int64>",
    VALUES: "a list of numbers, as list<float>",
    ID: "an integer, as int64",
}
# What pandas calls its index in CSV and in Parquet, and what it calls one that it has read.
INDEX = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


class Field(NamedTuple):
    """A field that has columns of its own.

    Attributes:
        id: the column of its ids; None: `offset` is its id.
        offset: is added to each id.
        value: the column of its values; None: each is 1.
    """

    id: Optional[str]
    offset: int = 0
    value: Optional[str] = None


class Layout(NamedTuple):
    """The columns of a table.

    Attributes:
        label: the name of the label's column.
        weight: that of the weights'; None: examples are not weighted.
        fields: the Fields in the order of the records; (): columns hold lists.
        ids, values, counts: the columns of lists; None: there is none.
        order: the names of all columns in the order of the cells; (): a CSV must have a header.
    """

    label: str
    weight: Optional[str] = None
    fields: Tuple[Field, ...] = ()
    ids: Optional[str] = None
    values: Optional[str] = None
    counts: Optional[str] = None
    order: Tuple[str, ...] = ()


def columns(layout: Layout) -> List[Tuple[str, str]]:
    """The (name, kind) of all columns that are read."""
    named = [(layout.label, LABEL), (layout.weight, WEIGHT)]
    for field in layout.fields:
        named += [(field.id, ID), (field.value, VALUE)]
    named += [(layout.ids, IDS), (layout.values, VALUES), (layout.counts, COUNTS)]
    return [(name, kind) for name, kind in named if name is not None]


def described(layout: Layout) -> Dict[str, Any]:
    """{"fields" or "columns": what decides which field an id is of}, for dataset_json.ids."""
    if layout.ids:
        return {"fields": "named" if layout.counts else "by place"}
    of = lambda field: [x.lower() if isinstance(x, str) else x for x in field]
    return {"columns": [of(x)[0] if x == Field(x.id) else of(x) for x in layout.fields]}


def named(names: Sequence[str]) -> Layout:
    """The Layout that the names of a table's columns say.

    A column that is missing is told by `find`.
    """
    spelled = {}
    for name in names:
        spelled.setdefault(name.lower(), name)
    given = {kind: spelled.get(kind) for kind in (WEIGHT, *LISTS)}
    if given[IDS] is None:
        others = (x for x in names if x.lower() not in (LABEL, WEIGHT) and not INDEX.fullmatch(x))
        return Layout(spelled.get(LABEL, LABEL), given[WEIGHT], tuple(map(Field, others)))
    return Layout(spelled.get(LABEL, LABEL), **given)


def load(path: str) -> Layout:
    """Reads the JSON file of --columns; raises BadInput if it is invalid, or has raw columns."""
    why = "whose cells are no ids yet; data_tools.prepare encodes them"
    columns = column_kinds.load(path, column_kinds.RAW, why).columns
    of = {column.kind: column.name for column in columns if column.kind in (LABEL, WEIGHT, *LISTS)}
    values = {column.id: column.name for column in columns if isinstance(column.id, str)}
    fields = [
        Field(x.name, x.offset or 0, values.get(x.name)) if x.kind == ID
        else Field(None, x.id, x.name)
        for x in columns if x.kind == ID or x.kind == VALUE and not isinstance(x.id, str)
    ]  # fmt: skip
    return Layout(fields=tuple(fields), order=tuple(column.name for column in columns), **of)


def check_type(path: str, column, kind: str):
    """Refuses (BadInput) a column of a Parquet file, a pyarrow Field, unfit for a kind."""
    import pyarrow.types as types

    found, advice = column.type, _ADVICE.get(kind, "a number, as int64 or double")
    inner = found
    if kind in LISTS:
        is_list = types.is_list(found) or types.is_large_list(found)
        inner = found.value_type if is_list or types.is_fixed_size_list(found) else None
    fits = inner is not None and types.is_integer(inner)
    if kind not in (ID, IDS, COUNTS):
        fits = fits or inner is not None and types.is_floating(inner)
        fits = fits or kind not in LISTS and types.is_boolean(inner)
    if not fits:
        raise BadInput(
            f"{path}: column {column.name} is of type {found}, but must be {advice}; cast it, or "
            "say by --columns what each column is."
        )


def check_same(first: str, path: str, one: Layout, other: Layout):
    """Refuses (BadInput) a file whose names say more columns than those of the first file."""
    known = {name.lower() for name, _ in columns(one)}
    more = [name for name, _ in columns(other) if name.lower() not in known]
    if more:
        raise BadInput(
            f"{path}: has a column {more[0]}, which {first} has not; give both the same columns, "
            "or say by --columns which to read."
        )
