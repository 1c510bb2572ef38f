"""Runs jobs of data_tools.on_spark in one session for a test file: Spark takes seconds to start.

Reads {"job": name, "task": bytes, "options": {...}, "env": variables of the driver} per line, and
answers {"code": of the program, "said": its sentence, "log": [...]}. Runs in .venv-spark, and no
import finds TensorFlow.
"""

import json
import logging as std_logging
import os
import sys

sys.modules.update(tensorflow=None, tensorflow_core=None)  # importing them fails
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from absl import logging  # noqa: E402

from data_tools import on_spark  # noqa: E402
from data_tools.engines import spark_session  # noqa: E402
from deepfm.errors import BadInput  # noqa: E402
from deepfm.records import text_blocks  # noqa: E402


class Lines(std_logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def answer(spark, asked):
    """Runs a job; returns the answer."""
    options = on_spark.JOBS[asked["job"]]
    text_blocks.TASK = asked["task"]
    seen, before = Lines(), dict(os.environ)
    os.environ.update(asked["env"])
    logging.get_absl_logger().addHandler(seen)
    try:
        on_spark.run(asked["job"], spark, options(**asked["options"]))
        code, said = 0, ""
    except BadInput as error:
        code, said = 2, str(error)
    except OSError as error:
        code, said = 1, str(error)
    finally:
        logging.get_absl_logger().removeHandler(seen)
        os.environ.update(before)
    return {"code": code, "said": said, "log": seen.lines}


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    with spark_session.session("tests", "local[2,3]") as session:
        for line in iter(sys.stdin.readline, ""):
            print(json.dumps(answer(session, json.loads(line))), flush=True)
