"""A line of days: how often and when each category was seen, what becomes a row and what goes.

Beside a map that names its day are two files:

- feature_map.seen.npz: of each id `counts` int64 [N], the training rows so far that have it, and
  `last` int32 [N], the day of the last of them; the first day is 0. `day` is that of the map,
  `feature_map` its fingerprint, and `rare_bytes` and `rare_crc32` are of the other file.
- feature_map.rare.jsonl: the categories without an id, sorted by column and text, a line each:
  [number of the field, text, count, last].
"""

import heapq
import io
import itertools
import json
import operator
import os
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
from absl import logging

from data_tools.click_logs import field_tables, row_parser
from data_tools.click_logs.splitting import SPLITS
from data_tools.click_logs.vocabulary import Counts
from deepfm.errors import BadInput, listed, refusing, words_of
from deepfm.records import data_file, dataset_json
from deepfm.records.raw import moving
from deepfm.records.raw.column_kinds import BUCKETS, COUNTED, NUMBER, RANGED
from deepfm.records.raw.feature_map import Field, end_of
from deepfm.records.storage import places

SEEN, RARE = "feature_map.seen.npz", "feature_map.rare.jsonl"


class Past(NamedTuple):
    """What a line knows before a day.

    Attributes:
        day: the number of the day that begins.
        counts, last: as in feature_map.seen.npz, by the ids of the map that grows.
        rare: the entries of feature_map.rare.jsonl.
    """

    day: int
    counts: np.ndarray
    last: np.ndarray
    rare: Iterable[list] = ()


FIRST = Past(0, np.zeros(0, np.int64), np.zeros(0, np.int32))


class Limits(NamedTuple):
    """Which categories get and keep rows.

    Attributes:
        min_count: of each field, how many rows a category needs.
        days_to_live: a category that this many days have not had goes; 0: none does.
        most: {number of a field: its most categories}.
        share: the largest share of a field's categories that goes in a day.
        refit: numbers of the fields of numbers that are scaled anew.
    """

    min_count: Sequence[int]
    days_to_live: int = 0
    most: Dict[int, int] = {}
    share: float = 1.0
    refit: Sequence[int] = ()


class Change(NamedTuple):
    """What a day does to a field.

    Attributes:
        new, gone: numbers of categories.
        new_share, gone_share: their shares of the day's cells.
        waiting: how many more are too many: a share goes at once, and a new one never.
        outside: the share of the day's numbers beyond the range of a number that is a value.
    """

    new: int = 0
    new_share: float = 0.0
    gone: int = 0
    gone_share: float = 0.0
    waiting: int = 0
    outside: float = 0.0


class Grown(NamedTuple):
    """A map after a day: its Fields, a Past for the day after without `rare`, the Change of each
    field, and the old id of each id, int64 [N], -1 for a new one."""

    fields: List[Field]
    past: Past
    changes: List[Change]
    source: np.ndarray


