"""A file is identified by what it contains."""

import os
import shutil

import numpy as np
import pytest

from deepfm.data import identity


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(np.random.RandomState(1).bytes(100_000))
    return path


def change(path, place):
    """Changes a byte of a file; its size and its modification time stay."""
    times = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(place)
        byte = f.read(1)[0]
        f.seek(place)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def look(*paths, known=None):
    return identity.identify(list(map(str, paths)), known)


@pytest.mark.parametrize("place", [0, 50_001, 99_999])
def test_a_byte_anywhere_in_a_small_file_makes_another_file(file, place):
    (before,) = look(file)
    change(file, place)
    (after,) = look(file, known={str(file): before})
    assert before.bytes == after.bytes and before.checksum != after.checksum
    assert identity.differing({str(file): before}) == str(file)


def test_a_copy_and_a_touched_file_are_the_same(file, tmp_path):
    shutil.copy(file, tmp_path / "b")
    os.utime(file, (1, 1))
    first, second = look(file, tmp_path / "b")
    assert first[:2] == second[:2] and first.stamp != second.stamp
    os.utime(file, (2, 2))
    assert identity.differing({str(file): first}) is None


def test_a_file_of_the_same_age_is_not_read_again(file):
    (found,) = look(file)
    marked = found._replace(checksum="whole-marked")
    assert look(file, known={str(file): marked}) == [marked]
    os.utime(file, (1, 1))
    assert look(file, known={str(file): marked})[0].checksum == found.checksum


def test_a_file_that_is_gone_is_named(file, tmp_path):
    shutil.copy(file, tmp_path / "b")
    paths = [str(file), str(tmp_path / "b")]
    found = dict(zip(paths, look(*paths)))
    os.remove(paths[1])
    assert identity.differing(found) == paths[1]


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_another_one(file):
    found = {str(file): look(file)[0]}
    os.rename(file, f"{file}.away")
    os.mkdir(file)  # its size or its age differs, and reading it fails
    assert identity.differing(found) is None


def test_of_large_data_blocks_all_over_each_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_WHOLE", 1 << 20)
    monkeypatch.setattr(identity, "_BLOCKS", 8)
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(4 << 20))
    small.write_bytes(bytes(1000))
    found = look(large, small)
    assert [x.checksum.split("-")[0] for x in found] == ["7", "whole"]
    step = ((4 << 20) - (16 << 10)) // 6
    for place in (0, step, (4 << 20) - 1):  # of the first, the second and the last block
        change(large, place)
        again = look(large, small)
        assert again[0].checksum != found[0].checksum and again[1][:2] == found[1][:2]
        found = again
    change(large, step // 2)  # between two blocks: the price of not reading all
    assert look(large)[0].checksum.startswith("8-")
    assert look(large, small)[0].checksum == found[0].checksum


def test_how_much_was_read_is_part_of_the_checksum(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    whole = look(tmp_path / "a")
    monkeypatch.setattr(identity, "_WHOLE", 1000)
    monkeypatch.setattr(identity, "_BLOCKS", 8)
    assert look(tmp_path / "a", known={str(tmp_path / "a"): whole[0]}) != whole
