"""prepare: ids and values against loops over rows, the same on any number of processes."""

import collections
import gzip
import json
import math
import os
import pathlib
import random
import re
import shutil
import zlib

import numpy as np
import pytest
from conftest import examples_of, run_tool, run_train, shared_data

from data_tools import prepare as tool
from data_tools.click_logs import slices
from data_tools.common import progress
from data_tools.common.command_line import ALONE, Host
from data_tools.prepare import PrepareOptions
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json, text_blocks
from deepfm.records.raw import feature_map

CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
AVAZU = [
    "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id",
    "app_domain", "app_category", "device_id", "device_ip", "device_model", "device_type",
    "device_conn_type", *(f"C{i}" for i in range(14, 22)),
]  # fmt: skip
SPLITS = ("train", "valid", "test")


def criteo_rows(n, seed=0):
    """n rows of cells: labels, integers of all sizes, and texts of all lengths; some are missing.

    The last category identifies the row: no two rows have the same.
    """
    draw = random.Random(seed)

    def integer():
        kind = draw.random()
        if kind < 0.2:
            return ""
        if kind < 0.3:
            return str(draw.choice([0, -1, -2, -300, -(10**9), 10**9 + 7, 10**17, 99999999]))
        return str(int(10 ** draw.uniform(0, 6)))

    def category(i):
        kind = draw.random()
        if kind < 0.1:
            return ""
        if kind < 0.2:
            return draw.choice(
                ["a", "ä", "ab", "seventeen letters", "eighteen letters!", "日本語日本"]
            )
        return f"{int(draw.random() ** 3 * 4**i) & 0xFFFFFFFF:08x}"

    return [
        [
            str(draw.randint(0, 1)),
            *(integer() for _ in range(13)),
            *map(category, range(25)),
            f"{i}",
        ]
        for i in range(n)
    ]


def text_of(rows, delimiter="\t", end="\n"):
    return "".join(delimiter.join(row) + end for row in rows)


def bucketed(cell):
    """The rule of Criteo's winners, as they wrote it."""
    x = int(cell)
    return str(int(math.log(x) ** 2)) if x > 2 else f"SP{x}"


def encoded(rows, train, min_count, integers="buckets"):
    """[(label, ids, values)] of rows, cell by cell; the vocabulary is of the rows `train`."""
    columns, next_id = [], 1
    for i in range(1, 40):
        cells = [row[i] for row in train if row[i]]
        first, next_id = next_id, next_id + 2
        if i <= 13 and integers == "scaled":
            low, high = min(map(int, cells)), max(map(int, cells))
            columns.append((first, low, high))
            continue
        counts = collections.Counter(map(bucketed, cells) if i <= 13 else cells)
        # Of buckets, SP... come first, and both kinds in the order of their numbers.
        number = lambda t: (t[:2] != "SP", int(t.replace("SP", ""))) if t else ()
        by_text = number if i <= 13 else lambda t: t.encode()
        often = [t for t in counts if counts[t] >= min_count]
        often.sort(key=lambda t: (-counts[t], by_text(t)))
        columns.append((first, {t: next_id + j for j, t in enumerate(often)}))
        next_id += len(often)
    result = []
    for row in rows:
        ids, values = [], []
        for i, column in enumerate(columns, 1):
            cell, value = row[i], 1.0
            if not cell:
                ids.append(column[0])
            elif len(column) == 3:
                first, low, high = column
                ids.append(first + 1)
                x = min(max(int(cell), low), high)
                value = round(math.log(1 + x - low) / math.log(1 + high - low), 4)
            else:
                first, vocabulary = column
                ids.append(vocabulary.get(bucketed(cell) if i <= 13 else cell, first + 1))
            values.append(float(np.float32(value)))
        result.append((float(row[0]), ids, values))
    return result


def records_of(folder):
    """[(label, ids, values)] of all files of a folder, in order."""
    rows = []
    if not os.path.isdir(folder):
        return rows
    for file in datasets.find(str(folder), "data").files:
        before = len(rows)
        if file.path.endswith(".libsvm"):
            with open(file.path) as f:
                for line in f:
                    label, *pairs = line.split()
                    ids, values = zip(*(pair.split(":") for pair in pairs))
                    values = [float(np.float32(v)) for v in values]
                    rows.append((float(label), [int(i) for i in ids], values))
        else:
            rows += [(*x["label"], x["ids"], x["values"]) for x in examples_of(file.path)]
        assert file.rows == len(rows) - before
        assert file.positives == sum(label for label, _, _ in rows[before:])
    return rows


