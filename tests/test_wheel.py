"""The wheel, built in isolation, does its work in a folder without the repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import tomli
from conftest import ROOT, copying_compiler
from packaging.requirements import Requirement
from test_setup import pins

pytestmark = pytest.mark.timeout(600)
PACKAGES = "deepfm", "data_tools", "deepfm_sklearn"
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The path of the wheel, built from a copy of what is in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(ROOT / name), str(folder / "source" / name), ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(str(ROOT / name), str(folder / "source"))
    words = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", f"--wheel-dir={folder}"]
    # PyPI has setuptools; an answer that does not come is asked for again.
    env = {**os.environ, "PIP_DEFAULT_TIMEOUT": "30", "PIP_RETRIES": "9"}
    done = subprocess.run(words, cwd=folder / "source", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs a program that the wheel has installed beside this Python's packages, in a folder that
    has nothing of the repository; returns what it wrote to standard error."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    ours = (path for path in sys.path if path.endswith("site-packages"))
    (site / "packages.pth").write_text("\n".join(ours))
    install = [python, "-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall"]
    subprocess.run([*install, wheel], check=True, stdout=subprocess.DEVNULL)
    (folder / "work").mkdir()
    env = {**os.environ, **copying_compiler(folder)}

    def run(name, *words, code=0):
        words = [python.with_name(name), *words]
        done = subprocess.run(words, cwd=folder / "work", env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    run.folder, run.site = folder, site
    return run


def test_it_has_the_packages_with_their_c_and_nothing_else(wheel):
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected and "deepfm/kernels/csrc/adam.cc" in found
    assert wheel.name == f"deepfm-{PROJECT['version']}-py3-none-any.whl"


def test_it_converts_prepares_and_trains_with_kernels_of_its_own(run):
    work = run.folder / "work"
    rows = [f"{i % 2} {i % 7 + 1}:1 {i % 5 + 8}:0.5" for i in range(640)]
    (work / "rows.libsvm").write_text("\n".join(rows))
    (work / "rows.csv").write_text(
        "\n".join(["click,shop,age", *(f"{i % 2},s{i % 7},{i % 50}" for i in range(640))])
    )
    run("deepfm-convert", "--input=rows.libsvm", "--output_dir=lines")
    run("deepfm-prepare", "--input=rows.csv", "--output_dir=table")
    assert list(work.glob("table/train/*.tfrecords"))
    run("deepfm-train", "--training_data_dir=lines", "--model_dir=model", "--batch_size=32")
    assert json.loads((work / "model" / "report.json").read_text())["global_step"] == 20
    part = json.loads((work / "model" / "run.json").read_text())["parts"][-1]
    assert part["settings"]["compiled_kernels"]
    assert (run.folder / "compiled").read_text().count("call\n") == 3  # two units, one library
    built = sorted(path.name.split("-")[0] for path in run.site.glob("deepfm_kernels/*.so"))
    assert built == ["codec", "kernels"]


def test_its_programs_have_the_flags_and_name_themselves_in_errors(run):
    assert "--embedding_size" in run("deepfm-train", "--help")
    assert "--split_by" in run("deepfm-prepare", "--help")
    said = run("deepfm-train", "--batch_sise=3", code=2)
    assert said.startswith("deepfm-train: ") and "Did you mean: batch_size" in said
    assert "deepfm-convert: --input is required" in run("deepfm-convert", code=2)


def test_its_classifier_starts_its_programs(run):
    code = """
import numpy as np, deepfm_sklearn
ids = np.arange(300).reshape(-1, 2) % 9
deepfm_sklearn.DeepFMClassifier(flags={"batch_sise": 3}).fit(ids, ids[:, 0] % 2)
"""
    said = run("python", "-c", code, code=1)  # by train.py, after prepare
    assert f'"{run.site}/deepfm_sklearn/children.py"' in said and "Did you mean: batch_size" in said


def test_its_requirements_are_those_of_the_requirements_files():
    names = ("", "-dev", "-sagemaker", "-spark")
    pinned = [pins(f"requirements{name}.txt") for name in names]
    extras = PROJECT["optional-dependencies"]
    for line in [line for lines in extras.values() for line in lines]:
        required = Requirement(line)
        versions = {known[required.name] for known in pinned if required.name in known}
        assert {f"=={x}" for x in versions} >= {str(required.specifier)}, line
    for line in PROJECT["dependencies"]:
        assert line in pinned[0]
