"""The request that would start a SageMaker job, checked against SageMaker and train.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, make_records, run_train, small_job, write_libsvm, write_tfrecords

PYTHON = ROOT / ".venv-sagemaker" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs .venv-sagemaker: scripts/setup.sh --sagemaker"
)

TRAIN_FLAGS = [
    "--num_epochs=2", "--dropout", "0.1,0.2", "--batch_norm", "--nolazy_updates",
    "--clear_existing_model", "False",
]  # fmt: skip


def launch(*words):
    """The finished launcher, which has neither AWS settings nor a network that answers."""
    env = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env.update(AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    return subprocess.run(
        [PYTHON, "scripts/launch_sagemaker.py", "--dry_run", *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def request(*words):
    """The request that a dry run prints; its standard output holds nothing else."""
    done = launch(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.fixture(scope="module")
def conversion():
    """A processing job."""
    return request(
        "--job=processing", "--instance_count=4", "--input_s3_uri=s3://b/raw",
        "--output_path=s3://b/train", "--", "--num_workers=16",
    )  # fmt: skip


@pytest.fixture(scope="module")
def spark():
    """A processing job on Spark; a value has what a shell would take apart."""
    return request(
        "--job=spark", "--input_s3_uri=s3://b/train", "--output_path=s3://b/out", "--tags=for=it's",
        "--", "rebalance", "--num_files=64", "--alsologtostderr", "--log_dir=a b;$(c)*",
    )  # fmt: skip


@pytest.fixture(scope="module")
def several():
    """A processing job on Spark of several hosts."""
    return request(
        "--job=spark", "--instance_count=2", "--image_uri=1.dkr.ecr.us-east-1.amazonaws.com/spark",
        "--input_s3_uri=s3://b/raw", "--output_path=s3://b/out", "--", "convert", "--num_files=8",
    )  # fmt: skip


def hyperparameters(request):
    """As train.py's process gets them: each was encoded as JSON."""
    return {name: json.loads(text) for name, text in request["HyperParameters"].items()}


