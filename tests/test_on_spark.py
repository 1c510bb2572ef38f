"""The jobs on Spark write what the programs of one machine write, and say the same of bad input."""

import contextlib
import gzip
import json
import os
import random
import shutil
import subprocess

import numpy as np
import pyarrow
import pytest
import test_kinds
from conftest import QUICK_JAVA, ROOT, fill, make_records, started, write_tfrecords
from pyarrow import parquet
from test_prepare_criteo import all_files, criteo_rows, text_of

from data_tools import inspect_dataset, libsvm_to_tfrecord, prepare, rebalance
from data_tools.click_logs import options as prepare_options
from data_tools.rebalancing import options as rebalance_options
from data_tools.rebalancing.selecting import Order
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json, text_blocks
from deepfm.records.raw.column_kinds import DATASETS
from deepfm.records.storage import places

PYTHON = ROOT / ".venv-spark" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"),
    pytest.mark.timeout(500),
]
TASK = 60000  # bytes of raw rows in a slice
ENVIRONMENT = dict(
    os.environ, SPARK_LOCAL_IP="127.0.0.1", SPARK_CONF_DIR="/nonexistent", **QUICK_JAVA
)


HOLDING = """
import builtins, os, time
whole, hold = open, os.path.join(os.path.dirname(__file__), "hold")
def held(path, *more, **named):
    file = whole(path, *more, **named)
    if "/attempt-" in str(path) and os.path.exists(hold):
        whole(hold, "a").write("held")
        while os.path.exists(hold):
            time.sleep(0.01)
    return file
builtins.open = held
"""


def holding(folder):
    """The environment of Python that stays where a task of Spark has begun a file, as long as there
    is folder/hold, to which it then adds."""
    (folder / "sitecustomize.py").write_text(HOLDING)
    return {"PYTHONPATH": str(folder)}


@contextlib.contextmanager
def serving(python=PYTHON, **environment):
    """Runs a job on local[2]: (name, environment, options) -> {"code", "said", "log"}."""
    words = [python, "tests/spark_server.py"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with started(words, env=dict(ENVIRONMENT, **environment), **pipes) as process:

        def run(job, environment=None, **options):
            options = {k: str(v) if k in ("input", "output_dir") else v for k, v in options.items()}
            asked = {"job": job, "task": TASK, "options": options, "env": environment or {}}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run


@pytest.fixture(scope="module")
def server():
    with serving() as run:
        yield run


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    """3,000 raw rows in three files, one of them packed; some cells are quoted, some texts long."""
    folder = tmp_path_factory.mktemp("criteo")
    rows = criteo_rows(3000)
    (folder / "a.tsv").write_text(text_of(rows[:1700]))
    (folder / "b.tsv").write_text(text_of(rows[1700:2400]).replace("\n", "\r\n"))
    with gzip.open(str(folder / "c.tsv.gz"), "wt") as f:
        f.write(text_of(rows[2400:]).replace("eighteen letters!", '"eighteen letters!"'))
    return folder


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """1,003 records in four files of different sizes, one of them packed, with dataset.json."""
    folder = tmp_path_factory.mktemp("records")
    labels, ids, values = make_records(1003)
    ends, files = [0, 10, 400, 401, 1003], []
    for i, (first, last) in enumerate(zip(ends, ends[1:])):
        path = folder / f"part-{i}.tfrecords"
        write_tfrecords(path, tuple(x[first:last] for x in (labels, ids, values)))
        if i == 1:
            path = folder / "part-1.tfrecords.gz"
            path.write_bytes(gzip.compress((folder / "part-1.tfrecords").read_bytes()))
            os.remove(str(folder / "part-1.tfrecords"))
        ones = int(labels[first:last].sum())
        files.append(datasets.DataFile(str(path), path.stat().st_size, last - first, ones))
    dataset_json.write(str(folder), 4, 50, files)
    return folder


def content(folder):
    """{path from the folder: bytes} of all files but the mark of success."""
    found = all_files(folder)
    assert found.pop("_SUCCESS", b"") == b""
    return found


def one_machine(monkeypatch, job, **options):
    """Runs the program of one machine; returns what it refuses, or None."""
    monkeypatch.setattr(text_blocks, "TASK", TASK)
    options = {k: str(v) if k in ("input", "output_dir") else v for k, v in options.items()}
    try:
        if job == "convert":
            libsvm_to_tfrecord.convert(libsvm_to_tfrecord.ConvertOptions(**options))
        elif job == "prepare":
            prepare.prepare(prepare_options.PrepareOptions(**options))
        else:
            rebalance.rebalance(rebalance_options.RebalanceOptions(**options))
    except BadInput as error:
        return str(error)
    return None


@pytest.fixture
def both(server, tmp_path, monkeypatch):
    """both(job, name="", option=value ...): runs a job on one machine, into alone + name, and on
    Spark, into spark + name; both end alike and leave the same files. -> (what they refuse or None,
    the log of Spark)."""

    def run(job, name="", **options):
        alone, spark = tmp_path / f"alone{name}", tmp_path / f"spark{name}"
        said = one_machine(monkeypatch, job, output_dir=alone, **options)
        answer = server(job, output_dir=spark, **options)
        assert (answer["code"], answer["said"]) == (2 * bool(said), said or ""), answer
        assert content(spark) == content(alone)
        assert (spark / "_SUCCESS").exists() == (not said)
        return said, answer["log"]

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"min_count": 3},
        {"min_count": 1, "integers": "scaled", "output_format": "libsvm", "split": "0.5,0.5,0"},
    ],
)
def test_prepare_writes_the_bytes_of_one_machine(both, criteo, tmp_path, options):
    assert both("prepare", input=criteo, **options)[0] is None
    assert len(content(tmp_path / "alone")) > 12  # several slices


