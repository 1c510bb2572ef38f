"""What may be deleted from a model_dir, and which folders cannot become one."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import (
    ROOT,
    SMALL_MODEL,
    evaluations,
    job_of,
    make_records,
    report,
    run_tool,
    run_train,
    small_job,
    small_training,
    write_tfrecords,
)

from deepfm.config import InputConfig
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf
from deepfm.state import model_dir, paths

v1 = tf.compat.v1

# What train.py, and TensorFlow for it, write, also where they are killed.
OURS = (
    "checkpoint", "checkpoint.tmp" + 32 * "a", "model.ckpt-7.index", "model.ckpt-7.meta",
    "model.ckpt-7.data-00000-of-00001", "graph.pbtxt", "events.out.tfevents.1.host", "model.json",
    "run.json", "evaluations.json", "model_id.json", "report.json", "report.eval.json",
    "predictions.txt", ".predictions.txt.part-1", "predictions.csv", ".predictions.csv.part-0",
    "predictions.parquet/part-00000.parquet", ".predictions.parquet.part-0.old/part-00000.parquet",
    ".report.eval.json.tmp-12",
    "eval/events.out.tfevents.1", "eval_test/events.out.tfevents.1",
    "model.ckpt-9_temp_" + 32 * "0" + "/part-00000",
    ".reading-x0_b3xyz/model.ckpt-7.index", ".probe-" + 32 * "f", "best/checkpoint",
    "best/model.ckpt-7.index",
)  # fmt: skip
OTHERS = (
    ".git/config", "train.py", "notes.txt", "evaluation.ipynb", "eval/notes.md",
    "report/report.html", "data/part-0.tfrecords", "model.ckpt.py", "checkpoints/a",
    "1700000000/saved_model.pb",
    "eval_of_mine.py", "my.predictions.txt", "model.ckpt-7.tar.gz", "model.ckpt-7.backup/a",
    ".shared-docs/a", ".reading-list", ".notes.tmp-mine", ".mine.txt.tmp-12",
)  # fmt: skip


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("something")


def there(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_clearing_deletes_the_model_and_says_what_it_leaves(tmp_path, caplog):
    fill(tmp_path / "model", OURS + OTHERS)
    fill(tmp_path / "elsewhere", ["events.out.tfevents.1"])
    (tmp_path / "model" / "eval_old").symlink_to(tmp_path / "elsewhere")
    model_dir.clear(str(tmp_path / "model"))
    assert there(tmp_path / "model") == set(OTHERS) and there(tmp_path / "elsewhere")
    assert all(os.listdir(str(path)) for path in (tmp_path / "model").rglob("*") if path.is_dir())
    (said,) = (r.getMessage() for r in caplog.records if "keeping files" in r.getMessage())
    assert ".git" in said and "more" in said


def test_a_folder_of_another_program_is_not_cleared(tmp_path):
    (tmp_path / "model.json").write_text('{"learner": {}}')
    (tmp_path / "checkpoint").mkdir()
    fill(tmp_path, ["checkpoint/weights.h5", "report.json", "model.ckpt-3.backup.tar.gz"])
    before = there(tmp_path)
    with pytest.raises(BadInput, match="has files, but no model"):
        model_dir.clear(str(tmp_path))
    fill(tmp_path, ["events.out.tfevents.1"])
    model_dir.clear(str(tmp_path))
    assert there(tmp_path) == before - {"report.json", "model.json"}


def test_clearing_knows_all_that_a_job_writes(tmp_path):
    data = write_tfrecords(tmp_path / "a.tfrecords", make_records(200))
    folder, servable = tmp_path / "model", f"--servable_model_dir={tmp_path}/servable"
    for task in ("train", "eval", "infer", "export"):
        name = {"infer": "infer_data_dir", "export": "training_data_dir"}.get(task, "val_data_dir")
        more = [f"--training_data_dir={data}", "--eval_every_steps=2"] if task == "train" else []
        run_train(
            *(SMALL_MODEL if task == "train" else ()), f"--model_dir={folder}", "--batch_size=64",
            f"--task_type={task}", f"--{name}={data}", servable, *more, code=0,
        )  # fmt: skip
    assert {"report.json", "report.infer.json", "predictions.txt"} < there(folder)
    model_dir.clear(str(folder))
    assert os.listdir(folder) == []


def job(folder, task="train", data=None, cache="none", **more):
    """A job with these paths."""
    reads = InputConfig(64, cache=cache, **(data or {}))
    return job_of(task_type=task, model_dir=str(folder), input=reads, **more)


@pytest.mark.parametrize("flag", ["training_data_dir", "val_data_dir", "infer_data_dir"])
@pytest.mark.parametrize(
    "model, data",
    [
        ("data", "data"), ("data/", "data"), ("data", "data/"), ("data", "data/*.tfrecords"),
        ("data", "data/a.tfrecords"), (".", "data/train"), ("data", "other,data/train"),
        ("link", "data"), ("data/../data", "data"), ("s3://bucket/x", "s3://bucket/x/train/*"),
    ],
)  # fmt: skip
def test_a_model_is_not_put_where_its_data_are(tmp_path, monkeypatch, flag, model, data):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    os.symlink("data", "link")
    with pytest.raises(BadInput, match="or one above it; give a folder of its own"):
        paths.check_apart(job(model, data={flag: data}))


@pytest.mark.parametrize(
    "written",
    [
        dict(folder="data/model"),
        dict(servable_model_dir="data/servable"),
        dict(folder="data/a/b"),
        dict(cache="data/cache"),
        dict(task="infer", predictions_file="data/predictions.txt"),
    ],
)
def test_what_is_written_where_it_would_be_read_as_data_is_said(
    tmp_path, monkeypatch, caplog, written
):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    mine = job(**{"folder": "model", **written, "data": {"val_data_dir": "other,data/"}})
    paths.check_apart(mine)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "is inside --val_data_dir=data/, so the next job will read it as data" in line
    reads = mine.input._replace(val_data_dir="data/*.tfrecords")
    paths.check_apart(mine._replace(input=reads))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "model, data", [("model", "model-data"), ("data/model", "data/train"), ("model", "mo*")]
)
def test_a_model_may_lie_beside_its_data(tmp_path, monkeypatch, model, data):
    monkeypatch.chdir(tmp_path)
    paths.check_apart(job(model, data={"training_data_dir": data}))


def test_the_folder_of_the_data_takes_no_exports(tmp_path):
    exports = f"{tmp_path}/more"
    for place in (f"{tmp_path}/more/", f"{tmp_path}/more/*"):
        mine = job(tmp_path / "model", servable_model_dir=exports, data={"val_data_dir": place})
        with pytest.raises(BadInput, match="servable_model_dir=.* is the folder of --val_data_dir"):
            paths.check_apart(mine)
    mine = job(
        tmp_path / "model", servable_model_dir=exports, data={"val_data_dir": f"{exports}/a"}
    )
    paths.check_apart(mine)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(a file of records of one class, a model)."""
    folder = tmp_path_factory.mktemp("model_dir")
    labels, *rest = make_records(200)
    data = write_tfrecords(folder / "a.tfrecords", [0 * labels, *rest])
    done = run_train(*small_job(data, folder / "model"), code=0)
    return data, folder / "model", done.stderr


