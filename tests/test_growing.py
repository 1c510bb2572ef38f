"""A model whose categories grow from day to day: its rows move by name, and lose nothing."""

import collections
import itertools
import json
import os
import pathlib
import random
import re
import shutil

import numpy as np
import pytest
import s3_server
import test_kinds
from conftest import (
    evaluations,
    example,
    examples_of,
    job_of,
    report,
    run_cluster,
    run_mode,
    run_train,
    write_payloads,
)
from mode_steps import make_mode, weights

from data_tools import prepare
from data_tools.prepare import PrepareOptions
from deepfm import model_config
from deepfm.config import ModelConfig
from deepfm.errors import BadInput
from deepfm.model import embeddings, fresh_tables
from deepfm.records import dataset_json
from deepfm.records.data_file import DataFile
from deepfm.records.raw import feature_map as maps
from deepfm.records.raw import moving
from deepfm.records.raw.column_kinds import COUNTED, Column
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints, damage, growing, model_json, saving, sliced_saver

pytestmark = pytest.mark.timeout(300)  # whole clusters
COLUMNS = [
    {"name": "clicked", "kind": "label"},
    {"name": "shop", "kind": "category"},
    {"name": "user", "kind": "category"},
    {"name": "height", "kind": "number", "scale": "standard"},
    {"name": "place", "kind": "hash", "buckets": 5},
    {"name": "slot", "kind": "number", "bounds": [1, 2]},
]
ROWS = 400
TEXTS = {"shop": [f"s{i}" for i in range(8)], "user": [f"u{i}" for i in range(30)]}
GROWN = {
    "shop": [*TEXTS["shop"], "new", "newer"],
    "user": [*TEXTS["user"], *(f"v{i}" for i in range(9))],
}
OTHER = {"shop": [*reversed(TEXTS["shop"])], "user": [*TEXTS["user"][::-1][:24], "x"]}
FEW = {"shop": TEXTS["shop"][:1], "user": [f"x{i}" for i in range(80)]}
FLAGS = (
    "--embedding_size=4", "--deep_layers=8", "--batch_size=40", "--dropout=0", "--l2_reg=0.001",
    "--learning_rate=0.05", "--log_steps=1",
)  # fmt: skip
in_table = lambda name: pytest.param(name, marks=pytest.mark.table)
# Not even the last bit moves, as it may where L2 covers the elapsed steps.
STILL = "--learning_rate=0", "--l2_scope=batch", "--l2_reg=0"


def write_map(path, texts, grew_from=(), columns=COLUMNS):
    """A feature_map.json whose categories are `texts`."""
    fields, first = [], 1
    for column in columns[1:]:
        field = {"name": column["name"], "kind": column["kind"], "first_id": first}
        if column["kind"] == "category":
            field["vocabulary"] = {x: first + i for i, x in enumerate(texts[column["name"]], 2)}
        elif "scale" in column:
            field.update(low=0, high=9, center=4, spread=2)
        elif "bounds" in column:
            field["bounds"] = column["bounds"]
        fields.append(field)
        first += 2 + len(field.get("vocabulary", ())) + column.get("buckets", 0)
        first += len(column["bounds"]) + 1 if "bounds" in column else 0
    about = dict(format_version=2, dataset="t", integers="buckets", min_count=1, columns=columns)
    about.update(feature_size=first, fields=fields, grew_from=list(grew_from))
    path.write_text(json.dumps(about))
    return maps.load(str(path))


print_of = maps.FeatureMap.fingerprint


def raw_rows(texts, seed):
    """(label, cells) of rows; some cells are missing, or of no map."""
    draw = np.random.RandomState(seed)
    for _ in range(ROWS):
        shop, user = (draw.choice([*texts[name], "", "unseen"]) for name in ("shop", "user"))
        cells = [shop, user, str(draw.randint(0, 9)), f"p{draw.randint(0, 9)}", "1"]
        yield float(draw.rand() < 0.2 + 0.6 * (len(shop + user) % 3 == 1)), cells


