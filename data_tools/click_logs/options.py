"""The flags of prepare, on one machine and on Spark, and what they mean together."""

import dataclasses
import itertools
import os
from typing import Dict, Optional, Sequence, Tuple

from absl import logging

from data_tools.click_logs import days, guessing, output_folder, slices
from data_tools.click_logs.slices import RawInput
from data_tools.click_logs.splitting import SPLITS, Split, shares_of
from data_tools.common import progress, publishing
from data_tools.common.command_line import REQUIRED, Host, flag
from data_tools.tables import csv_blocks
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import data_file
from deepfm.records.raw import column_kinds, feature_map
from deepfm.records.raw.column_kinds import (
    BUCKETS,
    DATASETS,
    KEPT,
    KEY,
    LABEL,
    LIST,
    SCALED,
    WEIGHT,
    Table,
)
from deepfm.records.storage import places

_ON_SPARK = "'python -m data_tools.on_spark prepare' (docs/spark.md)"
# (flags, those of which each says what they do)
_SAID_BY = (
    (("min_count", "memory_mb"), ("feature_map",)),
    (("missing",), ("dataset", "feature_map")),
    (("label", "positive"), ("dataset", "columns", "feature_map")),
    (("dry_run",), ("dataset", "columns", "feature_map")),
    (("columns",), ("dataset",)),
)
SCRATCH = ".prepare-"
RAW = "raw files, plain, .gz or .parquet: a directory, a glob, or a comma list of these."


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """The flags, as plain values."""

    output_dir: str = flag(
        "Directory for the records and the feature map; on Spark also s3:// or hdfs://.", REQUIRED
    )
    input: Optional[str] = flag(f"Training rows, or rows to divide by --split: {RAW}")
    valid_input: Optional[str] = flag(f"Validation rows, if they are in separate files: {RAW}")
    test_input: Optional[str] = flag(
        f"Test rows, if they are in separate files; may lack the label: {RAW}"
    )
    dataset: Optional[str] = flag(
        "Which data set's columns the rows have. Default: criteo.",
        enum_values=list(DATASETS),
    )
    columns: Optional[str] = flag(
        "Rows of any other table: a JSON file that names its columns, in their order, and the kind "
        "of each; see docs/data.md."
    )
    table: Optional[Table] = None  # of all of these flags, or guessed
    guess: bool = False  # whether the columns are guessed where no flag says them
    label: Optional[str] = flag(
        "Column of the label, where neither --dataset nor --columns says what the columns are, so "
        "that prepare guesses it (and writes OUTPUT_DIR/columns.json). Default: the column that "
        "is named as labels are, such as label or clicked."
    )
    positive: Optional[str] = flag(
        "Labels that count as clicks, such as yes or 4,5; all others count as none. Default: 1."
    )
    missing: Optional[str] = flag(
        "Texts that stand for a missing cell, beside an empty one. Default: those of pandas and "
        "Hive, such as NA, NULL, NaN, None, ? and \\N."
    )
    dry_run: bool = flag(
        "Only guess the columns, and write columns.json; with --grow, only log what would come "
        "and go.",
        default=False,
    )
    delimiter: str = flag(
        "Separator of cells; auto: the one by which the first lines have the most cells.",
        default="auto",
        enum_values=["auto", *csv_blocks.DELIMITERS],
    )
    header: str = flag(
        "Whether the first line of each file is a header; auto: if it names field columns.",
        default="auto",
        enum_values=["auto", "yes", "no"],
    )
    output_format: str = flag(
        "Format of the records to write; train.py reads both.",
        default="tfrecord",
        enum_values=list(slices.SUFFIXES),
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
        "rows in time order. time:COLUMN: likewise, by the numbers or ISO 8601 times of a column. "
        "hash:COLUMN: at random, rows with the same cell on one side. The column may be ignored.",
        default="draw",
    )
    seed: int = flag("Random seed of --split_by=draw and hash.", default=1)
    feature_map: Optional[str] = flag(
        "Encode with this feature_map.json of an earlier run instead of counting categories; use "
        "it for new rows for a trained model."
    )
    grow: bool = flag(
        "Add to the ids of --feature_map those of the categories that it lacks, if --min_count "
        "training rows of this day have them, for a model that is trained day after day.",
        default=False,
    )
    day: Optional[str] = flag(
        "The day of the rows, such as 2026-11-27, which the new map names. It begins a line of "
        "days, whose categories are counted over all days; with --grow it goes on with one, and "
        "sorts behind the map's day."
    )
    days_to_live: Optional[int] = flag(
        "With --grow, drop the categories that the training rows of so many days have not had, "
        "this one included. Default: none goes.",
        lower_bound=1,
    )
    max_categories: Optional[str] = flag(
        "With --grow, the most categories of columns, such as user:1000000,article:50000, or as "
        "JSON where a name has a comma. The longest unseen go first, then the rarest. Default: as "
        "many as there are."
    )
    max_evicted: Optional[float] = flag(
        "With --grow, the largest share of a column's categories that goes in a day; more wait "
        "for the next one. Default: 0.1.",
        lower_bound=0.0,
        upper_bound=1.0,
    )
    refit: Optional[str] = flag(
        "With --grow, columns of numbers, such as price,age, or as JSON, whose bounds, ranges "
        "and scales are made anew from this day's rows; their rows then begin anew."
    )
    memory_mb: Optional[int] = flag(
        "Memory that the vocabulary may take, in MB; the run ends before it takes more. Lower it "
        "if other programs will need memory. Default: 90 % of what is free, less 400 MB for each "
        "process.",
        lower_bound=1,
    )
    num_workers: int = flag("Number of processes; try one per core.", default=1, lower_bound=1)
    max_bad_records: Optional[int] = flag(
        "Number of bad rows to log and skip; one more ends the run. Default: 0; where the columns "
        "are guessed, 1 % of the rows.",
        lower_bound=0,
    )
    overwrite: bool = flag("Replace the splits or the map of an earlier run.", default=False)


