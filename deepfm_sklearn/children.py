"""Runs the programs of this project as processes of their own: the caller loads no TensorFlow, and
nothing of one training is left for the next.
"""

import os
import re
import subprocess
import sys
import time

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Like `python -m`, but our packages come from where this one is, none from the working folder.
_START = (
    "import runpy, sys; root, name = sys.argv[1:3]; del sys.argv[:2]; "
    "sys.path[:1] = [] if root in sys.path else [root]; "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)
_OF_JOBS = re.compile("SM_|TF_CONFIG$")  # variables that make a program take part in a job
_STEP = re.compile(r"(loss \S+) .* left .*?(\d+):(\d\d):(\d\d)$")


def run(module: str, flags: dict, folder: str, verbose: int):
    """Runs a program, such as data_tools.prepare, with the flags {name: value} that are not None.

    Raises ValueError if the program refused flags or input, RuntimeError if it failed, with its
    sentence, in which paths are those in `folder`. For `verbose`, see DeepFMClassifier.
    """
    text = lambda x: ",".join(map(str, x)) if isinstance(x, (list, tuple)) else x
    words = [f"--{name}={text(x)}" for name, x in flags.items() if x is not None]
    environment = {name: x for name, x in os.environ.items() if not _OF_JOBS.match(name)}
    line, began, end = "", None, ""
    with subprocess.Popen(
        [sys.executable, "-c", _START, _ROOT, module, *words], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        universal_newlines=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            for line in process.stderr:
                step = _STEP.search(line)
                if verbose > 1:
                    sys.stderr.write(line)
                elif verbose and step:
                    began, end = began or time.monotonic(), "\n"
                    sys.stderr.write(_bar(step, time.monotonic() - began))
                    sys.stderr.flush()
        except BaseException:
            process.kill()
            raise
    sys.stderr.write(end)
    if process.returncode:
        said = re.match(r"\S+\.py: (.*)", line.replace(os.path.join(folder, ""), ""))
        said = said[1] if said else f"{module} ended with exit code {process.returncode}: {line}"
        raise (ValueError if process.returncode == 2 else RuntimeError)(said)


def _bar(step, seconds):
    loss, *left = step.groups()
    share = seconds / (seconds + 1 + sum(int(x) * unit for x, unit in zip(left, (3600, 60, 1))))
    return f"\r[{'=' * int(30 * share):.<30}] {share:4.0%}  {loss}  left {':'.join(left)} "
