"""Converts LibSVM or LibFFM lines, or tables of ids, to TFRecord files with their dataset.json.

An output file is made of pieces: contiguous parts of an input, which tasks write side by side and
which are joined in order at the end. So the records keep the order of the input.
"""

import dataclasses
import functools
import os
import posixpath
import time
from typing import List

import numpy as np

from data_tools.click_logs.splitting import SPLITS
from data_tools.common import publishing, record_files
from data_tools.common.shards import ALONE, Host
from data_tools.common.skipping import Skipping
from data_tools.libsvm import output_files, pieces, sources
from data_tools.libsvm.options import Options
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import codec, data_file
from deepfm.records.data_file import DataFile
from deepfm.records.dataset_json import METADATA
from deepfm.records.storage import places


def convert(options: Options, engine, host: Host = ALONE) -> List[DataFile]:
    """Converts, and returns the files that were written.

    No file gets its final name in output_dir before all are complete.

    Args:
        options: the flags.
        engine: who does the work.
        host: this host; each of several writes its own folder with its own dataset.json.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", partial=host.own_files, tables=True)
    source = sources.of(data, options)
    lines = source.schema
    if host.number > 1 and not lines.field_size and (lines.pad or lines.named_fields):
        raise BadInput(
            f"--field_size must be given on {host.number} hosts, because none of them sees all "
            "rows; try --field_size=39."
        )
    publishing.check_hosts(options.output_dir, host.number, data_file.TFRECORD)
    options = dataclasses.replace(options, output_dir=host.folder(options.output_dir))
    split = sources.split_of(options, source, host.number)
    kept = np.flatnonzero(split.shares).tolist() if split else ()
    folders = [os.path.join(options.output_dir, SPLITS[i]) for i in kept] or [options.output_dir]
    targets = [dataclasses.replace(options, output_dir=folder) for folder in folders]
    old = [output_files.prepare(data.files, target) for target in targets]
    with engine.scratch(options.output_dir, output_files.SCRATCH) as scratch:
        total = sum(file.bytes for file in data.files)
        codec.check_size(data.files[0].path, total, engine.number)
        counts = _count(engine, source, options, total)
        schema = source.complete(counts)
        tasks = pieces.plan(source.ranges, counts, options.num_files, split)
        names = output_files.names([r.path for r in source.ranges], options)
        outputs, every, parts = _write(
            engine, tasks, len(names) * len(targets), total, source, schema, options, scratch
        )
        schema = schema._replace(feature_size=schema.feature_size or every.max_id + 1)
        wholes = record_files.join(
            engine, {f"whole-{i}-{names[i % len(names)]}": x for i, x in parts.items()},
            options.compress, scratch, every.bytes,
        )  # fmt: skip
        files, published = [], []
        for i, (target, before) in enumerate(zip(targets, old)):
            outputs_of = range(i * len(names), (i + 1) * len(names))
            mine = [outputs[output] for output in outputs_of]
            paths = {x: wholes.get(f"whole-{j}-{x}") for x, j in zip(names, outputs_of)}
            filled = output_files.described(names, mine, target, paths)
            made, written = posixpath.join(scratch, f"target-{i}"), []
            places.of(made).make_dir(made)
            if filled:
                facts = functools.reduce(pieces.together, mine)
                written = output_files.describe(
                    made, schema, facts, filled, data, target, source.fields
                )
            paths[METADATA] = posixpath.join(made, METADATA)
            published.append((target.output_dir, written, before, paths))
            files += filled
        with engine.publishing(options.output_dir):
            publishing.publish(scratch, [x for x in published if x[1] or x[2]])
    seconds, by_column = time.monotonic() - start, "columns" in source.fields
    output_files.log_summary(files, schema, every, seconds, by_column)
    return files


def _count(engine, source, options, total):
    """[(rows, most fields in a row)] of each range; None if nothing needs them."""
    if not pieces.must_count(source.schema, options):
        return None
    counts = [(0, 0)] * len(source.ranges)
    work = functools.partial(pieces.counted, count=source.count)
    with engine.map(work, source.ranges, "Counting rows", total, pieces.both) as results:
        for index, _, found in results:
            counts[index] = pieces.both(counts[index], found)
    return counts


def _write(engine, tasks, num_outputs, total, source, schema, options, scratch):
    """Writes all pieces.

    Returns:
        (BlockFacts of each output, of all, {the index of an output that has rows: the paths of its
        pieces in order}).
    """
    outputs, every, paths = [pieces.NO_ROWS] * num_outputs, pieces.NO_ROWS, {}
    bad = Skipping(options.max_bad_records)
    work = functools.partial(
        pieces.written, write=source.write, schema=schema, folder=engine.folder(scratch)
    )
    with engine.map(work, tasks, "Converting", total, pieces.together, bad) as results:
        for _, (output, path), facts in results:
            paths[posixpath.basename(path)] = path
            outputs[output] = pieces.together(outputs[output], facts)
            every = pieces.together(every, facts)
            if every.negative and every.zero:
                raise BadInput(source.mixed_labels(schema))
    if every.max_id < 0:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    bad.log_total()
    parts = {}
    for piece in (piece for _, planned in tasks for piece in planned if piece.path in paths):
        if outputs[piece.output].rows:
            parts.setdefault(piece.output, []).append(paths[piece.path])
    return outputs, every, parts