@pytest.fixture
def prepare(tmp_path):
    """prepare({name: text or bytes} or text, flag=value ...) -> output_dir."""

    def run(texts, host=ALONE, output="out", **flags):
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        for name, text in (texts if isinstance(texts, dict) else {"a.tsv": texts}).items():
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        flags = {"input": str(folder), "output_format": "libsvm", "min_count": 3, **flags}
        tool.prepare(PrepareOptions(str(tmp_path / output), **flags), host)
        return tmp_path / output

    return run


@pytest.fixture
def small_pieces(monkeypatch):
    """Blocks of some rows and pieces of some blocks, so that small files have many."""
    monkeypatch.setattr(text_blocks, "BLOCK", 6000)
    monkeypatch.setattr(text_blocks, "TASK", 27000)
    monkeypatch.setattr(slices, "COUNT_ROWS", 40)


ROWS = criteo_rows(400)


@pytest.mark.parametrize("output_format", ["libsvm", "tfrecord"])
@pytest.mark.parametrize("integers, min_count", [("buckets", 5), ("scaled", 1)])
def test_ids_and_values_are_those_of_a_loop_over_cells(
    prepare, small_pieces, output_format, integers, min_count
):
    flags = dict(output_format=output_format, integers=integers, min_count=min_count)
    out = prepare(text_of(ROWS), split="1,0,0", **flags)
    assert records_of(out / "train") == encoded(ROWS, ROWS, min_count, integers)


def all_files(folder):
    paths = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_second_run_on_more_processes_writes_the_same_bytes(prepare, small_pieces):
    texts = {"a.tsv": text_of(ROWS[:250]), "b.tsv": text_of(ROWS[250:])}
    first = all_files(prepare(texts, output="first"))
    assert len(first) > 10
    assert all_files(prepare(texts, output="second", num_workers=3)) == first


def test_what_is_cut_or_packed_otherwise_gives_the_same_ids_and_splits(prepare, monkeypatch):
    out = prepare(text_of(ROWS), output="whole")
    monkeypatch.setattr(text_blocks, "BLOCK", 700)
    monkeypatch.setattr(text_blocks, "TASK", 5000)
    cut = prepare(text_of(ROWS), output="cut")
    assert read_map(cut) == read_map(out)
    for split in SPLITS:
        assert records_of(cut / split) == records_of(out / split)


SHOP = [("label", "label"), ("age", "scaled"), ("item", "category")]


