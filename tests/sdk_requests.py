"""The requests of command lines of scripts/launch_sagemaker.py, and those that SageMaker's SDK
builds for the same jobs.

Run by .venv-sagemaker's Python in the root of the checkout. Standard input: a JSON list of command
lines, each a list of words; standard output: a list of [request, the SDK's request]. Nothing is
sent or uploaded.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import sys
import tempfile
import types
import warnings

warnings.filterwarnings("ignore")
os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
sys.path.insert(0, "scripts")

import botocore.session  # noqa: E402
import launch_sagemaker  # noqa: E402
import sagemaker_requests  # noqa: E402
from programs import program  # noqa: E402

FLAGS = launch_sagemaker.FLAGS
# One for all sessions, so that each description of a service is read once.
botocore.session.create_loader = functools.lru_cache(None)(botocore.session.create_loader)
BASE = "/opt/ml/processing"
ANSWERS = {  # what AWS would say
    "GetCallerIdentity": {"Account": "111122223333", "Arn": "arn:aws:iam::111122223333:root"},
    "ListBuckets": {"Buckets": []},
}
JOBS = "CreateTrainingJob", "CreateProcessingJob", "CreateHyperParameterTuningJob"


REQUESTS = []  # of the job that the SDK starts


def answer(model, params, **_):
    """What AWS would say to a call of the SDK."""
    if model.name in JOBS:
        REQUESTS.append(json.loads(params["body"]))
    return types.SimpleNamespace(status_code=200), ANSWERS.get(model.name, {})


@functools.lru_cache(maxsize=None)
def session_in(region):
    """The SDK's session, which is made once, because that takes half a second."""
    import boto3
    import sagemaker

    boto = boto3.Session(region_name=region)
    boto.events.register("before-call", answer)
    return sagemaker.Session(boto)


class Sdk:
    """Builds the SDK's request of a job from the arguments of functions of sagemaker_requests."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def _file(self, name):
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text("")
        return str(self.folder / name)

    def training(self, job, channels, hyperparameters, model_dir, processes):
        from sagemaker.inputs import TrainingInput
        from sagemaker.tensorflow import TensorFlow

        metrics = sagemaker_requests.METRICS.items()
        self._file("source/train.py")
        distribution = {
            "ps": {"parameter_server": {"enabled": True}},
            "horovod": {
                "mpi": {
                    "enabled": True, "processes_per_host": processes,
                    "custom_mpi_options": FLAGS.mpi_options,
                }
            },
        }.get(FLAGS.distribution)  # fmt: skip
        self.estimator = TensorFlow(
            entry_point="train.py", source_dir=str(self.folder / "source"),
            framework_version="1.15.2", py_version="py37", image_uri=FLAGS.image_uri, role=job.role,
            sagemaker_session=session_in(job.region), base_job_name=FLAGS.base_job_name,
            instance_type=job.type,
            instance_count=job.count, volume_size=FLAGS.volume_size,
            input_mode=FLAGS.input_mode,
            distribution=distribution, model_dir=False if model_dir == "" else model_dir,
            output_path=FLAGS.output_path, tags=job.tags, hyperparameters=hyperparameters,
            metric_definitions=[{"Name": n, "Regex": r} for n, r in metrics],
            max_run=FLAGS.max_run, use_spot_instances=FLAGS.spot,
            max_wait=(FLAGS.max_wait or 2 * FLAGS.max_run) if FLAGS.spot else None,
            checkpoint_s3_uri=FLAGS.checkpoint_s3_uri,
            checkpoint_local_path=FLAGS.checkpoint_s3_uri and "/opt/ml/checkpoints",
            debugger_hook_config=False, disable_profiler=True,
        )  # fmt: skip
        self.tags = job.tags
        inputs = {n: TrainingInput(uri, distribution=how) for n, (uri, how) in channels.items()}
        self.inputs = inputs or None
        if FLAGS.job == "training":
            self.estimator.fit(self.inputs, wait=False)

    def tuning(self, _, ranges):
        from sagemaker import tuner

        kinds = {
            "Integer": tuner.IntegerParameter, "Continuous": tuner.ContinuousParameter,
            "Categorical": tuner.CategoricalParameter,
        }  # fmt: skip
        parameters = {
            name: kinds[kind](*values, *scale) if scale else kinds[kind](values)
            for name, (kind, values, *scale) in ranges.items()
        }
        tuner.HyperparameterTuner(
            self.estimator, FLAGS.objective, parameters, self.estimator.metric_definitions,
            objective_type="Minimize" if "loss" in FLAGS.objective else "Maximize",
            max_jobs=FLAGS.max_jobs, max_parallel_jobs=FLAGS.max_parallel_jobs,
            base_tuning_job_name=FLAGS.base_job_name, tags=self.tags,
        ).fit(self.inputs, wait=False)  # fmt: skip

    def processing(self, job, entrypoint, words, inputs, output=None, environment=None):
        from sagemaker.image_uris import retrieve
        from sagemaker.processing import ProcessingInput, ProcessingOutput, Processor
        from sagemaker.spark.processing import PySparkProcessor

        common = {
            "role": job.role, "volume_size_in_gb": FLAGS.volume_size, "tags": job.tags,
            "max_runtime_in_seconds": FLAGS.max_run, "base_job_name": FLAGS.base_job_name,
            "sagemaker_session": session_in(job.region), "instance_count": job.count,
            "instance_type": job.type,
        }  # fmt: skip
        sources = [
            ProcessingInput(uri, f"{BASE}/input/data", name, s3_data_distribution_type=how)
            for name, (uri, how) in inputs.items()
            if name == "data"
        ]
        records = [ProcessingOutput(f"{BASE}/output", FLAGS.output_path, "records")]
        if FLAGS.job == "spark":
            spark = PySparkProcessor(
                framework_version="3.3", image_uri=FLAGS.image_uri,
                env={"AWS_REGION": job.region}, **common,
            )  # fmt: skip
            spark.run(
                self._file("spark_on_sagemaker.py"), arguments=words, inputs=sources,
                submit_py_files=[self._file("deepfm_spark.zip")],
                submit_files=[self._file("requirements-spark.txt")],
                outputs=records if output else [], wait=False, logs=False,
            )  # fmt: skip
            return
        self._file("code/convert_on_sagemaker.sh")
        image = FLAGS.image_uri or retrieve(
            "tensorflow", job.region, "1.15.2", "py37", job.type, image_scope="training"
        )
        code = ProcessingInput(str(self.folder / "code"), f"{BASE}/input/code", "code")
        Processor(image_uri=image, entrypoint=entrypoint, **common).run(
            [*sources, code], records, words or None, wait=False, logs=False
        )


def pair(words):
    """[the request of a command line, the SDK's]."""
    REQUESTS.clear()
    for name in FLAGS:
        FLAGS[name].unparse()
    argv = program.read_flags_before_words(["launch_sagemaker.py", "--dry_run", *words])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        sdk = Sdk(folder)
        for name in ("training", "tuning", "processing"):
            ours = getattr(sagemaker_requests, name)

            def both(*values, ours=ours, name=name, **named):
                getattr(sdk, name)(*values, **named)
                return ours(*values, **named)

            setattr(sagemaker_requests, name, both)
            patches.callback(setattr, sagemaker_requests, name, ours)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            launch_sagemaker.main(argv)
    shown = printed.getvalue()  # the SDK prints too, in front of it
    return [json.loads(shown[shown.index("{\n") :]), *REQUESTS]


if __name__ == "__main__":
    json.dump([pair(words) for words in json.load(sys.stdin)], sys.stdout)
