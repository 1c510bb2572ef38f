"""Converts LibSVM or LibFFM text to TFRecord files that train.py reads, with dataset.json.

    python -m data_tools.libsvm_to_tfrecord --input=raw/ --output_dir=data/train
    python -m data_tools.libsvm_to_tfrecord --input=a9a.libsvm --output_dir=data/a9a --pad
    python -m data_tools.libsvm_to_tfrecord --input=log.ffm --output_dir=data/log --multi_valued

The pairs of a LibSVM line are its fields, in order, unless --fields gives the ids of each field. A
LibFFM pair names its field. With --fields or LibFFM, the order in a line does not matter, and a
field may be missing. If the first line begins with label:weight, examples are weighted.

An output file is made of pieces: contiguous parts of an input, which several processes convert in
parallel and which are joined in order at the end. So the records keep the order of the input.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import posixpath
import time
from typing import List, Optional, Tuple

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
import tensorflow as tf
from absl import logging

from data_tools.common import command_line, line_blocks, publishing, record_files, shards, workers
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.skipping import Skipping
from data_tools.libsvm import block_writer, field_lines, line_schema
from data_tools.libsvm.block_writer import Piece
from deepfm.data import dataset_json, datasets, formats, libsvm
from deepfm.data.plain import libsvm_text, text_blocks
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, memory

SHOWN = 5  # records to log as they are stored


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, as plain values."""

    input: str = flag(
        "LibSVM or LibFFM files, plain or .gz: a directory, a glob, or a comma list of these.",
        REQUIRED,
    )
    output_dir: str = flag("Local directory for the TFRecord files and dataset.json.", REQUIRED)
    num_files: int = flag(
        "TFRecord files that each host writes; rows are spread evenly. 0: one for each input file, "
        "with the same name.",
        default=0,
        lower_bound=0,
    )
    field_size: Optional[int] = flag(
        "Fields of each row; other rows are bad. Default: as many as the first row has pairs; with "
        "--pad the longest row; for LibFFM the largest field + 1.",
        lower_bound=1,
        upper_bound=memory.MAX_FIELDS,
    )
    feature_size: Optional[int] = flag(
        "Upper limit of ids: a row with an id outside [0, feature_size) is bad. Set it to match a "
        "model. Default: as --fields or the input's dataset.json says, else the largest id + 1.",
        lower_bound=1,
        upper_bound=memory.MAX_NUMBER,
    )
    pad: bool = flag(
        "Pad rows shorter than --field_size with id 0, value 0; use it when rows differ in length. "
        "The input must then not use id 0 (--id_offset=1 shifts 0-based ids).",
        default=False,
    )
    input_format: str = flag(
        "libsvm: 'label id:value ...' lines; libffm: 'label field:id:value ...'; auto: whichever "
        "the first pair is.",
        default="auto",
        enum_values=["auto", "libsvm", "libffm"],
    )
    fields: Optional[str] = flag(
        "JSON file with the id range of each field, for LibSVM rows whose pairs are in any order: "
        '{"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}.'
    )
    multi_valued: bool = flag(
        "Let a field have any number of values; needs LibFFM or --fields. Without it, a field with "
        "two values is an error and a missing field becomes id 0, value 0, so the input must not "
        "use id 0 (--id_offset=1 shifts 0-based ids).",
        default=False,
    )
    hash_buckets: int = flag(
        "Hash string ids (FarmHash) to the ids 1 to hash_buckets - 1. 0: ids are numbers.",
        default=0,
        lower_bound=0,
        upper_bound=memory.MAX_NUMBER,
    )
    id_offset: int = flag("Number to add to each id; 1 makes 0-based ids 1-based.", default=0)
    compress: bool = flag("Compress the files (.tfrecords.gz); smaller, but slower.", default=False)
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Number of bad rows to log and skip; one more ends the run.", default=0, lower_bound=0
    )
    overwrite: bool = flag(
        "Replace the data set in --output_dir (the files its dataset.json names).", default=False
    )


def main(options: Options):
    convert(options, shards.share(), shards.own_files(options.input))


