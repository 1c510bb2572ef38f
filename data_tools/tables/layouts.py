"""What the columns of a table with encoded ids are, by their names or by a JSON file.

Without a file, the columns have the names of a record's features: label, ids, values, counts and
weight, of which ids, values and counts hold lists. A table without ids has the id of one field in
each column beside label and weight; the index that pandas writes is none. A file, in the form of
prepare's, names any others:

    {"columns": [{"name": "clicked", "kind": "label"},
                 {"name": "age", "kind": "value", "id": 1},
                 {"name": "site", "kind": "id", "offset": 2},
                 {"name": "article", "kind": "id", "offset": 500},
                 {"name": "article_count", "kind": "value", "id": "article"}]}
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from data_tools.click_logs import column_kinds
from deepfm.errors import BadInput
from deepfm.records.schema import MAX_NUMBER
from deepfm.records.storage import places

LABEL, WEIGHT, ID, VALUE, IDS, VALUES, COUNTS = (
    "label", "weight", "id", "value", "ids", "values", "counts",
)  # fmt: skip
# What the cells of each kind are.
KINDS = {
    LABEL: "0 and 1, or -1 and +1",
    WEIGHT: "the weight of the example",
    ID: 'the id of a field; "offset" is added to it',
    VALUE: 'the value of the id in column "id", or of the id that "id" is',
    IDS: "a list, the ids of all fields",
    VALUES: "a list, their values",
    COUNTS: "a list, how many ids each field has",
    column_kinds.IGNORED: "anything",
}
LISTS = (IDS, VALUES, COUNTS)
_ADVICE = {
    IDS: "a list of integers, as list<int64>",
    COUNTS: "a list of integers, as list<int64>",
    VALUES: "a list of numbers, as list<float>",
    ID: "an integer, as int64",
}
# What pandas calls its index in CSV and in Parquet, and what it calls one that it has read.
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


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
    """{"fields" or "columns": what decides which field an id is of}, for made.ids."""
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
        others = (x for x in names if x.lower() not in (LABEL, WEIGHT) and not _INDEX.fullmatch(x))
        return Layout(spelled.get(LABEL, LABEL), given[WEIGHT], tuple(map(Field, others)))
    return Layout(spelled.get(LABEL, LABEL), **given)


def load(path: str) -> Layout:
    """Reads the JSON file of --columns; raises BadInput if it is invalid."""
    try:
        with column_kinds.naming(path):
            content = places.of(path).content
            _, entries = column_kinds.entries(path, content, KINDS, ID, ("id", "offset"))
            column_kinds.check_names([entry["name"] for entry in entries])
            return _of_entries(entries)
    except ValueError as error:
        raise BadInput(f"--columns: {error}") from error


def _of_entries(entries):
    of_kind = lambda kind: [entry["name"] for entry in entries if entry["kind"] == kind]
    for kind in (LABEL, WEIGHT, *LISTS):
        if len(of_kind(kind)) > 1:
            one, other = of_kind(kind)[:2]
            raise ValueError(
                f'{one} and {other} are both of kind "{kind}"; give {other} kind "ignored"'
            )
    if not of_kind(LABEL):
        raise ValueError('none of the columns is of kind "label"; add it')
    single = {kind: next(iter(of_kind(kind)), None) for kind in (WEIGHT, *LISTS)}
    fields = _fields(entries, of_kind(ID))
    if bool(fields) == bool(single[IDS]) or not single[IDS] and (single[VALUES] or single[COUNTS]):
        raise ValueError(
            'ids are either in one column of lists, of kind "ids" (with "values" and "counts"), or '
            'in a column of kind "id" for each field; give the columns of one of the two'
        )
    order = tuple(entry["name"] for entry in entries)
    return Layout(of_kind(LABEL)[0], fields=fields, order=order, **single)


def _fields(entries, with_ids):
    """The Fields of the columns of kind id and value."""
    values = {}
    for entry in entries:
        name, kind, of = entry["name"], entry["kind"], entry.get("id")
        _check_keys(entry)
        if kind == VALUE and isinstance(of, str):
            if of not in with_ids:
                raise ValueError(f'column {name} has "id": "{of}", which is no column of kind "id"')
            if of in values:
                raise ValueError(f"columns {values[of]} and {name} both hold the values of {of}")
            values[of] = name
    fields = []
    for entry in entries:
        if entry["kind"] == ID:
            fields.append(Field(entry["name"], entry.get("offset", 0), values.get(entry["name"])))
        elif entry["kind"] == VALUE and not isinstance(entry["id"], str):
            fields.append(Field(None, entry["id"], entry["name"]))
    return tuple(fields)


def _check_keys(entry):
    """Refuses (ValueError) an id or an offset that is missing, out of place or no id."""
    name, kind = entry["name"], entry["kind"]
    for key, owner in (("id", VALUE), ("offset", ID)):
        if key in entry and kind != owner:
            raise ValueError(f'column {name} of kind "{kind}" has "{key}"; leave it out')
    if kind == VALUE and "id" not in entry:
        raise ValueError(
            f'column {name} is of kind "value", but of which id? Add "id": 1, an id for all rows, '
            'or "id": "x", the column of the ids'
        )
    number = entry.get("id", entry.get("offset", 0))
    if isinstance(number, str) and kind == VALUE:
        return
    if type(number) is not int or not 0 <= number < MAX_NUMBER:
        raise ValueError(f"column {name} has {number!r}, which is no id; try 1")


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