def shop(tmp_path):
    """The path of a file that describes the columns SHOP."""
    columns = [{"name": name, "kind": kind} for name, kind in SHOP]
    (tmp_path / "shop.json").write_text(json.dumps({"columns": columns}))
    return str(tmp_path / "shop.json")


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("item, age, words", [
    ("{}", "{}", None), ("{}.0", "{}", "100.0% of column item (in training 4.0%)"),
    ("{}", "9{}", "100.0% of column age (in training 0.0%)"),
])  # fmt: skip
def test_cells_that_the_map_does_not_know_are_counted_and_many_of_them_warned_of(
    prepare, small_pieces, tmp_path, caplog, with_map, item, age, words
):
    rows = [f"{i % 2},{i % 40 or ''},{i % 7 or ''}\n" for i in range(960)]
    rare = [f"1,,new {i}\n" for i in range(40)]
    (tmp_path / "other.csv").write_text(
        "".join(f"{i % 2},{age.format(1 + i % 39)},{item.format(1 + i % 6)}\n" for i in range(300))
    )
    flags = dict(valid_input=str(tmp_path / "other.csv"), min_count=9)
    if with_map:
        texts = {"a.csv": "".join(rows + rare)}
        out = prepare(texts, columns=shop(tmp_path), min_count=9, split="1,0,0")
        flags.update(input=None, feature_map=str(out / "feature_map.json"), min_count=None)
    else:
        flags.update(columns=shop(tmp_path))
    caplog.clear()
    out = prepare({"a.csv": "".join(rows + rare)}, output="both" + "2" * with_map, **flags)
    shares = {
        name: json.loads((out / name / "dataset.json").read_text())["unknown_shares"]
        for name in os.listdir(out) if (out / name).is_dir()
    }  # fmt: skip
    assert with_map or shares["train"] == {"age": 0, "item": 0.04}
    wrong = {"age": float(age != "{}"), "item": float(item != "{}")}
    assert shares["valid"] == wrong
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"valid: the map does not know {words}; " in text for text in said] == [True] * bool(
        words
    )
    ranges = json.loads((out / "valid" / "dataset.json").read_text())["value_ranges"]
    assert ranges == [[0.0, 1.0] if age == "{}" else [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("header, flags, words", [
    ("age,thing,label", {}, "has no column item .*--header"),
    ("click,item,age", {}, "has no column label .*its columns are click, item, age"),
    ("0,thing,age", {}, "has no column label "),
    ("0,thing,age", {"header": "yes"}, "has no column label "),
    ("age,thing,label", {"header": "no"}, "label 'age' is not 0 or 1"),
    ("a,b,c", {}, "label 'a' is not 0 or 1"),
    ("a,b,c", {"header": "yes"}, None),
    ("item,label,age", {}, None),
])  # fmt: skip
def test_a_header_that_lacks_a_column_is_not_read_by_position(
    prepare, tmp_path, header, flags, words
):
    place = {name: header.split(",").index(name) for name in ("age", "item") if name in header}
    row = ["1"] * 3 if place else ["1", "5", "1"]
    text = "\n".join([header, *[",".join(row)] * 20]) + "\n"
    given = dict(columns=shop(tmp_path), max_bad_records=0 if words else 1, **flags)
    if words:
        with pytest.raises(BadInput, match=rf"in/a\.csv.*{words}"):
            prepare({"a.csv": text}, **given)
    else:
        assert len(records_of(prepare({"a.csv": text}, split="1,0,0", **given) / "train")) == 20


def test_a_row_whose_cells_are_the_numbers_that_name_columns_is_a_row(prepare, tmp_path):
    columns = [{"name": str(i), "kind": "category" if i else "label"} for i in range(4)]
    (tmp_path / "n.json").write_text(json.dumps({"columns": columns}))
    out = prepare({"a.csv": "0,1,1,2\n" * 9}, columns=str(tmp_path / "n.json"), split="1,0,0")
    assert len(records_of(out / "train")) == 9


def test_skipping_is_offered_only_where_few_rows_are_bad(prepare, tmp_path):
    row, given = "1,5,x\n", {"columns": shop(tmp_path)}
    for wrong, good, offered in ((1, 20, True), (20, 20, True), (21, 20, False), (100, 900, False)):
        with pytest.raises(BadInput) as error:
            prepare({"a.csv": row * good + "2,5,x\n" * wrong}, **given)
        assert ("max_bad_records" in str(error.value)) == offered, wrong


def test_parts_of_a_split_weigh_their_shares_by_rows(tmp_path):
    parts = {
        str(i): {"files": {"a": {"rows": n}}, "unknown_shares": {"x": share},
                 "value_ranges": [[i, 2], None]}
        for i, (n, share) in enumerate([(1, 0.75), (3, 0.25)])
    }  # fmt: skip
    found = dataset_json.merge(parts)
    assert found == {"unknown_shares": {"x": 0.375}, "value_ranges": [[0, 2], None]}
    assert dataset_json.merge({**parts, "old": {}}) == {}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_byte_order_mark_and_quotes_change_nothing(prepare, small_pieces, pack):
    quoted = text_of([[f'"{cell}"' for cell in row] for row in ROWS], ",")
    texts = {"a.csv" if pack is bytes else "a.gz": pack(b"\xef\xbb\xbf" + quoted.encode())}
    assert records_of(prepare(texts, split="1,0,0") / "train") == encoded(ROWS, ROWS, 3)


def read_map(out):
    return (out / "feature_map.json").read_text()


def markers(out, split):
    """Which rows are in a split: the last categories of its records, None for rare ones."""
    last = json.loads(read_map(out))["fields"][-1]["vocabulary"]
    texts = {i: int(text) for text, i in last.items()}
    return [texts.get(ids[-1]) for _, ids, _ in records_of(out / split)]


def test_rows_are_drawn_once_each_and_the_vocabulary_is_of_the_training_rows(prepare, small_pieces):
    out = prepare(text_of(ROWS), min_count=1, split="0.6,0.3,0.1")
    found = {split: records_of(out / split) for split in SPLITS}
    chosen = markers(out, "train")
    train = [ROWS[i] for i in chosen]
    assert chosen == sorted(chosen)
    assert found["train"] == encoded(train, train, 1)
    rest = [row for i, row in enumerate(ROWS) if i not in set(chosen)]
    assert sorted(found["valid"] + found["test"]) == sorted(encoded(rest, train, 1))
    assert markers(out, "valid") == [None] * len(found["valid"])
    other = prepare(text_of(ROWS), min_count=1, split="0.6,0.3,0.1", seed=2, output="other")
    assert markers(other, "train") != chosen
    # Three standard deviations of a binomial draw.
    for split, share in zip(SPLITS, (0.6, 0.3, 0.1)):
        assert abs(len(found[split]) - 400 * share) < 3 * math.sqrt(400 * share * (1 - share))


def test_by_order_the_first_rows_train_and_the_last_test(prepare, small_pieces):
    texts = {"a.tsv": text_of(ROWS[:100]), "b.tsv": text_of(ROWS[100:])}
    out = prepare(texts, split="0.5,0.25,0.25", split_by="order", min_count=1)
    n, m = (len(records_of(out / split)) for split in ("train", "valid"))
    size = len("".join(texts.values()).encode())
    assert abs(len(text_of(ROWS[:n]).encode()) / size - 0.5) < 0.01
    assert abs(len(text_of(ROWS[: n + m]).encode()) / size - 0.75) < 0.01
    expected = encoded(ROWS, ROWS[:n], 1)
    assert sum((records_of(out / split) for split in SPLITS), []) == expected


def test_files_of_their_own_and_test_rows_without_a_label(prepare, tmp_path):
    (tmp_path / "valid.txt").write_text(text_of(ROWS[200:300]))
    (tmp_path / "test.txt").write_text(text_of(row[1:] for row in ROWS[300:]))
    out = prepare(
        text_of(ROWS[:200]),
        valid_input=str(tmp_path / "valid.txt"),
        test_input=str(tmp_path / "test.txt"),
    )
    train = ROWS[:200]
    unlabelled = [["0", *row[1:]] for row in ROWS[300:]]
    assert records_of(out / "train") == encoded(train, train, 3)
    assert records_of(out / "valid") == encoded(ROWS[200:300], train, 3)
    assert records_of(out / "test") == encoded(unlabelled, train, 3)


def test_a_map_encodes_other_rows_and_what_it_does_not_know_is_rare(prepare, tmp_path):
    known = prepare(text_of(ROWS), split="1,0,0", output="known")
    others = criteo_rows(100, seed=1)
    others[0][14:] = ["never seen"] * 26
    for name in os.listdir(tmp_path / "in"):
        os.remove(tmp_path / "in" / name)
    out = prepare(text_of(others), **with_map_of(known))
    assert sorted(os.listdir(out)) == ["feature_map.json", "train"]
    found = records_of(out / "train")
    assert found == encoded(others, ROWS, 3)
    fields = json.loads(read_map(known))["fields"]
    assert found[0][1][13:] == [field["rare_id"] for field in fields[13:]]
    assert read_map(out) == read_map(known)


# Several hosts.


def with_map_of(out):
    """The flags that encode other rows with the map of a folder."""
    return dict(feature_map=str(out / "feature_map.json"), min_count=None)


def test_hosts_with_a_map_together_make_what_one_makes(prepare, small_pieces, tmp_path):
    texts = {f"{i}.tsv": text_of(ROWS[i * 100 : i * 100 + 100]) for i in range(4)}
    alone = prepare(texts, output="alone")
    for i in range(3):
        mine = ["0.tsv", "1.tsv,2.tsv", "3.tsv"][i].split(",")
        spec = ",".join(str(tmp_path / "in" / name) for name in mine)
        flags = dict(with_map_of(alone), split="0.8,0.1,0.1", output="together")
        prepare({}, Host(i, 3, True), input=spec, **flags)
    together = tmp_path / "together"
    assert read_map(together) == read_map(alone)
    for split in SPLITS:
        assert sorted(os.listdir(together / split)) == [f"shard-0000{i}-of-00003" for i in range(3)]
        assert sorted(records_of(together / split)) == sorted(records_of(alone / split))
        both = [datasets.find(str(out / split), "data") for out in (alone, together)]
        assert both[0].feature_size == both[1].feature_size


# How files are written.


def with_header(names, rows, delimiter):
    return text_of([names, *rows], delimiter)


@pytest.mark.parametrize(
    "text, flags",
    [
        (text_of(ROWS, ","), {}),
        (text_of(ROWS, end="\r\n"), {}),
        (text_of(ROWS)[:-1], {}),
        ("\n" + text_of(ROWS, end="\n\n"), {}),
        (with_header(CRITEO, ROWS, ","), {}),
        (with_header([name.upper() for name in CRITEO], ROWS, "\t"), {}),
        (with_header(["Id", *CRITEO], [["77", *row] for row in ROWS], ","), {}),
        (with_header(CRITEO[::-1], [row[::-1] for row in ROWS], "\t"), {}),
        (with_header(["x"] * 40, ROWS, ","), {"header": "yes", "delimiter": "comma"}),
    ],
    ids=["commas", "crlf", "no newline at the end", "blank lines", "header", "upper case",
         "id first", "other order", "unknown names"],
)  # fmt: skip
def test_ways_to_write_the_same_rows(prepare, small_pieces, text, flags):
    out = prepare(text, split="1,0,0", **flags)
    assert records_of(out / "train") == encoded(ROWS, ROWS, 3)


def test_avazu_has_the_hour_of_the_day_and_categories(prepare, tmp_path):
    draw = random.Random(0)
    rows = [
        [str(10**19 + i), str(i % 2), f"1410{21 + i % 9}{draw.randint(0, 23):02d}"]
        + [f"{draw.randint(0, 9):08x}" for _ in range(21)]
        for i in range(200)
    ]
    test = [row[:1] + row[2:] for row in rows[:50]]
    (tmp_path / "test.csv").write_text(with_header(AVAZU[:1] + AVAZU[2:], test, ","))
    out = prepare(
        with_header(AVAZU, rows, ","), dataset="avazu", test_input=str(tmp_path / "test.csv")
    )
    fields = json.loads(read_map(out))["fields"]
    assert [field["name"] for field in fields] == AVAZU[2:]
    hours = collections.Counter(row[2][-2:] for row in rows)
    often = sorted((h for h in hours if hours[h] >= 3), key=lambda h: (-hours[h], h))
    assert list(fields[0]["vocabulary"]) == often
    loaded = feature_map.load(str(out / "feature_map.json"))
    expected = [(float(r[1]), *feature_map.encode_row(loaded, r[2:])) for r in rows]
    assert records_of(out / "train") == expected
    assert records_of(out / "test") == [(0.0, ids, values) for _, ids, values in expected[:50]]


# Bad input.


def changed(place, cell):
    row = list(ROWS[7])
    row[place] = cell
    return "\t".join(row)


EXPECTED = "expected 40 columns (see --dataset, --columns, --delimiter), found"
BAD = [
    ("\t".join(ROWS[0][:-1]), f"{EXPECTED} 39 (only --test"),
    ("\t".join(ROWS[0]) + "\t1", f"{EXPECTED} 41"),
    (changed(0, "2"), "label '2' is not 0 or 1"),
    (changed(0, ""), "label '' is not 0 or 1"),
    (changed(0, "0 1"), "label '0 1' is not 0 or 1"),
    (changed(3, "1.5"), "I3 '1.5' is not an integer of at most 18 digits"),
    (changed(3, "-"), "I3 '-' is not an integer"),
    (changed(3, "+1+"), "I3 '+1+' is not an integer"),
    (changed(3, " 1"), "I3 ' 1' is not an integer"),
    (changed(3, "1a345678"), "I3 '1a345678' is not an integer"),
    (changed(3, "1:345678"), "I3 '1:345678' is not an integer"),
    (changed(3, "12345678901234567x"), "I3 '12345678901234567x' is not an integer"),
    (changed(3, "1" * 19), "is not an integer of at most 18 digits"),
    (changed(20, "\udcff"), "is not UTF-8 (save the file so): "),
    (changed(20, "\0"), "holds a NUL character"),
    ("x", f"{EXPECTED} 1"),
]


@pytest.mark.parametrize(
    "name, line, said", [*(("a.tsv", *row) for row in BAD), ("a.gz", *BAD[2]), ("a.gz", *BAD[-1])]
)
def test_a_bad_row_is_refused_by_file_and_line(prepare, small_pieces, tmp_path, name, line, said):
    lines = text_of(ROWS[:200]).split("\n")
    lines[90:90] = ["", line]
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    with pytest.raises(BadInput) as error:
        prepare({name: gzip.compress(text) if name == "a.gz" else text})
    assert str(error.value).startswith(f"{tmp_path}/in/{name}:92: ")
    assert said in str(error.value)
    assert all_files(tmp_path / "out") == {}


@pytest.mark.parametrize("text", ["\n", ",".join(CRITEO) + "\n", "1" + "\t" * 39 + "\n"])
def test_an_input_without_a_category_is_refused(prepare, text):
    with pytest.raises(BadInput, match="no training rows, or all"):
        prepare(text)


def test_max_bad_records_skips_just_those(prepare, small_pieces):
    lines = text_of(ROWS).split("\n")
    for place, (line, _) in zip(range(300, 0, -18), BAD):
        lines[place:place] = [line]
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    out = prepare(text, max_bad_records=len(BAD), split="1,0,0")
    assert records_of(out / "train") == encoded(ROWS, ROWS, 3)
    with pytest.raises(BadInput, match=rf"\({len(BAD) - 1} bad records were skipped before; --max"):
        prepare(text, max_bad_records=len(BAD) - 1, output="fewer")


@pytest.mark.parametrize("more", ["\n\r\n", "x\n"])
def test_rows_beside_bad_or_blank_lines_are_drawn_as_without_them(prepare, more):
    flags = dict(min_count=1, max_bad_records=1)
    plain, other = (
        prepare(text_of(ROWS) + end, output=f"out-{len(end)}", **flags) for end in ("", more)
    )
    for split in SPLITS:
        assert records_of(plain / split) == records_of(other / split)


def test_each_skipped_row_is_logged_once(prepare, monkeypatch, tmp_path):
    logged = []
    log = lambda text, *values: logged.append(text % values)
    monkeypatch.setattr(progress.logging, "warning", log)
    prepare(text_of(ROWS[:9]) + "x\n", max_bad_records=3)
    line, _ = logged  # and their number
    assert f"bad record 1 (--max_bad_records=3): {tmp_path}/in/a.tsv:10: expected 40" in line


def test_a_gzip_file_that_is_cut_is_refused_by_its_name_and_line(prepare, small_pieces, tmp_path):
    text = text_of(ROWS).encode()
    packed = gzip.compress(text)[:-500]
    whole = zlib.decompressobj(31).decompress(packed).count(b"\n")
    with pytest.raises(BadInput, match=r"in/a\.gz: the gzip file is damaged or cut") as error:
        prepare({"a.gz": packed})
    after = int(re.search(r"after line (\d+)\.$", str(error.value)).group(1))
    assert whole - 20 < after <= whole  # a block holds fewer than 20 lines


@pytest.mark.parametrize(
    "flags, host, said",
    [
        (dict(input=None), ALONE, "--input must be given"),
        (dict(input=None, test_input="x"), ALONE, "the vocabulary comes from its training rows"),
        (dict(split="0.5,0.5"), ALONE, "try --split=0.8,0.1,0.1"),
        (dict(split="0.5,0.6,-0.1"), ALONE, "try --split=0.8,0.1,0.1"),
        (dict(split="0,1,0"), ALONE, "the first above 0"),
        (dict(split="0.5,nan,0.5"), ALONE, "must be three shares"),
        (dict(split="a,b,c"), ALONE, "must be three shares"),
        (dict(split="0.8,0.1,0.1", test_input="x"), ALONE, "try --split=0.9,0.1,0"),
        (dict(), Host(0, 2, True), "--feature_map must be given on 2 hosts.*on_spark prepare'"),
        (dict(split_by="order"), Host(0, 1, True), "--noown_files"),
        (dict(feature_map="/none"), ALONE, "--min_count has no effect with"),
        (dict(feature_map="/none", min_count=None, memory_mb=5), ALONE, "--memory_mb has no eff"),
        (dict(feature_map="/none", min_count=None), ALONE, "/none: is not a"),
        (dict(input="/no/such/file"), ALONE, "no file matches"),
    ],
)
def test_flags_that_do_not_fit_are_refused(prepare, tmp_path, flags, host, said):
    with pytest.raises(BadInput, match=said):
        prepare(text_of(ROWS[:9]), host, **flags)
    assert not (tmp_path / "out").exists()


def test_by_order_gzip_is_refused(prepare):
    with pytest.raises(BadInput, match=r"a\.gz: --split_by=order needs plain files"):
        prepare({"a.gz": gzip.compress(text_of(ROWS).encode())}, split_by="order")


def test_a_map_of_another_data_set_is_refused(prepare):
    out = prepare(text_of(ROWS[:9]))
    flags = with_map_of(out)
    with pytest.raises(BadInput, match="--dataset=avazu, but .* is for --dataset=criteo"):
        prepare({}, output="other", dataset="avazu", **flags)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format_version=3),
        lambda m: m.update(dataset="other"),
        lambda m: m.update(feature_size=m["feature_size"] + 1),
        lambda m: m["fields"].pop(),
        lambda m: m["fields"][0].update(first_id=2),
        lambda m: m["fields"][0].update(vocabulary={"x": 3}),
        lambda m: m["fields"][20].update(vocabulary={"x": 3}),
        lambda m: m["fields"][0].update(kind="category"),
        lambda m: m.pop("fields"),
    ],
)
def test_a_broken_map_is_refused_by_its_name(prepare, change):
    path = prepare(text_of(ROWS[:9]), integers="buckets") / "feature_map.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}: is not a feature map"):
        feature_map.load(str(path))


