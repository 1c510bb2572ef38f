"""What the records of a data set must look like, which of a batch do not, and the sentences for
these."""

import itertools
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from deepfm.config import MAX_NUMBER

NO_WEIGHT = "is not a finite number of at least 0"
LARGER = (
    f" (the largest id is {MAX_NUMBER - 1}; libsvm_to_tfrecord --hash_buckets=N hashes those of "
    "lines, prepare numbers those of tables)"
)
_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_MANY = 100
_PIECE = 64  # of a batch that is refused: the first bad record is found soon


class Shape(NamedTuple):
    """What a record shows of its data set.

    Attributes:
        field_size: F; None if the record cannot be read.
        multi_valued, weighted: see Schema.
    """

    field_size: Optional[int] = None
    multi_valued: bool = False
    weighted: bool = False


class Schema(NamedTuple):
    """What every record of a data set must look like.

    Attributes:
        field_size: F, the number of (id, value) pairs of a record.
        feature_size: rows of the embedding table; ids must be in [0, feature_size). None: the most
            that a table can have.
        pad: whether LibSVM rows shorter than F are filled with id 0 and value 0; id 0 is reserved.
        id_offset: added to each id of a LibSVM row (1 makes 0-based ids 1-based).
        multi_valued: whether a field may hold several values, or none.
        named_fields: whether the pairs of a line name their fields (LibFFM's `field:id:value`).
        field_ids: (first id, last id + 1) of each field, as written, if the ids of LibSVM lines
            determine their fields.
        hash_buckets: how many ids `hashed` makes of a line's strings; 0: its ids are numbers.
        with_labels: whether a TFRecord must hold a label; otherwise labels are 0, and weights are
            passed over (inference).
        weighted: whether records may hold a weight.
    """

    field_size: int
    feature_size: Optional[int] = None
    pad: bool = False
    id_offset: int = 0
    multi_valued: bool = False
    named_fields: bool = False
    field_ids: Optional[Tuple[Tuple[int, int], ...]] = None
    hash_buckets: int = 0
    with_labels: bool = True
    weighted: bool = False

    @property
    def limit(self) -> int:
        """The exclusive upper bound of all ids."""
        return self.feature_size or MAX_NUMBER

    @property
    def with_weights(self) -> bool:
        """Whether parsing gives a weight for each record."""
        return self.weighted and self.with_labels


def is_weight(number) -> bool:
    """Whether an example may have this weight."""
    return bool(np.isfinite(number)) and normal(number) >= 0


def explain_id(feature_id, schema):
    if feature_id < 0:
        return f"feature id {feature_id} is negative"
    if schema.pad and feature_id == 0 and not schema.multi_valued:
        return "feature id 0 is reserved for padding (--id_offset=1 shifts 0-based ids)"
    if schema.feature_size is not None and feature_id >= schema.feature_size:
        limit = f"feature_size {schema.feature_size}"
        return (
            f"feature id {feature_id} is not below {limit} (--feature_size is the largest id + 1)"
        )
    if feature_id >= schema.limit:
        return (
            f"feature id {feature_id} is not below {schema.limit}: no table has more rows{LARGER}"
        )
    return None


def explain_width(width, schema, what, sample):
    """Why a record with `width` of something does not fit the schema, or None if it does."""
    if width == schema.field_size or (schema.pad and width < schema.field_size):
        return None
    at_most, hint = "at most " if schema.pad else "", ""
    if width < schema.field_size and "pairs" in what:
        hint = " (libsvm_to_tfrecord --pad fills short rows)"
    elif width and (what == "counts" or not schema.multi_valued):
        hint = f" (--field_size={width} if all records are so)"
    return f"expected {at_most}{schema.field_size} {what}, found {width}{hint}: {sample}"


def normal(numbers):
    """float32 as TensorFlow's threads see them: denormal numbers are 0, of the same sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.asarray(numbers, np.float32)
        return np.where(np.abs(x) < _SMALLEST_NORMAL, 0 * x, x)[()]


class BadRecord(NamedTuple):
    """A record that breaks the schema: its file, place (line, or record and byte) and reason.

    `few` says whether few others near it are bad, so that it makes sense to skip them.
    """

    path: str
    place: str
    reason: str
    few: bool = True

    def __str__(self):
        return f"{self.path}{self.place}: {self.reason}"


def find_refused(
    accepts: Callable[[Sequence[Any]], bool],
    payloads: Sequence[Any],
    explain: Callable[[Any], Optional[str]],
    unexplained: str,
    trusted: bool = False,
) -> Iterator[Tuple[int, str]]:
    """Yields (index, reason) of each payload that a batch parser refuses, in order.

    The parser alone decides, unless the plain reader is trusted. But what the reader finds bad is
    put to it one by one, and the rest at once: where many are bad that is much faster than to look
    for each by halving.

    Args:
        accepts: whether the parser accepts a batch; it must refuse one that holds a bad payload.
        payloads: the batch.
        explain: what is wrong with a payload; None where nothing is.
        unexplained: the reason where `explain` has none.
        trusted: whether what `explain` finds bad is not put to the parser, which is slow.
    """
    if not payloads or accepts(payloads):
        return
    for start in range(0, len(payloads), _PIECE):
        piece = payloads[start : start + _PIECE]
        if accepts(piece):
            continue
        reasons = [explain(payload) for payload in piece]
        rest = [payload for payload, reason in zip(piece, reasons) if not reason]
        sure = not rest or accepts(rest)
        for i, (payload, reason) in enumerate(zip(piece, reasons), start):
            asked = reason or not sure
            if reason and trusted or asked and not accepts([payload]):
                yield i, reason or unexplained


def sifted(
    block: Any,
    accept: Callable[[Any], Any],
    explain: Callable[[Any, int], Optional[str]],
    unexplained: str,
    trusted: bool = False,
) -> Iterator[Union[BadRecord, Any]]:
    """Yields a BadRecord for each bad record of a block, then what the others become, if any.

    Args:
        block: has a `path`, a length, `take(indices of records)`, which is a block of these, and
            `place(i)`, as in a BadRecord.
        accept: what a block becomes; None if a record is bad.
        explain: (block, index of a record) -> what is wrong with it; None if nothing is.
        unexplained, trusted: as of `find_refused`.
    """
    found = accept(block)
    if found is not None:
        yield found
        return
    good = dict.fromkeys(range(len(block)))

    def bad():
        accepts = lambda some: accept(block.take(some)) is not None
        of_block = lambda i: explain(block, i)
        for i, reason in find_refused(accepts, range(len(block)), of_block, unexplained, trusted):
            del good[i]
            yield BadRecord(block.path, block.place(i), reason)

    yield from _marked(bad(), len(block))
    if good:
        yield accept(block.take(list(good)))


def _marked(bad: Iterable[BadRecord], rows: int) -> Iterator[BadRecord]:
    """The bad records of a block of so many rows; `few` are at most half and less than _MANY."""
    first = list(itertools.islice(bad, _MANY))
    few = len(first) < _MANY and 2 * len(first) <= rows
    return (record._replace(few=few) for record in itertools.chain(first, bad))
