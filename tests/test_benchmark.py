"""scripts/benchmark.py: that it runs, and what it writes. No test depends on what it measures."""

import json
import math
import re

import pytest
from conftest import ROOT, run_python


def benchmark(*arguments, code=0):
    return run_python("scripts/benchmark.py", *arguments, fresh=True, timeout=380, code=code)


@pytest.mark.parametrize(
    "argument, said",
    [
        ("--what=trainin", "--what=trainin is not one of training, "),
        (
            "--feature_sizes=65",
            "--feature_sizes=65 is too few for 39 fields; try --feature_sizes=66.",
        ),
    ],
)
def test_refuses_what_it_does_not_know(argument, said):
    assert said in benchmark(argument, code=2).stderr


def lines_of(code, *words):
    """The lines that a program with the benchmark's parts prints."""
    parts = "import json, sys; sys.path.insert(0, 'scripts'); import benchmark, measures, pages\n"
    done = run_python("-c", parts + code, *map(str, words), fresh=True, timeout=380, code=0)
    return done.stdout.splitlines()


def in_process(code, *words):
    """The same; what it leaves as `found`."""
    return json.loads(lines_of(f"{code}\nprint(json.dumps(found))", *words)[-1])


FAILS = """
report = {"examples_per_second": 5.0, "cpu_utilization": 0.5}
program = "import sys; sys.exit('chief | train.py: no.')"
fails = lambda: measures.run_command(sys.executable, "-c", program)
pair = "a row", "a column", lambda: report, "first row", fails
short = "few", "a column", lambda: measures._figures(100, -0.5, 1.0), "first row", lambda: report
benchmark.MEASURES.update(modes=lambda work: [short, pair])
benchmark.FLAGS(["benchmark.py", "--rounds=2", "--what=modes", f"--output_dir={sys.argv[1]}"])
assert benchmark.main(None)
"""


def test_what_fails_is_named_and_the_rest_is_measured(tmp_path):
    *table, short, failed = lines_of(FAILS, tmp_path)
    assert short == (
        "few, a column: --rows=400000 makes runs too short to measure; try --rows=4000000."
    )
    assert failed == "a row, a column: exit code 1: chief | train.py: no."
    assert "| a row | 5/s, failed |" in table
    _, pair = json.loads((tmp_path / "benchmark.json").read_text())["modes"]["pairs"]
    assert pair["ours"] == 5 and pair["cpu"][0] > 0 and len(pair["reports"]) == 1


ARTICLE = """
import pathlib
benchmark.FLAGS(["benchmark.py", "--rounds=1", "--rows=10000", "--feature_sizes=1000"])
rows = {f"{y}, {x}": run for x, y, run, *_ in measures.article(pathlib.Path(sys.argv[1]))}
wanted = "local, TFRecord, File", "ps, TFRecord, Pipe", "horovod, TFRecord, Pipe, threads by hand"
found = list(rows), {name: rows[name]() for name in wanted}
"""


@pytest.mark.table
@pytest.mark.timeout(400)
def test_the_articles_table_has_a_row_for_each_combination(tmp_path):
    names, reports = in_process(ARTICLE, tmp_path)
    assert names[0] == "local, LibSVM, Pipe" and len(set(names)) == 5 * 2 * 2 * 2
    for name, report in reports.items():
        assert report["distribution"] == name.partition(",")[0]
        assert report["examples"] == 10000 and report["host_cpu_utilization"] > 0
        assert report["flags"].get("pipe_mode", False) == ("Pipe" in name)
        assert ("intra_op_threads" in report["flags"]) == ("by hand" in name)


ACCURACY = """
import pathlib
benchmark.FLAGS(["benchmark.py", "--rounds=2", "--rows=10000"])
found = next(measures.accuracy(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.table
@pytest.mark.timeout(400)
def test_accuracy_is_the_auc_of_each_epoch_for_each_seed(tmp_path):
    found = in_process(ACCURACY, tmp_path)
    first, second = found["aucs"]
    assert len(first) == len(second) == 3 and first != second
    assert 0.5 < first[0] < first[2] < 1


@pytest.mark.table
@pytest.mark.timeout(400)
def test_writes_its_figures_as_json_and_as_tables(tmp_path):
    done = benchmark(
        "--what=training,inference", "--feature_sizes=500,1000", "--rows=300000",
        "--rounds=1", f"--output_dir={tmp_path}",
    )  # fmt: skip
    figures = json.loads((tmp_path / "benchmark.json").read_text())
    pairs = [pair for measure in figures.values() for pair in measure["pairs"]]
    assert {x["column"] for x in pairs} == {"500 features", "1,000 features"}
    assert all(math.isfinite(x["ratios"][0]) for x in pairs)  # smaller data can take no time
    assert pairs[0]["cpu"][0] > 0
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * len(figures) + len(pairs)


PAGES = """
figures = json.loads(sys.argv[1]) if len(sys.argv) > 1 else pages.load()
texts = [sys.argv[2]] if len(sys.argv) > 2 else [path.read_text() for path in pages.pages()]
found = [[text, pages.rendered(text, figures)] for text in texts]
"""
PAIR = {"row": "PyTorch", "column": "5 features", "other_name": "PyTorch", "ours": 1234.0}
PAIR.update(other=600.0, ratios=[2.5, 1.25, 20.0], cpu=[5.5, 30.0])
MEASURE = {"date": "2026-01-02", "commit": "abc", "processor": "1 core", "rounds": 3}
MEASURE.update(command="c", pairs=[PAIR])
AUCS = {"row": "`--rare`", "column": "5 features", "aucs": [[0.7, 0.8012], [0.8, 0.8]]}
PAGE = """<!-- figures: training -->
old
<!-- end of figures -->
<!-- figures: training; brief -->
<!-- end of figures -->
<!-- figures: accuracy -->
<!-- end of figures -->
"""
SOURCE = "\n\n*training: 2026-01-02, commit abc, 1 core, rounds in turn: 3, by `c`.*\n"
RENDERED = f"""<!-- figures: training -->
|  | against | ours | theirs | ratio | CPU-seconds per million, ours / theirs |
| --- | --- | --- | --- | --- | --- |
| 5 features | PyTorch | 1,234/s | 600/s | 2.50 (1.25 to 20) | 5.5 / 30.0 |{SOURCE}\
<!-- end of figures -->
<!-- figures: training; brief -->
|  | 5 features |
| --- | --- |
| training, per second | 1,234 |
| training, times PyTorch | 2.50 (1.25 to 20) |{SOURCE}\
<!-- end of figures -->
<!-- figures: accuracy -->
|  | 5 features |
| --- | --- |
| `--rare` | .7500 .8006 |{SOURCE.replace("training", "accuracy")}\
<!-- end of figures -->
"""


def test_pages_show_the_figures_that_are_kept():
    measured = json.dumps({"training": MEASURE, "accuracy": {**MEASURE, "pairs": [AUCS]}})
    assert in_process(PAGES, measured, PAGE)[0][1] == RENDERED
    assert in_process(PAGES, measured, RENDERED)[0][1] == RENDERED
    kept = json.loads((ROOT / "docs" / "figures.json").read_text())
    for text, rendered in in_process(PAGES):
        asked = ", ".join(re.findall("<!-- figures: ([\\w, ]*\\w)", text)).split(", ")
        assert set(filter(None, asked)) <= set(kept)
        assert text == rendered, "run scripts/benchmark.py --write_pages, or edit no figure by hand"
