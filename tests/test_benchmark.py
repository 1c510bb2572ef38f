"""scripts/benchmark.py: that it runs, and what it writes. No test depends on what it measures."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT


def benchmark(*arguments):
    return subprocess.run(
        [sys.executable, "scripts/benchmark.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=380,
    )  # fmt: skip


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--what=trainin", "--what=trainin is not one of training, "),
        ("--torch=nowhere", "--torch=nowhere: no such program; name a Python that has torch."),
    ],
)
def test_refuses_what_it_does_not_know(argument, said):
    done = benchmark(argument)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.table
@pytest.mark.timeout(400)
def test_writes_its_figures_as_json_as_a_table_and_as_a_plot(tmp_path):
    done = benchmark(
        "--what=training,inference,floor,start", "--feature_sizes=500,1000", "--rows=10000",
        "--rounds=1", "--batch_sizes=128,256", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "benchmark.json").read_text())
    names = [re.sub(r", 0\.\d+ of the pairs distinct", "", f["name"]) for f in figures]
    assert names == [
        *(f"training, {n} features, batch {b}" for n in ("500", "1,000") for b in (128, 256)),
        "inference, 500 features", "inference, 1,000 features",
        *(f"CPU-seconds per million examples, {n} features" for n in ("500", "1,000")),
        "start to the first step, 1,000 features",
    ]  # fmt: skip
    for figure in figures:
        assert figure["ours"] > 0 and figure["other"] > 0 and len(figure["ratios"]) == 1
    assert figures[0]["details"][0]["cpu_seconds_per_million"] > 0
    table = (tmp_path / "benchmark.md").read_text()
    assert table in done.stdout and table.count("\n") == 2 + len(figures)
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
