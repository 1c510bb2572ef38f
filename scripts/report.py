"""Makes a page of a training run, to be opened in a browser: one HTML file that needs nothing else.

    .venv/bin/python scripts/report.py MODEL_DIR
    .venv/bin/python scripts/report.py MODEL_DIR --output_dir=run-1

Loss and AUC over steps, the ROC curve, calibration by decile, throughput and utilization over time,
data and flags; below, the evaluation, inference and export that followed. Beside report.html lie
its plots as PNG files. Read are report.json and report.TASK.json, model.json, evaluations.json and
the summaries, of a model_dir on this machine.
"""

import base64
import html
import json
import math
import os
import pathlib
from typing import Dict, List, Optional, Tuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from programs import BadInput, fail, need, program, run_program, write_files  # first

# isort: split
from absl import flags
from tables_and_plots import axes_of, png

FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", None, "Where the page goes; default: MODEL_DIR/report.")

Series = List[Tuple[float, float]]  # (global step, or minutes; value)

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #f5f7f9; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
.verdict { margin: 12px 0 24px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.cards div { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 10px 18px; }
.cards b { display: block; font-size: 22px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 16px; }
figure { margin: 0; background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 8px; }
img { width: 100%; display: block; }
table { border-collapse: collapse; background: #fff; }
td, th { border: 1px solid #dde3e9; padding: 4px 12px; text-align: left; overflow-wrap: anywhere; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def main(arguments):
    need("matplotlib", "tensorflow_core")
    folder, output = _folders(arguments[1:])
    page, plots = make(folder)
    try:
        write_files(output, {"report.html": page.encode(), **plots})
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    print(f"Wrote {output / 'report.html'} and {len(plots)} plots.")


def _folders(words) -> Tuple[pathlib.Path, pathlib.Path]:
    """(the model_dir, where the page goes)."""
    if len(words) != 1:
        raise BadInput("give one folder, as in: scripts/report.py model")
    for name in (words[0], FLAGS.output_dir or ""):
        if "://" in name:
            raise BadInput(
                f"{name}: only folders of this machine are read and written; copy it first, e.g. "
                "by aws s3 cp --recursive --exclude 'model.ckpt-*' s3://bucket/model model"
            )
    folder = pathlib.Path(words[0])
    return folder, pathlib.Path(FLAGS.output_dir or folder / "report")


def make(folder: pathlib.Path) -> Tuple[str, Dict[str, bytes]]:
    """(the page, its plots: {name: PNG}) of a model_dir."""
    report = _json(folder / "report.json")
    later = {task: _json(folder / f"report.{task}.json") for task in _LATER}
    later = {task: found for task, found in later.items() if found is not None}
    if report is None and not later:
        raise BadInput(f"{folder} holds no report.json; give the --model_dir of a finished job.")
    model = _json(folder / "model.json") or {}
    evaluations = _json(folder / "evaluations.json", list) or []
    scalars = _scalars(folder)
    try:
        plots = _plots(report or {}, model, evaluations, scalars)
        of_later = {task: _plots_of_results(found, f".{task}") for task, found in later.items()}
        page = _page(folder, report, model, evaluations, plots, later, of_later)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        read = [
            *(["report.json"] if report is not None else []),
            *(f"report.{x}.json" for x in later),
        ]
        raise BadInput(
            f"{folder}: {' or '.join(read)} is not as train.py writes it ({error!r})."
        ) from error
    for more in of_later.values():
        plots.update(more)
    return page, plots


def _json(path, kind=dict):
    """What a file holds, None where there is none."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, kind):
        raise BadInput(f"{path} holds no JSON {'object' if kind is dict else 'list'}.")
    return found


def _scalars(folder) -> Dict[str, List[Tuple[int, float, float]]]:
    """The scalars of the summaries, each (global step, time in s, value), by name.

    Of a step that was taken twice, as after an interruption, the later ones.
    """
    import tensorflow as tf

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        try:
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.WhichOneof("value") == "simple_value":
                        steps = found.setdefault(value.tag, {})
                        steps[event.step] = max(
                            steps.get(event.step, (0, 0)), (event.wall_time, value.simple_value)
                        )
        except tf.errors.DataLossError:
            continue  # the end of a file that a killed process left
    return {
        name: [(step, time, value) for step, (time, value) in sorted(steps.items())]
        for name, steps in found.items()
    }


def _plots(report, model, evaluations, scalars) -> Dict[str, bytes]:
    """{name of the file: PNG} of what there is."""
    loss = model.get("loss_type", "log_loss")
    begin = min((points[0][1] for points in scalars.values()), default=0)
    by_step = lambda name: [(step, value) for step, _, value in scalars.get(name, [])]
    speed = lambda name: [
        ((time - begin) / 60, value) for _, time, value in scalars.get(f"speed/{name}", [])
    ]
    percent = lambda name: [(x, 100 * value) for x, value in speed(name)]
    of = lambda name: [(e["step"], e[name]) for e in evaluations if e[name] is not None]
    shares = {
        "CPU": percent("host_cpu_utilization"),
        "GPU": percent("gpu_utilization"),
        "waiting for input": percent("input_wait_share"),
    }
    losses = {f"training ({loss})": by_step(loss)}
    if loss == "log_loss":
        losses["evaluation"] = of("log_loss")
    drawn = {
        "loss.png": _lines("Loss", ("step", ""), losses),
        "auc.png": _lines("AUC of the evaluations", ("step", ""), {"AUC": of("auc")}),
        **_plots_of_results(report),
        "throughput.png": _lines(
            "Throughput", ("minutes", "examples/s"), {"": speed("examples_per_second")}, 0
        ),
        "utilization.png": _lines("Utilization", ("minutes", "%"), shares, 0, 100),
        "learning_rate.png": _lines(
            "Learning rate", ("step", ""), {"": by_step("learning_rate")}, 0
        ),
    }
    return {name: png for name, png in drawn.items() if png}


def _plots_of_results(report, kind="") -> Dict[str, bytes]:
    """{name of the file: PNG} of the evaluation that a report tells; `kind` is in the names."""
    curves = report.get("curves") or {}
    drawn = {
        f"roc{kind}.png": _roc(curves.get("roc"), report.get("eval")),
        f"calibration{kind}.png": _calibration(curves.get("deciles")),
    }
    return {name: png for name, png in drawn.items() if png}


def _figure(title, x, y):
    figure, axes = axes_of((6.4, 4), title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    return figure, axes


def _lines(title, labels, lines: Dict[str, Series], bottom=None, top=None) -> Optional[bytes]:
    """A plot of some series; None where there is nothing to show."""
    lines = {label: [p for p in s if math.isfinite(p[1])] for label, s in lines.items()}
    lines = {label: series for label, series in lines.items() if series}
    if not lines:
        return None
    figure, axes = _figure(title, *labels)
    for label, series in lines.items():
        marker = "o" if len(series) < 30 else None
        axes.plot(*zip(*series), label=label, marker=marker, markersize=4)
    axes.set_ylim(bottom=bottom, top=top and 1.05 * top)
    if len(lines) > 1:
        axes.legend()
    return png(figure)


def _roc(curve, results) -> Optional[bytes]:
    if not curve:
        return None
    figure, axes = _figure("ROC", "share of negatives above", "share of positives above")
    axes.plot([0, 1], [0, 1], color="gray", linestyle="--", linewidth=1)
    axes.plot(*zip(*curve), label=f"AUC {results['auc']:.4f}" if results else None)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    if results:
        axes.legend(loc="lower right")
    return png(figure)


def _calibration(deciles) -> Optional[bytes]:
    if not deciles:
        return None
    x, y = [d["prediction"] for d in deciles], [d["positives"] for d in deciles]
    figure, axes = _figure("Calibration by decile", "mean prediction", "share of positives")
    largest = max(*x, *y, 1e-6) * 1.05
    axes.plot([0, largest], [0, largest], color="gray", linestyle="--", linewidth=1)
    axes.plot(x, y, marker="o")
    axes.set(xlim=(0, largest), ylim=(0, largest), aspect="equal")
    return png(figure)


_TITLES = {
    "loss.png": "Loss over steps",
    "auc.png": "AUC over steps",
    "roc.png": "ROC curve of the last evaluation",
    "calibration.png": "Predictions against what happened, a tenth of the examples at each point",
    "throughput.png": "Examples per second, of all processes",
    "utilization.png": "How busy the host was",
    "learning_rate.png": "Learning rate",
}


# What may follow training, and the title of its part of the page.
_LATER = {"eval": "Evaluation", "infer": "Inference", "export": "Export"}


def _page(folder, report, model, evaluations, plots, later, plots_of_later) -> str:
    """The page; `later` are the reports of the tasks that followed, `plots_of_later` theirs."""
    name = html.escape(str(folder.resolve().name))
    kind = "Model" if report is None else {"train": "Training"}.get(*[report["task_type"]] * 2)
    report = report or {}
    parts = [
        f"<h1>{html.escape(kind)}: {name}</h1>",
        f'<p class="verdict">{html.escape(report.get("verdict", ""))}</p>',
        *_cards(report),
        *_images(plots),
    ]
    tables = {
        "Evaluations": _rows(("step", "auc", "log_loss"), evaluations),
        **_tables(report),
        "Model": _pairs(model),
        "Records that were passed over": _rows(("file", "place", "reason"), report.get("skipped")),
    }
    parts += [f"<h2>{title}</h2>{table}" for title, table in tables.items() if table]
    for task, found in later.items():
        parts += [f"<h1>{_LATER[task]}</h1>", *_cards(found), *_images(plots_of_later[task])]
        parts += [f"<h2>{title}</h2>{table}" for title, table in _tables(found).items() if table]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>DeepFM: {name}</title><style>{_CSS}</style></head>\n"
        f"<body><main>{chr(10).join(parts)}</main></body></html>\n"
    )


def _tables(report) -> Dict[str, str]:
    """{title: table} of a report."""
    deciles = (report.get("curves") or {}).get("deciles")
    return {
        "Calibration": _rows(("examples", "prediction", "positives"), deciles or []),
        "Run": _pairs({k: v for k, v in report.items() if not isinstance(v, (dict, list))}),
        "Training data": _pairs(report.get("training_data") or {}),
        "Flags that are not at their defaults": _pairs(report.get("flags") or {}),
    }


def _cards(report) -> List[str]:
    found = report.get("eval") or {}
    figures = {
        "AUC": found.get("auc"),
        "log loss": found.get("log_loss"),
        "calibration": found.get("calibration"),
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


def _images(plots) -> List[str]:
    """The part of the page that shows plots, where there are any."""
    images = "".join(_image(*plot) for plot in plots.items())
    return [f'<h2>Plots</h2><div class="plots">{images}</div>'] if images else []


def _image(name, png):
    kind = name.split(".")[0] + ".png"  # roc.eval.png shows what roc.png does
    title = html.escape(_TITLES[kind])
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="{title}" src="data:image/png;base64,{data}"></figure>'


def _rows(columns, entries) -> str:
    """A table of a list of objects."""
    if not entries:
        return ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = ["".join(map(_cell, (entry.get(c) for c in columns))) for entry in entries]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _pairs(found) -> str:
    """A table of names and values."""
    lines = (f"<tr><th>{html.escape(str(k))}</th>{_cell(v)}</tr>" for k, v in found.items())
    return f"<table>{''.join(lines)}</table>" if found else ""


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
