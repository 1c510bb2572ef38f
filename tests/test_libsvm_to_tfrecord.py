"""The converter: every row once, in order, in even files, and nothing at all if a row is bad."""

import contextlib
import dataclasses
import gzip
import json
import os
import resource
import signal
import sys
from concurrent import futures
from multiprocessing import connection

import numpy as np
import psutil
import pytest
from conftest import await_files, examples_of, finish, run_tool, shared_data, started, wait_until

from data_tools import libsvm_to_tfrecord, rebalance
from data_tools.click_logs import splitting
from data_tools.common import publishing
from data_tools.common.command_line import Host
from data_tools.engines import pool, processes
from data_tools.libsvm_to_tfrecord import ConvertOptions
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json, text_blocks

TIMEOUT = 180  # seconds


def rows_of(text, field_size=None, id_offset=0):
    """[(label, ids, values)] of LibSVM text, by the definition of the format."""
    rows = []
    for line in text.split("\n"):
        line = line.split("#")[0].split()
        if line:
            pairs = [pair.split(":") for pair in line[1:]]
            ids = [int(i) + id_offset for i, _ in pairs]
            values = [float(np.float32(v)) for _, v in pairs]
            missing = (field_size or len(pairs)) - len(pairs)
            rows.append((float(float(line[0]) > 0), ids + [0] * missing, values + [0.0] * missing))
    return rows


def records_of(path):
    """[(label, ids, values)] of a TFRecord file, read one by one."""
    return [(*row["label"], row["ids"], row["values"]) for row in examples_of(path)]


def lines(n, field_size=3, seed=0):
    """n random LibSVM lines, each with its newline."""
    rng = np.random.RandomState(seed)
    ids, values = rng.randint(1, 1000, [n, field_size]), rng.rand(n, field_size)
    return [
        f"{i % 2} " + " ".join(f"{a}:{b:.4f}" for a, b in zip(ids[i], values[i])) + "\n"
        for i in range(n)
    ]


