"""Where a run is in its data after interruptions, with other flags, and on other data."""

import json

import pytest
from conftest import job_of, mode_of

from deepfm.config import InputConfig
from deepfm.data import datasets, shares
from deepfm.data.identity import Identity
from deepfm.errors import BadInput
from deepfm.runtime.tf import tf
from deepfm.state import resume, sliced_saver
from deepfm.state.saving import make_notes

v1 = tf.compat.v1


def order_of(asked, skipped=0, by_buffer=False, **of_mode):
    asked = asked._replace(num_parallel_reads=2) if by_buffer else asked
    job = job_of(input=asked, distribution=mode_of(**of_mode))
    data = datasets.DataSet(["a", "b"], "libsvm" if by_buffer else "tfrecord", None, None)
    damaged = [shares.Skipped("a", dict.fromkeys(range(skipped), "bad"))]
    return resume.order_of(job, True, data, damaged)


ORDER = order_of(InputConfig(64, shuffle_buffer=10))
PAIR = dict(ORDER, num_processes=2)
OWN_PACE = dict(PAIR, synchronous=False)


def data_set(name="a"):
    files = [datasets.DataFile(f"/x/{i}", 10, identity=Identity(10, name, "t")) for i in "12"]
    return datasets.DataSet(files, "tfrecord", 4, 50)


