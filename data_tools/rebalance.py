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
from typing import List

from deepfm.runtime import check_python  # noqa: F401  says what to do if TensorFlow is missing

# isort: split

from data_tools.common import command_line, publishing, shards
from data_tools.common.shards import ALONE, Host
from data_tools.rebalancing import output_files, passes, sampling
from data_tools.rebalancing.options import SEEDS, Options, check
from data_tools.rebalancing.passes import Work
from data_tools.rebalancing.record_blocks import FileSlice
from deepfm.data import dataset_json, datasets, formats
from deepfm.errors import BadInput
from deepfm.runtime import remote_files


def main(options: Options):
    rebalance(options, shards.this_host(options.input, on_spark="rebalance"))


def _of_host(options, host):
    """The options for one of several hosts, which writes its own files to a folder of its own."""
    index, number, _ = host
    if number == 1:
        return options
    n = options.num_files
    if 0 < n < number:
        raise BadInput(f"--num_files={n} is too few for {number} hosts; try --num_files={number}.")
    publishing.check_hosts(options.output_dir, number, sum(output_files.SUFFIXES.values(), ()))
    return dataclasses.replace(
        options,
        output_dir=host.folder(options.output_dir),
        num_files=n * (index + 1) // number - n * index // number,
        seed=(options.seed + index) % SEEDS,  # so that hosts draw independently
    )


def rebalance(options: Options, host: Host = ALONE) -> List[datasets.DataFile]:
    """Does what the flags say, and returns the files that were written.

    No file gets its final name in output_dir before all are complete.

    Raises:
        BadInput: a record or a flag is wrong.
        OSError: an output cannot be written, or a process was killed.
    """
    start = time.monotonic()
    check(options)
    options = _of_host(options, host)
    remote_files.check_readable(options.input, "input")
    finished = publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", partial=host.own_files)
    names = output_files.names(data, options)
    output_files.check_apart(data, options, finished)
    old = output_files.prepare(data, options)
    tfrecord = data.format is formats.TFRECORD
    schema = output_files.schema(data, datasets.first_record) if tfrecord else None
    weighted = not tfrecord and datasets.is_weighted(data)
    parts = enumerate(sampling.parts(data))
    tasks = [FileSlice(lines, number, known, weighted) for number, (lines, known) in parts]
    with publishing.scratch(options.output_dir, ".rebalance-") as scratch:
        rates = sampling.rates(options, lambda: passes.count_labels(data, tasks, schema, options))
        bits = passes.bits(data, rates, options.num_workers)
        work = Work(scratch, schema, rates, options, bits)
        before, kept, max_id = passes.scatter_all(data, tasks, work)
        files = passes.write_all(tasks, names, work)
        written = [os.path.basename(file.path) for file in files]
        described = data.rows is not None and data.field_size  # LibSVM text has no other source
        if schema or described:
            written.append(dataset_json.METADATA)
            feature_size = max(data.feature_size or 0, max_id + 1)
            rates = sampling.rates_of_all(data, before, kept, rates)
            dataset_json.write(
                scratch, schema.field_size if schema else described, feature_size, files, rates,
                bool(schema and schema.multi_valued), data.hash_buckets or 0,
                data.feature_map, schema.weighted if schema else datasets.is_weighted(data),
                **data.made,
            )  # fmt: skip
        publishing.publish(scratch, [(options.output_dir, written, old, {})])
    output_files.log_summary(before, kept, len(files), time.monotonic() - start)
    return files


if __name__ == "__main__":
    command_line.run(main, Options)
