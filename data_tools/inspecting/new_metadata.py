"""Makes the dataset.json of records that Spark or another program wrote, from what was counted."""

import os

from absl import logging

from data_tools.libsvm import pieces
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json
from deepfm.records.data_file import DataFile


def check(options):
    """Refuses (BadInput) --write where it cannot put a dataset.json, or may not."""
    if options.overwrite and not options.write:
        raise BadInput("--overwrite has no effect without --write; leave it out.")
    if not options.write:
        return
    if not os.path.isdir(options.data):
        raise BadInput(
            f"--write: --data={options.data} is not a local directory; name the one that holds the "
            "files."
        )
    path = os.path.join(options.data, dataset_json.METADATA)
    if os.path.exists(path) and not options.overwrite:
        raise BadInput(f"--write: {path} is already there; --overwrite replaces it.")


def write(data: str, summary: dict):
    """Writes the dataset.json of a directory from what `inspect` found, in place of any there.

    What cannot be counted is kept from an older one that describes all files: the sampling rates,
    the fingerprint of the feature map, the number of hash buckets, and a larger feature_size.

    Raises:
        BadInput: the rows differ in their number of fields.
    """
    if summary["shortest_row"] != summary["field_size"] and not summary["multi_valued"]:
        raise BadInput(
            f"--write: the rows have {summary['shortest_row']} to {summary['field_size']} ids, but "
            "dataset.json is for rows of equally many; convert them with libsvm_to_tfrecord --pad "
            "or --multi_valued."
        )
    known = datasets.find(data, "data")
    extremes = ([field[x] for field in summary["fields"]] for x in ("min_value", "max_value"))
    files = [DataFile(*(f[x] for x in DataFile._fields[:4])) for f in summary["files"]]
    dataset_json.write(
        data, summary["field_size"], max(summary["feature_size"], known.feature_size or 0), files,
        known.sampling_rates, multi_valued=summary["multi_valued"],
        hash_buckets=known.hash_buckets or 0, feature_map=known.feature_map,
        weighted=bool(summary["weights"]),
        **{**known.made, "value_ranges": pieces.ranges(*extremes)},
    )  # fmt: skip
    logging.info("Wrote %s.", os.path.join(data, dataset_json.METADATA))
