"""A larger --feature_size adds rows to a trained model that has no feature map, and moves none."""

import json
import os
import shutil

import numpy as np
import pytest
from conftest import SMALL_MODEL, job_of, make_records, report, run_mode, run_train, write_tfrecords
from mode_steps import check_same, make_mode, weights

from deepfm.config import ModelConfig
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import embeddings, fresh_tables, optimizers
from deepfm.model.layers import initializers
from deepfm.records import dataset_json
from deepfm.records.data_file import DataFile
from deepfm.runtime.tf import tf
from deepfm.state import growing, model_json, sliced_saver

v1 = tf.compat.v1

pytestmark = pytest.mark.timeout(300)  # whole clusters
FEW, SIZE, LARGER, ROWS = 40, 50, 70, 640
STEP = 6  # of 20, at which training is interrupted
GREW = f"model.ckpt-{STEP}: 20 rows added, for ids from 50 on."
ADAM = "--optimizer=adam", "--batch_norm", "--cowclip_ratio=0.01"
# Not even the last bit moves, as it may where L2 covers the elapsed steps.
STILL = "--learning_rate=0", "--l2_scope=batch", "--l2_reg=0"


def in_table(case):
    return pytest.param(case, marks=pytest.mark.table)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """few/ has the ids below FEW, old/ those below SIZE, new/ those below LARGER."""
    made = tmp_path_factory.mktemp("ids")
    for name, size in (("few", FEW), ("old", SIZE), ("new", LARGER)):
        (made / name).mkdir()
        records = make_records(ROWS, feature_size=size, seed=size)
        write_tfrecords(made / name / "a.tfrecords", records)
    return made


def job(folder, model, *more, size=SIZE, data="old"):
    return (
        *SMALL_MODEL, f"--training_data_dir={folder}/{data}", f"--model_dir={model}",
        "--batch_size=64", "--num_epochs=2", "--dropout=0.2", "--l2_reg=0.001",
        f"--feature_size={size}", *more,
    )  # fmt: skip


def describe(folder, size, **more):
    """Writes the dataset.json of new/."""
    path = folder / "new" / "a.tfrecords"
    file = DataFile(str(path), os.path.getsize(path), ROWS, 0)
    dataset_json.write(str(folder / "new"), 4, size, [file], **more)


@pytest.fixture
def model(folder, tmp_path):
    """A model of the ids below SIZE, whose run has ended."""
    if not (folder / "model").exists():
        run_train(*job(folder, folder / "model", f"--val_data_dir={folder}/old"), code=0)
    shutil.copytree(str(folder / "model"), str(tmp_path / "model"))
    return tmp_path / "model"


def check_grown(grown, larger, atol=0):
    """Checks a model that grew at STEP against one that always had all rows.

    The rows to come, which no record has used, count their steps from then on.
    """
    grown, larger = weights(grown), weights(larger)
    for name in (f"{table}/{optimizers.SEEN}" for table in embeddings.NAMES):
        if name in larger:
            assert np.all(larger[name][SIZE:] == 0) and np.all(grown[name][SIZE:] == STEP)
            larger[name][SIZE:] = STEP
    assert len(grown["fm_v"]) == LARGER and np.all(grown["fm_v"][SIZE:] != 0)
    check_same(grown, larger, atol=atol)


@pytest.mark.parametrize(
    "flags",
    [
        ADAM,
        *(in_table([f"--optimizer={name}"]) for name in optimizers.OPTIMIZERS),
        in_table(["--optimizer=adam", "--lazy_updates=false", "--l2_reg=0"]),
    ],
    ids=" ".join,
)
def test_training_goes_on_as_if_the_rows_had_always_been_there(folder, tmp_path, flags):
    run_train(*job(folder, tmp_path / "larger", *flags, size=LARGER), code=0)
    run_train(*job(folder, tmp_path / "grown", *flags, f"--max_steps={STEP}"), code=0)
    assert GREW in run_train(*job(folder, tmp_path / "grown", *flags, size=LARGER), code=0).stderr
    check_grown(tmp_path / "grown", tmp_path / "larger")


@pytest.mark.parametrize("mode", map(in_table, ("horovod", "tower", "mirrored", "ps")))
def test_each_mode_goes_on_with_added_rows(folder, tmp_path, mode):
    servers = lambda n: {"servers": n} if mode == "ps" else {}
    in_mode = lambda n, *flags: run_mode(mode, *flags, code=0, **servers(n))
    in_mode(2, *job(folder, tmp_path / "larger", *ADAM, size=LARGER))
    in_mode(2, *job(folder, tmp_path / "grown", *ADAM, f"--max_steps={STEP}"))
    done = in_mode(3, *job(folder, tmp_path / "grown", *ADAM, size=LARGER))
    assert GREW in done.stdout + (done.stderr or "")
    check_grown(tmp_path / "grown", tmp_path / "larger", atol=1e-6)


