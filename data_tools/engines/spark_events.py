"""Calls a function on tasks, on an executor, and returns what is wrong with the input as results.

A task that raises is tried again, which helps against a lost disk, not against a bad record.

On Python 3.7, pyspark strips named tuples of their class, so a BadRecord travels as a plain tuple.
"""

import os
from typing import Any, Callable, Iterable, Iterator, Tuple

import pyspark

from deepfm.errors import BadInput
from deepfm.records.bad_record import BadRecord
from deepfm.records.storage import places

GOOD, BAD, REFUSED = range(3)  # a result, a BadRecord, the sentence of a BadInput


def own_folder(scratch: str) -> str:
    """Makes the folder of this attempt to run a task."""
    folder = os.path.join(scratch, f"attempt-{pyspark.TaskContext.get().taskAttemptId()}")
    places.of(folder).make_inner(folder)
    return folder


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


def joined(
    pairs: Iterable[Tuple[int, Any]],
    work: Callable[[Any], Iterable[Any]],
    together: Callable[[Any, Any], Any],
) -> Iterator[Tuple[int, int, Any]]:
    """`events` of what Processes.map takes; a result is a key and the joined values of a task."""
    values = {}
    for index, kind, event in events(pairs, work):
        if kind != GOOD:
            yield index, kind, event
            continue
        _, key, value = event
        place = index, key
        values[place] = together(values[place], value) if place in values else value
    yield from ((index, GOOD, (key, value)) for (index, key), value in values.items())
