"""Writes prepare's output folder, and decides what it replaces there.

`options` are always options.PrepareOptions, and `host` a command_line.Host.
"""

import functools
import itertools
import os

from absl import logging

from data_tools.click_logs import days, field_tables
from data_tools.click_logs.splitting import SPLITS
from data_tools.common import publishing
from data_tools.libsvm import pieces
from deepfm.errors import BadInput
from deepfm.records import data_file, dataset_json
from deepfm.records.raw import feature_map, moving
from deepfm.records.raw import names as maps
from deepfm.records.raw.column_kinds import LIST, WEIGHT
from deepfm.records.storage import places

_BESIDE = feature_map.FILE, moving.FILE, days.SEEN, days.RARE


def replaced(asked, options, host):
    """Finds the old files that the splits in `asked`, indices of SPLITS, replace.

    Returns:
        {index of the split: (this host's folder for it, names in the folder to replace)}. Each of
        several hosts has its own folder in that of the split.
    """
    old = {}
    for i in sorted(asked):
        folder = host.folder(os.path.join(options.output_dir, SPLITS[i]))
        paths = _data_files(options, i)
        others = [p for p in paths if host.number > 1 and f"-of-{host.number:05d}{os.sep}" not in p]
        if others:
            raise BadInput(
                f"{others[0]}: left by a run that was not on {host.number} hosts; give another "
                f"--output_dir, or delete {os.path.join(options.output_dir, SPLITS[i])}."
            )
        names = [os.path.relpath(p, folder) for p in paths if p.startswith(folder + os.sep)]
        old[i] = folder, publishing.replaced(folder, names, options.overwrite)
    return old


def _data_files(options, split):
    """The paths in a split's folder that would be read as data or as a dataset.json."""
    suffixes = (dataset_json.METADATA, *data_file.TFRECORD, *data_file.LIBSVM)
    top = os.path.join(options.output_dir, SPLITS[split])
    files = places.of(top)
    found = files.walk(top) if files.exists(top) else ()
    paths = [os.path.join(root, n) for root, _, names in found for n in names]
    return sorted(path for path in paths if path.endswith(suffixes))


def write_map(fields, known, grown, old, options, scratch):
    """Writes the map, unless it is already there; returns the entry "ids" of dataset.json.

    Args:
        known: the FeatureMap of --feature_map, or None.
        grown: days.Grown, if the map is made for a day.

    Raises:
        BadInput: another map is there and may not be replaced, or it encoded data that stays.
    """
    texts = map(field_tables.by_texts, fields)
    fingerprint = feature_map.fingerprint(texts, options.table.missing)
    there = os.path.join(options.output_dir, feature_map.FILE)
    files, line = places.of(there), _line(known, fingerprint, options)
    grew = {key: x for key, x in line.items() if key in ("grew_from", "day")}
    ids = dataset_json.ids(feature_map=fingerprint, id_offset=0, **grew)
    if files.exists(there) and not grown:
        kept = maps.load(there, fingerprint)
        if kept and kept.day == line.get("day", kept.day):
            return ids
    made = _BESIDE if grown else (feature_map.FILE,)
    paths = (os.path.join(options.output_dir, name) for name in made)
    there = next(filter(files.exists, paths), None)
    if there and not options.overwrite:
        why = "is of an earlier run" if grown else "has other ids"
        raise BadInput(f"{there} {why}; --overwrite replaces it.")
    for i in range(len(SPLITS)):
        kept = [] if i in old else _data_files(options, i)
        if kept:
            raise BadInput(
                f"{kept[0]}: was written with another {feature_map.FILE}, and this run does not "
                f"write {SPLITS[i]}; give another --output_dir, or delete that folder."
            )
    about = options.table, options.integers, options.min_count
    with files.create(os.path.join(scratch, feature_map.FILE)) as f:
        for text in field_tables.json_lines(fields, *about, **line):
            f.write(text.encode())
    if grown:
        days.write(scratch, fingerprint, grown.past)
    if known and known.fingerprint() != fingerprint:
        _write_moves(known, fields, fingerprint, grown.source, options, scratch)
    elif known:
        moves = os.path.join(os.path.dirname(options.feature_map), moving.FILE)
        if places.of(moves).exists(moves):
            publishing.copy(moves, os.path.join(scratch, moving.FILE))
    return ids


