"""Rewrites a data set as any number of files, shuffled as a whole and balanced by label."""

import dataclasses
import time
from typing import List

from data_tools.common import publishing
from data_tools.common.shards import ALONE, Host
from data_tools.rebalancing import output_files, record_blocks, sampling
from data_tools.rebalancing.options import SEEDS, Options, check
from data_tools.rebalancing.selecting import ALL, Order, Work
from deepfm.data import dataset_json, datasets
from deepfm.errors import BadInput
from deepfm.records import data_file, libsvm_text
from deepfm.records.data_file import DataFile
from deepfm.records.storage import places


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


def rebalance(options: Options, engine, host: Host = ALONE) -> List[DataFile]:
    """Does what the flags say; arguments, result and errors are those of convert.convert."""
    start = time.monotonic()
    check(options)
    options = _of_host(options, host)
    finished = publishing.finish(options.output_dir)
    data = datasets.find(options.input, "input", partial=host.own_files, kinds=data_file.KINDS)
    is_text = data.data_format == "libsvm"
    first = lambda data: datasets.first_record(data, record_blocks.first_shape)
    schema = None if is_text else output_files.schema(data, first)
    shape_of = libsvm_text.first_shape
    weighted = datasets.is_weighted(data, shape_of) if is_text else schema.weighted
    names = output_files.names(data, options)
    output_files.check_apart(data, options, finished)
    old = output_files.prepare(data, options)
    with engine.scratch(options.output_dir, ".rebalance-") as scratch:
        work = Work(
            sampling.parts(data), schema, weighted, options.max_bad_records, ALL,
            Order(options.seed, options.shuffle), options.compress, places.absolute(scratch),
        )  # fmt: skip
        count = lambda: sampling.read_all(engine, data, work, "Counting", log=False)[0]
        rates = sampling.rates(options, lambda: sampling.labels_of(data) or count())
        before, kept, max_id, files, paths = engine.shuffle(
            data, work._replace(rates=rates), names, options.output_dir
        )
        written = list(names)
        described = data.rows is not None and data.field_size  # LibSVM text has no other source
        if schema or described:
            written.append(dataset_json.METADATA)
            dataset_json.write(
                scratch, schema.field_size if schema else described,
                max(data.feature_size or 0, max_id + 1), files,
                sampling.rates_of_all(data, before, kept, rates),
                multi_valued=bool(schema and schema.multi_valued),
                hash_buckets=data.hash_buckets or 0, feature_map=data.feature_map,
                weighted=weighted, **data.made,
            )  # fmt: skip
        with engine.publishing(options.output_dir):
            publishing.publish(scratch, [(options.output_dir, written, old, paths)])
    output_files.log_summary(before, kept, len(files), time.monotonic() - start)
    return files
