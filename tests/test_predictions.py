"""Predictions that can be joined: keys or places beside them, and a line for each bad record."""

import csv
import functools
import gzip
import json
import re

import numpy as np
import pytest
from conftest import (
    example,
    make_records,
    report,
    run_horovod,
    run_python,
    run_train,
    small_training,
    write_tfrecords,
)
from mode_steps import check_same
from pyarrow import parquet

from deepfm.records import tfrecord, wire
from deepfm.runtime.tf import tf

SIZES = (300, 200, 1)  # of the files
# As csv quotes them or not; and one that is not UTF-8, which is written "\xff".
KEYS = [b"plain", b"a,b", b'"', b"two\nlines", b"\r", "é".encode(), b"\xff", b"", b"last"]
KEYS_OF = [[*KEYS, *(b"0-%d" % i for i in range(291))], [b"1-%d" % i for i in range(200)], [b"2"]]
two_ranks = functools.partial(run_horovod, 2)


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    """The model_dir of a small model."""
    folder = tmp_path_factory.mktemp("predictions")
    run_train(*small_training(data, folder / "model"), code=0)
    return folder / "model"


def keyed(key, *record):
    """The Example of a record with a key."""
    message = tf.train.Example.FromString(example(*record))
    if key:
        message.features.feature["key"].bytes_list.value.append(key)
    return message.SerializeToString()


def write(folder, kind, bad=None):
    """Files of SIZES records, some of them bad, {file: {row: what makes it so}}; without these, if
    `bad` says "left out". Returns the paths."""
    folder.mkdir()
    for file, rows in enumerate(SIZES):
        records = list(zip(*make_records(rows, seed=file)))
        if kind == "libsvm":
            pairs = lambda ids, values: " ".join(map("%d:%.9g".__mod__, zip(ids, values)))
            lines = [b"%d %s\n" % (y, pairs(*x).encode()) for y, *x in records]
        else:
            lines = [tfrecord.framed(keyed(*x)) for x in zip(KEYS_OF[file], *zip(*records))]
        for row, spoil in sorted(bad[file].items() if bad else (), reverse=True):
            lines[row : row + 1] = [spoil(lines[row])] if spoil else []
        if kind == "libsvm":
            lines[1:1] = [b"\n", b" # none\n"]
        pack = gzip.compress if kind == "gzip" and file != 1 else bytes
        name = {"libsvm": f"{file}.libsvm", "tfrecord": f"{file}.tfrecords"}.get(kind)
        name = name or f"{file}.tfrecords" + ".gz" * (file != 1)
        (folder / name).write_bytes(pack(b"".join(lines)))
    return sorted(map(str, folder.iterdir()))


def infer(model, data, path, form="plain", *more, run=run_train):
    """The lines of the predictions of a folder, as tuples of texts."""
    run(*flags(model, data, path, form), *more, code=0)
    if form == "parquet":
        parts = [parquet.read_table(str(part)) for part in sorted(path.iterdir())]
        assert len(parts) == (2 if run is two_ranks else 1)
        rows = [parts[0].column_names]
        rows += zip(*(sum((part[name].to_pylist() for part in parts), []) for name in rows[0]))
        return [tuple(map(str, row)) for row in rows]
    with open(path, newline="", encoding="utf-8") as f:
        return [tuple(row) for row in csv.reader(f)]


def flags(model, data, path, form):
    return (
        "--task_type=infer", f"--infer_data_dir={data}", f"--model_dir={model}",
        f"--predictions_file={path}", f"--predictions_format={form}",
    )  # fmt: skip


def flip(frame):
    return frame[:-5] + bytes([frame[-5] ^ 1]) + frame[-4:]


def replaced(frame):
    """A whole frame whose record is bad, though it has its key."""
    key = wire.key(frame[12:-4])
    return tfrecord.framed(keyed(key, 1, [1, 2, 3, 4], [1, 1, 1, np.nan]))


