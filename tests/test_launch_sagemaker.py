"""The request that would start a SageMaker job, checked against SageMaker and train.py."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, make_records, report, run_train, small_job, write_libsvm, write_tfrecords

PYTHON = ROOT / ".venv-sagemaker" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs .venv-sagemaker: scripts/setup.sh --sagemaker"
)

TRAIN_FLAGS = [
    "--num_epochs=2", "--dropout", "0.1,0.2", "--batch_norm", "--nolazy_updates",
    "--clear_existing_model", "False",
]  # fmt: skip


def run(command, code=0, timeout=180, **options):
    """A finished process, which had to exit with a code."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == code, done.stderr
    return done


# Neither AWS settings nor a network that answers.
ALONE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
ALONE.update(dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull))


# Loads the SDK and the descriptions of AWS's services once for many command lines.
LOADED = """
import functools, json, logging, os, sys, tempfile, warnings
import botocore.session

sys.path[:0] = ["scripts"]
warnings.filterwarnings("ignore")
logging.getLogger("sagemaker.config").setLevel("ERROR")
botocore.session.create_loader = functools.lru_cache(None)(botocore.session.create_loader)
os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
import launch_sagemaker, programs
import sagemaker.spark.processing, sagemaker.tensorflow


def in_child(function):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if os.fork() == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.exit(function())
        code = os.WEXITSTATUS(os.wait()[1])
        print(json.dumps([code, *(file.seek(0) or file.read() for file in (out, err))]), flush=True)
"""
LAUNCHES = f"""{LOADED}

def launch():
    programs.run_program(launch_sagemaker.main, programs.program.read_flags_before_words)


for line in sys.stdin:
    sys.argv[:] = ["launch_sagemaker.py", "--dry_run", *json.loads(line)]
    in_child(launch)
"""


@pytest.fixture(scope="module", autouse=True)
def launcher():
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ALONE}
    with subprocess.Popen([PYTHON, "-c", LAUNCHES], cwd=ROOT, **how) as launch.of:
        yield


def launch(*words):
    """[exit code, standard output, standard error] of the launcher."""
    print(json.dumps(words), file=launch.of.stdin, flush=True)
    return json.loads(launch.of.stdout.readline())


@functools.lru_cache(maxsize=None)
def request(*words):
    """The request that a dry run prints; its standard output holds nothing else."""
    code, printed, said = launch(*words)
    assert code == 0, said
    return json.loads(printed)


@pytest.fixture(scope="module")
def servers():
    """A job with parameter servers that reads files."""
    return request("--train_s3_uri=s3://b/t", "--eval_s3_uri=s3://b/v", "--", *TRAIN_FLAGS)


@pytest.fixture(scope="module")
def pipes():
    """A Horovod job on spot instances, whose two processes of a host read pipes."""
    return request(
        "--distribution=horovod", "--processes_per_host=2", "--instance_count=3",
        "--input_mode=Pipe", "--train_s3_uri=s3://b/t0,s3://b/t1", "--eval_s3_uri=s3://b/v",
        "--s3_shard", "--spot", "--checkpoint_s3_uri=s3://b/c", "--", "--feature_size=9",
        "--field_size=3",
    )  # fmt: skip


CONVERSION = (
    "--job=processing", "--instance_count=4", "--input_s3_uri=s3://b/raw",
    "--output_path=s3://b/train", "--", "--num_workers=16",
)  # fmt: skip
SPARK = (  # a value has what a shell would take apart
    "--job=spark", "--input_s3_uri=s3://b/train", "--output_path=s3://b/out", "--tags=for=it",
    "--", "rebalance", "--num_files=64", "--alsologtostderr", "--log_dir=a b;$(c)*",
)  # fmt: skip
SEVERAL = (
    "--job=spark", "--instance_count=2", "--image_uri=1.dkr.ecr.us-east-1.amazonaws.com/spark",
    "--input_s3_uri=s3://b/raw", "--output_path=s3://b/out", "--", "convert", "--num_files=8",
)  # fmt: skip


def hyperparameters(request):
    """As train.py's process gets them: each was encoded as JSON."""
    return {name: json.loads(text) for name, text in request["HyperParameters"].items()}


