"""An S3 server on this machine (moto) whose buckets are the folders of a folder.

    .venv-sagemaker/bin/python scripts/local_s3.py --dir=s3 --address=127.0.0.1:9000

Ended by SIGTERM or ctrl-C it writes the objects back to the folder. With --certificate it speaks
https only, as SageMaker's toolkit does. scripts/sagemaker_local.py --s3_dir starts it for a job.
"""

import pathlib
import signal
import subprocess
import sys
import threading

import boto3
from absl import app, flags
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

FLAGS = flags.FLAGS
flags.DEFINE_string("dir", None, "The folder of the buckets.")
flags.DEFINE_string("address", "127.0.0.1:9000", "HOST:PORT to listen on; HOST is an IP address.")
flags.DEFINE_string("certificate", None, "Where a certificate and its key (.key) are made.")
flags.mark_flag_as_required("dir")


def main(_):
    folder = pathlib.Path(FLAGS.dir)
    host, _, port = FLAGS.address.rpartition(":")
    files = _make_certificate(host) if FLAGS.certificate else None
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(host, int(port), application, threaded=True, ssl_context=files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    scheme = "https" if files else "http"
    client = boto3.client(
        "s3", endpoint_url=f"{scheme}://{FLAGS.address}", verify=files and files[0],
        region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key",
    )  # fmt: skip
    for bucket in sorted(path for path in folder.iterdir() if path.is_dir()):
        client.create_bucket(Bucket=bucket.name)
        for path in sorted(p for p in bucket.rglob("*") if p.is_file()):
            client.upload_file(str(path), bucket.name, str(path.relative_to(bucket)))
    sys.stdout.write(f"Serving {folder} at {FLAGS.address}.\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for bucket in client.list_buckets()["Buckets"]:
        _write_back(client, bucket["Name"], folder / bucket["Name"])


def _make_certificate(host):
    """(certificate, key): for an IP address, valid a day."""
    files = FLAGS.certificate, FLAGS.certificate + ".key"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=s3",
        ]
        + ["-addext", f"subjectAltName=IP:{host}", "-out", files[0], "-keyout", files[1]],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return files


def _write_back(client, bucket, folder):
    """Makes a folder what its bucket is."""
    there = set()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for found in page.get("Contents", []):
            if found["Key"].endswith("/"):
                continue
            path = folder / found["Key"]
            there.add(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, found["Key"], str(path))
    for path in [p for p in folder.rglob("*") if p.is_file() and p not in there]:
        path.unlink()


if __name__ == "__main__":
    # Waited for, so no thread may take them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    app.run(main)