def convert(
    options: Options, share: Tuple[int, int] = (0, 1), own_files: bool = False
) -> List[datasets.DataFile]:
    """Converts, and returns the files that were written.

    No file gets its final name in output_dir before all are complete.

    Args:
        options: the flags.
        share: (index of this host, number of hosts); with several, each writes its own folder
            with its own dataset.json.
        own_files: whether no other host sees these files; if not, a host takes its share of them.

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    data = datasets.find(options.input, "input", partial=own_files)
    if data.format is not formats.LIBSVM:
        raise BadInput(f"--input={options.input}: {data.files[0].path} is not LibSVM text.")
    inputs, lines = data.files, line_schema.of_flags(data, options)
    if share[1] > 1 and not lines.field_size and (lines.pad or lines.named_fields):
        raise BadInput(
            f"--field_size must be given on {share[1]} hosts, because none of them sees all rows; "
            "try --field_size=39."
        )
    publishing.check_hosts(options.output_dir, share[1], formats.TFRECORD.suffixes)
    options = dataclasses.replace(options, output_dir=shards.folder(options.output_dir, share))
    old = _prepare_output_dir(inputs, options)
    with atomic_files.scratch(options.output_dir, ".libsvm_to_tfrecord-") as scratch:
        ranges = [lines for file in inputs for lines in line_blocks.cut(file.path, file.bytes)]
        if not own_files:
            ranges = ranges[share[0] :: share[1]]
        if not ranges:
            raise BadInput(
                f"--num_shards={share[1]}: nothing of the input is left for --shard_index="
                f"{share[0]} (a file is split every {line_blocks.TASK >> 20} MB, a .gz file not at "
                "all); try a smaller --num_shards."
            )
        total = sum(f.bytes for f in inputs) // (1 if own_files else share[1])
        counts = _count(ranges, lines, options, total)
        schema = line_schema.with_field_size(lines, counts, inputs, options)
        names, tasks = _plan(ranges, counts, options, scratch)
        outputs, feature_size = _write_pieces(tasks, len(names), inputs, schema, options)
        record_files.join(_pieces_of(names, tasks, scratch), options.compress, options.num_workers)
        files = _described(names, outputs, options, scratch)
        dataset_json.write(
            scratch, schema.field_size, feature_size, files,
            multi_valued=schema.multi_valued, hash_buckets=schema.hash_buckets,
            feature_map=None if options.id_offset or options.hash_buckets else data.feature_map,
            weighted=schema.weighted,
        )  # fmt: skip
        written = [*(os.path.basename(f.path) for f in files), dataset_json.METADATA]
        publishing.publish(scratch, written, options.output_dir, old)
    rows, seconds = sum(f.rows for f in files), time.monotonic() - start
    logging.info(
        "Wrote %d rows (%.4f of them positive) of %d fields, feature_size %d, to %d files in "
        "%.1f s: %.0f rows/s.",
        rows, sum(f.positives for f in files) / rows, schema.field_size, feature_size, len(files),
        seconds, rows / seconds,
    )  # fmt: skip
    return files


def _prepare_output_dir(inputs, options):
    """Makes output_dir; returns the names in it that the new data set replaces."""
    folder = options.output_dir
    old = publishing.names_in(folder, formats.TFRECORD.suffixes, "convert")
    same = [] if options.num_files else _names_after(sorted(f.path for f in inputs), options)
    return publishing.replaced(folder, old, options.overwrite, same)


def _count(ranges, lines, options, total):
    """[(rows, most fields in a row)] of each range; None if nothing needs them."""
    if not options.num_files and (lines.field_size or not lines.pad and not lines.named_fields):
        return None
    counts = [(0, 0)] * len(ranges)
    work = functools.partial(_count_range, named_fields=lines.named_fields, weighted=lines.weighted)
    with workers.results(work, ranges, options.num_workers, "Counting rows", total) as results:
        for index, (rows, longest) in results:
            counts[index] = counts[index][0] + rows, max(counts[index][1], longest)
    return counts


def _count_range(lines, named_fields, weighted):
    for _, text, read in line_blocks.read_blocks(lines):
        starts = text_blocks.record_starts(text)
        if named_fields:
            pairs = libsvm_text.weights_as_pairs_of(text, b"0:0:") if weighted else text
            most = field_lines.num_fields(pairs)
        else:
            most = text_blocks.longest_record(text, starts, weighted)
        yield read, (len(starts), most)


def _plan(ranges, counts, options, scratch):
    """(names of the output files, tasks: (a range, the Pieces that its lines go to))."""
    tasks = []
    if not options.num_files:
        paths = sorted({r.path for r in ranges})
        for i, lines in enumerate(ranges):
            piece = Piece(posixpath.join(scratch, f"piece-{i}"), paths.index(lines.path))
            tasks.append((lines, [piece]))
        return _names_after(paths, options), tasks
    total = sum(rows for rows, _ in counts)
    if total < options.num_files:
        hint = f"; try --num_files={total}" if total else ""
        raise BadInput(f"--num_files={options.num_files}: the input has only {total} rows{hint}.")
    ends = [total * (i + 1) // options.num_files for i in range(options.num_files)]
    row = output = 0
    for i, (lines, (rows, _)) in enumerate(zip(ranges, counts)):
        pieces, last = [], row + rows
        while row < last:
            path = posixpath.join(scratch, f"piece-{i}-{len(pieces)}")
            pieces.append(Piece(path, output, min(last, ends[output]) - row))
            row += pieces[-1].rows
            output += row == ends[output]
        if pieces:
            tasks.append((lines, pieces))
    n = options.num_files
    return [f"part-{i:05d}-of-{n:05d}{_suffix(options)}" for i in range(n)], tasks


def _suffix(options):
    return ".tfrecords.gz" if options.compress else ".tfrecords"


def _names_after(paths, options):
    """Names of output files: the inputs' paths below their common folder, with our suffix."""
    top = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    names = []
    for path in paths:
        name = os.path.relpath(path, top).replace(os.sep, "-")
        suffix = next((s for s in formats.LIBSVM.suffixes if name.endswith(s)), "")
        names.append(name[: len(name) - len(suffix)] + _suffix(options))
    for path, name in zip(paths, names):
        if names.count(name) > 1:
            raise BadInput(f"{path}: another input would also become {name}; give --num_files.")
    return names


