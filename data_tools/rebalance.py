"""Rewrites a data set as any number of files, shuffled as a whole and balanced by label.

    python -m data_tools.rebalance --input=data/train --output_dir=data/shuffled --num_files=16
    python -m data_tools.rebalance --input=data/train --output_dir=data/sampled --negative_rate=0.1

TFRecord files become TFRecord files, and LibSVM text becomes LibSVM text; records are copied as
they are. All orders are equally likely (see data_tools.rebalancing.shuffling), and the output
depends on the input, the flags and the seed alone. dataset.json records which share of each label
was kept, for train.py --correct_calibration.
"""

import dataclasses
import os
import time
from typing import List, Optional, Tuple

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
from absl import logging

from data_tools.common import command_line, line_blocks, publishing, shards
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.line_blocks import LineRange
from data_tools.rebalancing import passes, sampling
from data_tools.rebalancing.passes import Work
from data_tools.rebalancing.record_blocks import FileSlice
from deepfm.data import dataset_json, datasets, formats, records
from deepfm.data.dataset_json import SamplingRates
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, remote_files

LARGEST_RATE = 1000000
# Suffixes of the files in output_dir that count as data of each format.
SUFFIXES = {
    formats.TFRECORD.name: formats.TFRECORD.suffixes,
    formats.LIBSVM.name: (".libsvm", ".libsvm.gz"),
}


def _rate(label):
    text = (
        f"Copies to write of each record with label {label}, on average: 0.1 keeps a random tenth, "
        "2.5 writes each two or three times. Default: 1."
    )
    return flag(text, lower_bound=0, upper_bound=LARGEST_RATE)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, as plain values; share and own_files come from common.shards."""

    input: str = flag(
        "TFRecord or LibSVM files, plain or .gz: a directory, a glob, or a comma list of these.",
        REQUIRED,
    )
    output_dir: str = flag("Local directory for the files.", REQUIRED)
    num_files: int = flag(
        "Files to write, on all hosts together, with equal numbers of records. 0: as many as are "
        "read.",
        default=0,
        lower_bound=0,
    )
    shuffle: bool = flag("Shuffle all records; false: keep their order.", default=True)
    seed: int = flag(
        "Random seed of the order and the sampling; the same seed writes the same bytes.",
        default=1,
        lower_bound=0,
        upper_bound=2**32 - 1,
    )
    negative_rate: Optional[float] = _rate(0)
    positive_rate: Optional[float] = _rate(1)
    positive_share: Optional[float] = flag(
        "Share of label 1 that the output should have, above 0 and below 1; sets both rates. 0.5: "
        "as many records of each label."
    )
    oversample: bool = flag(
        "With --positive_share, repeat records of the scarcer label instead of dropping records of "
        "the other.",
        default=False,
    )
    compress: bool = flag("Compress the files (.gz); smaller, but slower.", default=False)
    memory_mb: int = flag(
        "Memory for records, in MB, for all processes together. Lower it if memory is short.",
        default=512,
        lower_bound=64,
    )
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Number of bad records to log and skip; one more ends the run.", default=0, lower_bound=0
    )
    overwrite: bool = flag("Replace the data set in --output_dir.", default=False)
    share: Tuple[int, int] = (0, 1)
    own_files: bool = False


def main(options: Options):
    own = shards.own_files(options.input)
    rebalance(dataclasses.replace(options, share=shards.share(), own_files=own))


def rebalance(options: Options) -> List[datasets.DataFile]:
    """Does what the flags say, and returns the files that were written.

    No file gets its final name in output_dir before all are complete.

    Raises:
        BadInput: a record or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    _check(options)
    remote_files.check_readable(options.input, "input")
    data = datasets.find(options.input, "input", partial=options.own_files)
    names = _output_names(data, options)
    data = shards.part_of(data, (0, 1) if options.own_files else options.share)
    _check_apart(data, options)
    old = _prepare_output_dir(names, data, options)
    schema = _schema(data) if data.format is formats.TFRECORD else None
    tasks = _tasks(data)
    with atomic_files.scratch(options.output_dir, ".rebalance-") as scratch:
        rates = sampling.rates(data, tasks, schema, options)
        bits = passes.bits(data, rates, options.num_workers)
        work = Work(scratch, schema, rates, options, bits)
        found, kept, max_id = passes.scatter_all(data, tasks, work)
        files = passes.write_all(tasks, names, work)
        written = [os.path.basename(file.path) for file in files]
        described = data.rows is not None and data.field_size  # LibSVM text has no other source
        if schema or described:
            written.append(_metadata_name(options))
            feature_size = max(data.feature_size or 0, max_id + 1)
            rates = sampling.rates_of_all(data, found, kept, rates)
            dataset_json.write(
                scratch, schema.field_size if schema else described, feature_size, files, rates,
                written[-1], bool(schema and schema.multi_valued), data.hash_buckets or 0,
                data.feature_map, schema.weighted if schema else datasets.is_weighted(data),
            )  # fmt: skip
        publishing.publish(scratch, written, options.output_dir, old)
    seconds = time.monotonic() - start
    logging.info(
        "Wrote %d of %d records (%.4f of them positive, %.4f before) to %d files in %.1f s: "
        "%.0f records/s.",
        sum(kept), sum(found), kept[1] / sum(kept), found[1] / sum(found), len(files), seconds,
        sum(kept) / seconds,
    )  # fmt: skip
    return files


