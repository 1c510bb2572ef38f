"""Starts Spark, follows its jobs, and says in one sentence why one failed."""

import contextlib
import logging as std_logging
import os
import re
import signal
import sys
import threading
from typing import Iterator

import pyspark
from absl import logging
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.utils import CapturedException  # which Spark 3.3 has too

from deepfm.errors import BadInput
from deepfm.records.storage import arrow
from deepfm.runtime import program

LOCAL = "local[*,3]"  # all cores, and three attempts for a task
SECONDS_BETWEEN_LINES = 5.0
_BAD_INPUT = re.compile(r"^(?:\w+\.)*BadInput: (.*)", re.MULTILINE)
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception)): (.*)", re.MULTILINE)
_OF_SPARK = ("SparkException", "PythonException", "Py4JJavaError")  # what wraps the cause
_ABORTED = re.compile(r"Job aborted.*")
# What Java says of a Python process that was killed: the second if it was writing to it, the third
# if the process had not yet answered.
_KILLED = re.compile(
    r"Python worker exited unexpectedly|SocketException: (Broken pipe|Connection)"
    r"|java\.io\.EOFException\n(?:\s+at .*\n)*?\s+at [\w.]+\.PythonWorkerFactory"
)
_TIMES = re.compile(r"failed (\d+) times")


class JobFailed(OSError):
    """A job of Spark's failed; the text is one sentence."""


@contextlib.contextmanager
def session(name: str, master: str) -> Iterator[SparkSession]:
    """A SparkSession of a name, which is stopped at the end unless there was one before.

    It runs on `master`; if that is empty, where spark-submit says, else on LOCAL.
    """
    before = SparkSession.getActiveSession()
    if before:
        yield before
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    std_logging.getLogger("py4j").setLevel(std_logging.ERROR)
    pyspark.SparkContext._ensure_initialized()  # or SparkConf does not know what spark-submit says
    given = pyspark.SparkConf()
    builder = SparkSession.builder.appName(name)
    if master or not given.contains("spark.master"):
        builder = builder.master(master or LOCAL)
    if not given.contains("spark.task.maxFailures"):
        builder = builder.config("spark.task.maxFailures", "3")
    if not sys.stderr.isatty():  # pyspark asks for the bar wherever it starts Java itself
        builder = builder.config("spark.ui.showConsoleProgress", "false")
    for variable, value in arrow.environment().items():  # executors read and write files, too
        if not given.contains(f"spark.executorEnv.{variable}"):
            builder = builder.config(f"spark.executorEnv.{variable}", value)
    # Its coalescing would join the partitions, each of which becomes a file.
    builder = builder.config("spark.sql.adaptive.enabled", "false")
    handlers = {number: signal.getsignal(number) for number in program.SIGNALS}
    with _explained("Spark could not start"):
        spark = builder.getOrCreate()
    for number, handler in handlers.items():  # Spark sets one of its own
        signal.signal(number, handler)
    # Of every attempt to run a task, an executor logs the trace: here, if it is in this process.
    here = spark.sparkContext.master.startswith("local")
    spark.sparkContext.setLogLevel("FATAL" if here else "ERROR")
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def job(spark: SparkSession, title: str) -> Iterator[None]:
    """Follows the jobs that the body starts, and explains their failure.

    Raises:
        BadInput: a task raised one.
        JobFailed: a job failed for another reason.
    """
    spark.sparkContext.setJobDescription(title)
    done = threading.Event()
    follower = threading.Thread(target=_follow, args=(spark.sparkContext, title, done), daemon=True)
    if not sys.stderr.isatty():  # there, Spark shows a bar
        follower.start()
    try:
        with _explained(title):
            yield
    finally:
        done.set()
        if follower.is_alive():
            follower.join()


def _follow(context, title, done):
    """Logs how many tasks of the running stages are done, until `done`."""
    tracker = context.statusTracker()
    while not done.wait(SECONDS_BETWEEN_LINES):
        stages = filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds()))
        for stage in stages:
            logging.info(
                "%s: %d of %d tasks done, %d running.",
                title, stage.numCompletedTasks, stage.numTasks, stage.numActiveTasks,
            )  # fmt: skip


@contextlib.contextmanager
def _explained(title):
    try:
        yield
    except (Py4JJavaError, CapturedException) as error:
        # pyspark keeps of Java's exception the part that Python raised, without what Spark says.
        whole = error if isinstance(error, Py4JJavaError) else error.__context__
        java = getattr(whole, "java_exception", None)
        text = "\n".join(filter(None, (_with_causes(java), str(error))))
        logging.debug("The trace of this failure: %s", text)
        found = _BAD_INPUT.search(text)
        if found:
            raise BadInput(found[1]) from error
        raise JobFailed(_sentence(title, text)) from error


def _with_causes(java):
    """The text of an exception of Java's and of its causes."""
    texts = []
    while java is not None:
        texts.append(str(java.toString()))
        java = java.getCause()
    return "\n".join(texts)


def _sentence(title, text):
    """Why a job failed, in one sentence, from the text of Java's exception."""
    times = _TIMES.search(text)
    failed = f"{title}: a task failed {times[1]} times" if times else f"{title} failed"
    raised = [(kind, why) for kind, why in _RAISED.findall(text) if kind not in _OF_SPARK]
    if (not raised or raised[-1][0] == "SocketException") and _KILLED.search(text):
        return (
            f"{failed}, at last because its Python process was killed; if memory was short, give "
            "executors more of it, or fewer cores."
        )
    if raised:
        kind, why = raised[-1]
        if kind == "ModuleNotFoundError":
            why += "; executors need numpy, pandas, pyarrow and --py-files=deepfm_spark.zip"
        return f"{failed}, at last with {kind}: {why}"
    lost = _ABORTED.search(text)
    return f"{failed}: {lost[0] if lost else text.splitlines()[0]}"
