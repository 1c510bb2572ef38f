"""What all programs in scripts/ have in common, and that none overwrites what it did not make."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import programs
import pytest
from conftest import ROOT, run_python, wait_until

PATHS = [*ROOT.glob("scripts/**/*.[ps][yh]"), ROOT / "tests/sanitize.sh"]
SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for path in PATHS
    if (path.suffix == ".sh" or "__main__" in path.read_text())
    # Programs start these.
    and path.name not in ("spark_on_sagemaker.py", "convert_on_sagemaker.sh", "host.sh")
)  # fmt: skip
# Arguments of test.sh are pytest's; argparse asks for what is missing first.
WRONG = {
    "scripts/test.sh": "tests/no_such_test.py",
    "scripts/benchmarks/peers.py": "lunch",
}
SITE = pathlib.Path(pytest.__file__).parent.parent


def command(script, *words):
    interpreter = "bash" if script.endswith(".sh") else sys.executable
    return [interpreter, script, *words]


def start(words, folder):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # setup.sh can do nothing without a cache.
    env = dict(os.environ, DEEPFM_CACHE="/dev/null/cache")
    return subprocess.Popen(words, cwd=folder, env=env, text=True, **pipes)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """{(script, argument): (exit code, standard output, standard error)}, all side by side."""
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")  # which other tests write to meanwhile
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=ignored)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/sanitize.sh", folder / "tests")
    for name in ("deepfm", "data_tools"):
        (folder / name).symlink_to(ROOT / name)
    running = {
        (script, argument): start(command(script, argument), folder)
        for script in SCRIPTS
        for argument in ("--help", WRONG.get(script, "--wrong"))
    }
    found = {}
    for key, process in running.items():
        out, said = process.communicate(timeout=180)
        found[key] = process.returncode, out, said
    made = {path.name for path in folder.iterdir()} - {"deepfm", "data_tools", "scripts", "tests"}
    assert not made
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_prints_and_a_wrong_argument_is_named_and_neither_does_anything(asked, script):
    code, out, said = asked[script, "--help"]
    assert (code, said) == (0, "") and len(out.splitlines()) > 2
    wrong = WRONG.get(script, "--wrong")
    code, out, said = asked[script, wrong]
    assert (code, out) == (2, "")
    assert wrong.partition("=")[0].lstrip("-") in said.splitlines()[-1]
    assert "Traceback" not in said


class Checkout:
    """A copy of quickstart.sh, with a set-up that does nothing and a Python that fails."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "quickstart_output"
        for name, text in (("scripts/setup.sh", "exit 0"), (".venv/bin/python", "exit 7")):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
        for name in ("model/checkpoint", "train/dataset.json", "notes.txt", "other/model.json"):
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_text("x")

    def run(self, *words):
        done = subprocess.run(
            ["bash", "scripts/quickstart.sh", *words],
            cwd=self.folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        files = (p for p in self.out.rglob("*") if p.is_file())
        return done, sorted(str(path.relative_to(self.out)) for path in files)


@pytest.mark.parametrize("words", [["--help"], ["many"], ["0"], ["1e6"], ["100", "200"]])
def test_quickstart_keeps_what_an_earlier_run_left_until_its_arguments_are_right(tmp_path, words):
    done, left = Checkout(tmp_path).run(*words)
    assert done.returncode == (0 if words == ["--help"] else 2)
    assert len(left) == 4


def test_quickstart_replaces_only_what_it_makes(tmp_path):
    done, left = Checkout(tmp_path).run("100")
    assert done.returncode == 7
    assert left == ["notes.txt", "other/model.json"]


PROGRAMS = [
    ["train.py", "--help"], ["-m", "data_tools.prepare"], ["-m", "deepfm.kernels"],
    *([name] for name in SCRIPTS if name[-3:] == ".py" and "programs" in (ROOT / name).read_text()),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[-1])
def test_a_python_without_the_packages_is_told_what_to_run(program):
    done = run_python("-S", *program, fresh=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "has no absl; run scripts/setup.sh, then start this program with .venv/" in done.stderr


@pytest.mark.parametrize(
    "program, version, said",
    [
        (["train.py"], None, "has no TensorFlow 1.15"),
        (["train.py"], "2.1.0", "has TensorFlow 2.1.0, not 1.15 or 2.15"),
    ],
)
def test_another_tensorflow_is_told_what_to_run(tmp_path, program, version, said):
    (tmp_path / "absl").symlink_to(SITE / "absl")
    (tmp_path / "numpy").symlink_to(SITE / "numpy")
    if version:
        (tmp_path / "tensorflow").mkdir()
        (tmp_path / "tensorflow" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    done = run_python("-S", *program, "--model_dir=x", fresh=True, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{said}; run scripts/setup.sh, then start this program with .venv/bin/" in done.stderr


@pytest.mark.parametrize(
    "earlier, training, said",
    [
        (None, "data", "/model would be replaced, but no job of this program has written it"),
        ("algo-1.log", "model/checkpoint", "/model, which a job replaces; give another --output"),
        ("algo-1.log", "model", "/model, which a job replaces; give another --output_dir"),
    ],
)
def test_a_job_replaces_no_data_and_no_model_of_others(tmp_path, earlier, training, said):
    for name in ("model/checkpoint", "data", *([earlier] if earlier else [])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    words = [f"--output_dir={tmp_path}", f"--training={tmp_path}/{training}"]
    done = run_python("scripts/sagemaker/local_job.py", *words, fresh=True)
    if "toolkit is not installed" in done.stderr:
        pytest.skip("scripts/setup.sh --sagemaker has not run")
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "model" / "checkpoint").exists()


AT_THE_END = """
import pathlib, sys
sys.path[:0] = ["scripts", "scripts/sagemaker"]
import local_job
hosts, output = map(pathlib.Path, sys.argv[1:])
local_job._OVER.set()
local_job._feed(hosts / "gone", "training", [])
local_job._gather(sorted(hosts.iterdir()), output)
"""


def test_a_local_job_ends_with_the_first_failure_and_without_the_fifos_that_are_gone(tmp_path):
    for host, moment in (("algo-1", 2), ("algo-2", 1)):
        failure = tmp_path / "hosts" / host / "output" / "failure"
        failure.parent.mkdir(parents=True)
        failure.write_text(host)
        os.utime(str(failure), (moment, moment))
    words = ["-c", AT_THE_END, tmp_path / "hosts", tmp_path]
    assert run_python(*words, fresh=True, code=0).stderr == ""
    assert (tmp_path / "failure").read_text() == "algo-2"


def test_a_process_has_ended_once_its_lines_were_taken():
    taken = []
    started = programs.start(["echo", "a line"], lambda line: (time.sleep(1), taken.append(line)))
    assert wait_until(lambda: programs.code_of(started) is not None, 60)
    assert taken == ["a line\n"]