def write_day(folder, texts, grew_from=(), seed=0, rows_of=None):
    """A folder of a day's records and their map; returns the map."""
    (folder / "train").mkdir(parents=True)
    known = write_map(folder / "feature_map.json", texts, grew_from)
    path = folder / "train" / "a.tfrecords"
    rows = list(raw_rows(rows_of or texts, seed))
    encoded = [example(label, *maps.encode_row(known, cells)) for label, cells in rows]
    write_payloads(path, encoded)
    positives = int(sum(label for label, _ in rows))
    line = {"grew_from": list(grew_from)} if grew_from else {}
    dataset_json.write(
        str(folder / "train"), len(known.fields), known.feature_size,
        [DataFile(str(path), os.path.getsize(path), len(rows), positives)],
        feature_map=print_of(known), ids=dataset_json.ids(feature_map=print_of(known), **line),
    )  # fmt: skip
    return known


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """(folder, the maps of its days): each but the last two grew from those before it."""
    folder = tmp_path_factory.mktemp("days")
    first = write_day(folder / "1", TEXTS)
    second = write_day(folder / "2", GROWN, [print_of(first)], seed=1)
    more = {**GROWN, "shop": [*GROWN["shop"], "newest"]}
    third = write_day(folder / "3", more, [print_of(second), print_of(first)], seed=2)
    write_day(folder / "first_rows_again", GROWN, [print_of(first)], rows_of=GROWN, seed=7)
    write_day(folder / "old_map", TEXTS, rows_of=GROWN, seed=7)
    write_day(folder / "other", OTHER, seed=3)
    write_day(folder / "few", FEW, seed=3)
    return folder, [first, second, third]


def job(days, day, model, *more):
    data = f"--training_data_dir={days[0] / day / 'train'}", f"--model_dir={model}"
    return (*FLAGS, *data, *more)


@pytest.fixture(scope="module")
def trained(days, tmp_path_factory):
    """optimizer -> a model of the first day; copy it before you change it."""
    folder = tmp_path_factory.mktemp("trained")

    def make(optimizer="adam"):
        if not (folder / optimizer).exists():
            flags = job(days, "1", folder / optimizer, f"--optimizer={optimizer}")
            run_train(*flags, f"--val_data_dir={days[0]}/1/train", code=0)
        return folder / optimizer

    return make


@pytest.fixture
def model(trained, tmp_path):
    """A copy of a model of the first day."""
    return shutil.copytree(str(trained()), str(tmp_path / "model")) and tmp_path / "model"


def checkpoint_of(folder):
    return tf.train.latest_checkpoint(str(folder))


def move_rows(model, days, new):
    """Gives a model the map of another day, as the start of training does."""
    known = model_json.load(str(model / "model.json"))
    print_ = print_of(new)
    day = next(
        d for d in days[0].iterdir() if print_of(maps.load(f"{d}/feature_map.json")) == print_
    )
    config = ModelConfig(**known)._replace(
        feature_map=print_, feature_size=new.feature_size, ids={"fingerprint": "1"}
    )
    mode = make_mode("local")
    a_job = job_of(model_dir=str(model), keep_checkpoint_max=5, distribution=mode)
    data = [str(day / "train" / "a.tfrecords")]
    move = growing.find_move(a_job, config, data, known["feature_map"], 0)
    model = model_config.as_saved(known, config._asdict())
    growing.apply(a_job, move, model, embeddings.NAMES, fresh_tables.added(config, 10))


def names_of_ids(feature_map):
    """{id: what it stands for}, one by one."""
    found = {0: "padding"}
    for field in feature_map.fields:
        found[field.first_id], found[field.first_id + 1] = (field.name, 0), (field.name, 1)
        found.update({i: (field.name, "", text) for text, i in field.vocabulary.items()})
        for i in range(field.first_id + 2, maps.end_of(field)):
            found.setdefault(i, (field.name, i - field.first_id))
    return found


