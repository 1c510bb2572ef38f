"""scripts/tune.py: what it refuses, what it recommends, and that the commands it prints run."""

import json
import os
import sys
import time
import types

import psutil
import pytest
import warm
from conftest import ROOT, SMALL_MODEL, finish, report, run_python, started, wait_until

# Loads tune.py with a clock of its own: a run takes the seconds of its start and of its training,
# and its rate is that of `rate(candidate)`.
_SIMULATED = """
import pathlib, sys
sys.path.insert(0, "scripts")
import tune
from tune_candidates import Machine
tune.FLAGS(["tune.py", "--budget_minutes={budget}", "--global_batch_sizes=2048"])
calls = []

class Simulated(tune.Tuner):
    clock = 3.0

    def now(self):
        return self.clock

    def run(self, candidate, rung, end):
        calls.append((candidate, rung))
        return super().run(candidate, rung, end)

    def train(self, candidate, steps, limit):
        (candidate, rung), given = calls[-1], dict(candidate.flags)
        rate = float({rate})
        training = steps * candidate.batch(1024) / (rate or 1e3)
        wanted = training + {start} * (1 + 0.4 * bool(candidate.processes))
        self.clock += min(wanted, limit)
        if not rate or wanted > limit:
            return {{}}, "took more"
        return {{
            "examples_per_second": rate, "training_seconds": training, "input_wait_share": 0.2,
            "host_cpu_utilization": 0.5,
        }}, ""

tuner = Simulated([], pathlib.Path("."), 1024, 60 * {budget})
machine = Machine(cores=4, gpus=0, mkl=False, allocator="/lib/allocator.so")
try:
    best, ratio, notes = tune._search(tuner, machine)
except tune.BadInput as error:
    sys.exit(str(error))
print(len(calls), "|", best.label(), "|", round(ratio, 2), "|", len({{c for c, _ in calls}}), "|",
      tuner.clock, "|", ",".join(dict.fromkeys(rung for _, rung in calls)), "|", *notes)
"""


def simulated(rate, budget=60, start=3):
    """The last line of a simulated search, in parts; a refusal is raised."""
    program = _SIMULATED.format(rate=rate, budget=budget, start=start)
    done = run_python("-c", program)
    if done.returncode:
        raise ValueError(done.stderr.splitlines()[-1])
    calls, label, ratio, tried, seconds, rungs, notes = done.stdout.split("|")
    return types.SimpleNamespace(
        calls=int(calls), label=label.strip(), ratio=float(ratio), tried=int(tried),
        seconds=float(seconds), rungs=rungs.strip().split(","), notes=notes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "--training_data_dir is missing; try tune.py -- --training_data_dir=data/train"),
        (["--training_data_dir=x", "--inter_op_threads=2"], "--inter_op_threads is set by tune.py"),
        (["--training_data_dir=x", "--dist_mode=2"], "--dist_mode is set by tune.py itself"),
        (["--training_data_dir=x", "--nouse_amp"], "--nouse_amp is set by tune.py itself"),
        (["--training_data_dir=x", "--batch_size=0"], "--batch_size=0 must be a number of records"),
        (["--training_data_dir=nowhere"], "train.py does not run with these flags: train.py: "),
    ],
)
def test_refuses_what_it_cannot_do_in_a_sentence(tmp_path, words, said):
    flags = f"--output_dir={tmp_path}/out", "--", *words
    text = run_python("scripts/tune.py", *flags, code=2).stderr
    assert said in text and "Traceback" not in text
    assert not (tmp_path / "out" / "tune.json").exists()