# What was there before.


def test_an_existing_data_set_is_refused_and_replaced_whole_by_overwrite(prepare, small_pieces):
    out = prepare(text_of(ROWS), output_format="tfrecord")
    before = all_files(out)
    with pytest.raises(BadInput, match="--overwrite replaces it"):
        prepare(text_of(ROWS))
    assert all_files(out) == before
    prepare(text_of(ROWS[:200]), overwrite=True)
    fresh = prepare(text_of(ROWS[:200]), output="fresh")
    assert all_files(out) == all_files(fresh)


def test_only_what_is_asked_for_is_replaced(prepare, tmp_path):
    """The encoding of a new test file beside the data whose map it has."""
    out = prepare(text_of(ROWS))
    before = all_files(out)
    others = criteo_rows(50, seed=1)
    (tmp_path / "new.tsv").write_text(text_of(others))
    flags = dict(with_map_of(out), input=None, test_input=str(tmp_path / "new.tsv"))
    with pytest.raises(
        BadInput, match="out/test already holds a data set .*--overwrite replaces it"
    ):
        prepare({}, **flags)
    assert all_files(out) == before
    prepare({}, overwrite=True, **flags)
    kept = {name: data for name, data in before.items() if not name.startswith("test/")}
    assert {x: data for x, data in all_files(out).items() if not x.startswith("test/")} == kept
    loaded = feature_map.load(str(out / "feature_map.json"))
    expected = [(float(r[0]), *feature_map.encode_row(loaded, r[1:])) for r in others]
    assert records_of(out / "test") == [
        (label, ids, np.float32(values).tolist()) for label, ids, values in expected
    ]
    shutil.rmtree(out / "test")
    prepare({}, **flags)  # leftovers of the other splits do no harm
    assert len(records_of(out / "test")) == 50


