"""Writes the rows of a slice as records; what executors need, without TensorFlow and absl."""

import os
from typing import Callable, Iterator

from data_tools.click_logs import slices
from data_tools.click_logs.feature_map import STEPS, end_of
from data_tools.click_logs.splitting import SPLITS
from data_tools.libsvm.line_format import line_writer
from deepfm.errors import naming
from deepfm.records import codec, data_file
from deepfm.records.bad_record import BadRecord
from deepfm.records.storage import places

SUFFIXES = {"tfrecord": data_file.TFRECORD[0], "libsvm": data_file.LIBSVM[0]}


def encode(task, fields: Callable, output_format: str, folder: Callable[[], str]) -> Iterator:
    """The events of an engine's task that encodes the rows of a slice.

    Args:
        task: a RawSlice.
        fields: returns the Field of each field.
        output_format: a key of SUFFIXES.
        folder: of the engine.

    Yields:
        BadRecords, and (bytes read, (index in SPLITS, name of the file, its path), BlockFacts).
    """
    fields, top = fields(), folder()
    for split in SPLITS:
        path = os.path.join(top, split)
        places.of(path).make_inner(path)
    to_bytes = _records if output_format == "tfrecord" else _lines(end_of(fields[-1]))
    with naming(top), places.appending(len(SPLITS)) as put:
        append = lambda path, *rows: put(path, to_bytes(*rows))
        suffix = SUFFIXES[output_format]
        for event in slices.encode_rows(task, fields, append, top, suffix):
            if isinstance(event, BadRecord):
                yield event
            else:
                read, (split, name, facts) = event
                yield read, (split, name, os.path.join(top, SPLITS[split], name)), facts


def _records(labels, ids, values):
    return codec.encode(labels, ids, values)[0]


def _lines(feature_size):
    to_lines = line_writer(feature_size, STEPS)
    return lambda labels, ids, values: to_lines(ids, values, labels > 0)
