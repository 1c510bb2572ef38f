"""The jobs on Spark write what the programs of one machine write, and say the same of bad input."""

import contextlib
import gzip
import json
import lzma
import os
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from conftest import QUICK_JAVA, ROOT, fill, make_records, started, write_tfrecords
from scipy import stats
from test_prepare_criteo import criteo_rows, text_of

from data_tools import inspect_dataset, libsvm_to_tfrecord, prepare_criteo, rebalance
from data_tools.click_logs import options as prepare_options
from data_tools.click_logs.column_kinds import DATASETS
from data_tools.common import line_blocks
from data_tools.rebalancing import options as rebalance_options
from data_tools.spark import order
from deepfm.data import dataset_json, datasets
from deepfm.errors import BadInput
from deepfm.records.storage import local

PYTHON = ROOT / ".venv-spark" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"
)
TASK = 60000  # bytes of raw rows in a slice
ENVIRONMENT = dict(
    os.environ, SPARK_LOCAL_IP="127.0.0.1", SPARK_CONF_DIR="/nonexistent", **QUICK_JAVA
)


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
    paths = [p for p in folder.rglob("*") if p.is_file()]
    found = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    assert found.pop("_SUCCESS", b"") == b""
    return found


def one_machine(monkeypatch, job, **options):
    """Runs the program of one machine; returns what it refuses, or None."""
    monkeypatch.setattr(line_blocks, "TASK", TASK)
    options = {k: str(v) if k in ("input", "output_dir") else v for k, v in options.items()}
    try:
        if job == "convert":
            libsvm_to_tfrecord.convert(libsvm_to_tfrecord.Options(**options))
        elif job == "prepare":
            prepare_criteo.prepare(prepare_options.Options(**options))
        else:
            rebalance.rebalance(rebalance_options.Options(**options))
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
def test_prepare_writes_the_bytes_of_prepare_criteo(both, criteo, tmp_path, options):
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


def test_parquet_gives_the_bytes_of_prepare_criteo(both, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = [column.name for column in DATASETS["criteo"]]
    cells = zip(*criteo_rows(900))
    table = pyarrow.table({name: pyarrow.array(column) for name, column in zip(names, cells)})
    folder = tmp_path / "raw"
    folder.mkdir()
    parquet.write_table(table, str(folder / "a.parquet"), row_group_size=200)
    assert both("prepare", input=folder, min_count=2)[0] is None


def test_a_map_of_one_engine_encodes_new_rows_on_the_other(both, criteo, tmp_path, monkeypatch):
    one_machine(monkeypatch, "prepare", input=criteo, output_dir=tmp_path / "first", min_count=2)
    known = {"feature_map": str(tmp_path / "first" / "feature_map.json")}
    assert both("prepare", input=criteo / "b.tsv", **known)[0] is None


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
        ("libsvm", {}),
        ("libsvm", {"num_files": 7, "feature_size": 5000, "id_offset": 3}),
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
    described = json.loads((tmp_path / "spark" / "dataset.json").read_text())
    assert sum(file["rows"] for file in described["files"].values()) == 4605
    assert described.get("weighted", False) == ("weighted" in kind)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_convert_writes_the_bytes_of_one_machine_for_tables(both, tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
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
    for skip in (2, 3):
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
        (["# nothing", ""], {"field_size": 2}, "hold no rows"),
        (["1 1:1", "0 2:1"], {"num_files": 3}, "has only 2 rows; try --num_files=2"),
        (["1 1:1", "0 2:1"], {"multi_valued": True}, "give LibFFM input, or --fields"),
    ],
)
def test_convert_refuses_in_the_sentence_of_libsvm_to_tfrecord(
    both, tmp_path, lines, options, words
):
    path = tmp_path / "a.libsvm"
    path.write_text("\n".join(lines) + "\n")
    assert words in both("convert", input=path, **options)[0]
    assert not (tmp_path / "spark").exists()


def test_convert_replaces_a_data_set_only_where_it_is_asked_to(server, text, tmp_path):
    options = {"input": text("libsvm"), "output_dir": tmp_path / "out"}
    assert server("convert", **options)["code"] == 0
    before = content(tmp_path / "out")
    answer = server("convert", num_files=2, **options)
    assert answer["code"] == 2 and "--overwrite replaces it" in answer["said"]
    assert content(tmp_path / "out") == before
    assert server("convert", num_files=2, overwrite=True, **options)["code"] == 0
    assert sorted(content(tmp_path / "out")) == [
        "dataset.json", "part-00000-of-00002.tfrecords", "part-00001-of-00002.tfrecords",
    ]  # fmt: skip


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
        inspect_dataset.new_metadata.write(str(folder), inspect_dataset.inspect(str(folder)))
    said, _ = both("rebalance", input=folder, **options)
    assert bool(said) == (options.get("max_bad_records") == 1) == (not content(spark))
    assert ("dataset.json" in content(spark)) == described


