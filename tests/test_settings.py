"""A setting is declared once, by a field of a config, and everything else follows from there."""

import itertools
import json
import os
import shutil

import pytest
import warm
from conftest import LAUNCHERS, ROOT, finish, make_records, small_training, started, write_tfrecords

from deepfm import flags
from deepfm.config import InputConfig, JobConfig, ModelConfig, OptimizerConfig
from deepfm.config.setting import Setting

CONFIGS = ("model", "optimizer", "input", "job")
FIELD = """
    new_of_{}: float = setting(CHANGES, 0.5, "It is new, up to 7.", at_least=0, at_most=7)"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the code in which each config has one more field, and nothing else is new."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copy(str(ROOT / "train.py"), str(folder))
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(str(ROOT / "deepfm"), str(folder / "deepfm"), ignore=ignore)
    for config, path in itertools.product(CONFIGS, folder.glob("deepfm/config/*.py")):
        before, named, text = path.read_text().partition(f"class {config.title()}Config(")
        if named:
            end = text.find("\nclass ")
            before_last = text.rindex("\n", 0, text.rindex("= setting(", 0, end))
            text = text[:before_last] + FIELD.format(config) + text[before_last:]
            path.write_text(before + named + text)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """model_dir -> flags of a small training."""
    folder = tmp_path_factory.mktemp("job")
    records = write_tfrecords(folder / "records.tfrecords", make_records(256))
    return lambda model_dir: [*small_training(records, model_dir), "--nocompiled_kernels"]


def train(checkout, *flags, code=0):
    done = warm.run(["train.py", *flags], cwd=checkout)
    assert done.returncode == code, done.stderr
    return done


def given(number):
    return [f"--new_of_{config}={number}" for config in CONFIGS]


def test_a_new_field_has_a_flag_with_its_help_and_bounds(checkout):
    text = " ".join(train(checkout, "--help").stdout.split())
    for config in CONFIGS:
        assert (
            f"--new_of_{config}: It is new, up to 7. (default: '0.5') "
            "(a number in the range [0.0, 7.0])"
        ) in text
        done = train(checkout, f"--new_of_{config}=8", "--only_check_args", code=2)
        assert f"flag --new_of_{config}=8: 8.0 is not a number in the range" in done.stderr


def test_a_run_that_goes_on_logs_its_change_and_keeps_it(checkout, job, tmp_path):
    flags = job(tmp_path / "model")
    train(checkout, *flags, *given(2), "--max_steps=2")
    done = train(checkout, *flags, *given(3), "--max_steps=4")
    for config in CONFIGS:
        assert f"--new_of_{config}=3.0 (before: 2.0)" in done.stderr
    path = tmp_path / "model" / "model.json"
    kept = json.loads(path.read_text())
    assert kept["new_of_model"] == 3
    path.write_text(json.dumps({**kept, "new_of_model": 8}))
    done = train(checkout, *flags, *given(3), code=2)
    assert "new_of_model may not be 8" in done.stderr


@pytest.mark.parametrize("config", CONFIGS)
def test_ranks_with_other_values_of_a_new_field_are_refused(checkout, job, tmp_path, config):
    words = " ".join([*job(tmp_path), f"--new_of_{config}=$((1 + HOROVOD_RANK))"])
    ranks = [*LAUNCHERS["warm gloo"], 2, "sh", "-c", f"exec {warm.PYTHON} train.py {words}"]
    done = finish(started(ranks, cwd=checkout, env=warm.for_launchers(os.environ)))
    assert done.returncode != 0
    assert f"--new_of_{config}: rank 0 has 1.0, rank 1 has 2.0; start all ranks" in done.stdout


def test_each_setting_has_one_flag_and_is_declared_once():
    configs = (JobConfig, InputConfig, ModelConfig, OptimizerConfig)
    found = [x for config in configs for x in config.settings.values() if x.help]
    for one, other in itertools.combinations(found, 2):
        if one.flag == other.flag:  # --seed, for the model and for the order of records
            assert one._replace(kind=other.kind) == other
    assert {x.flag for x in found} < set(flags.SETTINGS)


def test_the_defaults_of_fields_are_plain_values():
    for config in (InputConfig, ModelConfig, OptimizerConfig):
        assert not any(isinstance(value, Setting) for value in config())
        assert config()._asdict() == config._field_defaults
