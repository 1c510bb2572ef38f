"""Which host of a job this one is by SageMaker Processing's settings, whether its files are
its own, and that hosts which see the same files are refused."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver
from conftest import run_tool

from data_tools import inspect_dataset, libsvm_to_tfrecord, make_synthetic, prepare, rebalance
from data_tools.common import command_line
from deepfm.errors import BadInput

if "own_files" not in flags.FLAGS:
    command_line.define_flags()
if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"], known_only=True)


def test_the_help_of_a_tool_lists_the_flags_that_it_shares_with_others():
    done = run_tool("rebalance", "--help")
    assert all(f"  --{name}:" in done.stdout for name in ("negative_rate", "resource_config"))
    assert "  --verbosity:" not in done.stdout  # which is absl's


def test_without_a_processing_job_a_host_is_alone():
    with flagsaver.flagsaver(resource_config="/no/such/file"):
        assert command_line.this_host("/in/a") == command_line.ALONE


def test_sagemakers_hosts_are_each_another(tmp_path):
    hosts = [f"algo-{i}" for i in (2, 1, 10)]
    found = []
    for host in hosts:
        path = tmp_path / host
        path.write_text(json.dumps({"current_host": host, "hosts": hosts}))
        with flagsaver.flagsaver(resource_config=str(path), own_files=True):
            found.append(command_line.this_host("/in/a"))
        hosts = hosts[1:] + hosts[:1]  # hosts need not agree on the order
    assert sorted(found) == [(i, 3, True) for i in range(3)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"current_host": "algo-1"}',
        '{"current_host": "algo-3", "hosts": ["algo-1", "algo-2"]}',
        '{"current_host": "algo-1", "hosts": ["algo-1", "algo-1"]}',
        '{"current_host": "algo-1", "hosts": 2}',
        "\xff",
    ],
)
def test_a_broken_resource_config_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "resourceconfig.json"
    path.write_bytes(text.encode("latin-1"))
    said = f"{path}: .*--resource_config=FILE"
    with flagsaver.flagsaver(resource_config=str(path)), pytest.raises(BadInput, match=said):
        command_line.this_host("/in/a")


@pytest.fixture
def processing(tmp_path):
    """A function that asks whether specs are own files, with the inputs of a processing job."""

    def ask(*specs, sharded=("/in/a",), others=("/in/b",), **flag):
        inputs = [
            {"InputName": "x", "S3Input": {"LocalPath": path, "S3DataDistributionType": kind}}
            for kind, paths in (("ShardedByS3Key", sharded), ("FullyReplicated", others))
            for path in paths
        ]
        found = {"ProcessingInputs": [*inputs, {"InputName": "dataset"}]}
        (tmp_path / "processingjobconfig.json").write_text(json.dumps(found))
        with flagsaver.flagsaver(resource_config=str(tmp_path / "resourceconfig.json"), **flag):
            return command_line.this_host(*specs).own_files

    return ask


def test_processing_tells_whether_the_files_are_a_hosts_own(processing):
    assert processing("/in/a")
    assert processing("/in/a/x.txt, /in/a/y*", None)
    assert not processing("/in/b", None)
    assert not processing("/in/ab")
    assert not processing("elsewhere")
    assert processing("/in/b", own_files=True) and not processing("/in/a", own_files=False)
    with pytest.raises(BadInput, match="/in/a is ShardedByS3Key and /in/b is not"):
        processing("/in/b", "/in/a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ProcessingInputs": [1]}'])
def test_a_broken_processing_job_is_refused(tmp_path, text):
    (tmp_path / "processingjobconfig.json").write_text(text)
    path = str(tmp_path / "resourceconfig.json")
    with flagsaver.flagsaver(resource_config=path), pytest.raises(BadInput, match="--noown_files"):
        command_line.this_host("/in/a")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    "program, flag, words",
    [
        (libsvm_to_tfrecord, "input", "'python -m data_tools.on_spark convert' "),
        (prepare, "input", "'python -m data_tools.on_spark prepare' "),
        (rebalance, "input", "'python -m data_tools.on_spark rebalance' "),
        (inspect_dataset, "data", "give each files of its own .ShardedByS3Key, --own_files."),
        (make_synthetic, "", "records; use one host"),
    ],
)
def test_hosts_that_see_the_same_files_do_not_each_do_all(tmp_path, program, flag, words, number):
    """(tmp_path is empty, so one host finds nothing to do.)"""
    path = tmp_path / "resourceconfig.json"
    hosts = [f"algo-{i + 1}" for i in range(number)]
    path.write_text(json.dumps({"current_host": "algo-1", "hosts": hosts}))
    given = {flag: f"{tmp_path}/x*"} if flag else dict(train_rows=0, val_rows=0, test_rows=0)
    given.update({} if flag == "data" else {"output_dir": f"{tmp_path}/out"})
    words = f"{path}: each of 2 hosts would .*{words}" if number > 1 else "nothing|no file matches"
    with flagsaver.flagsaver(resource_config=str(path)), pytest.raises(BadInput, match=words):
        program.main(program.main.__annotations__["options"](**given))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "program, words",
    [("rebalance", ["--shard_index=0", "--num_shards=2"]), ("make_synthetic", ["--num_shards=2"])],
)
def test_what_a_script_of_an_earlier_version_asks_for_is_refused_with_what_to_use(program, words):
    done = run_tool(program, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}.py: ") and " gone" in line
    assert "'python -m data_tools.on_spark' (docs/spark.md)" in line