def _write_moves(known, fields, fingerprint, source, options, scratch):
    own, folder = known.fingerprint(), os.path.dirname(options.feature_map)
    moves = {own: (source, moving.first_ids(known.fields))}
    moves.update(moving.earlier(os.path.join(folder, moving.FILE), own, source))
    path = os.path.join(scratch, moving.FILE)
    moving.write(path, fingerprint, moving.first_ids(fields), moves)


def _line(known, fingerprint, options):
    """What a map says of its day and of those that it grew from, as far as there are any."""
    before, day = (), options.day or (known.day if known else "")
    if known:
        own = known.fingerprint()
        before = known.grew_from if own == fingerprint else (own, *known.grew_from)
    line = {"grew_from": list(before), "day": day, "fingerprint": fingerprint if day else ""}
    return {key: x for key, x in line.items() if x}


def publish(written, fields, ids, old, options, host, scratch, elsewhere):
    """Moves everything to its place; returns the data files.

    Args:
        written: {(index of the split, name of the file): BlockFacts}.
        elsewhere: {the same: path}, where the files are now.
    """
    files, folders, place = [], [], places.of(options.output_dir)
    for i, (folder, names) in old.items():
        of_split = sorted(name for j, name in written if j == i)
        found = {name: (elsewhere[i, name], written[i, name]) for name in of_split}
        total = _total(written, i)
        weighted = any(column.kind == WEIGHT for column in options.table.columns)
        write = functools.partial(_describe, fields, weighted, ids, total)
        made = os.path.join(scratch, SPLITS[i])
        described, paths = publishing.describe(folder, made, found, write)
        if paths or names or place.exists(os.path.join(folder, dataset_json.UNFINISHED)):
            folders.append((folder, paths, names))
        files += described
    if not files and host.number == 1:
        raise BadInput("the input holds no rows.")
    made = [x for x in _BESIDE if place.exists(os.path.join(scratch, x))]
    more = [(os.path.join(scratch, x), os.path.join(options.output_dir, x)) for x in made]
    if "day" in ids:
        more += _for_channels(made, [folder for folder, _, _ in folders], options, scratch)
    publishing.publish(scratch, folders, more)
    return files


def _for_channels(made, folders, options, scratch):
    """Puts the map of a day, and its moves, beside each split too, as a channel brings no more."""
    place, more = places.of(scratch), []
    for i, (folder, x) in enumerate(itertools.product(folders, (feature_map.FILE, moving.FILE))):
        path = os.path.join(scratch if x in made else options.output_dir, x)
        if place.exists(path):
            copy = os.path.join(scratch, f"{i}-{x}")
            publishing.copy(path, copy)
            more.append((copy, os.path.join(folder, x)))
    return more


def _describe(fields, weighted, ids, total, made, files):
    dataset_json.write(
        made, len(fields), feature_map.end_of(fields[-1]), files,
        multi_valued=any(field.kind == LIST for field in fields), weighted=weighted,
        feature_map=ids["feature_map"], ids=ids,
        value_ranges=pieces.ranges(total.low, total.high), unknown_shares=_unknown(total, fields),
    )  # fmt: skip


def _total(written, split):
    """The BlockFacts of a split."""
    of_split = (facts for (i, _), facts in written.items() if i == split)
    return functools.reduce(pieces.together, of_split, pieces.NO_ROWS)


def _unknown(total, fields):
    """The entry "unknown_shares" of a split, from its BlockFacts."""
    return {f.name: n / total.rows for f, n in zip(fields, total.unknown.tolist())}


def log_unknown(written, fields, options):
    """Logs the share of each split's cells that the map does not know; warns of large ones.

    What is large depends on the training rows: of this run, or else beside --feature_map.
    """
    trained = None
    for i in sorted({i for i, _ in written}):
        total = _total(written, i)
        if not total.rows:  # of this host
            continue
        shares = _unknown(total, fields)
        if trained is None and i:
            there = os.path.dirname(options.feature_map or "") or options.output_dir
            trained = dataset_json.load(os.path.join(there, SPLITS[0])) or {}
        trained = {"unknown_shares": shares} if trained is None else trained
        most = sorted(shares.items(), key=lambda item: -item[1])[:10]
        text = ", ".join(f"{name} {share:.1%}" for name, share in most if share)
        logging.info("%s: cells that the map does not know: %s.", SPLITS[i], text or "none")
        above = dataset_json.far_above(total.rows, {"unknown_shares": shares}, trained)
        if above:
            logging.warning("%s: %s", SPLITS[i], above)
