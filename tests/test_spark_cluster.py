"""on_spark under spark-submit, on a master and two workers, an executor of which dies."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, run_tool, started

VENV = ROOT / ".venv-spark"
pytestmark = pytest.mark.skipif(
    not VENV.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"
)
ROWS = 60000


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    """(address of the master, process ids of two workers, environment); all end with the test."""
    home = next(VENV.glob("lib/python3*/site-packages/pyspark"))
    environment = dict(
        os.environ,
        SPARK_HOME=str(home),
        SPARK_LOCAL_IP="127.0.0.1",
        SPARK_LOCAL_DIRS=str(tmp_path / "local"),
        SPARK_WORKER_DIR=str(tmp_path / "work"),
        PYSPARK_PYTHON=str(VENV / "bin" / "python"),
    )
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    run = home / "bin" / "spark-class"
    service = "org.apache.spark.deploy"
    to = {"env": environment, "cwd": tmp_path, "stdout": subprocess.DEVNULL}
    where = ["--host", "127.0.0.1", "--webui-port", free_port()]
    with contextlib.ExitStack() as stack:
        start = lambda *words: stack.enter_context(started([run, *words], **to))
        start(f"{service}.master.Master", *where, "--port", port)
        await_port(port)
        workers = [
            start(
                f"{service}.worker.Worker", "--cores", 1, "--memory", "1g", "--host", "127.0.0.1",
                "--webui-port", free_port(), address,
            )
            for _ in range(2)
        ]  # fmt: skip
        yield address, [worker.pid for worker in workers], environment


def await_port(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port}")


def executors(workers):
    """The running executors of workers, as psutil.Process."""
    found = []
    for pid in workers:
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                    found.append(child)
    return found


def content(folder):
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name != "_SUCCESS"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


@pytest.mark.timeout(240)
def test_a_cluster_that_loses_an_executor_writes_the_bytes_of_one_machine(cluster, tmp_path):
    address, workers, environment = cluster
    raw, records = tmp_path / "raw", tmp_path / "records"
    run_tool("make_synthetic", f"--output_dir={raw}", f"--train_rows={ROWS}", "--val_rows=1",
             "--test_rows=1", "--feature_size=2000")  # fmt: skip
    run_tool("libsvm_to_tfrecord", f"--input={raw}/train.libsvm", f"--output_dir={records}",
             "--num_files=4", "--feature_size=2000")  # fmt: skip
    flags = [f"--input={records}", "--num_files=3"]
    run_tool("rebalance", *flags, f"--output_dir={tmp_path}/alone")
    zipped = tmp_path / "deepfm_spark.zip"
    subprocess.run([sys.executable, "scripts/zip_for_spark.py", f"--output={zipped}"], cwd=ROOT,
                   check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    # Alone in a folder, so that its modules come from the zip.
    program = tmp_path / "on_spark.py"
    shutil.copy(str(ROOT / "data_tools" / "on_spark.py"), str(program))
    command = [
        os.path.join(environment["SPARK_HOME"], "bin", "spark-submit"), "--master", address,
        "--executor-memory", "512m", "--conf", "spark.ui.enabled=false", "--py-files", zipped,
        program, "rebalance", *flags, f"--output_dir={tmp_path}/spark",
    ]  # fmt: skip
    environment["PYSPARK_DRIVER_PYTHON"] = environment["PYSPARK_PYTHON"]
    job = started(command, env=environment, cwd=tmp_path)
    with job as process:
        out = tmp_path / "spark"
        while process.poll() is None and not list(out.glob(".rebalance-*/attempt-*")):
            time.sleep(0.02)
        if process.poll() is None:
            executors(workers)[0].kill()
        text, _ = process.communicate(timeout=150)
    assert process.returncode == 0, text
    assert "Wrote 60000 of 60000 records" in text
    assert content(out) == content(tmp_path / "alone")
    assert (out / "_SUCCESS").exists()
