"""SageMaker's hosts and channels: which records each process reads, and what flags they set."""

import json

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from conftest import job_of, make_records, mode_of, run_train, write_libsvm

from deepfm import flags as deepfm_flags
from deepfm import open_data
from deepfm.config import InputConfig, Share
from deepfm.data.datasets import DataFile, DataSet
from deepfm.errors import BadInput
from deepfm.runtime.sagemaker import Job


@pytest.fixture
def environment():
    """A function that applies (variables, *argv) and gives FLAGS; puts the flags back."""
    kept = flagsaver.save_flag_values(flags.FLAGS)

    def apply(variables, *argv):
        flags.FLAGS(["train.py", *argv])
        deepfm_flags.take_defaults_from(variables)
        return flags.FLAGS

    yield apply
    flagsaver.restore_flag_values(kept, flags.FLAGS)


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("multi_path", [False, True])
def test_all_processes_together_read_every_record_once(hosts, processes, sharded, multi_path):
    # A file for each host and channel, so that any way of dividing them is possible.
    records = np.arange(hosts * processes * 7)
    of_channel = np.split(records, processes) if multi_path else [records] * processes
    nothing, read = DataSet([], "tfrecord", None, None), []
    for host in range(hosts):
        for process in range(processes):
            files = np.split(of_channel[process], hosts)
            seen = files[host] if sharded else np.concatenate(files)
            rank = host * processes + process
            around = Job(hosts=tuple("abc"[:hosts]), current_host="abc"[host])
            of = dict(size=hosts * processes, local_size=processes, local_rank=process)
            job = job_of(distribution=mode_of(rank=rank, **of), sagemaker=around)
            found = open_data.share(nothing._replace(own_channel=multi_path, sharded=sharded), job)
            read.extend(seen[found.index :: found.of])
    assert sorted(read) == records.tolist()


def job(tmp_path, **channels):
    """The second of two hosts, whose training channel, or each of `channels`, is of a kind."""
    (tmp_path / "config").mkdir()
    kinds = channels or {"training": "ShardedByS3Key"}
    channels = {x.replace("_", "-"): {"S3DistributionType": kind} for x, kind in kinds.items()}
    (tmp_path / "config/inputdataconfig.json").write_text(json.dumps(channels))
    return Job(hosts=("a", "b"), current_host="b", input_dir=str(tmp_path))


def test_the_channel_tells_whether_hosts_have_parts(tmp_path):
    assert job(tmp_path).is_sharded("training")


def test_a_flag_that_contradicts_the_channel_is_refused(tmp_path):
    with pytest.raises(BadInput, match="ShardedByS3Key.*would lose records.*enable_s3_shard=true"):
        job(tmp_path).is_sharded("training", False)


MODES = {  # of two processes
    "ps": dict(size=2, synchronous=False),
    "horovod": dict(size=2),
    "local": {},
}


def find(tmp_path, flag, mode, asked, **fields):
    """The data set of a flag, which every channel of the job has as its folder."""
    write_libsvm(tmp_path / "tr.libsvm", make_records(9))
    asked = InputConfig(1, **{flag: str(tmp_path)}, **asked)
    distribution = mode_of(**MODES[mode])
    return open_data.find(flag, job_of(input=asked, distribution=distribution, **fields))


@pytest.mark.parametrize(
    "mode, asked, refused",
    [("ps", {}, True), ("horovod", {"eval_on_all_ranks": True}, True), ("horovod", {}, False)],
)
def test_a_process_that_evaluates_alone_first_needs_all_training_records(
    tmp_path, mode, asked, refused
):
    of_job = job(tmp_path)
    assert find(tmp_path, "training_data_dir", mode, asked, sagemaker=of_job).sharded
    given = dict(sagemaker=of_job, evaluate_first=True)
    if not refused:
        assert find(tmp_path, "training_data_dir", mode, asked, **given).sharded
        return
    with pytest.raises(BadInput, match="Channel training is ShardedByS3Key.*--evaluate_first"):
        find(tmp_path, "training_data_dir", mode, asked, **given)


@pytest.mark.parametrize("own_channel", [False, True])
def test_the_only_process_of_several_hosts_reads_all_records(own_channel):
    """With ps, the chief does the jobs other than training."""
    of_job = Job(hosts=("a", "b"), current_host="b")
    data = DataSet([], "tfrecord", None, None, own_channel=own_channel)
    assert open_data.share(data, job_of(sagemaker=of_job)) == Share()


@pytest.mark.parametrize("flag", ["training_data_dir", "val_data_dir"])
def test_the_only_process_of_several_hosts_refuses_a_part(tmp_path, flag):
    of_job = job(tmp_path)._replace(evaluation_channel_name="training")
    said = "Channel training is ShardedByS3Key, but the only process of --hosts=a,b needs all"
    with pytest.raises(BadInput, match=said):
        find(tmp_path, flag, "local", {}, sagemaker=of_job)
    one = of_job._replace(hosts=("b",))
    assert find(tmp_path, flag, "local", {}, sagemaker=one).sharded


def test_training_channels_that_the_hosts_divide_in_two_ways_are_refused(tmp_path):
    of_job = job(tmp_path, training="FullyReplicated", training_1="ShardedByS3Key")
    said = "Channel training-1 is ShardedByS3Key, but channel training is not"
    with pytest.raises(BadInput, match=said):
        find(tmp_path, "training_data_dir", "horovod", {}, sagemaker=of_job)
    assert not find(tmp_path, "val_data_dir", "horovod", {}, sagemaker=of_job).sharded
    one = of_job._replace(hosts=("b",))
    assert not find(tmp_path, "training_data_dir", "local", {}, sagemaker=one).sharded


