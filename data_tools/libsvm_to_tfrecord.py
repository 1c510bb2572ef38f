"""Converts LibSVM, LibFFM, CSV or Parquet to TFRecord files that train.py reads, with dataset.json.

    python -m data_tools.libsvm_to_tfrecord --input=raw/ --output_dir=data/train
    python -m data_tools.libsvm_to_tfrecord --input=a9a.libsvm --output_dir=data/a9a --pad
    python -m data_tools.libsvm_to_tfrecord --input=log.ffm --output_dir=data/log --multi_valued
    python -m data_tools.libsvm_to_tfrecord --input=rows.parquet --output_dir=data/rows

The pairs of a LibSVM line are its fields, in order, unless --fields gives the ids of each field. A
LibFFM pair names its field. With --fields or LibFFM, the order in a line does not matter, and a
field may be missing. If the first line begins with label:weight, examples are weighted. The ids of
a table, CSV or Parquet, are encoded already; the names of its columns, or --columns, say what each
holds (data_tools/tables/layouts.py).

An output file is made of pieces: contiguous parts of an input, which several processes convert in
parallel and which are joined in order at the end. So the records keep the order of the input.
"""

import dataclasses
import functools
import os
import posixpath
import tempfile
import time
from typing import List

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
import numpy as np

from data_tools.click_logs.splitting import SPLITS
from data_tools.common import command_line, publishing, record_files, shards, workers
from data_tools.common.shards import ALONE, Host
from data_tools.common.skipping import Skipping
from data_tools.libsvm import block_writer, output_files, pieces, sources
from data_tools.libsvm.options import Options
from deepfm.data import datasets, formats
from deepfm.errors import BadInput


def main(options: Options):
    convert(options, shards.this_host(options.input, on_spark="convert"))


def convert(options: Options, host: Host = ALONE) -> List[datasets.DataFile]:
    """Converts, and returns the files that were written.

    No file gets its final name in output_dir before all are complete.

    Args:
        options: the flags.
        host: this host; each of several writes its own folder with its own dataset.json.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", partial=host.own_files, tables=True)
    inputs, source = data.files, sources.of(data, options, block_writer.convert)
    lines, ranges = source.schema, source.ranges
    if host.number > 1 and not lines.field_size and (lines.pad or lines.named_fields):
        raise BadInput(
            f"--field_size must be given on {host.number} hosts, because none of them sees all "
            "rows; try --field_size=39."
        )
    publishing.check_hosts(options.output_dir, host.number, formats.TFRECORD.suffixes)
    options = dataclasses.replace(options, output_dir=host.folder(options.output_dir))
    split = sources.split_of(options, source, host.number)
    folders = [options.output_dir]
    if split:
        kept = np.flatnonzero(split.shares)
        folders = [os.path.join(options.output_dir, SPLITS[i]) for i in kept]
    targets = [dataclasses.replace(options, output_dir=folder) for folder in folders]
    old = [output_files.prepare(inputs, target) for target in targets]
    with publishing.scratch(options.output_dir, output_files.SCRATCH) as scratch:
        total = sum(f.bytes for f in inputs)
        counts = _count(ranges, source, options, total)
        schema = source.complete(counts)
        tasks = pieces.plan(ranges, counts, options.num_files, scratch, split)
        names = output_files.names([r.path for r in ranges], options)
        num_outputs = len(names) * len(targets)
        outputs, every = _write_pieces(tasks, num_outputs, total, source, schema, options)
        schema = schema._replace(feature_size=schema.feature_size or every.max_id + 1)
        files, published = [], []
        for target, before in zip(targets, old):
            first, made = len(names) * len(published), tempfile.mkdtemp(dir=scratch)
            mine = outputs[first : first + len(names)]
            parts = _pieces_of(names, first, tasks, made)
            record_files.join(parts, options.compress, options.num_workers)
            wholes = {name: whole for name, (_, whole) in zip(names, parts)}
            filled = output_files.described(names, mine, target, wholes)
            about = schema, functools.reduce(pieces.together, mine), filled, data, target
            written = output_files.describe(made, *about, source.fields) if filled else []
            paths = {name: os.path.join(made, name) for name in written}
            published.append((target.output_dir, written, before, paths))
            files += filled
        publishing.publish(scratch, [x for x in published if x[1] or x[2]])
    seconds, by_column = time.monotonic() - start, "columns" in source.fields
    output_files.log_summary(files, schema, every, seconds, by_column)
    return files


def _count(ranges, source, options, total):
    """[(rows, most fields in a row)] of each range; None if nothing needs them."""
    if not pieces.must_count(source.schema, options):
        return None
    counts = [(0, 0)] * len(ranges)
    with workers.results(
        source.count, ranges, options.num_workers, "Counting rows", total
    ) as results:
        for index, (rows, longest) in results:
            counts[index] = counts[index][0] + rows, max(counts[index][1], longest)
    return counts


def _write_pieces(tasks, num_outputs, total, source, schema, options):
    """Runs the tasks; returns the BlockFacts of each output, and of all."""
    outputs, every = [pieces.NO_ROWS] * num_outputs, pieces.NO_ROWS
    bad = Skipping(options.max_bad_records)
    work = functools.partial(source.write, schema=schema)
    with workers.results(work, tasks, options.num_workers, "Converting", total, bad) as results:
        for _, (piece, block) in results:
            outputs[piece.output] = pieces.together(outputs[piece.output], block)
            every = pieces.together(every, block)
            if every.negative and every.zero:
                raise BadInput(source.mixed_labels(schema))
    if every.max_id < 0:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    bad.log_total()
    return outputs, every


def _pieces_of(names, first, tasks, scratch):
    """[(paths of its pieces, its path in scratch)] for each output file."""
    parts = [[] for _ in names]
    for piece in (piece for _, planned in tasks for piece in planned):
        if first <= piece.output < first + len(names):
            parts[piece.output - first].append(piece.path)
    return [(paths, posixpath.join(scratch, name)) for paths, name in zip(parts, names)]


if __name__ == "__main__":
    command_line.run(main, Options)