def test_what_it_prints_can_be_run(data, tmp_path):
    """The default runs once, and is then taken for the best."""
    program = """if True:
        import pathlib, sys
        sys.path.insert(0, "scripts")
        from tune import FLAGS, Candidate, Tuner, _conclude
        folder, sys.executable, *words = sys.argv[1:]
        FLAGS(["tune.py"])
        default, folder = Candidate(), pathlib.Path(folder)
        tuner = Tuner(words, folder, 20, Tuner.now() + 99)
        tuner.run(default, "default", tuner.end)
        _conclude(tuner, words, default, 1.0, [], folder)
    """
    words = [tmp_path, warm.PYTHON, *SMALL_MODEL, f"--training_data_dir={data}"]
    env = warm.for_launchers(os.environ)
    done = run_python("-c", program, *map(str, words), env=env, code=0)
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["command"] in done.stdout and found["why"] in done.stdout
    assert len(found["runs"]) == 1 and found["runs"][0]["examples_per_second"] > 0
    command = f"{found['command']} --model_dir={tmp_path}/model --max_steps=3"
    finish(started(["sh", "-c", command], env=env), code=0)
    trained = report(tmp_path / "model")
    assert (trained["global_step"], trained["global_batch_size"]) == (3, 20)


def test_a_budget_in_which_nothing_can_be_compared_is_refused(data, tmp_path):
    """And paths are read from where it is started: the default has run."""
    arguments = ["--budget_minutes=0.3", "--seconds=9", "--", *SMALL_MODEL]
    arguments.append(f"--training_data_dir={os.path.relpath(data, tmp_path)}")
    command = [sys.executable, ROOT / "scripts/tune.py", *arguments]
    said = finish(started(command, cwd=tmp_path), code=2).stdout
    assert "--budget_minutes" in said.splitlines()[-1] and "Traceback" not in said
    assert list((tmp_path / "tune").iterdir()) == []


RATE = """(100000 * (1.2 if given.get("intra_op_threads") == "4" else 1)
    * (1.5 if given.get("distribution") == "tower" else 1))"""


@pytest.mark.parametrize("start", [1, 10])
@pytest.mark.parametrize("budget", [3, 5, 15])
def test_the_budget_is_kept_and_reaches_the_last_rung(budget, start):
    found = simulated(RATE, budget, start)
    assert found.seconds <= 60 * budget
    assert found.rungs[-2:] == ["more devices", "final"]
    assert found.label.startswith("tower") and found.ratio >= 1.5
    all_of_them = simulated(RATE, 60, start).tried
    assert ("There was no time for " in found.notes) == (found.tried < all_of_them)


def test_a_signal_ends_what_runs(data, tmp_path):
    command = [
        sys.executable, "scripts/tune.py", f"--output_dir={tmp_path}", "--", *SMALL_MODEL,
        f"--training_data_dir={data}", "--global_batch_size=20",
    ]  # fmt: skip
    with started(command) as process:
        in_its_midst = lambda run: time.time() - run.create_time() > 1
        of_tune = lambda: list(filter(in_its_midst, psutil.Process(process.pid).children()))
        children = []
        assert wait_until(lambda: children.extend(of_tune()) or children, 180)
        child = children[0]
        process.terminate()
        assert process.wait(timeout=180) == 143
        assert not child.is_running()


def test_a_child_that_is_gone_does_not_spare_the_others():
    program = """if True:
        import subprocess, sys, psutil
        sys.path.insert(0, "scripts")
        import tune
        start, children, said = tune.programs.start, psutil.Process.children, []

        def begun(words, take):
            process = start(words, said.append)
            assert tune.programs.wait_until(lambda: said, 60)
            return process

        ended = subprocess.Popen(["true"])
        gone = psutil.Process(ended.pid)
        ended.wait()
        tune.programs.start = begun
        psutil.Process.children = lambda self, **how: [gone, *children(self, **how)]
        print(tune._run(["sh", "-c", "sleep 999 & echo $!; wait"], 0), *said)
    """
    *_, child = run_python("-c", program, code=0).stdout.split()
    assert wait_until(lambda: not psutil.pid_exists(int(child)), 60)


def test_tries_parsers_where_training_waits():
    rate = "1000 * (1.3 if given.get('num_parsers') == '4' else 1)"
    found = simulated(rate)
    assert "parsers 4, prefetched 16" in found.label


