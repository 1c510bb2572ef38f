"""TF_CONFIG: how it is read, and the messages about what is wrong with it."""

import json
import os

import pytest

from deepfm.errors import BadInput
from deepfm.modes.common import tf_config

JOBS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["a:2"]}


def parse(jobs, job="chief", index=0):
    return tf_config.parse(json.dumps({"cluster": jobs, "task": {"type": job, "index": index}}))


HOSTS = {"ps_hosts": ("a:2",), "worker_hosts": ("a:1", "b:1", "c:1")}


@pytest.mark.parametrize(
    "number, task", [(0, ("chief", 0)), (1, ("worker", 0)), (2, ("worker", 1))]
)
def test_the_flags_of_the_articles_scripts_make_a_tf_config(monkeypatch, number, task):
    for there in (None, "{}", '{"environment": "cloud"}', json.dumps(tf_config_of(*task))):
        monkeypatch.setenv("TF_CONFIG", there or "")
        tf_config.take(**HOSTS, job_name="worker", task_index=number)
        assert tf_config.parse(os.environ["TF_CONFIG"]) == parse(JOBS, *task)
    tf_config.take(**HOSTS, job_name="worker", task_index=number)


def tf_config_of(job, index):
    return {"cluster": JOBS, "task": {"type": job, "index": index}}


@pytest.mark.parametrize(
    "there, hosts, job, index, sentence",
    [
        (tf_config_of("ps", 0), HOSTS, "worker", 0, "--ps_hosts.*: TF_CONFIG describes another"),
        (None, HOSTS, "worker", 3, "--ps_hosts.*the cluster has no task worker 2"),
        (None, HOSTS, "evaluator", 0, "--ps_hosts.*so start no evaluator"),
        (None, HOSTS, None, 0, "--job_name.*no task None 0"),
        (None, {}, "ps", 0, "--worker_hosts.*0 chiefs"),
        (None, {}, None, 1, "--task_index.*0 chiefs"),
        (None, {**HOSTS, "ps_hosts": ("a",)}, "ps", 0, "--ps_hosts.*'ps' is .*'host:port'"),
    ],
)
def test_flags_that_make_no_tf_config_or_another_are_refused(
    monkeypatch, there, hosts, job, index, sentence
):
    monkeypatch.setenv("TF_CONFIG", json.dumps(there) if there else "")
    with pytest.raises(BadInput, match=sentence):
        tf_config.take(**hosts, job_name=job, task_index=index)


ALONE = [
    json.dumps({"task": {"type": job, "index": index}, "environment": "cloud"})
    for job, index in (("chief", 0), ("master", "0"), ("worker", 0))
]


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"environment": "cloud"}', '{"cluster": {}}', '{"task": {}}', *ALONE]
)
def test_no_cluster_is_none(text):
    assert tf_config.parse(text) is None


def test_hosts_that_only_serve_count_too():
    jobs = {**JOBS, "ps": ["a:2", "[::1]:2"]}
    assert parse(jobs, "chief", 0).hosts == 4


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_ranks_are_the_chief_then_the_workers(chief):
    jobs = {chief: ["a:1"], "worker": ["b:1", "c:1"], "ps": ["a:2"]}
    found = [parse(jobs, job, i) for job, i in ((chief, 0), ("worker", 0), ("worker", 1))]
    assert [c.rank for c in found] == [0, 1, 2]
    assert {c.num_processes for c in found} == {3}
    assert {c.chief for c in found} == {chief}


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("localhost:1", "TF_CONFIG is not JSON"),
        ("[1]", "is not an object with 'cluster' and 'task'"),
        ('{"cluster": "a:1"}', "is not an object with 'cluster' and 'task'"),
        ('{"task": {"type": "ps", "index": 0}}', "names task ps 0, but no 'cluster'"),
        ('{"task": {"type": "worker", "index": 1}}', "names task worker 1, but no 'cluster'"),
        ('{"task": {"type": "chief", "index": 1}}', "names task chief 1, but no 'cluster'"),
        ('{"cluster": {}, "task": {"type": "evaluator"}}', "evaluates .*, so start no evaluator"),
        ('{"task": "ps"}', "names task ps 0, but no 'cluster'"),
        ('{"task": {"type": ["ps"]}}', "names task .*, but no 'cluster'"),
        (json.dumps({"sparseCluster": JOBS}), "unknown key 'sparseCluster'; known are cluster,"),
        (json.dumps({"Cluster": JOBS, "task": {}}), "unknown key 'Cluster'"),
        (json.dumps({"cluster": JOBS}), "'task' is missing"),
        (json.dumps({"cluster": JOBS, "task": {"type": "ps"}}), "'task' is missing"),
    ],
)
def test_what_is_no_tf_config_is_refused(text, sentence):
    with pytest.raises(BadInput, match=sentence):
        tf_config.parse(text)


def test_an_index_may_be_written_as_text():
    assert parse(JOBS, "worker", "1") == parse(JOBS, "worker", 1)


@pytest.mark.parametrize(
    "jobs, job, index, sentence",
    [
        (JOBS, "worker", 2, "no task worker 2; it has chief 0 to 0, ps 0 to 0, worker 0 to 1"),
        (JOBS, "master", 0, "no task master 0"),
        (JOBS, "evaluator", 0, "no task evaluator 0.*; the chief evaluates .*start no evaluator"),
        ({**JOBS, "evaluator": ["d:1"]}, "chief", 0, "'evaluator'.*, so start no evaluator"),
        (JOBS, "worker", "x", "no task worker x"),
        (JOBS, ["worker"], 0, "no task ..worker"),
        ({**JOBS, "boss": ["d:1"]}, "chief", 0, "unknown job 'boss'"),
        ({**JOBS, "ps": "a:2"}, "chief", 0, "'ps' is 'a:2'; give a list of 'host:port'"),
        ({**JOBS, "ps": ["a"]}, "chief", 0, "give a list of 'host:port'"),
        ({**JOBS, "ps": ["a:99999"]}, "chief", 0, "give a list of 'host:port'"),
        ({**JOBS, "master": ["d:1"]}, "chief", 0, "the cluster has 2 chiefs"),
        ({"ps": ["a:1"]}, "ps", 0, "the cluster has 0 chiefs"),
        ({**JOBS, "ps": ["a:1"]}, "chief", 0, "two processes have the address a:1"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(jobs, job, index, sentence):
    with pytest.raises(BadInput, match=sentence):
        parse(jobs, job, index)