ONE = ["--train_s3_uri=s3://b/t"]
RAW = ["--job=processing", "--input_s3_uri=s3://b/raw"]
ON_SPARK = ["--job=spark", "--input_s3_uri=s3://b/raw"]
SIZES_OF_PIPE = ["--feature_size=9", "--field_size=3"]
GPU_IMAGE = "--image_uri=111122223333.dkr.ecr.eu-west-1.amazonaws.com/own:1"
TUNING = ["--job=tuning", "--tune=embedding_size=8..32", *ONE]
TUNED = [*TUNING, "--distribution=none", "--objective=train:loss"]


def test_a_dry_run_needs_neither_credentials_nor_a_network(servers):
    words = ["--train_s3_uri=s3://b/t", "--eval_s3_uri=s3://b/v", "--", *TRAIN_FLAGS]
    command = [PYTHON, "-W", "ignore", "scripts/launch_sagemaker.py", "--dry_run", *words]
    done = run(command, cwd=ROOT, env=ALONE)
    assert done.stderr == ""
    assert hyperparameters(json.loads(done.stdout)).keys() == hyperparameters(servers).keys()


def test_what_all_jobs_have_comes_from_the_flags():
    words = ["--tags=a=b,c=d e", "--volume_size=7", "--max_run=99", "--region=eu-west-1"]
    words += ["--instance_type=ml.p3.2xlarge", "--base_job_name=mine", "--output_path=s3://o/x/"]
    training = request(*ONE, "--distribution=none", *words, "--role=Mine")
    processing = request(*RAW, *words, "--role=Mine")
    hosts = {"InstanceType": "ml.p3.2xlarge", "InstanceCount": 1, "VolumeSizeInGB": 7}
    assert training["ResourceConfig"] == processing["ProcessingResources"]["ClusterConfig"] == hosts
    assert training["TrainingJobName"].startswith("mine-")
    assert processing["ProcessingJobName"].startswith("mine-")
    assert training["OutputDataConfig"] == {"S3OutputPath": "s3://o/x/"}
    (output,) = processing["ProcessingOutputConfig"]["Outputs"]
    assert output["S3Output"]["S3Uri"] == "s3://o/x/"
    image = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/tensorflow-training:1.15.2-gpu-py37"
    assert training["AlgorithmSpecification"]["TrainingImage"] == image
    assert processing["AppSpecification"]["ImageUri"] == image
    for job in (training, processing):
        assert job["Tags"] == [{"Key": "a", "Value": "b"}, {"Key": "c", "Value": "d e"}]
        assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 99}
        assert job["RoleArn"] == "arn:aws:iam::111122223333:role/Mine"


def test_a_tuning_job_tries_what_was_asked_for():
    job = request(
        *TUNING, "--distribution=horovod", "--tune=learning_rate=1e-4..0.01:log", "--max_jobs=5",
        "--tune=deep_layers=128,64|256", "--eval_s3_uri=s3://b/v", "--tags=a=b",
    )  # fmt: skip
    how = job["HyperParameterTuningJobConfig"]
    assert how["ResourceLimits"] == {"MaxNumberOfTrainingJobs": 5, "MaxParallelTrainingJobs": 2}
    assert how["HyperParameterTuningJobObjective"] == {"Type": "Maximize", "MetricName": "eval:auc"}
    size = {"MinValue": "8", "MaxValue": "32", "ScalingType": "Auto"}
    rate = {"MinValue": "0.0001", "MaxValue": "0.01", "ScalingType": "Logarithmic"}
    assert how["ParameterRanges"] == {
        "IntegerParameterRanges": [{"Name": "embedding_size", **size}],
        "ContinuousParameterRanges": [{"Name": "learning_rate", **rate}],
        "CategoricalParameterRanges": [{"Name": "deep_layers", "Values": ['"128,64"', '"256"']}],
    }
    training = job["TrainingJobDefinition"]
    assert "model_dir" not in training["StaticHyperParameters"]
    names = {metric["Name"] for metric in training["AlgorithmSpecification"]["MetricDefinitions"]}
    assert "eval:auc" in names
    assert job["Tags"] == [{"Key": "a", "Value": "b"}]


