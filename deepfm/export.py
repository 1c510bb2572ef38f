"""The export job."""

from deepfm import estimators
from deepfm.errors import BadInput
from deepfm.plan import Opened, apply_model


def export(opened: Opened) -> dict:
    """Writes a SavedModel; returns its part of report.export.json."""
    job = opened.job
    if not job.servable_model_dir:
        raise BadInput("--servable_model_dir is missing; name a folder to export to.")
    _, model = apply_model(opened, job)
    path, step = estimators.save_export(model, job.servable_model_dir, again=True)
    return {"export": path, "global_step": step}