def test_a_long_text_that_occurs_as_often_as_needed_has_an_id(both, tmp_path):
    rows = criteo_rows(60)
    for row in rows[:3]:
        row[20] = "a text that occurs three times"
    (tmp_path / "a.tsv").write_text(text_of(rows))
    for count in (3, 4):
        options = {"input": tmp_path / "a.tsv", "min_count": count, "split": "1,0,0"}
        assert both("prepare", count, **options)[0] is None
        made = (tmp_path / f"spark{count}" / "feature_map.json").read_text()
        assert ("occurs three times" in made) == (count == 3)


def test_parquet_gives_the_bytes_of_one_machine(both, tmp_path):
    names = [column.name for column in DATASETS["criteo"]]
    cells = zip(*criteo_rows(900))
    table = pyarrow.table({name: pyarrow.array(column) for name, column in zip(names, cells)})
    folder = tmp_path / "raw"
    folder.mkdir()
    parquet.write_table(table, str(folder / "a.parquet"), row_group_size=200)
    assert both("prepare", input=folder, min_count=2)[0] is None


@pytest.mark.parametrize("by, guessed", [("hash:user", False), ("time:day", True)])
def test_every_kind_gives_the_bytes_of_one_machine(both, tmp_path, by, guessed):
    draw = random.Random(5)
    rows = [test_kinds.row(draw) for _ in range(900)]
    for cells in rows:  # no row may lack its time
        cells[-3] = str(draw.randrange(10**9))
    test_kinds.write_table(tmp_path, rows)
    options = {"columns": str(tmp_path / "columns.json"), "min_count": 2, "split": "0.6,0.2,0.2"}
    if guessed:
        (tmp_path / "columns.json").unlink()
        options = {"guess": True, "label": "clicked", "positive": "yes"}
    assert both("prepare", input=tmp_path / "rows.csv", split_by=by, **options)[0] is None


def test_a_map_of_one_engine_encodes_new_rows_on_the_other(both, criteo, tmp_path, monkeypatch):
    one_machine(monkeypatch, "prepare", input=criteo, output_dir=tmp_path / "first", min_count=2)
    known = {"feature_map": str(tmp_path / "first" / "feature_map.json")}
    assert both("prepare", input=criteo / "b.tsv", **known)[0] is None