@pytest.mark.parametrize("objective, best", [("train:loss", "Minimize"), ("eval:gauc", "Maximize")])
def test_a_loss_is_to_be_small_and_an_auc_large(objective, best):
    words = ["--distribution=none", f"--objective={objective}", "--eval_s3_uri=s3://b/v", "--"]
    how = request(*TUNING, *words, "--gauc_field=0")["HyperParameterTuningJobConfig"]
    assert how["HyperParameterTuningJobObjective"]["Type"] == best


def in_process(program, *words):
    """What a program prints in .venv-sagemaker's Python, as somebody with credentials."""
    env = dict(os.environ, AWS_DEFAULT_REGION="us-east-1")
    return run([PYTHON, "-c", program, *words], cwd=ROOT, env=env).stdout


def test_every_gpu_that_sagemaker_offers_is_known():
    types = """
service = botocore.session.get_session().get_service_model("sagemaker")
import sagemaker_hosts as hosts
ours = [f"ml.{f}.{size}" for f, (_, _, sizes) in hosts.GPUS.items() for size in sizes]
print(json.dumps([service.shape_for("TrainingInstanceType").enum, ours]))
"""
    offered, ours = json.loads(in_process(LOADED + types))
    offered = {type_ for type_ in offered if type_[3] in "pg"}
    assert len(offered) > 20 and offered <= set(ours)


@pytest.mark.parametrize(
    "type_, processes",
    [
        ("ml.p4d.24xlarge", 8), ("ml.g5.48xlarge", 8), ("ml.g4dn.12xlarge", 4), ("ml.c5.xlarge", 1),
    ],
)  # fmt: skip
def test_each_gpu_of_a_host_gets_a_process(type_, processes):
    own_image = [GPU_IMAGE] if "g4" not in type_ else []
    found = hyperparameters(
        request(*ONE, "--distribution=horovod", f"--instance_type={type_}", *own_image)
    )
    assert found["sagemaker_mpi_num_of_processes_per_host"] == processes


def test_flags_of_train_py_become_hyperparameters_in_all_their_forms(servers):
    expected = {"num_epochs": "2", "dropout": "0.1,0.2", "batch_norm": True}
    expected.update(lazy_updates=False, clear_existing_model="False")
    found = hyperparameters(servers)
    assert {name: found.get(name) for name in expected} == expected


def test_a_flagfile_becomes_hyperparameters_and_what_comes_later_wins(tmp_path):
    (tmp_path / "base.flags").write_text("--batch_norm\n--seed=3\n--batch_size=7\n")
    own = tmp_path / "own.flags"
    own.write_text(f"# ours\n\n--seed=2\n--flagfile={tmp_path}/base.flags\n--dropout=0.1,0.2\n")
    job = request(
        *ONE, "--", "--dropout=0.5", f"--flagfile={own}", "--nobatch_norm", "--batch_size=9"
    )
    found = hyperparameters(job)
    expected = {"seed": "3", "batch_size": "9", "batch_norm": False, "dropout": "0.1,0.2"}
    assert {name: found.get(name) for name in expected} == expected
    assert "flagfile" not in found


def test_train_py_takes_the_hyperparameters_as_the_toolkit_passes_them(servers, pipes):
    for job in (servers, pipes):
        words = []
        for name, value in sorted(hyperparameters(job).items()):
            words += [] if name.startswith("sagemaker_") else [f"--{name}", str(value)]
        run_train("--only_check_args", *words, code=0)


def test_parameter_servers_share_a_model_dir_on_s3(servers):
    found = hyperparameters(servers)
    assert found["sagemaker_program"] == "train.py"
    assert found["sagemaker_parameter_server_enabled"] is True
    assert found["model_dir"].startswith("s3://")
    assert servers["ResourceConfig"]["InstanceCount"] > 1


