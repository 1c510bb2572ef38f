"""After a power cut at any moment, training goes on and no data set is lost. See power_cuts."""

import os
import shutil

import numpy as np
import power_cuts
import pytest
from conftest import SMALL_MODEL, make_records, run_tool, run_train, write_libsvm, write_tfrecords

from deepfm import export
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints

EACH_ALONE = 60  # seconds
pytestmark = pytest.mark.skipif(
    not shutil.which("strace"), reason="needs strace: scripts/setup.sh --tests installs it"
)
of_one_training = pytest.mark.xdist_group("power cuts of one training")


class Training:
    """A training with evaluations, best/ and exports, recorded.

    Args:
        top: an empty folder.
        epochs: how long it trains.
        keep: --keep_checkpoint_max.
    """

    def __init__(self, top, epochs, keep):
        self.top, self._keep = top, keep
        data = top.parent / f"{top.name}-data"
        data.mkdir()
        write_tfrecords(data / "train.tfrecords", make_records(4 * 32, seed=1))
        write_tfrecords(data / "val.tfrecords", make_records(100, seed=2))
        top.mkdir()
        self.flags = (
            *SMALL_MODEL, f"--training_data_dir={data}/train.tfrecords",
            f"--val_data_dir={data}/val.tfrecords", f"--model_dir={top}/model",
            f"--servable_model_dir={top}/servable", "--batch_size=32", f"--num_epochs={epochs}",
            "--learning_rate=0.05", "--export=best", "--eval_every_steps=4", "--log_steps=1000",
            "--learning_rate_decay_on_plateau=0.5", "--save_checkpoints_steps=3",
            f"--keep_checkpoint_max={keep}",
        )  # fmt: skip
        words = ["train.py", *self.flags]
        self.calls = power_cuts.record(words, str(top), str(data / "log"))
        self.end = power_cuts.tree_of(str(top))

    def states(self):
        return power_cuts.states({}, self.calls, str(self.top))

    def check(self, names, found):
        """Checks what the next start finds and takes."""
        power_cuts.rebuild(found, str(self.top))
        (self.top / "model").mkdir(exist_ok=True)
        return power_cuts.check_model(names, found, str(self.top))

    def check_by_training(self, found):
        """Checks that the same command ends as if nothing had happened."""
        power_cuts.rebuild(found, str(self.top))
        run_train(*self.flags, code=0)
        steps, weights = [], []
        for tree in (self.end, power_cuts.tree_of(str(self.top))):
            power_cuts.rebuild(tree, str(self.top))
            path = tf.train.latest_checkpoint(str(self.top / "model"))
            reader = tf.train.load_checkpoint(path)
            mine = [x for x in reader.get_variable_to_shape_map() if "deepfm_run/" not in x]
            weights.append({name: reader.get_tensor(name) for name in mine})
            assert len(checkpoints.by_step(tree_names(tree))) == self._keep
            (made,) = (self.top / "servable").iterdir()
            assert export.is_whole(str(made))
            (name,) = checkpoints.read_state(str(self.top / "model/best")).names
            steps.append((name, export.stamp_of(str(made)).global_step))
        assert steps[0] == steps[1]
        for name, value in weights[0].items():
            np.testing.assert_array_equal(weights[1][name], value)


def tree_names(tree):
    return [os.path.basename(name) for name in tree if os.path.dirname(name) == "model"]


class Tool:
    """A program that makes or replaces a data set, recorded.

    Args:
        top: the output folder.
        flags: (name, flag...) of a first run, or None.
        again: (name, flag...) of the run that is recorded.
        parts: as of power_cuts.check_data.
    """

    def __init__(self, top, flags, again, parts=("",)):
        self.top, self._again, self._parts = top, again, parts
        top.mkdir()
        if flags:
            run_tool(*flags, code=0)
        self.old, log = power_cuts.tree_of(str(top)), f"{top}-log"
        words = ["-m", f"data_tools.{again[0]}", *again[1:]]
        self.calls = power_cuts.record(words, str(top), log)
        self.new = power_cuts.tree_of(str(top))

    def states(self):
        return power_cuts.states(self.old, self.calls, str(self.top))

    def check(self, _, found):
        power_cuts.rebuild(found, str(self.top))
        power_cuts.check_data(found, str(self.top), self.old, self.new, self._parts)


def tools(folder):
    """Yields the tools, recorded one after the other."""
    raw = folder / "raw.libsvm"
    write_libsvm(raw, make_records(60, seed=3))
    rows = [
        [str(i % 2), *map(str, range(13)), *("ab"[i % 2] for _ in range(26))] for i in range(40)
    ]
    (folder / "raw.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    base = folder / "base"
    of = lambda name: ("libsvm_to_tfrecord", f"--input={raw}", f"--output_dir={name}")
    yield Tool(base, None, (*of(base), "--num_files=2", "--num_workers=1"))
    out = folder / "convert"
    again = (*of(out), "--num_files=2", "--overwrite", "--compress", "--num_workers=1")
    yield Tool(out, (*of(out), "--num_files=3"), again)
    out = folder / "rebalance"
    mine = "rebalance", f"--input={out}", f"--output_dir={out}", "--overwrite", "--num_workers=1"
    yield Tool(out, (*of(out), "--num_files=3"), (*mine, "--num_files=2", "--negative_rate=0.5"))
    out = folder / "prepare"
    mine = "prepare_criteo", f"--input={folder}/raw.tsv", f"--output_dir={out}"
    more = "--num_workers=1", "--overwrite", "--min_count=1"
    parts = "train/", "valid/", "test/"
    yield Tool(out, mine, (*mine, *more), parts)


def sampled(recorded, number):
    """Yields (names, found) of `number` of the states of a program, evenly over all."""
    total = sum(1 for _ in recorded.states())
    chosen = {i * (total - 1) // (number - 1) for i in range(number)}
    for i, (names, _, found) in enumerate(recorded.states()):
        if i in chosen:
            yield names, found


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return Training(tmp_path_factory.mktemp("cut") / "top", epochs=2, keep=1)


@of_one_training
def test_no_power_cut_loses_what_a_training_had_named(training):
    for names, found in sampled(training, 70):
        training.check(names, found)


@of_one_training
def test_after_a_power_cut_training_ends_as_if_nothing_had_happened(training):
    for _, found in list(sampled(training, 5))[1:-1]:
        training.check_by_training(found)


@pytest.mark.table
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("keep", [1, 2])
def test_no_power_cut_loses_what_a_longer_training_had_named(tmp_path, keep):
    run = Training(tmp_path / "top", epochs=12, keep=keep)
    for names, found in sampled(run, 2500):
        run.check(names, found)
    for _, found in sampled(run, 30):
        run.check_by_training(found)


every = pytest.param(5000, marks=[pytest.mark.table, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("number", [50, every])
def test_no_power_cut_loses_a_data_set(tmp_path, number):
    for tool in tools(tmp_path):
        for names, found in sampled(tool, number):
            tool.check(names, found)


@of_one_training
def test_a_replay_ends_with_what_the_program_has_made(training):
    *_, names = power_cuts.cuts({}, training.calls, str(training.top))
    assert power_cuts.left(names, "kept") == training.end
