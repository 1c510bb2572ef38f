"""A session of SageMaker's SDK for launch_sagemaker.py; a dry run's prints the job's request.

The SDK is loaded here, as late as possible, because loading it looks for credentials on the
network.
"""

import contextlib
import json
import os
import sys
import types
import warnings

from programs import BadInput, fail, need

_JOBS = ("CreateTrainingJob", "CreateProcessingJob")


def role_of(session, role):
    """The IAM role of a job: `role`, else the one that the session uses."""
    from sagemaker import get_execution_role

    try:
        return role or get_execution_role(session)
    except ValueError as error:
        raise BadInput(
            f"--role is missing, and you are not using a role ({error}); try --role=SageMakerRole."
        ) from error


@contextlib.contextmanager
def open_session(region, role, dry_run):
    """Yields a session of the SDK; an error from AWS ends the program.

    Args:
        region: the AWS region; None: what AWS's configuration says.
        role: the job's IAM role, or None.
        dry_run: whether to send nothing, and print the request that would start the job, as JSON.
    """
    if dry_run:  # before the SDK is loaded, which looks for some, on the network too
        os.environ.update(AWS_ACCESS_KEY_ID="dry-run", AWS_SECRET_ACCESS_KEY="dry-run")
    warnings.filterwarnings("ignore", message="Boto3 will no longer support Python 3.7")
    with _printing_request(role) if dry_run else contextlib.nullcontext() as answer:
        need("boto3", "sagemaker")
        import boto3
        import sagemaker
        from boto3.exceptions import Boto3Error
        from botocore import exceptions

        try:
            region = region or boto3.Session().region_name or (dry_run and "us-east-1")
            if not region:
                raise BadInput("--region is missing; try --region=us-east-1.")
            session = boto3.Session(region_name=region)
            session.get_partition_for_region(region)  # refuses an unknown region
            if answer:
                session.events.register("before-call", answer)
            yield sagemaker.Session(session)
        except (exceptions.ParamValidationError, exceptions.UnknownRegionError) as error:
            raise BadInput(error) from error
        except (
            Boto3Error, exceptions.BotoCoreError, exceptions.ClientError,
            sagemaker.exceptions.UnexpectedStatusException,
        ) as error:  # fmt: skip
            fail(error, 1)


@contextlib.contextmanager
def _printing_request(role):
    """Yields a handler of botocore's events; prints, at the end, the request that it has seen."""
    requests = []
    # What AWS would answer; account and role are those of its documentation.
    account = "111122223333"
    caller = f"arn:aws:sts::{account}:assumed-role/your-role/you"
    answers = {
        "GetCallerIdentity": {"Account": account, "Arn": caller},
        "GetRole": {"Role": {"Arn": f"arn:aws:iam::{account}:role/{role or 'your-role'}"}},
        "ListBuckets": {"Buckets": []},
    }

    def answer(model, params, **_):
        """Stands in for the network, after botocore has checked and built a request."""
        if model.name in _JOBS:
            requests.append(json.loads(params["body"]))
        return types.SimpleNamespace(status_code=200), answers.get(model.name, {})

    with contextlib.redirect_stdout(sys.stderr):  # where the SDK prints; stdout is for the JSON
        yield answer
    sys.stdout.write(json.dumps(requests[-1], indent=2) + "\n")