def test_a_split_that_would_stay_with_other_ids_is_refused(prepare):
    out = prepare(text_of(ROWS))
    before = all_files(out)
    with pytest.raises(BadInput, match=r"out/test/.*: was written with another feature_map\.json"):
        prepare(text_of(ROWS[:200]), split="0.9,0.1,0", overwrite=True)
    assert all_files(out) == before


def test_raw_rows_in_the_place_of_a_split_are_not_deleted(prepare, tmp_path):
    raw = tmp_path / "out" / "train" / "train.txt"
    raw.parent.mkdir(parents=True)
    raw.write_text(text_of(ROWS))
    for overwrite in (False, True):
        with pytest.raises(
            BadInput, match=r"out/train/train\.txt: dataset.json does not name this"
        ):
            prepare({}, input=str(raw), overwrite=overwrite)
    assert all_files(tmp_path / "out") == {"train/train.txt": text_of(ROWS).encode()}


def test_the_same_map_written_otherwise_is_the_same_map(prepare):
    out = prepare(text_of(ROWS), split="1,0,0")
    path, flags = out / "feature_map.json", dict(split=None, min_count=None)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    before = path.read_text()
    prepare(text_of(ROWS), feature_map=str(path), overwrite=True, **flags)
    assert path.read_text() == before


