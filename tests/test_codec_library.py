"""The codec's library: built once, found out where it is no good, done without, put in archives."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import zip_for_spark
from conftest import ROOT, compiler

from deepfm.errors import BadInput
from deepfm.records import build, codec, library, libsvm_text
from deepfm.records.schema import Schema

ENCODES = """
from deepfm.records import codec, library
import numpy as np
frames, _ = codec.encode(np.ones(1), np.ones([1, 3]), np.ones([1, 3]))
print(len(frames), library.load() is not None)
"""


def run(env, path=ROOT, code=ENCODES):
    """Runs code where `path` is what Python imports from; returns (output, what it said)."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": str(path), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def counted(folder, script):
    """The environment of a compiler that notes each call."""
    path = compiler(folder, f"echo call >> {folder}/calls\n{script}")
    return {"CXX": path, "DEEPFM_KERNELS_DIR": str(folder / "of")}


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    """The script of a compiler that takes the built library instead of compiling it."""
    path = tmp_path_factory.mktemp("built") / "codec.so"
    with open(build.build(), "rb") as f:
        path.write_bytes(f.read()[:-32])
    return f'sleep 0.2; while [ "$1" != -o ]; do shift; done; cp {path} "$2"'


def test_one_process_builds_it_and_one_that_was_cut_is_built_again(tmp_path, copying):
    env = counted(tmp_path, copying)
    start = lambda: subprocess.Popen(
        [sys.executable, "-c", ENCODES], cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE
    )
    running = [start() for _ in range(3)]
    assert [each.communicate(timeout=180)[0] for each in running] == [b"81 True\n"] * 3
    assert (tmp_path / "calls").read_text() == "call\n"
    (path,) = (tmp_path / "of").glob("*.so")
    whole = path.read_bytes()
    for damaged in (whole[:5000], whole[:-40] + whole[-32:], b""):
        path.write_bytes(damaged)
        assert run(env) == ("81 True", "")
        assert path.read_bytes() == whole
    assert len((tmp_path / "calls").read_text().split()) == 4


@pytest.mark.parametrize("damaged", [False, True])
def test_one_that_another_process_has_just_built_is_taken(tmp_path, copying, damaged):
    env = counted(tmp_path, copying)
    if damaged:
        assert run(env)[0] == "81 True"
        (path,) = (tmp_path / "of").glob("*.so")
        path.write_bytes(b"cut")
    another_first = (
        "from deepfm.records import build\n"
        "of = build.build\n"
        "build.build = lambda *seen, **named: of(*seen, **named) and of(*seen, **named)\n"
    )
    assert run(env, code=another_first + ENCODES) == ("81 True", "")
    assert (tmp_path / "calls").read_text() == "call\n" * (1 + damaged)


def test_where_neither_site_packages_nor_home_can_be_written_it_is_in_a_temporary_folder(
    tmp_path, copying
):
    env = {"CXX": counted(tmp_path, copying)["CXX"], "HOME": "/proc", "TMPDIR": str(tmp_path)}
    env.update(DEEPFM_KERNELS_DIR="", XDG_CACHE_HOME="")
    nowhere = "import sysconfig; sysconfig.get_paths = lambda: {'purelib': '/proc'}\n"
    assert run(env, code=nowhere + ENCODES) == ("81 True", "")
    (folder,) = tmp_path.glob("deepfm_kernels-*")
    assert folder.stat().st_mode & 0o077 == 0 and list(folder.glob("*.so"))


@pytest.mark.parametrize(
    "script, words",
    [("exit 1", "install g++, or the package ziglang"),
     ('while [ "$1" != -o ]; do shift; done; echo of another machine > "$2"', "cannot be loaded")],
)  # fmt: skip
def test_without_it_plain_python_does_as_much_and_says_so_once(tmp_path, script, words):
    found, said = run(counted(tmp_path, script), code=ENCODES + ENCODES)
    assert found == "81 False\n81 False"
    assert said.count("There is no compiled codec") == 1 and words in said


def test_plain_python_reads_and_writes_only_a_few_records(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(codec, "MOST", 3)
    monkeypatch.setattr(codec, "_slow", codec._slow.__class__())
    for _ in range(3):
        assert len(codec.decode_lines(b"1 1:1\n", Schema(1)).labels) == 1
        frame, _ = codec.encode(np.ones(1), np.ones([1, 1]), np.ones([1, 1]))
    with pytest.raises(BadInput, match="decodes at most 3 records; install g"):
        codec.decode(frame, np.array([12]), np.array([len(frame) - 4]), Schema(1))
    with pytest.raises(BadInput, match=r"encodes at most 3 records; .*ziglang.*zip_for_spark.py"):
        codec.encode(np.ones(1), np.ones([1, 1]), np.ones([1, 1]))
    with pytest.raises(BadInput, match="--hash_buckets needs the compiled codec"):
        libsvm_text.numbers(b"1 a:1", Schema(1, hash_buckets=5))


def test_the_archive_for_spark_carries_it(tmp_path):
    archive = tmp_path / "deepfm_spark.zip"
    built = zip_for_spark.libraries()
    content = zip_for_spark.zipped(built)
    assert content == zip_for_spark.zipped(built)
    archive.write_bytes(content)
    env = {"CXX": "no-such-compiler", "HOME": "/proc", "DEEPFM_KERNELS_DIR": ""}
    for _ in range(2):
        assert run(env, archive) == ("81 True", "")
        (unpacked,) = tmp_path.glob("codec-*.so")
        unpacked.write_bytes(b"cut")  # is not taken for whole
    unpacked.unlink()
    archive.write_bytes(zip_for_spark.zipped({"another": next(iter(built.values()))}))
    found, said = run(env, archive)
    assert found == "81 False"
    assert f"has none for {platform.machine()}; make it by scripts/zip_for_spark.py" in said
