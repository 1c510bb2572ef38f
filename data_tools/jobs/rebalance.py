"""Rewrites a data set as any number of files, shuffled as a whole and balanced by label."""

import dataclasses
import os
import time
from typing import List

from absl import logging

from data_tools.common import publishing
from data_tools.common.command_line import ALONE, Host
from data_tools.rebalancing import sampling
from data_tools.rebalancing.options import SEEDS, RebalanceOptions, check
from data_tools.rebalancing.selecting import ALL, Order, Work
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import data_file, dataset_json
from deepfm.records.data_file import DataFile
from deepfm.records.schema import Schema, Shape
from deepfm.records.storage import places

# Suffixes of the files in output_dir that count as data of each format.
SUFFIXES = {"tfrecord": data_file.TFRECORD, "libsvm": (".libsvm", ".libsvm.gz")}


def _of_host(options, host):
    """The options for one of several hosts, which writes its own files to a folder of its own."""
    index, number, _ = host
    if number == 1:
        return options
    n = options.num_files
    if 0 < n < number:
        raise BadInput(f"--num_files={n} is too few for {number} hosts; try --num_files={number}.")
    publishing.check_hosts(options.output_dir, number, sum(SUFFIXES.values(), ()))
    return dataclasses.replace(
        options,
        output_dir=host.folder(options.output_dir),
        num_files=n * (index + 1) // number - n * index // number,
        seed=(options.seed + index) % SEEDS,  # so that hosts draw independently
    )


def rebalance(options: RebalanceOptions, engine, host: Host = ALONE) -> List[DataFile]:
    """Does what the flags say; arguments, result and errors are those of convert.convert."""
    start = time.monotonic()
    check(options)
    options = _of_host(options, host)
    finished = publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", partial=host.own_files)
    is_text = data.data_format == "libsvm"
    schema = None if is_text else _schema(data)
    weighted = datasets.shows(data, "weighted") if is_text else schema.weighted
    names = _names(data, options)
    _check_apart(data, options, finished)
    old = _replaced(data, options)
    with engine.scratch(options.output_dir, ".rebalance-") as scratch:
        work = Work(
            sampling.parts(data), schema, weighted, options.max_bad_records, ALL,
            Order(options.seed, options.shuffle), options.compress, places.absolute(scratch),
        )  # fmt: skip
        work = work._replace(rates=sampling.rates(options, engine, data, work))
        before, rows, max_id = sampling.counted(engine, data, work)
        sampling.check_files(names, sum(rows))
        found = engine.shuffle(data, work, rows, names)
        sampling.check_written(data, found, sum(rows))
        ones = sum(positives for _, (_, positives) in found.values())
        kept = [sum(rows) - ones, ones]
        before = kept if work.rates == ALL else before  # dataset.json may be wrong about labels
        # What was measured on all records of the input is not known of some of them.
        same = data.whole and work.rates == ALL and sum(kept) == data.rows
        made = {key: x for key, x in data.made.items() if same or key == "ids"}
        described = data.rows is not None and data.field_size  # LibSVM text has no other source
        write = lambda folder, files: dataset_json.write(
            folder, schema.field_size if schema else described,
            max(data.feature_size or 0, max_id + 1), files,
            sampling.rates_of_all(data, before, kept, work.rates),
            multi_valued=bool(schema and schema.multi_valued),
            hash_buckets=data.hash_buckets or 0, feature_map=data.feature_map,
            weighted=weighted, **made,
        )  # fmt: skip
        files, paths = publishing.describe(
            options.output_dir, scratch, found, write if schema or described else None
        )
        with engine.publishing(options.output_dir):
            publishing.publish(scratch, [(options.output_dir, paths, old)])
    _log_summary(before, kept, len(files), time.monotonic() - start)
    return files


def _names(data, options):
    """The names of the files to write."""
    n = options.num_files or len(data.files)
    suffix = SUFFIXES[data.data_format][0] + (".gz" if options.compress else "")
    return [f"part-{i:05d}-of-{n:05d}{suffix}" for i in range(n)]


def _check_apart(data, options, finished):
    """Refuses (BadInput) input that includes an earlier run's output, or that one has replaced."""
    output_dir = places.absolute(options.output_dir)
    for part in options.input.split(","):
        top = places.absolute(part.strip())
        if output_dir.startswith(os.path.join(top, "")) and places.of(top).is_dir(top):
            raise BadInput(
                f"--output_dir={options.output_dir} is inside --input={part.strip()}, which would "
                "then hold every record twice; give a folder outside it."
            )
    own = _inside(data, options)
    if own and finished:
        raise BadInput(
            f"--input={options.input}: an earlier run was killed while it replaced these; now "
            "they are complete. Run the command again to rebalance them once more."
        )
    if own and len(own) < len(data.files):
        raise BadInput(
            f"--input={options.input}: {own[0]} is in --output_dir and other files are not; "
            "give another --output_dir, or an --input without its files."
        )


def _inside(data, options):
    """The paths of the input files that are in output_dir."""
    folder = places.absolute(options.output_dir)
    return [f.path for f in data.files if os.path.dirname(places.absolute(f.path)) == folder]


def _replaced(data, options):
    """Checks output_dir; returns the names in it that the new data set replaces."""
    folder = options.output_dir
    present = publishing.names_in(folder, SUFFIXES[data.data_format])
    publishing.check_hosts(folder, 1, ())
    known = {os.path.basename(path) for path in _inside(data, options)}
    lost = [x for x in present if known and x not in (dataset_json.METADATA, *known)]
    if lost:
        raise BadInput(
            f"--output_dir={folder}: {lost[0]} is not in --input, but would be replaced; give "
            "another folder."
        )
    return publishing.replaced(folder, present, options.overwrite, known)


def _schema(data):
    """The Schema of TFRecords, from dataset.json, else from the first readable record."""
    known = Shape(data.field_size, data.multi_valued, data.weighted)
    if not known.field_size or None in known:
        first = datasets.first_record(data)
        known = Shape(*(said or seen for said, seen in zip(known, first)))
    # Where no record has ids, one is expected: whoever reads the first says what it has.
    return Schema(known.field_size or 1, multi_valued=known.multi_valued, weighted=known.weighted)


def _log_summary(before, kept, num_files, seconds):
    """Logs what was written; before, kept: the records of each label read and written."""
    logging.info(
        "Wrote %d of %d records (%.4f of them positive, %.4f before) to %d files in %.1f s: "
        "%.0f records/s.",
        sum(kept), sum(before), kept[1] / sum(kept), before[1] / sum(before), num_files, seconds,
        sum(kept) / seconds,
    )  # fmt: skip
