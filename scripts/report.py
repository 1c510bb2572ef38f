"""Makes a page about a training run for the browser: one HTML file that needs nothing else.

    .venv/bin/python scripts/report.py MODEL_DIR
    .venv/bin/python scripts/report.py MODEL_DIR --output_dir=run-1

It shows loss and AUC over steps and over days, the ROC and the precision-recall curve, calibration
by decile, thresholds, slices by the values of a field, throughput and utilization over time, data
and flags; below, the last evaluation, importance of the fields, inference and export, with the step
of the model if it is not the training's. The plots are also written beside report.html, as PNG
files. The program reads report.json, report.TASK.json, model.json, evaluations.json and the
summaries of a model_dir on this machine.
"""

import base64
import html
import json
import math
import os
import pathlib
import statistics
from typing import Dict, List, Optional, Tuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from programs import BadInput, need, program, run_program, write_files  # first

# isort: split
from absl import flags
from tables_and_plots import axes_of, png

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", None, "Folder for page and plots. Default: MODEL_DIR/report.")

_MOST = 40  # fields in the chart of importance

_COLUMNS_OF_DAYS = (
    "day", "auc before", "log loss before", "auc", "log loss", "features", "new", "gone",
)  # fmt: skip

Series = List[Tuple[float, float]]  # (global step, or minutes; value)

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #f5f7f9; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
table + h1 { margin-top: 48px; }
h2 { font-size: 18px; margin: 36px 0 12px; }
.verdict { margin: 12px 0 24px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.cards div { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 10px 18px; }
.cards b { display: block; font-size: 22px; }
.plots { display: grid; gap: 16px; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
figure { margin: 0; background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 8px; }
img { width: 100%; display: block; }
table { border-collapse: collapse; display: block; max-width: 100%; overflow-x: auto; }
td, th { border: 1px solid #dde3e9; padding: 4px 12px; text-align: left; background: #fff; }
th, td.number { white-space: nowrap; }
td { overflow-wrap: anywhere; }
td:not(.number) { min-width: 8em; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def main(arguments):
    need("matplotlib", "tensorflow")
    words = arguments[1:]
    if len(words) != 1:
        raise BadInput("give one model_dir, e.g. scripts/report.py model")
    for name in (words[0], FLAGS.output_dir or ""):
        if "://" in name:
            raise BadInput(
                f"{name} is remote, but only local folders can be read and written; copy it, e.g. "
                "with aws s3 cp --recursive --exclude 'model.ckpt-*' s3://bucket/model model"
            )
    folder = pathlib.Path(words[0])
    output = pathlib.Path(FLAGS.output_dir or folder / "report")
    page, plots = make(folder)
    program.make_output_dir(output)
    write_files(output, {"report.html": page.encode(), **plots})
    print(f"Wrote {output / 'report.html'} and {len(plots)} plots.")


def make(folder: pathlib.Path) -> Tuple[str, Dict[str, bytes]]:
    """(the page, its plots: {name: PNG}) of a model_dir."""
    reports = {task: _json(folder / f"report{task}.json") for task in ("", *_LATER)}
    there = {task: report for task, report in reports.items() if report is not None}
    if not there:
        raise BadInput(f"{folder} holds no report.json; give the --model_dir of a finished job.")
    model = _json(folder / "model.json") or {}
    evaluations = _json(folder / "evaluations.json", list) or []
    scalars = _scalars(folder)
    try:
        plots = {task: _plots_of_results(there[task], task) for task in there if task}
        plots[""] = _plots(reports[""] or {}, model, evaluations, scalars)
        page = _page(folder, reports, model, evaluations, plots)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        read = " or ".join(f"report{task}.json" for task in there)
        raise BadInput(f"{folder}: {read} is not as train.py writes it ({error!r}).") from error
    return page, {name: png for drawn in plots.values() for name, png in drawn.items()}


def _json(path, kind=dict):
    """The JSON in a file; None if there is no file."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise BadInput(f"{path} does not hold a JSON {'object' if kind is dict else 'list'}.")
    return content


def _scalars(folder) -> Dict[str, List[Tuple[int, float, float]]]:
    """The scalars of the summaries, each (global step, time in s, value), by name.

    If a step was taken twice, as after an interruption, its later values count.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summaries = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    if any(folder.glob("*tfevents*")):  # without any, Reload fails in Python 3.7
        summaries.Reload()
    curves = {}
    for name in summaries.Tags()["scalars"]:
        by_time = sorted(summaries.Scalars(name))
        by_step = {step: (step, time, value) for time, step, value in by_time}
        curves[name] = [by_step[step] for step in sorted(by_step)]
    return curves


def _plots(report, model, evaluations, scalars) -> Dict[str, bytes]:
    """{file name: PNG} of all plots that have data."""
    loss = model.get("loss_type", "log_loss")
    begin = min((points[0][1] for points in scalars.values()), default=0)
    by_step = lambda name: [(step, value) for step, _, value in scalars.get(name, [])]
    speed = lambda name: [
        ((time - begin) / 60, value) for _, time, value in scalars.get(f"speed/{name}", [])
    ]
    percent = lambda name: [(x, 100 * value) for x, value in speed(name)]
    of_run = _of_last_run(evaluations)
    of = lambda name: [(e["step"], e[name]) for e in of_run if e[name] is not None]
    days = _days(evaluations)
    by_day = lambda name: [(i, e[name]) for i, e in enumerate(days, 1) if name in e]
    aucs = {"before training": by_day("auc before"), "after": by_day("auc")}
    log_losses = {"before training": by_day("log loss before"), "after": by_day("log loss")}
    shares = {
        "CPU": percent("host_cpu_utilization"),
        "GPU": percent("gpu_utilization"),
        "waiting for input": percent("input_wait_share"),
    }
    throughput, rates = {"": speed("examples_per_second")}, {"": by_step("learning_rate")}
    losses = {f"training ({loss})": by_step(loss)}
    if loss == "log_loss":
        losses["evaluation"] = of("log_loss")
    percents = {"bottom": 0, "top": 105}
    drawn = {
        "loss.png": _plot("Loss", ("step", ""), losses),
        "auc.png": _plot("AUC of the evaluations", ("step", ""), {"": of("auc")}),
        "auc_by_day.png": _plot("AUC by day", ("day", ""), aucs),
        "log_loss_by_day.png": _plot("Log loss by day", ("day", ""), log_losses),
        **_plots_of_results(report),
        "throughput.png": _plot("Throughput", ("minutes", "examples/s"), throughput, bottom=0),
        "utilization.png": _plot("Utilization", ("minutes", "%"), shares, **percents),
        "learning_rate.png": _plot("Learning rate", ("step", ""), rates, bottom=0),
    }
    return {name: png for name, png in drawn.items() if png}


def _of_last_run(evaluations):
    """The evaluations of the last run, without the one before its first step."""
    day = evaluations[-1].get("day") if evaluations else None
    return [e for e in evaluations if e.get("day") == day and not e.get("first")]


def _days(evaluations) -> List[dict]:
    """What the evaluations say of each day, if there is more than one: of the training data before
    the first step, and of the validation data last."""
    days = {}
    for entry in evaluations:
        found = days.setdefault(entry.get("day"), {"day": entry.get("day")})
        when = " before" * bool(entry.get("first"))
        names = {"auc": f"auc{when}", "log_loss": f"log loss{when}", "feature_size": "features"}
        names.update({"new": "new", "gone": "gone"})
        found.update({to: entry[name] for name, to in names.items() if name in entry})
    return list(days.values()) if len(days) > 1 else []


def _plots_of_results(report, kind="") -> Dict[str, bytes]:
    """{file name: PNG} of the evaluation in a report; `kind` is part of the names."""
    curves, results, drawn = report.get("curves") or {}, report.get("eval"), {}
    if curves.get("roc"):
        label = f"AUC {results['auc']:.4f}" if results else ""
        labels = "share of negatives above", "share of positives above"
        drawn["roc"] = _plot("ROC", labels, {label: curves["roc"]}, _diagonal(1), aspect="equal")
    if curves.get("precision_recall"):
        points = curves["precision_recall"]
        base = points[-1][1]  # the precision of random scores
        drawn["precision_recall"] = _plot(
            "Precision and recall", ("recall", "precision"), {"": points},
            {f"share of positives {base:.4g}": [(0, base), (1, base)]}, bottom=0,
        )  # fmt: skip
    if curves.get("deciles"):
        points = [(d["prediction"], d["positives"]) for d in curves["deciles"]]
        drawn["calibration"] = _plot(
            "Calibration by decile", ("mean prediction", "share of positives"), {"": points},
            _diagonal(1.05 * max(1e-6, *map(max, points))), aspect="equal",
        )  # fmt: skip
    if report.get("importance"):
        drawn["importance"] = _importance(report["importance"])
    return {f"{name}{kind}.png": png for name, png in drawn.items()}


def _importance(entries) -> bytes:
    """A bar for each of the fields that matter most, with a dot for each repeat."""
    shown = f"the first {_MOST} of {len(entries)} fields" if len(entries) > _MOST else "by field"
    names = [entry["name"][:40] for entry in entries[:_MOST]]
    figure, axes = axes_of(
        (10, 1.2 + 0.4 * len(names)), title=f"Importance, {shown}",
        xlabel="AUC falls by, if the field is permuted (median)",
    )  # fmt: skip
    for i, entry in enumerate(entries[:_MOST]):
        drops = [0 if x is None else x for x in entry["auc_drops"]]
        axes.barh(i, statistics.median(drops), color="C0")
        axes.plot(drops, [i] * len(drops), "k.", markersize=4)
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(names, fontsize=7)
    axes.invert_yaxis()
    return png(figure)


def _diagonal(end) -> Dict[str, Series]:
    return {"": [(0, 0), (end, end)]}


def _plot(
    title, labels, lines: Dict[str, Series], dashed: Dict[str, Series] = None, bottom=None,
    top=None, aspect="auto",
) -> Optional[bytes]:  # fmt: skip
    """A plot of some series, {label: points}, beside others; None if there is nothing to show."""
    lines = {label: [p for p in s if math.isfinite(p[1])] for label, s in lines.items()}
    lines = {label: series for label, series in lines.items() if series}
    if not lines:
        return None
    figure, axes = axes_of((6.4, 4), title=title, xlabel=labels[0], ylabel=labels[1])
    axes.grid(alpha=0.25)
    for label, series in (dashed or {}).items():
        axes.plot(*zip(*series), color="gray", linestyle="--", linewidth=1, label=label)
    for label, series in lines.items():
        marker = "o" if len(series) < 30 else None
        axes.plot(*zip(*series), label=label, marker=marker, markersize=4)
    axes.set_ylim(bottom=bottom, top=top)
    if labels[0] == "day":
        axes.locator_params(axis="x", integer=True)
    axes.set_aspect(aspect)
    if any({**lines, **(dashed or {})}):
        axes.legend()
    return png(figure)


# The other tasks: a part of the names of its report and plots, and its title.
_LATER = {
    ".eval": "Evaluation",
    ".importance": "Importance",
    ".infer": "Inference",
    ".export": "Export",
}


def _page(folder, reports, model, evaluations, plots) -> str:
    """The page; `reports` and `plots`: of the training ("") and of _LATER."""
    name, training = html.escape(folder.resolve().name), reports[""] or {}
    kind = "Model" if reports[""] is None else training["task_type"]
    kind = html.escape({"train": "Training"}.get(kind, kind))
    parts = _part(f"{kind}: {name}", training, plots[""], model, evaluations)
    for task, title in _LATER.items():
        if reports[task] is not None:
            step = reports[task].get("global_step")
            if training and step not in (None, training.get("global_step")):
                title += f" of step {_text(step)}"
            parts += _part(title, reports[task], plots[task])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>DeepFM: {name}</title><style>{_CSS}</style></head>\n"
        f"<body><main>{chr(10).join(parts)}</main></body></html>\n"
    )


def _part(title, report, plots, model=None, evaluations=None) -> List[str]:
    """The part of the page about a job; `model` and `evaluations` are a training's."""
    verdict, images = report.get("verdict"), "".join(map(_image, plots, plots.values()))
    curves = report.get("curves") or {}
    profile = report.get("profile") or {"steps": 0, "operators": []}
    columns = "operator", "calls", "ms", "share"
    rate = (report.get("eval") or {}).get("positive_rate")
    base = "" if rate is None else f" (base rate {rate:.4g})"
    tables = {
        "Days": _rows(_COLUMNS_OF_DAYS, _days(evaluations or [])),
        "Evaluations": _rows(("step", "auc", "log_loss"), _of_last_run(evaluations or [])),
        **_slices((report.get("eval") or {}).get("slices") or []),
        f"Thresholds{base}": _rows(
            ("threshold", "share", "precision", "recall"), curves.get("thresholds")
        ),
        "Calibration": _rows(("examples", "prediction", "positives"), curves.get("deciles")),
        "Fields": _rows(("name", "auc_drop", "log_loss_rise"), report.get("importance")),
        "Run": _pairs({k: v for k, v in report.items() if not isinstance(v, (dict, list))}),
        "Training data": _pairs(report.get("training_data")),
        "Validation data": _pairs(report.get("validation_data")),
        "Flags that are not at their defaults": _pairs(report.get("flags")),
        "Model": _pairs(model),
        "Skipped records": _rows(("file", "place", "reason"), report.get("skipped")),
        f"Operators, per step of {profile['steps']}": _rows(columns, profile["operators"][:20]),
    }
    return [
        f"<h1>{title}</h1>",
        *([f'<p class="verdict">{html.escape(verdict)}</p>'] if verdict else []),
        *_cards(report),
        *([f'<h2>Plots</h2><div class="plots">{images}</div>'] if images else []),
        *(f"<h2>{heading}</h2>{table}" for heading, table in tables.items() if table),
    ]


def _slices(entries) -> Dict[str, str]:
    """{title: table} of the slices by each field."""
    columns = "value", "examples", "positive_rate", "auc", "log_loss", "calibration"
    shown = lambda entry: {**entry, "value": str(entry.get("category", entry["value"]))}
    title = lambda entry: entry.get("name", f"the ids of field {entry['field']}")
    tables = {}
    for entry in entries:
        tables.setdefault(f"Slices by {html.escape(title(entry))}", []).append(shown(entry))
    return {title: _rows(columns, rows) for title, rows in tables.items()}


def _cards(report) -> List[str]:
    evaluation = report.get("eval") or {}
    figures = {
        "AUC": evaluation.get("auc"),
        "GAUC": evaluation.get("gauc"),
        "log loss": evaluation.get("log_loss"),
        "calibration": evaluation.get("calibration"),
        "base rate": evaluation.get("positive_rate"),
        "examples/s": report.get("examples_per_second"),
        "steps": report.get("global_step"),
        "seconds": report.get("seconds") and round(report["seconds"], 1),
    }
    cards = "".join(
        f"<div><b>{_text(value)}</b>{label}</div>"
        for label, value in figures.items()
        if value is not None
    )
    return [f'<div class="cards">{cards}</div>'] if cards else []


def _image(name, png):
    what = name.split(".")[0].replace("_", " ")  # as its title says
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="Plot: {what}" src="data:image/png;base64,{data}"></figure>'


def _rows(columns, entries) -> str:
    """A table of a list of objects; "" if it is empty."""
    lines = ["".join(_cell(entry.get(c)) for c in columns) for entry in entries or []]
    head = "".join(f"<th>{column}</th>" for column in columns)
    return _table([head, *lines]) if lines else ""


def _pairs(content) -> str:
    """A table of names and values; "" if there are none."""
    return _table([f"<th>{_text(k)}</th>{_cell(v)}" for k, v in (content or {}).items()])


def _table(lines) -> str:
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""


def _cell(value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f'<td class="number">{_text(value)}</td>' if number else f"<td>{_text(value)}</td>"


def _text(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return html.escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))


if __name__ == "__main__":
    run_program(main, program.read_flags)
