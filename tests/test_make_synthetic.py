"""make_synthetic: the files that it writes, and the best possible scores against scikit-learn's."""

import itertools
import json
import os

import numpy as np
import pytest
from conftest import run_python, run_tool
from sklearn import metrics

from data_tools import make_synthetic
from data_tools.common import days_of_rows, planted_model
from data_tools.common.planted_model import LEVELS, SPLITS, Shape
from deepfm.errors import BadInput

SHAPE = Shape(field_size=9, numeric_fields=3, feature_size=500)
SEED = 7
# Two whole blocks and a part of one.
ROWS = 2 * planted_model.BLOCK_ROWS + 1000


def write(directory, shape=SHAPE, overwrite=False, **rows):
    """Writes a data set and returns its directory."""
    sizes = {f"{split}_rows": rows.get(split, 0) for split in SPLITS}
    options = make_synthetic.SyntheticOptions(
        str(directory), seed=SEED, overwrite=overwrite, **shape._asdict(), **sizes
    )
    make_synthetic.write_data(options)
    return directory


def read_all(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def read_splits(directory):
    return json.loads((directory / "synthetic.json").read_text())["splits"]


def read_libsvm(path):
    """The slow, obvious parser: label bool [B], ids int64 [B, F], values float32 [B, F]."""
    labels, ids, values = [], [], []
    for line in path.read_text().splitlines():
        label, *pairs = line.split(" ")
        labels.append(label == "1")
        ids.append([int(pair.split(":")[0]) for pair in pairs])
        values.append([float(pair.split(":")[1]) for pair in pairs])
    return np.array(labels), np.array(ids), np.array(values, np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The directory of a data set that several tests read."""
    return write(tmp_path_factory.mktemp("data"), train=ROWS, val=0, test=300)


def test_the_same_seed_writes_the_same_bytes(data, tmp_path):
    assert read_all(write(tmp_path, train=ROWS, val=0, test=300)) == read_all(data)


def test_a_longer_split_begins_with_the_rows_of_a_shorter_one(data, tmp_path):
    short = read_all(write(tmp_path, train=ROWS - 2000))
    assert read_all(data)["train.libsvm"].startswith(short["train.libsvm"])


def test_the_file_holds_the_rows_that_were_drawn(data):
    labels, ids, values = read_libsvm(data / "train.libsvm")
    model = planted_model.make_planted_model(SEED, SHAPE)
    blocks = [planted_model.draw_block(model, SEED, "train", n) for n in range(3)]
    drawn_ids, drawn_values, _, drawn_labels = (np.concatenate(c)[:ROWS] for c in zip(*blocks))
    np.testing.assert_array_equal(labels, drawn_labels)
    np.testing.assert_array_equal(ids, drawn_ids)
    np.testing.assert_array_equal(values, drawn_values)


def test_best_scores_equal_scikit_learns_on_the_rows_in_the_file(data):
    labels, ids, values = read_libsvm(data / "train.libsvm")
    model = planted_model.make_planted_model(SEED, SHAPE)
    probability = planted_model.true_probability(model, ids, values)
    best = read_splits(data)["train"]
    assert best["positives"] == labels.sum()
    assert best["mean_probability"] == pytest.approx(probability.mean(), abs=1e-9)
    assert best["best_auc"] == pytest.approx(metrics.roc_auc_score(labels, probability), abs=1e-9)
    assert best["best_log_loss"] == pytest.approx(metrics.log_loss(labels, probability), abs=1e-9)


def test_one_class_has_no_auc():
    counts = np.zeros((2, LEVELS), np.int64)
    make_synthetic.count_labels(counts, np.array([0.25, 0.75]), np.array([True, True]))
    assert make_synthetic.best_possible(counts)["best_auc"] is None


def test_all_fields_may_be_categorical(tmp_path):
    write(tmp_path, shape=Shape(field_size=2, numeric_fields=0, feature_size=50), val=50)
    _, ids, values = read_libsvm(tmp_path / "val.libsvm")
    assert ids.shape == (50, 2)
    assert np.all(values == 1)


def test_existing_output_is_refused_unless_overwrite(tmp_path):
    write(tmp_path, train=50, val=20)
    (tmp_path / "mine.libsvm").write_text("")
    with pytest.raises(BadInput, match="holds train.libsvm; --overwrite replaces"):
        write(tmp_path, train=50)
    # A file of an earlier version, which would double the data.
    os.rename(tmp_path / "train.libsvm", tmp_path / "train-00000-of-00001.libsvm")
    write(tmp_path, train=50, overwrite=True)
    (tmp_path / "mine.libsvm").unlink()
    assert set(read_all(tmp_path)) == {"synthetic.json", "train.libsvm"}


def test_rows_of_hosts_of_an_earlier_version_are_not_mixed_in(tmp_path):
    (tmp_path / "shard-00000-of-00002").mkdir()
    with pytest.raises(BadInput, match="shard-00000-of-00002: left by .* not on one host;"):
        write(tmp_path, train=60)


def test_a_failure_leaves_the_earlier_files_and_no_temporary_ones(tmp_path, monkeypatch):
    before = read_all(write(tmp_path, train=100))

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(make_synthetic, "best_possible", fail)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, train=200, overwrite=True)
    assert read_all(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(train=5, shape=SHAPE._replace(field_size=3)), "try --field_size=4"),
        (dict(train=5, shape=SHAPE._replace(feature_size=15)), "try --feature_size=16"),
        (dict(train=0, val=0), "try --train_rows"),
    ],
)
def test_impossible_arguments_are_refused_with_what_works_before_anything_is_made(
    arguments, said, tmp_path
):
    with pytest.raises(BadInput, match=said):
        write(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def run(*arguments):
    """Runs the program; (exit code, its lines on standard error)."""
    done = run_tool("make_synthetic", *arguments)
    return done.returncode, done.stderr.splitlines()


def test_the_program_writes_what_its_flags_say(tmp_path):
    code, lines = run(f"--output_dir={tmp_path}", "--train_rows=60", "--val_rows=0", "--rare")
    assert code == 0, lines
    assert "rows/s" in lines[-1]
    summary = json.loads((tmp_path / "synthetic.json").read_text())
    assert summary["rare"]
    assert summary["splits"]["train"]["rows"] == 60
    assert sorted(os.listdir(tmp_path)) == ["synthetic.json", "test.libsvm", "train.libsvm"]


@pytest.mark.parametrize(
    "flag, said",
    [("--positive_rate=1.5", "positive_rate"), ("--zipf=nan", "zipf=nan: it is not a finite"),
     ("--zipf=1", "--zipf=1 cannot be drawn from; try --zipf=1.01."), ("--drift=2", "--drift")],
)  # fmt: skip
def test_a_bad_flag_exits_2_with_one_sentence(tmp_path, flag, said):
    code, lines = run(f"--output_dir={tmp_path}", flag)
    assert code == 2
    assert len(lines) == 1
    assert said in lines[0]


def days_of(folder, *more, days=3, rows=3000):
    flags = f"--days={days}", f"--train_rows={rows}", "--feature_size=2000", *more
    run_python("-m", "data_tools.make_synthetic", f"--output_dir={folder}", *flags, code=0)
    splits = json.loads((folder / "synthetic.json").read_text())["splits"]
    lines = [(folder / f"{day}.csv").read_text().splitlines()[1:] for day in splits]
    return list(splits.values()), [np.array([x.split(",") for x in table]) for table in lines]


def test_days_are_tables_that_prepare_reads_and_begin_like_longer_ones(tmp_path):
    _, before = days_of(tmp_path / "a", days=2)
    splits, tables = days_of(tmp_path / "b", "--drift=0.5")
    more, _ = days_of(tmp_path / "c", rows=1000)
    read = lambda folder, day: (tmp_path / folder / f"day-00{day}.csv").read_bytes()
    assert read("a", 1).startswith(read("c", 1)) and read("a", 2).startswith(read("c", 2))
    assert read("a", 1) == read("b", 1) and read("a", 2) != read("b", 2)  # by labels alone
    np.testing.assert_array_equal(before[1][:, 1:], tables[1][:, 1:])
    assert len(more) == 3 and [x["rows"] for x in splits] == [3000] * 3
    columns = f"--columns={tmp_path}/b/columns.json"
    out = f"--output_dir={tmp_path}/out"
    run_python(
        "-m", "data_tools.prepare", f"--input={tmp_path}/b/day-002.csv", columns, out, code=0
    )
    described = json.loads((tmp_path / "out" / "train" / "dataset.json").read_text())
    assert described["field_size"] == 39


def test_each_day_has_its_share_of_new_categories_and_its_best_auc(tmp_path):
    splits, tables = days_of(tmp_path, "--new_ids_per_day=0.3", days=4)
    seen, shares = set(tables[0][:, 14:].ravel()), []
    assert splits[0]["new"] == 2000 - 1 - 13
    for split, table in zip(splits[1:], tables[1:]):
        cells = table[:, 14:].ravel()
        shares.append(np.mean([cell not in seen for cell in cells]))
        seen.update(cells)
        assert 0.25 < split["new"] / (2000 - 14) < 0.35
        assert 0.7 < split["best_auc"] < 0.9
        assert split["positives"] == (table[:, 0] == "1").sum()
    assert 0.1 < np.mean(shares) < 0.45


def test_weights_keep_their_variance_and_those_of_a_day_are_those_of_its_best_auc():
    days = days_of_rows.each_day(3, planted_model.Shape(feature_size=5000), 0.0, 0.6)
    first, *_, last = itertools.islice(days, 12)
    assert last.new == 0 and list(last.texts) == list(first.texts)
    parts = [day.model.table[14:] / day.model.spread[14:] for day in (first, last)]
    assert parts[1].std() == pytest.approx(1, abs=0.05)
    assert np.corrcoef(*map(np.ravel, parts))[0, 1] == pytest.approx(0.8**11, abs=0.03)
    model, counts = last.model, np.zeros((2, planted_model.LEVELS), np.int64)
    ids, values, probability, label = planted_model.draw_block(model, 3, "train", 0, day=12)
    np.testing.assert_allclose(probability, planted_model.true_probability(model, ids, values))
    make_synthetic.count_labels(counts, probability, label)
    found = make_synthetic.best_possible(counts)["best_auc"]
    assert found == pytest.approx(metrics.roc_auc_score(label, probability), abs=1e-9)
