"""An S3 server on loopback, behind a proxy that injects faults."""

import contextlib
import http.client
import http.server
import os
import pathlib
import random
import re
import socket
import subprocess
import tempfile
import threading
import urllib.parse

import pytest
from programs import wait_until

PYTHON = pathlib.Path(__file__).resolve().parent.parent / ".venv-sagemaker" / "bin" / "python"
BUCKET = "bucket"
CUT = "cut"  # a rule's answer: the connection ends half-way
# That this process's tests may listen on: below those that connections are given, and none that
# another process of pytest is about to listen on, having found it free.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 9
PORTS = range(10_000 + 2_500 * _WORKER, 12_500 + 2_500 * _WORKER)


def free_port():
    """A port that nothing listens on."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise OSError(f"found no free port of 127.0.0.1 in {PORTS}")


@contextlib.contextmanager
def started():
    """The port of an S3 server with one empty bucket."""
    if not PYTHON.exists():
        pytest.skip("scripts/setup.sh --sagemaker has not installed the S3 server")
    with tempfile.TemporaryFile() as said:
        words = [str(PYTHON), "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said)
        text = lambda: os.pread(said.fileno(), 1 << 16, 0).decode()
        found = lambda: re.search(r"Running on http://127\.0\.0\.1:(\d+)", text())
        try:
            wait_until(lambda: found() or process.poll() is not None, 100)
            assert found(), f"the S3 server has not started within 100 s: {text()}"
            port = int(found().group(1))
            request(port, "PUT", f"/{BUCKET}")
            yield port
        finally:
            process.kill()
            process.wait()


def request(port, method, path, body=None, headers=None):
    """(status, headers, body) of the answer to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {"Authorization": "AWS anyone:anything"})
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()


def environment(port):
    """What TensorFlow needs to find S3 at a port."""
    return dict(
        os.environ, AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="key", AWS_REGION="us-east-1",
        S3_ENDPOINT=f"127.0.0.1:{port}", S3_USE_HTTPS="0", S3_VERIFY_SSL="0",
        TF_CPP_MIN_LOG_LEVEL="3",
    )  # fmt: skip


class Folder:
    """A folder of the bucket, seen without TensorFlow and without the proxy."""

    def __init__(self, port, name):
        self.port, self.name = port, name
        self.path = f"s3://{BUCKET}/{name}"

    def names(self):
        _, _, body = request(self.port, "GET", f"/{BUCKET}?prefix={self.name}/")
        keys = re.findall("<Key>(.*?)</Key>", body.decode())
        return sorted(key[len(self.name) + 1 :] for key in keys)

    def read(self, name):
        status, _, body = request(self.port, "GET", f"/{BUCKET}/{self.name}/{name}")
        assert status == 200, name
        return body

    def write(self, name, body):
        request(self.port, "PUT", f"/{BUCKET}/{self.name}/{name}", body)

    def delete(self, name):
        request(self.port, "DELETE", f"/{BUCKET}/{self.name}/{name}")

    def copy(self, name):
        """A folder of another name with the same content."""
        other = Folder(self.port, name)
        for key in self.names():
            other.write(key, self.read(key))
        return other


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the server, but for those that the rule answers otherwise.

    Args:
        port: of the server.
        rule: (method, name of the object) -> None to pass it on, a status to answer, CUT, or an
            Event to wait for before reading what is sent.
    """

    daemon_threads = True

    def __init__(self, port, rule=lambda method, name: None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.rule = port, rule
        self.requests = []  # (method, name of the object, what the rule said)
        self.signers = set()  # (access key, region, session token) of the requests
        self.env = environment(self.server_port)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def puts(self):
        """The names of the objects that were written, in order."""
        return [name for method, name, said in self.requests if method == "PUT" and not said]


def first(times, answer, method, pattern):
    """A rule that gives an answer to the first requests of a kind."""
    left = [answer] * times

    def rule(asked, name):
        return left.pop() if left and asked == method and re.search(pattern, name) else None

    return rule


def any_of(*rules):
    """A rule that is the first of some that says something."""
    return lambda method, name: next(filter(None, (rule(method, name) for rule in rules)), None)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self):
        name = urllib.parse.unquote(self.path.split("?")[0])[len(BUCKET) + 2 :]
        said = self.server.rule(self.command, name)
        self.server.requests.append((self.command, name, said))
        signer = re.search("Credential=(.*?)/.*?/(.*?)/", self.headers.get("Authorization", ""))
        token = self.headers.get("X-Amz-Security-Token")
        self.server.signers.add((*(signer.groups() if signer else (None, None)), token))
        size = int(self.headers.get("Content-Length", 0))
        if said == CUT:
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        if isinstance(said, threading.Event):
            said.wait()
            said = None
        body = self.rfile.read(size)
        if said:
            status, headers, body = said, [], b""
        else:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
            status, headers, body = request(
                self.server.port, self.command, self.path, body, headers
            )
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(key, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", length or 0)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer

    def log_message(self, *_):
        pass
