"""What follows from the evaluations of a run, even if it was interrupted."""

import functools
import json
import math

import pytest
from conftest import job_of

from deepfm.config import OptimizerConfig
from deepfm.errors import BadInput
from deepfm.state import evaluations


def history(folder, after=0, until=10**9, metric="auc", least=0.0):
    job = job_of(model_dir=str(folder), best_metric=metric, min_improvement=least)
    return evaluations.History(job, after, until)


def decay(found, factor, patience=1, least=0.0, metric="auc"):
    """Of a learning rate of 1."""
    found.job = found.job._replace(
        optimizer=OptimizerConfig(learning_rate=1.0), learning_rate_decay_on_plateau=factor,
        learning_rate_decay_patience=patience, min_learning_rate=least,
        learning_rate_decay_metric=metric,
    )  # fmt: skip
    return found.decay()


def filled(folder, aucs, **how):
    found = history(folder, **how)
    for i, auc in enumerate(aucs, 1):
        found.add(10 * i, {"auc": auc, "log_loss": 1 - auc, "calibration": 1.0})
        found.keep()
    return found


def test_the_best_is_the_first_of_equals(tmp_path):
    found = filled(tmp_path, [0.6, 0.8, 0.7, 0.8])
    assert found.best["step"] == 20
    assert found.since_best == 2


@pytest.mark.parametrize(
    "metric, step", [("auc", 20), ("log_loss", 10), ("auc_minus_log_loss", 30)]
)
def test_the_metric_decides_which_is_best(tmp_path, metric, step):
    found = history(tmp_path, metric=metric)
    found.add(10, {"auc": 0.6, "log_loss": 0.1})
    found.add(20, {"auc": 0.7, "log_loss": 0.2})
    found.add(30, {"auc": 0.69, "log_loss": 0.15})
    assert found.best["step"] == step


# An evaluation that has a better AUC but a worse log loss, as in BARS's run of criteo_x4_001.
@pytest.mark.parametrize(
    "metric, factor", [("auc", 1), ("log_loss", 0.1), ("auc_minus_log_loss", 0.1)]
)
def test_the_metric_decides_when_the_learning_rate_decays(tmp_path, metric, factor):
    found = history(tmp_path)
    found.add(10, {"auc": 0.809317, "log_loss": 0.442192})
    found.add(20, {"auc": 0.809407, "log_loss": 0.442291})
    assert decay(found, 0.1, metric=metric) == factor


def test_a_rise_that_is_too_small_is_no_improvement(tmp_path):
    aucs = [0.6, 0.6005, 0.6009, 0.6011, 0.6015]
    found = filled(tmp_path, aucs, least=0.001)
    assert (found.best["step"], found.since_best) == (40, 1)  # the first that beats .6 by enough
    assert decay(found, 0.5) == 0.125
    assert filled(tmp_path, aucs).best["step"] == 50
    assert decay(filled(tmp_path, aucs), 0.5) == 1


def test_gauc_decides_where_it_is_known(tmp_path):
    found = history(tmp_path, metric="gauc")
    found.add(10, {"auc": 0.9, "log_loss": 0.1})  # before --gauc_field was given
    for step, gauc in (20, math.nan), (30, 0.7), (40, 0.6):
        found.add(step, {"auc": 0.5, "log_loss": 0.5, "gauc": gauc})
        found.keep()
    assert found.best["step"] == 30
    assert decay(found, 0.1, metric="gauc") == 0.1  # after step 40 alone
    assert history(tmp_path, until=40, metric="gauc").best == found.best


def test_an_auc_that_is_not_a_number_is_never_best(tmp_path):
    assert filled(tmp_path, [math.nan, 0.5, math.nan]).best["step"] == 20


def test_the_learning_rate_is_cut_for_each_evaluation_that_is_no_better(tmp_path):
    assert decay(filled(tmp_path, [0.6, 0.6, 0.7, 0.65, 0.7, 0.8]), 0.5) == 0.125
    assert decay(filled(tmp_path, [0.6]), 0.5) == 1
    falling = filled(tmp_path, [0.6, 0.6, 0.59, 0.7, 0.65, 0.68, 0.66, 0.67])
    assert decay(falling, 0.5, patience=2) == 0.125  # the third, the sixth, and the last
    assert decay(falling, 0.5, patience=3) == 0.5  # the seventh
    assert decay(falling, 0.5, least=0.1) == 0.1
    assert decay(filled(tmp_path, [math.nan, 0.6, math.nan, 0.5]), 0.5) == 0.5


def test_a_run_that_is_started_again_knows_its_evaluations_up_to_the_checkpoint(tmp_path):
    filled(tmp_path, [0.6, 0.8, 0.7])
    again = history(tmp_path, until=30)
    assert (again.best["step"], again.since_best, decay(again, 0.5)) == (20, 1, 0.5)
    assert again.has(30) and not again.has(31)
    again = history(tmp_path, until=29)
    assert (again.best["step"], again.since_best) == (20, 0)


def test_all_processes_compare_the_evaluations_that_the_chief_compares(tmp_path):
    start = functools.partial(evaluations.History, job_of(model_dir=str(tmp_path)), 0, 10**9)
    first = start("data of now")
    first.add(10, {"auc": 0.7, "log_loss": 0.3})
    first.keep()
    # Gone on with after a kill; of the data the chief alone knows the fingerprint.
    chief = start("data of now")
    told = json.loads(json.dumps([chief.entries, chief.data]))
    ranks = [chief, start(known=told)]
    for rank in ranks:
        for step, auc in (20, 0.6), (30, 0.8), (40, 0.75):
            rank.add(step, {"auc": auc, "log_loss": 1 - auc})
    assert [decay(rank, 0.5) for rank in ranks] == [0.25, 0.25]
    assert [rank.since_best for rank in ranks] == [1, 1]
    assert [rank.best["step"] for rank in ranks] == [30, 30]


def test_evaluations_of_which_the_file_is_gone_are_missed(tmp_path, caplog):
    assert not filled(tmp_path, [0.6]).lost
    (tmp_path / "eval").mkdir()
    assert not history(tmp_path).lost
    (tmp_path / evaluations.FILE).unlink()
    assert not history(tmp_path, after=30, until=30).lost  # a run that begins
    assert not caplog.records
    assert history(tmp_path).lost
    assert "evaluations.json is missing" in caplog.text


def test_evaluations_of_another_run_do_not_count(tmp_path):
    filled(tmp_path, [0.9, 0.6, 0.7])
    assert history(tmp_path, after=10).best["step"] == 30


@pytest.mark.parametrize(
    "text", ["{", "{}", "{}x", '[{"step": 1}]', "[1]", '[{"step": "a"}]', "7",
             '[{"step": 1, "auc": 0.5, "log_loss": 1, "data": 3}]', 100_000 * "["]
)  # fmt: skip
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / evaluations.FILE).write_text(text)
    with pytest.raises(BadInput, match=r"evaluations.json is not a list of evaluations"):
        history(tmp_path)
