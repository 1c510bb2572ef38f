"""Which record each line of predictions is of: its key, or its file and number there.

Found beside the input pipeline, in the order in which it reads a share once.
"""

from itertools import chain, islice, repeat
from typing import Dict, Iterator, Sequence, Tuple

import numpy as np

from deepfm.config import Share
from deepfm.data import bad_records, datasets, shares


def have_keys(data: datasets.DataSet) -> bool:
    """Whether one of the first records of the first files has a key."""
    keys = data.format.keys
    first = lambda path: islice(chain.from_iterable(keys(path)), bad_records.CHUNK)
    return bool(keys) and any(any(first(x.path)) for x in data.files[: bad_records.CHECKED_FILES])


def of_share(
    data: datasets.DataSet, damaged: Sequence[shares.Skipped], share: Share, keyed: bool
) -> Tuple[Dict[str, Iterator], int, np.ndarray]:
    """The origins of the records of a share, in which something stands in for each bad one.

    Returns:
        ({column: what it says of each}: the key, or else the file and the number there; how many
        there are; the numbers of bad ones in the share, int64 [bad ones]).
    """
    places = {file.path: file.places for file in damaged}
    bad, rows = [np.zeros(0, np.int64)], 0
    ranges = shares.divide(data.files, damaged, share.of)[share.index]
    for r in ranges:
        if r.path in places:
            named = (place for place, *_ in data.format.numbered(r.path))
            is_bad = [place in places[r.path] for place in islice(named, r.begin, r.end)]
            bad.append(rows + np.flatnonzero(is_bad))
        rows += r.end - r.begin
    if keyed:
        decode = lambda key: key.decode("utf-8", "backslashreplace")
        keys = lambda r: map(decode, chain.from_iterable(data.format.keys(r.path)))
        end = lambda r: None if r.whole else r.end
        columns = {"key": (islice(keys(r), r.begin, end(r)) for r in ranges)}
    else:
        paths = (repeat(r.path, r.end - r.begin) for r in ranges)
        columns = {"file": paths, "row": (range(r.begin, r.end) for r in ranges)}
    columns = {name: chain.from_iterable(each) for name, each in columns.items()}
    return columns, rows, np.concatenate(bad)
