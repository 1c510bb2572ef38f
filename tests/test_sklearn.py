"""DeepFMClassifier: what scikit-learn asks of an estimator, and what its programs answer.

Most fits start their programs from warm.py.
"""

import contextlib
import functools
import io
import json
import os
import pickle
import signal
import sys
import threading
import zipfile
from types import SimpleNamespace

import numpy as np
import pandas
import psutil
import pytest
import warm
from conftest import run_python, run_tool, run_train, wait_until
from joblib import parallel_backend
from sklearn.base import clone
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import check_estimator

from deepfm_sklearn import DeepFMClassifier, children

TINY = {"embedding_size": 2, "deep_layers": (4,), "num_epochs": 1, "verbose": 0}
make = functools.partial(DeepFMClassifier, **TINY)


@contextlib.contextmanager
def children_from_warm():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm.for_launchers({}).items():
            patch.setenv(name, value)
        patch.setattr(children, "sys", SimpleNamespace(executable=warm.PYTHON, stderr=sys.stderr))
        yield


@pytest.fixture
def quick():
    """Has programs start from warm.py."""
    with children_from_warm():
        yield


def table_of(rows, seed=0):
    """(a DataFrame, its labels "yes" and "no", which the columns decide)."""
    random = np.random.RandomState(seed)
    table = pandas.DataFrame({
        "shop": random.choice(list("abcdef"), rows),
        "age": random.randint(18, 80, rows),
        "price": random.rand(rows).round(3),
        "at": pandas.Timestamp(2020, 1, 1) + pandas.to_timedelta(random.randint(0, 999, rows), "h"),
        "tags": pandas.Categorical(random.choice(["x", "y"], rows)),
    })  # fmt: skip
    logit = 3 * table["shop"].isin(list("abc")) + 3 * (table["price"] > 0.5) - 3
    labels = np.where(random.rand(rows) < 1 / (1 + np.exp(-logit)), "yes", "no")
    table.loc[table.index % 9 == 0, "price"] = np.nan
    return table, labels


@pytest.fixture(scope="module")
def rows():
    return table_of(600)


@pytest.fixture(scope="module")
def once(rows):
    other, _ = table_of(100, seed=1)
    classifier = make(num_epochs=20, learning_rate=0.01, batch_size=32)
    with children_from_warm():
        return classifier.fit(*rows), other, classifier.predict_proba(other)


@pytest.fixture
def fitted(quick, once):
    """(a fitted classifier, other rows, what it predicts for them)."""
    return once


def test_the_import_loads_no_tensorflow():
    code = "import sys, deepfm_sklearn; print(*(f'{x}' in sys.modules for x in sys.argv[1:]))"
    done = run_python("-c", code, "tensorflow", "sklearn", fresh=True, code=0)
    assert done.stdout == "False True\n"


def test_it_learns_labels_that_are_words(fitted):
    classifier, _, _ = fitted
    other, labels = table_of(300, seed=2)
    given = {**TINY, "num_epochs": 20, "learning_rate": 0.01, "batch_size": 32}
    assert given.items() <= classifier.get_params().items() and classifier.n_features_in_ == 5
    assert classifier.classes_.tolist() == ["no", "yes"]
    found = classifier.predict_proba(other)
    assert found.shape == (300, 2) and np.allclose(found.sum(axis=1), 1)
    assert roc_auc_score(labels == "yes", found[:, 1]) > 0.8  # of .90 possible
    picked = np.array(["no", "yes"])[(found[:, 1] > 0.5).astype(int)]
    assert classifier.score(other, labels) == np.mean(picked == labels)
    assert 0.5 < classifier.report_["eval"]["auc"] < 1


def test_a_saved_classifier_is_the_best_model_for_train_py(fitted, tmp_path):
    classifier, other, expected = fitted
    classifier.save(tmp_path / "saved.zip")
    with zipfile.ZipFile(tmp_path / "saved.zip") as archive:
        archive.extractall(tmp_path)
    best, last = classifier.report_["best"]["step"], classifier.report_["global_step"]
    assert best < last and f"ckpt-{best}" in (tmp_path / "model" / "checkpoint").read_text()
    other.astype({"at": str}).to_csv(tmp_path / "rows.csv", index=False)
    run_tool(
        "prepare", f"--feature_map={tmp_path}/feature_map.json", f"--output_dir={tmp_path}/data",
        f"--test_input={tmp_path}/rows.csv", code=0,
    )  # fmt: skip
    words = f"--model_dir={tmp_path}/model", f"--predictions_file={tmp_path}/found.txt"
    run_train("--task_type=infer", f"--infer_data_dir={tmp_path}/data/test", *words, code=0)
    assert np.array_equal(np.loadtxt(tmp_path / "found.txt"), expected[:, 1])


