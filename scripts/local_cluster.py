"""Runs train.py with parameter servers, a chief and workers on this machine; or reports a balance.

    .venv/bin/python scripts/local_cluster.py --num_servers=2 --num_workers=1 -- \\
        --training_data_dir=data/train --model_dir=model
    .venv/bin/python scripts/local_cluster.py --report=model/model.ckpt-1954

What follows `--` are flags of train.py. Ports are picked free. Each line is shown with the name of
its process. All processes end with this one; its exit code is that of the first that failed.
SIGTERM and SIGINT are handed on: training ends with a checkpoint, the exit code is 143.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

from programs import ROOT, BadInput, lines_of, program, run_program, wait_until  # first

# isort: split
from absl import flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_servers", 1, "Parameter servers.", 1)
flags.DEFINE_integer("num_workers", 1, "Workers beside the chief, which trains too.", 0)
flags.DEFINE_integer(
    "restarts", 0, "Times that a worker which fails, or is killed, is started again.", 0
)
flags.DEFINE_string("report", None, "A checkpoint, whose balance over the servers is shown.")

_LAST_CHECKPOINT = 100  # seconds that all may take to end after SIGTERM
_FAREWELL = 5  # seconds in which the others may say how they took a failure
_COLORS = (36, 32, 33, 35, 34, 31)


def main(argv):
    if FLAGS.report:
        return _report(FLAGS.report)
    if not argv[1:]:
        raise BadInput("give the flags of train.py after --; see --help.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    return _run(argv[1:])


class _Interrupted(Exception):
    """SIGTERM or SIGINT came."""


def _interrupt(number, _):
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    raise _Interrupted()


def _run(train_flags):
    """Starts all processes and waits; the exit code of the first that failed."""
    names = [
        *(("ps", i) for i in range(FLAGS.num_servers)),
        ("chief", 0),
        *(("worker", i) for i in range(FLAGS.num_workers)),
    ]
    cluster = {}
    for (job, _), port in zip(names, _free_ports(len(names))):
        cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
    lines = queue.Queue()
    threading.Thread(target=_show, args=(lines, names), daemon=True).start()
    start = lambda name: _start(name, cluster, train_flags, lines)
    processes = {name: start(name) for name in names}
    try:
        code = _wait(processes, start)
    except _Interrupted:
        for process, _ in processes.values():
            process.terminate()
        wait_until(lambda: _all_ended(processes), _LAST_CHECKPOINT)
        code = 128 + signal.SIGTERM
    finally:
        for process, _ in processes.values():
            process.kill()
        for process, reader in processes.values():
            process.wait()
            reader.join(timeout=5)
        lines.join()
    return code


def _wait(processes, start):
    """Waits until all have ended, or one has failed; the exit code of the first that failed."""
    restarts = FLAGS.restarts
    left = set(processes)
    while left:
        time.sleep(0.1)
        for name in sorted(left):
            code = processes[name][0].poll()
            if code is None:
                continue
            if code == 0:
                left.discard(name)
            elif name[0] == "worker" and restarts:
                restarts -= 1
                logging.warning("%s %d ended with code %d and is started again.", *name, code)
                processes[name] = start(name)
            else:
                code = code if code > 0 else 128 - code  # ended by a signal
                logging.error("%s %d ended with code %d; all processes end.", *name, code)
                wait_until(lambda: _all_ended(processes), _FAREWELL)
                return code
    return 0


def _all_ended(processes):
    return all(process.poll() is not None for process, _ in processes.values())


def _free_ports(count):
    """Ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _start(name, cluster, train_flags, lines):
    """(a process of the cluster, the thread that reads its lines)."""
    job, index = name
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "train.py"), *train_flags],
        env={**os.environ, "TF_CONFIG": json.dumps(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    return process, lines_of(process, lambda line: lines.put((name, line)))


def _end_with_parent():
    """Asks Linux to end this process when its parent is gone, even by kill -9."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _show(lines, names):
    """Prints the lines of all processes, each with its process's name."""
    width = max(len(f"{job} {i}") for job, i in names)
    colors = dict(zip(names, _COLORS * len(names))) if sys.stderr.isatty() else {}
    while True:
        name, line = lines.get()
        label = f"{name[0]} {name[1]}".ljust(width)
        if name in colors:
            label = f"\033[{colors[name]}m{label}\033[0m"
        with contextlib.suppress(OSError):  # nobody reads any more, as after `| head`
            sys.stderr.write(f"{label} | {line.rstrip()}\n")
            sys.stderr.flush()
        lines.task_done()


def _report(checkpoint):
    """Shows how many bytes of a checkpoint's variables each server holds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import tensorflow as tf

    graph = tf.compat.v1.MetaGraphDef()
    try:
        graph.ParseFromString(pathlib.Path(f"{checkpoint}.meta").read_bytes())
    except OSError as error:
        raise BadInput(
            f"--report={checkpoint}: {error.strerror}; give a checkpoint of ps mode without "
            "'.index' or '.meta', e.g. model/model.ckpt-1954."
        ) from error
    sizes = {}
    for node in graph.graph_def.node:
        if node.op in ("VarHandleOp", "VariableV2"):
            server = tf.DeviceSpec.from_string(node.device).task or 0
            shape = tf.TensorShape(node.attr["shape"].shape)
            dtype = tf.as_dtype(node.attr["dtype"].type)
            sizes[server] = sizes.get(server, 0) + shape.num_elements() * dtype.size
    for server, size in sorted(sizes.items()):
        bar = "#" * round(40 * size / max(sizes.values()))
        print(f"ps {server:<3} {size:>15,} bytes  {bar}")
    print(f"max/min {max(sizes.values()) / max(min(sizes.values()), 1):.2f}")
    return 0


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