def test_labels_of_one_class_are_told_and_figures_without_a_value_are_null(model):
    data, folder, said = model
    sentence = (
        f"All 200 labels of --val_data_dir={data} are 0, so AUC and calibration are undefined"
    )
    assert sentence in said
    # For programs that look for it, the stable line stays the last one of an evaluation.
    done = run_train("--task_type=eval", f"--val_data_dir={data}", f"--model_dir={folder}")
    assert " Evaluation: step=4 examples=200 auc=nan " in done.stderr.splitlines()[-1]
    assert report(folder)["eval"]["auc"] is report(folder)["eval"]["calibration"] is None
    assert report(folder)["eval"]["log_loss"] > 0
    (kept,) = evaluations(folder)
    assert kept["auc"] is None
    run_train(*small_job(data, folder, "--num_epochs=2", "--early_stopping_patience=3"), code=0)


def test_an_evaluation_of_its_own_has_summaries_and_a_report_of_its_own(model):
    data, folder, _ = model
    training = report(folder)
    run_train("--task_type=eval", f"--val_data_dir={data}", f"--model_dir={folder}", code=0)
    assert report(folder) == training
    assert report(folder, "eval")["eval"] == pytest.approx(training["eval"])
    assert list((folder / "eval_test").glob("events.out.*"))
    steps = [
        event.step
        for path in (folder / "eval").glob("events.out.*")
        for event in v1.train.summary_iterator(str(path))
        if any(value.tag == "auc" for value in event.summary.value)
    ]
    assert len(steps) == len(set(steps)) > 0


def test_predictions_are_not_written_over_the_records(model, tmp_path):
    data, folder, _ = model
    (tmp_path / "link").symlink_to(data)
    before = pathlib.Path(data).read_bytes()
    path = f"--predictions_file={tmp_path}/link"
    reads = f"--infer_data_dir={data}", f"--model_dir={folder}"
    done = run_train("--task_type=infer", *reads, path, code=2)
    assert f"{path} holds something other than predictions" in done.stderr.splitlines()[-1]
    assert pathlib.Path(data).read_bytes() == before