def test_new_ids_learn_and_the_others_are_predicted_as_before(folder, model):
    def predicted():
        words = f"--infer_data_dir={folder}/old", f"--model_dir={model}"
        run_train("--task_type=infer", *words, code=0)
        return (model / "predictions.txt").read_text()

    before = predicted()
    refused = run_train(*job(folder, model, data="new"), code=2).stderr
    assert f"is not below feature_size {SIZE}" in refused
    done = run_train(*job(folder, model, *STILL, size=LARGER, data="new"), code=0)
    assert "model.ckpt-20: 20 rows added, for ids from 50 on." in done.stderr
    assert predicted() == before and len(set(before.split())) > 100
    start = weights(model)
    again = run_train(*job(folder, model, "--num_epochs=3", size=LARGER, data="new"), code=0)
    assert "added" not in again.stderr
    assert np.all(weights(model)["fm_v"][1:] != start["fm_v"][1:])
    described = json.loads((model / "model.json").read_text())
    assert described["feature_size"] == LARGER


def test_fewer_ids_and_an_evaluation_with_more_are_refused(folder, model):
    before, said = weights(model), f", but the model of --model_dir={model} was trained"
    refused = run_train(*job(folder, model, size=FEW, data="few"), code=2).stderr
    assert f"--feature_size={FEW}{said}" in refused
    words = "--task_type=eval", f"--model_dir={model}", f"--val_data_dir={folder}/old"
    run_train(*words, f"--feature_size={SIZE}", code=0)
    refused = run_train(*words, f"--feature_size={LARGER}", code=2).stderr
    assert f"--feature_size={LARGER}{said}" in refused
    check_same(model, before)


def test_data_of_larger_ids_are_refused_until_the_flag_says_that_ids_mean_the_same(folder, model):
    flags = [x for x in job(folder, model, data="new") if not x.startswith("--feature_size")]
    try:
        describe(folder, LARGER)
        refused = run_train(*flags, code=2).stderr
        assert f"ids are below {LARGER}, but the model of --model_dir={model} has" in refused
        assert len(weights(model)["fm_v"]) == SIZE
        run_train(*flags, f"--feature_size={LARGER}", code=0)
        run_train(*flags, "--num_epochs=3", code=0)  # by now it has them
    finally:
        (folder / "new" / "dataset.json").unlink()


@pytest.mark.parametrize("of_ids", [{"hash_buckets": SIZE}, {"feature_map": "0123456789abcdef"}])
def test_a_model_of_hashes_or_of_a_feature_map_is_refused(folder, model, of_ids):
    known = model_json.load(str(model / "model.json"))
    (model / "model.json").write_text(json.dumps({**known, **of_ids}))
    refused = run_train(*job(folder, model, size=LARGER), code=2).stderr
    assert f"--feature_size={LARGER}, but the model of --model_dir={model} was trained" in refused
    assert len(weights(model)["fm_v"]) == SIZE


def test_each_checkpoint_keeps_its_number_of_rows(folder, tmp_path):
    model, servable = tmp_path / "model", tmp_path / "servable"
    flags = f"--val_data_dir={folder}/old", "--eval_every_steps=3", "--min_improvement=1"
    run_train(*job(folder, model, *flags, f"--max_steps={STEP}"), code=0)
    small = (model / "model.json").read_text()
    exports = "--export=best", f"--servable_model_dir={servable}"
    run_train(*job(folder, model, flags[0], flags[2], *exports, size=LARGER), code=0)
    words = "--task_type=eval", f"--model_dir={model}", flags[0]
    run_train(*words, "--checkpoint=best", code=0)
    assert report(model, "eval")["global_step"] == 3
    (path,) = servable.iterdir()
    exported = tf.saved_model.load_v2(str(path))
    shapes = {x.name: x.shape.as_list() for x in exported.variables}
    assert shapes["fm_v:0"] == [SIZE, 4]
    # As after a kill between the checkpoint and model.json:
    (model / "model.json").write_text(small)
    run_train(*words, code=0)
    assert report(model, "eval")["global_step"] == 20
    run_train(*job(folder, model, "--num_epochs=3", size=LARGER), code=0)


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_rows_are_added_a_block_at_a_time(folder, model, monkeypatch, optimizer):
    if optimizer != "adam":
        run_train(*job(folder, model, f"--optimizer={optimizer}", "--clear_existing_model"), code=0)
    monkeypatch.setattr(sliced_saver, "SLICE_BYTES", 100)
    monkeypatch.setattr(initializers, "_BLOCK", 7 * 4)
    before, known = weights(model), model_json.load(str(model / "model.json"))
    config = ModelConfig(**known)._replace(feature_size=LARGER)
    mode = make_mode("local")
    a_job = job_of(model_dir=str(model), keep_checkpoint_max=5, distribution=mode)
    move = growing.find_move(a_job, config, (), None, LARGER - SIZE)
    fresh = fresh_tables.added(config, 20)
    growing.apply(a_job, move, config._asdict(), embeddings.NAMES, fresh)
    start = initializers.normal(config.embedding_init_stddev, config.seed, TENSORFLOW)
    with tf.Graph().as_default(), v1.Session() as session:
        drawn = session.run(start([LARGER, 4]))
    after = weights(model)
    assert set(after) == set(before)
    for name, value in before.items():
        table, _, slot = name.partition("/")
        if table not in embeddings.NAMES:
            np.testing.assert_array_equal(after[name], value)
            continue
        np.testing.assert_array_equal(after[name][:SIZE], value)
        wanted = {"fm_v": drawn[SIZE:], f"{table}/last_seen": 20, f"{table}/Ftrl": np.float32(0.1)}
        added = np.broadcast_to(wanted.get(name, 0), after[name][SIZE:].shape)
        np.testing.assert_array_equal(after[name][SIZE:], added, err_msg=name)
