"""scripts/report.py: the page of a run, as a browser shows it."""

import collections
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import make_records, run_python, run_train, write_tfrecords

from deepfm.model import metrics
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
_CHROMIUM = [
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The model_dir of a run with two evaluations."""
    folder = tmp_path_factory.mktemp("report")
    write_tfrecords(folder / "train.tfrecords", make_records(600))
    write_tfrecords(folder / "val.tfrecords", make_records(300, seed=1))
    run_train(
        f"--training_data_dir={folder}/train.tfrecords", f"--val_data_dir={folder}/val.tfrecords",
        f"--model_dir={folder}/<i>model", "--feature_size=50", "--batch_size=20", "--log_steps=5",
        "--num_epochs=2", "--embedding_size=4", "--deep_layers=8", "--profile_steps=11,20", code=0,
    )  # fmt: skip
    return folder / "<i>model"


def make(*arguments, code=0):
    return run_python("scripts/report.py", *arguments, code=code)


@pytest.fixture(scope="module")
def page(run):
    make(run)
    return (run / "report" / "report.html").read_text()


def test_the_page_needs_nothing_else_and_its_tags_are_closed(page):
    as_xml = re.sub(r"(<(?:meta|img)\b[^>]*)>", r"\1/>", page)  # which HTML does not close
    sources = [image.get("src") for image in ElementTree.fromstring(as_xml).iter("img")]
    assert len(sources) == 8
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"(src|href)=.?(http|/)", page)


def test_the_page_holds_the_figures_of_the_run(page, run):
    report = json.loads((run / "report.json").read_text())
    assert f"{report['eval']['auc']:.6g}" in page
    for entry in json.loads((run / "evaluations.json").read_text()):
        assert f"{entry['log_loss']:.6g}" in page
    assert "<th>num_epochs</th>" in page and "<th>embedding_size</th>" in page
    assert "&lt;i&gt;model" in page and "<i>" not in page


def test_the_timeline_shows_each_step_and_the_threads_of_the_input(run, page):
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    threads = [e for e in events if e.get("name") == "thread_name"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in threads}
    ran = [e for e in events if e.get("ph") in ("X", "i")]  # i: took less than a microsecond
    calls = collections.Counter(e["name"].strip() for e in ran)
    assert calls["AssignAddVariableOp"] == 10  # of the global step
    # Whoever makes the last one may not have ended it when the step, and the profiler, end.
    assert calls["IteratorGetNext"] in (9, 10)
    assert any(names[e["pid"], e["tid"]].startswith("tf_data") for e in ran)
    profile = json.loads((run / "report.json").read_text())["profile"]
    assert profile["steps"] == 10
    assert sum(x["share"] for x in profile["operators"]) == pytest.approx(1)
    (product,) = [x for x in profile["operators"] if x["operator"] == "MatMul"]
    # Nothing runs inside it.
    lasted = [e.get("dur", 0) / 1e3 for e in ran if e["name"].strip() == "MatMul"]
    found = 10 * product["calls"], 10 * product["ms"]
    assert found == pytest.approx((len(lasted), sum(lasted)))
    assert "<h2>Operators, per step of 10</h2>" in page and "<td>MatMul</td>" in page


def test_chromium_shows_the_page_with_all_its_images(page, tmp_path):
    if not shutil.which("chromium"):
        pytest.skip("chromium is not installed")
    script = """<script>onload = () => { document.title = "seen " +
        [...document.images].filter(i => i.complete && i.naturalWidth > 400).length + " of " +
        document.images.length + ", too wide: " +
        (document.documentElement.scrollWidth > innerWidth) + ", broken: " +
        [...document.querySelectorAll("th, td")].filter(cell => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            const lines = new Set([...range.getClientRects()].map(r => r.top)).size;
            return lines > 1 && /^\\S{1,40}$/.test(cell.textContent);
        }).map(cell => cell.textContent) + "." }</script>"""
    page = page.replace("train.tfrecords", "train" + 300 * "x" + ".tfrecords")  # which may break
    (tmp_path / "page.html").write_text(page.replace("</body>", script + "</body>"))
    done = subprocess.run(
        [*_CHROMIUM, f"--user-data-dir={tmp_path}/profile", "--window-size=1200,1900",
         f"--screenshot={tmp_path}/page.png", "--dump-dom", f"file://{tmp_path}/page.html"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "<title>seen 8 of 8, too wide: false, broken: .</title>" in done.stdout, (
        done.stdout[-300:] + done.stderr[-1000:]
    )
    with tf.io.gfile.GFile(str(tmp_path / "page.png"), "rb") as f, tf.Graph().as_default():
        shown = v1.Session().run(tf.image.decode_png(f.read(), channels=3))
    assert (shown.std(axis=(1, 2)) > 5).mean() > 0.8  # hardly a row of it is empty


def test_the_plots_lie_beside_the_page(page, run):
    names = sorted(path.name for path in (run / "report").iterdir())
    plots = ["auc", "calibration", "learning_rate", "loss", "precision_recall", "roc"]
    plots += ["throughput", "utilization"]
    assert names == sorted(["report.html"] + [f"{plot}.png" for plot in plots])


def test_a_page_of_an_evaluation_alone_has_its_curves(run, tmp_path):
    report = json.loads((run / "report.json").read_text())
    short = {k: report[k] for k in ("task_type", "eval", "curves", "global_step")}
    (tmp_path / "report.json").write_text(json.dumps({**short, "task_type": "eval"}))
    make(tmp_path)
    assert {p.name for p in (tmp_path / "report").iterdir()} == {
        "report.html", "roc.png", "precision_recall.png", "calibration.png",
    }  # fmt: skip


def test_the_jobs_that_follow_stand_below_the_training(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run, model)
    training = json.loads((model / "report.json").read_text())
    auc = 0.123457
    later = {
        "eval": {**training, "task_type": "eval", "eval": {**training["eval"], "auc": auc}},
        "infer": {"task_type": "infer", "examples": 4711},
    }
    for task, content in later.items():
        (model / f"report.{task}.json").write_text(json.dumps(content))
    make(model)
    page = (model / "report" / "report.html").read_text()
    titles = re.findall("<h1>([^<]*)</h1>", page)
    assert titles == ["Training: model", "Evaluation", "Inference"]
    above, evaluation, inference = re.split("<h1>(?:Evaluation|Inference)</h1>", page)
    assert f"{training['eval']['auc']:.6g}" in above and f"{auc:.6g}" in evaluation
    assert "4,711" in inference
    assert [text.count("<img") for text in (above, evaluation, inference)] == [8, 3, 0]
    assert (model / "report" / "roc.eval.png").exists()


def test_an_evaluation_of_another_step_than_the_trainings_is_said(run, tmp_path):
    training = json.loads((run / "report.json").read_text())
    for name, step in (("", training["global_step"]), (".eval", 7), (".importance", 60)):
        content = {**training, "global_step": step}
        (tmp_path / f"report{name}.json").write_text(json.dumps(content))
    make(tmp_path)
    titles = re.findall("<h1>([^<]*)</h1>", (tmp_path / "report" / "report.html").read_text())
    assert titles == [f"Training: {tmp_path.name}", "Evaluation of step 7", "Importance"]


def test_of_a_step_that_was_taken_twice_the_later_figure_counts(tmp_path):
    for i, (loss, time) in enumerate([(2.0, 50.0), (1.0, 100.0)]):
        with v1.summary.FileWriter(str(tmp_path), filename_suffix=f".{i}") as writer:
            value = v1.Summary.Value(tag="log_loss", simple_value=loss)
            writer.add_event(v1.Event(wall_time=time, step=7, summary=v1.Summary(value=[value])))
    program = "import pathlib, sys; sys.path.insert(0, 'scripts'); import report;"
    program += "print(report._scalars(pathlib.Path(sys.argv[1])))"
    done = run_python("-c", program, str(tmp_path))
    assert done.stdout.strip() == "{'log_loss': [(7, 100.0, 1.0)]}"


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "holds no report.json; give the --model_dir of a finished job."),
        ("{", "report.json cannot be read: "),
        ("[]", "report.json does not hold a JSON object."),
        ("{}", "report.json is not as train.py writes it (KeyError('task_type'))."),
        ('{"task_type": "x", "curves": {"roc": [3]}}', "report.json is not as train.py writes it"),
    ],
)
def test_says_in_a_sentence_what_is_wrong_with_a_folder(tmp_path, content, said):
    if content:
        (tmp_path / "report.json").write_text(content)
    done = make(tmp_path, code=2)
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "report.py: give one model_dir, e.g. scripts/report.py model"),
        (["s3://bucket/model"], "s3://bucket/model is remote, but only local folders can be "),
        (["model", "--output_dir=s3://bucket/page"], "s3://bucket/page is remote, but only loca"),
        (["--outputdir=x", "model"], "Unknown command line flag 'outputdir'. Did you mean: output"),
    ],
)
def test_refuses_what_it_cannot_read_or_write_in_a_sentence(arguments, said):
    done = make(*arguments, code=2)
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_the_deciles_are_those_of_numpy():
    random = np.random.RandomState(0)
    scores = random.rand(5000).astype(np.float32).round(3)  # some are equal
    labels = (random.rand(5000) < scores).astype(np.float32)
    evaluation = metrics.Evaluation()
    for part in np.array_split(np.arange(5000), 7):
        zeros = np.zeros(len(part), np.float32)
        evaluation.add(labels[part], zeros, scores[part], zeros)
    assert len(evaluation.roc()) <= 202  # whose points test_metrics.py checks
    deciles = evaluation.deciles()
    assert len(deciles) == 10 and sum(d["examples"] for d in deciles) == 5000
    order = np.argsort(scores, kind="stable")
    for found, rows in zip(deciles, np.array_split(order, 10)):
        assert abs(found["examples"] - 500) < 15
        assert found["prediction"] == pytest.approx(scores[rows].mean(), abs=0.003)
        assert found["positives"] == pytest.approx(labels[rows].mean(), abs=0.03)


def test_thresholds_are_those_of_a_loop():
    random = np.random.RandomState(0)
    scores = random.rand(3000).astype(np.float32).round(2)  # many are equal
    labels = (random.rand(3000) < scores).astype(np.float32)
    weights = random.randint(0, 3, 3000).astype(np.float32)
    for weight in (None, weights):
        evaluation = metrics.Evaluation(weight is not None)
        zeros = np.zeros(3000, np.float32)
        evaluation.add(labels, zeros, scores, zeros, *([] if weight is None else [weight]))
        found, counted = evaluation.thresholds(), np.ones(3000) if weight is None else weight
        assert [x["threshold"] for x in found] == sorted({x["threshold"] for x in found})[::-1]
        assert 0.5 in [x["threshold"] for x in found]
        for entry in found:
            above = scores >= np.float32(entry["threshold"])
            hits = counted[above & (labels > 0)].sum()
            assert entry["share"] == pytest.approx(counted[above].sum() / counted.sum())
            assert entry["precision"] == pytest.approx(hits / counted[above].sum())
            assert entry["recall"] == pytest.approx(hits / counted[labels > 0].sum())
        for share in metrics.SHARES:  # the highest threshold that reaches it
            least = min(x["share"] for x in found if x["share"] >= share)
            assert least < share + 0.02


def test_without_both_classes_there_is_no_roc_curve():
    evaluation = metrics.Evaluation()
    assert evaluation.roc() == evaluation.deciles() == evaluation.thresholds() == []
    ones = np.ones(3, np.float32)
    evaluation.add(ones, ones, ones, ones)
    assert evaluation.roc() == []
    assert evaluation.deciles() == [{"examples": 3, "prediction": 1.0, "positives": 1.0}]