@pytest.fixture
def convert(tmp_path):
    """convert(text or {name: text or bytes}, flag=value ...) -> the DataFiles that were written."""

    def run(texts, **flags):
        folder = tmp_path / "in"
        folder.mkdir(exist_ok=True)
        texts = texts if isinstance(texts, dict) else {"a.libsvm": texts}
        for name, text in texts.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        options = ConvertOptions(str(folder), str(tmp_path / "out"))
        return libsvm_to_tfrecord.convert(dataclasses.replace(options, **flags))

    return run


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of some lines and pieces of some blocks, so that small files have many."""
    monkeypatch.setattr(text_blocks, "BLOCK", 100)
    monkeypatch.setattr(text_blocks, "TASK", 400)


def all_records(files):
    return [row for file in files for row in records_of(file.path)]


LOOSE = "\n# head 1:1\n1 1:1 2:.5\r\n\n  0\t3:1  4:1e-3  \n \t \n+1 5:1 6:-2 # tail 7:7\n0 7:1 8:0"


@pytest.mark.parametrize("block", [1, 7, 64, 4 << 20])
def test_blank_lines_comments_tabs_crlf_and_a_missing_newline_are_accepted(
    convert, monkeypatch, block
):
    monkeypatch.setattr(text_blocks, "BLOCK", block)
    assert all_records(convert(LOOSE)) == rows_of(LOOSE)


@pytest.mark.parametrize("num_files", [1, 2, 3, 7, 100])
def test_rows_are_spread_evenly_over_files(convert, small_blocks, num_files):
    texts = {f"{name}.libsvm": "".join(lines(n, seed=n)) for name, n in zip("abc", (3, 331, 50))}
    texts["b.libsvm"] = texts["b.libsvm"].replace("\n0", "\n\n#\n0")
    texts["d.libsvm.gz"] = gzip.compress("".join(lines(99)).encode())
    files = convert(texts, num_files=num_files)
    assert {file.rows for file in files} <= {483 // num_files, 483 // num_files + 1}
    texts["d.libsvm.gz"] = "".join(lines(99))
    assert all_records(files) == rows_of("".join(texts[name] for name in sorted(texts)))


def test_each_input_becomes_one_output_of_its_name(convert):
    text = "".join(lines(9))
    files = convert({"x/a.libsvm": text, "y/a.txt": text, "y/b": text})
    made = ["x-a.tfrecords", "y-a.tfrecords", "y-b.tfrecords"]
    assert [os.path.basename(f.path) for f in files] == made


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("flags", [{}, {"seed": 2, "compress": True}, {"pad": True}])
def test_split_draws_lines_by_their_bytes(convert, small_blocks, tmp_path, pack, flags):
    texts = lines(300)
    texts.insert(5, "\n# nothing\n")
    texts.insert(9, "x 1:1 2:1 3:1\n")
    text = "".join(texts)
    name = "a.libsvm" if pack is bytes else "a.libsvm.gz"
    flags = {"split": "0.6,0.4,0", "max_bad_records": 1, "feature_size": 1000, **flags}
    convert({name: pack(text.encode()), "b.txt": "1 1:1 2:1 3:1\n" * 50}, **flags)
    split = splitting.Split((0.6, 0.4, 0.0), seed=flags.get("seed", 1))
    found = sorted(os.listdir(tmp_path / "out"))
    assert found == ["train", "valid"]
    for i, folder in enumerate(found):
        data = datasets.find(str(tmp_path / "out" / folder), "data")
        assert (data.feature_size, data.field_size) == (1000, 3)
        starts = np.cumsum([0, *map(len, texts)])
        drawn = splitting.split_of(split, name, starts[:-1])
        mine = "".join(x for x, j in zip(texts, drawn) if j == i and "x" not in x)
        first, second = data.files
        assert records_of(first.path) == rows_of(mine) and first.rows
        assert set(map(str, records_of(second.path))) == {str((1.0, [1, 2, 3], [1.0, 1.0, 1.0]))}
        assert (data.rows, first.positives) == (
            len(rows_of(mine)) + second.rows, sum(row[0] for row in rows_of(mine)),
        )  # fmt: skip


@pytest.mark.parametrize("flags", [{"split": "0.8,0.1,0.1"}, {"num_files": 2}])
def test_a_data_set_is_replaced_as_a_whole_and_only_where_it_is_asked_to(convert, tmp_path, flags):
    convert("".join(lines(200)), **{**flags, **({"num_files": 3} if "num_files" in flags else {})})
    with pytest.raises(BadInput, match="already holds a data set .*--overwrite replaces it"):
        convert("".join(lines(200)), **flags)
    files = convert("".join(lines(100)), overwrite=True, **flags)
    assert sum(file.rows for file in files) == 100
    found = datasets.find(str(tmp_path / "out"), "data")
    assert found.rows == 100 and len(found.files) == len(files)


def test_two_records_are_logged_as_they_are_stored(convert, caplog):
    caplog.set_level("INFO", "absl")
    convert("1:.5 3:1 4:2.25\n-1 12345678:-1 6:0\n1 7:1 8:1\n", compress=True)
    convert("1 0:3:1 0:4:1 1:5:2\n0 1:6:1\n", multi_valued=True, overwrite=True)
    said = [x.getMessage() for x in caplog.records if x.getMessage().startswith("Example: ")]
    assert said == [
        "Example: label 1, weight 0.5, ids 3 4, values 1 2.25",
        "Example: label 0, weight 1, ids 12345678 6, values -1 0",
        "Example: label 1, counts 2 1, ids 3 4 5, values 1 1 2",
        "Example: label 0, counts 0 1, ids 6, values 1",
    ]


def test_gzip_in_and_out(convert, small_blocks):
    text = "".join(lines(200))
    halves = [gzip.compress(half.encode()) for half in (text[:1000], text[1000:])]
    (file,) = convert({"a.libsvm.gz": b"".join(halves)}, compress=True)
    assert file.path.endswith("/a.tfrecords.gz")
    assert records_of(file.path) == rows_of(text)


def test_dataset_json_describes_the_files(convert):
    text = "".join(lines(101))
    files = convert(text, num_files=2)
    found = datasets.find(os.path.dirname(files[0].path), "data")
    assert found.files == files
    assert [f.bytes for f in files] == [os.path.getsize(f.path) for f in files]
    assert [f.positives for f in files] == [sum(r[0] for r in records_of(f.path)) for f in files]
    ids = [i for _, ids, _ in rows_of(text) for i in ids]
    assert (found.field_size, found.feature_size) == (3, max(ids) + 1)


@pytest.mark.parametrize(
    "text, flags, expected",
    [  # the longest row, without comments, is the length unless one is given
        ("1 5:1\n0\n# 1:1 2:2 3:3\n1 1:1 2:2 # 3:3 4:4\n" * 20, {}, {"field_size": 2}),
        ("1 5:1\n", {"field_size": 3}, {"field_size": 3}),
        ("1 0:1\n0 1:1 2:1\n", {"id_offset": 1}, {"field_size": 2, "id_offset": 1}),
    ],
)
def test_rows_are_padded_and_moved(convert, small_blocks, text, flags, expected):
    assert all_records(convert(text, pad=True, **flags)) == rows_of(text, **expected)


def test_a_given_feature_size_is_kept(convert, tmp_path):
    convert("1 5:1\n", feature_size=100)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["feature_size"] == 100


@pytest.mark.parametrize(
    "line,flags,words",
    [
        ("1 1:1 2:1 x", {}, "'x' is not id:value"),
        ("1 1:1 2:1 5000:1", {"feature_size": 5000}, "5000 is not below feature_size 5000"),
        ("1 1:1 2:1 3:1 4:1", {"pad": True, "field_size": 3}, "at most 3 id:value pairs, found 4"),
        ("1 1:1 0:1", {"pad": True}, "feature id 0 is reserved for padding"),
        ("0 1:1", {"split": "0.5,0.3,0.2"}, "expected 3 id:value pairs, found 1"),
        ("\xff 1:1 2:1 3:1", {}, "label"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(convert, small_blocks, tmp_path, line, flags, words):
    texts = lines(300)
    texts[150] += "# a comment \xe9\n\n"
    texts.insert(200, f"{line}\n")
    with pytest.raises(BadInput) as error:
        convert("".join(texts), **flags)
    assert str(error.value).startswith(f"{tmp_path}/in/a.libsvm:203: ")
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.libsvm", "a.libsvm.gz"])
def test_max_bad_records_skips_just_those(convert, small_blocks, name):
    texts = lines(300)
    good = "".join(texts)
    for place in (300, 299, 120, 120, 5, 0):
        texts.insert(place, "1 1:1\n")
    text = "".join(texts).encode()
    files = convert(
        {name: gzip.compress(text) if name.endswith(".gz") else text},
        max_bad_records=6,
        field_size=3,
    )
    assert all_records(files) == rows_of(good)


ONE, CSV = "1 1:1\n", {"a.csv": "label,a\n1,2\n" * 9}
THREE = dict.fromkeys(("a.libsvm", "b.libsvm", "c.libsvm"), "1 1:1 2:1\n1 1:1\n")
SPLIT = {"split": "0.8,0.1,0.1"}


@pytest.mark.parametrize(
    "texts, flags, sentence",
    [
        ({"a.libsvm": ONE, "a.txt": ONE}, {}, r"another input would also become a\.tfrecords"),
        (ONE, {"split": "0.5,0.4"}, "must be three shares that sum to 1"),
        (ONE, {**SPLIT, "num_files": 2}, "does not go with --num_files .data_tools.rebalance make"),
        (CSV, SPLIT, "--split does not go with a table"),
        (ONE * 9, {"num_files": 10}, "--num_files=10: the input has only 9 rows"),
        ("# nothing\n\n", {"field_size": 2}, "hold no rows"),
        ("# nothing\n\n", {"field_size": 2, "num_files": 2}, "only 0 rows"),
        (THREE, {"max_bad_records": 2}, r"c\.libsvm:2: .* \(2 bad records were skipped before; "),
        ({"a.libsvm": ONE.encode("utf-16")}, {}, r"a\.libsvm: its byte order mark says UTF-16"),
        ("\ufeffx 1:1\n1 1:1\n", {"field_size": 1}, r"a\.libsvm:1: label 'x'"),
        ("0x0 1:1\n-1 1:1\n", {}, r"a\.libsvm:2: label -1, but .*:1 has label 0x0;"),
        ("1e-60 1:1\n-1 1:1\n", {}, r"a\.libsvm:2: label -1, but .*:1 has label 1e-60;"),
        ("3e-40 1:1\n-1 1:1\n", {}, r"a\.libsvm:2: label -1, but .*:1 has label 3e-40;"),
        ("1 1:1\n" * 20 + "-1 1:1\n" + "1 1:1\n" * 49 + "0 1:1\n", {},
         r"a\.libsvm:71: label 0, but .*:21 has label -1;"),  # in another block and task
        # The label of a row that is skipped is not one of them.
        ({"a.libsvm": b"-\xff 1:1\n1 1:1\n0 1:1\n-1 1:1\n"}, {"max_bad_records": 1},
         r"a\.libsvm:4: label -1, but .*:3 has label 0;"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(
    convert, small_blocks, tmp_path, texts, flags, sentence
):
    with pytest.raises(BadInput, match=sentence):
        convert(texts, **flags)
    assert not (tmp_path / "out").exists()


def test_labels_of_minus_one_are_stored_as_0_also_after_a_vertical_tab(convert):
    text = "-1 1:1\n\v-1 1:1\n+1 1:1\n-1.0 1:1\n"
    assert [row[0] for row in all_records(convert(text))] == [0, 0, 1, 0]


@pytest.mark.parametrize("feature_id", [2**31 - 1, 2**40, 2**63 - 1, 2**63])
@pytest.mark.parametrize("flags", [{}, {"field_size": 1}, {"field_size": 1, "pad": True}])
def test_an_id_that_no_table_can_have_is_refused_by_file_and_line(convert, feature_id, flags):
    convert("1 1:1\n1 2147483646:1\n", **flags)
    words = rf"a\.libsvm:2: feature id '?{feature_id}'? is not below (21474|2\^63).*"
    words += "the largest id is 2147483646; libsvm_to_tfrecord --hash_buckets=N hashes"
    with pytest.raises(BadInput, match=words):
        convert(f"1 1:1\n1 {feature_id}:1\n", overwrite=True, **flags)


def test_what_dataset_json_says_of_libsvm_text_stays(convert, tmp_path):
    convert("1 1:1 2:1\n0 3:1 4:1\n")
    size = os.path.getsize(tmp_path / "in" / "a.libsvm")
    described = datasets.DataFile("a.libsvm", size, 2, 1)
    dataset_json.write(str(tmp_path / "in"), 2, 30, [described], feature_map="0123456789abcdef")
    for flags, expected in (({}, (30, "0123456789abcdef")), ({"id_offset": 1}, (31, None))):
        convert({}, overwrite=True, **flags)
        found = datasets.find(str(tmp_path / "out"), "data")
        assert (found.feature_size, found.feature_map) == expected


@pytest.mark.parametrize(
    "flags, shares",
    [
        ({}, {"x": 0.5}),
        ({"input": "in/a.*"}, None),
        ({"split": "0.5,0.5,0"}, None),
        ({"max_bad_records": 1}, None),
    ],
)
def test_rates_of_the_input_stay_and_shares_of_unknown_cells_of_all_rows(
    convert, tmp_path, monkeypatch, flags, shares
):
    monkeypatch.chdir(tmp_path)
    texts = {name: "".join(lines(40, seed=i)) for i, name in enumerate(["a.libsvm", "b.libsvm"])}
    if "max_bad_records" in flags:
        texts["b.libsvm"] = "x" + texts["b.libsvm"]
    convert(texts, max_bad_records=1)
    files = [datasets.DataFile(name, len(text), 40, 20) for name, text in texts.items()]
    rates = datasets.SamplingRates(0.2, 1.0)
    dataset_json.write("in", 3, 1000, files, rates, unknown_shares={"x": 0.5})
    convert({}, overwrite=True, **flags)
    for folder in ("out/train", "out/valid") if "split" in flags else ("out",):
        said = dataset_json.load(folder)
        assert said["sampling_rates"] == pytest.approx(rates._asdict())
        assert said.get("unknown_shares") == shares


def test_records_of_other_hosts_are_not_mixed_in(tmp_path):
    """Each of several hosts converts all files that it sees."""
    (tmp_path / "a.libsvm").write_text("1 1:1\n")
    options = ConvertOptions(str(tmp_path / "a.libsvm"), str(tmp_path / "out"), overwrite=True)
    on = lambda i, n: libsvm_to_tfrecord.convert(options, Host(i, n, True))
    on(0, 2)
    for number, hosts in ((1, "one host"), (3, "3 hosts")):
        with pytest.raises(BadInput, match=f"shard-00000-of-00002: left by .* not on {hosts};"):
            on(0, number)
    on(1, 2)
    assert datasets.find(str(tmp_path / "out"), "data").rows == 2
    with pytest.raises(BadInput, match="shard-00000-of-00002: left by .* not on one host;"):
        rebalance.rebalance(rebalance.RebalanceOptions(options.input, options.output_dir))
    options = dataclasses.replace(options, output_dir=str(tmp_path / "one"))
    libsvm_to_tfrecord.convert(options)
    with pytest.raises(BadInput, match=r"one/a\.tfrecords: left by .* not on 2 hosts;"):
        libsvm_to_tfrecord.convert(options, Host(0, 2, True))


def test_overwrite_deletes_nothing_that_dataset_json_does_not_name(convert, tmp_path):
    convert("1 1:1\n")
    (tmp_path / "out" / "mine.tfrecords").write_bytes(b"mine")
    with pytest.raises(BadInput, match=r"out/mine\.tfrecords: dataset.json does not name this"):
        convert("1 1:1\n", overwrite=True)
    assert (tmp_path / "out" / "mine.tfrecords").read_bytes() == b"mine"
    (tmp_path / "out" / "mine.tfrecords").unlink()
    (tmp_path / "out" / "dataset.json").unlink()
    (file,) = convert("1 1:1\n0 1:1\n", overwrite=True)  # of the same name
    assert file.rows == 2


def test_an_input_without_rows_beside_others_adds_nothing(convert):
    text = "".join(lines(9))
    texts = {"a.libsvm": "", "b.libsvm": "# nothing\n", "c.libsvm": text}
    (file,) = convert(texts)
    assert file.rows == 9


def test_overwrite_keeps_the_old_data_set_where_the_run_fails(convert, tmp_path):
    (file,) = convert("1 1:1\n")
    with pytest.raises(BadInput):
        convert("1 x\n", overwrite=True)
    assert records_of(file.path) == rows_of("1 1:1")
    assert sorted(os.listdir(tmp_path / "out")) == ["a.tfrecords", "dataset.json"]


def test_a_real_file_of_varying_length_is_stored_as_it_is(tmp_path):
    path = shared_data("a9a/a9a.libsvm")
    files = libsvm_to_tfrecord.convert(ConvertOptions(path, str(tmp_path), num_files=3, pad=True))
    with open(path) as f:
        assert all_records(files) == rows_of(f.read(), field_size=14)


# Workers.


def count_to(n):
    if n < 0:
        raise BadInput("below zero")
    yield from range(n)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_pass_on_every_event_of_every_task_in_its_order(num_workers):
    tasks = [3, 0, 50, 1]
    events = list(processes.run(count_to, tasks, num_workers))
    for index, task in enumerate(tasks):
        assert [event for i, event in events if i == index] == list(range(task))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_pass_on_what_a_task_raises(num_workers):
    with pytest.raises(BadInput, match="below zero"):
        list(processes.run(count_to, [3, -1, 3], num_workers))


def killed(pipe, content):
    os.write(pipe.fileno(), content)
    os.kill(os.getpid(), signal.SIGKILL)


def sends_half(size):
    """A worker that is killed while it sends an event."""
    connection.Connection._send = lambda pipe, message: killed(pipe, message[: len(message) // 2])
    yield bytes(size)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_worker_that_is_killed_in_the_middle_of_a_message_is_named(size):
    with pytest.raises(ChildProcessError, match=r"worker process \d+ ended .* exit code -9 "):
        list(processes.run(sends_half, [size] * 2, 2))


def test_a_worker_that_is_killed_before_its_first_task_is_named(monkeypatch):
    monkeypatch.setattr(pool, "_serve", lambda work, pipe, parent: killed(pipe, b""))
    with pytest.raises(ChildProcessError, match=r"worker process \d+ ended .* exit code -9 "):
        list(processes.run(count_to, [bytes(1 << 20)] * 2, 2))


# Whole processes.

SMALL_PIECES = """
from data_tools import libsvm_to_tfrecord
from data_tools.common import command_line
from deepfm.records import dataset_json, text_blocks
text_blocks.TASK, text_blocks.BLOCK = 5000, 1000
command_line.run(libsvm_to_tfrecord.main, libsvm_to_tfrecord.ConvertOptions)
"""


def start(*flags, **popen):
    return started([sys.executable, "-c", SMALL_PIECES, *flags], **popen)


@contextlib.contextmanager
def long_run(tmp_path):
    """A run with two workers that lasts for minutes and has begun to write; and its workers."""
    with open(tmp_path / "a.libsvm", "w") as f:
        f.writelines(["".join(lines(10000, field_size=8))] * 30)
    flags = f"--input={tmp_path}/a.libsvm", f"--output_dir={tmp_path}/out", "--num_workers=2"
    with start(*flags) as process:
        await_files(process, f"{tmp_path}/out/.*/piece-*")
        # The first may write before the second is there.
        wait_until(lambda: len(psutil.Process(process.pid).children()) >= 2, TIMEOUT)
        assert process.poll() is None
        yield process, psutil.Process(process.pid).children(recursive=True)


def test_a_folder_into_which_another_run_writes_is_refused(tmp_path):
    (tmp_path / "a.libsvm").write_text("1 1:1\n")
    flags = f"--input={tmp_path}/a.libsvm", f"--output_dir={tmp_path}/out"
    with publishing.scratch(f"{tmp_path}/out", ".libsvm_to_tfrecord-") as scratch:
        done = run_tool("libsvm_to_tfrecord", *flags, code=2)
        sentence = f"--output_dir={tmp_path}/out: another run is writing there; wait for it"
        assert sentence in done.stderr.splitlines()[-1]
        assert os.listdir(f"{tmp_path}/out") == [os.path.basename(scratch)]
    assert run_tool("libsvm_to_tfrecord", *flags).returncode == 0


@pytest.mark.parametrize("old", [[], ["a.tfrecords", "dataset.json"]])
def test_what_another_run_has_written_meanwhile_is_not_replaced(tmp_path, old):
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    for folder, text in ((out, "theirs"), (scratch, "mine")):
        folder.mkdir()
        for name in ("b.tfrecords", "dataset.json"):
            (folder / name).write_text(text)
    with pytest.raises(BadInput, match="another run has written to this folder meanwhile"):
        mine = {path.name: str(path) for path in scratch.iterdir()}
        publishing.publish(str(scratch), [(str(out), mine, old)])
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "b.tfrecords": "theirs", "dataset.json": "theirs",
    }  # fmt: skip


def test_two_workers_write_the_same_files_as_one(tmp_path):
    (tmp_path / "a.libsvm").write_text("".join(lines(3000)))
    (tmp_path / "b.libsvm.gz").write_bytes(gzip.compress("".join(lines(500)).encode()))
    for n in (1, 2):
        flags = f"--output_dir={tmp_path}/out{n}", f"--num_workers={n}", "--num_files=3"
        finish(start(f"--input={tmp_path}/a.libsvm,{tmp_path}/b.libsvm.gz", *flags), code=0)
    for name in sorted(os.listdir(tmp_path / "out1")):
        one, two = ((tmp_path / f"out{n}" / name).read_bytes() for n in (1, 2))
        assert one == two


@pytest.mark.parametrize(
    "number,expected", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_no_file_and_no_process(tmp_path, number, expected):
    with long_run(tmp_path) as (process, workers):
        process.send_signal(number)
        text, _ = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, "Traceback" in text) == (expected, False), text
        assert not (tmp_path / "out").exists()
        assert {x.status() for x in workers if x.is_running()} <= {psutil.STATUS_ZOMBIE}


SIGNALLED = """
import multiprocessing.popen_fork, os, signal, threading, time
from data_tools.engines import pool
from deepfm.runtime import program