def test_an_unknown_host_is_refused():
    with pytest.raises(BadInput, match="--current_host=c is not one of --hosts=a,b"):
        Job(hosts=("a", "b"), current_host="c").check(1)


def test_worker_per_host_has_to_be_what_mpi_started():
    Job(worker_per_host=4).check(4)
    with pytest.raises(BadInput, match="try --worker_per_host=1, or let MPI start 4"):
        Job(worker_per_host=4).check(1)


VARIABLES = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_CPUS": "8",
    "SM_NUM_GPUS": "1",
    "SM_MODEL_DIR": "/opt/ml/model",
    "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
    "SM_INPUT_DIR": "/opt/ml/input",
    "SM_CHANNEL_TRAINING": "/data/training",
    "SM_CHANNEL_TRAINING-1": "/data/training-1",
    "SM_CHANNEL_EVALUATION": "/data/evaluation",
    "SM_CHANNEL_OTHER": "/data/other",
    "SM_CHANNELS": '["evaluation","other","training","training-1"]',
    "SM_INPUT_DATA_CONFIG": '{"training": {"TrainingInputMode": "File"}}',
}


def test_flags_take_their_defaults_from_sagemaker(environment):
    found = environment(VARIABLES)
    assert found.hosts == ("algo-1", "algo-2")
    assert found.current_host == "algo-2"
    assert (found.num_cpus, found.num_gpus) == (8, 1)
    assert found.servable_model_dir == "/opt/ml/model"
    assert found.model_dir == "/opt/ml/output/data/model"
    assert found.training_data_dir == "/data/training"
    assert found.val_data_dir == "/data/evaluation"
    assert not found.pipe_mode


def test_a_host_goes_by_its_own_files_for_its_name(environment, tmp_path):
    """The toolkit's mpirun gives the processes of all hosts the variables of the first one."""
    (tmp_path / "config").mkdir()
    path = tmp_path / "config/resourceconfig.json"
    path.write_text('{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}')
    variables = {**VARIABLES, "SM_INPUT_DIR": str(tmp_path)}
    assert environment(variables).current_host == "algo-1"
    assert environment(variables, "--current_host=algo-2").current_host == "algo-2"
    path.write_text("{")
    with pytest.raises(BadInput, match="resourceconfig.json is not JSON"):
        environment(variables)


def test_a_flag_wins_over_the_environment(environment):
    found = environment(
        VARIABLES, "--training_data_dir=mine", "--checkpoint_dir=there", "--num_gpus=0",
        "--hosts=x,y", "--evaluation_channel_name=other",
    )  # fmt: skip
    assert found.training_data_dir == "mine"
    assert found.model_dir == "there"
    assert found.num_gpus == 0
    assert found.hosts == ("x", "y")
    assert found.val_data_dir == "/data/other"


def test_the_names_of_the_articles_scripts_set_our_flags(environment):
    found = environment(
        VARIABLES, "--num_CPUs=3", "--num_GPUs", "0", "--dist_mode", "2", "--num_threads=5",
        "--inter_op_threads=7",
    )  # fmt: skip
    assert (found.num_cpus, found.num_gpus) == (3, 0)  # not the environment's
    assert (found.intra_op_threads, found.inter_op_threads) == (5, 7)
    assert found.distribution == "ps"
    assert not {"num_CPUs", "num_GPUs", "dist_mode", "checkpoint_dir"} & set(deepfm_flags.changed())


@pytest.mark.parametrize("number, mode", enumerate(["auto", "ps", "ps", "horovod"]))
def test_each_dist_mode_is_a_distribution(environment, number, mode):
    assert environment({}, f"--dist_mode={number}").distribution == mode


def test_a_dist_mode_that_is_none_is_refused(environment):
    with pytest.raises(flags.IllegalFlagValueError, match="one of <auto"):
        environment({}, "--dist_mode=4")


def test_with_several_paths_all_training_channels_are_read_in_file_mode(environment):
    found = environment(VARIABLES, "--enable_data_multi_path=true")
    assert found.training_data_dir == "/data/training,/data/training-1"


@pytest.mark.parametrize(
    "multi_path, asked, read",
    [
        (True, "/data/training/", "/data/training,/data/training-1"),  # as the article's notebook
        (True, "/data/training-1", "/data/training-1"),
        (False, "/data/training", "/data/training"),
    ],
)
def test_with_several_paths_the_first_channels_folder_stands_for_all(
    environment, multi_path, asked, read
):
    flags = f"--enable_data_multi_path={multi_path}", f"--training_data_dir={asked}"
    assert environment(VARIABLES, *flags).training_data_dir == read


def test_pipe_mode_is_as_the_channel_says(environment):
    channels = json.dumps({"training": {"TrainingInputMode": "Pipe"}})
    assert environment({"SM_INPUT_DATA_CONFIG": channels}).pipe_mode
    assert not environment({"SM_INPUT_DATA_CONFIG": channels}, "--pipe_mode=false").pipe_mode


def test_a_report_counts_the_records_of_all_hosts_or_none():
    data = DataSet([DataFile("a", 9, rows=30)], "tfrecord", None, None)
    assert open_data.described(data, [15, 15])["records"] == 30
    of_host = open_data.described(data._replace(sharded=True), [30, 12])
    assert of_host["records"] == 42 and of_host["sharded"]
    assert open_data.described(data._replace(sharded=True))["records"] is None


def test_a_broken_file_of_the_job_ends_training_with_a_sentence(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config/resourceconfig.json").write_text("{")
    done = run_train(f"--input_dir={tmp_path}", f"--model_dir={tmp_path}/model", code=2)
    assert "resourceconfig.json is not JSON" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "model").exists()