def check_moved(before, after, old, new):
    """Checks the tensors of a checkpoint against those before its rows moved from map to map."""
    old_id = {name: i for i, name in names_of_ids(old).items()}
    with_rows = [name for name in before if name.split("/")[0] in ("fm_w", "fm_v")]
    assert set(before) == set(after) and with_rows
    for name in set(before) - set(with_rows):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    for name in with_rows:
        assert len(after[name]) == new.feature_size
        for i, what in names_of_ids(new).items():
            row = old_id.get(what)
            if row is None and "/" in name:
                row = 0
            elif row is None:
                row = old_id[what[0], 1]
            np.testing.assert_array_equal(
                after[name][i], before[name][row], err_msg=f"{name} {what}"
            )


def check_tables(before, after, old, new):
    """The same, of the tables alone."""
    check_moved(*({name: x[name] for name in embeddings.NAMES} for x in (before, after)), old, new)


@pytest.mark.parametrize("optimizer", ["adam", in_table("adagrad"), "ftrl"])
def test_rows_and_moments_move_by_name_and_new_ones_are_the_rare_row(
    days, trained, tmp_path, monkeypatch, optimizer
):
    model = tmp_path / "model"
    shutil.copytree(str(trained(optimizer)), str(model))
    monkeypatch.setattr(sliced_saver, "SLICE_BYTES", 100)  # some rows at a time
    before = weights(model)
    slots = [name for name in before if name.startswith("fm_v/")]
    assert slots and all(np.abs(before[name][1:]).max() > 0 for name in ["fm_w", *slots])
    move_rows(model, days, days[1][1])
    check_moved(before, weights(model), days[1][0], days[1][1])
    assert damage.first_damaged(checkpoint_of(model)) is None
    parts = len(list(model.glob("model.ckpt-10.data-*")))
    assert all(path.name.endswith(f"{parts:05d}") for path in model.glob("model.ckpt-10.data-*"))
    assert not [path for path in model.glob("model.ckpt-*") if path.is_dir()]


def test_a_grown_model_predicts_each_row_as_before_its_growth_to_the_bit(days, model):
    def predicted(day):
        flags = f"--infer_data_dir={days[0] / day / 'train'}", f"--model_dir={model}"
        run_train("--task_type=infer", *flags, "--batch_size=64", code=0)
        return (model / "predictions.txt").read_text()

    before = predicted("old_map")
    move_rows(model, days, days[1][1])
    assert predicted("first_rows_again") == before
    assert len(set(before.split())) > 100


def test_training_goes_on_along_the_line_and_says_what_moved(days, model):
    run_train(*job(days, "1", model), f"--val_data_dir={days[0]}/1/train", code=0)
    step = report(model)["global_step"]
    before = evaluations(model)
    done = run_train(*job(days, "2", model), f"--val_data_dir={days[0]}/2/train", code=0)
    assert (
        f"model.ckpt-{step}: 11 new categories in 2 columns, 0 gone, 57 rows moved." in done.stderr
    )
    assert report(model)["global_step"] == step + ROWS / 40
    assert report(model)["best"]["step"] > step  # of another run
    assert evaluations(model) != before
    described = model_json.load(str(model / "model.json"))
    assert described["feature_map"] == print_of(days[1][1])
    assert described["feature_size"] == days[1][1].feature_size
    again = run_train(*job(days, "2", model), "--num_epochs=2", code=0)
    assert "rows moved" not in again.stderr


def test_a_lost_model_json_is_taken_from_the_checkpoint(days, model, tmp_path):
    whole = shutil.copytree(str(model), str(tmp_path / "whole"))
    (model / "model.json").unlink()
    task = "--task_type=infer", f"--infer_data_dir={days[0]}/old_map/train"
    for folder in (model, whole):
        done = run_train(*task, f"--model_dir={folder}", code=0)
        assert ("model.json is missing: using what" in done.stderr) == (folder == model)
    assert not (model / "model.json").exists(), "only training writes it"
    train = f"--training_data_dir={days[0]}/2/train", "--batch_size=40", "--learning_rate=0.05"
    refused = run_train(*train, f"--model_dir={model}", "--embedding_size=8", code=2)
    assert "was trained with --embedding_size=4" in refused.stderr.splitlines()[-1]
    assert not (model / "model.json").exists()
    for folder in (model, whole):
        run_train(*train, f"--model_dir={folder}", code=0)
    there, wanted = (
        {x: (pathlib.Path(folder) / x).read_bytes() for x in ("predictions.txt", "model.json")}
        for folder in (model, whole)
    )
    assert there == wanted
    there, wanted = weights(model), weights(whole)
    assert set(there) == set(wanted)
    for name in wanted:
        np.testing.assert_array_equal(there[name], wanted[name], err_msg=name)