def with_dataset(words: Sequence[str]) -> Sequence[str]:
    """The words of prepare_criteo as those of prepare: rows are Criteo's if none says others."""
    known = "dataset", "columns", "feature_map"
    said = any(word.lstrip("-").startswith(known) for word in words)
    return words if said else [*words, "--dataset=criteo"]


def check(options, host):
    """Refuses (BadInput) flags that do not fit together."""
    if not (options.input or options.valid_input or options.test_input):
        raise BadInput("--input must be given (or --test_input with --feature_map).")
    if not (options.input or options.feature_map):
        raise BadInput("--input must be given: the vocabulary comes from its training rows.")
    for each in dataclasses.fields(options):
        empty = getattr(options, each.name) == "" != each.default
        if empty and each.name != "missing":  # which may name no text
            raise BadInput(f"--{each.name} is empty; give it a value, or leave it out.")
    is_given = lambda name: getattr(options, name) not in (None, False)
    for names, others in _SAID_BY:
        for name, other in itertools.product(names, others):
            counts = options.grow and name in ("min_count", "memory_mb", "dry_run")
            if is_given(name) and is_given(other) and not counts:
                raise BadInput(f"--{name} has no effect with --{other}; leave one out.")
    how, _, column = options.split_by.partition(":")
    if how not in ("draw", "order", "time", "hash") or bool(column) != (how in ("time", "hash")):
        raise BadInput(
            f"--split_by={options.split_by} is none of draw, order, time:COLUMN and hash:COLUMN; "
            "try --split_by=draw."
        )
    of_growth = "days_to_live", "max_categories", "max_evicted", "refit"
    for name in filter(is_given, of_growth if not options.grow else ()):
        raise BadInput(f"--{name} has no effect without --grow; leave it out.")
    together = ["grow", "feature_map", "input", "day"]
    if options.day and not (options.grow or options.feature_map):
        together = ["input"]  # the first day of a line
    lacking = [name for name in together if not is_given(name)]
    if lacking and (options.grow or options.day):
        raise BadInput(
            f"--{lacking[0]} is missing: --grow, --feature_map, --input and --day, such as "
            "--day=2026-11-27, go together."
        )
    if host.number > 1 and (options.grow or options.day or not options.feature_map):
        without = " without --grow" * options.grow
        raise BadInput(
            f"--feature_map must be given{without} on {host.number} hosts, each of which would "
            f"count only its rows; count all with {_ON_SPARK}, or on one host."
        )
    if host.own_files and how in ("order", "time"):
        raise BadInput(f"--split_by={how} needs all files on each host; try --noown_files.")


def table_of(options) -> Optional[Table]:
    """The Table of --columns."""
    if not options.columns:
        return None
    why = "which libsvm_to_tfrecord takes, in a table without raw columns"
    table = column_kinds.load(options.columns, KEPT, why)
    if options.missing is None and table.missing is not None:
        return table
    return table._replace(missing=guessing.missing_of(options))


