"""AWS, as launch_sagemaker.py needs it, through botocore alone.

A dry run asks AWS nothing; its account and role are those of AWS's documentation.
"""

import contextlib
import functools
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from absl import flags, logging
from programs import BadInput, fail, need

FLAGS = flags.FLAGS
_SECONDS = 10  # between two looks at a job


@contextlib.contextmanager
def connect():
    """Yields an Aws; an error from AWS ends the program."""
    need("botocore")
    from botocore import exceptions

    try:
        yield Aws()
    except (exceptions.ParamValidationError, exceptions.UnknownRegionError) as error:
        raise BadInput(error) from error
    except (exceptions.BotoCoreError, exceptions.ClientError) as error:
        fail(error, 1)


class Aws:
    """An account of AWS in one region."""

    def __init__(self):
        import botocore.session

        os.environ.setdefault("AWS_STS_REGIONAL_ENDPOINTS", "regional")
        self._session = botocore.session.get_session()
        configured = self._session.get_config_variable("region")
        self.region = FLAGS.region or configured or ("us-east-1" if FLAGS.dry_run else None)
        if not self.region:
            raise BadInput("--region is missing; try --region=us-east-1.")
        self._partition = self._session.get_partition_for_region(self.region)
        self.client = functools.lru_cache(maxsize=None)(self._client)

    def _client(self, service):
        from botocore.config import Config

        config = Config(retries={"max_attempts": 15})
        return self._session.create_client(service, region_name=self.region, config=config)

    def _caller(self):
        """Account and Arn of who starts this program."""
        if not FLAGS.dry_run:
            return self.client("sts").get_caller_identity()
        account = "111122223333"
        return {
            "Account": account,
            "Arn": f"arn:{self._partition}:sts::{account}:assumed-role/your-role/you",
        }

    def role(self, name):
        """The ARN of an IAM role; of None: that of the notebook, or whoever starts this program."""
        if name and "/" in name:
            return name
        arn = self._caller()["Arn"]
        if FLAGS.dry_run and name:
            arn = arn.replace("your-role", name)
        elif name:
            return self.client("iam").get_role(RoleName=name)["Role"]["Arn"]
        assumed = re.fullmatch(r"(.+):sts::([0-9]+):assumed-role/([^/]+)/.*", arn)
        if assumed:
            start, account, name = assumed.groups()
            path = "service-role/" * name.startswith("AmazonSageMaker-ExecutionRole")
            arn = f"{start}:iam::{account}:role/{path}{name}"
            if not FLAGS.dry_run:  # only IAM knows the path, and may not be asked
                with contextlib.suppress(self.client("iam").exceptions.ClientError):
                    return self.client("iam").get_role(RoleName=name)["Role"]["Arn"]
        if ":role/" not in arn:
            raise BadInput(
                f"--role is missing, and you are not using a role ({arn}); try "
                "--role=SageMakerRole."
            )
        return arn

    def bucket(self):
        """The s3:// address of SageMaker's default bucket, which is made if it does not exist."""
        account = self._caller()["Account"]
        name = f"sagemaker-{self.region}-{account}"
        if not FLAGS.dry_run:
            client = self.client("s3")
            try:  # another account may have a bucket of this name
                client.head_bucket(Bucket=name, ExpectedBucketOwner=account)
            except client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "404":
                    raise
                place = {"LocationConstraint": self.region}
                elsewhere = {"CreateBucketConfiguration": place}
                client.create_bucket(Bucket=name, **(elsewhere, {})[self.region == "us-east-1"])
        return f"s3://{name}"

    def start(self, kind, request, files, **options):
        """Uploads files, starts a job, and with --wait follows it; a dry run prints the request.

        Args:
            kind: Training, HyperParameterTuning or Processing.
            request: that of Create{kind}Job.
            files: {s3:// address: content} of what the job needs.
            options: of put_object.
        """
        from botocore import exceptions, validate

        service = self._session.get_service_model("sagemaker")
        shape = service.operation_model(f"Create{kind}Job").input_shape
        wrong = validate.ParamValidator().validate(request, shape)
        if wrong.has_errors():
            raise exceptions.ParamValidationError(report=wrong.generate_report())
        if FLAGS.dry_run:
            sys.stdout.write(json.dumps(request, indent=2) + "\n")
            return
        client = self.client("s3")

        def put(uri):
            bucket, _, key = uri[len("s3://") :].partition("/")
            client.put_object(Bucket=bucket, Key=key, Body=files[uri], **options)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(put, files))
        self._method("create", kind)(**request)
        name = request[f"{kind}JobName"]
        logging.info("Started %s.", name)
        if FLAGS.wait:
            self._follow(kind, name)

    def _method(self, verb, kind):
        from botocore import xform_name

        return getattr(self.client("sagemaker"), f"{verb}_{xform_name(kind)}_job")

    def _follow(self, kind, name):
        """Shows a job's log until it ends; ends the program with code 1 unless it completed."""
        positions, said, ended = {}, "", False
        while not ended:
            described = self._method("describe", kind)(**{f"{kind}JobName": name})
            status = described[f"{kind}JobStatus"]
            ended = status in ("Completed", "Failed", "Stopped")
            news = _news(described, status)
            if news != said:
                logging.info("%s: %s", name, news)
            said = news
            self._show_log(f"/aws/sagemaker/{kind}Jobs", name, positions)
            time.sleep(_SECONDS)
        self._show_log(f"/aws/sagemaker/{kind}Jobs", name, positions)  # what was on its way
        if status != "Completed":
            why = described.get("FailureReason", "by its user, or at the end of --max_run")
            fail(f"{name}: {status} ({why}).", 1)

    def _show_log(self, group, name, positions):
        """Prints what is new in the log of each host; `positions` keeps where each was left."""
        client = self.client("logs")
        pages = client.get_paginator("describe_log_streams")
        streams = []
        with contextlib.suppress(client.exceptions.ResourceNotFoundException):  # none has begun
            for page in pages.paginate(logGroupName=group, logStreamNamePrefix=f"{name}/"):
                streams += [stream["logStreamName"] for stream in page["logStreams"]]
        for stream in streams:
            host = re.sub("-[0-9]+$", "", stream.partition("/")[2])
            ended = False
            while not ended:
                token = positions.get(stream)
                page = client.get_log_events(
                    logGroupName=group, logStreamName=stream, startFromHead=True,
                    **({"nextToken": token} if token else {}),
                )  # fmt: skip
                for event in page["events"]:
                    sys.stdout.write(f"{host}: {event['message']}\n")
                positions[stream] = page["nextForwardToken"]
                ended = positions[stream] == token
        sys.stdout.flush()


def _news(described, status):
    """What a job is doing, in one line."""
    counts = described.get("TrainingJobStatusCounters", {})
    shown = [status, *(f"{count} {name}" for name, count in counts.items() if count)]
    shown += [x.get("StatusMessage") for x in described.get("SecondaryStatusTransitions", [])[-1:]]
    if "BillableTimeInSeconds" in described:
        shown.append(f"{described['BillableTimeInSeconds']} s billed for each host")
    best = described.get("BestTrainingJob", {})
    if "FinalHyperParameterTuningJobObjectiveMetric" in best:
        flags = " ".join(f"--{n}={v}" for n, v in best["TunedHyperParameters"].items())
        metric = best["FinalHyperParameterTuningJobObjectiveMetric"]
        shown.append(f"best {metric['MetricName']}={metric['Value']} with {flags}")
    return ", ".join(filter(None, shown))
