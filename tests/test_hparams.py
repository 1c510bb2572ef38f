"""What TensorBoard's HPARAMS tab finds in model_dirs."""

import shutil

import pytest
from conftest import make_records, report, run_train, small_job, write_tfrecords

from deepfm.runtime.tf import IS_2, tf
from deepfm.state import hparams

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A model_dir."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    train(data, folder, "--learning_rate=0.02")
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """A model_dir like it, in which a test may train."""
    shutil.copytree(str(trained), str(tmp_path / "model"))
    return tmp_path / "model"


def train(data, model_dir, *flags):
    flags = "--deep_layers=8,4", "--dropout=0.5", *flags
    run_train(*small_job(data, model_dir, *flags), code=0)


def sessions(logdir):
    """{name: (hyperparameters, metrics, session)} of the sessions, as the tab's code finds them."""
    from tensorboard.backend.event_processing import plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    if IS_2:
        from tensorboard.backend.event_processing import data_provider
        from tensorboard.context import RequestContext

        provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
        context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
        asks = RequestContext()
        of_runs = context.hparams_metadata(asks, "")
        experiment = context.experiment_from_metadata(asks, "", True, of_runs, [])
        handler = lambda request: list_session_groups.Handler(asks, context, "", request)
    else:
        context = backend_context.Context(base_plugin.TBContext(multiplexer=multiplexer))
        experiment = context.experiment()
        handler = lambda request: list_session_groups.Handler(context, request)
    names = {info.name.tag for info in experiment.metric_infos}
    columns = {info.name for info in experiment.hparam_infos}
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, slice_size=100)
    found = {}
    for group in handler(request).run().session_groups:
        (session,) = group.sessions
        values = {
            name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()
        }
        assert set(values) <= columns
        metrics = {value.name.tag: value.value for value in session.metric_values}
        assert set(metrics) <= names
        found[session.name] = values, metrics, session
    return found


def tags(model_dir):
    """The names of what concerns the tab in all event files of a folder."""
    return [
        value.tag.split("/")[1]
        for path in sorted(model_dir.glob("events.out.tfevents.*"))
        for event in v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag.startswith("_hparams_/")
    ]


def test_model_dirs_under_one_folder_compare(data, trained, tmp_path):
    shutil.copytree(str(trained), str(tmp_path / "one"))
    train(
        data, tmp_path / "two", "--gauc_field=1", "--embedding_learning_rate=0.05", "--batch_norm",
        "--optimizer=sgd", "--noexample_weights", "--reset_embeddings_each_epoch",
        "--min_improvement=0.001", "--cowclip_ratio=1",
    )  # fmt: skip
    found = sessions(tmp_path)
    assert set(found) == {"one", "two"}
    values, metrics, session = found["one"]
    wanted = {
        "learning_rate": 0.02, "optimizer": "adam", "global_batch_size": 64, "batch_norm": "false",
        "deep_layers": "8,4", "dropout": "0.5,0.5", "distribution": "local", "embedding_size": 4,
        "example_weights": "by data",
    }  # fmt: skip
    assert {name: values[name] for name in wanted} == wanted
    assert "embedding_learning_rate" not in values  # it follows from --learning_rate
    assert not {"elapsed", "run_step", "start_step"} & set(values)  # no flags
    evaluation = report(tmp_path / "one")["eval"]
    for name in ("auc", "log_loss"):
        assert metrics[name] == pytest.approx(evaluation[name], abs=1e-6)
    assert 0 < session.end_time_secs - session.start_time_secs < 90
    values, _, _ = found["two"]
    wanted = {
        "embedding_learning_rate": 0.05, "optimizer": "sgd", "batch_norm": "true",
        "reset_embeddings_each_epoch": "true", "min_improvement": 0.001, "cowclip_ratio": 1,
        "learning_rate_decay_metric": "auc", "example_weights": "false",
    }  # fmt: skip
    assert {name: values[name] for name in wanted} == wanted


def test_a_run_that_is_resumed_or_goes_on_is_one_session(data, tmp_path):
    train(data, tmp_path, "--max_steps=3", "--val_data_dir=")
    assert tags(tmp_path) == ["experiment", "session_start_info", "session_end_info"]
    (before,) = sessions(tmp_path).values()
    train(data, tmp_path, "--learning_rate=0.5")
    train(data, tmp_path, "--learning_rate=0.5")  # nothing is left to do
    assert tags(tmp_path) == ["experiment", "session_start_info", "session_end_info"]
    ((values, metrics, session),) = sessions(tmp_path).values()
    assert values["learning_rate"] == 0.5
    assert session.end_time_secs > before[2].end_time_secs
    assert metrics["auc"] == pytest.approx(report(tmp_path)["eval"]["auc"], abs=1e-6)


def test_a_new_run_takes_the_place_of_the_one_before(copy, tmp_path):
    other = write_tfrecords(tmp_path / "other.tfrecords", make_records(128, seed=3))
    (before,) = sessions(copy).values()
    train(other, copy, "--learning_rate=0.25", "--val_data_dir=")
    assert len(tags(copy)) == 3
    ((values, _, session),) = sessions(copy).values()
    assert values["learning_rate"] == 0.25
    assert session.start_time_secs > before[2].start_time_secs


def test_a_run_that_has_not_ended_has_no_end(copy):
    found = hparams._read(str(copy))
    hparams._write(str(copy), found[:-1])
    ((_, _, session),) = sessions(copy).values()
    assert session.end_time_secs == 0
    hparams.end(str(copy))
    hparams.end(str(copy))
    assert tags(copy) == ["experiment", "session_start_info", "session_end_info"]


def test_clearing_the_model_removes_it(data, copy):
    (copy / "note.txt").write_text("mine")
    train(data, copy, "--clear_existing_model", "--learning_rate=0.125", "--val_data_dir=")
    ((values, _, _),) = sessions(copy).values()
    assert values["learning_rate"] == 0.125
