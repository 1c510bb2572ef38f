"""How a program of this project starts and ends: flags in, one sentence and an exit code out.

Exit codes: 0 done, 1 failed while running, 2 bad flags or bad input, 143 ended by SIGTERM, 130 by
SIGINT.
"""

import contextlib
import gc
import logging as std_logging
import os
import re
import signal
import sys
import tempfile
import warnings
from typing import Callable, List

from absl import app, flags, logging

import deepfm
from deepfm.errors import BadInput

# How a sentence about a lost process ends, where this process ends only for that.
SO_THIS_ENDS = (
    "so this process ends too; the log of that process says why. Run the same command again to "
    "resume from the last checkpoint."
)


_WORDS = ("true", "false", "t", "f", "yes", "no", "y", "n", "1", "0")


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


_clean_ups: List[Callable[[], None]] = []


# What the others see of a rank that has ended: from Horovod itself, or from below it.
_HOROVOD = re.compile(r"Horovod has been shut down|gloo/transport/|MPI_\w+ failed")


def run(main, before_tensorflow=lambda: None, when_ended=""):
    """Runs `main()` after reading the flags; never returns.

    SIGTERM and SIGINT end it with a sentence, at the end of which stands `when_ended`; `main` may
    set handlers of its own.

    `before_tensorflow()` is called first, while what TensorFlow reads of the environment when it is
    loaded can still be set.

    A BadInput that escapes ends with exit code 2, a failure of TensorFlow or of the disk with 1,
    both with one sentence on standard error. Anything else is a fault of ours: its trace is shown.
    """
    # The client of S3 logs as errors that a file is not there, or is read to its end.
    on_s3 = any("s3://" in word for word in sys.argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if on_s3 else "2")
    warnings.filterwarnings("ignore", category=FutureWarning, module="tensor(flow|board)")

    process = os.getpid()

    def end(number, _):
        # An exception that is raised wherever the program just is may be swallowed there, or come
        # out as another one: so all that has to be done is done here.
        if os.getpid() == process:  # and not one that was just forked
            for clean_up in reversed(_clean_ups):
                with contextlib.suppress(Exception):
                    clean_up()
            name, sentence = signal.Signals(number).name, "{}: ended by {}{}.\n"
            os.write(2, sentence.format(os.path.basename(sys.argv[0]), name, when_ended).encode())
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)

    def start(_):
        before_tensorflow()
        _guarded(main)

    app.run(start, flags_parser=read_flags_alone)


@contextlib.contextmanager
def before_end(clean_up: Callable[[], None]):
    """Has a signal that ends the program in this context call `clean_up()` before."""
    _clean_ups.append(clean_up)
    try:
        yield
    finally:
        _clean_ups.remove(clean_up)


def ignore_signals():
    """Lets a program that has begun to put its results in place come to its end."""
    for number in _SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:  # as `run` set it
            # For a signal that has come just before that, Python 3.7 calls the number SIG_IGN.
            with contextlib.suppress(TypeError):
                signal.signal(number, signal.SIG_IGN)


def expand_home(word):
    """--name=~/path, which a shell leaves as it is, with the home folder in place of ~."""
    name, equals, value = word.partition("=")
    if not (equals and name.startswith("-")):
        return word
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))


def join_boolean_words(argv, booleans):
    """`--x False`, as SageMaker's toolkit passes it, as `--x=False` for the flags in `booleans`."""
    joined = []
    for word in argv:
        before = joined[-1].lstrip("-") if joined and joined[-1].startswith("-") else None
        if before in booleans and word.lower() in _WORDS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def read_flags(argv, hint=""):
    """Reads the flags; what is none is returned, behind the name of the program.

    What cannot be ends the program with exit code 2 and a sentence, at whose end stands `hint`
    where there is no such flag; --help ends it with 0.
    """
    booleans = {name for name in flags.FLAGS if flags.FLAGS[name].boolean}
    try:
        return flags.FLAGS(join_boolean_words(map(expand_home, argv), booleans))
    except flags.Error as error:
        more = hint if isinstance(error, flags.UnrecognizedFlagError) else ""
        return _end(" ".join(str(error).split()) + more, 2)
    except SystemExit:  # absl has --help end with 1
        sys.exit(0)


def make_output_dir(path, flag="output_dir"):
    """Makes the folder that a flag names; BadInput where nothing can be written there."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as f:
            f.write(b"probe")
    except OSError as error:
        raise BadInput(f"--{flag}: {path} cannot be written ({error.strerror}).") from error


def read_flags_alone(argv, hint=""):
    """read_flags of a program that takes nothing else."""
    rest = read_flags(argv, hint)
    if len(rest) > 1:
        _end(f"'{rest[1]}' is not a flag; flags are given as --name=value.{hint}", 2)
    return rest


def read_flags_before_words(argv):
    """read_flags of a program that hands on what follows `--`, which is returned."""
    own = argv.index("--") if "--" in argv else len(argv)
    return read_flags_alone(argv[:own], " (flags of train.py follow --)") + argv[own + 1 :]


def _guarded(main):
    logging.get_absl_handler().setFormatter(
        std_logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    )
    # A tenth of the time to the first step went to looking for garbage among all of TensorFlow.
    gc.set_threshold(100_000)
    deepfm.need("tensorflow_core")
    import tensorflow as tf

    if not tf.__version__.startswith("1.15."):
        deepfm.refuse_python(f"has TensorFlow {tf.__version__}, not 1.15")
    if "SM_TRAINING_ENV" in os.environ:
        # SageMaker's toolkit keeps standard error back until the end, for its failure file.
        logging.get_absl_handler().python_handler.stream = sys.stdout
    # Through absl alone: TensorFlow would print each of its lines a second time.
    tf.get_logger().handlers = []
    tf.get_logger().setLevel("ERROR")
    try:
        main()
    except BadInput as error:
        _end(str(error), 2)
    except (OSError, tf.errors.OpError) as error:
        logging.debug("The trace of this failure:", exc_info=True)
        text = error.message if isinstance(error, tf.errors.OpError) else str(error)
        # Of an error in tf.data, TensorFlow says where it came through first.
        text = text.strip().splitlines()[0].rpartition("Original message: ")[2]
        if _HOROVOD.search(text):
            _end(f"another rank has failed, or cannot be reached, {SO_THIS_ENDS}", 1)
        _end(f"{type(error).__name__}: {text}", 1)


def _end(sentence, code):
    logging.flush()
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    sys.exit(code)
