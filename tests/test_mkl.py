"""TensorFlow built with MKL, of .venv-mkl: its results, and the settings that OpenMP prints."""

import os
import sys

import pytest
from conftest import ROOT, finish, small_training, started
from mode_steps import check_same, weights

from deepfm.runtime.utilization import _RANKS, cores

PYTHON = ROOT / ".venv-mkl" / "bin" / "python"
pytestmark = [
    pytest.mark.table,
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup.sh --tests makes .venv-mkl"),
]
CORES = int(cores())


def train(words, data, folder, *flags, **environment):
    """What train.py says, started by `words`; OpenMP's settings are printed."""
    job = small_training(data, folder, "--nocompiled_kernels", "--deep_layers=256,64", *flags)
    ours = ("OMP_", "KMP_", *_RANKS)
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env.update({"KMP_SETTINGS": "1", **environment})
    return finish(started([*words, "train.py", *job], env=env), timeout=100, code=0).stdout


def settings(said):
    """The OMP_NUM_THREADS and KMP_AFFINITY in effect, as OpenMP prints them, of each process."""
    lines = [line.rpartition("OMP_NUM_THREADS=")[2] for line in said.splitlines()]
    threads = [line.strip("'") for line in lines if line[:1] == "'"]
    lines = [line.rpartition("KMP_AFFINITY=")[2] for line in said.splitlines()]
    return threads, [line.strip("'") for line in lines if line[:1] == "'"]


def test_weights_are_those_of_a_build_without_mkl(data, tmp_path):
    train([sys.executable], data, tmp_path / "plain")
    said = train([PYTHON], data, tmp_path / "mkl")
    assert weights(tmp_path / "mkl")["global_step"] == 10
    check_same(tmp_path / "mkl", tmp_path / "plain", atol=1e-5, rtol=1e-5)
    assert settings(said) == ([str(CORES)], ["noverbose,warnings,disabled"])


@pytest.mark.parametrize(
    "flags, environment, threads, affinity",
    [
        (("--omp_num_threads=3", "--kmp_affinity=verbose,disabled"), {}, 3, "verbose,warnings,dis"),
        ((), {"KMP_AFFINITY": "granularity=fine,compact,1,0"}, CORES, "noverbose,warnings,disable"),
        ((), {"OMP_NUM_THREADS": "5"}, 5, "noverbose,warnings,disabled"),
    ],
)
def test_openmp_prints_the_settings_that_were_given(
    data, tmp_path, flags, environment, threads, affinity
):
    said = train([PYTHON], data, tmp_path, *flags, **environment)
    ((found,), (bound,)) = settings(said)
    assert found == str(threads) and bound.startswith(affinity)


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_ranks_share_the_cores(data, tmp_path, launcher):
    words = [ROOT / ".venv/bin/horovodrun", "--gloo", "-np", 2, PYTHON]
    if launcher == "mpi":
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 2, "-x", "KMP_SETTINGS"]
        words += ["-bind-to", "none", PYTHON]
    threads, _ = settings(train(words, data, tmp_path, "--distribution=horovod"))
    assert threads == 2 * [str(max(CORES // 2, 1))]


def test_a_given_affinity_leaves_the_cores_that_are_counted(data, tmp_path):
    """The thread that loads TensorFlow may then run on one core only."""
    affinity = "granularity=fine,verbose,compact,1,0"
    program = "import deepfm.__main__, os; from deepfm.runtime.utilization import cores, openmp;"
    program += f"os.environ.update(openmp(0, {affinity!r}, 0)); import tensorflow;"
    program += "print(len(os.sched_getaffinity(0)), int(cores()))"
    done = finish(started([PYTHON, "-W", "ignore", "-c", program]))
    assert done.stdout.split()[-2:] == ["1", str(CORES)], done.stdout
