"""Converts raw click logs (Criteo, Avazu, any table) to records: counts categories, writes ids.

    python -m data_tools.prepare_criteo --input=train.txt --output_dir=data/criteo --num_workers=8
    python -m data_tools.prepare_criteo --feature_map=data/criteo/feature_map.json \\
        --test_input=new.tsv --output_dir=data/new

Writes output_dir/train, valid and test, as far as there are rows for them, each with dataset.json,
and feature_map.json, which feature_map.py explains; it replaces nothing else. The vocabulary comes
from the training rows alone. The same rows and flags give the same ids and splits, whatever the
number of processes and hosts.

On several hosts, each does its share; every host encodes with the counts of all:

    python -m data_tools.prepare_criteo --step=count --shard_index=0 --num_shards=2 ...
    python -m data_tools.prepare_criteo --step=encode --shard_index=0 --num_shards=2 ...
"""

import dataclasses
import os
import time
from typing import List, Optional, Tuple

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split
from absl import logging

from data_tools.click_logs import (
    column_kinds,
    feature_map,
    field_tables,
    output_folder,
    passes,
    row_parser,
    row_writers,
    slices,
    vocabulary,
)
from data_tools.click_logs.column_kinds import BUCKETS, SCALED, Column, Table
from data_tools.click_logs.splitting import SPLITS, Split
from data_tools.common import command_line, shards
from data_tools.common.command_line import REQUIRED, flag
from data_tools.common.skipping import Skipping
from deepfm.data import datasets, formats
from deepfm.errors import BadInput
from deepfm.runtime import atomic_files, memory, remote_files

SCRATCH = ".prepare_criteo-"
OF_A_PROCESS = 4 * 10**8  # bytes of a process without the vocabulary
LEAST = 10**8  # bytes for the vocabulary where hardly any are free
RAW = "raw files, plain, .gz or .parquet: a directory, a glob, or a comma list of these."


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags, as plain values."""

    output_dir: str = flag("Local directory for the records and the feature map.", REQUIRED)
    input: Optional[str] = flag(f"Training rows, or rows to divide by --split: {RAW}")
    valid_input: Optional[str] = flag(f"Validation rows, if they are in separate files: {RAW}")
    test_input: Optional[str] = flag(
        f"Test rows, if they are in separate files; may lack the label: {RAW}"
    )
    dataset: Optional[str] = flag(
        "Which data set's columns the rows have. Default: criteo.",
        enum_values=list(column_kinds.DATASETS),
    )
    columns: Optional[str] = flag(
        "Rows of any other table: a JSON file that names its columns, in their order, and the kind "
        f"of each ({', '.join(column_kinds.KINDS)}); see docs/data.md."
    )
    table: Tuple[Column, ...] = ()  # those columns, or those of --feature_map
    delimiter: str = flag(
        "Separator of cells; auto: a tab if the first line has one, else a comma.",
        default="auto",
        enum_values=["auto", *row_parser.DELIMITERS],
    )
    header: str = flag(
        "Whether the first line of each file is a header; auto: if it names all field columns.",
        default="auto",
        enum_values=["auto", "yes", "no"],
    )
    output_format: str = flag(
        "Format of the records to write; train.py reads both.",
        default=formats.TFRECORD.name,
        enum_values=list(row_writers.WRITERS),
    )
    integers: Optional[str] = flag(
        "How to encode integer columns. buckets: floor(ln(x)^2) as a category, like the winners of "
        "Criteo's challenge. scaled: one id and a value in [0, 1]. Default: buckets.",
        enum_values=[BUCKETS, SCALED],
    )
    min_count: Optional[int] = flag(
        "Fewest training rows for a category to get its own id; rarer ones share one id per field. "
        "Lower it for small data. Default: 10.",
        lower_bound=1,
    )
    split: Optional[str] = flag(
        "Shares of --input for train,valid,test; the sum must be 1. Default: 0.8,0.1,0.1; with "
        "--valid_input, --test_input or --feature_map 1,0,0."
    )
    split_by: str = flag(
        "How to divide --input. draw: at random, row by row. order: first train, last test, for "
        "rows in time order.",
        default="draw",
        enum_values=["draw", "order"],
    )
    seed: int = flag("Random seed of --split_by=draw.", default=1)
    feature_map: Optional[str] = flag(
        "Encode with this feature_map.json of an earlier run instead of counting categories; use "
        "it for new rows for a trained model."
    )
    step: str = flag(
        "On several hosts: run count on each, then encode on each with the counts of all. all: "
        "both, on one host.",
        default="all",
        enum_values=["count", "encode", "all"],
    )
    counts: Optional[str] = flag(
        "Glob of all hosts' count files, for --step=encode. Default: counts-*.npz in --output_dir."
    )
    own_files: bool = False
    memory_mb: Optional[int] = flag(
        "Memory that the vocabulary may take, in MB; the run ends before it takes more. Lower it "
        "if other programs will need memory. Default: 90 % of what is free, less 400 MB for each "
        "process.",
        lower_bound=1,
    )
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: int = flag(
        "Number of bad rows to log and skip; one more ends the run.", default=0, lower_bound=0
    )
    overwrite: bool = flag("Replace the splits, map or counts of an earlier run.", default=False)


def main(options: Options):
    own = shards.own_files(options.input, options.valid_input, options.test_input)
    prepare(dataclasses.replace(options, own_files=own), shards.share())


def prepare(options: Options, share: Tuple[int, int] = (0, 1)) -> List[datasets.DataFile]:
    """Runs --step, and returns the data files that were written.

    No file gets its final name in output_dir before all are complete.

    Args:
        options: the flags.
        share: (index of this host, number of hosts).

    Raises:
        BadInput: a row or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    _check(options, share)
    described = _described(options)
    known = _known_map(options, described)
    options = _complete(options, known, described)
    of_rows = options.table or column_kinds.DATASETS[options.dataset]
    columns = column_kinds.fields(of_rows, options.integers)
    sources = _sources(options)
    found = {source.flag: slices.find(source, options.own_files) for source in sources}
    mine = (0, 1) if options.own_files else share
    cut = {s.flag: list(slices.cut(s, found[s.flag], options, mine)) for s in sources}
    every = [task for group in cut.values() for task in group]
    _log_unlabelled(every)
    remote_files.check_writable(options.output_dir, "output_dir")
    about = vocabulary.about(options, share, found.get("input", ()))
    if options.step == "count":
        return _count_step(cut["input"], columns, about, options)
    asked = {i for s in sources for i, part in enumerate(s.split.shares) if part}
    old = output_folder.replaced(asked, options, share)
    with atomic_files.scratch(options.output_dir, SCRATCH) as scratch:
        if known:
            tables = field_tables.from_map(known)
        else:
            tables = _tables(cut["input"], columns, about, options)
        fingerprint = output_folder.write_map(tables, old, options, scratch)
        bad = Skipping(options.max_bad_records)
        written = passes.encode(
            every, tables, options.output_format, scratch, options.num_workers, bad
        )
        files = output_folder.publish(written, tables, fingerprint, old, options, share, scratch)
    _log_summary(files, tables, fingerprint, time.monotonic() - start)
    return files