cut = lambda frame: frame[:-9]
line = lambda _: b"1 1:1 2:x 3:1 4:1\n"
BAD = {  # the first, the last, those where two ranks part, and all of a file
    "tfrecord": {
        0: dict.fromkeys((0, 150, 247, 248, 249, 299), flip), 1: {7: replaced, 199: cut},
        2: {0: flip},
    },
    "gzip": {0: dict.fromkeys((0, 150), replaced), 1: {0: flip, 199: flip}, 2: {0: replaced}},
    "libsvm": {0: dict.fromkeys((0, 150, 299), line), 1: {7: line, 8: line}, 2: {0: line}},
}  # fmt: skip


@pytest.fixture(scope="module")
def predicted(model, tmp_path_factory):
    """A function of a kind of files: (the folder of the folders `bad`, with bad records, and
    `whole`, without; what plain inference says of the good records of the former, else NaN)."""

    @functools.lru_cache(maxsize=None)
    def of(kind):
        folder, bad = tmp_path_factory.mktemp(kind), BAD[kind]
        write(folder / "whole", kind)
        write(folder / "bad", kind, bad)
        write(folder / "good", kind, {file: dict.fromkeys(rows) for file, rows in bad.items()})
        found, offsets = np.full(sum(SIZES), np.nan), np.cumsum([0, *SIZES])
        left = np.delete(np.arange(sum(SIZES)), [offsets[x] + i for x in bad for i in bad[x]])
        found[left] = [float(prob) for (prob,) in infer(model, folder / "good", folder / "prob")]
        return folder, found

    return of


def names_of(folder, kind, bad):
    """(the columns of names, the names of each record of files that `write` wrote)."""
    if kind == "libsvm":
        paths = zip(sorted(map(str, folder.iterdir())), SIZES)
        return ("file", "row"), [(path, str(row)) for path, n in paths for row in range(n)]
    unreadable = lambda file, row: bad[file].get(row) in (flip, cut)
    keys = [
        ("" if bad and unreadable(file, row) else key.decode("utf-8", "backslashreplace"),)
        for file, keys in enumerate(KEYS_OF)
        for row, key in enumerate(keys)
    ]
    return ("key",), keys


RUNS = [
    (kind, form, run)
    for kind in BAD
    for form in ("plain", "csv", "parquet")
    for run in (run_train, two_ranks)
]
QUICK = [
    ("tfrecord", "csv", two_ranks), ("gzip", "plain", run_train), ("gzip", "parquet", two_ranks),
    ("libsvm", "plain", two_ranks), ("libsvm", "csv", run_train),
]  # fmt: skip
RUNS = [pytest.param(*x, marks=[] if x in QUICK else [pytest.mark.table]) for x in RUNS]


@pytest.mark.parametrize("kind, form, run", RUNS)
def test_each_line_names_its_record_and_that_of_a_bad_one_says_nan(
    model, predicted, tmp_path, kind, form, run
):
    folder, expected = predicted(kind)
    count = sum(map(len, BAD[kind].values()))
    for name, bad in (("whole", None), ("bad", BAD[kind])):
        most = [f"--max_bad_records={count}"] if bad else []
        lines = infer(model, folder / name, tmp_path / "out", form, *most, run=run)
        columns, names = names_of(folder / name, kind, bad)
        if form == "plain":
            lines, columns, names = [("probability",), *lines], (), [()] * sum(SIZES)
        assert lines[0] == (*columns, "probability")
        assert [line[:-1] for line in lines[1:]] == names
        probs = np.array([float(line[-1]) for line in lines[1:]])
        if not bad:
            assert np.isfinite(probs).all()
            probs = np.where(np.isnan(expected), expected, probs)
        np.testing.assert_allclose(probs, expected, atol=1e-6)
        assert report(model, "infer").get("skipped_records") == (count if bad else None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["tfrecord", "libsvm"])
