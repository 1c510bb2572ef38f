"""The vocabulary of one machine: it ends in a sentence before memory is full."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_tables import describe, prepared

from data_tools.click_logs import vocabulary
from deepfm.errors import BadInput


def write_distinct(path, values, text="{}"):
    """A file of two categories, of which the first has as many values as rows."""
    path.write_text("".join(f"{i % 2},{text.format(i)},x\n" for i in range(values)))
    return str(path)


def table(tmp_path):
    return describe(tmp_path, {"y": "label", "a": "category", "b": "category"})


def test_too_many_values_end_the_count_and_nothing_is_written(tmp_path):
    path = write_distinct(tmp_path / "a.csv", 300_000)
    with pytest.raises(BadInput) as error:
        prepared(tmp_path, path, columns=table(tmp_path), memory_mb=20, min_count=10)
    said = re.fullmatch(
        r"([\d,]+) distinct values so far need 0\.0[2-9] GB, but the vocabulary may take 0\.02 GB "
        r"here; raise --memory_mb=20 if more is free, or use a cluster \('python -m "
        r"data_tools\.on_spark prepare'\)\. --min_count drops values only when all are counted\.",
        str(error.value),
    )
    assert 20e6 / 120 < int(said[1].replace(",", "")) < 300_001
    assert not (tmp_path / "out").exists()


def test_repeated_values_take_no_room(tmp_path):
    # Each block has all 60,000 values, so those that wait to be merged are more than there is room.
    (tmp_path / "a.csv").write_text("".join(f"{i % 2},{i % 60000},x\n" for i in range(800_000)))
    flags = dict(columns=table(tmp_path), memory_mb=10, min_count=100)
    assert prepared(tmp_path, str(tmp_path / "a.csv"), **flags)


def test_values_that_can_be_counted_but_not_all_get_ids_ask_for_a_higher_min_count(tmp_path):
    path = write_distinct(tmp_path / "a.csv", 100_000)
    flags = dict(columns=table(tmp_path), memory_mb=20)
    with pytest.raises(BadInput, match="ids for 100,001 distinct values need .* --min_count=1, so"):
        prepared(tmp_path, path, min_count=1, **flags)
    assert prepared(tmp_path, path, min_count=2, **flags)


def test_fewer_processes_are_advised_where_they_leave_more_memory(tmp_path, monkeypatch):
    from data_tools import prepare

    monkeypatch.setattr(prepare, "LEAST", 10**6)
    monkeypatch.setattr(prepare, "OF_A_PROCESS", 10**15)
    path = write_distinct(tmp_path / "a.csv", 40_000)
    with pytest.raises(BadInput, match="here; try fewer --num_workers than 2, or use a cluster"):
        prepared(tmp_path, path, columns=table(tmp_path), num_workers=2)


# Counts values in a new process, which says what its peak took beyond the beginning.
PEAK = """
import numpy as np
import pyarrow  # which counting loads
from data_tools.click_logs import vocabulary
from deepfm.records.raw.column_kinds import Column

def memory(key):
    return int(open("/proc/self/status").read().split(key)[1].split()[0]) * 1024

def parts(step=1 << 17):
    for at in range(0, N, step):
        i = np.arange(at, min(at + step, N))
        texts = [b"a value of %10d" % x for x in i] if LONG else []
        keys = (i[: 0 if LONG else None] * 7919 % N + 1).astype(np.uint64) << np.uint64(32)
        yield [vocabulary.count("category", keys, texts)]

vocabulary.add_up([Column("x", "category")], [])
before = memory("VmRSS:")
vocabulary.add_up([Column("x", "category")], parts())
print(memory("VmHWM:") - before)
"""


@pytest.mark.parametrize("long", [False, True])
def test_counting_takes_no_more_than_the_room_allows_for(long):
    n = 1_000_000
    code = f"N, LONG = {n}, {long}\n{PEAK}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    peak = int(done.stdout)
    # What is checked is not less than what was taken, up to the step by which values come.
    with pytest.raises(BadInput):
        sizes = ([0], n, 20 * n) if long else ([n], 0, 0)
        vocabulary.Room(int(peak * 0.8), 0, "").check_counting(*sizes)
    assert peak > 20 * n
