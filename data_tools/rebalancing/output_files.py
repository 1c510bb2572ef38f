"""The output files of rebalance: their names and records, and what they replace; also on Spark.

`data` is always a DataSet, and `options` an Options.
"""

import os

from absl import logging

from data_tools.common import publishing
from deepfm.errors import BadInput
from deepfm.records import data_file, dataset_json
from deepfm.records.schema import Schema, Shape
from deepfm.records.storage import places

# Suffixes of the files in output_dir that count as data of each format.
SUFFIXES = {
    "tfrecord": data_file.TFRECORD,
    "libsvm": (".libsvm", ".libsvm.gz"),
}


def names(data, options):
    """The names of the files to write."""
    n = options.num_files or len(data.files)
    suffix = SUFFIXES[data.data_format][0] + (".gz" if options.compress else "")
    return [f"part-{i:05d}-of-{n:05d}{suffix}" for i in range(n)]


def check_apart(data, options, finished):
    """Refuses (BadInput) input that includes an earlier run's output, or that one has replaced."""
    output_dir = places.absolute(options.output_dir)
    for part in options.input.split(","):
        top = places.absolute(part.strip())
        if output_dir.startswith(os.path.join(top, "")) and places.of(top).is_dir(top):
            raise BadInput(
                f"--output_dir={options.output_dir} is inside --input={part.strip()}, which would "
                "then hold every record twice; give a folder outside it."
            )
    own = inside(data, options)
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


def inside(data, options):
    """The paths of the input files that are in output_dir."""
    folder = places.absolute(options.output_dir)
    return [f.path for f in data.files if os.path.dirname(places.absolute(f.path)) == folder]


def prepare(data, options):
    """Checks output_dir; returns the names in it that the new data set replaces."""
    folder = options.output_dir
    present = publishing.names_in(folder, SUFFIXES[data.data_format])
    publishing.check_hosts(folder, 1, ())
    known = {os.path.basename(path) for path in inside(data, options)}
    lost = [
        name for name in present if known and not (dataset_json.is_metadata(name) or name in known)
    ]
    if lost:
        raise BadInput(
            f"--output_dir={folder}: {lost[0]} is not in --input, but would be replaced; give "
            "another folder."
        )
    return publishing.replaced(folder, present, options.overwrite, known)


def schema(data, first_shape):
    """The Schema of TFRecords, from dataset.json, else from the first readable record, whose Shape
    first_shape(data) returns, or an empty one."""
    known = Shape(data.field_size, data.multi_valued, data.weighted)
    if not known.field_size or None in known:
        known = Shape(*(said or seen for said, seen in zip(known, first_shape(data))))
    # Where no record has ids, one is expected: whoever reads the first says what it has.
    return Schema(known.field_size or 1, multi_valued=known.multi_valued, weighted=known.weighted)


def log_summary(before, kept, num_files, seconds):
    """Logs what was written; before, kept: the records of each label read and written."""
    logging.info(
        "Wrote %d of %d records (%.4f of them positive, %.4f before) to %d files in %.1f s: "
        "%.0f records/s.",
        sum(kept), sum(before), kept[1] / sum(kept), before[1] / sum(before), num_files, seconds,
        sum(kept) / seconds,
    )  # fmt: skip