def test_predictions_take_the_place_of_predictions_alone(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "best").mkdir()
    mine = {
        "mine.txt": "0.5\n1.2e-05\n1\n" * 1000,
        "mine.csv": 'key,probability\n"a,b",0.5\nc,nan\n',
        "places.csv": "file,row,probability\nx.libsvm,0,0.5\n",
        "other.csv": "key,value\nc,1\n",
    }
    for name in ("part.tfrecords", "part.txt", "best/checkpoint", *mine):
        (tmp_path / name).write_text(mine.get(name, "1 2:3\n"))
    (tmp_path / "empty").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "part.tfrecords")
    for path, said in (
        (tmp_path, "is a folder; give the name of a file"),
        (tmp_path / "fifo", "is not a regular file; give the name of one"),
        ("/dev/null", "is not a regular file"),
        (tmp_path / "data" / "dataset.json", "describes data; give another name"),
        (tmp_path / "model" / "model.json", "is a file of the model; give another name"),
        (tmp_path / "model" / "model.ckpt-3.index", "is a file of the model"),
        (tmp_path / "part.tfrecords", "holds something other than predictions"),
        (tmp_path / "part.txt", "holds something other than predictions"),
        (tmp_path / "other.csv", "holds something other than predictions"),
        (tmp_path / "link", "holds something other than predictions"),
        (tmp_path / "best" / "checkpoint", "holds something other than predictions"),
    ):
        with pytest.raises(BadInput, match=f"--predictions_file={path} .*{said}"):
            model_dir.check_predictions_file(job(tmp_path / "model", predictions_file=str(path)))
    good = ["mine.txt", "mine.csv", "places.csv", "empty", "model/predictions.txt"]
    for path in (None, *(str(tmp_path / name) for name in [*good, "other/model.json"])):
        model_dir.check_predictions_file(job(tmp_path / "model", predictions_file=path))


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    atomic_files.write_whole(str(tmp_path / "link"), "text")
    assert (tmp_path / "there" / "file").read_text() == "text"
    assert os.path.islink(tmp_path / "link")


