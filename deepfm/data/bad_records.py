"""Which record is wrong: found before a job starts, or after reading it stopped the job.

The input pipeline parses a batch at a time and names no record when it refuses it. Here the codec
and the formats' slow, plain readers look at one record at a time, and past damage.
"""

import contextlib
import itertools
from typing import Iterator, Optional, Sequence, Tuple

from absl import logging

from deepfm.data import datasets, identity, shares
from deepfm.data.formats import LIBSVM, Format
from deepfm.data.records import Schema
from deepfm.errors import BadInput
from deepfm.records.schema import BadRecord
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf

CHUNK = 4096  # records that are checked at once
_REPORTED = 1000  # most skipped records that a report lists
CHECKED_FILES = 64  # files whose first records are looked at before a job starts


def find_bad(
    path: str, record_format: Format, schema: Schema, first: Optional[int] = None
) -> Iterator[BadRecord]:
    """Yields the bad records of a file, in order.

    Whole chunks go through the codec; only a chunk that it refuses is looked at slowly. With
    `first`, looks at that many records only.
    """
    records = itertools.islice(record_format.numbered(path), first)
    for chunk in iter(lambda: list(itertools.islice(records, CHUNK)), []):
        for unread, group in itertools.groupby(chunk, key=lambda item: item[1] is None):
            group = list(group)
            if unread:
                yield from (BadRecord(path, place, reason) for place, _, reason in group)
                continue
            payloads = [payload for _, payload, _ in group]
            for i, reason in record_format.refused(payloads, schema):
                yield BadRecord(path, group[i][0], reason)


def check_first_records(data: datasets.DataSet, schema: Schema):
    """Refuses (BadInput) data whose first records, in any of its first files, break the schema."""
    for file in data.files[:CHECKED_FILES]:
        for record in find_bad(file.path, data.format, schema, CHUNK):
            raise BadInput(str(record))


def find_damaged(
    data: datasets.DataSet, schema: Schema, allowed: int
) -> Tuple[shares.Skipped, ...]:
    """Looks at every record and finds the files with bad ones, for the job to pass over.

    Raises BadInput if more than `allowed`, --max_bad_records, are bad. With 0 nothing is looked at,
    and the first bad record that is met in training stops it.
    """
    if not allowed:
        return ()
    logging.info("Checking every record, because --max_bad_records=%d.", allowed)
    damaged, count = [], 0
    for file in data.files:
        places = {}
        for record in find_bad(file.path, data.format, schema):
            count += 1
            if count > allowed:
                raise BadInput(
                    f"{record}; this is more than --max_bad_records={allowed} bad records."
                )
            logging.warning("Skipped: %s", record)
            places[record.place] = record.reason
        if places:
            damaged.append(shares.Skipped(file.path, places))
    logging.info("Skipping %d bad records.", count)
    return tuple(damaged)


def with_stand_in(data: datasets.DataSet, damaged: Sequence[shares.Skipped]) -> list:
    """The damaged files, where the first good record stands in for each bad one."""
    bad = {(file.path, place) for file in damaged for place in file.places}
    records = ((file.path, x) for file in data.files for x in data.format.numbered(file.path))
    good = (x[1] for path, x in records if (path, x[0]) not in bad)
    stand_in = next(good, b"") if damaged else None  # b"": reading ends at the first bad one
    return [file._replace(stand_in=stand_in) for file in damaged]


def reported(damaged: Sequence[shares.Skipped]) -> dict:
    """What a report says about the records that were skipped."""
    bad = [
        {"file": file.path, "place": place.lstrip(":").strip(), "reason": reason}
        for file in damaged
        for place, reason in file.places.items()
    ]
    return {"skipped_records": len(bad), "skipped": bad[:_REPORTED]}


def place_of(data: datasets.DataSet, number: int) -> str:
    """Which record of a data set's files is the one of this number, from 0; it reads all before."""
    records = (
        f"{file.path}{place}"
        for file in data.files
        for place, *_ in data.format.numbered(file.path)
    )
    return next(itertools.islice(records, number, None))


@contextlib.contextmanager
def naming_bad_records(data: datasets.DataSet, schema: Schema):
    """Turns an error of the input pipeline, which names no record, into a BadInput that does.

    A channel cannot be read again to find the record; there the channel is named.
    """
    try:
        yield
    except tf.errors.OpError as error:
        kinds = tf.errors.InvalidArgumentError, tf.errors.DataLossError
        # What failed is in a function of the data set; the graph's operator takes a batch of it.
        of_records = "IteratorGetNext" in error.message
        if data.pipe and of_records and isinstance(error, (*kinds, tf.errors.InternalError)):
            reason = error.message.strip().splitlines()[0].rstrip(".")
            hint = "" if schema.weighted else " Records with weights need --example_weights."
            if data.format is LIBSVM:
                hint += " With input mode File, the line is named."
            else:
                hint += " LibSVM needs --data_format=libsvm."
            raise BadInput(
                f"{data.name}: {reason}. Its FIFO was cut short, or it contains something other "
                f"than {data.format.title} records (Pipe mode sends every object under a prefix, "
                f"including dataset.json: end the prefix with 'part-').{hint}"
            ) from error
        if not data.pipe:
            identity.check_unchanged(data)
        distant = bool(data.files) and remote_files.is_remote(data.files[0].path)
        seen = error
        if isinstance(error, kinds) and of_records:
            logging.info("Reading failed; looking for the bad record ...")
            try:
                for file in data.files:
                    for record in find_bad(file.path, data.format, schema):
                        raise BadInput(str(record)) from error
            except remote_files.TROUBLE as trouble:
                if not distant:
                    raise
                seen = trouble
        elif not any(file.path in error.message for file in data.files):
            raise
        if not distant:
            raise
        raise remote_files.ended_early(data.name, remote_files.cause(seen)) from error
