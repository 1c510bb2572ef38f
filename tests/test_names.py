"""Names of columns and categories: in flags, in the log and in the page of a run."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import report, run_python, run_tool, run_train

from deepfm.errors import BadInput
from deepfm.records.raw import feature_map, names
from deepfm.records.raw.names import Names

CLASSES, ROWS = ("1st", "2nd", "3rd"), 3000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of a table that prepare has encoded."""
    folder = tmp_path_factory.mktemp("names")
    random = np.random.RandomState(0)
    which, user = random.randint(0, 3, ROWS), random.randint(0, 60, ROWS)
    clicked = random.rand(ROWS) < np.array([0.7, 0.4, 0.2])[which]
    columns = {
        "clicked": {"kind": "label"}, "class": {"kind": "category"}, "user": {"kind": "category"},
        "price": {"kind": "number", "bounds": [10, 20.5, 1234567.5]},
        "age": {"kind": "number", "scale": "standard"}, "place": {"kind": "hash", "buckets": 5},
    }  # fmt: skip
    columns = [{"name": name, **column} for name, column in columns.items()]
    (folder / "columns.json").write_text(json.dumps({"columns": columns}))
    rows = zip(clicked.astype(int), which, user, random.randint(5, 30, ROWS).tolist())
    lines = [f"{y},{CLASSES[c]},u{u},{x},{x + c},p{u}" for y, c, u, x in rows]
    lines = ["clicked,class,user,price,age,place", *lines, ""]
    (folder / "rows.csv").write_text("\n".join(lines))
    run_tool(
        "prepare", f"--input={folder}/rows.csv", f"--columns={folder}/columns.json",
        f"--output_dir={folder}/data", "--min_count=1", code=0,
    )  # fmt: skip
    return folder / "data"


@pytest.fixture(scope="module")
def trained(data):
    """(the folder of data and a model, what training said)."""
    done = run_train(
        f"--training_data_dir={data}/train", f"--val_data_dir={data}/valid", "--batch_size=64",
        f"--model_dir={data}/model", "--gauc_field=user", "--slice_fields=class,2",
        "--embedding_size=4", "--deep_layers=4", code=0,
    )  # fmt: skip
    return data, done.stderr


def test_each_id_has_the_name_of_what_is_encoded_with_it(data):
    known = feature_map.load(f"{data}/feature_map.json")
    fingerprint = json.loads((data / "train" / "dataset.json").read_text())["feature_map"]
    found = names.of_data([f"{data}/train/x.tfrecords"], fingerprint, None)
    assert found.columns == ("class", "user", "price", "age", "place")
    between = "from 10 to 20.5"
    expected = {"15": between, "10": between, "9": "below 10", "21": "from 20.5 to 1234567.5"}
    expected["1234568"] = "from 1234567.5"
    for price, interval in expected.items():
        ids, _ = feature_map.encode_row(known, ["2nd", "u7", price, "3", "p1"])
        texts = [found.of_value(field, i) for field, i in enumerate(ids)]
        assert texts[:4] == ["2nd", "u7", interval, "a number"]
        assert re.fullmatch("bucket [0-4]", texts[4])
    ids, _ = feature_map.encode_row(known, ["4th", "", "", "", ""])
    assert [found.of_value(field, i) for field, i in enumerate(ids)] == ["rare", *["missing"] * 4]
    assert found.of_value(0, "others") == "others" and found.of_value(0, 10**6) == "1000000"


def test_a_map_of_other_data_names_nothing_and_columns_of_a_table_name_fields(data):
    path = [f"{data}/train/x.tfrecords"]
    assert names.of_data(path, "0" * 16, None) == names.of_data(path, None, None) == Names()
    found = names.of_data(path, None, {"columns": ["a", ["b", 7, None], [None, 3, "x"]]})
    assert found.columns == ("a", "b", "x") and found.of_value(1, 9) == "9"
    assert Names().of_field(2) == "field 2"


@pytest.mark.parametrize(
    "word, said",
    [
        ("clas", "--slice_fields=clas: no column has this name; try class."),
        ("xyz", "--slice_fields=xyz: no column has this name; there are class, user, 7."),
    ],
)
def test_a_wrong_name_is_told_the_near_ones(word, said):
    known = Names(("class", "user", "7"))
    assert [known.number(x, "slice_fields") for x in ("user", "0", "7")] == [1, 0, 7]
    with pytest.raises(BadInput) as refused:
        known.number(word, "slice_fields")
    assert str(refused.value) == said


def test_flags_take_names_and_the_log_and_the_report_give_them(trained):
    data, said = trained
    found = report(data / "model")["eval"]
    assert f"GAUC of field 1, user: gauc={found['gauc']:.6f}" in said
    slices = [x for x in found["slices"] if x["name"] == "class"]
    assert {x["category"] for x in slices} == set(CLASSES)
    assert {x["field"] for x in found["slices"]} == {0, 2}
    assert report(data / "model")["flags"]["slice_fields"] == ["class", "2"]
    words = "--task_type=eval", f"--model_dir={data}/model", "--slice_fields=0", "--gauc_field=1"
    run_train(*words, f"--val_data_dir={data}/valid", code=0)
    again = report(data / "model", "eval")["eval"]
    assert again["slices"] == slices and again["gauc"] == found["gauc"]


def test_records_elsewhere_take_the_names_of_those_that_the_model_has_seen(trained, tmp_path):
    data, _ = trained
    shutil.copytree(str(data / "valid"), str(tmp_path / "valid"))
    words = f"--model_dir={data}/model", f"--val_data_dir={tmp_path}/valid"
    run_train("--task_type=importance", *words, code=0)
    entries = report(data / "model", "importance")["importance"]
    assert entries[0]["name"] == "class" and len(entries) == 5
    done = run_train("--task_type=eval", *words, "--slice_fields=clas", code=2)
    assert "--slice_fields=clas: no column has this name; try class." in done.stderr


def test_the_page_shows_names_thresholds_and_importances(trained):
    data, _ = trained
    words = f"--model_dir={data}/model", f"--val_data_dir={data}/valid"
    run_train("--task_type=importance", *words, code=0)
    run_python("scripts/report.py", data / "model", code=0)
    page = (data / "model/report/report.html").read_text()
    assert "<h2>Slices by class</h2>" in page and "<td>2nd</td>" in page
    rate = report(data / "model")["eval"]["positive_rate"]
    assert f"<h2>Thresholds (base rate {rate:.4g})</h2>" in page
    assert "<h1>Importance</h1>" in page and 'alt="Plot: importance"' in page
    assert (data / "model/report/importance.importance.png").exists()
