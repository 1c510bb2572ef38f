"""Converts raw rows to records: counts categories, then writes ids and the map that says them."""

import functools
import os
import sys
import time
from typing import List

import numpy as np
from absl import logging

from data_tools.click_logs import (
    days,
    field_tables,
    output_folder,
    row_parser,
    slices,
    splitting,
)
from data_tools.click_logs.options import SCRATCH, PrepareOptions, log_summary, plan
from data_tools.common.command_line import ALONE, Host
from data_tools.common.progress import Skipping
from data_tools.libsvm.pieces import NO_ROWS, together
from deepfm.errors import BadInput, listed
from deepfm.records.data_file import DataFile
from deepfm.records.storage import places


def prepare(options: PrepareOptions, engine, host: Host = ALONE) -> List[DataFile]:
    """Does what the flags say; arguments, result and errors are those of convert.convert."""
    start = time.monotonic()
    planned = plan(options, host)
    if planned is None:  # --dry_run
        return []
    options, known, columns, cut, old, limits = planned
    if options.split_by.startswith("time:"):
        cut["input"] = _by_time(engine, cut["input"], options)
    every = [task for group in cut.values() for task in group]
    fields, grown = known and list(map(field_tables.from_texts, known.fields)), None
    if options.dry_run:
        _grow(engine, cut["input"], columns, options, known, limits, lambda text: None)
        logging.info("--dry_run: nothing is written.")
        return []
    with engine.scratch(options.output_dir, SCRATCH, host.number) as scratch:
        if options.day:
            with places.of(scratch).create(os.path.join(scratch, days.RARE)) as f:
                grown = _grow(engine, cut["input"], columns, options, known, limits, f.write)
            fields = grown.fields
        elif not known:
            counts = _counts(engine, cut["input"], columns, options)
            fields = field_tables.from_counts(columns, counts, options.min_count)
        ids = output_folder.write_map(fields, known, grown, old, options, scratch)
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


def _counts(engine, tasks, columns, options):
    """The Counts of the training rows; of a day, those of rare categories are all there, too."""
    bad = Skipping(options.max_bad_records, log=False)  # the second pass logs them
    least = 1 if options.day else options.min_count
    seen, counts = engine.count(tasks, columns, least, _size(tasks), bad)
    if not seen:
        raise BadInput(
            f"--input={options.input}: no training rows, or all their cells are missing."
        )
    return counts


def _grow(engine, tasks, columns, options, known, limits, write):
    """The days.Grown of a day, from the counts of its training rows; logs what changes."""
    past = days.before(known, os.path.dirname(options.feature_map)) if known else days.FIRST
    counts = _counts(engine, tasks, columns, options)
    if known:
        fields = list(map(field_tables.from_texts, known.fields))
    else:  # the first day grows from a map without categories
        fields = field_tables.from_counts(columns, counts, sys.maxsize)
        fields = [field._replace(vocabulary={}) for field in fields]
    grown = days.grow(fields, counts, past, limits, write)
    days.log(grown.changes, [x.name for x in fields], options.day)
    return grown


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