def _check(options):
    """Refuses (BadInput) flags that contradict one another."""
    share, rates = options.positive_share, (options.negative_rate, options.positive_rate)
    for name, rate in zip(SamplingRates._fields, rates):
        if rate is not None and not 0 <= rate <= LARGEST_RATE:
            raise BadInput(f"--{name}_rate={rate} is not between 0 and {LARGEST_RATE}; try 0.1.")
    if share is not None and not 0 < share < 1:
        raise BadInput(f"--positive_share={share} is not between 0 and 1; try 0.5.")
    if share is not None and rates != (None, None):
        raise BadInput(
            "--positive_share sets both rates; leave out --negative_rate and --positive_rate, or "
            "leave out --positive_share."
        )
    if options.oversample and share is None:
        raise BadInput("--oversample needs --positive_share, such as --positive_share=0.5.")


def _output_names(data, options):
    """The names of the files that this process writes, its part of those of all shards."""
    index, number = options.share
    n = options.num_files or max(len(data.files), number)
    if n < number:
        raise BadInput(f"--num_files={n} is too few for {number} shards; try --num_files={number}.")
    suffix = data.format.suffixes[0] + (".gz" if options.compress else "")
    mine = range(n * index // number, n * (index + 1) // number)
    return [f"part-{i:05d}-of-{n:05d}{suffix}" for i in mine]


def _check_apart(data, options):
    """Refuses (BadInput) input that includes an earlier run's output: records would come twice."""
    output_dir = os.path.abspath(options.output_dir)
    for part in options.input.split(","):
        top = os.path.join(os.path.abspath(part.strip()), "")
        if os.path.isdir(top) and output_dir.startswith(top):
            raise BadInput(
                f"--output_dir={options.output_dir} is inside --input={part.strip()}, which would "
                "then hold every record twice; give a folder outside it."
            )
    inside = _inside(data, options)
    if inside and len(inside) < len(data.files):
        raise BadInput(
            f"--input={options.input}: {inside[0]} is in --output_dir and other files are not; "
            "give another --output_dir, or an --input without its files."
        )
    if inside and options.share[1] > 1:
        raise BadInput(
            f"--output_dir={options.output_dir} is where the shards read; give another folder."
        )


def _inside(data, options):
    """The paths of the input files that are in output_dir."""
    folder = os.path.abspath(options.output_dir)
    return [f.path for f in data.files if os.path.dirname(os.path.abspath(f.path)) == folder]


def _metadata_name(options):
    index, number = options.share
    return dataset_json.METADATA if number == 1 else f"dataset-{index:05d}-of-{number:05d}.json"


def _prepare_output_dir(names, data, options):
    """Makes output_dir; returns the names in it that the new data set replaces.

    Other shards may write there at the same time, so only files of theirs may be in it.
    """
    folder = options.output_dir
    publishing.check_hosts(folder, 1, ())  # all hosts write to one folder
    found = publishing.names_in(folder, SUFFIXES[data.data_format], "write")
    _, number = options.share
    mine = {*names, _metadata_name(options)}
    if number > 1:
        ending = names[0][len("part-00000") :], f"-of-{number:05d}.json"
        others = [name for name in found if not name.endswith(ending)]
        if others:
            raise BadInput(
                f"--output_dir={folder} holds another data set ({others[0]}), which a shard cannot "
                "replace; delete it."
            )
        found = [name for name in found if name in mine]
    known = {os.path.basename(path) for path in _inside(data, options)}
    lost = [
        name for name in found if known and not (dataset_json.is_metadata(name) or name in known)
    ]
    if lost:
        raise BadInput(
            f"--output_dir={folder}: {lost[0]} is not in --input, but would be replaced; give "
            "another folder."
        )
    return publishing.replaced(folder, found, options.overwrite, known)


def _schema(data):
    """The Schema of TFRecords, from dataset.json, else from the first readable record."""
    known = records.Shape(data.field_size, data.multi_valued, data.weighted)
    if not known.field_size or None in known:
        found = datasets.first_record(data)
        known = records.Shape(*(said or seen for said, seen in zip(known, found)))
    if not known.field_size:
        raise BadInput(f"{data.files[0].path}: record 0 at byte 0: not a record with ids.")
    return records.Schema(
        known.field_size, multi_valued=known.multi_valued, weighted=known.weighted
    )


def _tasks(data):
    """The FileSlices of the input: one per TFRecord file; LibSVM text is split into ranges."""
    whole = data.format is formats.TFRECORD
    cut = lambda f: [LineRange(f.path)] if whole else line_blocks.cut(f.path, f.bytes)
    parts = [(file, lines) for file in data.files for lines in cut(file)]
    weighted = not whole and datasets.is_weighted(data)
    return [
        FileSlice(lines, number, file.rows is not None, weighted)
        for number, (file, lines) in enumerate(parts)
    ]


if __name__ == "__main__":
    command_line.run(main, Options)
