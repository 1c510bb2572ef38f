"""prepare, day after day: what is counted over the days, what gets a row, and what goes."""

import collections
import contextlib
import itertools
import json
import logging
import os
import random
import shutil
import signal

import numpy as np
import pytest
from test_atomic_files import begun, die
from test_growing import print_of

from data_tools import prepare
from data_tools.click_logs import days
from data_tools.prepare import PrepareOptions
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json
from deepfm.records.raw import feature_map as maps
from deepfm.records.raw import moving
from deepfm.records.raw.column_kinds import CATEGORY, NUMBER, Column

COLUMNS = [
    {"name": "clicked", "kind": "label"},
    {"name": "shop", "kind": "category"},
    {"name": "tags", "kind": "list", "separator": "|"},
    {"name": "user", "kind": "category", "min_count": 2},
    {"name": "price", "kind": "number", "scale": "minmax"},
    {"name": "age", "kind": "number", "bounds": [1, 2]},
]
DAYS, ROWS = 7, 300
LIMITS = {"days_to_live": 2, "max_categories": "shop:14", "max_evicted": 0.25, "min_count": 3}


def rows_of(day):
    """Shops, tags and users, of which some are new and some do not come back."""
    draw = random.Random(day)
    near = lambda name, most: f"{name} {3 * day + int(draw.expovariate(1 / most))} ↵"
    return [
        [
            str(draw.randrange(2)), near("shop", 4), "|".join({near("t", 3), near("tag", 3)}),
            near("u", 40) if draw.random() < 0.9 else "", f"{day + draw.random():.3f}",
            draw.choice(["0", "1.5", "9", ""]),
        ]
        for _ in range(ROWS)
    ]  # fmt: skip