def test_each_process_of_a_host_has_a_pipe_of_its_own(pipes):
    sources = {c["ChannelName"]: c["DataSource"]["S3DataSource"] for c in pipes["InputDataConfig"]}
    uris = {name: source["S3Uri"] for name, source in sources.items()}
    assert uris == {"training": "s3://b/t0", "training-1": "s3://b/t1", "evaluation": "s3://b/v"}
    assert [sources[name]["S3DataDistributionType"] for name in sorted(sources)] == [
        "FullyReplicated", "ShardedByS3Key", "ShardedByS3Key",
    ]  # fmt: skip
    assert pipes["AlgorithmSpecification"]["TrainingInputMode"] == "Pipe"
    found = hyperparameters(pipes)
    for name in ("pipe_mode", "enable_s3_shard", "enable_data_multi_path", "sagemaker_mpi_enabled"):
        assert found[name] is True, name
    assert found["worker_per_host"] == found["sagemaker_mpi_num_of_processes_per_host"] == 2


def test_a_job_on_spot_instances_goes_on_from_the_checkpoints_that_are_mirrored(pipes):
    assert pipes["EnableManagedSpotTraining"] is True
    stop = pipes["StoppingCondition"]
    assert stop["MaxWaitTimeInSeconds"] >= stop["MaxRuntimeInSeconds"]
    folder = hyperparameters(pipes)["model_dir"]
    assert pipes["CheckpointConfig"] == {"S3Uri": "s3://b/c", "LocalPath": folder}