def grow(
    fields: Sequence[Field],
    counts: Sequence[Counts],
    past: Past,
    limits: Limits,
    write: Callable[[bytes], None],
) -> Grown:
    """Takes a day's training rows into a map.

    Categories that stay keep their order, new ones follow by falling frequency. Too many go in this
    order: the longest unseen, the rarest, the last by text.

    Args:
        fields: of the map, by the keys of their texts.
        counts: of the day's rows.
        write: takes feature_map.rare.jsonl in pieces.
    """
    numbers, rest = zip(*map(_of_day, fields, counts))
    new = [[] for _ in fields]
    for i, text, count, last in _together(past.rare, rest, past.day):
        if count >= limits.min_count[i]:
            kind = fields[i].kind
            tie = row_parser.key_of(kind, text) if kind == BUCKETS else text.encode()
            new[i].append((-count, tie, text))
        elif not limits.days_to_live or past.day - last < limits.days_to_live:
            write(json.dumps([i, text, count, last], ensure_ascii=False).encode() + b"\n")
    made, changes, seen, sources, first_id = [], [], [], [], 1
    for i, field in enumerate(fields):
        now, change = field, Change(outside=_outside(field, counts[i]))
        of_ids = ()
        if field.kind in COUNTED:
            own = slice(field.first_id + 2, end_of(field))
            total = past.counts[own] + numbers[i]
            last = np.where(numbers[i] > 0, past.day, past.last[own])
            added = sorted(new[i])
            gone, waiting = _going(field, total, last, past.day, len(added), limits, i)
            keys = [*itertools.compress(field.vocabulary, ~gone)]
            keys += [row_parser.key_of(field.kind, text) for _, _, text in added]
            now = field._replace(vocabulary=dict.fromkeys(keys))
            of_new = np.array([-count for count, _, _ in added], np.int64)
            of_ids = (total[~gone], of_new), (last[~gone], np.full(len(added), past.day))
            today, cells = dict(rest[i]), numbers[i].sum() + sum(count for _, count in rest[i])
            shares = sum(today.get(text, 0) for _, _, text in added), numbers[i][gone].sum()
            of_new, of_gone = (float(x / max(cells, 1)) for x in shares)
            change = Change(len(added), of_new, int(gone.sum()), of_gone, waiting)
        elif i in limits.refit:
            now, change = field_tables.fitted(field, counts[i]), Change()
        ids = itertools.count(first_id + 2)
        now = now._replace(first_id=first_id, vocabulary=dict(zip(now.vocabulary, ids)))
        first_id = end_of(now)
        none = np.zeros(first_id - now.first_id - sum(map(len, of_ids[:1] and of_ids[0])), np.int64)
        seen.append([np.concatenate([none, *x]) for x in of_ids or ((), ())])
        sources.append(moving.old_ids(field, now))
        made.append(now)
        changes.append(change)
    joined = lambda parts: np.concatenate([[0], *parts])
    counts, last = map(joined, zip(*seen))
    return Grown(made, Past(past.day + 1, counts, last.astype(np.int32)), changes, joined(sources))


def _of_day(field, counted):
    """(the rows of a day that have each category of a field; [(text, rows)] of all others)."""
    if field.kind not in COUNTED:
        return np.zeros(0, np.int64), []
    number_of = {**dict(zip(counted.keys.tolist(), counted.counts.tolist())), **counted.long}
    known = (number_of.pop(key, 0) for key in field.vocabulary)
    numbers = np.fromiter(known, np.int64, len(field.vocabulary))
    rest = zip(row_parser.texts_of(field.kind, number_of), number_of.values())
    return numbers, sorted(rest, key=lambda entry: entry[0].encode())


def _together(rare, rest, day) -> Iterator[list]:
    """The entries of feature_map.rare.jsonl with those of a day, [(text, rows)] of each field."""
    of_day = ([i, text, n, day] for i, texts in enumerate(rest) for text, n in texts)
    order = lambda entry: (entry[0], entry[1].encode())
    for (i, text), same in itertools.groupby(
        heapq.merge(rare, of_day, key=order), operator.itemgetter(0, 1)
    ):
        counts, last = zip(*(entry[2:] for entry in same))
        yield [i, text, sum(counts), max(last)]


def _going(field, total, last, day, added, limits, number):
    """(bool [n], which of a field's categories go; how many more are too many)."""
    gone = np.zeros(len(total), bool)
    old = day - last >= limits.days_to_live if limits.days_to_live else gone
    most = limits.most.get(number)
    wanted = max(int(old.sum()), len(total) + added - most if most else 0)
    if wanted <= 0:
        return gone, 0
    texts = row_parser.texts_of(field.kind, field.vocabulary)
    by_text = np.argsort(np.array([text.encode() for text in texts], object))[::-1]
    order = by_text[np.lexsort([total[by_text], last[by_text]])]
    gone[order[: min(wanted, int(limits.share * len(total)))]] = True
    return gone, wanted - int(gone.sum())


def _outside(field, counted):
    if field.kind != NUMBER or not field.column.scale or not len(counted.keys):
        return 0.0
    x = row_parser.numbers_of(counted.keys)
    outside = counted.counts[(x < field.low) | (x > field.high)].sum()
    return float(outside / counted.counts.sum())