# The flags.


def _check(options, share):
    """Refuses (BadInput) flags that do not fit together."""
    if not (options.input or options.valid_input or options.test_input):
        raise BadInput("--input must be given (or --test_input with --feature_map).")
    if not (options.input or options.feature_map):
        raise BadInput("--input must be given: the vocabulary comes from its training rows.")
    if remote_files.is_remote(options.output_dir):
        raise BadInput(f"--output_dir={options.output_dir} is not local; write locally, then copy.")
    for name in ("min_count", "counts", "memory_mb") if options.feature_map else ():
        if getattr(options, name):
            raise BadInput(f"--{name} has no effect with --feature_map; leave it out.")
    if options.feature_map and options.step == "count":
        raise BadInput("--feature_map needs no counts; leave out --step=count.")
    if options.step == "all" and share[1] > 1 and not options.feature_map:
        raise BadInput(
            f"--step=all works on one host, not on {share[1]}; run --step=count on each, then "
            "--step=encode (or give --num_shards=1 --shard_index=0 on one)."
        )
    if options.own_files and options.split_by == "order":
        raise BadInput("--split_by=order needs all files on each host; try --noown_files.")


def _described(options) -> Optional[Table]:
    """The Table of --columns."""
    if not options.columns:
        return None
    if options.dataset:
        raise BadInput("--columns and --dataset both say what the columns are; leave one out.")
    try:
        return column_kinds.load(options.columns)
    except ValueError as error:
        raise BadInput(f"--columns: {error}") from error


def _known_map(options, described):
    if not options.feature_map:
        return None
    try:
        known = feature_map.load(options.feature_map)
    except ValueError as error:
        raise BadInput(f"--feature_map: {error}") from error
    for name in ("dataset", "integers"):
        given, has = getattr(options, name), getattr(known, name)
        if given not in (None, has):
            kind = "the table " if name == "dataset" and known.columns else f"--{name}="
            raise BadInput(f"--{name}={given}, but {options.feature_map} is for {kind}{has}.")
    if described and described.columns != known.columns:
        raise BadInput(
            f"--columns={options.columns}: {options.feature_map} is for other columns; leave "
            "--columns out, as the map has them."
        )
    return known