def without_privileges(*flags):
    """train.py by a root whom the modes of files bind."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]
    return subprocess.run(
        [*(drop if os.getuid() == 0 else []), sys.executable, "train.py", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


@pytest.mark.parametrize("task", [pytest.param("eval", marks=pytest.mark.table), "infer", "export"])
def test_a_model_dir_that_cannot_be_written_can_be_used(model, tmp_path, task):
    data, folder, _ = model
    before = there(folder)
    flags = [
        f"--task_type={task}", f"--model_dir={folder}", f"--val_data_dir={data}",
        f"--infer_data_dir={data}", f"--servable_model_dir={tmp_path}/servable",
    ]  # fmt: skip
    os.chmod(folder, 0o555)
    try:
        if task == "infer":
            refused = without_privileges(*flags)
            assert refused.returncode == 2, refused.stderr
            assert "give --predictions_file" in refused.stderr.splitlines()[-1]
            flags += [f"--predictions_file={tmp_path}/predictions.txt"]
        done = without_privileges(*flags)
    finally:
        os.chmod(folder, 0o755)
    assert done.returncode == 0, done.stderr
    assert f"report.{task}.json: its folder cannot be written." in done.stderr
    assert there(folder) == before


def test_only_the_newest_checkpoints_are_kept(data, tmp_path):
    more = "--save_checkpoints_steps=2", "--keep_checkpoint_max=3"
    run_train(*small_training(data, tmp_path / "model", *more), code=0)
    names = [path.name for path in (tmp_path / "model").glob("model.ckpt-*.index")]
    assert sorted(names) == [f"model.ckpt-{step}.index" for step in (10, 6, 8)]


@pytest.mark.parametrize("name", ["sweep[lr=0.1]", "a]", "a*", "b?", "a\\b", "a[1]/model"])
@pytest.mark.parametrize(
    "flag, task",
    [("model_dir", "train"), ("servable_model_dir", "export"), ("checkpoint", "infer")],
)
def test_a_folder_that_tensorflow_takes_for_a_pattern_is_refused(tmp_path, flag, task, name):
    path = str(tmp_path / name)
    asked = job(tmp_path / "model", task)._replace(**{flag: path})
    with pytest.raises(BadInput) as error:
        paths.check(asked)
    assert str(error.value).startswith(f"--{flag}={path}: TensorFlow takes [ ] * ? and \\ for a")
    better = str(error.value).rpartition("such as ")[2].rstrip(".")
    assert not set(better) & set("[]*?\\") and better.startswith(str(tmp_path))
    assert not os.listdir(str(tmp_path)), "it is refused before anything is made"


def test_data_may_be_named_like_a_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d[1]").mkdir()
    for path in ("a[1].tfrecords", "d[1]/a[2].tfrecords"):
        write_tfrecords(tmp_path / path, make_records(20))
    for spec, found in (
        ("a[1].tfrecords", "./a[1].tfrecords"), ("d[1]", "d[1]/a[2].tfrecords"),
        ("d[1]/a[2].tfrecords", "d[1]/a[2].tfrecords"),
    ):  # fmt: skip
        assert [file.path for file in datasets.find(spec, "val_data_dir").files] == [found]
    paths.check(job("d", data={"training_data_dir": "d[1]"}))


@pytest.mark.parametrize(
    "flag", ["model_dir", "servable_model_dir", "predictions_file", "checkpoint", "val_data_dir"]
)
def test_a_name_that_is_not_utf_8_ends_in_one_sentence(tmp_path, flag):
    data = write_tfrecords(tmp_path / "a.tfrecords", make_records(20))
    bad = os.fsdecode(bytes(tmp_path / "b") + b"\xff")
    shutil.copy(data, bad)
    task = {"predictions_file": "infer", "checkpoint": "eval"}.get(flag, "train")
    done = run_train(
        *small_job(data, tmp_path / "model"), f"--task_type={task}", f"--{flag}={bad}",
        f"--infer_data_dir={data}", code=2,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.endswith(": this name is not UTF-8; rename the file or folder."), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scheme", ["s3a", "abfs", "hdfs"])
@pytest.mark.parametrize(
    "flag, task",
    [
        ("model_dir", "train"), ("servable_model_dir", "train"), ("cache", "train"),
        ("checkpoint", "eval"), ("predictions_file", "infer"),
    ],
)  # fmt: skip
def test_a_scheme_without_a_client_is_refused_at_once(tmp_path, scheme, flag, task):
    path = f"{scheme}://host/a"
    of_job = {} if flag == "cache" else {flag: path}
    asked = job(tmp_path / "model", task, cache=path if flag == "cache" else "none")
    with pytest.raises(BadInput, match=f"{path}: this TensorFlow has no client for {scheme}:// "):
        paths.check(asked._replace(**of_job))


@pytest.mark.parametrize("scheme", ["s3a", "hdfs"])
def test_data_of_a_scheme_without_a_client_are_refused(scheme):
    path = f"{scheme}://host/a"
    for use in (datasets.find, remote_files.check_readable):
        with pytest.raises(
            BadInput, match=f"{path}: this TensorFlow has no client for {scheme}://"
        ):
            use(path, "val_data_dir")


def test_flags_of_evaluations_without_validation_data_are_said(model, tmp_path):
    flags = small_training(model[0], tmp_path / "model", "--max_steps=1")
    more = "--eval_every_steps=5", "--best_metric=log_loss", "--eval_on_all_ranks"
    done = run_train(*flags, *more, code=0)
    for flag in more:
        line = f"{flag.partition('=')[0]} has no effect without --val_data_dir."
        assert done.stderr.count(line) == 1
    again = run_train(*flags, *more, f"--val_data_dir={model[0]}")
    assert again.returncode == 0 and "has no effect" not in again.stderr


@pytest.mark.parametrize(
    "flag, described",
    [
        ("--val_data_dir", True), ("--val_data_dir", False), ("--infer_data_dir", False),
        ("--training_data_dir", True),
    ],
)  # fmt: skip
def test_data_of_other_fields_are_not_said_to_need_a_flag_that_is_refused(
    model, tmp_path, flag, described
):
    write_tfrecords(tmp_path / "a.tfrecords", make_records(20, field_size=3))
    if described:
        run_tool("inspect_dataset", f"--data={tmp_path}", "--write", code=0)
    task = {"--val_data_dir": "eval", "--infer_data_dir": "infer"}.get(flag, "train")
    for more in ([], ["--field_size=3"] * (task != "train")):
        done = run_train(
            f"--task_type={task}", f"--model_dir={model[1]}", f"{flag}={tmp_path}", *more, code=2
        )
        last = done.stderr.splitlines()[-1]
        assert "have 3 fields, says" in last and "has 4, says model.json; give data of 4" in last
        assert "--field_size" not in last