def test_a_map_of_other_ids_is_refused_and_replaced_by_overwrite(prepare):
    out = prepare(text_of(ROWS[:200]))
    for split in SPLITS:
        shutil.rmtree(out / split)
    before = all_files(out)
    with pytest.raises(BadInput, match=f"{out}/feature_map.json has other ids; --overwrite"):
        prepare(text_of(ROWS[200:]))
    assert all_files(out) == before
    prepare(text_of(ROWS[200:]), overwrite=True)
    assert all_files(out) == all_files(prepare(text_of(ROWS[200:]), output="fresh"))


def test_a_failed_run_leaves_what_was_there(prepare):
    out = prepare(text_of(ROWS))
    before = all_files(out)
    with pytest.raises(BadInput, match="columns"):
        prepare({"b.tsv": "x\n"}, overwrite=True)
    assert all_files(out) == before


def test_other_hosts_data_are_not_mixed_in(prepare):
    flags = with_map_of(prepare(text_of(ROWS[:50]), output="known"))
    prepare({}, Host(0, 2, True), **flags)
    with pytest.raises(BadInput, match="left by a run that was not on 3 hosts"):
        prepare({}, Host(0, 3, True), **flags)


# The program.


def test_raw_rows_become_a_model_that_is_evaluated(tmp_path):
    draw = random.Random(0)
    rows = criteo_rows(3000, seed=2)
    for row in rows:  # a label that can be learned from the first category
        row[14] = draw.choice("xy")
        row[0] = str(int(draw.random() < (0.9 if row[14] == "x" else 0.1)))
    (tmp_path / "raw.tsv").write_text(text_of(rows))
    data, model = f"{tmp_path}/data", f"--model_dir={tmp_path}/model"
    words = f"--input={tmp_path}/raw.tsv", f"--output_dir={data}", "--num_workers=2"
    run_tool("prepare_criteo", *words, code=0)
    run_train(
        f"--training_data_dir={data}/train", f"--val_data_dir={data}/valid", model,
        "--embedding_size=4", "--deep_layers=8", "--dropout=0", "--batch_size=100",
        "--num_epochs=3", "--learning_rate=0.01", code=0,
    )  # fmt: skip
    kept = json.loads((tmp_path / "model" / "model.json").read_text())
    assert kept["feature_map"] == datasets.find(f"{data}/train", "data").feature_map
    tested = run_train("--task_type=eval", f"--val_data_dir={data}/test", model)
    report = json.loads((tmp_path / "model" / "report.eval.json").read_text())
    assert report["eval"]["examples"] == len(records_of(tmp_path / "data" / "test"))
    assert report["eval"]["auc"] > 0.8, tested.stderr


# Real rows.


def test_criteos_sample_is_encoded_as_by_a_loop(prepare):
    path = shared_data("criteo_raw_sample.tsv")
    with open(path) as f:
        rows = [line.rstrip("\n").split("\t") for line in f]
    out = prepare({}, input=path, split="1,0,0", min_count=10)
    assert records_of(out / "train") == encoded(rows, rows, 10)
