"""Writes the rows of a slice as records; what executors need, without TensorFlow and absl."""

import os
from typing import Callable, Iterator

import numpy as np

from data_tools.click_logs import field_tables, slices
from data_tools.click_logs.feature_map import STEPS, end_of
from data_tools.click_logs.splitting import SPLITS, split_of
from data_tools.libsvm.line_format import line_writer
from data_tools.libsvm.pieces import BlockFacts
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
    fields, top, name = fields(), folder(), task.name + SUFFIXES[output_format]
    paths = [os.path.join(top, split, name) for split in SPLITS]
    for path in paths:
        places.of(path).make_inner(os.path.dirname(path))
    to_bytes = _records if output_format == "tfrecord" else _lines(end_of(fields[-1]))
    with naming(top), places.appending(len(SPLITS)) as put:
        for read, block in slices.read_rows(task.lines, task.layout):
            if isinstance(block, BadRecord):
                yield block
                continue
            ids, values = field_tables.encode(block, fields)
            unknown = field_tables.unknown(block, fields, ids)
            splits = split_of(task.split, task.lines.path, block.starts)
            for split in np.unique(splits).tolist():
                mine = splits == split
                labels, of_split = block.labels[mine], values[mine]
                put(paths[split], to_bytes(labels, ids[mine], of_split))
                tallies = of_split.min(0), of_split.max(0), unknown[mine].sum(0)
                facts = BlockFacts(len(labels), int(labels.sum()), 0, False, False, *tallies)
                yield read, (split, name, paths[split]), facts
                read = 0


def _records(labels, ids, values):
    return codec.encode(labels, ids, values)[0]


def _lines(feature_size):
    to_lines = line_writer(feature_size, STEPS)
    return lambda labels, ids, values: to_lines(ids, values, labels > 0)