def test_more_bad_records_than_allowed_end_inference(model, predicted, tmp_path, kind):
    count = sum(map(len, BAD[kind].values()))
    words = flags(model, predicted(kind)[0] / "bad", tmp_path / "out", "csv")
    done = run_train(*words, f"--max_bad_records={count - 1}", code=2)
    said = f"this is more than --max_bad_records={count - 1} bad records."
    assert done.stderr.splitlines()[-1].endswith(said)
    assert done.stderr.count("Skipped: ") == count - 1
    done = run_train(*words, code=2)
    assert re.search(r"0\.(tfrecords|libsvm).*(record 0|:1:)", done.stderr.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_predictions_is_replaced_and_another_is_not(model, predicted, tmp_path):
    data = predicted("tfrecord")[0] / "whole"
    (tmp_path / "out").mkdir()
    for rank in range(2):
        (tmp_path / "out" / f"part-0000{rank}.parquet").write_text("of two ranks")
    infer(model, data, tmp_path / "out", "parquet")
    (tmp_path / "out" / "mine").write_text("")
    (tmp_path / "file").write_text("0.5\n")
    for name, said in (
        ("out", "holds something other than predictions"),
        ("file", "is a file; give the name of a folder"),
    ):
        words = flags(model, data, tmp_path / name, "parquet")
        done = run_train(*words, code=2)
        assert f"--predictions_file={tmp_path}/{name} {said}" in done.stderr.splitlines()[-1]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_one_process_leaves_what_lies_beside_its_predictions(model, predicted, tmp_path):
    other = tmp_path / ".out.part-0"  # as a part of several processes would be called
    other.write_text("mine")
    run_train(*flags(model, predicted("libsvm")[0] / "whole", tmp_path / "out", "csv"), code=0)
    assert other.read_text() == "mine"


def test_by_default_predictions_lie_in_model_dir(model, predicted):
    for form in ("csv", "parquet", "parquet"):  # the last takes the place of the one before
        run_train(*flags(model, predicted("libsvm")[0] / "whole", "", form), code=0)
        assert report(model, "infer")["predictions_file"] == str(model / f"predictions.{form}")
        assert (model / f"predictions.{form}").exists()
    assert not [path.name for path in model.iterdir() if path.name.startswith(".pred")]


def test_parquet_needs_pyarrow(model, predicted, tmp_path):
    code = "import runpy, sys; sys.modules['pyarrow'], sys.argv[0] = None, 'train.py'; "
    code += "runpy.run_path('train.py', run_name='__main__')"
    words = flags(model, predicted("libsvm")[0] / "whole", tmp_path / "out", "parquet")
    done = run_python("-c", code, *words, code=2)
    last = done.stderr.splitlines()[-1]
    assert "give --predictions_format=csv, or run '" in last
    assert last.endswith("-m pip install pyarrow==12.0.1'.")


@pytest.mark.parametrize("rows, form", [(639, "csv"), (641, "parquet")])
def test_a_dataset_json_with_other_numbers_of_records_is_refused(model, tmp_path, rows, form):
    path = tmp_path / "data" / "a.tfrecords"
    path.parent.mkdir()
    write_tfrecords(path, make_records(640))
    about = {"rows": rows, "bytes": path.stat().st_size, "positives": 1}
    said = {"format_version": 1, "field_size": 4, "feature_size": 50, "files": {path.name: about}}
    (path.parent / "dataset.json").write_text(json.dumps(said))
    done = run_train(*flags(model, path, tmp_path / "out", form), code=2)
    assert "has other records than dataset.json says" in done.stderr.splitlines()[-1]
    assert [x.name for x in tmp_path.iterdir()] == ["data"]


def test_training_passes_over_keys(tmp_path):
    records = make_records(640)
    for name, keys in (("without", [b""] * 640), ("with", [b"key %d" % i for i in range(640)])):
        frames = map(tfrecord.framed, map(keyed, keys, *records))
        (tmp_path / f"{name}.tfrecords").write_bytes(b"".join(frames))
        run_train(*small_training(tmp_path / f"{name}.tfrecords", tmp_path / name), code=0)
    check_same(tmp_path / "without", tmp_path / "with", atol=0, rtol=0)
    losses = [report(tmp_path / name)["train"]["loss"] for name in ("without", "with")]
    assert losses[0] == losses[1]
