"""Joins data files into as many as wanted, shuffled as a whole, and balanced by label.

    python -m data_tools.rebalance --input=data/train --output_dir=data/shuffled --num_files=16
    python -m data_tools.rebalance --input=data/train --output_dir=data/sampled --negative_rate=0.1

TFRecord files become TFRecord files, LibSVM text becomes LibSVM text; records are copied as they
are. Each possible order is as likely as any other (see data_tools.rebalancing.shuffling), and what
comes out is a function of the input, the seed and nothing else. dataset.json keeps how many records
of each label were kept, for train.py --correct_calibration.
"""

import dataclasses
import os
import time
from typing import List, Optional, Tuple

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
# What of each format is taken for data in the folder that is written to.
SUFFIXES = {
    formats.TFRECORD.name: formats.TFRECORD.suffixes,
    formats.LIBSVM.name: (".libsvm", ".libsvm.gz"),
}


def _rate(label):
    text = (
        f"Records with label {label} to keep for each one: 0.1 a tenth of them, drawn by the seed; "
        "2.5 each of them twice or three times. Default: 1."
    )
    return flag(text, lower_bound=0, upper_bound=LARGEST_RATE)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, as plain values; share and own_files are of common.shards."""

    input: str = flag(
        "TFRecord or LibSVM files: a directory, a glob, or a comma list of these; .gz is read too.",
        REQUIRED,
    )
    output_dir: str = flag("A local directory for the files.", REQUIRED)
    num_files: int = flag(
        "Files to write, of as many records each to within one; 0: as many as are read.",
        default=0,
        lower_bound=0,
    )
    shuffle: bool = flag("False: keep the order of the input.", default=True)
    seed: int = flag(
        "Of the order and of the sampling; the same seed writes the same bytes.",
        default=1,
        lower_bound=0,
        upper_bound=2**32 - 1,
    )
    negative_rate: Optional[float] = _rate(0)
    positive_rate: Optional[float] = _rate(1)
    positive_share: Optional[float] = flag(
        "Share of label 1 in the output, about; the rates follow from it. 0.5: as many of each."
    )
    oversample: bool = flag(
        "With --positive_share: repeat the records of the label that there are too few of, in "
        "place of leaving out some of the other.",
        default=False,
    )
    compress: bool = flag("Write gzip files (.gz).", default=False)
    memory_mb: int = flag(
        "Records in memory, megabytes, of all processes together.", default=512, lower_bound=64
    )
    num_workers: int = flag("Processes, one core each.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Bad records to skip, each logged; one more ends the run.", default=0, lower_bound=0
    )
    overwrite: bool = flag("Replace the data set in output_dir.", default=False)
    share: Tuple[int, int] = (0, 1)
    own_files: bool = False


def main(options: Options):
    own = shards.own_files(options.input)
    rebalance(dataclasses.replace(options, share=shards.share(), own_files=own))


def rebalance(options: Options) -> List[datasets.DataFile]:
    """Does what the flags say, and returns the files that were written.

    Nothing appears in output_dir under its final name before all of it is complete.

    Raises:
        BadInput: a record, or a flag, that the user has to mend.
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
        described = data.rows is not None and data.field_size  # which alone tells it of LibSVM text
        if schema or described:
            written.append(_metadata_name(options))
            feature_size = max(data.feature_size or 0, max_id + 1)
            rates = sampling.rates_of_all(data, found, kept, rates)
            dataset_json.write(
                scratch, schema.field_size if schema else described, feature_size, files, rates,
                written[-1], bool(schema and schema.multi_valued), data.hash_buckets or 0,
                data.feature_map,
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
    """Refuses flags that contradict one another."""
    share, rates = options.positive_share, (options.negative_rate, options.positive_rate)
    for name, rate in zip(SamplingRates._fields, rates):
        if rate is not None and not 0 <= rate <= LARGEST_RATE:
            raise BadInput(f"--{name}_rate={rate} is no number from 0 on; try 0.1.")
    if share is not None and not 0 < share < 1:
        raise BadInput(f"--positive_share={share} is not between 0 and 1; try 0.5.")
    if share is not None and rates != (None, None):
        raise BadInput(
            "--positive_share finds the rates itself; leave --negative_rate and --positive_rate "
            "out, or it."
        )
    if options.oversample and share is None:
        raise BadInput("--oversample needs --positive_share, such as --positive_share=0.5.")


def _output_names(data, options):
    """The names of the files that this process writes, of those of all shards together."""
    index, number = options.share
    n = options.num_files or max(len(data.files), number)
    if n < number:
        raise BadInput(f"--num_files={n} cannot be divided among {number} shards; try {number}.")
    suffix = data.format.suffixes[0] + (".gz" if options.compress else "")
    mine = range(n * index // number, n * (index + 1) // number)
    return [f"part-{i:05d}-of-{n:05d}{suffix}" for i in mine]


def _check_apart(data, options):
    """Refuses that a part of the input is what an earlier run has written: it would come twice."""
    output_dir = os.path.abspath(options.output_dir)
    for part in options.input.split(","):
        top = os.path.join(os.path.abspath(part.strip()), "")
        if os.path.isdir(top) and output_dir.startswith(top):
            raise BadInput(
                f"--output_dir={options.output_dir} lies in --input={part.strip()}, which would "
                "then hold every record twice; give a folder beside it."
            )
    inside = _inside(data, options)
    if inside and len(inside) < len(data.files):
        raise BadInput(
            f"--input={options.input}: {inside[0]} lies in --output_dir and other files do not; "
            "give an --input that holds none of --output_dir."
        )
    if inside and options.share[1] > 1:
        raise BadInput(
            f"--output_dir={options.output_dir} is where the shards read; give another folder."
        )


def _inside(data, options):
    """The paths of what is read from the folder that is written to."""
    folder = os.path.abspath(options.output_dir)
    return [f.path for f in data.files if os.path.dirname(os.path.abspath(f.path)) == folder]


def _metadata_name(options):
    index, number = options.share
    return dataset_json.METADATA if number == 1 else f"dataset-{index:05d}-of-{number:05d}.json"


def _prepare_output_dir(names, data, options):
    """Makes output_dir; returns the names in it that the new data set replaces.

    Other shards may write there at the same time: then all but their files has to be gone.
    """
    folder = options.output_dir
    publishing.check_hosts(folder, 1, ())  # whose files of all hosts lie beside each other
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
            f"--output_dir={folder}: {lost[0]} is none of --input, and what is made of the others "
            "would replace it; give another folder."
        )
    return publishing.replaced(folder, found, options.overwrite, known)


def _schema(data):
    """Of TFRecords: as dataset.json tells, else as the first record that can be read."""
    firsts = (formats.TFRECORD.first_record(file.path) for file in data.files)
    field_size, multi_valued = data.field_size, data.multi_valued
    if not field_size or multi_valued is None:
        found, several = next((first for first in firsts if first[0]), (None, False))
        field_size, multi_valued = field_size or found, multi_valued or several
    if not field_size:
        raise BadInput(f"{data.files[0].path}: record 0 at byte 0: is no record with ids.")
    return records.Schema(field_size, multi_valued=multi_valued)


def _tasks(data):
    """The FileSlices of the input: TFRecord files as a whole, of LibSVM text some lines each."""
    whole = data.format is formats.TFRECORD
    cut = lambda f: [LineRange(f.path)] if whole else line_blocks.cut(f.path, f.bytes)
    parts = [(file, lines) for file in data.files for lines in cut(file)]
    return [
        FileSlice(lines, number, file.rows is not None)
        for number, (file, lines) in enumerate(parts)
    ]


if __name__ == "__main__":
    command_line.run(main, Options)
