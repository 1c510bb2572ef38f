"""The recipes in docs/recipes/ say what was published, and train."""

import copy
import re
import shlex

import pytest
from absl import flags
from conftest import ROOT, make_records, report, run_python, run_tool, run_train, write_libsvm

from deepfm import flags as deepfm_flags

FOLDER = ROOT / "docs" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.flags"))

# The published configurations: K; MLP; batch norm; batch; dropout; lambda; test AUC / log loss;
# what decides (the AUC, or both, AUC minus log loss); seed.
BARS = {
    "criteo_x1": (10, (400,) * 3, True, 4096, 0.1, 1e-5, ".81381 / .43803", "auc", 2021),
    "criteo_x4_001": (16, (1000,) * 5, False, 10000, 0.2, 1e-5, ".81433 / .43758", "both", 2019),
    "criteo_x4_002": (40, (500,) * 4, False, 10000, 0.2, 1e-5, ".81407 / .43779", "both", 2019),
    "avazu_x1": (10, (400,) * 3, True, 4096, 0.3, 0.1, ".76459 / .36697", "auc", 2021),
    "avazu_x4_001": (16, (2000,) * 4, False, 10000, 0, 0, ".79299 / .37190", "both", 2019),
    "avazu_x4_002": (40, (3000,) * 4, False, 10000, 0, 0, ".79618 / .37018", "both", 2019),
    "frappe_x1": (10, (400,) * 3, True, 4096, 0.2, 0.05, ".98395 / .14946", "auc", 2021),
    "movielenslatest_x1": (10, (400,) * 3, True, 4096, 0.3, 0.01, ".96822 / .21379", "auc", 2021),
}
METRICS = {"auc": "auc", "both": "auc_minus_log_loss"}
OF_ALL = {
    "optimizer": "adam", "learning_rate": 0.001, "lazy_updates": False, "l2_scope": "table",
    "l2_reg_deep": 0, "clip_norm": 10, "embedding_init_stddev": 1e-4, "num_epochs": 100,
    "learning_rate_decay_on_plateau": 0.1, "learning_rate_decay_patience": 1,
    "min_learning_rate": 1e-6, "min_improvement": 1e-6, "early_stopping_patience": 2,
    "learning_rate_warmup_steps": 0, "embedding_learning_rate": None, "pooling": "sum",
    "loss_type": "log_loss", "max_steps": 0, "eval_every_steps": 0,
}  # fmt: skip


def values(name):
    """{flag: value} of train.py's flags as a recipe sets them."""
    found = flags.FlagValues()
    for flag in deepfm_flags.FLAGS.get_key_flags_for_module(deepfm_flags):
        found[flag.name] = copy.deepcopy(flag)
    found.unparse_flags()
    found(["train.py", f"--flagfile={FOLDER / name}.flags"])
    return found.flag_values_dict()


def test_each_published_configuration_has_a_recipe():
    assert {*BARS, "large_batch"} == set(NAMES)


@pytest.mark.parametrize("name", BARS)
def test_a_recipe_has_the_published_values(name):
    k, layers, normalizes, batch, dropout, l2, _, metric, seed = BARS[name]
    wanted = {
        **OF_ALL, "embedding_size": k, "deep_layers": layers, "batch_norm": normalizes,
        "batch_size": batch, "dropout": (dropout,), "l2_reg": l2, "seed": seed,
        "best_metric": METRICS[metric], "learning_rate_decay_metric": METRICS[metric],
    }  # fmt: skip
    if normalizes:  # as PyTorch, in which a moving average keeps 1 - momentum
        wanted.update(batch_norm_epsilon=1e-5, batch_norm_decay=1 - 0.1)
    found = values(name)
    assert {flag: found[flag] for flag in wanted} == wanted


def test_the_recipe_of_large_batches_follows_the_rules():
    found, times = values("large_batch"), 8192 / 1024
    assert found["batch_size"] == 1024 * times
    assert found["learning_rate"] == pytest.approx(8e-4 * times**0.5, rel=1e-5)
    assert found["l2_reg"] / 2 == pytest.approx(1e-5 * times)
    records = 45_840_617 * 9 // 10
    assert found["learning_rate_warmup_steps"] == records // found["batch_size"]
    wanted = {
        "embedding_learning_rate": 1e-4, "embedding_init_stddev": 0.01, "embedding_size": 10,
        "deep_layers": (400,) * 3, "dropout": (0,), "l2_reg_deep": 0, "num_epochs": 10,
        "batch_norm": False, "optimizer": "adam", "cowclip_ratio": 1,
    }  # fmt: skip
    assert found["cowclip_min_norm"] == pytest.approx(1e-5 * found["embedding_size"] ** 0.5)
    assert {flag: found[flag] for flag in wanted} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_the_page_and_the_recipe_tell_the_published_result(name):
    text, page = (FOLDER / f"{name}.flags").read_text(), (ROOT / "docs/recipes.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    result = BARS[name][6] if name in BARS else ".8097"
    assert row.split(" | ")[2] == result
    for number in result.split(" / "):
        assert number in text.partition("Source:")[0]
    assert "# Source: https://" in text
    assert "Not run here: " in text


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_recipe_have_the_flags_of_their_programs(name):
    text = (FOLDER / f"{name}.flags").read_text()
    commands = re.findall(r"^# \.venv/bin/python (.+)$", text, re.MULTILINE)
    assert commands[0].startswith("-m data_tools.")
    assert commands[-1].startswith("train.py ")
    assert f"--flagfile=docs/recipes/{name}.flags" in text
    for command in commands:
        done = run_python(*shlex.split(command), "--only_check_args")
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    for i, part in enumerate(("train", "val")):
        text = write_libsvm(folder / f"{part}.libsvm", make_records(200, seed=i))
        flags = f"--input={text}", f"--output_dir={folder}/{part}", "--feature_size=50"
        assert run_tool("libsvm_to_tfrecord", *flags).returncode == 0
    return folder


# Those that differ from another one in numbers alone train in the table.
ALIKE = set(NAMES) - {"criteo_x1", "criteo_x4_001", "large_batch"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.table] if x in ALIKE else []) for x in NAMES]
)
def test_a_recipe_trains(data, tmp_path, name):
    asked = values(name)
    widths = ",".join(str(min(width, 100)) for width in asked["deep_layers"])
    run_train(
        f"--flagfile={FOLDER / name}.flags", f"--training_data_dir={data}/train",
        f"--val_data_dir={data}/val", f"--model_dir={tmp_path}/model",
        f"--deep_layers={widths}", "--max_steps=2", code=0,
    )  # fmt: skip
    found = report(tmp_path / "model")
    assert found["global_step"] == 2
    assert found["flags"]["batch_size"] == asked["batch_size"]
    assert 0 < found["best"]["auc"] < 1
