"""What the programs of scripts/ share: how they start, refuse input, and wait for processes.

A program imports this before any third-party package, because deepfm says what to do if absl is
missing. From then on, Python finds what programs consist of in sagemaker/ and benchmarks/.
"""

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Dict

SCRIPTS = pathlib.Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path += [str(ROOT), str(SCRIPTS / "sagemaker"), str(SCRIPTS / "benchmarks")]
# All that SageMaker gets: with a requirements.txt the container would replace its TensorFlow, and
# with a setup.py it would run train.py as a package.
TRAINING_SOURCE = ("train.py", "deepfm")

from deepfm import need  # noqa: E402

need("absl")

# isort: split
from absl import app, flags  # noqa: E402

from deepfm.errors import BadInput  # noqa: E402
from deepfm.runtime import program  # noqa: E402


def run_program(main, read_flags=program.read_flags_alone):
    """Runs main(words), whose first word is the program's name; it returns the exit code.

    A BadInput ends the program with exit code 2 and its sentence.
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


def check_list(name, known=(), may_be_empty=False):
    """Refuses values of a list flag that are not in `known`, or without it, not numbers above 0."""
    values = flags.FLAGS[name].value
    for value in values if may_be_empty else values or [""]:
        if known and value not in known:
            raise BadInput(f"--{name}={value} is not one of {', '.join(known)}.")
        if not known and not (value.isdigit() and int(value)):
            raise BadInput(f"--{name}={value} is not a list of numbers such as --{name}=1000,2000.")


def flag_values(words):
    """{name: value} of words that are flags; True or False for a boolean without a value.

    If the next word does not look like a flag, it is the value, also of a boolean (--name False).
    """
    values, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        if not equals and words and not re.match("--?[a-z]", words[0]):
            value = words.pop(0)
        elif not equals:
            name, value = (name[2:], False) if name.startswith("no") else (name, True)
        values[name] = value
    return values


def training_flags(words, ours, needed):
    """{name: value} of train.py's flags, which follow a program's `--`.

    Args:
        ours: names that the program sets itself, and refuses.
        needed: {name that has to be among them: a value that would work}.
    """
    given, name_of_program = flag_values(words), os.path.basename(sys.argv[0])
    for name, example in needed.items():
        if name not in given:
            raise BadInput(f"--{name} is missing; try {name_of_program} -- --{name}={example}")
    for name, value in given.items():
        if name in ours:
            off = "no" if value is False else ""
            raise BadInput(f"--{off}{name} is set by {name_of_program} itself; leave it out.")
    return given


def values_to_tune(text, asked):
    """What a --tune asks for, in SageMaker's words: ("Integer" or "Continuous", (lowest, highest),
    "Logarithmic" or "Auto"), or ("Categorical", values)."""
    if "|" in asked:
        return "Categorical", asked.split("|")
    low, _, high = asked.partition("..")
    high, _, scale = high.partition(":")
    for kind, number in (("Integer", int), ("Continuous", float)):
        with contextlib.suppress(ValueError):
            ends = number(low), number(high)
            if ends[0] < ends[1] and (not scale or (scale == "log" and ends[0] > 0)):
                return kind, ends, "Logarithmic" if scale else "Auto"
    raise BadInput(
        f"--tune={text} is not a range or a choice; try --tune=learning_rate=0.0001..0.01:log or "
        "--tune=embedding_size=16|32."
    )


def run_command(*words) -> subprocess.CompletedProcess:
    """Runs a command of this project; returns its exit code and the texts that it wrote."""
    words = list(map(str, words))
    return subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def channels(training, count, evaluation):
    """{name: where its files are} of a SageMaker job.

    Args:
        training: a list of `count` places, one for each process of a host, or of one place for all.
        evaluation: a place, or None.
    """
    places = training * count if len(training) == 1 else training
    channels = {f"training-{i}" if i else "training": place for i, place in enumerate(places)}
    return {**channels, "evaluation": evaluation} if evaluation else channels


def copy_source(names, folder: pathlib.Path):
    """Copies files and folders of this project into a folder, without what Python has compiled."""
    for path in (ROOT / name for name in names):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)


def wait_until(condition, seconds: float, between_looks: float = 0.1) -> bool:
    """Waits until condition() holds, at most `seconds`; returns whether it does."""
    last = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > last:
            return False
        time.sleep(between_looks)
    return True


def first_failure(names, code_of):
    """Waits until code_of(name) is 0 for all, or another code for one: returns (its name, code).

    Returns None if all have ended well.
    """
    left = set(names)
    while left:
        time.sleep(0.1)
        for name in sorted(left):
            code = code_of(name)
            if code is not None:
                left.discard(name)
            if code:  # time for the others to log what they see of it
                wait_until(lambda: all(code_of(x) is not None for x in left), 5)
                return name, code
    return None


def start(words, take, **options):
    """(a process, the thread that calls take(line) for each line that it writes).

    On Linux, the process ends with this one, if its main thread calls this.
    """
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        preexec_fn=_end_with_parent, **options,
    )  # fmt: skip

    def read():
        for line in process.stdout:
            take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return process, thread


def code_of(started):
    """The exit code of a process of `start`, once its last lines were taken; None if it runs."""
    process, thread = started
    if process.poll() is not None:
        thread.join(timeout=5)
    return process.returncode


def _end_with_parent():
    """Asks Linux to end this process when its parent is gone, even by kill -9; a preexec_fn."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def end(started, seconds: float = 0):
    """Ends processes of `start`: those that SIGTERM has not ended in `seconds`, by SIGKILL. Takes
    their last lines."""
    if seconds:
        for process, _ in started:
            process.terminate()
        wait_until(lambda: all(process.poll() is not None for process, _ in started), seconds)
    for process, _ in started:
        process.kill()
    for process, thread in started:
        process.wait()
        thread.join(timeout=5)


def write_files(folder: pathlib.Path, files: Dict[str, bytes]):
    """Writes {name: content} into a folder, each whole: under another name first."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as scratch:
        for name, content in files.items():
            pathlib.Path(scratch, name).write_bytes(content)
        for name in files:
            os.replace(os.path.join(scratch, name), folder / name)


def reason(lines, code) -> str:
    """Why a run of train.py has failed that wrote these lines: its sentence, or its last line."""
    lines = [line.strip() for line in lines if line.strip()]
    sentences = [line for line in lines if "train.py: " in line]
    return (sentences or lines[-1:] or [f"exit code {code}"])[0]
