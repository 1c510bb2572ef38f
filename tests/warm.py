"""Starts programs from a process that has already loaded TensorFlow, which halves their start.

train.py and the data tools also find the project's own modules loaded, but for those that define
flags. Other programs load them, so that they can change one before the next takes from it.

Tests of what a program does, rather than of how it starts, lose nothing: each run is a process of
its own, forked before any flag is defined, any session made or any thread started by TensorFlow.
It has its own arguments, environment, working folder and outputs. Tests of starting itself, of
memory and of signals start Python.

    run(["train.py", "--help"])
    run(["-m", "data_tools.rebalance", "--help"])

Launchers of several processes get `PYTHON`, a program that makes the server run what Python was to
run, and that exits with its exit code. Signals are passed on to it.
"""

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import pathlib
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Beginnings of names that Python, numpy or TensorFlow reads while it is loaded. (TF_CPP_... is read
# when the first message is logged, which loading does not.)
_READ_AT_LOADING = ("OMP_", "KMP_", "OPENBLAS_", "PYTHON", "LD_", "MALLOC_", "GLIBC_")


def run(words, env=None, cwd=ROOT, timeout=180):
    """Runs a program; returns a subprocess.CompletedProcess with its texts.

    Args:
        words: what follows `python`: a path, -m and a module, or -c and a text, and arguments.
        env: its whole environment, which `fits`.
        cwd: its working folder.
        timeout: seconds after which it and its children are killed.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    env = dict(os.environ if env is None else env)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(timeout)
        try:
            _, ended = _ask(connection, _server().path, outputs, [str(x) for x in words], env, cwd)
            code = ended()
        except socket.timeout:  # the end of the connection ends the program
            raise subprocess.TimeoutExpired(words, timeout) from None
        for file in outputs:
            file.seek(0)
        return subprocess.CompletedProcess(words, code, *(file.read() for file in outputs))


def _ask(connection, path, outputs, words, env, cwd):
    """Has the server start a program; (its process, a function that waits for its exit code)."""
    connection.connect(path)
    fds = array.array("i", [file.fileno() for file in outputs])
    connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    request = {"words": words, "env": env, "cwd": str(cwd)}
    connection.sendall(json.dumps(request).encode() + b"\n")
    answers = connection.makefile()
    return int(answers.readline()), lambda: int(answers.readline())


PYTHON = str(ROOT / "tests" / "warm_python.sh")


def for_launchers(env):
    """The environment that `PYTHON` needs."""
    return {**env, "WARM_PYTHON": sys.executable, "WARM_SOCKET": _server().path}


def _stand_in(words):
    """Makes the server run a program instead of Python; exits as the program exits."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARM_")}
    words = [word for word in words if word != "-u"]
    with socket.socket(socket.AF_UNIX) as connection:
        outputs = sys.stdout, sys.stderr
        passed_on = signal.SIGTERM, signal.SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until they can be
        program, ended = _ask(
            connection, os.environ["WARM_SOCKET"], outputs, words, env, os.getcwd()
        )

        def pass_on(number, _):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(program, number)

        for number in passed_on:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        code = ended()
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def settle():
    """Waits for the end of programs whose stand-ins, or whoever asked for them, have ended."""
    if _make_server.cache_info().currsize:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_server().path)
            connection.shutdown(socket.SHUT_WR)  # asks for nothing
            connection.recv(1)


def fits(env):
    """Whether a program with this environment would have loaded just what the server has."""
    of_loading = lambda env: {k: v for k, v in env.items() if k.startswith(_READ_AT_LOADING)}
    return of_loading(env) == of_loading(_server().env)