def before(known, folder: str) -> Past:
    """The Past of the day after a FeatureMap, whose folder has its files.

    Raises:
        BadInput: they are another map's, or damaged, or a run was killed while it wrote them.
    """
    path, rare, moves = (os.path.join(folder, name) for name in (SEEN, RARE, moving.FILE))
    for mark in (os.path.join(folder, split, dataset_json.UNFINISHED) for split in SPLITS):
        if places.of(mark).exists(mark):
            raise BadInput(
                f"{mark}: the run that writes the day of the map has not ended; wait for it, or "
                "run it again if it was killed."
            )
    own = known.fingerprint()
    moving.earlier(moves, own, np.zeros(0, np.int64))  # refused now, not when rows are counted
    if not places.of(path).exists(path):
        log_it, advice = logging.info, ""
        if known.day:  # it had one
            log_it, advice = logging.warning, f"; to go on counting, copy it and {RARE} there"
        log_it("%s is not there: categories are counted from this day on%s.", path, advice)
        zero = np.zeros(end_of(known.fields[-1]), np.int64)
        return Past(1, zero, zero.astype(np.int32))
    with moving.kept(path) as found:
        fingerprint, size = str(found["feature_map"]), int(found["rare_bytes"])
        checksum = int(found["rare_crc32"]) if "rare_crc32" in found else None  # an older file
        past = Past(int(found["day"]) + 1, found["counts"], found["last"], _entries(rare))
    anew = f"or delete {SEEN} to count categories from this day on."
    if fingerprint != own:
        raise BadInput(f"{path} is not of the feature map beside it; copy the one that is, {anew}")
    advice = f"copy the one that was written with {path}, {anew}"
    if not places.of(rare).exists(rare) or places.of(rare).size(rare) != size:
        raise BadInput(f"{rare} is missing or cut; it has to have {size:,} bytes; {advice}")
    if checksum not in (None, data_file.crc32_of(rare)):
        raise BadInput(f"{rare} is damaged; {advice}")
    return past


def _entries(path):
    with places.of(path).open_file(path) as f:
        for line in io.TextIOWrapper(f, "utf-8", newline="\n"):
            yield json.loads(line)


def limits_of(options, columns) -> Limits:
    """The Limits that PrepareOptions say for these Columns; BadInput if they name others."""
    number = {column.name: i for i, column in enumerate(columns)}

    def number_of(flag, name, kinds, what):
        if name not in number or columns[number[name]].kind not in kinds:
            there = listed([x.name for x in columns if x.kind in kinds]) or "none"
            raise BadInput(f"--{flag}={name} is no column of {what}; there are {there}.")
        return number[name]

    def words_in(flag):
        text = getattr(options, flag)
        with refusing(f"--{flag}={text} is no JSON", 'write a comma list, or such as ["a,b"]'):
            return words_of(text)

    most = {}
    for word in words_in("max_categories"):
        name, _, count = word.rpartition(":")
        if not (count.isdecimal() and int(count)):
            raise BadInput(f"--max_categories={word} is not COLUMN:NUMBER, such as user:1000000.")
        field = number_of("max_categories", name, COUNTED, "categories")
        if field in most:
            raise BadInput(f"--max_categories names {name} twice; leave one out.")
        most[field] = int(count)
    numbers = NUMBER, *RANGED
    refit = [number_of("refit", name, numbers, "numbers") for name in words_in("refit")]
    least = [column.min_count or options.min_count for column in columns]
    share = 0.1 if options.max_evicted is None else options.max_evicted
    return Limits(least, options.days_to_live or 0, most, share, refit)


def log(changes: Sequence[Change], names: Sequence[str], day: str):
    """Logs what a day changes."""
    new, gone = (sum(getattr(x, name) for x in changes) for name in ("new", "gone"))
    columns = f"{sum(x.new > 0 for x in changes)} of {len(changes)} columns"
    logging.info(
        "--day=%s: %s new categories in %s, %s gone.", day, f"{new:,}", columns, f"{gone:,}"
    )
    for name, x in zip(names, changes):
        if x.new or x.gone or x.waiting:
            logging.info(
                "%s: %s new, %.1f %% of the day's cells; %s gone, %.1f %%%s.", name, f"{x.new:,}",
                100 * x.new_share, f"{x.gone:,}", 100 * x.gone_share,
                f"; {x.waiting:,} more wait for the next day" * bool(x.waiting),
            )  # fmt: skip
        if x.outside:
            logging.info(
                "%s: %.1f %% of the day's numbers lie outside the map's range; --refit=%s takes "
                "the new one.", name, 100 * x.outside, name,
            )  # fmt: skip


def write(scratch: str, fingerprint: str, past: Past):
    """Writes feature_map.seen.npz into a folder that has feature_map.rare.jsonl."""
    rare = os.path.join(scratch, RARE)
    moving.save(
        os.path.join(scratch, SEEN), feature_map=fingerprint, day=past.day - 1, counts=past.counts,
        last=past.last, rare_bytes=places.of(rare).size(rare), rare_crc32=data_file.crc32_of(rare),
    )  # fmt: skip