def test_a_day_may_be_left_out(days, model):
    done = run_train(*job(days, "3", model), code=0)
    assert "12 new categories in 2 columns, 0 gone, 57 rows moved." in done.stderr


def test_maps_go_with_the_last_checkpoint_that_names_them(days, model):
    prints = [print_of(x) for x in days[1]]
    there = lambda: {name[:16] for name in os.listdir(model / "feature_maps")}
    assert there() == {prints[0]}
    run_train(*job(days, "2", model), "--keep_checkpoint_max=1", code=0)
    shutil.rmtree(str(model / "best"))
    assert there() == {prints[0], prints[1]}
    run_train(*job(days, "3", model), "--keep_checkpoint_max=1", code=0)
    assert there() == {prints[1], prints[2]}
    run_train(*job(days, "3", model), "--clear_existing_model", code=0)
    assert there() == {prints[2]}


def test_a_checkpoint_of_an_earlier_day_is_used_with_its_own_map(days, model):
    run_train(*job(days, "2", model), code=0)
    best = f"--checkpoint={model}/best/{os.path.basename(checkpoint_of(model / 'best'))}"
    evaluate = lambda day, code, *more: run_train(
        "--task_type=eval", f"--model_dir={model}", f"--val_data_dir={days[0]}/{day}/train",
        *more, code=code,
    ).stderr  # fmt: skip
    said = evaluate("2", 0)
    assert "rows moved" not in said and "nothing says that these do" not in said
    assert "step=10 " in evaluate("1", 0, best)
    assert "model.ckpt-10: 11 new categories in 2 columns, 0 gone, 57 rows moved." in evaluate(
        "2", 0, best
    )
    assert "0 new categories in 0 columns, 11 gone" in evaluate("1", 0)
    assert "the model's from" in evaluate("other", 2)
    unknown = model.parent / "unknown" / "train"
    unknown.mkdir(parents=True)
    shutil.copy(days[0] / "other" / "train" / "a.tfrecords", unknown)
    assert f"come from feature map {print_of(days[1][1])}, but nothing says" in evaluate(
        os.path.relpath(unknown.parent, days[0]), 0
    )


@pytest.mark.parametrize("mode", ["local", "horovod"])
def test_rows_of_another_day_are_predicted_by_a_model_that_stays_as_it_is(days, model, mode):
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}

    def infer(folder, name):
        words = (
            "--task_type=infer", f"--model_dir={folder}", f"--infer_data_dir={days[0]}/2/train",
            f"--predictions_file={folder.parent}/{name}",
        )  # fmt: skip
        said = run_mode(mode, *words, code=0).stderr
        return said, (folder.parent / name).read_bytes()

    said, found = infer(model, "found")
    assert "11 new categories in 2 columns, 0 gone, 57 rows moved." in said
    left = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert left.pop(model / "report.infer.json") and left == before
    move_rows(model, days, days[1][1])
    said, wanted = infer(model, "wanted")
    assert "rows moved" not in said and found == wanted


def test_an_export_keeps_the_map_of_its_checkpoint(days, model):
    words = "--task_type=export", f"--model_dir={model}", f"--servable_model_dir={model}/servable"
    run_train(*words, f"--val_data_dir={days[0]}/2/train", code=0)
    (stamp,) = model.glob("servable/*/assets.extra/deepfm.json")
    assert json.loads(stamp.read_text())["feature_map"] == print_of(days[1][0])


