"""prepare without a schema: what it guesses, of which files, and what it says of others."""

import csv
import gzip
import io
import json
import random

import pyarrow as pa
import pytest
from conftest import run_tool
from pyarrow import parquet

from data_tools import prepare
from data_tools.prepare import PrepareOptions
from deepfm.data import datasets
from deepfm.errors import BadInput

NAMES = ["session_id", "clicked", "age", "price", "site", "genres", "zip_code", "user_id", "seen",
         "day", "ts", "stars", "same", "none"]  # fmt: skip
KINDS = {
    "session_id": "key", "clicked": "label", "age": "number", "price": "number",
    "site": "category", "genres": "list", "zip_code": "category", "user_id": "category",
    "seen": "hour", "day": "weekday", "ts": "hour", "stars": "category", "same": "ignored",
    "none": "ignored",
}  # fmt: skip


def rows(n=600, seed=0):
    draw = random.Random(seed)
    genres = ["Drama", "Comedy", "Horror", "War", "Film-Noir", "Sci-Fi", "Western"]
    for i in range(n):
        yield [
            f"s{i}", str(draw.randrange(2)), draw.choice(["NA", *map(str, range(14, 90))]),
            f"{draw.expovariate(0.1):.2f}", draw.choice(["a.com", "b, c.com", 'd"e', "é"]),
            "|".join(draw.sample(genres, draw.randint(1, 4))), f"{draw.randrange(99999):05d}",
            str(draw.randrange(300)),
            f"2014-10-{draw.randint(1, 30):02d}T{draw.randrange(24):02d}:00:00",
            f"201410{draw.randint(1, 30):02d}", str(1413849600 + draw.randrange(10**6)),
            str(draw.randint(1, 5)), "x", "",
        ]  # fmt: skip


def text_of(some, separator=",", header=True, end="\n", quote=False):
    out, quoting = io.StringIO(), csv.QUOTE_ALL if quote else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerows([NAMES] * header + list(some))
    return out.getvalue()


def found(folder, what, splits=("train", "valid", "test")):
    """The sum of `what` of the files that prepare wrote."""
    files = [x for split in splits for x in datasets.find(str(folder / split), "data").files]
    return sum(getattr(file, what) for file in files)


def guessed(tmp_path, path, out="out", **flags):
    flags = {"guess": True, "input": str(path), **flags}
    prepare.prepare(PrepareOptions(str(tmp_path / out), **flags))
    made = json.loads((tmp_path / out / "columns.json").read_text())
    return {column["name"]: column for column in made["columns"]}, made


def kinds_of(columns):
    return {name: column["kind"] for name, column in columns.items()}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_kinds_are_those_of_the_values_in_any_order_of_rows_and_files(tmp_path, form):
    draw, some, made = random.Random(1), list(rows()), []
    for turn in range(2):
        folder = tmp_path / f"in{turn}"
        folder.mkdir()
        for i, part in enumerate((some[:100], some[100:])):
            if form == "csv":
                (folder / f"{turn ^ i}.csv").write_text(text_of(part))
            else:
                table = pa.table({name: list(x) for name, x in zip(NAMES, zip(*part))})
                parquet.write_table(table, str(folder / f"{turn ^ i}.parquet"))
        made.append(guessed(tmp_path, folder, f"out{turn}", dry_run=True)[0])
        draw.shuffle(some)
    assert made[0] == made[1] and kinds_of(made[0]) == KINDS
    assert made[0]["genres"]["separator"] == "|"
    formats = [made[0][name]["format"] for name in ("seen", "day", "ts")]
    assert formats == ["iso", "yyyymmdd", "unix"]
    assert not (tmp_path / "out0" / "train").exists()


def test_the_columns_that_are_written_can_be_edited_and_given_back(tmp_path, caplog):
    (tmp_path / "a.csv").write_text(text_of(rows(), ";"))
    _, made = guessed(tmp_path, tmp_path / "a.csv")
    assert made["separator"] == ";" and made["header"] is True
    path = tmp_path / "out" / "columns.json"
    path.write_text(
        path.read_text().replace('"stars", "kind": "category"', '"stars", "kind": "number"')
    )
    edited = path.read_text()
    for more in {}, {"overwrite": True}:
        with pytest.raises(BadInput, match="columns.json says other columns; --columns=.* uses th"):
            guessed(tmp_path, tmp_path / "a.csv", **more)
        assert path.read_text() == edited
    prepare.prepare(PrepareOptions(f"{tmp_path}/new", f"{tmp_path}/a.csv", columns=str(path)))
    fields = json.loads((tmp_path / "new" / "feature_map.json").read_text())["fields"]
    assert {field["name"]: field["kind"] for field in fields}["stars"] == "number"


DIALECTS = {
    "comma.csv": {}, "tab.tsv": {"separator": "\t"}, "semicolon.csv": {"separator": ";"},
    "pipe.csv": {"separator": "|"}, "ctrl-a.txt": {"separator": "\1"},
    "quotes.csv": {"quote": True},
    "quoted-tabs.tsv": {"separator": "\t", "quote": True}, "windows.csv": {"end": "\r\n"},
    "mark.csv": {"mark": "\ufeff"}, "gzip.csv.gz": {}, "cut.csv": {"cut": 1},
    "blank-lines.csv": {"end": "\n\n"}, "semicolon-quoted.csv": {"separator": ";", "quote": True},
    "windows-tabs.tsv": {"separator": "\t", "end": "\r\n"},
}  # fmt: skip


