"""on_spark in a newer Python than TensorFlow 1.15 has, on the driver and on the executors."""

# ruff: noqa: F401, F811  test_on_spark's fixtures are imported, and arguments

import glob
import os
import shutil
import subprocess

import pytest
from conftest import ROOT
from test_on_spark import (
    PYTHON,
    content,
    criteo,
    one_machine,
    records,
    serving,
    text,
)

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"
)
VERSIONS = "3.11", "3.10", "3.9", "3.8"  # of those that pyspark 3.4 runs in
NEEDED = "numpy", "pandas", "pyarrow"


def newer_python():
    """A Python that has what executors need, but for pyspark; skips the test without one."""
    found = [os.environ.get("DEEPFM_NEWER_PYTHON"), *glob.glob(f"{ROOT}/.venv-spark-*/bin/python")]
    for version in VERSIONS:
        found += [shutil.which(f"python{version}")]
        found += glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}*/bin/python"))
    program = f"import sys, {', '.join(NEEDED)}; sys.exit(not (3, 8) <= sys.version_info < (3, 12))"
    for python in filter(None, found):
        if not subprocess.run([python, "-c", program], stderr=subprocess.DEVNULL).returncode:
            return python
    pytest.skip(
        f"no Python {VERSIONS[-1]} to {VERSIONS[0]} has {', '.join(NEEDED)}; name one in "
        "DEEPFM_NEWER_PYTHON"
    )


@pytest.fixture(scope="module")
def newer_server(tmp_path_factory):
    """`server` of test_on_spark in a newer Python, with the pyspark of .venv-spark."""
    python, folder = newer_python(), tmp_path_factory.mktemp("packages")
    (packages,) = PYTHON.parent.parent.glob("lib/python3.7/site-packages")
    for name in ("pyspark", "py4j", "absl", "six.py"):
        (folder / name).symlink_to(packages / name)
    with serving(python, PYTHONPATH=str(folder), PYSPARK_PYTHON=python) as run:
        yield run


def has_tensorflow(python):
    program = "from importlib import util; print(util.find_spec('tensorflow'))"
    return subprocess.check_output([str(python), "-c", program], text=True) != "None\n"


def test_the_python_of_spark_has_no_tensorflow():
    assert not has_tensorflow(PYTHON)


@pytest.mark.parametrize(
    "job, options",
    [
        ("convert", {"num_files": 3, "multi_valued": True, "hash_buckets": 500}),
        ("prepare", {"min_count": 2, "integers": "scaled"}),
        ("rebalance", {"num_files": 3, "positive_share": 0.5}),
    ],
)
def test_a_newer_python_without_tensorflow_writes_the_same_bytes(
    newer_server,
    text,
    criteo,
    records,
    tmp_path,
    monkeypatch,
    job,
    options,  # noqa: F811
):
    folder = {"prepare": criteo, "rebalance": records}.get(job) or text("weighted multi ffm")
    options = dict(options, input=folder)
    assert one_machine(monkeypatch, job, output_dir=tmp_path / "alone", **options) is None
    answer = newer_server(job, output_dir=tmp_path / "spark", **options)
    assert answer["code"] == 0, answer
    assert content(tmp_path / "spark") == content(tmp_path / "alone")