class Run:
    """A model_dir and the checkpoints in it, as training makes them."""

    def __init__(self, folder):
        self.folder, self.path, self.parts, self.taken = folder, None, None, None

    def begin(self, step, data="a", order=ORDER, steps=(10,), settings=None, abandon=False):
        part = resume.RunPart("", order, 0, step, 0, steps and list(steps), settings or {})
        path, rows = self.path if step else None, 640 if steps else None
        self.parts, self.taken = resume.begin(
            str(self.folder), path, step, data_set(data), part, rows, abandon
        )
        return self.part

    def save(self, step, counted=None, notes=True):
        """A checkpoint of this step."""
        count = (lambda: tf.constant(counted, tf.int64)) if counted else None
        make = make_notes(self.parts, {}, count) if notes else dict
        with tf.Graph().as_default(), v1.Session() as session:
            made = v1.train.get_or_create_global_step().assign(step)
            saver = sliced_saver.make_saver(5, make_notes=make)
            saver.build()
            session.run(made)
            self.path = saver.save(session, str(self.folder / "model.ckpt"), global_step=step)

    @property
    def part(self):
        return self.parts[-1]

    def places(self):
        return [self.part.place(steps, i) for i, steps in enumerate(self.taken)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def gone_on(run, step, counted=None, **how):
    """The places of the processes after a checkpoint, with what `how` says from then on."""
    run.save(step, counted)
    run.begin(step, **how)
    return run.places()


def test_a_run_begins_with_the_first_record(run):
    assert run.begin(0).run_step == 0
    assert run.places() == [(0, 0)]


@pytest.mark.parametrize("step, place", [(1, (0, 1)), (9, (0, 9)), (10, (1, 0)), (25, (2, 5))])
def test_the_same_command_goes_on_where_it_was(run, step, place):
    run.begin(0)
    assert gone_on(run, step) == [place]


def test_other_data_after_the_end_are_a_new_run_on_the_same_model(run):
    run.begin(0)
    run.save(25)
    resume.end(str(run.folder), 25)
    assert run.begin(25, data="b").run_step == 25
    assert run.places() == [(0, 0)]
    run.begin(25, data="b")  # killed before it has saved anything
    assert run.places() == [(0, 0)]
    assert gone_on(run, 31, data="b") == [(0, 6)]


def test_other_data_in_the_middle_of_a_run_are_refused_and_the_file_is_named(run):
    run.begin(0)
    run.save(25)
    wanted = r"/x/1 has changed since .*interrupted at step 25.*--abandon_interrupted_run"
    with pytest.raises(BadInput, match=wanted):
        run.begin(25, data="b")
    run.begin(25, data="a")
    assert run.places() == [(2, 5)]
    assert run.begin(25, data="b", abandon=True).run_step == 25
    assert gone_on(run, 27, data="b") == [(0, 2)]


def test_another_order_begins_the_epoch_again_and_says_so(run, caplog):
    run.begin(0)
    order = dict(ORDER, batch_size=128)
    assert gone_on(run, 25, order=order, steps=(5,)) == [(2, 0)]
    assert run.part.run_step == 0
    assert "batch_size was 64 and is 128" in caplog.text
    assert "epoch 3 starts over" in caplog.text
    assert gone_on(run, 31, order=order, steps=(5,)) == [(3, 1)]


CONFIG = InputConfig(64, shuffle_buffer=10)


@pytest.mark.parametrize(
    "before, now, batch",
    [
        ({}, {"seed": 2}, 0), ({}, {"shuffle_buffer": 11}, 0), ({}, {"num_parallel_reads": 2}, 0),
        ({}, {"cache": "memory"}, 0), ({}, {"cache": "a/file"}, 0), ({}, {"batch_size": 32}, 0),
        ({}, {"replicas_per_process": 2}, 0), ({"skipped": 3}, {"skipped": 0}, 0),
        ({"by_buffer": True}, {"by_buffer": True, "read_buffer_bytes": 4096}, 0),
        ({"skipped": 3}, {"skipped": 3}, 5), ({}, {"read_buffer_bytes": 1}, 5),
        ({}, {"num_epochs": 9}, 5),
    ],
)  # fmt: skip
def test_what_changes_the_order_and_only_that_begins_the_epoch_again(
    run, caplog, before, now, batch
):
    def order(**more):
        of_input = {k: more.pop(k) for k in set(more) & set(CONFIG._fields)}
        return order_of(CONFIG._replace(**of_input), **more)

    run.begin(0, order=order(**before))
    assert gone_on(run, 25, order=order(**now)) == [(2, batch)]
    assert ("epoch 3 starts over" in caplog.text) == (batch == 0)
    assert ("read_buffer_bytes was" in caplog.text) == ("by_buffer" in now)


def test_another_order_after_a_whole_epoch_uses_nothing_twice(run, caplog):
    run.begin(0)
    assert gone_on(run, 20, order=dict(ORDER, seed=2)) == [(2, 0)]
    assert "starts over" not in caplog.text


def test_files_stay_divided_as_at_the_beginning_whatever_is_known_by_now(run, caplog):
    run.begin(0, order=dict(ORDER, by_rows=False), steps=None)
    assert gone_on(run, 25) == [(2, 5)]
    assert run.part.order["by_rows"] is False
    assert not caplog.text


@pytest.mark.parametrize("change", [{"batch_size": 640}, {"num_processes": 2, "batch_size": 320}])
def test_steps_of_rows_that_were_not_yet_counted_are_those_of_their_batch(run, caplog, change):
    order = dict(ORDER, by_rows=False)
    run.begin(0, order=order, steps=None)
    steps = [1] * change.get("num_processes", 1)
    assert gone_on(run, 6, order={**order, **change}, steps=steps) == [(0, 0) for _ in steps]
    assert "epoch 1 starts over" in caplog.text


@pytest.mark.parametrize("taken, epoch", [([3, 6], 1), ([10, 7], 2), ([10, 4], None)])
def test_in_another_order_the_epoch_of_the_last_process_begins_again(run, caplog, taken, epoch):
    run.begin(0, order=OWN_PACE, steps=(10, 4))
    gone_on(run, sum(taken), taken, order=dict(OWN_PACE, seed=2), steps=(10, 4))
    assert run.part.epoch == (1 if epoch is None else epoch - 1)
    assert (f"epoch {epoch} starts over" in caplog.text) == (epoch is not None)


def test_an_older_checkpoint_finds_the_place_that_it_had(run):
    run.begin(0)
    run.save(12)
    older = run.path
    run.save(20)
    resume.end(str(run.folder), 20)
    run.begin(20, data="b")
    run.save(25)
    run.path = older
    run.begin(12)
    assert run.places() == [(1, 2)]


def test_without_rows_the_place_is_a_number_of_batches(run):
    run.begin(0, steps=None)
    assert gone_on(run, 25, steps=None) == [(0, 25)]


@pytest.mark.parametrize("taken, places", [([3, 6], [(0, 3), (1, 2)]), ([11, 7], [(1, 1), (1, 3)])])
def test_processes_of_their_own_pace_go_on_where_each_was(run, taken, places):
    run.begin(0, order=OWN_PACE, steps=(10, 4))
    more = sum(taken) + 2  # the checkpoint holds two uncounted steps
    assert gone_on(run, more, taken, order=OWN_PACE, steps=(10, 4)) == places


@pytest.mark.parametrize("counted", [None, [3, 6, 2]])
def test_where_nobody_has_counted_the_epoch_begins_again_and_nothing_is_skipped(
    run, caplog, counted
):
    run.begin(0, order=OWN_PACE, steps=(10, 4))
    assert gone_on(run, 9, counted, order=OWN_PACE, steps=(10, 4)) == [(0, 0), (0, 0)]
    assert "unknown how many steps each process took, so epoch 1 starts over" in caplog.text


@pytest.mark.parametrize("before, now", [(OWN_PACE, PAIR), (PAIR, OWN_PACE)])
def test_processes_that_keep_in_step_from_now_on_begin_the_epoch_again(run, before, now):
    run.begin(0, order=before, steps=(10, 10))
    assert gone_on(run, 14, [8, 6], order=now, steps=(10, 10))[0] in ((0, 0), (1, 0))
    assert run.part.epoch == (0 if before is OWN_PACE else 1)


@pytest.mark.parametrize(
    "step, notes, data, place",
    [
        (25, True, "a", (2, 5)),
        (20, True, "b", (0, 0)),  # at the end of an epoch, the run has ended
        (25, False, "a", (0, 0)),  # where neither says it, a new run begins
    ],
)
def test_without_run_json_training_goes_on_by_what_the_checkpoint_says(
    run, caplog, step, notes, data, place
):
    caplog.set_level("INFO", "absl")
    run.begin(0)
    run.save(step, notes=notes)
    (run.folder / resume.FILE).unlink()
    run_step = run.begin(step, data=data).run_step
    assert run.places() == [place] and run_step == (0 if place[0] else step)
    assert "run.json of --model_dir" in caplog.text and "is missing" in caplog.text
    assert ("other data" in caplog.text) == (data == "b")


def test_an_interrupted_run_without_run_json_has_not_ended(run):
    run.begin(0)
    run.save(25)
    (run.folder / resume.FILE).unlink()
    with pytest.raises(BadInput, match="was interrupted at step 25"):
        run.begin(25, data="b")


def test_what_changes_on_the_way_is_said(run, caplog):
    caplog.set_level("INFO")
    run.begin(0, settings={"dropout": [0.5, 0.5], "optimizer": "adam"})
    gone_on(run, 5, settings={"dropout": [0.1, 0.5], "optimizer": "adam"})
    assert "Resuming with --dropout=0.1,0.5 (before: 0.5,0.5)." in caplog.text
    assert run.part.settings["dropout"] == [0.1, 0.5]
    caplog.clear()
    gone_on(run, 7, settings={"dropout": [0.1, 0.5], "optimizer": "adam"})
    assert "Resuming with" not in caplog.text


@pytest.mark.parametrize(
    "broken",
    [{"step": "0"}, {"run_step": -1}, {"epoch": 0.5}, {"steps_per_epoch": 10}, {"order": []},
     {"steps_per_epoch": [10, 10]}, {"settings": [1]}, {"data": None},
     "", "[]", "null", '{"format_version": 2, "parts": [], "files": [], "ended": 0}',
     '{"format_version": 3, "parts": [{"step": "x"}], "files": [], "ended": 0}',
     '{"format_version": 3, "parts": [], "files": [["x"]], "ended": 0}',
     100_000 * "[" + 100_000 * "]"]
)  # fmt: skip
def test_a_broken_state_or_field_is_refused_in_one_sentence(run, broken):
    run.begin(0)
    run.save(5)
    if isinstance(broken, dict):  # fields of the part that is there
        content = json.loads((run.folder / resume.FILE).read_text())
        content["parts"][0].update(broken)
        broken = json.dumps(content)
    (run.folder / resume.FILE).write_text(broken)
    with pytest.raises(BadInput, match=r"run.json is not a run's state"):
        run.begin(5)


def test_data_sets_of_other_names_sizes_or_content_are_told_apart():
    data = data_set()
    first, second = data.files
    print_of = lambda *files: resume.fingerprint(data._replace(files=files))
    same = first._replace(path="/y/1", identity=first.identity._replace(stamp="later"))
    longer = second._replace(identity=Identity(11, "a", "t"))
    changed = second._replace(identity=Identity(10, "c", "t"))
    assert print_of(first, second) == print_of(same, second)
    others = [second._replace(path="/x/c"), longer, changed]
    assert len({print_of(first, x) for x in [second, *others]}) == 4


def test_the_parts_of_hosts_are_one_data_set_however_many_they_are():
    data = data_set()._replace(sharded=True)
    first, second = data.files

    def print_of(mine, *others):
        told = [x for file in others for x in resume.told_apart(data._replace(files=[file]))]
        return resume.fingerprint(data._replace(files=mine), json.loads(json.dumps(told)))

    changed = second._replace(identity=Identity(10, "c", "t"))
    assert print_of([first], second) == print_of([second], first) == print_of([first, second])
    assert print_of([first], second) != print_of([first], changed)