def test_rebalance_puts_records_anywhere_with_equal_chances(server, tmp_path):
    """Where a record was against where it is, and how far from the one before it, by chi-squared.

    A table that is too even is as wrong as one that is not even enough.
    """
    sizes, rows, blocks = (100, 6000, 3900), 10000, 12
    (tmp_path / "in").mkdir()
    for i, ids in enumerate(np.split(np.arange(rows), np.cumsum(sizes)[:-1])):
        lines = "".join(f"{n % 2} {n}:1\n" for n in ids.tolist())
        (tmp_path / "in" / f"{i}.libsvm").write_text(lines)
    options = {"input": tmp_path / "in", "output_dir": tmp_path / "out", "num_files": blocks}
    assert server("rebalance", seed=2, **options)["code"] == 0
    files = sorted((tmp_path / "out").glob("part-*"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    before = np.array([int(line.split()[1].split(":")[0]) for line in lines])
    assert sorted(before.tolist()) == list(range(rows))
    after = np.arange(rows)
    place = np.histogram2d(before, after, blocks)[0]
    step = np.histogram((before[1:] - before[:-1]) % rows, blocks, (0, rows))[0]
    for counts, freedom in ((place, (blocks - 1) ** 2), (step, blocks - 1)):
        statistic = ((counts - counts.mean()) ** 2).sum() / counts.mean()
        assert 1e-3 < stats.chi2.cdf(statistic, freedom) < 1 - 1e-3, statistic


INPUTS = {
    "rows in two roles": ("prepare", "a.tsv", b"1" + b"\t5" * 39 + b"\n", "holds the same rows as"),
    "another kind": ("convert", "a.libsvm", lzma.compress(b"1 1:1\n"), "an xz file; unpack it"),
    "other features": ("rebalance", "a.tfrecords", b"", "found feat_ids (2 int64), label (1 fl"),
}


@pytest.mark.parametrize("job, name, content_of, words", INPUTS.values(), ids=INPUTS)
def test_what_is_no_input_is_refused_in_the_same_sentence(
    both, tmp_path, job, name, content_of, words
):
    (tmp_path / name).write_bytes(content_of)
    if job == "rebalance":
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[3, 4]))
        label = tf.train.Feature(float_list=tf.train.FloatList(value=[1]))
        features = tf.train.Features(feature={"feat_ids": ids, "label": label})
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(tf.train.Example(features=features).SerializeToString())
    options = {"input": tmp_path / name}
    options.update({"valid_input": str(tmp_path / name)} if job == "prepare" else {})
    assert words in both(job, **options)[0]


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_damaged_record_is_named_or_skipped_as_on_one_machine(both, records, tmp_path, skipped):
    folder = tmp_path / "damaged"
    shutil.copytree(str(records), str(folder))
    data = bytearray((folder / "part-3.tfrecords").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "part-3.tfrecords").write_bytes(bytes(data))
    said, _ = both("rebalance", input=folder, max_bad_records=skipped)
    assert (said is None) == bool(skipped)


def test_a_label_of_a_described_record_is_checked_as_on_one_machine(both, records, tmp_path):
    folder = tmp_path / "labels"
    shutil.copytree(str(records), str(folder))
    labels, ids, values = make_records(1003)
    labels[700] = 0.5
    write_tfrecords(folder / "part-3.tfrecords", (labels[401:], ids[401:], values[401:]))
    said, _ = both("rebalance", input=folder, num_files=3)
    assert "part-3.tfrecords: record 299 at byte" in said and "label [0.5]" in said


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


def test_a_folder_that_holds_data_is_refused_until_it_is_to_be_replaced(server, records, tmp_path):
    options = {"input": records, "output_dir": tmp_path, "num_files": 2}
    assert server("rebalance", **options)["code"] == 0
    before = content(tmp_path)
    answer = server("rebalance", seed=2, **options)
    assert answer["code"] == 2 and "--overwrite replaces it" in answer["said"]
    assert content(tmp_path) == before
    assert server("rebalance", seed=2, overwrite=True, **options)["code"] == 0
    assert content(tmp_path) != before


@pytest.mark.parametrize(
    "job, lost", [("convert", 20), ("prepare", 20), ("rebalance", 20), ("rebalance", 8)]
)
def test_a_gzip_file_that_is_cut_is_refused_in_the_same_sentence(
    both, records, criteo, text, tmp_path, job, lost
):
    """Without the last 8 bytes, a checksum and a length, all that is packed can still be read."""
    source = {"rebalance": records, "prepare": criteo}.get(job) or text("libsvm")
    folder = tmp_path / "damaged"
    shutil.copytree(str(source), str(folder))
    (path,) = folder.glob("*.gz")
    path.write_bytes(path.read_bytes()[:-lost])
    assert path.name in both(job, input=folder)[0]
    assert content(tmp_path / "spark") == {}


def test_a_record_in_which_a_gzip_file_is_cut_is_skipped_as_on_one_machine(both, records, tmp_path):
    (tmp_path / "in").mkdir()
    packed = (records / "part-1.tfrecords.gz").read_bytes()
    (tmp_path / "in" / "a.tfrecords.gz").write_bytes(packed[:-200])
    assert both("rebalance", input=tmp_path / "in", max_bad_records=1)[0] is None


@pytest.mark.parametrize("job", ["convert", "prepare", "rebalance"])
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
        local.make_inner(str(tmp_path / "scratch" / "attempt-0"))
    assert list(tmp_path.iterdir()) == []


def test_files_are_cut_at_the_ranks_of_the_sorted_keys():
    """The histogram of the upper bits finds the keys that sorting all of them does."""

    class Spread(list):
        """A list with the functions of an RDD that are used."""

        def mapPartitions(self, f):
            return Spread(f(iter(self)))

        def treeReduce(self, f):
            return sum(self[1:], self[0])

        def map(self, f):
            return Spread(f(x) for x in self)

        def collect(self):
            return self

    context = SimpleNamespace(parallelize=lambda x, n: Spread(x), defaultParallelism=2)
    rows = [0, 70000, 1, 30000]
    for shuffle in (True, False):
        by = order.Order(3, shuffle)
        keys = np.sort(np.concatenate([by.keys(task, 0, n) for task, n in enumerate(rows)]))
        ranks = [sum(rows) * i // 13 for i in range(1, 13)]
        assert order.cuts(context, by, rows, 13).tolist() == keys[ranks].tolist()
