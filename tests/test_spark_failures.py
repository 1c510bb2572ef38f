"""on_spark in a process of its own that is ended, or whose executors' processes are killed."""

import os
import signal
import subprocess
import time

import psutil
import pytest
from conftest import ROOT, await_files, started
from test_on_spark import ENVIRONMENT, PYTHON, holding, libsvm_lines

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-spark: scripts/setup.sh --spark"),
    pytest.mark.timeout(500),
]
TIMEOUT = 200  # seconds


@pytest.fixture
def converting(tmp_path):
    """(convert, started on two cores; its output folder, in which its tasks stay while they write).

    They would take a second, in which not everything that a test does to them comes in time.
    """
    environment = holding(tmp_path)
    (tmp_path / "hold").touch()
    (tmp_path / "raw").mkdir()
    for i in range(8):
        (tmp_path / "raw" / f"{i}.libsvm").write_text("\n".join(libsvm_lines(1000)) + "\n")
    out = tmp_path / "out"
    words = [
        PYTHON, "-m", "data_tools.on_spark", "convert", "--master=local[2,3]",
        f"--input={tmp_path}/raw", f"--output_dir={out}", "--num_files=4",
    ]  # fmt: skip
    with started(words, env=dict(ENVIRONMENT, **environment)) as process:
        await_files(process, f"{out}/.*/attempt-*/*")
        assert process.poll() is None, process.communicate()
        yield process, out


def test_ctrl_c_ends_the_job_with_all_its_processes_and_leaves_nothing(converting):
    """As SIGTERM in test_spark_on_s3.py, but that a terminal sends it to the whole group."""
    process, out = converting
    others = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, text
    assert text.endswith("on_spark.py: ended by SIGINT; nothing was written.\n"), text
    assert "Traceback" not in text and "at org.apache" not in text
    assert psutil.wait_procs(others, TIMEOUT)[1] == []
    assert not out.exists()


def test_killed_python_processes_end_the_job_with_their_cause_and_leave_nothing(converting):
    process, out = converting
    while process.poll() is None:
        for python in psutil.Process(process.pid).children(recursive=True):
            try:
                if "pyspark.daemon" in python.parent().cmdline():  # it forks those that work
                    python.kill()
            except (psutil.NoSuchProcess, AttributeError):
                pass
        time.sleep(0.02)
    text, _ = process.communicate()
    assert process.returncode == 1, text
    sentence = text.splitlines()[-1]
    assert "Converting: a task failed 3 times, at last because its Python process was" in sentence
    assert "Traceback" not in text and "at org.apache" not in text
    assert not out.exists()


def test_the_first_task_that_refuses_its_input_is_named_whichever_ended_first():
    program = (
        "from data_tools.common.progress import Skipping\n"
        "from data_tools.engines.spark import REFUSED, sift\n"
        "sift([(2, REFUSED, 'two'), (1, REFUSED, 'one')], Skipping(0))"
    )
    words = [PYTHON, "-c", program]
    done = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert done.stderr.splitlines()[-1] == "deepfm.errors.BadInput: one"


def test_a_session_keeps_the_settings_that_the_user_gives():
    program = (
        "from data_tools.engines import spark_session\n"
        "with spark_session.session('x', '') as spark:\n"
        "    context = spark.sparkContext\n"
        "    print(context.master, context.getConf().get('spark.task.maxFailures'))"
    )
    given = "--master local[1] --conf spark.task.maxFailures=2 pyspark-shell"
    done = subprocess.run(
        [PYTHON, "-c", program], env={**ENVIRONMENT, "PYSPARK_SUBMIT_ARGS": given}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.stdout.split() == ["local[1]", "2"]


READERS = [
    ["spark.api.python.PythonWorkerFactory.createSocket$1"],  # its number
    ["spark.security.SocketAuthHelper.readUtf8", "spark.security.SocketAuthHelper.authToServer",
     "spark.api.python.PythonWorkerFactory.createSocket$1"],  # its secret
    ["hadoop.fs.FSDataInputStream.read", "spark.api.python.PythonRDD.compute"],  # a file
]  # fmt: skip


def test_only_an_end_of_file_where_python_was_to_answer_means_that_it_was_killed():
    frames = lambda found: "".join(f"\tat org.apache.{x}(File.scala:1)\n" for x in found)
    texts = [
        "org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 0.0 "
        "failed 3 times, most recent failure: Lost task 1.2 in stage 0.0: java.io.EOFException\n"
        f"\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:386)\n{frames(x)}"
        for x in READERS
    ]
    program = (
        "import sys; from data_tools.engines import spark_session\n"
        "for text in sys.argv[1:]: print(spark_session._sentence('Converting', text))"
    )
    said = subprocess.check_output([PYTHON, "-c", program, *texts], cwd=ROOT, text=True)
    assert said.count("Converting: a task failed 3 times") == 3
    killed = ["its Python process was killed" in line for line in said.splitlines()]
    assert killed == [True, True, False]