def test_botocore_finds_nothing_wrong_with_the_requests(servers, pipes, conversion, spark, several):
    check = (
        "import json, sys, botocore.session, botocore.validate\n"
        "service = botocore.session.Session().get_service_model('sagemaker')\n"
        "for name, request in json.load(sys.stdin):\n"
        "    shape = service.operation_model(name).input_shape\n"
        "    found = botocore.validate.ParamValidator().validate(request, shape)\n"
        "    print(found.generate_report(), end='')\n"
    )
    training, processing = "CreateTrainingJob", "CreateProcessingJob"
    jobs = [(training, servers), (training, pipes)]
    jobs += [(processing, job) for job in (conversion, spark, several)]
    found = subprocess.run(
        [PYTHON, "-c", check], input=json.dumps(jobs), capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_flags_of_train_py_become_hyperparameters_in_all_their_forms(servers):
    expected = {
        "num_epochs": "2",
        "dropout": "0.1,0.2",
        "batch_norm": True,
        "lazy_updates": False,
        "clear_existing_model": "False",
    }
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
        done = run_train("--only_check_args", *words)
        assert done.returncode == 0, done.stderr


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
    wanted = json.loads((tmp_path / "model" / "report.json").read_text())
    found = {
        m["Name"]: [float(x) for x in re.findall(m["Regex"], done.stderr)]
        for m in servers["AlgorithmSpecification"]["MetricDefinitions"]
    }
    assert found["train:loss"][-1] == pytest.approx(wanted["train"]["loss"], abs=1e-5)
    assert len(found["train:loss"]) == len(found["train:examples_per_second"]) == 2
    for name in ("auc", "log_loss", "calibration", "gauc"):
        assert found[f"eval:{name}"] == pytest.approx([wanted["eval"][name]], abs=1e-4)


REAL_RUN = """
import io, sys, tarfile
import moto

sys.path.insert(0, "scripts")
with moto.mock_s3(), moto.mock_sts(), moto.mock_iam(), moto.mock_sagemaker():
    import boto3
    import launch_sagemaker

    role = boto3.client("iam").create_role(RoleName="you", AssumeRolePolicyDocument="{}")["Role"]
    argv = ["launch_sagemaker.py", "--train_s3_uri=s3://b/t", f"--role={role['Arn']}", "--nowait"]
    launch_sagemaker.main(launch_sagemaker.FLAGS(argv))
    assert len(boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]) == 1
    (bucket,) = boto3.resource("s3").buckets.all()
    (uploaded,) = bucket.objects.all()
    with tarfile.open(fileobj=io.BytesIO(uploaded.get()["Body"].read())) as archive:
        archive.extractall(sys.argv[1])
"""


def test_only_train_py_and_deepfm_are_uploaded_and_they_are_enough(tmp_path):
    aws = dict(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1")
    command = [PYTHON, "-W", "ignore", "-c", REAL_RUN, tmp_path]
    subprocess.run(command, cwd=ROOT, env=dict(os.environ, **aws), check=True, timeout=60)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    files = (path for path in (ROOT / "deepfm").rglob("*") if path.is_file())
    sources = [path for path in files if path.suffix != ".pyc"]
    assert found == {"train.py", *(str(path.relative_to(ROOT)) for path in sources)}
    subprocess.run([PYTHON, "train.py", "--only_check_args"], cwd=tmp_path, check=True, timeout=60)


ONE = ["--train_s3_uri=s3://b/t"]
RAW = ["--job=processing", "--input_s3_uri=s3://b/raw"]
ON_SPARK = ["--job=spark", "--input_s3_uri=s3://b/raw"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([*ONE, "--", "--lerning_rate=1"], "Did you mean: learning_rate"),
        ([*ONE, "--", "--flagfile=no.flags"], "--flagfile=no.flags cannot be read (No such file"),
        ([*ONE, "--lerning_rate=1"], "Unknown command line flag 'lerning_rate'"),
        (["--train_s3_uri=bucket/t"], "try --train_s3_uri=s3://"),
        ([*ONE, "--distribution=horovod", "--spot"], "try --checkpoint_s3_uri=s3://"),
        ([*ONE, "--distribution=none", "--instance_count=2"], "try --distribution=ps"),
        ([*ONE, "--", "--distribution=horovod"], "does not fit --distribution=ps"),
        ([*ONE, "--input_mode=Pipe", "--", "--feature_size=9"], "--field_size is missing after"),
        ([*ONE, "--instance_type=ml.x.y"], "--instance_type=ml.x.y is not a SageMaker type; try"),
        ([*RAW, "--instance_type=c5.xlarge"], "--instance_type=c5.xlarge is not a SageMaker type"),
        ([*ON_SPARK, "--", "rebalance", "--sed=1"], "Did you mean: seed"),
        ([*ON_SPARK, "--", "shuffle"], "'shuffle' is not a job; give one of"),
        ([*ON_SPARK, "--", "--seed=1"], "try -- rebalance"),
        ([*ON_SPARK, "--", "rebalance", "--input=a"], "--input after the -- is set by the job"),
        ([*ON_SPARK, "--instance_count=2", "--", "rebalance"], "=2 needs --output_path, the s3://"),
        (
            [*ON_SPARK, "--instance_count=2", "--output_path=s3://b/out", "--", "rebalance"],
            "=2 needs --image_uri, an image with Spark",
        ),
        ([*ON_SPARK, "--tool=rebalance", "--", "rebalance"], "--tool needs --job=processing; add"),
        (
            [*RAW, "--tool=prepare_criteo", "--instance_count=2"],
            "2 hosts would see only each host's own files; try one large host",
        ),
        (
            [*RAW, "--tool=rebalance", "--instance_count=2"],
            "host needs no others. docs/spark.md says",
        ),
    ],
)
def test_refuses_in_one_sentence(words, sentence):
    done = launch(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_flag_in_a_flagfile_is_refused(tmp_path):
    (tmp_path / "own.flags").write_text("--lerning_rate=1\n")
    done = launch(*ONE, "--", f"--flagfile={tmp_path}/own.flags")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean: learning_rate" in done.stderr
    assert done.stderr.count("\n") == 1


def test_hosts_that_convert_divide_the_input_and_share_the_code(conversion):
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
    script = (ROOT / "scripts" / "convert_on_sagemaker.sh").read_text()
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

    def run(*words):
        command = ["bash", "-c", script, "convert", *words]
        env = dict(os.environ, PATH=path)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    return run


def test_a_host_converts_into_a_folder_of_its_own(convert, tmp_path):
    write_libsvm(tmp_path / "processing" / "input" / "data" / "day.libsvm", make_records(5))
    done = convert("libsvm_to_tfrecord", "--feature_size=99")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "processing" / "output"
    found = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    folder = "shard-00001-of-00002"
    assert found == {f"{folder}/day.tfrecords", f"{folder}/dataset.json"}
    metadata = json.loads((output / folder / "dataset.json").read_text())
    assert (metadata["feature_size"], metadata["files"]["day.tfrecords"]["rows"]) == (99, 5)


def test_a_host_shuffles_its_own_files_into_a_folder_of_its_own(convert, tmp_path):
    write_tfrecords(tmp_path / "processing" / "input" / "data" / "day.tfrecords", make_records(5))
    done = convert("rebalance", "--num_files=4")  # on two hosts together
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "processing" / "output" / "shard-00001-of-00002"
    names = [f"part-0000{i}-of-00002.tfrecords" for i in range(2)]
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", *names]
    described = json.loads((folder / "dataset.json").read_text())["files"]
    assert [described[name]["rows"] for name in names] == [2, 3]


def test_a_host_without_files_ends_well(convert, tmp_path):
    done = convert("libsvm_to_tfrecord")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "processing" / "output").iterdir()) == []