def guessed(options, host) -> Tuple:
    """(the options with what the number of rows says, the Table that the rows are)."""
    files = datasets.find(options.input, "input", partial=host.own_files, tables=True).files
    table, rows = guessing.guess(files, options)
    if table.name in DATASETS:
        return options, table
    publishing.check_output_dir(options.output_dir)
    logging.info("Wrote %s.", guessing.write(table, options.output_dir))
    chosen = {"min_count": guessing.min_count(rows), "max_bad_records": rows // 100}
    chosen = {name: x for name, x in chosen.items() if getattr(options, name) is None}
    if chosen:
        words = [f"--{name}={value}" for name, value in chosen.items()]
        logging.info("For about %d rows: %s.", rows, " ".join(words))
    return dataclasses.replace(options, **chosen), table


def known_map(options, described):
    if not options.feature_map:
        return None
    if places.of(options.feature_map).is_dir(options.feature_map):
        path = os.path.join(options.feature_map, feature_map.FILE)
        raise BadInput(f"--feature_map={options.feature_map} is a folder; try {path}.")
    try:
        known = feature_map.load(options.feature_map)
    except ValueError as error:
        raise BadInput(f"--feature_map: {error}") from error
    if feature_map.said(options.feature_map).get("fingerprint") not in (None, known.fingerprint()):
        raise BadInput(
            f"--feature_map: {options.feature_map} is damaged, as its ids are not those of its "
            "fingerprint; copy it again."
        )
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
    if options.grow and options.day <= known.day:
        raise BadInput(
            f"--day={options.day} does not come after {known.day}, the day of "
            f"{options.feature_map}; grow the map of an earlier day, or give a later --day."
        )
    return known


def complete(options, known, described):
    """Fills in the defaults that depend on other options."""
    own = [n for n in ("valid", "test") if getattr(options, f"{n}_input")]
    split = options.split or ("1,0,0" if own or known else "0.8,0.1,0.1")
    chosen = dict(dataset="criteo", integers=BUCKETS, min_count=10)
    for name, default in chosen.items():
        chosen[name] = getattr(options, name) or (getattr(known, name) if known else default)
    dataset = chosen["dataset"]
    if known:
        described = known.columns and Table(dataset, known.columns, missing=known.missing)
    table = described or Table(dataset, DATASETS[dataset], missing=())
    chosen["max_bad_records"] = options.max_bad_records or 0
    if table.separator and options.delimiter == "auto":
        chosen["delimiter"] = table.separator
    if table.header is not None and options.header == "auto":
        chosen["header"] = "yes" if table.header else "no"
    return dataclasses.replace(options, split=split, table=table, **chosen)


def sources_of(options):
    shares, sources = shares_of(options.split), []
    if options.input:
        split = Split(shares, options.split_by, options.seed)
        sources.append(RawInput("input", options.input, split))
    for i, name in enumerate(SPLITS[1:], 1):
        spec = getattr(options, f"{name}_input")
        if spec and shares[i] and options.input:
            rest = [0 if j == i else x + shares[i] * (j == 0) for j, x in enumerate(shares)]
            rest = ",".join(f"{x:g}" for x in rest)  # its share is added to train's
            raise BadInput(f"--split={options.split} but also --{name}_input; try --split={rest}.")
        if spec:
            split = Split(tuple(float(j == i) for j in range(len(SPLITS))))
            sources.append(RawInput(f"{name}_input", spec, split, name != "test"))
    return sources


def find(sources: Sequence[RawInput], own_files: bool = False) -> Dict[str, list]:
    """{flag: the DataFiles of the source}; BadInput if they are no raw rows, or in two roles."""
    find_one = lambda x: datasets.find(x.spec, x.flag, partial=own_files, tables=True)
    files_of = {source.flag: slices.checked(source, find_one(source)) for source in sources}
    for (name, files), (other, others) in itertools.combinations(files_of.items(), 2):
        for one, same in data_file.in_both(files, others):
            raise BadInput(
                f"{one.path} of --{name} holds the same rows as {same.path} of --{other}; give "
                "each split rows of its own."
            )
    return files_of


def plan(options, host: Host) -> Tuple:
    """What to do: (the options with their defaults, the FeatureMap that is given or None, the
    Column of each field, {flag: RawSlices of this host}, what output_folder.replaced returns, the
    days.Limits).

    Args:
        options: the flags.
        host: this host.
    """
    check(options, host)
    if not options.dry_run:  # before the map is read, which may lie there
        publishing.check_output_dir(options.output_dir)
    described = table_of(options)
    known = known_map(options, described)
    if options.guess and not (options.dataset or described or known):
        options, described = guessed(options, host)
        if options.dry_run:
            return None
    options = complete(options, known, described)
    for column in options.table.columns if options.output_format == "libsvm" else ():
        if column.kind in (LIST, WEIGHT, KEY) or column.scale:
            raise BadInput(
                f"--output_format=libsvm: lines hold no column of kind {column.kind} such as "
                f"{column.name}; leave --output_format out."
            )
    fields = column_kinds.fields(options.table.columns, options.integers)
    sources = sources_of(options)
    found = find(sources, host.own_files)
    cut = {s.flag: list(slices.cut(s, found[s.flag], options)) for s in sources}
    tasks = itertools.chain(*cut.values())
    without = (x.lines.path for x in tasks if LABEL not in {y.kind for y in x.layout.first})
    for path in sorted(set(without)):
        logging.info("%s has no label column; its rows get label 0.", path)
    asked = {i for s in sources for i, part in enumerate(s.split.shares) if part}
    old = {} if options.dry_run else output_folder.replaced(asked, options, host)
    return options, known, fields, cut, old, days.limits_of(options, fields)


def log_summary(files, fields, fingerprint, seconds):
    progress.log_examples(files)
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
        rows, len(fields), feature_map.end_of(fields[-1]), fingerprint, seconds, rows / seconds,
    )  # fmt: skip
