"""shards: which share of a job a host does, by flags or by SageMaker Processing's settings, and
what hosts cannot share, which data_tools.on_spark does."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver
from conftest import run_tool

from data_tools import prepare_criteo, rebalance
from data_tools.common import shards
from deepfm.errors import BadInput

if "num_shards" not in flags.FLAGS:
    shards.define_flags()
if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test"], known_only=True)


def share(**values):
    with flagsaver.flagsaver(**{"resource_config": "/no/such/file", **values}):
        return shards.share()


def test_the_help_of_a_tool_lists_the_flags_that_it_shares_with_others():
    done = run_tool("rebalance", "--help")
    assert all(f"  --{name}:" in done.stdout for name in ("negative_rate", "resource_config"))
    assert "  --verbosity:" not in done.stdout  # which is absl's


def test_one_host_does_all():
    assert share() == (0, 1)


def test_the_flags_tell_the_share():
    assert share(shard_index=2, num_shards=5) == (2, 5)


def test_sagemakers_hosts_share_the_job_each_another_part(tmp_path):
    hosts = [f"algo-{i}" for i in (2, 1, 10)]
    found = []
    for host in hosts:
        path = tmp_path / host
        path.write_text(json.dumps({"current_host": host, "hosts": hosts}))
        found.append(share(resource_config=str(path)))
        hosts = hosts[1:] + hosts[:1]  # hosts need not agree on the order
    assert sorted(found) == [(0, 3), (1, 3), (2, 3)]


def test_the_flags_count_more_than_sagemaker(tmp_path):
    path = tmp_path / "config"
    path.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}))
    assert share(resource_config=str(path), shard_index=0, num_shards=1) == (0, 1)


@pytest.mark.parametrize(
    "values, said",
    [
        (dict(shard_index=1), "--shard_index=1 needs --num_shards, at least 2"),
        (dict(num_shards=3), "--num_shards=3 needs --shard_index, from 0 to 2"),
        (
            dict(shard_index=3, num_shards=3),
            "--shard_index=3 must be below --num_shards=3, so at most 2",
        ),
    ],
)
def test_impossible_shares_are_refused_with_what_works(values, said):
    with pytest.raises(BadInput, match=said):
        share(**values)


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
    with pytest.raises(BadInput, match=f"{path}: .*--num_shards"):
        share(resource_config=str(path))


@pytest.fixture
def processing(tmp_path):
    """A function that asks own_files of some specs, with the inputs of a processing job."""

    def ask(*specs, sharded=("/in/a",), others=("/in/b",), **flag):
        inputs = [
            {"InputName": "x", "S3Input": {"LocalPath": path, "S3DataDistributionType": kind}}
            for kind, paths in (("ShardedByS3Key", sharded), ("FullyReplicated", others))
            for path in paths
        ]
        found = {"ProcessingInputs": [*inputs, {"InputName": "dataset"}]}
        (tmp_path / "processingjobconfig.json").write_text(json.dumps(found))
        with flagsaver.flagsaver(resource_config=str(tmp_path / "resourceconfig.json"), **flag):
            return shards.own_files(*specs)

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


def test_without_a_processing_job_hosts_see_the_same_files():
    with flagsaver.flagsaver(resource_config="/no/such/file"):
        assert not shards.own_files("/in/a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ProcessingInputs": [1]}'])
def test_a_broken_processing_job_is_refused(tmp_path, text):
    (tmp_path / "processingjobconfig.json").write_text(text)
    path = str(tmp_path / "resourceconfig.json")
    with flagsaver.flagsaver(resource_config=path), pytest.raises(BadInput, match="--noown_files"):
        shards.own_files("/in/a")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("program, job", [(prepare_criteo, "prepare"), (rebalance, "rebalance")])
def test_hosts_of_a_processing_job_do_not_each_do_all(tmp_path, program, job, number):
    """Of files that all hosts see; (tmp_path is empty, so one host finds nothing to do.)"""
    path = tmp_path / "resourceconfig.json"
    hosts = [f"algo-{i + 1}" for i in range(number)]
    path.write_text(json.dumps({"current_host": "algo-1", "hosts": hosts}))
    options = program.Options(input=f"{tmp_path}/x*", output_dir=str(tmp_path / "out"))
    words = f"python -m data_tools.on_spark {job}' " if number > 1 else "no file matches"
    with flagsaver.flagsaver(resource_config=str(path)), pytest.raises(BadInput, match=words):
        program.main(options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "program, words, job",
    [
        ("rebalance", ["--shard_index=0", "--num_shards=2"], "rebalance"),
        ("prepare_criteo", ["--step", "count", "--counts=x"], "prepare"),
    ],
)
def test_what_a_script_of_an_earlier_version_asks_for_is_refused_with_what_to_use(
    program, words, job
):
    done = run_tool(program, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}.py: ") and " gone" in line
    assert f"'python -m data_tools.on_spark {job}' (docs/spark.md)" in line