def test_a_map_grows_to_the_bytes_of_one_machine(both, criteo, tmp_path):
    assert both("prepare", "1", input=criteo / "b.tsv", min_count=2, day="1")[0] is None
    known = {"feature_map": str(tmp_path / "alone1" / "feature_map.json"), "grow": True, "day": "2"}
    given = {"min_count": 3, "max_categories": "C1:5,C2:9", "max_evicted": 1.0}
    assert both("prepare", "2", input=criteo, **known, **given)[0] is None
    sizes = [len((tmp_path / x / "feature_map.json").read_bytes()) for x in ("spark1", "spark2")]
    assert sizes[0] < sizes[1]
    assert (tmp_path / "spark2" / "train" / "feature_map.moves.npz").exists()


@pytest.fixture
def with_bad_rows(criteo, tmp_path):
    """The rows with three bad ones, in two files; (folder, the lines that are bad)."""
    folder = tmp_path / "raw"
    shutil.copytree(str(criteo), str(folder))
    for name, line, row in [("a.tsv", 1600, b"2"), ("a.tsv", 9, b"x\ty"), ("b.tsv", 5, b"\xff")]:
        lines = (folder / name).read_bytes().split(b"\n")
        lines.insert(line - 1, row)
        (folder / name).write_bytes(b"\n".join(lines))
    return folder


def test_a_bad_row_is_refused_in_the_same_sentence(both, with_bad_rows, tmp_path):
    said, _ = both("prepare", input=with_bad_rows, max_bad_records=2)
    assert "b.tsv:5: " in said
    assert not (tmp_path / "spark").exists()


def test_bad_rows_up_to_the_limit_are_logged_and_skipped(both, with_bad_rows):
    said, log = both("prepare", input=with_bad_rows, max_bad_records=3)
    assert said is None
    skipped = [line for line in log if line.startswith("Skipping bad record")]
    assert [line.split(": ")[1].rpartition("/")[2] for line in skipped] == [
        "a.tsv:9", "a.tsv:1601", "b.tsv:5",
    ]  # fmt: skip


def libsvm_lines(n, kind="libsvm", seed=0):
    """n lines of text of a kind, with comments, blank lines and lines without the last field."""
    rng, lines = np.random.RandomState(seed), []
    for i in range(n):
        label = "1" if rng.rand() < 0.3 else "0"
        if "weighted" in kind and i % 3 != 1:
            label += f":{rng.randint(1, 9) / 4}"
        fields = range(5 - (i % 7 == 3 and kind != "libsvm"))
        pairs = [f"{200 * f + rng.randint(1, 200)}:{rng.rand():.6g}" for f in fields]
        if "ffm" in kind:
            pairs = [f"{field}:{pair}" for field, pair in enumerate(pairs)]
        if "strings" in kind:
            pairs = [pair.replace(":", f":{'cookie=' * (i % 12)}x", 1) for pair in pairs]
        if "multi" in kind:
            pairs += pairs[-2:]
        if "ffm" in kind or "map" in kind:
            rng.shuffle(pairs)
        lines.append(" ".join([label, *pairs]) + (" # a comment" if i % 50 == 7 else ""))
        lines += ["", "# no record"] * (i % 90 == 1)
    return lines


