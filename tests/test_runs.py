"""Where in its data a run is, after interruptions and with other flags."""

import json

import pytest

from deepfm import datasets, runs
from deepfm.entry import BadInput
from deepfm.input_pipeline import InputConfig

ORDER = runs.order_of(InputConfig(64, shuffle_buffer=10), 1)


def begin(folder, step, data="a", order=ORDER, steps=(10,)):
    return runs.begin(str(folder), step, data, order, steps)


def test_a_run_begins_with_the_first_record(tmp_path):
    part = begin(tmp_path, 0)
    assert part.run_step == 0
    assert part.place(0, 0) == (0, 0)


@pytest.mark.parametrize("step, place", [(1, (0, 1)), (9, (0, 9)), (10, (1, 0)), (25, (2, 5))])
def test_the_same_command_goes_on_where_it_was(tmp_path, step, place):
    begin(tmp_path, 0)
    part = begin(tmp_path, step)
    assert part.place(part.taken(step)[0], 0) == place


def test_other_data_is_a_new_run_on_the_same_model(tmp_path):
    begin(tmp_path, 0)
    part = begin(tmp_path, 25, data="b")
    assert part.run_step == 25
    assert part.place(part.taken(25)[0], 0) == (0, 0)
    part = begin(tmp_path, 31, data="b")
    assert part.place(part.taken(31)[0], 0) == (0, 6)


def test_another_order_begins_the_epoch_again_and_says_so(tmp_path, caplog):
    begin(tmp_path, 0)
    order = dict(ORDER, batch_size=128)
    part = begin(tmp_path, 25, order=order, steps=(5,))
    assert part.run_step == 0
    assert part.place(part.taken(25)[0], 0) == (2, 0)
    assert "batch_size differs" in caplog.text
    assert "epoch 3 begins again" in caplog.text
    part = begin(tmp_path, 31, order=order, steps=(5,))
    assert part.place(part.taken(31)[0], 0) == (3, 1)


def test_another_order_after_a_whole_epoch_uses_nothing_twice(tmp_path, caplog):
    begin(tmp_path, 0)
    part = begin(tmp_path, 20, order=dict(ORDER, seed=2))
    assert part.place(part.taken(20)[0], 0) == (2, 0)
    assert "again" not in caplog.text


@pytest.mark.parametrize("taken, epoch", [([3, 6], 1), ([10, 7], 2), ([10, 4], None)])
def test_in_another_order_the_epoch_of_the_last_process_begins_again(
    tmp_path, caplog, taken, epoch
):
    order = dict(ORDER, num_processes=2)
    begin(tmp_path, 0, order=order, steps=(10, 4))
    runs.note_steps(str(tmp_path), sum(taken), taken, keep=5)
    part = begin(tmp_path, sum(taken), order=dict(order, seed=2), steps=(10, 4))
    assert part.epoch == (1 if epoch is None else epoch - 1)
    assert (f"epoch {epoch} begins again" in caplog.text) == (epoch is not None)


def test_an_older_checkpoint_finds_the_place_that_it_had(tmp_path):
    begin(tmp_path, 0)
    begin(tmp_path, 25, data="b")
    part = begin(tmp_path, 12)
    assert part.place(part.taken(12)[0], 0) == (1, 2)


def test_without_rows_the_place_is_a_number_of_batches(tmp_path):
    begin(tmp_path, 0, steps=None)
    part = begin(tmp_path, 25, steps=None)
    assert part.place(part.taken(25)[0], 0) == (0, 25)


def test_processes_of_their_own_pace_go_on_where_each_was(tmp_path):
    order = dict(ORDER, num_processes=2)
    begin(tmp_path, 0, order=order, steps=(10, 4))
    runs.note_steps(str(tmp_path), 9, [3, 6], keep=5)
    runs.note_steps(str(tmp_path), 18, [11, 7], keep=5)
    for step, places in ((9, [(0, 3), (1, 2)]), (18, [(1, 1), (1, 3)])):
        part = begin(tmp_path, step, order=order, steps=(10, 4))
        assert [part.place(taken, i) for i, taken in enumerate(part.taken(step))] == places


def test_only_the_checkpoints_that_are_kept_are_remembered(tmp_path):
    begin(tmp_path, 0)
    for step in range(1, 8):
        runs.note_steps(str(tmp_path), step, [step], keep=2)
    (part,) = json.loads((tmp_path / runs.FILE).read_text())["parts"]
    assert list(part["steps_taken"]) == ["5", "6", "7"]


@pytest.mark.parametrize(
    "field, value",
    [("step", "0"), ("run_step", -1), ("epoch", 0.5), ("steps_per_epoch", 10), ("order", []),
     ("steps_per_epoch", [10, 10]), ("steps_taken", [1]), ("steps_taken", {"1": ["x"]}),
     ("data", None)],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused_in_one_sentence(tmp_path, field, value):
    begin(tmp_path, 0)
    content = json.loads((tmp_path / runs.FILE).read_text())
    content["parts"][0][field] = value
    (tmp_path / runs.FILE).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"run.json: is not a run's state"):
        begin(tmp_path, 5)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"format_version": 2}', '{"format_version": 1, "parts": [{}]}',
             '{"format_version": 1, "parts": [{"step": "x"}]}']
)  # fmt: skip
def test_a_broken_state_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / runs.FILE).write_text(text)
    with pytest.raises(BadInput, match=r"run.json: is not a run's state"):
        begin(tmp_path, 5)


def test_data_sets_of_other_sizes_or_names_are_told_apart():
    files = [datasets.DataFile("/x/a", 10, 5, 1), datasets.DataFile("/x/b", 20, 5, 1)]
    data = datasets.DataSet(files, "tfrecord", 4, 50)
    same = data._replace(files=[f._replace(path=f.path.replace("/x", "/y")) for f in files])
    grown = data._replace(files=[files[0], files[1]._replace(bytes=21)])
    renamed = data._replace(files=[files[0], files[1]._replace(path="/x/c")])
    prints = [runs.fingerprint(d, 0) for d in (data, same, grown, renamed)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
