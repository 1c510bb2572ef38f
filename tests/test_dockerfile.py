"""Tests of the image without building it.

What SageMaker's `train` runs in the image is tested with the real toolkit, if
`scripts/setup.sh --sagemaker` has installed it.
"""

import fnmatch
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from conftest import finish, started

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAIN = ROOT / ".venv-sagemaker" / "bin" / "train"
REQUIREMENTS_OF_A_BUILD = ("requirements.txt", "requirements-tf2.txt")
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt", "requirements-sagemaker.txt")


def instructions(name="Dockerfile"):
    """(instruction, its text) pairs, comments left out and continued lines joined."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def copied():
    """The paths that the Dockerfile takes from the checkout."""
    for instruction, text in instructions():
        if instruction == "COPY" and "--from" not in text:
            for path in text.split()[:-1]:
                yield from REQUIREMENTS_OF_A_BUILD if path == "${REQUIREMENTS}" else [path]


def is_ignored(path, lines):
    """As Docker reads .dockerignore: the last line that fits the path or a folder of it decides."""
    parts = path.split("/")
    folders = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    ignored = False
    for line in lines:
        pattern = line.lstrip("!").replace("**/", "*")
        if any(fnmatch.fnmatch(folder, pattern) for folder in folders):
            ignored = not line.startswith("!")
    return ignored


def dockerignore():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_everything_that_is_copied_exists_and_reaches_the_build():
    assert len(set(copied())) > 5
    for path in copied():
        assert (ROOT / path).exists(), path
        assert not is_ignored(path, dockerignore()), f".dockerignore holds back {path}"


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "data/train.tfrecords", "deepfm/__pycache__/a.pyc"]
)
def test_nothing_else_reaches_the_build(path):
    assert is_ignored(path, dockerignore())


def test_every_module_of_the_application_is_in_the_image():
    """So that a new folder is not forgotten."""
    outside = {"scripts", "tests", "deepfm_sklearn"}  # the last is a library, for notebooks
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - outside
    assert {"deepfm", "data_tools"} < folders
    assert {"train.py", *folders} <= {path.split("/")[0] for path in copied()}


def test_each_package_is_installed_in_the_version_of_the_requirements_files():
    pins = "\n".join((ROOT / name).read_text() for name in REQUIREMENTS)
    commands = [c for kind, text in instructions() if kind == "RUN" for c in text.split("&&")]
    installs = [shlex.split(c) for c in commands if "pip install" in c]
    assert len(installs) == 4
    for words in installs:
        packages = words[words.index("install") + 1 :]
        assert "-r" in packages or "--constraint" in packages, words
        for option in ("-r", "--constraint"):
            if option in packages:
                del packages[packages.index(option) : packages.index(option) + 2]
        for package in packages:
            if not package.startswith("-"):
                assert re.search(rf"^{re.escape(package)}==", pins, re.MULTILINE), package


@pytest.mark.parametrize("gpu, name", [("0", "tensorflow"), ("1", "tensorflow-gpu")])
def test_the_image_gets_the_one_tensorflow_that_is_asked_for(tmp_path, gpu, name):
    shutil.copy(str(ROOT / "requirements.txt"), str(tmp_path))
    (command,) = [text for kind, text in instructions() if kind == "RUN" and "$GPU" in text]
    command = command[: command.index("&& pip ")]
    subprocess.run(["sh", "-ec", command], cwd=tmp_path, env={**os.environ, "GPU": gpu}, check=True)
    lines = (tmp_path / "before_horovod.txt").read_text().splitlines()
    assert [x for x in lines if re.match(r"tensorflow(-gpu)?==", x)] == [f"{name}==1.15.5"]


def run_train(tmp_path, hyperparameters):
    """Runs the toolkit's `train` with an image whose train.py, and a job whose train.py and own.py,
    write their names to the model's folder; returns what was written there."""
    if not TRAIN.exists():
        pytest.skip("needs scripts/setup.sh --sagemaker")
    write = "import os, sys; open(os.environ['SM_MODEL_DIR'] + '/{}', 'w')\n"
    base, image, job = tmp_path / "ml", tmp_path / "image", tmp_path / "job"
    for folder in (base / "input/config", base / "model", base / "output", image / "deepfm", job):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "docker", image / "docker")
    (image / "deepfm" / "__init__.py").touch()
    (image / "train.py").write_text("import deepfm\n" + write.format("image"))
    (job / "train.py").write_text(write.format("job"))
    (job / "own.py").write_text(write.format("own"))
    config = {
        "hyperparameters": {k: v.replace("JOB", str(job)) for k, v in hyperparameters.items()},
        "resourceconfig": {"current_host": "localhost", "hosts": ["localhost"]},
        "inputdataconfig": {},
    }
    for name, values in config.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(values))
    module = {"SAGEMAKER_TRAINING_MODULE": "sagemaker_main:main", "SAGEMAKER_BASE_DIR": str(base)}
    path = {"PYTHONPATH": str(image / "docker")}
    result = finish(started([TRAIN], env={**os.environ, **module, **path}))
    assert result.returncode == 0, result.stdout
    return sorted(os.listdir(base / "model"))


@pytest.mark.parametrize(
    "hyperparameters, expected",
    [
        ({}, "image"),
        ({"sagemaker_submit_directory": "JOB"}, "job"),
        ({"sagemaker_submit_directory": "JOB", "sagemaker_program": "own.py"}, "own"),
    ],
    ids=["names nothing", "submits source", "submits and names a program"],
)
def test_sagemaker_runs_the_images_program_only_where_the_job_brings_none(
    hyperparameters, expected, tmp_path
):
    assert run_train(tmp_path, hyperparameters) == [expected]


HANDED_ON = """
import psutil, sagemaker_main, subprocess, sys
words = [sys.executable, "-c", "import time; time.sleep(600)"]
first, second = subprocess.Popen(words), subprocess.Popen(words)
listed = sorted(psutil.Process().children(), key=lambda child: child.pid != first.pid)
psutil.Process.children = lambda *_, **__: listed
first.kill(), first.wait()
try:
    sagemaker_main._hand_on(15, None)
    print(second.wait(100))
finally:
    second.kill()
"""


def test_sigterm_reaches_the_others_where_a_process_has_just_ended():
    if not TRAIN.exists():
        pytest.skip("needs scripts/setup.sh --sagemaker")
    words = [TRAIN.with_name("python"), "-W", "ignore", "-c", HANDED_ON]
    done = finish(started(words, cwd=ROOT / "docker"), code=0)
    assert done.stdout == "-15\n"
