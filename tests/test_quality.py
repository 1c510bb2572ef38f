"""What training says at its end about its quality, and about what would improve it."""

from types import SimpleNamespace

import pytest
from conftest import job_of, run_train, small_training

from deepfm import evaluation
from deepfm.config import InputConfig
from deepfm.state import evaluations

_IMPROVES = "The last evaluation still improved auc by 0.0100: try --num_epochs=6"


@pytest.mark.parametrize(
    "steps, aucs, changed, said",
    [
        (26, [0.8], {}, "26 steps are few: try --batch_size=128 --num_epochs=10"),
        (26, [0.8], {"max_steps": 26}, None),
        (26, [0.8], {"stopped": True}, None),
        (600, [0.8], {}, None),
        (600, [0.8, 0.8005], {}, None),
        (600, [0.8, 0.81], {}, _IMPROVES),
        (600, [0.83, 0.8, 0.81], {}, None),  # worse than the first
        (600, [0.81, 0.8], {}, None),
    ],
)  # fmt: skip
def test_training_ends_with_what_would_help_and_the_base_rate(
    tmp_path, monkeypatch, steps, aucs, changed, said
):
    log = []
    monkeypatch.setattr(evaluation.logging, "info", lambda text, *args: log.append(text % args))
    asked = InputConfig(batch_size=1024, num_epochs=3)
    job = job_of(model_dir=str(tmp_path), input=asked, max_steps=changed.get("max_steps"))
    history = evaluations.History(job, after=1000, until=1000)
    for i, auc in enumerate(aucs):
        history.add(1000 + steps - len(aucs) + 1 + i, {"auc": auc, "log_loss": 0.5})
    run = SimpleNamespace(
        _job=job, _run_step=1000, history=history, results=(0, {"positive_rate": 0.25}, {}),
        _stop=SimpleNamespace(early="stopped" in changed),
    )  # fmt: skip
    evaluation.Evaluating.log_quality(run, 1000 + steps)
    assert log[:-1] == ([f"{said}."] if said else [])
    best = f"auc={max(aucs):.6f} log_loss=0.500000 (--checkpoint=best)"
    assert best in log[-1] and log[-1].endswith("rate 0.2500 alone: auc=0.5 log_loss=0.562335")


def test_a_run_without_validation_data_says_that_its_quality_is_unknown(data, tmp_path):
    done = run_train(*small_training(data, tmp_path))
    assert done.stderr.splitlines()[-1].endswith("is unknown: give --val_data_dir."), done.stderr
