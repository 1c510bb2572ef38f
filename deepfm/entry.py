"""How a program of this project starts and ends: flags in, one sentence and an exit code out.

Exit codes: 0 done, 1 failed while running, 2 bad flags or bad input, 143 ended by SIGTERM, 130 by
SIGINT.
"""

import logging as std_logging
import os
import signal
import sys
import warnings

from absl import app, flags, logging

_WORDS = ("true", "false", "t", "f", "yes", "no", "y", "n", "1", "0")


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class BadInput(ValueError):
    """Input or flags that the user has to mend; its text is the one sentence that they see."""


def run(main, before_tensorflow=lambda: None, when_ended=""):
    """Runs `main()` after reading the flags; never returns.

    SIGTERM and SIGINT end it with a sentence, at the end of which stands `when_ended`; `main` may
    set handlers of its own.

    `before_tensorflow()` is called first, while what TensorFlow reads of the environment when it is
    loaded can still be set.

    A BadInput that escapes ends with exit code 2, a failure of TensorFlow or of the disk with 1,
    both with one sentence on standard error. Anything else is a fault of ours: its trace is shown.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", category=FutureWarning, module="tensor(flow|board)")

    process = os.getpid()

    def end(number, _):
        if os.getpid() != process:  # a process that was just forked: not its to clean up or to say
            os._exit(128 + number)
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # so that cleaning up is not interrupted
        name, sentence = signal.Signals(number).name, "{}: ended by {}{}.\n"
        # Not to sys.stderr: the signal may have come while something was written to that.
        os.write(2, sentence.format(os.path.basename(sys.argv[0]), name, when_ended).encode())
        sys.exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)

    def start(_):
        before_tensorflow()
        _guarded(main)

    app.run(start, flags_parser=_parse)


def ignore_signals():
    """Lets a program that has begun to put its results in place come to its end."""
    for number in _SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:  # as `run` set it
            signal.signal(number, signal.SIG_IGN)


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


def _parse(argv):
    booleans = {name for name in flags.FLAGS if flags.FLAGS[name].boolean}
    try:
        rest = flags.FLAGS(join_boolean_words(argv, booleans))
        if len(rest) > 1:
            raise flags.Error(f"'{rest[1]}' is not a flag; flags are given as --name=value.")
    except flags.Error as error:
        _end(" ".join(str(error).split()), 2)
    return rest


def _guarded(main):
    logging.get_absl_handler().setFormatter(
        std_logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    )
    import tensorflow as tf

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
        _end(f"{type(error).__name__}: {text.strip().splitlines()[0]}", 1)


def _end(sentence, code):
    logging.flush()
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    sys.exit(code)
