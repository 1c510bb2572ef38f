"""How a program of this project starts and ends: flags in, one sentence and an exit code out.

Exit codes: 0 done, 1 failed while running, 2 bad flags or bad input.
"""

import logging as std_logging
import os
import sys
import warnings

from absl import app, flags, logging

_WORDS = ("true", "false", "t", "f", "yes", "no", "y", "n", "1", "0")


class BadInput(ValueError):
    """Input or flags that the user has to mend; its text is the one sentence that they see."""


def run(main, before_tensorflow=lambda: None):
    """Runs `main()` after reading the flags; never returns.

    `before_tensorflow()` is called first, while what TensorFlow reads of the environment when it is
    loaded can still be set.

    A BadInput that escapes ends with exit code 2, a failure of TensorFlow or of the disk with 1,
    both with one sentence on standard error. Anything else is a fault of ours: its trace is shown.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", category=FutureWarning, module="tensor(flow|board)")

    def start(_):
        before_tensorflow()
        _guarded(main)

    app.run(start, flags_parser=_parse)


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