@pytest.fixture
def text(tmp_path):
    """Makes three files of one kind of text, the last one packed; (kind) -> their folder."""

    def make(kind):
        folder = tmp_path / "text"
        folder.mkdir()
        (folder / "a.libsvm").write_text("\n".join(libsvm_lines(4000, kind)))
        (folder / "b.txt").write_text("\r\n".join(libsvm_lines(5, kind, 1)) + "\r\n")
        with gzip.open(str(folder / "c.libsvm.gz"), "wt") as f:
            f.write("\n".join(libsvm_lines(600, kind, 2)))
        return folder

    return make


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("libsvm", {}, marks=pytest.mark.table),
        ("libsvm", {"num_files": 7, "feature_size": 5000, "id_offset": 3}),
        ("libsvm", {"split": "0.7,0.2,0.1", "seed": 3}),
        ("short", {"pad": True, "compress": True}),
        ("ffm", {"num_files": 2, "compress": True}),
        ("weighted multi ffm", {"multi_valued": True, "input_format": "libffm"}),
        ("weighted map", {"fields": True}),
        ("weighted ffm strings", {"hash_buckets": 1000, "max_bad_records": 9}),
    ],
)
def test_convert_writes_the_bytes_of_libsvm_to_tfrecord(both, text, tmp_path, kind, options):
    folder = text(kind)
    if "fields" in options:
        ranges = [{"name": f, "first_id": 200 * f, "last_id": 200 * f + 199} for f in range(5)]
        (tmp_path / "map.json").write_text(json.dumps({"fields": ranges}))
        options = {"fields": str(tmp_path / "map.json")}
    assert both("convert", input=folder, **options)[0] is None
    described = [json.loads(path.read_text()) for path in tmp_path.glob("spark/**/dataset.json")]
    assert len(described) == (3 if "split" in options else 1)
    assert sum(f["rows"] for found in described for f in found["files"].values()) == 4605
    assert described[0].get("weighted", False) == ("weighted" in kind)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_convert_writes_the_bytes_of_one_machine_for_tables(both, tmp_path, kind):
    rng, folder = np.random.RandomState(0), tmp_path / "table"
    folder.mkdir()
    for part in range(3):
        columns = {name: rng.randint(0, 900, 1500) for name in "abc"}
        columns["label"] = rng.randint(0, 2, 1500)
        columns["b"][70 * part + 9] = 999  # a bad row
        if kind == "csv":
            rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
            (folder / f"part-{part}.csv").write_text("\n".join(rows))
            continue
        columns["ids"] = np.stack([columns.pop(name) for name in "abc"], axis=1).tolist()
        columns["values"], columns["weight"] = rng.rand(1500, 3).tolist(), rng.rand(1500)
        table = pyarrow.table(columns)
        parquet.write_table(table, str(folder / f"part-{part}.parquet"), row_group_size=400)
    options = {"input": folder, "num_files": 4, "feature_size": 900, "compress": kind == "csv"}
    for skip in (2, 3) if kind == "parquet" else (3,):
        said, _ = both("convert", skip, max_bad_records=skip, **options)
        assert (said is None) == (skip == 3)
    described = json.loads((tmp_path / "spark3" / "dataset.json").read_text())
    assert sum(file["rows"] for file in described["files"].values()) == 3 * 1499


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_bad_line_is_refused_in_the_same_sentence_or_skipped(both, text, skipped):
    folder = text("libsvm")
    for name, line, row in [("a.libsvm", 3000, "1 2:x 3:4"), ("b.txt", 2, "2 1:1")]:
        lines = (folder / name).read_text().split("\n")
        lines.insert(line - 1, row)
        (folder / name).write_text("\n".join(lines))
    said, log = both("convert", input=folder, max_bad_records=skipped, num_files=3)
    assert said is None if skipped == 2 else "b.txt:2: label '2' is not" in said
    lines = [line.split(": ")[1].rpartition("/")[2] for line in log if "record " in line]
    assert lines == ["a.libsvm:3000", "b.txt:2"][:skipped]


@pytest.mark.parametrize(
    "lines, options, words",
    [
        (["-1 1:1", "1 2:1", " 0 3:1"], {}, "use 0 and 1, or -1 and +1, not both"),
        (["1 1:1", "0 2:1"], {"num_files": 3}, "has only 2 rows; try --num_files=2"),
    ],
)
def test_convert_refuses_in_the_sentence_of_libsvm_to_tfrecord(
    both, tmp_path, lines, options, words
):
    path = tmp_path / "a.libsvm"
    path.write_text("\n".join(lines) + "\n")
    assert words in both("convert", input=path, **options)[0]
    assert not (tmp_path / "spark").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"num_files": 7},
        {"num_files": 3, "shuffle": False},
        {"positive_share": 0.5, "oversample": True, "seed": 5, "compress": True},
    ],
)
def test_rebalance_writes_the_bytes_of_one_machine(both, records, tmp_path, options):
    assert both("rebalance", input=records, **options)[0] is None
    described = json.loads((tmp_path / "spark" / "dataset.json").read_text())
    rows = [file["rows"] for file in described["files"].values()]
    assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize(
    "kind, options",
    [
        ("weighted short", {"num_files": 5, "compress": True}),
        ("libsvm", {"shuffle": False, "max_bad_records": 2, "negative_rate": 0.5, "seed": 3}),
        ("libsvm", {"max_bad_records": 1}),
        ("libsvm", {"positive_share": 0.5, "num_files": 2}),
    ],
)
def test_rebalance_of_text_writes_the_bytes_of_one_machine(both, text, tmp_path, kind, options):
    folder, spark = text(kind), tmp_path / "spark"
    if "max_bad_records" in options:
        lines = (folder / "a.libsvm").read_text().split("\n")
        lines[2500:2501] = ["1 2:x 3:4", "1 0:1 \xe9", "0", "1 0:1 # \xe9"]  # two of them are bad
        (folder / "a.libsvm").write_text("\n".join(lines), encoding="utf-8")
    described = "positive_share" in options
    if described:
        inspect_dataset.write_metadata(str(folder), inspect_dataset.inspect(str(folder)))
    said, _ = both("rebalance", input=folder, **options)
    assert bool(said) == (options.get("max_bad_records") == 1) == (not content(spark))
    assert ("dataset.json" in content(spark)) == described