class _Server:
    """The process that forks; it ends with this one."""

    def __init__(self):
        folder = tempfile.mkdtemp(prefix="warm-")
        atexit.register(shutil.rmtree, folder)
        self.path, self.env = os.path.join(folder, "socket"), dict(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout.readline() == b"ready\n"


_starting = threading.Lock()
_make_server = functools.lru_cache(maxsize=None)(_Server)


def _server():
    with _starting:
        return _make_server()


def _serve(path):
    """Forks a process per request and returns in it what `_ask` sent; ends when its parent ends."""
    import horovod.tensorflow  # noqa: F401
    import tensorflow

    tensorflow.estimator.Estimator  # noqa: B018  loads the rest of TensorFlow, too

    remember_signatures()
    forget_origins()
    forget = _load_project()
    gc.freeze()  # so that unused memory is not copied
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running = {}  # {connection: the program that it asked for}
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, woken, 0, *running], [], [])
        connection = listener.accept()[0] if listener in ready else None
        if woken in ready:
            woken.recv(1024)
        # Those of which nobody waits any more: all that were closed before the one just accepted.
        abandoned = list(running) if 0 in ready else select.select(list(running), [], [], 0)[0]
        for gone in abandoned:
            _kill(running[gone])
        for asked, program in list(running.items()):
            ended, status = os.waitpid(program, 0 if asked in abandoned else os.WNOHANG)
            if ended:
                _answer(asked, status)
                del running[asked]
        if 0 in ready:
            os._exit(0)
        if connection:
            try:
                request, outputs = _request(connection)
            except (IndexError, ValueError, ConnectionError):  # `settle`, or who was killed
                connection.close()
                continue
            program = os.fork()
            if program == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                return request, outputs, forget
            for fd in outputs:
                os.close(fd)
            running[connection] = program
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"%d\n" % program)


def _load_project():
    """Loads the modules of a training; returns a function that undoes it."""
    import tensorflow as tf
    from tensorflow.python.framework import ops

    gradients, modules, path = ops._gradient_registry._registry, set(sys.modules), sys.path[0]
    before = dict(gradients)
    sys.path[0] = str(ROOT)
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    import deepfm.jobs  # noqa: F401
    import deepfm.modes.local  # noqa: F401

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.WARN)  # as it was
    sys.path[0] = path

    def forget():
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] == "deepfm":
                del sys.modules[name]
        gradients.clear()
        gradients.update(before)

    return forget


def _request(connection):
    """What `_ask` sent: a dict, and the files for the program's outputs."""
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(8))
    outputs = array.array("i", ancillary[0][2])
    try:
        return json.loads(connection.makefile().readline()), outputs
    except (ValueError, ConnectionError):
        for fd in outputs:  # who reads them waits for their end
            os.close(fd)
        raise


def _kill(program):
    """Ends a program and its children."""
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(program, signal.SIGKILL)


def _answer(connection, status):
    """Sends the exit code of a program that ended."""
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    with contextlib.suppress(ConnectionError), connection:
        connection.sendall(b"%d\n" % code)


def remember_signatures():
    """Has TensorFlow look at the signature of each function once, not at each of its calls.

    Functions with a deprecated argument look at their own, which takes 6 % of a short run.
    """
    from tensorflow.python.util import tf_inspect

    tf_inspect._getfullargspec = functools.lru_cache(maxsize=1024)(tf_inspect._getfullargspec)


def forget_origins():
    """Has no operator keep where it was made, nor an error look that up: 6 % of a short run."""
    from tensorflow.python.client import session
    from tensorflow.python.framework import ops

    if not hasattr(ops.tf_stack, "convert_stack"):
        return  # TensorFlow 2.15 keeps it in C++
    ops.tf_stack = types.SimpleNamespace(extract_stack=list, convert_stack=lambda *_, **__: ())
    session.error_interpolation.interpolate = lambda message, graph: message


def _run_here(request, outputs, forget):
    """Runs the program in this process, as `python WORDS` would; returns its exit code."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in zip((nothing, *outputs), (0, 1, 2)):
        os.dup2(there, here)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # found anew, by TMPDIR
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(request["cwd"])
    words = request["words"]
    if request["cwd"] != str(ROOT) or words[0] not in ("-m", "train.py"):
        forget()
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], request["cwd"]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--stand_in":
        _stand_in(sys.argv[2:])
    code = _run_here(*_serve(sys.argv[1]))
    # As Python ends, but for taking apart all that TensorFlow has loaded.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