def test_a_copy_predicts_the_same(fitted, tmp_path):
    classifier, other, expected = fitted
    classifier.save(tmp_path / "saved")
    loaded = pickle.loads(pickle.dumps(DeepFMClassifier.load(tmp_path / "saved")))
    assert np.array_equal(loaded.predict_proba(other), expected)
    same = {**loaded.get_params(), "deep_layers": (4,)} == classifier.get_params()
    assert same and loaded.report_ == classifier.report_
    for name in ("classes_", "feature_names_in_"):
        assert getattr(loaded, name).tolist() == getattr(classifier, name).tolist()
    with pytest.raises(NotFittedError):
        clone(classifier).predict(other)
    (tmp_path / "other").write_text("x")
    with pytest.raises(ValueError, match="other is not what DeepFMClassifier.save writes"):
        DeepFMClassifier.load(tmp_path / "other")


def test_columns_count_by_name_in_any_order_and_those_of_an_array_by_place(fitted):
    classifier, other, expected = fitted
    mixed = other[[*reversed(other.columns)]].assign(more=1, **{"class": "x"})
    assert np.allclose(classifier.predict_proba(mixed[::-1])[::-1], expected, rtol=0, atol=1e-6)
    cells = other.astype({"at": str}).to_numpy(dtype=object)
    assert np.array_equal(classifier.predict_proba(cells), expected)


def test_bad_rows_and_flags_are_refused_with_the_sentence_of_the_program(fitted, rows):
    classifier, other, _ = fitted
    table, labels = rows
    with pytest.raises(ValueError, match=r"^X\.parquet: .*shop"):
        classifier.predict(other.drop(columns="shop"))
    with pytest.raises(ValueError, match=r"^X\.parquet: row 3: .*'dear' is not a number"):
        classifier.predict(other.assign(price=[0.5] * 3 + ["dear"] + [0.5] * 96).astype(str))
    with pytest.raises(ValueError, match="Only binary classification .* 3 class.es.: 0, 1, 2"):
        make().fit(table, np.arange(600) % 3)
    with pytest.raises(ValueError, match="Did you mean: batch_size"):
        make(flags={"batch_sise": 3}).fit(table, labels)
    with pytest.raises(ValueError, match=r"X has no column shops, but (\w+, )*\w+\.$") as error:
        make(columns={"shops": "category"}).fit(table, labels)
    assert "__label__" not in str(error.value)


