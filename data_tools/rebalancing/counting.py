"""Reads all records on an engine: to count them, or to do more with them."""

import functools
from typing import Callable, List, Tuple

import numpy as np

from data_tools.common.skipping import Skipping
from data_tools.rebalancing import sampling, selecting
from data_tools.rebalancing.selecting import Work


def read_all(
    engine, data, work: Work, title: str, read: Callable = selecting.read, log: bool = True
) -> Tuple[List[int], List[int], np.ndarray, int]:
    """Reads the records of a DataSet.

    Args:
        engine: who does it.
        data: the DataSet.
        work: Work.
        title: what is being done.
        read: selecting.read, or with a `put`.
        log: whether to log bad records.

    Returns:
        ((negatives, positives) found, to be written, the records to write of each task, the largest
        id that was seen or -1).

    Raises:
        BadInput: a record is one bad one too many, always the same on Spark; or there is nothing to
            write.
    """
    bad, tasks = Skipping(work.skip, log), range(len(work.inputs))
    every = selecting.Facts(np.zeros(2, np.int64), np.zeros(2, np.int64), -1)
    rows = np.zeros(len(tasks), np.int64)
    size = sum(file.bytes for file in data.files)
    read = functools.partial(read, work=work)
    with engine.map(read, tasks, title, size, selecting.together, bad) as results:
        for task, _, facts in results:
            every = selecting.together(every, facts)
            rows[task] += sum(facts.kept)
    bad.log_total()
    sampling.check_rows(data, sum(every.before), sum(every.kept), bad.count)
    return every.before.tolist(), every.kept.tolist(), rows, every.max_id
