"""scripts/tune.py: what it refuses, what it recommends, and that what it prints can be run."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, SMALL_MODEL, make_records, started, write_tfrecords

# Loads tune.py; its runs take no time, and their rates are those of `rate(candidate)`.
_SIMULATED = """
import pathlib, runpy, sys
from absl import flags
tune = runpy.run_path("scripts/tune.py")
flags.FLAGS(["tune.py", "--budget_minutes=5", "--global_batch_sizes=2048"])
calls = []

class Simulated(tune["Tuner"]):
    def run(self, candidate, rung, seconds):
        calls.append(candidate)
        given = dict(candidate.flags)
        value = {rate}
        report = {{"input_wait_share": 0.2, "host_cpu_utilization": 0.5}}
        found = tune["Run"](candidate, rung, float(value), report)
        self.runs.append(found)
        return found

tuner = Simulated([], pathlib.Path("."))
tuner.batch = 1024
machine = tune["Machine"](cores=4, gpus=0, mkl=False, allocator="/lib/allocator.so")
tuner.run(tune["Candidate"](), "default", 0)
best, notes = tune["_climb"](tuner, machine)
best, ratio = tune["_compare"](tuner, best)
print(len(calls), "|", best.label(), "|", round(ratio, 2), "|", len(set(calls)))
"""


def tune(*arguments, timeout=120):
    with started([sys.executable, "scripts/tune.py", *arguments]) as process:
        said, _ = process.communicate(timeout=timeout)
        return process.returncode, said


def test_reads_paths_from_where_it_is_started(data, tmp_path):
    arguments = ["--budget_minutes=0.1", "--seconds=0.5", "--modes=", "--", *SMALL_MODEL]
    arguments.append(f"--training_data_dir={os.path.relpath(data, tmp_path)}")
    command = [sys.executable, ROOT / "scripts/tune.py", *arguments]
    with started(command, cwd=tmp_path) as process:
        said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert (tmp_path / "tune" / "tune.json").exists()


def simulated(rate):
    done = subprocess.run(
        [sys.executable, "-c", _SIMULATED.format(rate=rate)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls, label, ratio, tried = done.stdout.split("|")
    return int(calls), label.strip(), float(ratio), int(tried)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    write_tfrecords(folder / "train.tfrecords", make_records(400))
    return folder


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "--training_data_dir is missing: tune.py -- --training_data_dir=data/train"),
        (["--training_data_dir=x", "--inter_op_threads=2"], "--inter_op_threads is set by tune.py"),
        (["--training_data_dir=x", "--nouse_amp"], "--nouse_amp is set by tune.py itself"),
        (["--training_data_dir=x", "--batch_size=0"], "--batch_size=0 is no number of records"),
        (["--training_data_dir=nowhere"], "train.py does not run with these flags: train.py: "),
    ],
)
def test_refuses_what_it_cannot_do_in_a_sentence(tmp_path, words, said):
    code, text = tune(f"--output_dir={tmp_path}/out", "--", *words)
    assert code == 2
    assert said in text and "Traceback" not in text
    assert not (tmp_path / "out" / "tune.json").exists()


def test_what_it_prints_can_be_run_and_the_budget_is_kept(data, tmp_path):
    code, text = tune(
        "--budget_minutes=0.4", "--seconds=0.5", f"--output_dir={tmp_path}", "--", *SMALL_MODEL,
        f"--training_data_dir={data}", "--global_batch_size=20",
    )  # fmt: skip
    assert code == 0, text
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["command"] in text and found["why"] in text
    assert "The time was up before all was tried" in text
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert len(found["runs"]) > 2 and all(r["examples_per_second"] > 0 for r in found["runs"])
    assert found["times_the_default"] >= 1
    done = subprocess.run(
        f"{found['command']} --model_dir={tmp_path}/model --max_steps=3", shell=True, cwd=ROOT,
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert (report["global_step"], report["global_batch_size"]) == (3, 20)


def test_a_signal_ends_what_runs(data, tmp_path):
    command = [
        sys.executable, "scripts/tune.py", f"--output_dir={tmp_path}", "--", *SMALL_MODEL,
        f"--training_data_dir={data}", "--global_batch_size=20",
    ]  # fmt: skip
    with started(command) as process:
        child, deadline = None, time.time() + 30
        while child is None and time.time() < deadline:
            time.sleep(0.1)
            in_its_midst = lambda run: time.time() - run.create_time() > 1
            child = next(filter(in_its_midst, psutil.Process(process.pid).children()), None)
        process.terminate()
        assert process.wait(timeout=20) == 143
        assert not child.is_running()


def test_finds_the_best_of_every_rung():
    rate = """(1000 * (1.2 if given.get("intra_op_threads") == "4" else 1)
        * (1.1 if candidate.preload else 1) * (1.1 if given.get("num_parallel_reads") == "8" else 1)
        * (1.5 if given.get("distribution") == "horovod" and candidate.processes == 4 else 1)
        * (2 if given.get("global_batch_size") == "2048" else 1))"""
    calls, label, ratio, tried = simulated(rate)
    assert label.startswith("horovod × 4, batch 2048, ")
    assert "reads 8" in label and "allocator" in label
    assert ratio == pytest.approx(1.1 * 1.1 * 1.5 * 2, rel=0.01)
    assert calls < 2 * tried  # the worst ran once


def test_what_is_hardly_faster_than_the_default_is_not_recommended():
    assert simulated("1000 + 10 * len(given)")[1:3] == ("local", 1.0)


def test_a_best_that_was_chance_falls_back_to_the_default():
    # Twice as fast on its rung, and slower when it runs in turn with the default.
    rate = "900 if rung == 'final' and given else 2000 if given.get('inter_op_threads') else 1000"
    assert simulated(rate)[1:3] == ("local", 1.0)


def test_what_fails_is_passed_over():
    assert simulated("0 if given or candidate.preload else 1000")[1:3] == ("local", 1.0)
