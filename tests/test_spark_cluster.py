"""on_spark under spark-submit, on a master and two workers: an executor dies, another one stops."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import psutil
import pytest
import s3_server
from conftest import QUICK_JAVA, ROOT, finish, run_tool, started, wait_until
from s3_server import Folder, Proxy, free_port
from test_on_spark import content, holding
from test_spark_on_s3 import objects, uploaded

VENV = ROOT / ".venv-spark"
pytestmark = [
    pytest.mark.skipif(not VENV.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"),
    pytest.mark.timeout(900),
]
ROWS = 60000
BOTH = {  # settings of a job that begins when both workers have an executor
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "200s",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(address of the master, process ids of two workers, environment, file for `hold`); all end
    with the tests."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    home = next(VENV.glob("lib/python3*/site-packages/pyspark"))
    environment = dict(
        {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_"))},
        **QUICK_JAVA,
        SPARK_HOME=str(home),
        SPARK_LOCAL_IP="127.0.0.1",
        SPARK_LOCAL_DIRS=str(tmp_path / "local"),
        SPARK_WORKER_DIR=str(tmp_path / "work"),
        PYSPARK_PYTHON=str(VENV / "bin" / "python"),
        PYSPARK_DRIVER_PYTHON=str(VENV / "bin" / "python"),
    )
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    run = home / "bin" / "spark-class"
    service = "org.apache.spark.deploy"
    to = {"env": environment, "cwd": tmp_path, "stdout": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        start = lambda *words, **env: stack.enter_context(
            started([run, *words], **{**to, "env": {**environment, **env}})
        )
        on = lambda host: ["--host", host, "--webui-port", free_port()]
        start(f"{service}.master.Master", *on("127.0.0.1"), "--port", port)
        assert wait_until(lambda: listens(port), 200)
        work = lambda host, **env: start(
            f"{service}.worker.Worker", *on(host), "--cores", 1, "--memory", "1g", address, **env
        )
        # Spark tries a slow task on another host.
        workers = work("127.0.0.1", **holding(tmp_path)), work("127.0.0.2")
        yield address, [worker.pid for worker in workers], environment, tmp_path / "hold"


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def executors(workers):
    """The running executors of workers, as psutil.Process."""
    found = []
    for pid in workers:
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                    found.append(child)
    return found


@pytest.fixture(scope="module")
def submit(cluster, tmp_path_factory):
    """Starts a job with spark-submit: (settings of Spark's, *words, variables of the driver's) ->
    the context of a process."""
    address, _, environment, _ = cluster
    folder = tmp_path_factory.mktemp("program")
    zipped, program = folder / "deepfm_spark.zip", folder / "on_spark.py"
    subprocess.run([sys.executable, "scripts/zip_for_spark.py", f"--output={zipped}"], cwd=ROOT,
                   check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    # Alone in a folder, so that its modules come from the zip.
    shutil.copy(str(ROOT / "data_tools" / "on_spark.py"), str(program))

    def start(settings, *words, **variables):
        java = QUICK_JAVA["SPARK_EXECUTOR_OPTS"]
        settings = dict(
            settings, **{"spark.ui.enabled": "false", "spark.executor.extraJavaOptions": java}
        )
        command = [
            os.path.join(environment["SPARK_HOME"], "bin", "spark-submit"), "--master", address,
            "--executor-memory", "512m", "--py-files", zipped,
            *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
            program, *words,
        ]  # fmt: skip
        return started(command, env={**environment, **variables}, cwd=folder)

    return start


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with four files of LibSVM text."""
    folder = tmp_path_factory.mktemp("raw")
    for i in range(4):
        run_tool("make_synthetic", f"--output_dir={folder}/{i}", f"--train_rows={ROWS // 4}",
                 "--val_rows=1", "--test_rows=1", "--feature_size=2000", f"--seed={i}")  # fmt: skip
        (folder / str(i) / "train.libsvm").rename(folder / f"{i}.libsvm")
        shutil.rmtree(str(folder / str(i)))
    return folder


@pytest.fixture
def hold(cluster):
    """A file that keeps the tasks of the first worker where they have begun a file; see holding."""
    path = cluster[-1]
    path.touch()
    yield path
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def test_a_cluster_that_loses_an_executor_writes_the_bytes_of_one_machine(
    cluster, submit, hold, raw, tmp_path
):
    _, workers, *_ = cluster
    records, out = tmp_path / "records", tmp_path / "spark"
    run_tool("libsvm_to_tfrecord", f"--input={raw}", f"--output_dir={records}", "--num_files=4",
             "--feature_size=2000")  # fmt: skip
    flags = [f"--input={records}", "--num_files=3"]
    run_tool("rebalance", *flags, f"--output_dir={tmp_path}/alone")
    with submit(BOTH, "rebalance", *flags, f"--output_dir={out}") as process:
        assert wait_until(lambda: hold.read_text() or process.poll() is not None, 200)
        (executor,) = executors(workers[:1])
        executor.kill()
        hold.unlink()
        text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert "Wrote 60000 of 60000 records" in text
    assert content(out) == content(tmp_path / "alone")
    assert (out / "_SUCCESS").exists()


def test_the_records_of_two_attempts_at_a_task_count_once(cluster, submit, hold, raw, tmp_path):
    """A machine stops in the middle of a task, so that Spark tries the task on the other one, too.

    The job ends while it still stops, so its attempt did not succeed.
    """
    out = tmp_path / "spark"
    flags = [f"--input={raw}", "--field_size=39", "--feature_size=2000"]
    run_tool("libsvm_to_tfrecord", *flags, f"--output_dir={tmp_path}/alone")
    settings = {
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "1s",
        "spark.speculation.efficiency.enabled": "false",
    }
    converting = submit({**settings, **BOTH}, "convert", *flags, f"--output_dir={out}")
    done = finish(converting, timeout=400, code=0)
    assert hold.read_text() and "Wrote 60000 rows" in done.stderr
    assert content(out) == content(tmp_path / "alone")


def test_executors_reach_s3_with_the_settings_of_the_driver(submit, raw, tmp_path):
    """They inherit the variables of the workers, which have none of these."""
    lines = (raw / "0.libsvm").read_text().splitlines(keepends=True)
    (tmp_path / "raw").mkdir()
    for i in range(2):
        (tmp_path / "raw" / f"{i}.libsvm").write_text("".join(lines[300 * i : 300 * (i + 1)]))
    flags = ["--field_size=39", "--feature_size=2000"]
    run_tool("libsvm_to_tfrecord", f"--input={tmp_path}/raw", f"--output_dir={tmp_path}/alone",
             *flags)  # fmt: skip
    with s3_server.started() as port, Proxy(port) as proxy:
        source, out = uploaded(tmp_path / "raw", Folder(port, "raw")), Folder(port, "out")
        words = ["convert", f"--input={source.path}", f"--output_dir={out.path}", *flags]
        at = {name: proxy.env[name] for name in ("S3_ENDPOINT", "S3_USE_HTTPS")}
        with_keys = submit(
            {}, *words, **at, AWS_ACCESS_KEY_ID="ours", AWS_SECRET_ACCESS_KEY="secret",
            AWS_SESSION_TOKEN="token", AWS_REGION="eu-west-3",
        )  # fmt: skip
        finish(with_keys, timeout=400, code=0)
        assert objects(out) == content(tmp_path / "alone")
    assert any("/attempt-" in name for name in proxy.puts())
    assert proxy.signers == {("ours", "eu-west-3", "token")}
