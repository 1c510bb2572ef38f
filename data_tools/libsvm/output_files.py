"""The names of the output files of libsvm_to_tfrecord, and what they replace; the same on Spark.

`options` is always an Options.
"""

import itertools
import os
import posixpath
from typing import Dict, List, Sequence

import numpy as np
from absl import logging

from data_tools.common import publishing
from data_tools.libsvm import pieces
from data_tools.libsvm.pieces import BlockFacts
from deepfm.errors import BadInput
from deepfm.records import codec, data_file, dataset_json, frames, wire
from deepfm.records.data_file import DataFile
from deepfm.records.storage import places

SCRATCH = ".libsvm_to_tfrecord-"


def prepare(inputs: Sequence[DataFile], options):
    """Checks output_dir; returns the names in it that the new data set replaces."""
    folder = options.output_dir
    old = publishing.names_in(folder, data_file.TFRECORD)
    same = [] if options.num_files else names([f.path for f in inputs], options)
    return publishing.replaced(folder, old, options.overwrite, same)


def names(paths: Sequence[str], options):
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


def described(names, outputs: Sequence[BlockFacts], options, paths: Dict[str, str]):
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


def describe(scratch: str, schema, every: BlockFacts, files: List[DataFile], data, options, fields):
    """Writes dataset.json into scratch; returns the names of all that is to be published.

    Args:
        scratch: the folder.
        schema: Schema of the rows.
        every: facts about all rows.
        files: from `described`.
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
        scratch, schema.field_size, feature_size, files,
        multi_valued=schema.multi_valued, hash_buckets=schema.hash_buckets,
        feature_map=None if options.id_offset or options.hash_buckets else data.feature_map,
        weighted=schema.weighted, ids=dataset_json.ids(**ids),
        value_ranges=pieces.ranges(every.low, every.high),
    )  # fmt: skip
    return [*(os.path.basename(file.path) for file in files), dataset_json.METADATA]


def log_summary(files: List[DataFile], schema, every: BlockFacts, seconds: float, by_column: bool):
    """Logs what was written, how fast, and what fields look wrong."""
    log_examples(files)
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


def log_examples(files: List[DataFile]):
    """Logs the first two records as they are stored, a line each."""
    path = next((file.path for file in files if file.rows), None)
    if not path:  # this host has none
        return
    if path.endswith(data_file.LIBSVM):
        with places.of(path).open_file(path) as f:
            texts = [line.decode().strip() for line in itertools.islice(f, 2)]
    else:
        data, starts, ends = _first_frames(path)
        texts = [_text(wire.features_of(data[a:b])) for a, b in zip(starts[:2], ends[:2])]
    for text in texts:
        logging.info("Example: %s", text if len(text) < 1000 else text[:996] + " ...")


def _text(features):
    there = (name for name in ("label", "weight", "counts", "ids", "values") if name in features)
    numbers = lambda feature: " ".join(f"{x:g}" for x in feature.floats or feature.int64s)
    return ", ".join(f"{name} {numbers(features[name])}" for name in there)


def _first_frames(path):
    """(the first records of a TFRecord file, where they begin and where they end)."""
    found = next(frames.frames_of_file(path))
    return found.data, found.starts + frames.HEADER, found.ends - 4


def _warn_of_shared_ids(path, schema):
    """Warns if the first records have an id in several fields."""
    batch = codec.decode(*_first_frames(path), schema)
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