def test_a_move_that_is_cut_short_leaves_a_whole_model_and_is_made_again(days, model, monkeypatch):
    """Each rename, and each folder or file that is made or deleted, is the last thing once."""

    class Killed(BaseException):
        pass

    def dying(act):
        def do(*args, **more):
            if next(lives):
                return act(*args, **more)
            raise Killed

        return do

    before, (old, new, _) = weights(model), days[1]
    lived, seen = 0, set()
    while True:
        copy, lives = model.parent / f"copy{lived}", itertools.chain([1] * lived, [0])
        shutil.copytree(str(model), str(copy))
        with monkeypatch.context() as patched:
            for name in ("replace", "rename", "mkdir", "rmdir"):
                patched.setattr(os, name, dying(getattr(os, name)))
            try:
                move_rows(copy, days, new)
                break
            except Killed:
                pass
        checkpoints.prepare(str(copy), tidy=True)
        path = checkpoint_of(copy)
        assert damage.first_damaged(path) is None
        known = model_json.load(str(copy / "model.json"))
        known = model_config.as_saved(known, saving.model_of(path))
        seen.add(known["feature_map"])
        assert len(weights(copy)["fm_v"]) == known["feature_size"]
        if known["feature_map"] == print_of(old):
            move_rows(copy, days, new)
        check_moved(before, weights(copy), old, new)
        lived += 1
    assert lived > 8 and seen == {print_of(old), print_of(new)}


@pytest.mark.parametrize("mode", [in_table("tower"), "mirrored", "horovod"])
def test_each_mode_restores_what_was_moved(days, model, mode):
    before = weights(model)
    still = job(days, "2", model, *STILL, "--save_checkpoints_steps=1")
    done = run_mode(mode, *still)
    assert done.returncode == 0, done.stderr
    assert "11 new categories" in done.stderr
    check_tables(before, weights(model), *days[1][:2])


def test_rows_move_from_two_parameter_servers_to_three(days, tmp_path):
    model = tmp_path / "model"
    run_cluster(*job(days, "1", model), servers=2, workers=0, code=0)
    before = weights(model)
    still = job(days, "2", model, *STILL)
    assert "11 new categories" in run_cluster(*still, servers=3, workers=0, code=0).stderr
    check_tables(before, weights(model), *days[1][:2])


def test_other_maps_are_refused_but_for_move_rows(days, model):
    before = weights(model)
    done = run_train(*job(days, "other", model), code=2)
    assert "its ids come from feature map" in done.stderr
    larger = run_train(*job(days, "1", model), f"--val_data_dir={days[0]}/2/train", code=2).stderr
    assert "2/train: its ids come from feature map" in larger
    done = run_train(*job(days, "few", model), "--move_rows", code=2)
    assert "37 of the 57 rows of" in done.stderr
    for name, value in weights(model).items():
        np.testing.assert_array_equal(value, before[name])
    done = run_train(*job(days, "other", model), "--move_rows", code=0)
    assert "1 new category in 1 column, 6 gone, 51 rows moved." in done.stderr


def test_a_map_that_is_missing_or_another_is_said_and_nothing_moves(days, model):
    path, before = model / "feature_maps" / f"{print_of(days[1][0])}.json", weights(model)
    refused = lambda *more: run_train(*job(days, "2", model), *more, code=2).stderr
    assert "but the feature map of the data has 68 ids" in refused("--feature_size=90")
    path.write_text((days[0] / "other" / "feature_map.json").read_text())
    said = f"{path} is missing or another map"
    assert said in refused()
    path.write_text("{")
    assert said in refused()
    words = "--task_type=export", f"--model_dir={model}", f"--servable_model_dir={model}/servable"
    assert said in run_train(*words, code=2).stderr  # it would take no raw rows
    assert not list(model.glob("servable/*"))
    path.unlink()
    assert said in refused()
    assert "--embedding_size=5, but the model" in refused("--embedding_size=5")
    assert all((weights(model)[name] == value).all() for name, value in before.items())
    path.write_text((days[0] / "1" / "feature_map.json").read_text())
    run_train(*job(days, "2", model), code=0)


def test_a_damaged_table_is_named_and_stays(days, model):
    path = pathlib.Path(f"{checkpoint_of(model)}.data-00000-of-00001")
    whole = path.read_bytes()
    place = len(whole) // 2  # embeddings are most of it
    path.write_bytes(whole[:place] + b"damaged!" + whole[place + 8 :])
    damaged = path.read_bytes()
    refused = run_train(*job(days, "2", model), code=2).stderr
    assert re.search(r"ckpt-10 is damaged: \S+ cannot be read", refused)
    assert path.read_bytes() == damaged


