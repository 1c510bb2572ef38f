"""Finds the record that is wrong: before a job starts, or after reading it stopped the job."""

import contextlib
import zlib
from typing import Tuple

import tensorflow as tf
from absl import logging

from deepfm.data import bad_records, datasets, identity, reading, records
from deepfm.data.bad_records import find_bad
from deepfm.errors import BadInput
from deepfm.runtime import remote_files

_CHECKED_FILES = 64  # files whose first records are looked at before a job starts


def check_gzip(data: datasets.DataSet):
    """Refuses (BadInput) gzip files that TensorFlow would read a part of and take for whole.

    That is a file which is cut short, now and then, and one of several members (`cat a.gz b.gz`),
    always. Unpacks every .gz file once.
    """
    for path in (file.path for file in data.files if file.path.endswith(".gz")):
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip's header and trailer
        try:
            with tf.io.gfile.GFile(path, "rb") as f:
                for block in iter(lambda f=f: f.read(1 << 20), b""):
                    unpack.decompress(block)
                    if unpack.eof:
                        break
                more = unpack.unused_data or f.read(1)
        except zlib.error as error:
            raise BadInput(f"{path}: is damaged as a gzip file ({error}).") from error
        if not unpack.eof:
            raise BadInput(f"{path}: is not whole as a gzip file; its end is missing.")
        if more:
            raise BadInput(
                f"{path}: has several gzip members, of which TensorFlow reads the first only; "
                "make it one with 'zcat FILE | gzip > OTHER'."
            )


def check_first_records(data: datasets.DataSet, schema: records.Schema, with_labels=True):
    """Refuses (BadInput) data whose first records, in any of its first files, break the schema."""
    for file in data.files[:_CHECKED_FILES]:
        bad = find_bad(file.path, data.data_format, schema, with_labels, bad_records.CHUNK)
        for record in bad:
            raise BadInput(str(record))


def find_damaged(
    data: datasets.DataSet, schema: records.Schema, allowed: int
) -> Tuple[reading.Skipped, ...]:
    """Looks at every record and finds the files with bad ones, for training to pass over.

    Args:
        data: the files.
        schema: what each record must look like.
        allowed: --max_bad_records; with 0 nothing is looked at, and the first bad record that is
            met in training stops it.

    Raises:
        BadInput: more than `allowed` records are bad.
    """
    if not allowed:
        return ()
    logging.info("Looking at every record, as --max_bad_records=%d asks.", allowed)
    damaged, count = [], 0
    for file in data.files:
        places = {}
        for record in find_bad(file.path, data.data_format, schema):
            count += 1
            if count > allowed:
                raise BadInput(f"{record}; more bad records than --max_bad_records={allowed}.")
            logging.warning("Skipped: %s", record)
            places[record.place] = record.reason
        if places:
            damaged.append(reading.Skipped(file.path, places))
    logging.info("%d bad records are passed over.", count)
    return tuple(damaged)


def count_rows(data: datasets.DataSet) -> datasets.DataSet:
    """The data set with the rows of every file; reads those that no dataset.json describes."""
    if data.rows is not None:
        return data
    logging.info("Counting records, as no dataset.json tells them.")
    count = lambda file: bad_records.count(file.path, data.data_format)
    files = [f if f.rows is not None else f._replace(rows=count(f)) for f in data.files]
    return data._replace(files=files)


def check_unchanged(data: datasets.DataSet):
    """Refuses (BadInput) files that are gone or are others than at the beginning.

    Of local files the size is looked at, of files that were identified the content.
    """
    for file in data.files:
        if remote_files.is_remote(file.path):
            continue
        if not tf.io.gfile.exists(file.path):
            raise BadInput(f"{file.path}: is gone; it was there when the job began.")
        size = tf.io.gfile.stat(file.path).length
        if size != file.bytes:
            raise BadInput(
                f"{file.path}: had {file.bytes:,} bytes when the job began and has {size:,} now; "
                "train on files that nobody writes to."
            )
    changed = identity.differing({f.path: f.identity for f in data.files if f.identity})
    if changed:
        raise BadInput(
            f"{changed}: is another file than when the job began; train on files that nobody "
            "writes to."
        )


@contextlib.contextmanager
def naming_damaged_cache(cache: str):
    """Turns an error of a cache file (`--cache`), which has no bad records, into one that says what
    to do."""
    kinds = tf.errors.DataLossError, tf.errors.InternalError, tf.errors.NotFoundError
    try:
        yield
    except kinds as error:
        if cache in ("none", "memory"):
            raise
        text = remote_files.cause(error).rpartition("Original message: ")[2]
        kind = type(error).__name__
        why = text if text.startswith(kind) else f"{kind}: {text}"
        raise OSError(
            f"--cache={cache} cannot be read or written ({why}); delete {cache}-* and run the same "
            "command again."
        ) from error


@contextlib.contextmanager
def naming_bad_records(data: datasets.DataSet, schema: records.Schema, with_labels=True):
    """Turns an error of the input pipeline, which names no record, into a BadInput that does.

    A channel cannot be read again to find the record; there the channel is named.
    """
    try:
        yield
    except tf.errors.OpError as error:
        kinds = tf.errors.InvalidArgumentError, tf.errors.DataLossError
        if data.pipe and isinstance(error, (*kinds, tf.errors.InternalError)):
            reason = error.message.strip().splitlines()[0].rstrip(".")
            raise BadInput(
                f"{data.name}: {reason}. Its FIFO was cut short, or it holds other than TFRecords "
                "(Pipe mode sends every object under a prefix, dataset.json too: end the prefix "
                "with 'part-')."
            ) from error
        if not data.pipe:
            check_unchanged(data)
        distant = bool(data.files) and remote_files.is_remote(data.files[0].path)
        if not isinstance(error, kinds):
            if distant and any(file.path in error.message for file in data.files):
                raise remote_files.ended_early(data.name, remote_files.cause(error)) from error
            raise
        logging.info("Reading failed; looking for the bad record ...")
        try:
            for file in data.files:
                for record in find_bad(file.path, data.data_format, schema, with_labels):
                    raise BadInput(str(record)) from error
        except remote_files.TROUBLE as trouble:
            if distant:
                raise remote_files.ended_early(data.name, remote_files.cause(trouble)) from error
            raise
        if distant:
            raise remote_files.ended_early(data.name, remote_files.cause(error)) from error
        raise
