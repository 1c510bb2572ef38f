"""The tools need no TensorFlow; what Spark's executors import needs no absl either."""

import ast
import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT

# The modules that executors need, and all of the folder that is made for them.
NEEDED = [
    "deepfm.records.raw.column_kinds",
    "data_tools.click_logs.feature_map",
    "data_tools.click_logs.field_tables",
    "data_tools.click_logs.row_parser",
    "data_tools.click_logs.slices",
    "data_tools.click_logs.splitting",
    "data_tools.click_logs.vocabulary",
    "data_tools.common.splitmix64",
    "data_tools.libsvm.pieces",
    "data_tools.tables.row_checks",
    "data_tools.libsvm.pieces",
    "data_tools.engines.executors",
    "data_tools.rebalancing.selecting",
    "data_tools.common.tallies",
    "deepfm.errors",
    *(f"deepfm.records.{path.stem}" for path in ROOT.glob("deepfm/records/[!_]*.py")),
]
THERE = {"numpy", "pandas", "pyarrow", "pyspark"}  # what executors have


def imported(name):
    """The modules that a module of this project imports anywhere, with their packages."""
    path = (ROOT / name.replace(".", "/")).with_suffix(".py")
    if not path.exists():
        path = path.with_suffix("") / "__init__.py"
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from names
    if "." in name:
        yield name.rpartition(".")[0]


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def needed_packages(names):
    """{third-party package: a module that imports it} of modules and all that they import."""
    found, seen, todo = {}, set(), list(names)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for other in imported(name):
            package = other.partition(".")[0]
            if package in ("deepfm", "data_tools"):
                todo += [other] * is_module(other)
            else:
                found.setdefault(package, name)
    ours = {"deepfm", "data_tools"}
    return {k: v for k, v in found.items() if k not in ours and not is_standard(k)}


def is_standard(package):
    spec = importlib.util.find_spec(package)
    return spec is not None and "site-packages" not in str(spec.origin)


@pytest.mark.parametrize("name", NEEDED)
def test_what_executors_need_follows_no_import_to_tensorflow(name):
    assert set(needed_packages([name])) <= THERE


def test_an_import_of_tensorflow_is_found_through_other_modules():
    found = needed_packages(["deepfm.data.bad_records"])
    assert {"tensorflow", "absl", "numpy"} <= set(found)


def test_the_rows_of_a_block_are_read_and_encoded_where_tensorflow_cannot_be_imported(tmp_path):
    path = str(tmp_path / "a.tsv")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules.update(tensorflow=None, tensorflow_core=None, absl=None)  # importing them fails
import importlib
for name in {[name for name in NEEDED if "engines" not in name]!r}:
    importlib.import_module(name)
from types import SimpleNamespace
from data_tools.click_logs import field_tables, slices, splitting, vocabulary
from deepfm.records.raw.column_kinds import DATASETS, Table
from deepfm.records.text_blocks import LineRange
from data_tools.tables.csv_blocks import LinePart
table = Table("criteo", DATASETS["criteo"], missing=())
options = SimpleNamespace(delimiter="tab", header="no", integers="buckets", table=table)
source = slices.RawInput("input", {path!r}, splitting.Split())
text = b"1" + b"\\t3" * 13 + b"\\ta" * 26 + b"\\n2\\n0" + b"\\t" * 39 + b"\\n"
open({path!r}, "wb").write(bytes(69) + b"\\n" + text)
layout, file = slices.read_layout(source, options, {path!r})
part = LinePart({path!r}, LineRange({path!r}, 70), file)
(_, bad), (_, rows) = slices.read_rows(part, layout)
counts = [vocabulary.count(c.kind, keys, []) for c, keys in zip(layout.columns, rows.keys)]
tables = field_tables.from_counts(layout.columns, vocabulary.add_up(layout.columns, [counts]), 1)
batch, _ = field_tables.encode(rows, tables)
ids, values = batch.ids, batch.values
assert splitting.split_of(splitting.Split(), "x", rows.starts).tolist() == [0, 0]
print(bad, rows.starts.tolist(), ids[:, 0].tolist(), values.sum())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=180
    )
    place = 70 + len("1" + 13 * "\t3" + 26 * "\ta" + "\n2\n")
    assert done.stdout == (
        f"{path}:3: expected 40 columns (see --dataset, --columns, --delimiter), "
        f"found 1: '2' [70, {place}] [3, 1] 78.0\n"
    ), done.stderr


def test_the_tools_do_their_work_where_tensorflow_cannot_be_imported(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules.update(tensorflow=None, tensorflow_core=None)
from data_tools import inspect_dataset, libsvm_to_tfrecord, make_synthetic
from data_tools import prepare, rebalance
make_synthetic.write_data(make_synthetic.SyntheticOptions("text", 300, 0, 0, feature_size=200))
convert = libsvm_to_tfrecord.ConvertOptions("text", "records", num_files=2, compress=True)
libsvm_to_tfrecord.convert(convert)
rebalance.rebalance(rebalance.RebalanceOptions("records", "shuffled", num_workers=2))
with open("raw.tsv", "w") as f:
    f.writelines("1" + "\\t3" * 13 + "\\ta" * 26 + "\\n" for _ in range(50))
prepare.prepare(prepare.PrepareOptions("prepared", "raw.tsv"))
found = [inspect_dataset.inspect(name) for name in ("text", "shuffled", "prepared/train")]
print([summary["rows"] for summary in found])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=str(tmp_path), capture_output=True, text=True, timeout=180
    )
    rows = done.stdout.strip("[]\n").split(", ")
    assert rows[:2] == ["300", "300"] and int(rows[2]) > 20, done.stderr
