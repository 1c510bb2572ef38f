"""on_spark in a newer Python than TensorFlow 1.15 has, on the driver and on the executors."""

# ruff: noqa: F401, F811  test_on_spark's fixtures are imported, and arguments

import subprocess

import pytest
from conftest import ROOT
from test_on_spark import (
    PYTHON,
    content,
    criteo,
    one_machine,
    pytestmark,
    records,
    serving,
    text,
)

NEWER = ROOT / ".venv-spark-newer" / "bin" / "python"


@pytest.fixture(scope="module")
def newer_server(tmp_path_factory):
    """`server` of test_on_spark in a newer Python, with the pyspark of .venv-spark."""
    if not NEWER.exists():
        pytest.skip("needs .venv-spark-newer: install Python 3.11, then scripts/setup.sh --tests")
    folder = tmp_path_factory.mktemp("packages")
    (packages,) = PYTHON.parent.parent.glob("lib/python3.7/site-packages")
    for name in ("pyspark", "py4j", "absl", "six.py"):
        (folder / name).symlink_to(packages / name)
    with serving(NEWER, PYTHONPATH=str(folder), PYSPARK_PYTHON=str(NEWER)) as run:
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