def test_rows_move_in_a_model_dir_on_s3(days):
    with s3_server.started() as port:
        folder, env = s3_server.Folder(port, "model"), s3_server.environment(port)
        for day in "12":
            done = run_train(*job(days, day, folder.path), env=env, code=0)
        assert "11 new categories in 2 columns, 0 gone, 57 rows moved." in done.stderr
        assert json.loads(folder.read("model.json"))["feature_map"] == print_of(days[1][1])
        flags = "--task_type=eval", f"--val_data_dir={days[0]}/3/train"
        said = run_train(*flags, f"--model_dir={folder.path}", env=env, code=0).stderr
        assert "1 new category in 1 column, 0 gone" in said
        kept = sorted(f"feature_maps/{print_of(days[1][day])}.json" for day in (0, 1))
        assert sorted(x for x in folder.names() if x.startswith("feature_maps/")) == kept
        # The checkpoints that named days 1 and 2 go, and with them the maps of these.
        run_train(*job(days, "3", folder.path), "--keep_checkpoint_max=1", env=env, code=0)
        kept = [f"feature_maps/{print_of(days[1][2])}.json"]
        assert [x for x in folder.names() if x.startswith("feature_maps/")] == kept


def test_ids_of_every_kind_move_by_what_they_stand_for():
    def made(texts, low, high):
        fields, first = [], 1
        for name, kind, of_kind in (
            ("a", "category", {"vocabulary": texts}),
            ("n", "id", {"low": low, "high": high}),
            ("s", "scaled", {"low": 0, "high": 9}),
            ("b", "number", {"bounds": (1, 2)}),
            ("l", "list", {"vocabulary": texts[::-1]}),
        ):
            known = {x: first + i for i, x in enumerate(of_kind.pop("vocabulary", ()), 2)}
            column = Column(name, kind, bounds=of_kind.get("bounds"))
            field = maps.Field(column, first, known, **of_kind)
            fields.append(field)
            first = maps.end_of(field)
        return maps.FeatureMap("t", "buckets", 1, first, fields)

    def named(feature_map):
        found = names_of_ids(feature_map)
        for field in feature_map.fields:
            for x in range(field.low, field.high + 1) if field.kind == "id" else ():
                found[field.first_id + 2 + x - field.low] = (field.name, "", x)
        return found

    old, new = made(["x", "y", "z"], 5, 8), made(["v", "z", "x", "w"], 3, 7)
    move, old_id = moving.join(old, new), {name: i for i, name in named(old).items()}
    for i, what in named(new).items():
        assert move.new[i] == (what not in old_id), what
        assert move.source[i] == (old_id[what] if what in old_id else old_id[what[0], 1]), what
    assert int(move.new.sum()) == 2 + 2 + 2 and move.columns == 3
    assert move.gone == len(set(named(old).values()) - set(named(new).values())) == 1 + 1 + 1
    renamed = new.fields[0]._replace(column=Column("c", "category"))
    other = new._replace(fields=[renamed, *new.fields[1:]])
    for refused, sentence in (
        (other, r"has c \(category\) where the model's has a \(category\)"),
        (new._replace(fields=new.fields[:-1]), r"has no column where the model's has l \(list\)"),
    ):
        with pytest.raises(BadInput, match=sentence):
            moving.join(old, refused)
    # Bounds and scales that were made anew: other buckets, another value.
    for bounds in (1,), (1, 3):
        now = old.fields[3]._replace(bounds=bounds)
        wanted = [now.first_id, now.first_id + 1, *[-1] * (len(bounds) + 1)]
        np.testing.assert_array_equal(moving.old_ids(old.fields[3], now), wanted)
    now = old.fields[2]._replace(high=10)
    np.testing.assert_array_equal(moving.old_ids(old.fields[2], now), [now.first_id, -1])