def test_finds_the_best_of_every_rung():
    rate = """(10000 * (1.2 if given.get("intra_op_threads") == "4" else 1)
        * (1.1 if candidate.preload else 1) * (1.1 if given.get("num_parallel_reads") == "8" else 1)
        * (1.5 if given.get("distribution") == "horovod" and candidate.processes == 4 else 1)
        * (2 if given.get("global_batch_size") == "2048" else 1))"""
    found = simulated(rate)
    assert found.label.startswith("horovod × 4, batch 2048, ")
    assert "reads 8" in found.label and "allocator" in found.label
    assert found.ratio == pytest.approx(1.1 * 1.1 * 1.5 * 2, rel=0.01)
    assert found.calls < 2 * found.tried  # the worst ran once


def test_a_run_that_was_killed_counts_in_no_mean():
    rate = """(130000 if given.get("intra_op_threads") != "4" else
        0 if rung == "threads" and calls.count(calls[-1]) == 2 else 150000)"""
    found = simulated(rate)
    assert "intra 4" in found.label and found.ratio == pytest.approx(15 / 13, abs=0.01)


def in_tune(text):
    """What a program prints that has tune.py's names, and those of its candidates."""
    program = f"""if True:
        import sys
        sys.path.insert(0, "scripts")
        from tune import Candidate, Run, _table
        from tune_candidates import Machine, devices, threads
        {text}
    """
    done = run_python("-c", program, code=0)
    return done.stdout


def test_the_table_shows_only_rates_that_occurred_and_what_they_cost():
    table = in_tune("""
        told = {"peak_rss_bytes": 0, "cost_per_million_examples": 0.005926}
        run = lambda rate: Run(Candidate(), "x", rate, told if rate else {})
        print(_table({Candidate(): [run(168764.0), run(0.0)]}, None))
        print(_table({Candidate(): [run(0.0)]}, None))
    """)
    assert "| local | 168,764 | 2, 1 failed |" in table and "| 0.00593 |" in table
    assert "| local | failed:  | 1, 1 failed |" in table and table.count("cost of a million") == 1


def test_candidates_are_those_of_the_article():
    """Its triple of threads where there is MKL, parameter servers beside Horovod, NCCL, and the
    CPUs of a host with GPUs."""
    said = in_tune("""
        host = Machine(8, 0, True, "")
        modes = ["mirrored", "horovod", "ps"]
        for found in threads(host), devices(host, modes, threads(host)[0], 1024), devices(
            Machine(8, 4, False, ""), modes, Candidate().with_flags(use_amp=True), 1024
        ):
            print(*(c.label() + ": " + " ".join(c.command()) for c in found), sep="\\n", end="|")
    """)
    of_threads, of_devices, of_gpus = (part.splitlines() for part in said.split("|")[:-1])
    for n in (8, 4):
        triple = f"local, inter {n}, intra {n}, KMP verbose,disabled, "
        (line, *_) = [line for line in of_threads if line.startswith(triple)]
        assert f"--omp_num_threads={n}" in line
    horovod = [line for line in of_devices if line.startswith("horovod × 8")]
    assert len(horovod) == 1 and "intra_op_threads=1" in horovod[0]
    assert all("--omp_num_threads=1" in line for line in horovod)
    (servers, *_) = [line for line in of_devices if line.startswith("ps × 4")]
    assert "scripts/local_cluster.py --num_workers=3 -- --distribution=ps" in servers
    assert "--omp_num_threads=2" in servers
    assert any("--cross_device_ops=nccl" in line for line in of_gpus)
    on_cpus = [line for line in of_gpus if "CUDA_VISIBLE_DEVICES=-1 " in line]
    assert {line.split(",")[0].split(" ×")[0] for line in on_cpus} == {
        "local", "mirrored", "horovod", "ps",
    }  # fmt: skip
    assert not any("nccl" in line or "use_amp" in line for line in on_cpus)


@pytest.mark.parametrize(
    "rate",
    [
        "1000 + 10 * len(given)",  # hardly faster
        # Twice as fast on its rung, and slower when it runs in turn with the default: chance.
        "900 if rung == 'final' and given else 2000 if given.get('inter_op_threads') else 1000",
        "0 if given or candidate.preload else 1000",  # what fails is passed over
    ],
)
def test_the_default_is_recommended_where_nothing_is_faster(rate):
    found = simulated(rate)
    assert (found.label, found.ratio) == ("local", 1.0)
