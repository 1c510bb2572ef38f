"""The facts that a mode derives from flags and the environment."""

import json
import os
import re

import pytest
from conftest import job_of, mode_of, run_python

from deepfm import estimators, modes
from deepfm.config import ModeFlags, ModelConfig
from deepfm.errors import BadInput
from deepfm.modes.common.mode import Mode

THREADS = """
import sys
import time
import psutil
sys.path.insert(0, ".")
from deepfm import modes
from deepfm.config import ModeFlags
modes.make("local", ModeFlags(intra_op_threads=1, inter_op_threads=int(sys.argv[1])))
from deepfm.runtime.tf import tf
with tf.compat.v1.Session() as session:  # one with TensorFlow's defaults, as checks of data are
    session.run(tf.constant(1) + 1)
    counts = []
    for _ in range(20):  # on a busy machine a thread that is about to end may still be there
        counts.append(psutil.Process().num_threads())
        time.sleep(0.1)
    print(min(counts))
"""


def test_the_threads_are_those_that_the_flags_ask_for_in_every_session():
    def count(inter):
        return int(run_python("-c", THREADS, inter, code=0).stdout)

    assert count(9) - count(1) == 8


def test_auto_is_local_by_default(monkeypatch):
    for name in ("TF_CONFIG", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert modes.make("auto", ModeFlags()).name == "local"


@pytest.mark.parametrize("before", [None, '{"environment": "cloud"}'])
def test_an_estimator_leaves_the_environment_as_it_was(tmp_path, monkeypatch, before):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if before:
        monkeypatch.setenv("TF_CONFIG", before)
    mode = modes.make("local", ModeFlags())
    job = job_of(model_dir=str(tmp_path), distribution=mode)
    with estimators.trained(estimators.Model(job, ModelConfig(4, 50))):
        assert os.environ.get("TF_CONFIG") == before


def test_auto_says_what_a_cluster_without_servers_lacks(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(BadInput, match="a cluster without 'ps': add parameter servers to it"):
        modes.make("auto", ModeFlags())


def test_ps_without_a_cluster_says_how_to_start_one(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(BadInput, match="scripts/local_cluster.py starts one on this machine"):
        modes.make("ps", ModeFlags())


@pytest.mark.parametrize(
    "given, replicas, said",
    [
        (
            ("cross_device_ops",),
            0,
            "--cross_device_ops has no effect without --distribution=mirrored",
        ),
        ((), 2, "--replicas_per_process=2 has no effect with --distribution=local"),
        ((), 1, None),
    ],
)
def test_flags_of_other_modes_are_said(caplog, given, replicas, said):
    Mode().warn_of_flags(given, replicas)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_replicas_that_nobody_asked_for_by_number_are_no_idle_flag(caplog):
    mode_of(replicas_per_process=3).warn_of_flags((), 0)
    assert not caplog.records


def test_nccl_without_gpus_is_refused_before_anything_is_read():
    with pytest.raises(BadInput, match="nccl needs GPUs.*try --cross_device_ops=reduction_to_one"):
        modes.make("mirrored", ModeFlags(cross_device_ops="nccl"))


def test_a_gpu_that_tensorflow_cannot_use_is_said_once_and_refused_if_asked_for(
    tmp_path, monkeypatch, caplog
):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: Tesla T4 (UUID: GPU-1-2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    modes.make("local", ModeFlags())
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    why = r"this host has a GPU \(Tesla T4\), but .*docs/gpu.md"
    assert re.match(f"Using the CPU: {why}", said)
    with pytest.raises(BadInput, match=f"^--num_gpus=1, but TensorFlow finds 0 GPUs.*: {why}"):
        modes.make("local", ModeFlags(num_gpus=1))
    caplog.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # the user wants none
    modes.make("local", ModeFlags())
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
