"""An S3 server on this machine (moto) whose buckets are the subfolders of --dir.

    .venv-sagemaker/bin/python scripts/sagemaker/local_s3.py --dir=s3 --address=127.0.0.1:9000

On SIGTERM or Ctrl-C, it writes what has changed back to the folder, and nothing else. With
--certificate it serves https only, as SageMaker's toolkit expects. local_job.py --s3_dir starts it
for a job.
"""

import pathlib
import re
import signal
import subprocess
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from programs import need, run_program  # first

# isort: split
from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string("dir", None, "Folder whose subfolders are the buckets.")
flags.DEFINE_string("address", "127.0.0.1:9000", "HOST:PORT to listen on; HOST is an IP address.")
flags.DEFINE_string("certificate", None, "Path for a new certificate and its key (.key).")
flags.mark_flag_as_required("dir")
flags.register_validator("dir", lambda x: x and pathlib.Path(x).is_dir(), "no such folder.")
flags.register_validator(
    "address", lambda x: re.fullmatch(r"[0-9.]+:[0-9]+", x), "give one like 127.0.0.1:9000."
)


def main(_):
    need("boto3", "moto")
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    folder = pathlib.Path(FLAGS.dir)
    host, _, port = FLAGS.address.rpartition(":")
    files = _make_certificate(host) if FLAGS.certificate else None
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(host, int(port), application, threaded=True, ssl_context=files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    scheme = "https" if files else "http"
    s3 = boto3.resource(
        "s3", endpoint_url=f"{scheme}://{FLAGS.address}", verify=files and files[0],
        region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key",
    )  # fmt: skip
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        bucket = s3.create_bucket(Bucket=path.name)
        for file in sorted(filter(pathlib.Path.is_file, path.rglob("*"))):
            bucket.upload_file(str(file), str(file.relative_to(path)))
    served = {bucket.name: _objects(bucket) for bucket in s3.buckets.all()}
    print(f"Serving {folder} at {FLAGS.address}.", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for bucket in s3.buckets.all():
        _write_back(bucket, folder / bucket.name, served.get(bucket.name, {}))


def _make_certificate(host):
    """(certificate, key): for an IP address, valid a day."""
    files = FLAGS.certificate, FLAGS.certificate + ".key"
    words = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
        "/CN=s3", "-addext", f"subjectAltName=IP:{host}", "-out", files[0], "-keyout", files[1],
    ]  # fmt: skip
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    return files


def _objects(bucket):
    """{key: what changes with the content} of a bucket, without the objects that mean folders."""
    return {x.key: (x.e_tag, x.size) for x in bucket.objects.all() if not x.key.endswith("/")}


def _write_back(bucket, folder, before):
    """Repeats in a folder what was done to its bucket, and leaves other files alone.

    Args:
        before: what _objects returned for the bucket at the start.
    """
    now = _objects(bucket)
    for key in (key for key in now if now[key] != before.get(key)):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.download_file(key, str(path))
    for path in (folder / key for key in before if key not in now):
        if path.exists():
            path.unlink()


if __name__ == "__main__":
    # main() waits for these, so no thread may take them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    run_program(main)
