"""data_file.py: files of another kind, records that are there twice, and records in two roles."""

import bz2
import contextlib
import gzip
import io
import logging
import lzma
import tarfile
import tempfile
import zipfile
import zlib

import pytest
from conftest import (
    example,
    make_records,
    run_tool,
    run_train,
    write_libsvm,
    write_payloads,
    write_tfrecords,
)

from data_tools.click_logs import options as prepare
from data_tools.click_logs.slices import RawInput
from data_tools.click_logs.splitting import Split
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.runtime.tf import tf

LINES = b"".join(b"%d 1:%d 2:.5\n" % (i % 2, i) for i in range(1000))


def archive(pack, name):
    """The bytes of a tar (mode w or w:gz) or zip archive of a file of lines."""
    out = io.BytesIO()
    if pack == "zip":
        with zipfile.ZipFile(out, "w") as f:
            f.writestr(name, LINES)
    else:
        with tarfile.open(fileobj=out, mode=pack) as f:
            about = tarfile.TarInfo(name)
            about.size = len(LINES)
            f.addfile(about, io.BytesIO(LINES))
    return out.getvalue()


def zlib_records():
    """A TFRecord file that TensorFlow compressed as ZLIB."""
    with tempfile.NamedTemporaryFile() as f:
        with tf.io.TFRecordWriter(f.name, "ZLIB") as writer:
            writer.write(example(1, [1], [1]))
        return f.read()


KINDS = [
    (
        "a.libsvm.xz",
        lambda: lzma.compress(LINES),
        "an xz file; unpack it, or compress it with gzip",
    ),
    ("a.libsvm", lambda: bz2.compress(LINES), "a bzip2 file; unpack it"),
    ("a.tar", lambda: archive("w", "x"), "a tar archive; extract its files"),
    ("a.svm.tar.gz", lambda: archive("w:gz", "x"), "a tar archive in gzip; extract its files"),
    ("a.tgz", lambda: archive("w:gz", "x"), "a tar archive in gzip; extract its files"),
    ("a.svm", lambda: archive("zip", "x"), "a zip archive; extract its files"),
    ("a.tfrecords", zlib_records, "a ZLIB file; unpack it"),
    ("a.libsvm", lambda: zlib.compress(LINES), "a ZLIB file; unpack it"),
]
TABLES = [
    ("part-0", lambda: b"PAR1\x15\x04" + bytes(99), "a Parquet table"),
    ("a.csv", lambda: b"label,x,y\n1,2,3\n", "a CSV table"),
    ("a.txt", lambda: b"1\t5\t\tab12cd34\n", "a CSV table"),
    ("a.libsvm", lambda: b"# label,x\n1,2\n", "a CSV table"),
    ("a.gz", lambda: gzip.compress(b"0,5,x\n"), "a CSV table in gzip"),
]
TOOL = "; of CSV and Parquet, 'python -m data_tools.prepare'"


@pytest.mark.parametrize(
    "name, content, said, tables",
    [(*x, False) for x in KINDS] + [(*x, said + TOOL, True) for *x, said in TABLES],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path, name, content, said, tables):
    path = tmp_path / name
    path.write_bytes(content())
    with pytest.raises(BadInput) as error:
        datasets.find(str(path), "data")
    assert str(error.value).startswith(f"{path}: by its first bytes {said}")
    # Tools that read tables take these, and refuse the other kinds too.
    refused = pytest.raises(BadInput, match="by its first bytes")
    with contextlib.nullcontext() if tables else refused:
        assert datasets.find(str(tmp_path), "input", tables=True).files


@pytest.mark.parametrize("size", [0x178, 0x9C78, 0xDA78])  # their length begins as ZLIB does
def test_records_whose_length_looks_like_zlib_are_records(tmp_path, size):
    write_payloads(tmp_path / "part-0", [b"x" * size])
    assert datasets.find(str(tmp_path), "data").data_format == "tfrecord"


@pytest.mark.parametrize(
    "line",
    [b"1\t3:1\t4:1\n", b"1,2:3\n", b"1\n", b"1\t\n", b"1 0:a,b:2\n", b"# x, y\n\n1 1:1 2:1\n"],
)
def test_odd_lines_are_not_taken_for_a_table(tmp_path, line):
    (tmp_path / "a.txt").write_bytes(line)
    assert datasets.find(str(tmp_path), "data").data_format == "libsvm"


def test_train_py_names_the_tool_that_reads_a_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"0,5,x\n" * 9)
    result = run_train(f"--training_data_dir={tmp_path}", f"--model_dir={tmp_path}/m", code=2)
    assert "data_tools.prepare" in result.stderr.splitlines()[-1]


