"""Converts raw rows to records: counts categories, then writes ids and the map that says them."""

import functools
import time
from typing import List

import numpy as np
from absl import logging

from data_tools.click_logs import field_tables, output_folder, row_parser, slices, splitting
from data_tools.click_logs.options import SCRATCH, PrepareOptions, log_summary, plan
from data_tools.common.command_line import ALONE, Host
from data_tools.common.progress import Skipping
from data_tools.libsvm.pieces import NO_ROWS, together
from deepfm.errors import BadInput, listed
from deepfm.records import codec
from deepfm.records.data_file import DataFile


def prepare(options: PrepareOptions, engine, host: Host = ALONE) -> List[DataFile]:
    """Does what the flags say; arguments, result and errors are those of convert.convert."""
    start = time.monotonic()
    planned = plan(options, host)
    if planned is None:  # --dry_run
        return []
    options, known, columns, cut, old = planned
    if options.split_by.startswith("time:"):
        cut["input"] = _by_time(engine, cut["input"], options)
    every = [task for group in cut.values() for task in group]
    if every and options.output_format == "tfrecord":
        codec.check_size(every[0].lines.path, _size(every), engine.number)
    with engine.scratch(options.output_dir, SCRATCH, host.number) as scratch:
        fields = known and list(map(field_tables.from_texts, known.fields))
        if not known or options.grow:
            fields = _fields(engine, cut["input"], columns, options, fields)
        ids = output_folder.write_map(fields, known, old, options, scratch)
        written, paths = _encode(engine, every, fields, options, scratch)
        with engine.publishing(options.output_dir):
            files = output_folder.publish(written, fields, ids, old, options, host, scratch, paths)
    log_summary(files, fields, ids["feature_map"], time.monotonic() - start)
    output_folder.log_unknown(written, fields, options)
    return files


def _by_time(engine, tasks, options):
    """The tasks with the times that divide their rows."""
    bad = Skipping(options.max_bad_records, log=False)
    times = [slices.times_of(task) for task in tasks]
    seen, (counts,) = engine.count(times, times[0].layout.columns, 1, _size(times), bad)
    if not seen:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    bounds = splitting.bounds_of(counts.keys, counts.counts, tasks[0].split.shares)
    times = row_parser.numbers_of(np.array(bounds, np.uint64))
    begins = listed([f"{x:.17g}" for x in times])
    logging.info("--split_by=%s: the parts begin at %s.", options.split_by, begins)
    return [task._replace(split=task.split._replace(bounds=bounds)) for task in tasks]


def _size(tasks):
    return sum(slices.size(task.lines) for task in tasks)


def _fields(engine, tasks, columns, options, known):
    """The Field of each field, from the counts of the training rows; or `known` ones that grow."""
    bad = Skipping(options.max_bad_records, log=False)  # the second pass logs them
    seen, counts = engine.count(tasks, columns, options.min_count, _size(tasks), bad)
    if not seen:
        raise BadInput(f"--input={options.input}: no training row holds a category.")
    if not known:
        return field_tables.from_counts(columns, counts, options.min_count)
    fields = field_tables.grown(known, counts, options.min_count)
    new = [len(x.vocabulary) - len(was.vocabulary) for x, was in zip(fields, known)]
    columns = f"{np.count_nonzero(new)} of {len(new)} columns"
    logging.info("--day=%s: %s new categories in %s.", options.day, f"{sum(new):,}", columns)
    return fields


def _encode(engine, tasks, fields, options, scratch):
    """Writes all rows; ({(index of the split, name of the file): BlockFacts}, {the same: path})."""
    bad, folder = Skipping(options.max_bad_records), engine.folder(scratch)
    written, paths = {}, {}
    with engine.sharing(fields) as shared:
        work = functools.partial(
            slices.encode, fields=shared, output_format=options.output_format, folder=folder
        )
        with engine.map(work, tasks, "Encoding", _size(tasks), together, bad) as results:
            for _, (split, name, path), facts in results:
                written[split, name] = together(written.get((split, name), NO_ROWS), facts)
                paths[split, name] = path
    bad.log_total()
    return written, paths