def _complete(options, known, described):
    """Fills in the defaults that depend on other options."""
    own = [n for n in ("valid", "test") if getattr(options, f"{n}_input")]
    split = options.split or ("1,0,0" if own or known else "0.8,0.1,0.1")
    chosen = dict(dataset="criteo", integers=BUCKETS, min_count=10)
    for name, default in chosen.items():
        chosen[name] = getattr(known, name) if known else getattr(options, name) or default
    if described and not known:
        chosen["dataset"] = described.name
    table = known.columns if known else described.columns if described else ()
    return dataclasses.replace(options, split=split, table=table, **chosen)


def _sources(options):
    try:
        shares = tuple(float(share) for share in options.split.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or shares[0] == 0 or abs(sum(shares) - 1) > 1e-6:
        raise BadInput(
            f"--split={options.split} must be three shares that sum to 1, the first above 0; try "
            "--split=0.8,0.1,0.1."
        )
    sources = []
    if options.input:
        split = Split(shares, options.split_by, options.seed)
        sources.append(slices.Source("input", options.input, split))
    for i, name in enumerate(SPLITS[1:], 1):
        spec = getattr(options, f"{name}_input")
        if spec and shares[i] and options.input:
            rest = [0 if j == i else x + shares[i] * (j == 0) for j, x in enumerate(shares)]
            rest = ",".join(f"{x:g}" for x in rest)  # its share is added to train's
            raise BadInput(f"--split={options.split} but also --{name}_input; try --split={rest}.")
        if spec:
            split = Split(tuple(float(j == i) for j in range(len(SPLITS))))
            sources.append(slices.Source(f"{name}_input", spec, split, name != "test"))
    return sources


def _log_unlabelled(tasks):
    unlabelled = (t for t in tasks if not t.layout.labels and t.layout.label is None)
    for path in sorted({task.lines.path for task in unlabelled}):
        logging.info("%s has no label column; its rows get label 0.", path)


def _count_step(tasks, columns, about, options):
    """Counts the categories in this host's share, and writes the counts to a file."""
    index, number = about["share"]
    name = f"counts-{index:05d}-of-{number:05d}.npz"
    path = os.path.join(options.output_dir, name)
    if os.path.exists(path) and not options.overwrite:
        raise BadInput(f"--output_dir={options.output_dir} has {name}; --overwrite replaces it.")
    with atomic_files.scratch(options.output_dir, SCRATCH) as scratch:
        bad = Skipping(options.max_bad_records)
        counts = passes.count(tasks, columns, options.num_workers, bad, _room(options))
        vocabulary.save(os.path.join(scratch, name), about, counts)
        os.replace(os.path.join(scratch, name), path)
    logging.info("Wrote %s: %d categories.", path, sum(len(c.keys) + len(c.long) for c in counts))
    return []


def _tables(tasks, columns, about, options):
    """The FieldTable of each field, from this run's counts or all hosts' count files."""
    room = _room(options)
    if options.step == "all":
        bad = Skipping(options.max_bad_records, log=False)  # the second pass logs them
        counts = passes.count(tasks, columns, options.num_workers, bad, room)
    else:
        counts = vocabulary.add_up(columns, vocabulary.load_all(columns, about, options))
    if not any(len(c.keys) or c.long for c in counts):
        raise BadInput(f"--input={options.input}: no training row holds a category.")
    room.check_ids(counts, options.min_count)
    return field_tables.from_counts(columns, counts, options.min_count)


def _room(options):
    """The Room for the vocabulary: --memory_mb, or what is free besides what processes take."""
    others = options.num_workers if options.num_workers > 1 else 0
    cluster = "use a cluster ('python -m data_tools.on_spark prepare')"
    if options.memory_mb:
        more = f"raise --memory_mb={options.memory_mb} if more is free, or {cluster}"
        return vocabulary.Room(options.memory_mb * 10**6, others, more)
    fewer = f"try fewer --num_workers than {others}, or " if others else ""
    free = int(0.9 * memory.available()) - OF_A_PROCESS * (1 + others)
    return vocabulary.Room(max(free, LEAST), others, fewer + cluster)


def _log_summary(files, tables, fingerprint, seconds):
    for split in SPLITS:
        mine = [f for f in files if f"{os.sep}{split}{os.sep}" in f.path]
        rows = sum(f.rows for f in mine)
        if rows:
            positives = sum(f.positives for f in mine) / rows
            text = "%s: %d rows in %d files, %.4f of them positive."
            logging.info(text, split, rows, len(mine), positives)
    rows = sum(f.rows for f in files)
    logging.info(
        "Wrote %d rows of %d fields, feature_size %d, feature map %s, in %.1f s: %.0f rows/s.",
        rows, len(tables), tables[-1].end, fingerprint, seconds, rows / seconds,
    )  # fmt: skip


if __name__ == "__main__":
    command_line.run(main, Options)