def warnings(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]


@pytest.fixture
def pair(tmp_path):
    """The paths of two TFRecord files of one size with different records."""
    paths = [tmp_path / f"{name}.tfrecords" for name in "ab"]
    labels, ids, values = make_records(200)
    for path, label in zip(paths, (0, 1)):
        write_tfrecords(path, ([0] * 199 + [label], ids, values))
    return paths


def test_files_of_one_size_that_differ_at_the_end_are_not_copies(pair, caplog):
    datasets.find(str(pair[0].parent), "data")
    assert pair[0].stat().st_size == pair[1].stat().st_size
    assert warnings(caplog) == []


@pytest.mark.parametrize("packed", [(), ("x",), ("x", "y")])
def test_records_that_are_there_twice_are_said(pair, caplog, packed):
    pair[1].unlink()
    folder, content = pair[0].parent, pair[0].read_bytes()
    pair[0].unlink()
    for name in "xy":
        suffix, write = (".gz", gzip.compress) if name in packed else ("", bytes)
        (folder / f"{name}.tfrecords{suffix}").write_bytes(write(content))
    datasets.find(str(folder), "data")
    (line,) = warnings(caplog)
    assert f"{folder}/y.tfrecords" in line and f"is a copy of {folder}/x.tfrecords" in line


def test_parts_of_several_splits_in_one_set_are_said(tmp_path, caplog):
    run_tool("make_synthetic", f"--output_dir={tmp_path}/raw", "--train_rows=9",
                    "--val_rows=8", "--test_rows=7", code=0)  # fmt: skip
    for spec in (f"{tmp_path}/raw", f"{tmp_path}", f"{tmp_path}/raw/*.libsvm"):
        caplog.clear()
        datasets.find(spec, "data")
        (line,) = warnings(caplog)
        assert "several splits" in line and line.endswith("/raw/train.libsvm.")
    caplog.clear()
    for spec in (f"{tmp_path}/raw/train.libsvm", f"{tmp_path}/raw/train*",
                 f"{tmp_path}/raw/train.libsvm,{tmp_path}/raw/val.libsvm"):  # fmt: skip
        datasets.find(spec, "data")
    assert warnings(caplog) == []


@pytest.mark.parametrize("names", ["testimony.svm trainer.svm", "best-train.svm my_test.svm"])
def test_names_that_are_no_splits_are_not_said(tmp_path, caplog, names):
    for i, name in enumerate(names.split()):
        (tmp_path / name).write_bytes(b"1 1:%d\n" % i)
    datasets.find(str(tmp_path), "data")
    assert warnings(caplog) == []


@pytest.mark.parametrize("where", ["folder/val.libsvm", "val.libsvm", "folder"])
def test_validation_on_records_that_are_trained_on_is_said(tmp_path, where):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_libsvm(folder / "a.libsvm", make_records(50, seed=1))
    write_libsvm(folder / "val.libsvm", make_records(50))
    write_libsvm(tmp_path / "val.libsvm", make_records(50))
    flags = f"--model_dir={tmp_path}/m", f"--val_data_dir={tmp_path}/{where}", "--feature_size=50"
    said = "holds records that the model is trained on"
    training = f"--training_data_dir={folder}", "--batch_size=50"
    for more in (training, ["--task_type=eval"])[: 1 + (where == "folder")]:
        result = run_train(*more, *flags, code=0)
        assert result.stderr.count(said) == 1, result.stderr


def test_validation_on_other_records_of_the_same_size_is_not_said(tmp_path):
    for i, name in enumerate(("a", "val")):
        lines = [f"{row % 2} 1:1 2:{2 + (row + i) % 2}\n" for row in range(50)]
        (tmp_path / f"{name}.libsvm").write_text("".join(lines))
    flags = f"--model_dir={tmp_path}/m", f"--val_data_dir={tmp_path}/val.libsvm"
    result = run_train(f"--training_data_dir={tmp_path}/a.libsvm", "--feature_size=5", *flags)
    assert result.returncode == 0 and "trained on (" not in result.stderr, result.stderr


def test_prepare_refuses_rows_in_two_roles_on_both_engines(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"1\t5\t\tab12cd34\n" * 9)
    whole = Split((1.0, 0.0, 0.0))
    for other in "ab":
        sources = [
            RawInput("input", f"{tmp_path}/a.txt", whole),
            RawInput("valid_input", f"{tmp_path}/{other}.txt", whole),
        ]
        with pytest.raises(
            BadInput, match=f"a.txt of --input holds the same rows as .*{other}.txt"
        ):
            prepare.find(sources)  # both engines call it
