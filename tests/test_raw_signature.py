"""Raw rows in an exported model mean what they mean to encode_fields."""

import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from conftest import ROOT, examples_of, run_tool, run_train
from exported import answering
from google.protobuf.internal import decoder
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow.python.saved_model import loader_impl

from deepfm.records.raw import column_kinds, feature_map
from deepfm.records.raw.column_kinds import BUCKETS, NUMBER, SCALED
from deepfm.runtime.tf import tf
from deepfm.state.serving.raw_rows import RawRows, inputs_of

v1 = tf.compat.v1
pytestmark = pytest.mark.timeout(300)  # an export of many columns

words = str.split

NUMBERS = words(
    "0 -0 5 5. .5 5.0 -3 +7 12.25 1e3 1E+2 2e-3 True false TRUE 9.5 -17 44 4294967295 1e17 1e18 "
    "999999999999999999 1000000000000000000 5.00000000000000000000000 1e308 1.8e308 1e9999 "
    "0000000000000000000000000000000000000000007 0.00000000000000000000000000000000000000012 "
    "-000000000000000000.0000000000000000000000000000000000000123456789e-3 9007199254740993 "
    "2.2250738585072014e-30 1e-400 0.1 0.30000000000000004 12345678901234567e-5 0x10 "
    "nan inf NaN - . 1_0 1e 1e5.0 \u0663 1,5 --1 1e12345"
)
NUMBERS += [" 7 ", "7\n", "7\0"]
ISO = words(
    "2021-03-04 2021-03-04T05:06 2021-03-04T23:06:07.123Z 0001-01-01T00:00+00:01 "
    "9999-12-31T23:59:59-00:01 2020-02-29 1900-02-29 2000-02-29 2021-13-01 2021-00-10 2021-04-31 "
    "0000-01-01 2021-03-04T24:00 2021-03-04T23:60 2021-03-04T23:59:60 2021-03-04T05:06+0530 "
    "2021-03-04T05:06:07,5-99:99 2021-03-04+05:30 2021-03-04T05 21-03-04 0001-01-01 9999-12-31"
)
ISO += ["2021-03-04 05:06:07 +01:00", "2021-03-04 Z", "2021-03-04\n"]
DIGITS = words("20210304 20000229 19000229 21030423 21030424 00000000 99999999 2021030 202103041")
UNIX = words(
    "0 1614834367 1614834367.0 1614834367000 5. 99999999999 99999999999999 -1 1e9 20210304"
)
WORDS = [
    "a", "b", "\u00e9t\u00e9", "a b", " a", "a ", "NA", "null", "\\N", "rare", "a\rb", "%0D",
    "x" * 100, "\u4e2d\u6587 \U0001f600", "\t", "a%b", "-", "\0", "SP1", "3",
]  # fmt: skip
LISTS = [
    "a|b", "a:0.5|b:2", "|", " a | b |", "a||b|", "a:b:3", ":5", "a:", "a:x", "a:nan", "a:1e39",
    "\u3000a\x85|\x1cb\u2009", "a|b|c|d:x", "a:True|a:1", "\u00e9:-2", "a:1e400", "a|a|a|a|a",
    "x:y:z",
]  # fmt: skip
# {kind of cells: (some of them, what others are made of)}
CORPUS = {
    NUMBER: (NUMBERS, "0123456789.+-eE x"),
    "iso": (ISO, "0123456789-:TZ+., "),
    "digits": (DIGITS, "0123456789 "),
    "unix": (UNIX, "0123456789.-"),
    "text": (WORDS, "ab\u00e9 NA%\r"),
    "list": (LISTS, "ab|:. 05\u00e9\u3000"),
}
COLUMNS = [
    ({"name": "clicked", "kind": "label"}, None),
    ({"name": "shop", "kind": "category"}, "text"),
    ({"name": "empty one", "kind": "category", "min_count": 10**6}, "text"),
    ({"name": "caf\u00e9/1", "kind": "hash", "buckets": 97}, "text"),
    ({"name": "class", "kind": "number", "bounds": [-3, 0, 0.1, 9.5, 44]}, NUMBER),
    ({"name": "q", "kind": "number", "buckets": 8}, NUMBER),
    ({"name": "standard", "kind": "number", "scale": "standard"}, NUMBER),
    ({"name": "minmax", "kind": "number", "scale": "minmax"}, NUMBER),
    ({"name": "robust", "kind": "number", "scale": "robust"}, NUMBER),
    ({"name": "log", "kind": "number", "scale": "log"}, NUMBER),
    ({"name": "count", "kind": "buckets"}, NUMBER),
    ({"name": "size", "kind": "scaled"}, NUMBER),
    ({"name": "number", "kind": "id"}, NUMBER),
    ({"name": "tags", "kind": "list", "separator": "|"}, "list"),
    ({"name": "liked", "kind": "list", "separator": "|", "length": 3, "weights": ":"}, "list"),
    ({"name": "hour", "kind": "hour"}, "digits"),
    *(
        ({"name": f"{kind} {how}", "kind": kind, "format": how, **more}, corpus)
        for kind in ("hour", "weekday", "date")
        for how, corpus, more in (
            ("iso", "iso", {"timezone": "-05:30"}),
            ("yyyymmdd", "digits", {}),
            ("yymmddhh", "digits", {"timezone": "+02:00"}),
            ("unix", "unix", {}),
            ("unix_ms", "unix", {"timezone": "+01:00"}),
        )
    ),
]
ROWS = 600
ITEMS = ["shop", "tags", "hour iso", "standard", "count"]
SMALL = "--embedding_size=4", "--deep_layers=8", "--batch_size=32"
WARM_UP = "assets.extra/tf_serving_warmup_requests"


