"""Runs train.py with parameter servers, a chief and workers on this machine.

    .venv/bin/python scripts/local_cluster.py --num_servers=2 --num_workers=1 -- \\
        --training_data_dir=data/train --model_dir=model

The flags after `--` are train.py's. The program picks free ports and shows each line with the name
of its process. All processes end with this one; its exit code is that of the first that failed. It
passes signals such as SIGTERM, SIGINT and SIGHUP on: training ends with a checkpoint, and the exit
code is 143.
"""

import contextlib
import functools
import json
import os
import random
import signal
import socket
import sys

import programs  # first
from programs import ROOT, BadInput, program, run_program

# isort: split
from absl import flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_servers", 1, "Number of parameter servers.", 1)
flags.DEFINE_integer("num_workers", 1, "Number of workers besides the chief, which trains too.", 0)
flags.DEFINE_integer(
    "restarts", 0, "How often, in all, a worker that fails or is killed is started again.", 0
)

_LAST_CHECKPOINT = 100  # seconds that all may take to end after SIGTERM
_writing = logging.get_absl_handler().python_handler.lock  # one for its own lines and the others'


def main(argv):
    if not argv[1:]:
        raise BadInput("give train.py's flags after --, e.g. -- --training_data_dir=data/train.")
    signals = []  # numbers of those that came
    program.handle_signals(lambda number, _: signals.append(number))
    return _run(argv[1:], signals)


def _run(train_flags, signals):
    """Starts all processes and waits; the exit code of the first that failed."""
    jobs = {"ps": FLAGS.num_servers, "chief": 1, "worker": FLAGS.num_workers}
    names = [(job, i) for job, count in jobs.items() for i in range(count)]
    cluster = {}
    for (job, _), port in zip(names, _free_ports(len(names))):
        cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
    width = max(len(f"{job} {i}") for job, i in names)
    start = lambda name: _start(name, cluster, train_flags, width)
    processes = {name: start(name) for name in names}
    try:
        return _wait(processes, start, signals)
    except KeyboardInterrupt:
        programs.end(processes.values(), _LAST_CHECKPOINT)
        return 128 + signal.SIGTERM
    finally:
        programs.end(processes.values())


def _wait(processes, start, signals):
    """Waits until all have ended, or one has failed; the exit code of the first that failed.

    Raises KeyboardInterrupt once a signal has come.
    """
    restarts = FLAGS.restarts

    def code_of(name):
        nonlocal restarts
        if signals:
            raise KeyboardInterrupt
        code = programs.code_of(processes[name])
        if code and name[0] == "worker" and restarts:
            restarts -= 1
            logging.warning("%s %d ended with code %d; starting it again.", *name, code)
            processes[name] = start(name)
            return None
        if code:
            restarts = 0  # all end now
        return code

    failed = programs.first_failure(processes, code_of)
    if failed is None:
        return 0
    name, code = failed
    code = code if code > 0 else 128 - code  # ended by a signal
    logging.error("%s %d ended with code %d, so all processes end.", *name, code)
    return code


def _free_ports(count):
    """Ports that nothing listens on, below those that connections are given."""
    found = []
    for port in random.sample(range(10_000, 32_768), 1000 + count):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("found no free port of 127.0.0.1 between 10000 and 32767")


def _start(name, cluster, train_flags, width):
    """(a process of the cluster, the thread that reads its lines)."""
    job, index = name
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    return programs.start(
        [sys.executable, "-u", str(ROOT / "train.py"), *train_flags],
        functools.partial(_show, f"{job} {index}".ljust(width)),
        env={**os.environ, "TF_CONFIG": json.dumps(config)},
    )


def _show(label, line):
    """Prints a line of a process."""
    # The reader may be gone, as after `| head`.
    with _writing, contextlib.suppress(OSError):
        sys.stderr.write(f"{label} | {line.rstrip()}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
