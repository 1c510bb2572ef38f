"""The evaluation job."""

from deepfm import estimators, open_data
from deepfm.data import bad_records
from deepfm.model import groups
from deepfm.plan import Opened, apply_model
from deepfm.state import resume


def evaluate(opened: Opened) -> dict:
    """Evaluates the model on --val_data_dir; returns its part of report.eval.json."""
    job = opened.job
    grouping = groups.Grouping(job.gauc_field, job.slice_fields)

    def check(data, config):
        if job.distribution.chief:
            open_data.warn_of_remembered(resume.still_there(job.model_dir, data.files), data.files)
        groups.check(grouping, config.field_size)
        bad_records.check_first_records(data, estimators.schema(config, data))

    data, model = apply_model(opened, job, "val_data_dir", check)
    step, results, curves = estimators.evaluate(model, data, job, opened.of_job)
    about = {"validation_data": open_data.described(data)}
    return {"global_step": step, "eval": results, "curves": curves, **about}