@pytest.mark.parametrize("skipped", [0, 1])
def test_records_that_nothing_describes_are_decoded_and_checked(both, records, tmp_path, skipped):
    folder = tmp_path / "found"
    shutil.copytree(str(records), str(folder), ignore=shutil.ignore_patterns("dataset.json"))
    labels, ids, values = make_records(3)
    ids[1, 0] = -1
    write_tfrecords(folder / "part-5.tfrecords", (labels, ids, values))
    options = {"num_files": 3, "max_bad_records": skipped, "negative_rate": 0.5}
    said, _ = both("rebalance", input=folder, **options)
    assert (said is None) == bool(skipped)
    assert skipped or "record 1 at byte" in said and "feature id -1" in said


@pytest.mark.parametrize("job", ["convert", "prepare", "rebalance"])
def test_a_gzip_file_that_is_cut_is_refused_in_the_same_sentence(
    both, records, criteo, text, tmp_path, job
):
    source = {"rebalance": records, "prepare": criteo}.get(job) or text("libsvm")
    folder = tmp_path / "damaged"
    shutil.copytree(str(source), str(folder))
    (path,) = folder.glob("*.gz")
    path.write_bytes(path.read_bytes()[:-20])
    assert path.name in both(job, input=folder)[0]
    assert content(tmp_path / "spark") == {}


@pytest.mark.parametrize(
    "job", ["convert", pytest.param("prepare", marks=pytest.mark.table), "rebalance"]
)
def test_a_full_disk_ends_the_job_with_its_name_and_leaves_nothing(
    server, records, criteo, text, small_disk, job
):
    folder = {"rebalance": records, "prepare": criteo}.get(job) or text("libsvm")
    fill(small_disk, 30000 if job == "rebalance" else 150000)
    before = content(small_disk)
    answer = server(job, input=folder, output_dir=small_disk / "out")
    assert answer["code"] == 1
    assert "a task failed 3 times" in answer["said"] and "No space left" in answer["said"]
    assert "\n" not in answer["said"]
    assert not (small_disk / "out").exists()
    assert content(small_disk) == before


def test_a_task_does_not_make_the_folder_of_a_job_that_is_gone_again(tmp_path):
    """Whose driver has deleted it: nobody would delete it a second time."""
    with pytest.raises(FileNotFoundError):
        places.make_inner(str(tmp_path / "scratch" / "attempt-0"))
    assert list(tmp_path.iterdir()) == []


def test_files_are_cut_at_the_ranks_of_the_sorted_keys():
    """The histogram of the upper bits finds the keys that sorting all of them does."""
    rows = [0, 70000, 1, 30000]
    for shuffle in (True, False):
        by = Order(3, shuffle)
        keys = np.sort(np.concatenate([by.keys(task, 0, n) for task, n in enumerate(rows)]))
        ranks = [sum(rows) * i // 13 for i in range(1, 13)]
        assert by.cuts(rows, 13).tolist() == keys[ranks].tolist()
