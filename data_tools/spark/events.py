"""Calls a function on tasks, on an executor, and returns what is wrong with the input as results.

A task that raises is tried again, which helps against a lost disk, not against a bad record.

On Python 3.7, pyspark strips named tuples of their class, so a BadRecord travels as a plain tuple.
"""

from typing import Any, Callable, Iterable, Iterator, Tuple

from deepfm.errors import BadInput
from deepfm.records.bad_record import BadRecord

GOOD, BAD, REFUSED = range(3)  # a result, a BadRecord, the sentence of a BadInput


def events(
    pairs: Iterable[Tuple[int, Any]], work: Callable[[Any], Iterable[Any]]
) -> Iterator[Tuple[int, int, Any]]:
    """Yields (index, kind of event, event) of all that `work` yields for each (index, task)."""
    for index, task in pairs:
        try:
            for event in work(task):
                if isinstance(event, BadRecord):
                    yield index, BAD, tuple(event)
                else:
                    yield index, GOOD, event
        except BadInput as error:
            yield index, REFUSED, str(error)