def test_the_only_host_on_spark_reads_all_files_and_what_it_writes_is_uploaded(spark):
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


def test_several_hosts_on_spark_read_and_write_s3_themselves(several):
    assert several["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 2
    words = shlex.split(" ".join(several["AppSpecification"]["ContainerArguments"]))
    assert words == ["convert", "--input=s3://b/raw", "--output_dir=s3://b/out", "--num_files=8"]
    assert "data" not in [i["InputName"] for i in several["ProcessingInputs"]]
    assert not several.get("ProcessingOutputConfig")
    assert several["Environment"]["AWS_REGION"] == "us-east-1"


def test_words_for_spark_survive_the_shell_that_the_image_gives_them_to(spark):
    line = " ".join(spark["AppSpecification"]["ContainerArguments"])
    words = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {line}'], stdout=subprocess.PIPE, text=True
    )
    job, _, _, *rest = words.stdout.splitlines()
    assert (job, rest) == (
        "rebalance",
        ["--num_files=64", "--alsologtostderr", "--log_dir=a b;$(c)*"],
    )


@pytest.fixture
def driver(tmp_path):
    """A function that runs the driver's program below tmp_path, without what `lacking` names.

    Instead of pip it has a program that writes its arguments to a file, and on_spark writes its
    own.
    """
    code = (
        (ROOT / "scripts" / "spark_on_sagemaker.py").read_text().replace("/opt/ml", str(tmp_path))
    )
    (tmp_path / "driver.py").write_text(code)
    files = tmp_path / "processing" / "input" / "files"
    for folder in (files, tmp_path / "config", tmp_path / "data_tools"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "requirements-spark.txt", files)
    said = "import json, sys\nopen({!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
    (tmp_path / "data_tools" / "__init__.py").write_text("")
    (tmp_path / "data_tools" / "on_spark.py").write_text(said.format(str(tmp_path / "ran")))
    (tmp_path / "pip.py").write_text(said.format(str(tmp_path / "installed")))

    def run(hosts, there, *words):
        (tmp_path / "config" / "resourceconfig.json").write_text(json.dumps({"hosts": hosts}))
        for name in there:
            (tmp_path / f"{name}.py").write_text("")
        command = [sys.executable, "-S", "driver.py", "rebalance", "--num_files=64", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        read = lambda name: json.loads((tmp_path / name).read_text())
        return done, {n: read(n) for n in ("installed", "ran") if (tmp_path / n).exists()}

    return run


PACKAGES = ["absl", "numpy", "pandas", "pyarrow"]


def test_the_driver_installs_the_pins_but_for_spark_and_then_runs_the_job(driver):
    done, found = driver(["algo-1"], PACKAGES[:3])  # as in SageMaker's image, without pyarrow
    assert done.returncode == 0, done.stderr
    pins = {word.partition("==")[0] for word in found["installed"] if "==" in word}
    lines = (ROOT / "requirements-spark.txt").read_text().splitlines()
    listed = {line.partition("==")[0] for line in lines if "==" in line}
    assert pins == listed - {"pyspark", "py4j"}
    assert found["ran"] == ["rebalance", "--num_files=64"]


def test_the_driver_installs_nothing_in_an_image_that_has_all(driver):
    done, found = driver(["algo-1"], PACKAGES)
    assert done.returncode == 0, done.stderr
    assert list(found) == ["ran"]


ON_S3 = ["--input=s3://b/x/*, s3://b/y", "--output_dir=s3://b/out"]


@pytest.mark.parametrize(
    "words, there, sentence",
    [
        (["--input=/x", ON_S3[1]], PACKAGES, "--input=/x: 2 hosts share no folder; give s3://"),
        ([ON_S3[0], "--output_dir=/x"], PACKAGES, "--output_dir=/x: 2 hosts share no folder"),
        (ON_S3, PACKAGES[:3], "the image lacks pyarrow, which 2 hosts need"),
    ],
)
def test_the_driver_refuses_several_hosts_that_lack_files_or_packages(
    driver, words, there, sentence
):
    done, found = driver(["algo-1", "algo-2"], there, *words)
    assert (done.returncode, found) == (2, {})
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_the_driver_runs_the_job_of_several_hosts_on_s3(driver):
    done, found = driver(["algo-1", "algo-2"], PACKAGES, *ON_S3)
    assert done.returncode == 0, done.stderr
    assert found == {"ran": ["rebalance", "--num_files=64", *ON_S3]}