def drawn(draw, corpus):
    """A cell, good or bad."""
    cells, others = CORPUS[corpus]
    cell = draw.choice(["", draw.choice(cells), draw.choice(cells), draw.choice(cells)])
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        at = draw.randint(0, len(cell))
        cell = cell[:at] + draw.choice(others) + cell[at + draw.randint(0, 1) :]
    return cell


def training_cells(column, corpus):
    """The cells of a column that a table for prepare may hold, without extreme numbers."""
    column = column_kinds.of_json(column)
    said = lambda cell: cell and (feature_map.explain_cell(column, cell) or _extreme(column, cell))
    return [x for x in CORPUS[corpus][0] if not (set(x) & set('\r\n\0"\t,') or said(x))]


def _extreme(column, cell):
    if column.kind in column_kinds.MOMENTS:
        how = column.format
        return bool(how) and not 1900 < feature_map.cells.moment(cell, how).year < 2100
    number = feature_map.cells.number(cell)
    return "1e39" in cell or number is not None and abs(number) > 1e6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of a table with columns of every kind, and of a model that is exported."""
    folder, draw = tmp_path_factory.mktemp("raw"), random.Random(1)
    (folder / "columns.json").write_text(json.dumps({"columns": [x for x, _ in COLUMNS]}))
    choices = [training_cells(*each) for each in COLUMNS[1:]]
    lines = [",".join([str(i % 2), *map(draw.choice, choices)]) for i in range(ROWS)]
    header = ",".join(column["name"] for column, _ in COLUMNS)
    (folder / "rows.csv").write_text("\n".join([header, *lines]) + "\n")
    run_tool(
        "prepare", f"--input={folder}/rows.csv", f"--columns={folder}/columns.json",
        f"--output_dir={folder}/data", "--min_count=1", "--missing=NA,null,-17,44", code=0,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def known(data):
    return feature_map.load(f"{data}/data/feature_map.json")


def encoded(known, rows, typed=False):
    """[(ids, values, counts) of each row, None if it is bad], by RawRows."""
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default(), v1.Session() as session:
        raw = RawRows(known, folder)
        inputs = raw.inputs(typed)
        features, good = raw.encode(inputs, counted=True)
        session.run(v1.tables_initializer())
        columns = zip(inputs.values(), zip(*rows))
        found, good = session.run([features, good], {x: list(cells) for x, cells in columns})
    ids, values, counts = (found[f"feat_{name}"] for name in ("ids", "vals", "counts"))
    ends = counts.sum(axis=1)
    each = zip(good, ids, values, counts, ends)
    return [(list(i[:n]), list(x[:n]), list(c)) if fine else None for fine, i, x, c, n in each]


def expected(known, rows):
    """The same, by encode_fields."""
    for row in rows:
        try:
            fields = feature_map.encode_fields(known, row)
        except (ValueError, OverflowError):
            yield None
            continue
        pairs = [pair for pairs in fields for pair in pairs]
        values = [np.float32(value) for _, value in pairs]
        good = all(map(np.isfinite, values))
        yield ([i for i, _ in pairs], values, list(map(len, fields))) if good else None


def alone(known, name):
    """The map of one field."""
    return known._replace(fields=[field for field in known.fields if field.name == name])


@pytest.mark.parametrize("column, corpus", COLUMNS[1:], ids=[x["name"] for x, _ in COLUMNS[1:]])
def test_a_cell_has_the_ids_and_values_of_encode_fields(column, corpus, known):
    draw, cells = random.Random(2), CORPUS[corpus][0]
    rows = [[cell] for cell in [*cells, *(drawn(draw, corpus) for _ in range(2000))]]
    of_column = alone(known, column["name"])
    wanted = list(expected(of_column, rows))
    assert encoded(of_column, rows) == wanted
    assert len({str(x) for x in wanted}) > (1 if column["name"] == "empty one" else 2)
    assert (None in wanted) == (corpus != "text" and column["name"] != "tags")


def test_a_typed_number_is_what_its_text_is(known):
    draw = random.Random(3)
    numbers = [x for x in map(feature_map.cells.number, NUMBERS) if x is not None]
    numbers += [float("nan"), float("inf"), -float("inf"), -17.0, 44.0, 0.5, 1e18, -1e18, 2.0**60]
    numbers += [draw.choice([draw.randint(-50, 50), draw.gauss(0, 30)]) for _ in range(500)]
    for field in known.fields:
        if field.kind in (NUMBER, BUCKETS, SCALED):
            rows = [[x] for x in numbers]
            of_column = alone(known, field.name)
            assert encoded(of_column, rows, typed=True) == list(expected(of_column, rows))


def test_a_category_may_hold_what_ends_a_line(known):
    texts = ["a\nb", "a\r\nb", "a", "b\r", "%0A", "\n", "a%", "\r"]
    field = alone(known, "shop").fields[0]
    ids = {text: field.first_id + i for i, text in enumerate(texts, 2)}
    of_column = known._replace(fields=[field._replace(vocabulary=ids)])
    rows = [[text] for text in [*texts, "b", "a%0Ab", "a\n", "%25"]]
    assert encoded(of_column, rows) == list(expected(of_column, rows))


@pytest.fixture(scope="module")
def served(data):
    """The path of a model that was exported where there is nothing but train.py and deepfm/."""
    flags = f"--training_data_dir={data}/data/train", f"--model_dir={data}/model"
    run_train(*flags, *SMALL, code=0)
    (data / "code").mkdir()
    shutil.copy(ROOT / "train.py", data / "code")
    ignored = shutil.ignore_patterns("__pycache__")  # which other tests write to meanwhile
    shutil.copytree(ROOT / "deepfm", data / "code" / "deepfm", ignore=ignored)
    (data / "code" / "pyarrow.py").write_text("raise ImportError")
    words = "--task_type=export", f"--model_dir={data}/model", f"--servable_model_dir={data}/served"
    more = f"--item_fields={','.join(ITEMS)}", f"--val_data_dir={data}/data/train"
    subprocess.run(
        [sys.executable, "train.py", *words, *more], cwd=data / "code", check=True, timeout=250,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    (path,) = (data / "served").iterdir()
    return path


@pytest.fixture(scope="module")
def ask(served):
    with answering(served) as found:
        yield found


def by_ids(ask, rows):
    """The prob of (ids, values, counts), by the signature for feature ids."""
    width = max(len(ids) for ids, _, _ in rows)
    padded = lambda which: [[*row[which], *[0] * (width - len(row[which]))] for row in rows]
    counts = [row[2] for row in rows]
    inputs = {"feat_ids": padded(0), "feat_vals": padded(1), "feat_counts": counts}
    return ask("serving_default", inputs)


def rows_of_all_columns(known):
    """400 rows, of which some have a cell that may be bad."""
    draw, rows = random.Random(4), []
    choices = [[*training_cells(*x), "", "new" * (x[1] == "text")] for x in COLUMNS[1:]]
    for _ in range(400):
        row = list(map(draw.choice, choices))
        at = draw.randrange(len(row))
        row[at] = drawn(draw, COLUMNS[1 + at][1])
        rows.append(row)
    return rows


def typed(known, rows):
    """The rows with numbers for those of the columns of numbers."""

    def cell(field, text):
        if field.kind not in (NUMBER, BUCKETS, SCALED):
            return text
        if not text or text in known.missing:
            return np.nan
        number = feature_map.cells.number(text)
        return np.inf if number is None else number

    return [list(map(cell, known.fields, row)) for row in rows]


@pytest.mark.parametrize("signature", ["raw", "raw_typed"])
def test_a_raw_row_is_scored_as_its_ids_and_a_bad_one_as_nan(signature, ask, known):
    rows = rows_of_all_columns(known)
    rows = typed(known, rows) if signature == "raw_typed" else rows
    wanted = list(expected(known, rows))
    fine = np.array([x is not None for x in wanted])
    assert 100 < fine.sum() < 300
    keys = inputs_of([field.name for field in known.fields])
    inputs = {key: list(cells) for key, cells in zip(keys, zip(*rows))}
    prob, by_id = ask(signature, inputs), by_ids(ask, [x for x in wanted if x])
    at = int(np.flatnonzero(fine)[0])
    alone = ask(signature, {name: cells[at : at + 1] for name, cells in inputs.items()})
    assert prob.dtype == np.float32 and (np.isnan(prob) == ~fine).all()
    assert np.abs(prob[fine] - by_id).max() < 1e-6 < by_id.std()
    assert alone == pytest.approx(prob[at : at + 1], abs=1e-6)


def test_inputs_are_called_as_their_columns_where_python_takes_such_an_argument():
    names = [
        "price", "\u00e9t\u00e9", "unit price", "unit_price", "a/b", "a b", "1st", "_x", "class",
        "\u00b2",
    ]  # fmt: skip
    keys = [
        "unit_price_", "unit_price", "a_b", "a_b_", "column_1st", "column_x", "class_", "column_",
    ]  # fmt: skip
    assert inputs_of([*names, "self"]) == [*names[:2], *keys, "self_"]


def test_an_export_holds_a_file_for_each_vocabulary(served, known):
    found = {x.name: x.read_bytes().count(b"\n") for x in (served / "assets").iterdir()}
    of_fields = [len(field.vocabulary) for field in known.fields]
    assert found == {f"vocabulary_{i}.txt": n for i, n in enumerate(of_fields) if n}
    assert min(of_fields) == 0


def test_an_export_without_the_map_says_why_it_takes_no_raw_rows(tmp_path):
    kinds = {"clicked": "label", "shop": "category", "size": "category"}
    columns = {"columns": [{"name": name, "kind": kind} for name, kind in kinds.items()]}
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    (tmp_path / "rows.csv").write_text("clicked,shop,size\n" + "1,a,b\n0,b,a\n" * 60)
    words = f"--input={tmp_path}/rows.csv", f"--columns={tmp_path}/columns.json"
    run_tool("prepare", *words, f"--output_dir={tmp_path}/data", "--min_count=1", code=0)
    shutil.copytree(str(tmp_path / "data/train"), str(tmp_path / "a/b/train"))
    flags = f"--training_data_dir={tmp_path}/a/b/train", f"--model_dir={tmp_path}/model"
    flags = *flags, f"--servable_model_dir={tmp_path}/served", *SMALL

    def signatures(*more):
        done = run_train(*flags, *more, code=0)
        newest = max((tmp_path / "served").iterdir(), key=lambda path: int(path.name))
        assert not (newest / WARM_UP).exists()
        return done.stderr, loader_impl.parse_saved_model(str(newest)).meta_graphs[0].signature_def

    said, found = signatures()
    known = feature_map.load(f"{tmp_path}/data/feature_map.json")
    assert "The export takes no raw rows: the feature_map.json that made this model's ids " in said
    assert f"(fingerprint {known.fingerprint()})" in said
    assert set(found) == {"serving_default", "examples:serving_default"}
    shutil.copy(str(tmp_path / "data/feature_map.json"), str(tmp_path / "a"))
    said, found = signatures()
    assert "no raw rows" not in said and {"raw", "raw_typed"} < set(found)
    (tmp_path / "a" / "feature_map.json").unlink()  # model_dir has kept it
    shutil.rmtree(str(tmp_path / "served"))
    assert {"raw", "raw_typed", "candidates"} < set(signatures("--item_fields=shop")[1])


def test_candidates_are_scored_as_whole_rows(ask, known):
    rows, names = rows_of_all_columns(known), [field.name for field in known.fields]
    good = next(row for row, x in zip(rows, expected(known, rows)) if x)
    users = [good, ["old" if name == "class" else x for name, x in zip(names, good)]]
    keys = inputs_of(names)
    for user in users:
        flat = [[x if name in ITEMS else y for name, x, y in zip(names, row, user)] for row in rows]
        wanted = ask("raw", dict(zip(keys, zip(*flat))))
        columns = zip(keys, names, zip(*flat))
        prob = ask("candidates", {k: x if name in ITEMS else x[:1] for k, name, x in columns})
        assert prob.shape == wanted.shape and np.isnan(wanted).sum() > 10
        np.testing.assert_allclose(prob, wanted, rtol=0, atol=1e-6)
        assert np.isnan(wanted).all() == (user is not good)
        assert user is not good or np.nanstd(wanted) > 1e-4


@pytest.mark.parametrize(
    "flag, said",
    [
        ("taags", "--item_fields=taags: no column has this name; try tags."),
        (
            "0,31",
            "--item_fields=0,31: the rows have the fields 0 to 29; give those of the items, and",
        ),
        (",".join(map(str, range(30))), "and leave out those of the user."),
    ],
)
def test_columns_that_are_not_a_part_of_the_rows_are_no_items(flag, said, served, data, tmp_path):
    flags = f"--model_dir={data}/model", f"--servable_model_dir={tmp_path}/x"
    done = run_train("--task_type=export", *flags, f"--item_fields={flag}", code=2)
    assert said in done.stderr and not list(tmp_path.glob("x/[0-9]*"))


def parts_of(message):
    """{number: contents of its fields} of a message that holds messages, texts or bytes alone."""
    found, at = collections.defaultdict(list), 0
    while at < len(message):
        tag, at = decoder._DecodeVarint(message, at)
        size, at = decoder._DecodeVarint(message, at)
        assert tag & 7 == 2
        found[tag >> 3].append(message[at : at + size])
        at += size
    return found


def test_a_server_can_warm_up_with_rows_of_the_validation_data(served, ask, data):
    payloads = list(tf.compat.v1.io.tf_record_iterator(str(served / WARM_UP)))
    records = list(examples_of(data / "data/train/part-00000-of-00001.tfrecords"))[:100]
    assert len(records) == 100
    asked, probs = [], {}
    for payload in payloads:  # a PredictionLog; deepfm/state/serving/warm_up.py has the numbers
        (predict_log,) = parts_of(payload)[6]
        ((request,),) = parts_of(predict_log).values()
        spec, entries = (parts_of(request)[number] for number in (1, 2))
        pairs = [parts_of(entry) for entry in entries]
        tensors = {x[1][0].decode(): TensorProto.FromString(x[2][0]) for x in pairs}
        inputs = {name: tf.make_ndarray(x) for name, x in tensors.items()}
        asked.append(parts_of(spec[0])[3][0].decode())
        probs[asked[-1]] = ask(asked[-1], inputs)
    wanted = by_ids(ask, [[list(x[name]) for name in ("ids", "values", "counts")] for x in records])
    both = ["examples:serving_default", "serving_default"]
    assert sorted(asked) == sorted([*both, "candidates", "raw", "raw_typed"])
    assert all(prob.shape == (100,) and np.isfinite(prob).all() for prob in probs.values())
    for name in both:
        assert np.abs(probs[name] - wanted).max() < 1e-6 < wanted.std()