def test_the_metrics_are_found_in_what_train_py_prints(servers, tmp_path):
    write_tfrecords(tmp_path / "a.tfrecords", make_records(128))
    done = run_train(*small_job(tmp_path, tmp_path / "model", "--log_steps=1", "--gauc_field=0"))
    wanted = report(tmp_path / "model")
    found = {
        m["Name"]: [float(x) for x in re.findall(m["Regex"], done.stderr)]
        for m in servers["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert found["train:loss"][-1] == pytest.approx(wanted["train"]["loss"], abs=1e-5)
    assert len(found["train:loss"]) == len(found["train:examples_per_second"]) == 2
    for name in ("auc", "log_loss", "calibration", "gauc"):
        assert found[f"eval:{name}"] == pytest.approx([wanted["eval"][name]], abs=1e-4)


# Starts a training as somebody with a role in a pretended AWS, and follows it to each of some ends.
STARTED = f"""{LOADED}
import io, tarfile, time
import moto

with moto.mock_s3(), moto.mock_sts(), moto.mock_iam(), moto.mock_sagemaker(), moto.mock_logs():
    import boto3
    import sagemaker_jobs
    from moto.sagemaker.models import sagemaker_backends

    boto3.client("iam").create_role(RoleName="you", AssumeRolePolicyDocument="none")
    FLAGS = launch_sagemaker.FLAGS
    argv = ["launch_sagemaker.py", "--train_s3_uri=s3://b/t", "--role=you", "--nowait"]
    launch_sagemaker.main(FLAGS(argv))
    (bucket,) = boto3.resource("s3").buckets.all()
    (uploaded,) = bucket.objects.all()
    with tarfile.open(fileobj=io.BytesIO(uploaded.get()["Body"].read())) as archive:
        archive.extractall(sys.argv[1])

    (job,) = sagemaker_backends["123456789012"]["us-east-1"].training_jobs.values()
    logs, group = boto3.client("logs"), "/aws/sagemaker/TrainingJobs"
    stream = dict(logGroupName=group, logStreamName=job.training_job_name + "/algo-1")
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(**stream)
    event = dict(timestamp=int(1000 * time.time()), message="a line of its log")
    logs.put_log_events(**stream, logEvents=[event])
    follow = functools.partial(
        sagemaker_jobs.follow, sagemaker.Session(), "Training", job.training_job_name
    )
    FLAGS.wait = True
    print()
    for job.training_job_status, job.failure_reason in json.loads(sys.argv[2]):
        in_child(follow)
"""
ENDS = [("Completed", "", 0), ("Failed", "AlgorithmError: no", 1), ("Stopped", "", 1)]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of what a job has uploaded, and {how it ends: what its follower ended with}."""
    folder = tmp_path_factory.mktemp("uploaded")
    said = in_process(STARTED, str(folder), json.dumps([end[:2] for end in ENDS]))
    return folder, dict(zip(ENDS, map(json.loads, said.splitlines()[-len(ENDS) :])))


def test_only_train_py_and_deepfm_are_uploaded_and_they_are_enough(job):
    folder, _ = job
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = (path for path in (ROOT / "deepfm").rglob("*") if path.is_file())
    sources = [path for path in files if "__pycache__" not in path.parts]
    assert found == {"train.py", *(str(path.relative_to(ROOT)) for path in sources)}
    run([PYTHON, "train.py", "--only_check_args"], cwd=folder)


@pytest.mark.parametrize("end", ENDS)
def test_a_job_is_followed_to_its_end_which_is_the_exit_code(job, end):
    status, reason, code = end
    found, printed, said = job[1][end]
    assert found == code, said
    assert "a line of its log" in printed
    if code:
        assert f": {status} ({reason}" in said.splitlines()[-1]


REFUSED = [
    ([*ONE, "--", "--lerning_rate=1"], "Did you mean: learning_rate"),
    ([*ONE, "--", "--flagfile={}/own.flags"], "Did you mean: learning_rate"),
    ([*ONE, "--", "--flagfile=no.flags"], "--flagfile=no.flags cannot be read (No such file"),
    ([*ONE, "--lerning_rate=1"], "Unknown command line flag 'lerning_rate'"),
    (["--train_s3_uri=bucket/t"], "try --train_s3_uri=s3://"),
    ([*ONE, "--distribution=horovod", "--spot"], "try --checkpoint_s3_uri=s3://"),
    ([*ONE, "--distribution=none", "--instance_count=2"], "try --distribution=ps"),
    ([*ONE, "--", "--distribution=horovod"], "does not fit --distribution=ps"),
    ([*ONE, "--", "--dist_mode=2"], "--dist_mode after the -- is set by the flags before it"),
    ([*ONE, "--input_mode=Pipe", "--", "--feature_size=9"], "--field_size is missing after"),
    ([*ONE, "--instance_type=ml.x.y"], "--instance_type=ml.x.y is not a SageMaker type; try"),
    ([*RAW, "--instance_type=c5.xlarge"], "--instance_type=c5.xlarge is not a SageMaker type"),
    ([*ONE, "--instance_type=ml.p4d.24xlarge"], "1.15.2 has no code for A100; give --image"),
    ([*ONE, "--instance_type=ml.g9.xlarge"], "is not known here; say how many GPUs it has"),
    ([*ONE, "--region=us-nowhere-1"], "--region=us-nowhere-1: no image of SageMaker's for"),
    ([*ONE, "--tags=for=it's"], "give KEY=VALUE of letters, digits"),
    ([*ONE, "--base_job_name=a_b"], "--base_job_name=a_b must be letters and digits"),
    (
        ["--train_s3_uri=s3://b/a.libsvm", "--input_mode=Pipe", "--", *SIZES_OF_PIPE],
        "to read lines of LibSVM, add --data_format=libsvm after the --",
    ),
    ([*RAW, "--", "--num_wokers=1"], "libsvm_to_tfrecord.py: Unknown command line flag"),
    ([*RAW, "--tool=rebalance", "--", "--sed=1"], "Did you mean: seed"),
    ([*TUNING, "--eval_s3_uri=s3://b/v"], "would go on from each other's checkpoints"),
    ([*TUNING, "--distribution=none"], "--objective=eval:auc needs --eval_s3_uri"),
    ([*TUNED, "--tune=sed=1|2"], "Did you mean: seed"),
    ([*TUNED, "--tune=optimizer=adam|adan"], "optimizer"),
    ([*TUNED, "--tune=learning_rate=0..1:log"], "is not a range or a choice; try"),
    ([*TUNED, "--", "--embedding_size=8"], "--embedding_size is given twice"),
    ([*TUNED, "--spot"], "--spot needs --job=training"),
    ([*ON_SPARK, "--", "rebalance", "--sed=1"], "Did you mean: seed"),
    ([*ON_SPARK, "--", "shuffle"], "'shuffle' is not a job; give one of"),
    ([*ON_SPARK, "--", "--seed=1"], "try -- rebalance"),
    ([*ON_SPARK, "--", "rebalance", "--input=a"], "--input after the -- is set by the job"),
    ([*ON_SPARK, "--instance_count=2", "--", "rebalance"], "=2 needs --output_path, the s3://"),
    (
        [*ON_SPARK, "--instance_count=2", "--output_path=s3://b/out", "--", "rebalance"],
        "=2 needs --image_uri, an image with Spark",
    ),
    ([*SEVERAL, "--valid_input=s3://b/v,/x"], "--valid_input: 2 hosts share no folder; give s3"),
    ([*ON_SPARK, "--tool=rebalance", "--", "rebalance"], "--tool needs --job=processing; add"),
    (
        [*RAW, "--tool=prepare", "--instance_count=2"],
        "2 hosts would see only each host's own files; try one large host",
    ),
    ([*RAW, "--tool=rebalance", "--instance_count=2"], "host needs no others. docs/spark.md says"),
]


@pytest.mark.parametrize("words, sentence", REFUSED)
def test_refuses_in_one_sentence(words, sentence, tmp_path):
    (tmp_path / "own.flags").write_text("--lerning_rate=1\n")
    code, printed, said = launch(*(word.format(tmp_path) for word in words))
    assert (code, printed, said.count("\n")) == (2, "", 1), said
    assert sentence in said


def test_hosts_that_convert_divide_the_input_and_share_the_code():
    conversion = request(*CONVERSION)
    inputs = {i["InputName"]: i["S3Input"] for i in conversion["ProcessingInputs"]}
    assert inputs["data"]["S3DataDistributionType"] == "ShardedByS3Key"
    assert inputs["code"]["S3DataDistributionType"] == "FullyReplicated"
    application = conversion["AppSpecification"]
    assert application["ContainerArguments"] == ["--num_workers=16"]
    script = application["ContainerEntrypoint"][1]
    assert script == f"{inputs['code']['LocalPath']}/convert_on_sagemaker.sh"


@pytest.fixture
def convert(tmp_path):
    """A function that runs one host's part of a conversion below tmp_path instead of /opt/ml."""
    script = (ROOT / "scripts/sagemaker/convert_on_sagemaker.sh").read_text()
    script = script.replace("/opt/ml", str(tmp_path))
    for folder in ("config", "processing/input/data", "processing/output"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "processing" / "input" / "code").symlink_to(ROOT)
    write = lambda name, found: (tmp_path / "config" / name).write_text(json.dumps(found))
    write("resourceconfig.json", {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]})
    folder = str(tmp_path / "processing" / "input" / "data")
    source = {"LocalPath": folder, "S3DataDistributionType": "ShardedByS3Key"}
    write("processingjobconfig.json", {"ProcessingInputs": [{"S3Input": source}]})
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"

    env = dict(os.environ, PATH=path)
    return lambda *words: run(["bash", "-c", script, "convert", *words], env=env)


def test_a_host_converts_into_a_folder_of_its_own(convert, tmp_path):
    write_libsvm(tmp_path / "processing" / "input" / "data" / "day.libsvm", make_records(5))
    convert("libsvm_to_tfrecord", "--feature_size=99")
    output = tmp_path / "processing" / "output"
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    folder = "shard-00001-of-00002"
    assert found == {f"{folder}/day.tfrecords", f"{folder}/dataset.json"}
    metadata = json.loads((output / folder / "dataset.json").read_text())
    assert (metadata["feature_size"], metadata["files"]["day.tfrecords"]["rows"]) == (99, 5)


def test_a_host_shuffles_its_own_files_into_a_folder_of_its_own(convert, tmp_path):
    write_tfrecords(tmp_path / "processing" / "input" / "data" / "day.tfrecords", make_records(5))
    convert("rebalance", "--num_files=4")  # on two hosts together
    folder = tmp_path / "processing" / "output" / "shard-00001-of-00002"
    names = [f"part-0000{i}-of-00002.tfrecords" for i in range(2)]
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", *names]
    described = json.loads((folder / "dataset.json").read_text())["files"]
    assert [described[name]["rows"] for name in names] == [2, 3]


def test_a_host_without_files_ends_well(convert, tmp_path):
    convert("libsvm_to_tfrecord")
    assert list((tmp_path / "processing" / "output").iterdir()) == []


def test_the_only_host_on_spark_reads_all_files_and_what_it_writes_is_uploaded():
    spark = request(*SPARK)
    assert spark["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 1
    words = shlex.split(" ".join(spark["AppSpecification"]["ContainerArguments"]))
    flags = dict(word.split("=", 1) for word in words if "=" in word)
    inputs = {i["InputName"]: i["S3Input"] for i in spark["ProcessingInputs"]}
    assert inputs["data"]["S3Uri"] == "s3://b/train"
    assert inputs["data"]["S3DataDistributionType"] == "FullyReplicated"
    assert inputs["data"]["LocalPath"] == flags["--input"]
    (output,) = spark["ProcessingOutputConfig"]["Outputs"]
    assert output["S3Output"]["S3Uri"] == "s3://b/out"
    assert output["S3Output"]["LocalPath"] == flags["--output_dir"]


def test_several_hosts_on_spark_read_and_write_s3_themselves():
    several = request(*SEVERAL)
    assert several["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 2
    words = shlex.split(" ".join(several["AppSpecification"]["ContainerArguments"]))
    assert words == ["convert", "--input=s3://b/raw", "--output_dir=s3://b/out", "--num_files=8"]
    assert "data" not in [i["InputName"] for i in several["ProcessingInputs"]]
    assert not several.get("ProcessingOutputConfig")
    assert several["Environment"]["AWS_REGION"] == "us-east-1"


def test_words_for_spark_survive_the_shell_that_the_image_gives_them_to():
    line = " ".join(request(*SPARK)["AppSpecification"]["ContainerArguments"])
    job, _, _, *rest = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {line}'], stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    assert job == "rebalance"
    assert rest == ["--num_files=64", "--alsologtostderr", "--log_dir=a b;$(c)*"]


@pytest.fixture
def driver(tmp_path):
    """A function that runs the driver's program below tmp_path, without what `lacking` names.

    Instead of pip it has a program that writes its arguments to a file, and on_spark writes its
    own.
    """
    code = (ROOT / "scripts/sagemaker/spark_on_sagemaker.py").read_text()
    (tmp_path / "driver.py").write_text(code.replace("/opt/ml", str(tmp_path)))
    files = tmp_path / "processing" / "input" / "files"
    for folder in (files, tmp_path / "config", tmp_path / "data_tools"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "requirements-spark.txt", files)
    said = "import json, sys\nopen({!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
    (tmp_path / "data_tools" / "__init__.py").write_text("")
    (tmp_path / "data_tools" / "on_spark.py").write_text(said.format(str(tmp_path / "ran")))
    (tmp_path / "pip.py").write_text(said.format(str(tmp_path / "installed")))

    def drive(hosts, there, code=0):
        (tmp_path / "config" / "resourceconfig.json").write_text(json.dumps({"hosts": hosts}))
        for name in there:
            (tmp_path / f"{name}.py").write_text("")
        command = [sys.executable, "-S", "driver.py", "rebalance", "--num_files=64"]
        done = run(command, code, cwd=tmp_path)
        read = lambda name: json.loads((tmp_path / name).read_text())
        return done, {n: read(n) for n in ("installed", "ran") if (tmp_path / n).exists()}

    return drive


PACKAGES = ["absl", "numpy", "pandas", "pyarrow"]


def test_the_driver_installs_the_pins_but_for_spark_and_then_runs_the_job(driver):
    _, found = driver(["algo-1"], PACKAGES[:3])  # as in SageMaker's image, without pyarrow
    pins = {word.partition("==")[0] for word in found["installed"] if "==" in word}
    lines = (ROOT / "requirements-spark.txt").read_text().splitlines()
    listed = {line.partition("==")[0] for line in lines if "==" in line}
    assert pins == listed - {"pyspark", "py4j"}
    assert found["ran"] == ["rebalance", "--num_files=64"]


def test_the_driver_installs_nothing_in_an_image_that_has_all(driver):
    _, found = driver(["algo-1"], PACKAGES)
    assert list(found) == ["ran"]


def test_the_driver_refuses_several_hosts_that_lack_packages(driver):
    done, found = driver(["algo-1", "algo-2"], PACKAGES[:3], code=2)
    assert found == {}
    assert done.stderr.count("the image lacks pyarrow, which 2 hosts need") == 1


def test_the_driver_runs_the_job_of_several_hosts(driver):
    _, found = driver(["algo-1", "algo-2"], PACKAGES)
    assert found == {"ran": ["rebalance", "--num_files=64"]}