def test_each_fit_is_alone_whatever_thread_it_is_in(quick, rows, tmp_path, monkeypatch):
    """Nor does it take part in a job whose variables are set."""
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path / "exported"))
    monkeypatch.setenv("SM_CHANNEL_TRAINING", str(tmp_path / "none"))
    seeds, found = (1, 2, 1), [None] * 3

    def fit(i):
        found[i] = make(seed=seeds[i]).fit(*rows).report_["eval"]

    threads = [threading.Thread(target=fit, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[2] and found[0]["log_loss"] != found[1]["log_loss"]
    assert not (tmp_path / "exported").exists()


def test_cross_validation_in_two_processes(quick, rows):
    with parallel_backend("multiprocessing"):  # which takes over what `quick` has set
        scores = cross_val_score(make(), *rows, cv=2, n_jobs=2)
    assert scores.shape == (2,) and np.isfinite(scores).all()


def test_a_search_sets_parameters_which_reach_the_program(rows, monkeypatch):
    seen = []

    def run(module, flags, folder, verbose):
        assert flags["seed"] == 8
        if module == "deepfm":
            seen.append(flags)
            raise ValueError("it is not to run")

    monkeypatch.setattr(children, "run", run)
    classifier = make(seed=8, flags={"cache": "memory", "num_epochs": 7})
    search = GridSearchCV(classifier, {"embedding_size": [3, 5]}, cv=2, refit=False)
    with pytest.warns(FitFailedWarning):
        search.fit(*rows)
    assert [x["embedding_size"] for x in seen] == [3, 3, 5, 5]
    assert {x["auto"] for x in seen} == {True} and {x["cache"] for x in seen} == {"memory"}
    assert {x["num_epochs"] for x in seen} == {7} and seen[0]["deep_layers"] == (4,)
    assert seen[0]["learning_rate"] is None  # --auto's


def test_integers_of_an_array_are_ids_but_for_columns_of_which_more_is_told(quick):
    random = np.random.RandomState(0)
    ids = random.randint(0, 40, (500, 3))
    told = {"x1": {"kind": "hash", "buckets": 16}, "x2": "number"}
    classifier = make(columns=told, validation_fraction=0).fit(ids, ids[:, 0] % 2)
    assert "val_data_dir" not in classifier.report_["flags"]
    with zipfile.ZipFile(io.BytesIO(classifier.model_)) as archive:
        fields = json.loads(archive.read("feature_map.json"))
    kinds = {x["name"]: x["kind"] for x in fields["columns"]}
    assert kinds == {"x0": "category", "x1": "hash", "x2": "number", "__label__": "label"}
    with pytest.raises(ValueError, match="X has 2 features, but DeepFMClassifier is expecting 3"):
        classifier.predict(ids[:, :2])


# Programs.


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes text a module that children find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda text: (tmp_path / "program.py").write_text("import os, sys, time\n" + text)


def run(verbose=0, **flags):
    children.run("program", flags, "/tmp/x", verbose)


@pytest.mark.parametrize(
    "end, kind, sentence",
    [
        ("print('log\\nx.py: /tmp/x/a: bad.', file=sys.stderr); exit(2)", ValueError, "^a: bad.$"),
        ("print('x.py: full.', file=sys.stderr); exit(1)", RuntimeError, "^full.$"),
        ("1 / 0", RuntimeError, "program ended with exit code 1: ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", RuntimeError, "program ended with exit code -9"),
    ],
)  # fmt: skip
def test_how_a_program_ends_is_told(program, end, kind, sentence):
    program(end)
    with pytest.raises(kind, match=sentence):
        run()


def test_a_program_gets_flags_and_nothing_from_the_working_folder(program, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "deepfm.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path / "here")
    program(f"import deepfm\nopen({str(tmp_path / 'said')!r}, 'w').write(str(sys.argv[1:]))")
    run(a=None, b=(1, 2), c=True, d=0.5)
    assert (tmp_path / "said").read_text() == str(["--b=1,2", "--c=True", "--d=0.5"])


STEP = "10:00:00 step 100  loss 0.47964  508 examples/s  input wait 16 %  CPU 100 %  left 0:00:37"


def test_a_bar_or_the_log_is_shown_as_asked(program, capsys):
    program(f"print('other\\n{STEP}', file=sys.stderr)")
    for verbose in (0, 1, 2):
        run(verbose)
    out, err = capsys.readouterr()
    bar, log = err.split("\n", 1)
    assert out == "" and log == f"other\n{STEP}\n"
    assert bar == f"\r[{'.' * 30}]   0%  loss 0.47964  left 0:00:37 "


def test_what_interrupts_the_caller_ends_the_program(program, tmp_path):
    program(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    children = []

    def interrupt():
        assert wait_until(lambda: (tmp_path / "pid").exists() and text(), 100)
        children.append(psutil.Process(int(text())))
        os.kill(os.getpid(), signal.SIGINT)

    text = (tmp_path / "pid").read_text
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run()
    signal.signal(signal.SIGINT, before)
    thread.join()
    assert not children[0].is_running()


# What scikit-learn asks of every estimator. Of the checks that fit, the suite runs a few.

DOES_NOT_APPLY = {
    "check_dtype_object": "of a dict in a cell, pyarrow says in its own words that it is no cell",
    "check_methods_sample_order_invariance": "allows 1e-7; another order rounds otherwise (6e-8)",
    "check_methods_subset_invariance": "likewise, and predicts row by row, in a process each",
}
FITS = {
    "check_estimators_dtypes", "check_fit_score_takes_y", "check_estimators_fit_returns_self",
    "check_pipeline_consistency", "check_estimators_pickle", "check_classifier_data_not_an_array",
    "check_classifiers_classes", "check_classifiers_train", "check_dict_unchanged",
    "check_dont_overwrite_parameters", "check_fit_idempotent", "check_fit_check_is_fitted",
    "check_fit2d_predict1d", "check_supervised_y_2d", "check_n_features_in",
    "check_estimators_overwrite_params",
}  # fmt: skip


def checks():
    for i, (estimator, check) in enumerate(check_estimator(make(), generate_only=True)):
        name = check.func.__name__
        if name in FITS:
            estimator = make(num_epochs=20, learning_rate=0.03, batch_size=16, min_count=1)
        if name not in DOES_NOT_APPLY:
            marks = [pytest.mark.table] * (name in FITS)
            yield pytest.param(estimator, check, id=f"{name}-{i}", marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator, check", checks())
def test_a_check_of_scikit_learn(quick, estimator, check):
    check(estimator)
