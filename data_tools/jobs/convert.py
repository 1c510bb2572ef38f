"""Converts LibSVM or LibFFM lines, or tables of ids, to TFRecord files with their dataset.json.

An output file is made of pieces: contiguous parts of an input, which tasks write side by side and
which are joined in order at the end. So the records keep the order of the input.
"""

import dataclasses
import functools
import os
import posixpath
import time
from typing import Dict, List, Sequence

import numpy as np
from absl import logging

from data_tools.click_logs.splitting import SPLITS
from data_tools.common import progress, publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.libsvm import pieces, sources
from data_tools.libsvm.options import Options
from data_tools.libsvm.pieces import BlockFacts
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import codec, data_file, dataset_json
from deepfm.records.data_file import DataFile
from deepfm.records.dataset_json import METADATA
from deepfm.records.storage import places

SCRATCH = ".libsvm_to_tfrecord-"


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
    old = [_replaced(data.files, target) for target in targets]
    with engine.scratch(options.output_dir, SCRATCH) as scratch:
        total = sum(file.bytes for file in data.files)
        codec.check_size(data.files[0].path, total, engine.number)
        counts = _count(engine, source, options, total)
        schema = source.complete(counts)
        tasks = pieces.plan(source.ranges, counts, options.num_files, split)
        names = _names([r.path for r in source.ranges], options)
        outputs, every, parts = _write(
            engine, tasks, len(names) * len(targets), total, source, schema, options, scratch
        )
        schema = schema._replace(feature_size=schema.feature_size or every.max_id + 1)
        wholes = pieces.join(
            engine, {f"whole-{i}-{names[i % len(names)]}": x for i, x in parts.items()},
            options.compress, scratch, every.bytes,
        )  # fmt: skip
        files, published = [], []
        for i, (target, before) in enumerate(zip(targets, old)):
            outputs_of = range(i * len(names), (i + 1) * len(names))
            mine = [outputs[output] for output in outputs_of]
            paths = {x: wholes.get(f"whole-{j}-{x}") for x, j in zip(names, outputs_of)}
            filled = _described(names, mine, target, paths)
            folder, written = posixpath.join(scratch, f"target-{i}"), []
            places.of(folder).make_dir(folder)
            if filled:
                facts = functools.reduce(pieces.together, mine)
                written = _describe(folder, schema, facts, filled, data, target, source.fields)
            paths[METADATA] = posixpath.join(folder, METADATA)
            published.append((target.output_dir, written, before, paths))
            files += filled
        with engine.publishing(options.output_dir):
            publishing.publish(scratch, [x for x in published if x[1] or x[2]])
    seconds, by_column = time.monotonic() - start, "columns" in source.fields
    _log_summary(files, schema, every, seconds, by_column)
    return files


def _count(engine, source, options, total):
    """[(rows, most fields in a row)] of each range; None if nothing needs them."""
    if not pieces.must_count(source.schema, options):
        return None
    counts = [(0, 0)] * len(source.ranges)
    with engine.map(source.count, source.ranges, "Counting rows", total, pieces.both) as results:
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


def _replaced(inputs: Sequence[DataFile], options):
    """Checks output_dir; returns the names in it that the new data set replaces."""
    folder = options.output_dir
    old = publishing.names_in(folder, data_file.TFRECORD)
    same = [] if options.num_files else _names([f.path for f in inputs], options)
    return publishing.replaced(folder, old, options.overwrite, same)


def _names(paths: Sequence[str], options):
    """The names of the output files for input files, in the order of pieces.plan."""
    n = options.num_files
    if n:
        return [f"part-{i:05d}-of-{n:05d}{_suffix(options)}" for i in range(n)]
    return _names_after(sorted(set(paths)), options)


def _suffix(options):
    return ".tfrecords.gz" if options.compress else ".tfrecords"


def _names_after(paths, options):
    """Names of output files: the inputs' paths below their common folder, with our suffix."""
    top = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    names = []
    suffixes = data_file.LIBSVM + data_file.CSV + data_file.PARQUET
    for path in paths:
        name = os.path.relpath(path, top).replace(os.sep, "-")
        suffix = next((s for s in suffixes if name.endswith(s)), "")
        names.append(name[: len(name) - len(suffix)] + _suffix(options))
    for path, name in zip(paths, names):
        if names.count(name) > 1:
            raise BadInput(f"{path}: another input would also become {name}; give --num_files.")
    return names


def _described(names, outputs: Sequence[BlockFacts], options, paths: Dict[str, str]):
    """The files of the data set, with the paths that they will have in output_dir.

    Args:
        names: of all files.
        outputs: facts about each.
        paths: {name: where a file is now}, of those that have rows.
    """
    for name, facts in zip(names, outputs):
        if not facts.rows:
            logging.warning("%s would have no rows, so it is not written.", name)
    filled = [(name, facts) for name, facts in zip(names, outputs) if facts.rows]
    folder = options.output_dir
    sizes = places.each(folder, places.of(folder).size, [paths[name] for name, _ in filled])
    return [
        DataFile(posixpath.join(folder, name), size, facts.rows, facts.positives)
        for (name, facts), size in zip(filled, sizes)
    ]


def _describe(folder, schema, every: BlockFacts, files: List[DataFile], data, options, fields):
    """Writes dataset.json into a folder; returns the names of all that is to be published.

    Args:
        folder: where.
        schema: Schema of the rows.
        every: facts about all rows.
        files: from `_described`.
        data: DataSet of the input.
        fields: InputRows.fields.
    """
    feature_size, known = schema.feature_size or every.max_id + 1, data.made.get("ids", {})
    ids = {
        **known, **fields, "hash_buckets": schema.hash_buckets,
        "id_offset": known.get("id_offset", 0) + options.id_offset,
        "pad": options.pad or known.get("pad", False),
    }  # fmt: skip
    dataset_json.write(
        folder, schema.field_size, feature_size, files,
        multi_valued=schema.multi_valued, hash_buckets=schema.hash_buckets,
        feature_map=None if options.id_offset or options.hash_buckets else data.feature_map,
        weighted=schema.weighted, ids=dataset_json.ids(**ids),
        value_ranges=pieces.ranges(every.low, every.high),
    )  # fmt: skip
    return [*(os.path.basename(file.path) for file in files), dataset_json.METADATA]


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
        rows, positives / rows, schema.field_size, schema.feature_size or every.max_id + 1,
        len(files), seconds,
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
