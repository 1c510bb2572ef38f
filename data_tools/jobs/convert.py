"""Converts LibSVM or LibFFM lines, or tables of ids, to TFRecord files with their dataset.json.

An output file is made of pieces: contiguous parts of an input, which tasks write side by side and
which are joined in order at the end. So the records keep the order of the input.
"""

import dataclasses
import functools
import os
import posixpath
import time
from typing import List, Sequence

import numpy as np
from absl import logging

from data_tools.click_logs.splitting import SPLITS
from data_tools.common import progress, publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.libsvm import pieces, sources
from data_tools.libsvm.options import ConvertOptions
from data_tools.libsvm.pieces import BlockFacts
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import codec, data_file, dataset_json
from deepfm.records.data_file import DataFile

SCRATCH = ".libsvm_to_tfrecord-"


def convert(options: ConvertOptions, engine, host: Host = ALONE) -> List[DataFile]:
    """Converts, and returns the files that were written.

    No file gets its final name in output_dir before all are complete. Each of several hosts writes
    its own folder with its own dataset.json.

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
    old = [_replaced(data.files, folder, options) for folder in folders]
    with engine.scratch(options.output_dir, SCRATCH) as scratch:
        total = sum(file.bytes for file in data.files)
        counts = _count(engine, source, options, total)
        schema = sources.with_field_size(source, counts, options)
        tasks = pieces.plan(source.ranges, counts, options.num_files, split)
        names = _names([r.path for r in source.ranges], options)
        outputs, every, parts = _write(
            engine, tasks, len(names) * len(folders), total, source, schema, options, scratch
        )
        schema = schema._replace(feature_size=schema.feature_size or every.max_id + 1)
        wholes = pieces.join(
            engine, {f"whole-{i}-{names[i % len(names)]}": x for i, x in parts.items()},
            options.compress, scratch, every.bytes,
        )  # fmt: skip
        files, published = [], []
        for i, (folder, before) in enumerate(zip(folders, old)):
            found, every_of = {}, pieces.NO_ROWS
            for j, name in enumerate(names, i * len(names)):
                if outputs[j].rows:
                    found[name] = wholes[f"whole-{j}-{name}"], outputs[j]
                    every_of = pieces.together(every_of, outputs[j])
                else:
                    logging.warning("%s would have no rows, so it is not written.", name)
            write = functools.partial(_describe, schema, every_of, data, options, source.fields)
            made = posixpath.join(scratch, f"target-{i}")
            described, paths = publishing.describe(folder, made, found, write)
            files += described
            if paths or before:
                published.append((folder, paths, before))
        with engine.publishing(options.output_dir):
            publishing.publish(scratch, published)
    _log_summary(files, schema, every, time.monotonic() - start, "columns" in source.fields)
    return files


def _count(engine, source, options, total):
    """[(rows, most fields in a row)] of each range; None if nothing needs them."""
    if not pieces.must_count(source.schema, options):
        return None
    counts = [(0, 0)] * len(source.ranges)
    count = functools.partial(source.reader.count, schema=source.schema)
    with engine.map(count, source.ranges, "Counting rows", total, pieces.both) as results:
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
    bad = progress.Skipping(options.max_bad_records)
    work = functools.partial(
        pieces.write, reader=source.reader, schema=schema, folder=engine.folder(scratch)
    )
    with engine.map(work, tasks, "Converting", total, pieces.together, bad) as results:
        for _, (output, path), facts in results:
            if facts.rows:
                paths[posixpath.basename(path)] = path
            outputs[output] = pieces.together(outputs[output], facts)
            every = pieces.together(every, facts)
            if every.negative and every.zero:
                raise BadInput(sources.mixed_labels(source, schema))
    if every.max_id < 0:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    bad.log_total()
    parts = {}
    for piece in (piece for _, planned in tasks for piece in planned if piece.path in paths):
        parts.setdefault(piece.output, []).append(paths[piece.path])
    return outputs, every, parts


def _replaced(inputs: Sequence[DataFile], folder, options):
    """Checks a folder; returns the names in it that the new data set replaces."""
    old = publishing.names_in(folder, data_file.TFRECORD)
    same = [] if options.num_files else _names([f.path for f in inputs], options)
    return publishing.replaced(folder, old, options.overwrite, same)


def _names(paths: Sequence[str], options):
    """The names of the output files for input files, in the order of pieces.plan.

    Without --num_files, they are the inputs' paths below their common folder, with our suffix.
    """
    n, ending = options.num_files, ".tfrecords.gz" if options.compress else ".tfrecords"
    if n:
        return [f"part-{i:05d}-of-{n:05d}{ending}" for i in range(n)]
    paths, names = sorted(set(paths)), []
    top = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    suffixes = data_file.LIBSVM + data_file.CSV + data_file.PARQUET
    for path in paths:
        name = os.path.relpath(path, top).replace(os.sep, "-")
        suffix = next((s for s in suffixes if name.endswith(s)), "")
        names.append(name[: len(name) - len(suffix)] + ending)
    for path, name in zip(paths, names):
        if names.count(name) > 1:
            raise BadInput(f"{path}: another input would also become {name}; give --num_files.")
    return names


def _describe(schema, every: BlockFacts, data, options, fields, folder, files: List[DataFile]):
    """Writes dataset.json into a folder; `fields` are those of an InputRows."""
    known = data.made.get("ids", {})
    ids = {
        **known, **fields, "hash_buckets": schema.hash_buckets,
        "id_offset": known.get("id_offset", 0) + options.id_offset,
        "pad": options.pad or known.get("pad", False),
    }  # fmt: skip
    dataset_json.write(
        folder, schema.field_size, schema.feature_size, files, data.sampling_rates,
        feature_map=None if options.id_offset or options.hash_buckets else data.feature_map,
        hash_buckets=schema.hash_buckets, weighted=schema.weighted, ids=dataset_json.ids(**ids),
        multi_valued=schema.multi_valued, value_ranges=pieces.ranges(every.low, every.high),
        unknown_shares=data.whole and every.rows == data.rows and data.made.get("unknown_shares"),
    )  # fmt: skip


def _log_summary(files: List[DataFile], schema, every: BlockFacts, seconds: float, by_column: bool):
    """Logs what was written, how fast, and what fields look wrong."""
    progress.log_examples(files)
    low, high = every.low[0], every.high[0]
    if schema.named_fields and (low > high or low == high == 0):
        logging.warning(
            "No row has a value in field 0, so it stays empty: fields are counted from 0."
        )
    if schema.named_fields or by_column:
        _warn_of_shared_ids(files[0].path, schema)
    rows, positives = sum(f.rows for f in files), sum(f.positives for f in files)
    logging.info(
        "Wrote %d rows (%.4f of them positive) of %d fields, feature_size %d, to %d files in "
        "%.1f s: %.0f rows/s.",
        rows, positives / rows, schema.field_size, schema.feature_size, len(files), seconds,
        rows / seconds,
    )  # fmt: skip


def _warn_of_shared_ids(path, schema):
    """Warns if the first records have an id in several fields."""
    batch = codec.decode(*progress.first_frames(path), schema)
    ids, fields = batch.ids, np.tile(np.arange(schema.field_size), (len(batch.ids), 1))
    if batch.counts is not None:
        fields = fields.repeat(batch.counts.ravel())
        ids = ids[np.arange(ids.shape[1]) < batch.counts.sum(1)[:, np.newaxis]]
    pairs = np.unique(np.stack([ids.ravel(), fields.ravel()]), axis=1)
    shared, counts = np.unique(pairs[0], return_counts=True)
    number = np.count_nonzero((counts > 1) & (shared > 0))  # 0 stands for a missing field
    if number:
        logging.warning(
            "Of the first %d rows, %d ids are in more than one field; these fields share "
            "embeddings. If each field counts its ids by itself, shift them (docs/data.md).",
            len(batch.labels), number,
        )  # fmt: skip