def _write_pieces(tasks, num_outputs, inputs, schema, options):
    """Runs the tasks; returns ([(rows, positives)] of each output, feature_size)."""
    outputs = [(0, 0)] * num_outputs
    bad = Skipping(options.max_bad_records)
    max_id, negative, zero, shown = -1, False, False, False
    work = functools.partial(block_writer.convert, schema=schema)
    size = sum(f.bytes for f in inputs)
    with workers.results(work, tasks, options.num_workers, "Converting", size, bad) as results:
        for index, (output, block) in results:
            rows, positives = outputs[output]
            outputs[output] = rows + block.rows, positives + int(block.positives)
            max_id = max(max_id, block.max_id)
            negative, zero = negative or block.negative, zero or block.zero
            if negative and zero:
                raise BadInput(_mixed_labels(inputs, schema))
            if not shown and index == 0 and block.rows >= SHOWN:
                shown = True
                _log_records(tasks[:1])
    if max_id < 0:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    if not shown:
        _log_records(tasks)
    bad.log_total()
    return outputs, schema.feature_size or max_id + 1


def _mixed_labels(inputs, schema):
    """The error message for an input with both labels 0 and -1, where 0 is ambiguous."""
    first = {}
    for file in inputs:
        for number, line in libsvm.read_lines(file.path):
            if libsvm_text.explain_line(line, schema):
                continue  # a bad row that was skipped
            label = line.split()[0].partition(b":")[0]
            if label.startswith(b"-") or libsvm_text.number_of(label) == 0:
                first.setdefault(label.startswith(b"-"), (f"{file.path}:{number}", label.decode()))
            if len(first) == 2:
                (other_place, other), (place, label) = first.values()  # in file order
                return (
                    f"{place}: label {label}, but {other_place} has label {other}; "
                    "use 0 and 1, or -1 and +1, not both."
                )
    raise AssertionError("the native parser found labels 0 and -1, the plain reader did not")


def _log_records(tasks):
    """Logs the first records as they are stored."""
    left = SHOWN
    for piece in (piece for _, pieces in tasks for piece in pieces):
        # Close it here: closed by the garbage collector, it would swallow a signal's SystemExit.
        with contextlib.closing(formats.read_frames(piece.path)) as frames:
            for _, payload, _ in itertools.islice(frames, left):
                left -= 1
                features = tf.train.Example.FromString(payload).features.feature
                logging.info("*** Example ***")
                names = "label", "weight", "counts", "ids", "values"
                for name in (x for x in names if x in features):
                    stored = features[name].int64_list.value or features[name].float_list.value
                    numbers = (str(x) if type(x) is int else f"{x:g}" for x in stored)
                    logging.info("%s: %s", name, " ".join(numbers))


def _pieces_of(names, tasks, scratch):
    """[(paths of its pieces, its path in scratch)] for each output file."""
    pieces = [[] for _ in names]
    for piece in (piece for _, pieces in tasks for piece in pieces):
        pieces[piece.output].append(piece.path)
    return [(paths, posixpath.join(scratch, name)) for paths, name in zip(pieces, names)]


def _described(names, outputs, options, scratch):
    """The files of the data set, with the paths that they will have in output_dir."""
    files = []
    for name, (rows, positives) in zip(names, outputs):
        if not rows:
            logging.warning("%s would have no rows, so it is not written.", name)
            continue
        size = os.path.getsize(posixpath.join(scratch, name))
        path = posixpath.join(options.output_dir, name)
        files.append(datasets.DataFile(path, size, rows, positives))
    return files


if __name__ == "__main__":
    command_line.run(main, Options)