def prepared(folder, number, before=None, rows=None, **flags):
    """The folder of a day."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "columns.json").write_text(json.dumps({"columns": COLUMNS}))
    lines = [",".join(cells) for cells in rows or rows_of(number)]
    (folder / f"{number}.csv").write_text("\n".join([",".join(x["name"] for x in COLUMNS), *lines]))
    given = {"columns": str(folder / "columns.json"), "min_count": LIMITS["min_count"]}
    if before:
        given = {"feature_map": f"{before}/feature_map.json", "grow": True, **LIMITS}
    given.update(input=str(folder / f"{number}.csv"), day=f"day {number}", split="1,0,0")
    given.update(flags)
    prepare.prepare(PrepareOptions(str(folder / f"out{number}"), **given))
    return folder / f"out{number}"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """The folders of all days."""
    folder, outs = tmp_path_factory.mktemp("line"), []
    for day in range(DAYS):
        outs.append(prepared(folder, day, outs[-1] if day else None))
    return outs


def texts_of(kind, cell):
    found = cell.split("|") if kind == "list" else [cell]
    return [text for text in found if text]


def expected():
    """Yields for each day {column: (its categories in order, {text: (count, last)} of the rest,
    (new, gone, waiting))}, the slow and obvious way."""
    known, counts, last = (collections.defaultdict(dict) for _ in range(3))
    for day in range(DAYS):
        found = {}
        for i, name, kind, least in (1, "shop", "", 3), (2, "tags", "list", 3), (3, "user", "", 2):
            cells = [text for cells in rows_of(day) for text in texts_of(kind, cells[i])]
            for text in cells:
                counts[name][text] = counts[name].get(text, 0) + 1
                last[name][text] = day
            have = list(known[name])
            new = [x for x in counts[name] if x not in known[name] and counts[name][x] >= least]
            new.sort(key=lambda x: (-counts[name][x], x.encode()))
            dead = lambda x, day=day, name=name: day - last[name][x] >= 2
            wanted = sum(map(dead, have)) if day else 0
            if name == "shop" and day:
                wanted = max(wanted, len(have) + len(new) - 14)
            order = sorted(have, key=lambda x: x.encode(), reverse=True)
            order.sort(key=lambda x: (last[name][x], counts[name][x]))
            most = int(0.25 * len(have))
            gone = order[: min(wanted, most)]
            known[name] = dict.fromkeys([*(x for x in have if x not in gone), *new])
            for text in gone:
                del counts[name][text], last[name][text]
            rest = {
                text: (n, last[name][text])
                for text, n in counts[name].items()
                if text not in known[name] and not (day and dead(text))
            }
            for text in set(counts[name]) - set(rest) - set(known[name]):
                del counts[name][text], last[name][text]
            waiting = max(wanted, 0) - len(gone)
            found[name] = list(known[name]), rest, (len(new), len(gone), waiting)
        yield found


def test_categories_are_counted_over_days_and_come_and_go_as_the_flags_say(line):
    changed = np.zeros(3, int)
    for day, (out, wanted) in enumerate(zip(line, expected())):
        found, rest = maps.load(str(out / "feature_map.json")), collections.defaultdict(dict)
        entries = [json.loads(x) for x in (out / "feature_map.rare.jsonl").read_text().splitlines()]
        assert entries == sorted(entries, key=lambda x: (x[0], x[1].encode()))
        for i, text, *seen in entries:
            rest[found.fields[i].name][text] = tuple(seen)
        for field in found.fields[:3]:
            assert [*field.vocabulary] == wanted[field.name][0], (day, field.name)
            assert rest[field.name] == wanted[field.name][1], (day, field.name)
            changed += wanted[field.name][2]
        assert found.day == f"day {day}" and len(found.grew_from) == day
    assert changed.all()


def test_each_day_says_where_the_rows_of_the_days_before_go(line):
    known = [maps.load(str(out / "feature_map.json")) for out in line]
    path = str(line[-1] / moving.FILE)
    for old in known[:-1]:
        found, slow = moving.read(path, print_of(old), print_of(known[-1])), None
        for was, now in zip(known, known[1:]):  # what went and came back is a new one
            if was.day >= old.day:
                step = moving.join(was, now)
                source = np.where(step.new, -1, step.source)
                slow = source if slow is None else np.where(source < 0, -1, slow[source])
        np.testing.assert_array_equal(np.where(found.new, -1, found.source), slow)
        assert found.gone == old.feature_size - np.count_nonzero(slow >= 0)
    assert moving.read(path, "0" * 16, print_of(known[-1])) is None
    assert moving.read(path, print_of(known[0]), print_of(known[1])) is None


def test_a_channel_brings_map_and_moves_with_each_split(line, tmp_path):
    for out in (line[0], line[-1], prepared(tmp_path, 1, line[0], split="0.5,0.5,0")):
        for split in set(out.iterdir()) & {out / "train", out / "valid"}:
            for name in ("feature_map.json", moving.FILE):
                assert (split / name).exists() == (out / name).exists()
                if (out / name).exists():
                    assert (split / name).read_bytes() == (out / name).read_bytes()
            assert dataset_json.load(str(split))["ids"]["day"] in ("day 0", "day 1", "day 6")
    assert not (line[0] / moving.FILE).exists()


def log_of(caplog, run):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run()
    return [x.getMessage() for x in caplog.records if "day" in x.getMessage()]


def test_a_dry_run_says_what_the_run_does_and_writes_nothing(line, tmp_path, caplog):
    run = lambda folder, **flags: log_of(caplog, lambda: prepared(folder, 4, line[3], **flags))
    dry, real = run(tmp_path / "a", dry_run=True), run(tmp_path / "b")
    assert dry == real
    assert not (tmp_path / "a" / "out4").exists()
    *_, wanted, _, _ = expected()
    of_day = [x for cells in rows_of(4) for x in cells[1:2]]
    assert any("--day=day 4: " in text for text in real)
    shop = next(text for text in real if text.startswith("shop: "))
    new, gone, waiting = wanted["shop"][2]
    assert shop.startswith(f"shop: {new} new, ") and f"; {gone} gone, " in shop
    assert (f"{waiting} more wait" in shop) == bool(waiting)
    share = sum(text in wanted["shop"][0][-new:] for text in of_day) / len(of_day) if new else 0
    assert f"{new} new, {100 * share:.1f} % of the day's cells" in shop
    (outside,) = (text for text in real if text.startswith("price: "))
    assert "price: 100.0 % of the day's numbers lie outside the map's range" in outside


def test_numbers_stay_as_they_are_but_for_those_that_are_made_anew(line, tmp_path, caplog):
    old = maps.load(str(line[2] / "feature_map.json")).fields
    assert (old[3].low, old[3].high) == pytest.approx((0, 1), abs=0.05)
    run = lambda: prepared(tmp_path, 3, line[2], refit="price,age")
    assert not [text for text in log_of(caplog, run) if "outside the map's range" in text]
    out = tmp_path / "out3"
    found = maps.load(str(out / "feature_map.json"))
    assert found.fields[3].low == pytest.approx(3, abs=0.05)
    moves = moving.read(str(out / moving.FILE), found.grew_from[0], print_of(found))
    new = found.fields[3].first_id + np.arange(2)
    assert moves.new[new].tolist() == [False, True]
    assert found.fields[4].bounds == old[4].bounds  # given ones
    assert not moves.new[found.fields[4].first_id :].any()


def test_a_day_has_the_same_bytes_however_its_rows_come(line, tmp_path):
    shuffled = random.Random(0).sample(rows_of(5), ROWS)
    out = prepared(tmp_path, 5, line[4], shuffled, num_workers=3)
    again = prepared(tmp_path, 5, line[4], shuffled, overwrite=True)
    for name in ("feature_map.json", "feature_map.seen.npz", "feature_map.rare.jsonl", moving.FILE):
        assert (out / name).read_bytes() == (line[5] / name).read_bytes()
        assert (again / name).read_bytes() == (line[5] / name).read_bytes()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"max_categories": "shop"}, "--max_categories=shop is not COLUMN:NUMBER, such as user"),
        ({"max_categories": "price:9"}, "--max_categories=price is no column of categories; there"),
        ({"max_categories": "shop:²"}, "--max_categories=shop:² is not COLUMN:NUMBER"),
        ({"max_categories": "shop:9,shop:8"}, "--max_categories names shop twice; leave one out"),
        ({"refit": '["age'}, r'--refit=\["age is no JSON .*; write a comma list, or such as'),
        ({"refit": "shop"}, "--refit=shop is no column of numbers; there are price, age."),
        ({"feature_map": ""}, "--feature_map is empty; give it a value, or leave it out."),
        ({"day": ""}, "--day is empty; give it a value, or leave it out."),
        ({"day": None}, "--day is missing"),
        ({"day": "day 10"}, "--day=day 10 does not come after day 2, the day of .*feature_map.jso"),
        ({"feature_map": None}, "--feature_map is missing: --grow, --feature_map, --input and"),
        ({"input": None, "test_input": "x"}, "--input is missing"),
        ({"grow": False, "days_to_live": None, "max_categories": None, "max_evicted": None,
          "min_count": None, "dry_run": True}, "--dry_run has no effect with --feat"),
        ({"grow": False, "feature_map": None}, "--days_to_live has no effect without --grow"),
        ({"grow": False, "days_to_live": None, "max_categories": None, "max_evicted": None,
          "min_count": None}, "--grow is missing"),
    ],
)  # fmt: skip
def test_flags_that_name_no_such_thing_are_refused(line, tmp_path, flags, sentence):
    with pytest.raises(BadInput, match=sentence):
        prepared(tmp_path, 3, line[2], **flags)
    assert not (tmp_path / "out3").exists()


def test_what_a_line_counts_is_no_data_of_the_folder_above_the_splits(line):
    (file,) = datasets.find(str(line[1]), "data").files
    assert os.path.dirname(file.path) == f"{line[1]}/train"


def test_names_with_commas_are_given_as_json():
    columns = Column("shop, city", CATEGORY), Column("price", NUMBER), Column("age, years", NUMBER)
    given = {"max_categories": '["shop, city:5"]', "refit": '["price", "age, years"]'}
    limits = days.limits_of(PrepareOptions("out", min_count=3, **given), columns)
    assert (limits.most, limits.refit) == ({0: 5}, [1, 2])


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("feature_map.rare.jsonl", lambda x: x[:-9], "map.rare.jsonl is missing or cut; it has to"),
        (
            "feature_map.rare.jsonl",
            None,
            "feature_map.rare.jsonl is missing or cut; it has to .* or delete feature_map.seen.npz",
        ),
        ("feature_map.seen.npz", lambda x: x[:-30], "feature_map.seen.npz is damaged"),
        ("feature_map.seen.npz", "other", "seen.npz is not of the feature map beside it"),
        ("feature_map.rare.jsonl", lambda x: x.replace(b", 1, 2]", b", 2, 2]", 1), "l is damaged"),
        ("feature_map.rare.jsonl", lambda x: b"\xff" + x[1:], "l is damaged; copy the one"),
        (
            "feature_map.json",
            lambda x: x.replace(b'"shop ', b'"sho  ', 1),
            "json is damaged, as its",
        ),
        ("feature_map.json", lambda x: b"[" * 100000, "is not a feature map .RecursionError"),
        (moving.FILE, lambda x: x[:200] + b"?" + x[201:], "moves.npz is damaged"),
        (moving.FILE, lambda x: x[:900], "moves.npz is damaged"),
    ],
)
def test_damaged_files_of_a_line_are_named(line, tmp_path, name, content, sentence):
    for path in line[2].glob("feature_map*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if content == "other":
        (tmp_path / name).write_bytes((line[1] / name).read_bytes())
    elif content:
        (tmp_path / name).write_bytes(content((line[2] / name).read_bytes()))
    else:
        (tmp_path / name).unlink()
    for dry_run in (True, False):
        with pytest.raises(BadInput, match=sentence):
            prepared(tmp_path / "new", 3, tmp_path, dry_run=dry_run)


def test_a_line_without_counts_counts_from_the_day_on(line, tmp_path, caplog):
    (tmp_path / "feature_map.json").write_bytes((line[2] / "feature_map.json").read_bytes())
    found = log_of(caplog, lambda: prepared(tmp_path, 3, tmp_path, days_to_live=1))
    assert "categories are counted from this day on" in " ".join(found)
    assert any("to go on counting, copy it and feature_map.rare.jsonl" in text for text in found)


def test_a_folder_is_no_feature_map(line, tmp_path):
    with pytest.raises(BadInput, match=f"{line[2]} is a folder; try {line[2]}/feature_map.json"):
        prepared(tmp_path, 3, line[2], feature_map=str(line[2]))


def test_a_day_does_not_grow_from_one_that_was_killed_while_it_was_written(line, tmp_path):
    """Else a map without its counts would begin to count anew."""
    before = shutil.copytree(line[2], tmp_path / "killed")
    os.remove(os.path.join(before, "feature_map.seen.npz"))
    (tmp_path / "killed" / "train" / ".unfinished").touch()
    with pytest.raises(BadInput, match="killed/train/.unfinished: the run that writes the day of"):
        prepared(tmp_path, 3, before)


def test_a_day_that_is_killed_anywhere_is_finished_by_the_next_run(line, tmp_path):
    """In place of the day before, which is the same folder."""
    for left in itertools.count():
        folder = tmp_path / str(left)
        shutil.copytree(line[2], folder / "out3")
        day = lambda folder=folder: prepared(folder, 3, folder / "out3", overwrite=True)

        def killed(left=left, day=day):
            replace = os.replace

            def counted(*paths):
                nonlocal left
                left -= 1
                return die() if left < 0 else replace(*paths)

            os.replace = counted
            day()

        code = begun(killed)()
        assert code in (0, -signal.SIGKILL)
        if code:
            with contextlib.suppress(BadInput):  # it was all but written
                day()
        assert content_of(folder / "out3") == content_of(line[3])
        assert content_of(prepared(folder, 4, folder / "out3")) == content_of(line[4])
        if not code:
            break
    assert left > 6


def content_of(folder):
    return {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()}


def test_other_rows_of_a_day_replace_its_counts_as_well(line, tmp_path):
    """Also where they bring the same categories, so that the map stays."""
    rows = [*rows_of(3), ["1", "a shop that is rare", "", "a user that is rare", "3.5", "0"]]
    fresh, out = prepared(tmp_path / "a", 3, line[2], rows), prepared(tmp_path / "b", 3, line[2])
    before = content_of(out)
    shutil.rmtree(out / "train")
    with pytest.raises(BadInput, match="out3/feature_map.json is of an earlier run; --overwrite"):
        prepared(tmp_path / "b", 3, line[2], rows)
    assert content_of(out) == before
    prepared(tmp_path / "b", 3, line[2], rows, overwrite=True)
    assert content_of(out) == content_of(fresh) != before
    assert content_of(out)["feature_map.json"] == before["feature_map.json"]
    prepared(tmp_path, 4, out)


def test_a_day_that_changes_no_category_keeps_the_moves(line, tmp_path):
    rows = [["1", *cells[1:4], "6.5", "0"] for cells in rows_of(6)[:1]]
    flags = dict(days_to_live=None, max_categories=None, max_evicted=None, min_count=999)
    out = prepared(tmp_path, 7, line[6], rows, **flags)
    assert (out / moving.FILE).read_bytes() == (line[6] / moving.FILE).read_bytes()


def test_what_is_above_a_bound_waits_for_the_next_day(line, tmp_path, caplog):
    """New categories all come, so that they may be more than the bound."""
    rows = [["1", f"new {i % 9}", "t", "u", "1", "0"] for i in range(90)]
    flags = dict(max_categories="shop:4", max_evicted=1, days_to_live=None)
    found = log_of(caplog, lambda: prepared(tmp_path, 7, line[6], rows, **flags))
    old = len(maps.load(str(line[6] / "feature_map.json")).fields[0].vocabulary)
    assert f"shop: 9 new, 100.0 % of the day's cells; {old} gone" in " ".join(found)
    assert "5 more wait for the next day" in " ".join(found)