class Popen(multiprocessing.popen_fork.Popen):
    def _launch(self, process):
        super()._launch(process)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

multiprocessing.context.ForkProcess._Popen = staticmethod(Popen)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
program.run(lambda: list(pool.run(lambda task: time.sleep(600), [1, 2], 2)), tensorflow=False)
"""


def test_another_thread_may_run_a_pool():
    with futures.ThreadPoolExecutor() as threads:
        found = threads.submit(lambda: sorted(pool.run(lambda task: [task], [7, 8], 2))).result()
    assert found == [(0, 7), (1, 8)]


def test_a_signal_while_workers_start_leaves_none_though_a_thread_may_take_it():
    with started([sys.executable, "-c", SIGNALLED]) as process:
        text, _ = process.communicate(timeout=TIMEOUT)
        pids = [int(line) for line in text.splitlines() if line.isdigit()]
        assert process.returncode == 143 and len(pids) == 2, text
        assert not any(map(psutil.pid_exists, pids))


def test_a_worker_that_is_killed_ends_the_run_with_1(tmp_path):
    with long_run(tmp_path) as (process, workers):
        workers[0].kill()
        text, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert "ended unexpectedly" in text.splitlines()[-1]
        assert not (tmp_path / "out").exists()


def test_no_worker_outlives_a_killed_parent(tmp_path):
    with long_run(tmp_path) as (process, workers):
        assert len(workers) >= 2
        process.kill()
        assert not psutil.wait_procs(workers, TIMEOUT)[1]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_file_that_cannot_grow_ends_the_run_with_1(tmp_path, num_workers):
    (tmp_path / "a.libsvm").write_text("".join(lines(3000)))
    limit = 20000  # bytes of a file, as if the disk were full
    done = finish(start(
        f"--input={tmp_path}/a.libsvm", f"--output_dir={tmp_path}/out",
        f"--num_workers={num_workers}",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    ), code=1)  # fmt: skip
    assert "Traceback" not in done.stdout
    assert "too large" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_hosts_together_convert_each_row_once(tmp_path):
    (tmp_path / "in").mkdir()
    written = lines(120)
    for i in range(3):
        (tmp_path / "in" / f"{i}.libsvm").write_text("".join(written[i * 40 : i * 40 + 40]))
    out = tmp_path / "out"
    for i in range(3):
        options = ConvertOptions(f"{tmp_path}/in/{i}.libsvm", f"{out}", 2, feature_size=1000)
        libsvm_to_tfrecord.convert(options, Host(i, 3, True))
    found = datasets.find(str(out), "data")
    assert (len(found.files), found.rows, found.feature_size) == (6, 120, 1000)
    rows = [row for file in found.files for row in records_of(file.path)]
    assert sorted(rows) == sorted(rows_of("".join(written)))


def test_padding_on_several_hosts_needs_a_field_size(tmp_path):
    (tmp_path / "a.libsvm").write_text("".join(lines(5)))
    options = ConvertOptions(str(tmp_path / "a.libsvm"), str(tmp_path / "out"), pad=True)
    with pytest.raises(BadInput, match="--field_size must be given on 2 hosts"):
        libsvm_to_tfrecord.convert(options, Host(0, 2, True))
