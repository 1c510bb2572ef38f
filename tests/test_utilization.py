"""How busy processors are, what limits a run, and what is reported about it."""

import os
import time
import types

import pytest
from conftest import job_of, mode_of, report, run_python, small_training, wait_until

from deepfm.config import InputConfig, OptimizerConfig
from deepfm.runtime import utilization


def verdict(
    num_processes=1, use_amp=False, others=0.0, faster="--cache=memory", pipe=False, **shares
):
    run = dict(input_wait_share=0.02, host_cpu_utilization=0.97, gpu_utilization=None)
    mode, optimizer = mode_of(size=num_processes), OptimizerConfig(use_amp=use_amp)
    job = job_of(distribution=mode, optimizer=optimizer, input=InputConfig(1024))
    return utilization.verdict(job, faster, pipe, others, **{**run, **shares})


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "Compute-bound (input waits 2 %, CPU 97 %): the step is the limit; "
         "try --batch_size=2048, or more hosts."),
        ({"others": 0.5}, "CPU 97 %, of which other programs use 50 %)"),
        ({"host_cpu_utilization": 0.3, "gpu_utilization": 0.9}, "Compute-bound (input waits 2 %, "
         "CPU 30 %, GPU 90 %): the step is the limit; try --use_amp (large layers, tensor cores), "
         "--batch_size=2048, or more hosts."),
        ({"gpu_utilization": 0.9, "use_amp": True}, "the limit; try --batch_size=2048, or more"),
        ({"host_cpu_utilization": 0.89}, "Bound by one process"),
        # A GPU that is idle: the input first, then a larger batch, then fewer GPUs or none.
        ({"gpu_utilization": 0.2}, "Idle GPU (input waits 2 %, CPU 97 %, GPU 20 %): reading keeps "
         "up, and the steps leave it idle; try --batch_size=2048, then fewer GPUs or CPUs alone"),
        ({"gpu_utilization": 0.0, "num_processes": 4}, "then fewer GPUs or CPUs alone"),
        ({"gpu_utilization": 0.2, "input_wait_share": 0.3, "host_cpu_utilization": 0.5},
         "Input-bound (input waits 30 %, CPU 50 %, GPU 20 %): reading is the limit; try --cache"),
        ({"gpu_utilization": 0.2, "input_wait_share": 0.3}, "CPU-bound (input waits 30 %, CPU 97 "
         "%, GPU 20 %): reading and the steps share its cores; try a host with more cores for"),
        ({"input_wait_share": 0.3, "host_cpu_utilization": 0.6}, "Input-bound (input waits 30 %, "
         "CPU 60 %): reading is the limit; try --cache=memory."),
        ({"input_wait_share": 0.3, "host_cpu_utilization": 0.6, "faster": None},
         "try --num_parallel_reads=2, or a faster disk."),
        ({"input_wait_share": 0.3, "host_cpu_utilization": 0.6, "faster": None, "pipe": True},
         "or --pipe_mode=false."),
        # Who has no time to read waits for records, and faster reading would not help.
        ({"input_wait_share": 0.3}, "CPU-bound (input waits 30 %, CPU 97 %): reading and the steps "
         "share its cores; try more hosts."),
        ({"input_wait_share": 0.3, "others": 0.66}, "try a host without other programs."),
        ({"others": 0.5}, "try --batch_size=2048, or a host without other programs."),
        ({"host_cpu_utilization": 0.5, "num_processes": 4}, "Communication-bound (input waits 2 %, "
         "CPU 50 %; means of 4 processes)"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_limit_and_a_flag(changes, sentence):
    assert sentence in verdict(**changes)


def test_hosts_count_in_the_price_of_a_million_examples():
    found, said = utilization.cost(3.6, 4, 100_000)  # .001 a second, and 10 seconds
    assert found == {"hosts": 4, "cost_per_million_examples": pytest.approx(0.04)}
    assert said == " A million examples cost 0.04 on 4 host(s) at 3.6 per hour."
    assert utilization.cost(0.0, 4, 100_000) == ({"hosts": 4}, "")


@pytest.fixture
def mkl(tmp_path, monkeypatch):
    """A TensorFlow whose library asks for Intel's OpenMP, and an environment without settings."""
    library = tmp_path / "libtensorflow_framework.so.1"
    library.write_bytes(b"\x7fELF librt.so.1\0libiomp5.so\0")
    found = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(utilization.importlib.util, "find_spec", lambda name: found)
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", *utilization._RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(utilization, "cores", lambda: 8.0)


@pytest.mark.parametrize(
    "name", [None, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "HOROVOD_LOCAL_SIZE"]
)
def test_the_ranks_of_a_host_share_its_cores_in_openmp(mkl, monkeypatch, name):
    if name:
        monkeypatch.setenv(name, "4")
    threads = "2" if name else "8"
    expected = {"OMP_NUM_THREADS": threads, "KMP_AFFINITY": "disabled"}
    assert utilization.openmp(0, None, 0) == expected


def test_settings_of_openmp_that_are_given_stay(mkl, monkeypatch):
    asked = {"OMP_NUM_THREADS": "3", "KMP_AFFINITY": "verbose,disabled", "KMP_SETTINGS": "1"}
    assert utilization.openmp(3, "verbose,disabled", 0) == asked
    assert utilization.openmp(0, None, 2)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert utilization.openmp(0, None, 0) == {"KMP_AFFINITY": "disabled"}


def test_a_build_without_mkl_leaves_openmp_alone():
    assert not utilization.has_mkl()
    assert utilization.openmp(0, None, 0) == {}


def test_busy_seconds_count_what_this_process_burns():
    before, own = utilization.busy_seconds(), time.process_time()
    while time.process_time() - own < 1:  # of which the host of a virtual machine may take some
        pass
    assert utilization.busy_seconds() - before > 0.4


def test_the_share_in_use_is_that_of_the_allowed_cores():
    cores = utilization.cores()
    samples = [(0.0, 10.0), (1.0, 10.0 + cores), (2.0, 10.0 + cores), (3.0, 10.0 + 2 * cores)]
    assert utilization.share_in_use(samples, 0.5) == pytest.approx(0.5)
    assert utilization.share_in_use(samples, 2.5) is None


def tell(folder, text, before=""):
    """Puts a program named nvidia-smi into a folder that writes a text; if it shall write another
    one before, again and again."""
    program = folder / "nvidia-smi"
    loop = f"while :; do sleep 0.1; printf '{text}'; done" if before else "exec sleep 60"
    program.write_text(f"#!/bin/sh\nprintf '{before or text}'\n[ $1 = --list-gpus ] || {loop}\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    "text, share",
    [("50\\n100\\n", 0.75), ("[N/A]\\n40\\n", 0.4), ("NVIDIA-SMI has failed\\n", None)],
)
def test_gpus_are_read_where_nvidia_smi_answers(tmp_path, monkeypatch, text, share):
    monkeypatch.setenv("PATH", tell(tmp_path, text))
    gpus = utilization.Gpus()
    with gpus.watched():
        assert wait_until(lambda: gpus.share() == share, 60)


# train.py whose steps begin, and end, only when GPUs have been looked at before, and during them.
LOOKED_AT = """
import runpy, sys, time
from deepfm.runtime import throughput, utilization
hook = throughput.ProgressHook
begin, after_step = hook.after_create_session, hook.after_run
def begin_late(self, *args):
    while not self.gpus.share():
        time.sleep(0.01)
    begin(self, *args)
def go_on_late(self, *args):
    after_step(self, *args)
    last = self._now() + utilization.GPU_LOOK
    while self.steps == 1000 and self.gpus.share(last) is None:
        time.sleep(0.01)
hook.after_create_session, hook.after_run = begin_late, go_on_late
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_run_tells_what_limits_it_and_leaves_no_process(data, tmp_path):
    more = "--batch_size=16", "--num_epochs=50", "--log_steps=2000", "--price_per_hour=3.6"
    # What is seen before the steps does not count.
    env = {**os.environ, "PATH": tell(tmp_path, "30\\n", before="0\\n0\\n")}
    flags = small_training(data, tmp_path / "model", *more)
    done = run_python("-c", LOOKED_AT, *flags, env=env, code=0)
    found = report(tmp_path / "model")
    assert 0 < found["host_cpu_utilization"] <= 1
    assert found["gpu_utilization"] == 0.3
    million = 1000 / found["examples_per_second"]  # at .001 a second
    assert found["cost_per_million_examples"] == pytest.approx(million) and found["hosts"] == 1
    assert f" A million examples cost {million:.3g} on 1 host(s)" in found["verdict"]
    assert f" {found['verdict']}\n" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if " step 2000 " in line]
    assert " CPU " in line and " GPU 30 %" in line