def prepared(folder, number, rows, **flags):
    """prepare's output folder of a day's rows, of every kind of column."""
    raw, out = folder / f"raw{number}", folder / f"out{number}"
    raw.mkdir()
    test_kinds.write_table(raw, rows)
    options = {"input": str(raw / "rows.csv"), "min_count": 3, "split": "1,0,0", **flags}
    prepare.prepare(PrepareOptions(str(out), **options))
    return out


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """(a folder, the rows of three days, their maps): out1, out2 and out3."""
    folder, draw, made = tmp_path_factory.mktemp("grown"), random.Random(3), []
    rows = [[test_kinds.row(draw) for _ in range(250)] for _ in range(3)]
    for day, of_day in enumerate(rows):
        for cells in of_day:  # some shops and genres of this day and the next
            cells[3] = draw.choice([cells[3], f"shop {day + draw.randrange(2)}"])
            cells[11] = draw.choice([cells[11], f"a genre of day {day}|{cells[11]}"])
        flags = {"columns": str(folder / "raw1" / "columns.json")}
        if day:
            flags = {"grow": True, "day": f"{day}", "feature_map": made[-1], "min_count": 4 - day}
        made.append(f"{prepared(folder, day + 1, of_day, **flags)}/feature_map.json")
    return folder, rows, [maps.load(path) for path in made]


def test_a_map_grows_by_the_categories_that_it_lacks_in_the_order_of_their_frequency(grown):
    _, rows, (_, *grew) = grown
    seen = collections.defaultdict(collections.Counter)  # the first day did not say that it is one
    for of_day, was, now in zip(rows[1:], grown[2], grew):
        assert was != now and now.feature_size > was.feature_size
        next_id = 1
        for i, (before, field) in enumerate(zip(was.fields, now.fields)):
            known = list(before.vocabulary)
            texts = seen[field.name]
            texts.update(text for cells in of_day for text in categories(field, cells[3:][i]))
            often = field.column.min_count or now.min_count
            new = [text for text in texts if texts[text] >= often and text not in known]
            if field.kind == "buckets":
                new.sort(key=maps.bucket_code)
            else:
                new.sort(key=lambda text: text.encode())
            new.sort(key=texts.get, reverse=True)
            assert list(field.vocabulary) == known + new, field.name
            assert field.first_id == next_id
            assert field._replace(first_id=0, vocabulary={}) == before._replace(
                first_id=0, vocabulary={}
            )
            next_id = maps.end_of(field)
        assert now.feature_size == next_id
    assert [x.min_count for x in grew] == [3, 2]


def categories(field, cell):
    """The texts by which a cell counts."""
    cell = "" if cell in test_kinds.MISSING else cell
    if not cell or field.kind not in COUNTED:
        return []
    if field.kind == "list":
        return [text for text, _ in maps.members(field.column, cell)]
    return [maps.text_of(field.column, cell)]


def test_a_grown_map_names_its_line_and_so_do_the_records_that_it_encodes(grown, tmp_path):
    folder, rows, (one, two, three) = grown
    prints = [print_of(x) for x in (two, one)]
    assert (one.grew_from, one.day, two.day, three.day) == ((), "", "1", "2")
    assert (two.grew_from, three.grew_from) == ((prints[1],), tuple(prints))
    flags = {"feature_map": f"{folder}/out3/feature_map.json"}
    new = prepared(tmp_path, 4, rows[0], min_count=None, **flags)
    for out in folder / "out3", new:
        described = dataset_json.load(str(out / "train"))
        assert described["feature_map"] == print_of(three)
        assert described["ids"]["grew_from"] == prints
        text = (out / "feature_map.json").read_text()
        assert text == (folder / "out3" / "feature_map.json").read_text()
    again = prepared(tmp_path, 5, rows[2], grow=True, day="3", **flags)
    same = maps.load(str(again / "feature_map.json"))
    assert (print_of(same), same.grew_from, same.day) == (print_of(three), tuple(prints), "3")


def test_the_rows_of_a_day_have_the_ids_of_its_map(grown):
    folder, rows, (*_, three) = grown
    (path,) = (folder / "out3" / "train").glob("*.tfrecords")
    for cells, record in zip(rows[2], examples_of(path)):
        pairs = [x for field in maps.encode_fields(three, cells[3:]) for x in field]
        assert record["ids"] == [i for i, _ in pairs]
