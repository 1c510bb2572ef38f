"""The names of the output files of rebalance, and what they replace; the same on Spark.

`data` is always a DataSet, and `options` an Options.
"""

import os

from data_tools.common import publishing
from deepfm.data import dataset_json
from deepfm.data.plain import data_file
from deepfm.errors import BadInput

# Suffixes of the files in output_dir that count as data of each format.
SUFFIXES = {
    "tfrecord": data_file.TFRECORD,
    "libsvm": (".libsvm", ".libsvm.gz"),
}


def names(data, options):
    """The names of the files that this process writes, its part of those of all shards."""
    index, number = options.share
    n = options.num_files or max(len(data.files), number)
    if n < number:
        raise BadInput(f"--num_files={n} is too few for {number} shards; try --num_files={number}.")
    suffix = SUFFIXES[data.data_format][0] + (".gz" if options.compress else "")
    mine = range(n * index // number, n * (index + 1) // number)
    return [f"part-{i:05d}-of-{n:05d}{suffix}" for i in mine]


def check_apart(data, options):
    """Refuses (BadInput) input that includes an earlier run's output: records would come twice."""
    output_dir = os.path.abspath(options.output_dir)
    for part in options.input.split(","):
        top = os.path.join(os.path.abspath(part.strip()), "")
        if os.path.isdir(top) and output_dir.startswith(top):
            raise BadInput(
                f"--output_dir={options.output_dir} is inside --input={part.strip()}, which would "
                "then hold every record twice; give a folder outside it."
            )
    own = inside(data, options)
    if own and len(own) < len(data.files):
        raise BadInput(
            f"--input={options.input}: {own[0]} is in --output_dir and other files are not; "
            "give another --output_dir, or an --input without its files."
        )
    if own and options.share[1] > 1:
        raise BadInput(
            f"--output_dir={options.output_dir} is where the shards read; give another folder."
        )


def inside(data, options):
    """The paths of the input files that are in output_dir."""
    folder = os.path.abspath(options.output_dir)
    return [f.path for f in data.files if os.path.dirname(os.path.abspath(f.path)) == folder]


def metadata_name(options):
    index, number = options.share
    return dataset_json.METADATA if number == 1 else f"dataset-{index:05d}-of-{number:05d}.json"


def prepare(names, data, options):
    """Makes output_dir; returns the names in it that the new data set replaces.

    Other shards may write there at the same time, so only files of theirs may be in it.
    """
    folder = options.output_dir
    publishing.check_hosts(folder, 1, ())  # all hosts write to one folder
    found = publishing.names_in(folder, SUFFIXES[data.data_format], "write")
    _, number = options.share
    mine = {*names, metadata_name(options)}
    if number > 1:
        ending = names[0][len("part-00000") :], f"-of-{number:05d}.json"
        others = [name for name in found if not name.endswith(ending)]
        if others:
            raise BadInput(
                f"--output_dir={folder} holds another data set ({others[0]}), which a shard cannot "
                "replace; delete it."
            )
        found = [name for name in found if name in mine]
    known = {os.path.basename(path) for path in inside(data, options)}
    lost = [
        name for name in found if known and not (dataset_json.is_metadata(name) or name in known)
    ]
    if lost:
        raise BadInput(
            f"--output_dir={folder}: {lost[0]} is not in --input, but would be replaced; give "
            "another folder."
        )
    return publishing.replaced(folder, found, options.overwrite, known)
