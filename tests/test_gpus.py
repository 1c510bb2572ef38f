"""On a machine with GPUs: each mode trains the model that the CPU trains. Elsewhere all skip."""

import functools
import os

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    losses,
    make_records,
    report,
    run_horovod,
    run_python,
    run_train,
    write_tfrecords,
)
from mode_steps import check_same, weights

from deepfm.modes.common import devices

GPUS = len(devices.gpus())
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="TensorFlow finds no GPU"),
    pytest.mark.timeout(600),  # a new kind of card compiles its code at the first start
]
ON_CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
FLAGS = (
    *SMALL_MODEL, "--shuffle_buffer=0", "--num_parallel_reads=1", "--global_batch_size=24",
    "--log_steps=1", "--dropout=0", "--embedding_init_stddev=0.3",
)  # fmt: skip
OPTIMIZERS = {
    "sgd": ("--optimizer=sgd", "--learning_rate=0.1", "--l2_reg=0.01", "--clip_norm=0.5"),
    "cowclip": ("--optimizer=sgd", "--learning_rate=0.1", "--cowclip_ratio=0.01"),
    "momentum": ("--optimizer=momentum", "--learning_rate=0.1"),
    "adagrad": ("--optimizer=adagrad", "--learning_rate=0.1"),
    "ftrl": ("--optimizer=ftrl", "--learning_rate=0.1"),
    "adam": ("--optimizer=adam", "--learning_rate=0.01", "--l2_reg=0.001", "--batch_norm"),
    "eager adam": ("--optimizer=adam", "--lazy_updates=false", "--l2_scope=table"),
    "adam, L2 of the batch": ("--optimizer=adam", "--l2_scope=batch", "--learning_rate=0.01"),
}  # fmt: skip
MODES = {
    "local": ("--distribution=local",),
    "tower": ("--distribution=tower",),
    "mirrored": ("--distribution=mirrored",),
    "mirrored, without NCCL": (
        "--distribution=mirrored", "--cross_device_ops=hierarchical_copy",
    ),
}  # fmt: skip
# Those of local, each; of the other modes, two.
CASES = [("local", name) for name in OPTIMIZERS]
CASES += [(mode, name) for mode in list(MODES)[1:] for name in ("sgd", "adam")]
# train.py with two replicas, each of which has half of the first card.
TWO_OF_ONE = """
import sys
from deepfm.runtime.tf import tf
from deepfm import __main__ as train
from deepfm.modes.common import devices
from deepfm.runtime import program
cards = devices.gpus()
parts = [tf.config.experimental.VirtualDeviceConfiguration(memory_limit=2048)] * 2
tf.config.experimental.set_virtual_device_configuration(cards[0], parts)
whole, devices.gpus = devices.session_config, lambda: cards[:1] * 2
def of_parts(*words, **more):
    config = whole(*words, **more)
    config.gpu_options.visible_device_list = "0"
    config.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[2048, 2048])
    return config
devices.session_config = of_parts
sys.exit(program.run(train.main, train.before_tensorflow))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    return write_tfrecords(folder / "train.tfrecords", make_records(24 * 20 + 14))


@pytest.fixture(scope="module")
def on_cpu(data, tmp_path_factory):
    """name of OPTIMIZERS -> (what training on the CPU said, its folder)."""

    def run(name):
        folder = tmp_path_factory.mktemp("cpu")
        flags = *FLAGS, *OPTIMIZERS[name], f"--training_data_dir={data}", f"--model_dir={folder}"
        return run_train(*flags, env=ON_CPU, fresh=True, code=0).stderr, folder

    return functools.lru_cache(maxsize=None)(run)


def check(done, folder, expected):
    said, wanted = expected
    assert done.returncode == 0, done.stderr
    assert len(losses(said)) == 21
    np.testing.assert_allclose(losses(done.stderr), losses(said), atol=1e-4)
    check_same(folder, weights(wanted), atol=1e-4)


@pytest.mark.parametrize("mode, name", CASES)
def test_gpus_train_the_model_of_the_cpu(data, on_cpu, tmp_path, mode, name):
    if 24 % GPUS:
        pytest.skip(f"batches of 24 are not shared evenly by {GPUS} GPUs")
    flags = *FLAGS, *MODES[mode], *OPTIMIZERS[name], f"--training_data_dir={data}"
    done = run_train(
        *flags, f"--model_dir={tmp_path}", f"--num_gpus={GPUS}", fresh=True, timeout=500
    )
    assert "; using /gpu:0" in done.stderr
    check(done, tmp_path, on_cpu(name))


@pytest.mark.parametrize("mode", ["tower", "mirrored"])
def test_two_replicas_of_one_gpu_train_the_model_of_the_cpu(data, on_cpu, tmp_path, mode):
    flags = *FLAGS, *OPTIMIZERS["adam"], f"--training_data_dir={data}", f"--model_dir={tmp_path}"
    where = f"--distribution={mode}", "--replicas_per_process=2"
    if mode == "mirrored":  # NCCL wants a card for each
        where += ("--cross_device_ops=hierarchical_copy",)
    done = run_python("-c", TWO_OF_ONE, *flags, *where, fresh=True, timeout=500)
    check(done, tmp_path, on_cpu("adam"))


def test_ranks_of_horovod_train_the_model_of_the_cpu(data, on_cpu, tmp_path):
    pytest.importorskip("horovod")
    if GPUS > 1:
        pytest.skip("their shares of the file make other batches")
    flags = *FLAGS, *OPTIMIZERS["adam"], f"--training_data_dir={data}", f"--model_dir={tmp_path}"
    done = run_horovod(GPUS, *flags, "--distribution=horovod", fresh=True, timeout=500)
    check(done, tmp_path, on_cpu("adam"))


def test_what_the_cpu_has_trained_is_evaluated_and_applied_alike(data, on_cpu, tmp_path):
    _, folder = on_cpu("adam")
    found = []
    for env in (None, ON_CPU):
        done = run_train(
            "--task_type=eval", f"--val_data_dir={data}", f"--model_dir={folder}", env=env, code=0,
            fresh=True, timeout=500,
        )  # fmt: skip
        assert ("; using /gpu:0" in done.stderr) == (env is None)
        path = tmp_path / f"{env is None}.txt"
        run_train(
            "--task_type=infer", f"--infer_data_dir={data}", f"--model_dir={folder}",
            f"--predictions_file={path}", env=env, code=0, fresh=True, timeout=500,
        )  # fmt: skip
        found.append((report(folder, "eval")["eval"], np.loadtxt(path)))
    (on_gpu, mine), (wanted, theirs) = found
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for name in ("auc", "log_loss"):
        assert on_gpu[name] == pytest.approx(wanted[name], abs=1e-5)


def test_mixed_precision_trains_on_tensor_cores(data, on_cpu, tmp_path):
    flags = *FLAGS, *OPTIMIZERS["adam"], f"--training_data_dir={data}", f"--model_dir={tmp_path}"
    done = run_train(*flags, "--use_amp", fresh=True, timeout=500, code=0)
    if "without a GPU with tensor cores" in done.stderr:
        pytest.skip("this card has none")
    wanted = losses(on_cpu("adam")[0])
    found = losses(done.stderr)
    assert found != wanted
    np.testing.assert_allclose(found, wanted, atol=0.02)