def test_files_of_fourteen_dialects_in_a_folder_are_read_alike(tmp_path):
    folder, some, each = tmp_path / "in", list(rows(1400)), 100
    folder.mkdir()
    for i, (name, about) in enumerate(DIALECTS.items()):
        about = dict(about)
        mark, cut = about.pop("mark", ""), about.pop("cut", 0)
        data = (mark + text_of(some[i * each : (i + 1) * each], **about)).encode()
        data = data[: len(data) - cut]  # without the last newline
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    columns, made = guessed(tmp_path, folder, min_count=1)
    assert kinds_of(columns) == KINDS and "separator" not in made
    (tmp_path / "one.csv").write_text(text_of(some))
    guessed(tmp_path, tmp_path / "one.csv", "one", min_count=1)
    assert found(tmp_path / "out", "rows") == found(tmp_path / "one", "rows") == 1400


@pytest.mark.parametrize(
    "text, flags, sentence",
    [
        ("", {}, "a.csv: empty (0 bytes)"),
        ("clicked,x\n", {}, "the files hold no rows"),
        (
            "a,b\n1,x\n0,y\n",
            {},
            "no column named as a label; give --label=NAME of its columns a, b",
        ),
        ("a,b\n1,x\n0,y\n", {"label": "c"}, "has no column c; give --label=NAME"),
        ("a,b\nred,x\nblue,y\n", {"label": "a"}, "label a is not 0 or 1, but blue, red; say which"),
        ("a,b\nred,x\nblue,y\n", {"label": "a", "positive": "rde"}, "has label a blue, red; name"),
        ("click,b,b\n1,x,y\n0,y,z\n", {}, "two columns are called b; give each a name of its own"),
        ("click,b\n1,x\n0,x\n", {}, "no column becomes a field"),
        ("click,b\n1,x\n", {"missing": "NA,not there"}, "'not there' has more than 8 bytes"),
        ("click,b\n1,x\n,y\n0,z\n1,x\n", {}, "a.csv:3: label '' is not 0 or 1"),
    ],
)
def test_what_cannot_be_guessed_is_said(tmp_path, text, flags, sentence):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(BadInput) as error:
        guessed(tmp_path, tmp_path / "a.csv", min_count=1, **flags)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "words", [("yes", "no"), ("True", "False"), ("1", "-1"), ("1.0", "0.0"), ("T", "F")]
)
def test_usual_labels_need_no_flag(tmp_path, words):
    some = [[*cells[:1], words[i % 3 > 0], *cells[2:]] for i, cells in enumerate(rows())]
    (tmp_path / "a.csv").write_text(text_of(some))
    guessed(tmp_path, tmp_path / "a.csv", split="1,0,0")
    assert found(tmp_path / "out", "positives", ["train"]) == 200


def test_a_column_that_contradicts_its_kind_is_skipped_below_one_percent_and_stops_above(tmp_path):
    some = list(rows(1000))
    for cells in some[500:509]:
        cells[3] = "free"
    (tmp_path / "a.csv").write_text(text_of(some))
    columns, _ = guessed(tmp_path, tmp_path / "a.csv")
    assert columns["price"]["kind"] == "number"
    assert found(tmp_path / "out", "rows") == 991
    for cells in some[:500]:
        cells[3] = "free"
    (tmp_path / "a.csv").write_text(text_of(some))
    known = dict(columns=str(tmp_path / "out" / "columns.json"), guess=False, max_bad_records=9)
    said = 'price .free. is not a number.*kind "category" takes any text'
    with pytest.raises(BadInput, match=said):
        guessed(tmp_path, tmp_path / "a.csv", "out2", **known)


def test_the_program_guesses_and_criteo_keeps_its_columns(tmp_path):
    (tmp_path / "a.csv").write_text(text_of(rows(50)))
    done = run_tool("prepare", f"--input={tmp_path}/a.csv", f"--output_dir={tmp_path}/out")
    assert done.returncode == 0 and "site" in done.stderr, done.stderr
    criteo = "".join("\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26]) + "\n" for _ in range(20))
    (tmp_path / "day.txt").write_text(criteo)
    done = run_tool("prepare", f"--input={tmp_path}/day.txt", f"--output_dir={tmp_path}/c")
    assert done.returncode == 0, done.stderr
    assert "has the columns of --dataset=criteo" in done.stderr
    assert not (tmp_path / "c" / "columns.json").exists()


@pytest.mark.parametrize(
    "more, missing", [({}, True), ({"missing": []}, False), ({"missing": ["x"]}, False)]
)
def test_hives_missing_cells_are_missing_where_columns_are_described_unless_said(
    tmp_path, more, missing
):
    columns = [{"name": "y", "kind": "label"}, {"name": "a", "kind": "category"}]
    (tmp_path / "c.json").write_text(json.dumps({"columns": columns, **more}))
    (tmp_path / "a.csv").write_text("y,a\n" + "1,\\N\n0,b\n1,x\n" * 20)
    flags = dict(columns=str(tmp_path / "c.json"), split="1,0,0", min_count=1)

    def vocabulary(out, **more):
        options = PrepareOptions(str(tmp_path / out), str(tmp_path / "a.csv"), **flags, **more)
        prepare.prepare(options)
        made = json.loads((tmp_path / out / "feature_map.json").read_text())
        return set(made["fields"][0]["vocabulary"])

    known = vocabulary("o")
    assert ("\\N" in known) != missing and ("x" in known) == ("x" not in str(more))
    assert vocabulary("p", missing="b") == {"\\N", "x"}


def test_a_column_of_lists_is_refused_with_a_sentence(tmp_path):
    table = pa.table({"click": [0, 1], "pages": [[1], [2, 3]], "shop": ["a", "b"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(BadInput, match="column pages is of type list.*cast it to string or int64"):
        prepare.prepare(PrepareOptions(f"{tmp_path}/data", f"{tmp_path}/rows.parquet", guess=True))
