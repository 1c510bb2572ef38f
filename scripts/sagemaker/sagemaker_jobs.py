"""What all jobs of launch_sagemaker.py share: the session of SageMaker's SDK, and following a job.

A dry run asks AWS nothing; its account and role are those of AWS's documentation.
"""

import contextlib
import io
import json
import logging
import os
import sys
import types

import programs
from absl import flags
from programs import BadInput, fail, need

FLAGS = flags.FLAGS
_ACCOUNT = "111122223333"


def check_flags(words_of_program, words):
    """Lets a program check its flags, and do nothing else."""
    done = programs.run_command(sys.executable, *words_of_program, "--only_check_args", *words)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"{words_of_program[-1]} fails with {words}."]
        raise BadInput(lines[-1])


@contextlib.contextmanager
def connect():
    """Yields the SDK's Session, whose default bucket exists; an error of AWS ends the program.

    A dry run sends nothing, and prints the request that would start a job, nothing else.
    """
    need("boto3")
    import boto3.compat
    import boto3.exceptions
    from botocore import exceptions

    boto3.compat.filter_python_deprecation_warnings()
    for chatty in ("botocore", "sagemaker", "sagemaker.config"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    os.environ.setdefault("AWS_MAX_ATTEMPTS", "15")  # a job is looked at for hours
    try:
        region = FLAGS.region or boto3.Session().region_name
        if FLAGS.dry_run:
            region = region or "us-east-1"
            os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
        elif not region:
            raise BadInput("--region is missing; try --region=us-east-1.")
        boto = boto3.Session(region_name=region)
        partition = boto.get_partition_for_region(region)
        with contextlib.ExitStack() as stack:
            if FLAGS.dry_run:
                boto.events.register("before-call", _answers(partition, sys.stdout))
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # the SDK's own
            need("sagemaker.estimator")  # the import looks for credentials
            import sagemaker

            session = sagemaker.Session(boto)
            # The SDK takes a bucket of this name from any account.
            session.s3_client.head_bucket(
                Bucket=session.default_bucket(), ExpectedBucketOwner=session.account_id()
            )
            yield session
    except (exceptions.ParamValidationError, exceptions.UnknownRegionError) as error:
        raise BadInput(error) from error
    except (exceptions.BotoCoreError, exceptions.ClientError, boto3.exceptions.Boto3Error) as error:
        fail(error, 1)


def _answers(partition, to):
    """What botocore calls instead of AWS, an account without buckets; writes requests for jobs."""
    arn = f"arn:{partition}:iam::{_ACCOUNT}"

    def answer(model, params, **_):
        if model.name.startswith("Create") and model.name.endswith("Job"):
            to.write(json.dumps(json.loads(params["body"]), indent=2) + "\n")
        known = {
            "GetCallerIdentity": lambda: {"Account": _ACCOUNT, "Arn": f"{arn}:root"},
            "GetRole": lambda: {"Role": {"Arn": f"{arn}:role/{params['body']['RoleName']}"}},
            "ListBuckets": lambda: {"Buckets": []},
        }
        return types.SimpleNamespace(status_code=200), known.get(model.name, dict)()

    return answer


def for_all_jobs(session):
    """The arguments that the SDK's estimators and processors share."""
    pairs = [tag.partition("=") for tag in FLAGS.tags]
    return {
        "sagemaker_session": session,
        "role": _role(session),
        "base_job_name": FLAGS.base_job_name,
        "tags": [{"Key": key, "Value": value} for key, _, value in pairs] or None,
    }


def _role(session):
    """The ARN of --role; without it, of the notebook's role, or whoever starts this program."""
    import sagemaker

    name = FLAGS.role or ("your-role" if FLAGS.dry_run else None)
    if name:
        return session.expand_role(name)
    try:
        return sagemaker.get_execution_role(session)
    except ValueError as error:
        raise BadInput(f"--role is missing; try --role=SageMakerRole. {error}.") from error


def follow(session, kind, name):
    """Shows a job's log until it ends; ends the program with code 1 unless it completed.

    Args:
        kind: Training, HyperParameterTuning or Processing.
    """
    from sagemaker.exceptions import UnexpectedStatusException

    if FLAGS.dry_run:
        return
    logging.info("Started %s.", name)
    if not FLAGS.wait:
        return
    wait, describe = {
        "Training": (session.logs_for_job, session.describe_training_job),
        "HyperParameterTuning": (session.wait_for_tuning_job, session.describe_tuning_job),
        "Processing": (session.logs_for_processing_job, session.describe_processing_job),
    }[kind]
    with contextlib.suppress(UnexpectedStatusException):
        wait(name, **({} if kind == "HyperParameterTuning" else {"wait": True}))
    described = describe(name)
    best = described.get("BestTrainingJob", {})
    if "FinalHyperParameterTuningJobObjectiveMetric" in best:
        found = " ".join(f"--{n}={v}" for n, v in best["TunedHyperParameters"].items())
        metric = best["FinalHyperParameterTuningJobObjectiveMetric"]
        logging.info("The best %s=%s is with %s", metric["MetricName"], metric["Value"], found)
    status = described[f"{kind}JobStatus"]
    if status != "Completed":
        why = described.get("FailureReason", "by its user, or at the end of --max_run")
        fail(f"{name}: {status} ({why}).", 1)
