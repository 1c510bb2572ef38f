"""What the programs of this folder share: how they start, refuse, and wait for what they start.

A program imports this before anything that is not Python's own, as deepfm says what to do where
there is no absl. It is all that these programs use of deepfm; benchmark.py alone times parts of it.
"""

import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from typing import Dict

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from deepfm import need  # noqa: E402, F401

# isort: split
from absl import app  # noqa: E402

from deepfm.errors import BadInput  # noqa: E402
from deepfm.runtime import program  # noqa: E402


def run_program(main, read_flags=program.read_flags_alone):
    """Runs main(words), the name of the program first; its value is the exit code.

    A BadInput that escapes ends the program with exit code 2 and its sentence.
    """

    def start(words):
        try:
            sys.exit(main(words))
        except BadInput as error:
            fail(error)

    app.run(start, flags_parser=read_flags)


def fail(sentence, code: int = 2):
    """Ends the program with a sentence on standard error."""
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {' '.join(str(sentence).split())}\n")
    sys.exit(code)


def flag_values(words, booleans=None):
    """{name: value} of words that are flags; of a boolean without a value True or False.

    Args:
        booleans: names of those that are; None where that is not known, and a flag takes the next
            word that looks like none.
    """
    found, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        needs_value = booleans is not None and not {name, name[2:]} & booleans
        if not equals and words and (needs_value or not words[0].startswith("-")):
            value = words.pop(0)  # also of a boolean, as in --name False
        elif not equals:
            off = name.startswith("no") and name not in (booleans or ())
            name, value = (name[2:], False) if off else (name, True)
        found[name] = value
    return found


def wait_until(condition, seconds: float, between_looks: float = 0.1) -> bool:
    """Waits until condition() holds, as many seconds at the most; whether it does."""
    last = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > last:
            return False
        time.sleep(between_looks)
    return True


def lines_of(process, take) -> threading.Thread:
    """Calls take(line) for each line that a process writes, in the thread that is returned."""

    def read():
        for line in process.stdout:
            take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def write_files(folder: pathlib.Path, files: Dict[str, bytes]):
    """Writes {name: content} into a folder, each whole: under another name first."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        for name in files:
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch)
