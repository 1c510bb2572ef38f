"""How a program of this project starts and ends: flags in, one sentence and an exit code out.

Exit codes: 0 done, 1 failed while running, 2 bad flags or bad input, 128 + its number for a signal:
143 ended by SIGTERM, 130 by SIGINT.
"""

import contextlib
import gc
import logging as std_logging
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any, Callable, List

from absl import app, flags, logging

import deepfm
from deepfm.errors import BadInput
from deepfm.records import atomic_files
from deepfm.records.storage import places

# How a sentence about a lost process ends, if this process ends only because of that.
SO_THIS_ENDS = (
    "so this process ends too; the log of that process says why. Run the same command again to "
    "resume from the last checkpoint."
)


_WORDS = ("true", "false", "t", "f", "yes", "no", "y", "n", "1", "0")

# The signals that end a program in an orderly way; a terminal sends its own to all processes.
FROM_TERMINAL = signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
SIGNALS = (*FROM_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_NEVER_IGNORED = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1  # even in a shell's background

# What the other ranks see when a rank has ended: errors of Horovod, or of a layer below it.
_HOROVOD = re.compile(r"Horovod has been shut down|gloo/transport/|MPI_\w+ failed")


def show(write: Callable[[], Any]):
    """Calls write(), which writes to the terminal; one that closes, even now, is no error."""
    try:
        if sys.stdout.isatty():
            write()
            sys.stdout.flush()
    except OSError:
        # Python flushes what is left at its end, and would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main, before_tensorflow=lambda: None, when_ended="", tensorflow=True):
    """Runs `main()` after reading the flags; never returns.

    SIGNALS end it with a sentence that ends with `when_ended`; `main` may set handlers of its own.

    `before_tensorflow()` is called first: it can set the environment variables that TensorFlow
    reads when it is loaded. Without `tensorflow`, the program needs none.

    A BadInput ends the program with exit code 2, a failure of TensorFlow or the disk with 1, both
    with one sentence on standard error. Anything else is a bug of ours, so its trace is shown.
    """
    # The S3 client logs a missing file, and the end of a file, as errors.
    on_s3 = any("s3://" in word for word in sys.argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if on_s3 else "2")
    # Otherwise TensorFlow looks for ops to compile with XLA, which is off, in each new graph.
    os.environ.setdefault("TF_XLA_FLAGS", "--tf_xla_clustering_fuel=0")
    # NumPy's threads for large products, which train.py has none of, wait busily for 0.1 s each.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="tensor(flow|board)")

    process = os.getpid()

    def end(number, _):
        # An exception raised wherever the program happens to be may be swallowed there, or turned
        # into another one, so everything is done here.
        if os.getpid() == process:  # and not a child that was just forked
            leave_closed_terminal()
            for clean_up in reversed(atomic_files.clean_ups):
                with contextlib.suppress(Exception):
                    clean_up()
            name, sentence = signal.Signals(number).name, "{}: ended by {}{}.\n"
            os.write(2, sentence.format(os.path.basename(sys.argv[0]), name, when_ended).encode())
        os._exit(128 + number)

    handle_signals(end)

    def start(_):
        try:
            _guarded(main, before_tensorflow, tensorflow)
        except UnicodeEncodeError as error:
            if not "\udc80" <= error.object[error.start] <= "\udcff":  # a byte of a name
                raise
            _end(f"{error.object}: this name is not UTF-8; rename the file or folder.", 2)
        finally:
            gc.freeze()  # Python's end need not look for garbage among all of TensorFlow's objects

    app.run(start, flags_parser=read_flags_alone)


def handle_signals(handler):
    """Sets the handler of SIGNALS, but for those that are ignored, as SIGHUP is under nohup."""
    for number in SIGNALS:
        if number in _NEVER_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave_closed_terminal():
    """Drops what is written from now on if the terminal has closed; it would fail otherwise."""
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def end_at_once(sentence: str, code: int):
    """Ends the program with a sentence from any thread, even if all others wait forever.

    Who has the log's lock, which keeps lines apart, may wait for a pipe that nobody reads.
    """
    signal.alarm(6)  # seconds, if no further thread may start
    with contextlib.suppress(RuntimeError):
        threading.Timer(5, os._exit, [code]).start()
    try:
        logging.get_absl_handler().python_handler.acquire()
        _end(sentence, code)
    finally:
        os._exit(code)


def ignore_signals():
    """Lets a program that has begun to put its results in place finish that."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:  # as `run` set it
            # If a signal arrived just before, Python 3.7 tries to call SIG_IGN, a number.
            with contextlib.suppress(TypeError):
                signal.signal(number, signal.SIG_IGN)


def expand_home(word):
    """Puts the home folder in place of ~ in --name=~/path, which a shell leaves as it is."""
    name, equals, value = word.partition("=")
    if not (equals and name.startswith("-")):
        return word
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))


def join_boolean_words(argv, booleans):
    """Turns `--x False`, as SageMaker's toolkit passes it, into `--x=False` for all `booleans`."""
    joined = []
    for word in argv:
        before = joined[-1].lstrip("-") if joined and joined[-1].startswith("-") else None
        if before in booleans and word.lower() in _WORDS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def with_flagfiles(words: List[str]) -> List[str]:
    """The words, with the flags that a --flagfile holds in its place, as absl reads it.

    A file may name others. A file that cannot be read ends the program with exit code 2 and a
    sentence.
    """
    try:
        return flags.FlagValues().read_flags_from_files(words)
    except flags.CantOpenFlagFileError as error:
        cause = error.__context__
        _end(f"--flagfile={cause.filename} cannot be read ({cause.strerror}).", 2)
    except UnicodeDecodeError as error:
        _end(f"--flagfile: a file of flags is not text ({error}).", 2)
    except flags.Error:
        _end("--flagfile names no file; try --flagfile=docs/recipes/criteo_x1.flags.", 2)


def read_flags(argv, hint=""):
    """Reads the flags; returns the name of the program and the words that are not flags.

    A wrong flag ends the program with exit code 2 and a sentence, followed by `hint` if the flag is
    unknown; --help ends it with 0.
    """
    booleans = {name for name in flags.FLAGS if flags.FLAGS[name].boolean}
    words = map(expand_home, argv[:1] + with_flagfiles(argv[1:]))
    try:
        return flags.FLAGS(join_boolean_words(words, booleans))
    except flags.UnrecognizedFlagError as error:
        files = [word for word in argv if re.match("--?flagfile=", word)]
        inside = not any(re.match(f"--?(no)?{error.flagname}\\b", word) for word in argv)
        where = f" It is in {' or '.join(files)}." if files and inside else ""
        return _end(" ".join(str(error).split()) + where + hint, 2)
    except flags.Error as error:
        # Of a boolean flag, absl shows a tuple of Python's.
        sentence = re.sub(r": \('Non-boolean .*", ": give true or false.", str(error))
        return _end(" ".join(sentence.split()), 2)
    except SystemExit:  # absl has --help end with 1
        sys.exit(0)


def make_output_dir(path, flag="output_dir"):
    """Makes the folder that a flag names; raises BadInput if it cannot be written to."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as f:
            f.write(b"probe")
    except OSError as error:
        raise BadInput(f"--{flag}: {path} cannot be written ({error.strerror}).") from error


def read_flags_alone(argv, hint=""):
    """read_flags for a program that takes nothing else."""
    rest = read_flags(argv, hint)
    if len(rest) > 1:
        _end(f"'{rest[1]}' is not a flag; write flags as --name=value.{hint}", 2)
    return rest


def read_flags_before_words(argv):
    """read_flags for a program that passes on the words after `--`, which are returned too.

    It passes on the flags of a --flagfile, not its name, which means nothing on another machine or
    in another folder.
    """
    own = argv.index("--") if "--" in argv else len(argv)
    return read_flags_alone(argv[:own], " (flags of train.py follow --)") + with_flagfiles(
        argv[own + 1 :]
    )


def _guarded(main, before_tensorflow, tensorflow):
    """Runs before_tensorflow() and main(); where one fails, a sentence ends the program."""
    trouble = OSError
    try:
        before_tensorflow()
        log_with_the_time()
        trouble = _load_tensorflow() if tensorflow else trouble
        main()
    except BadInput as error:
        _end(str(error), 2)
    except trouble as error:
        logging.debug("The trace of this failure:", exc_info=True)
        text = getattr(error, "message", str(error)).strip()
        # If replicas fail together, the first line is only "2 root error(s) found."
        text = re.sub(r"^\d+ root error\(s\) found\.\s*\(0\) [^:]*: ", "", text)
        # For an error in tf.data, TensorFlow first says which ops it came through.
        text = next(iter(text.splitlines()), "").rpartition("Original message: ")[2]
        if "convert element to UTF-8" in text:
            _end("the name of a file or folder is not UTF-8, as TensorFlow needs it; rename it.", 2)
        if _HOROVOD.search(text):
            _end(f"another rank has failed, or cannot be reached, {SO_THIS_ENDS}", 1)
        _end(f"{type(error).__name__}: {text}", 1)


def _load_tensorflow():
    """Loads TensorFlow with one log for both; returns the errors that are no bug."""
    # Collecting garbage among all of TensorFlow's objects took a tenth of the time to step 1.
    gc.set_threshold(100_000)
    deepfm.need("tensorflow")
    from deepfm.runtime import remote_files
    from deepfm.runtime.tf import tf

    if "SM_TRAINING_ENV" in os.environ:
        # SageMaker's toolkit holds standard error back until the end, for its failure file.
        logging.get_absl_handler().python_handler.stream = sys.stdout
    # So that no step goes uncounted when several workers add at once.
    tf.compat.v1.enable_resource_variables()
    places.read_remote_by(remote_files)
    # Through absl alone: TensorFlow would print each of its lines a second time.
    tf.get_logger().handlers = []
    tf.get_logger().setLevel("ERROR")
    return OSError, tf.errors.OpError


def log_with_the_time():
    """Begins every line of the log with the time of day."""
    logging.get_absl_handler().setFormatter(
        std_logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    )


def _end(sentence, code):
    logging.flush()
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    sys.stderr.flush()
    sys.exit(code)
