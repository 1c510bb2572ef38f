"""README.md: its commands can be typed as they are printed, and git ignores what they make."""

import os
import re
import subprocess

import pytest
from conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
INLINE = re.findall(
    r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
)
PROGRAM = re.compile(r"(?:\./)?((?:scripts|tests)/\w+\.(?:py|sh)|train\.py)(?= |$)")
# What flags name, or have where they are not given; and what a shell writes to.
MADE = re.compile(
    r"--(?:output_dir|model_dir|servable_model_dir|predictions_file|output_path)=([\w./]+)"
    r"|(?<=mkdir -p )([\w/]+)|> ([\w/.]+)"
)
DEFAULTS = ["quickstart_output", "sagemaker_output", "tune"]


def test_every_script_is_started_by_what_can_run_it():
    bad, seen = [], 0
    for command in (*LINES, *(text for text in INLINE if " " in text)):
        for part in re.split(r"; do |; | && | \| |^\$ ", command):
            words = part.split("#")[0].split()
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words and PROGRAM.match(words[0]):
                seen += 1
                if not os.access(ROOT / words[0], os.X_OK):
                    bad.append(part)
            if words and words[0].startswith("pytest"):
                bad.append(part)
    assert seen and not bad


def test_every_program_that_is_named_is_there():
    names = {name for command in (*LINES, *INLINE) for name in PROGRAM.findall(command)}
    assert len(names) > 8
    assert not [name for name in sorted(names) if not (ROOT / name).exists()]


def test_git_ignores_what_the_commands_make():
    found = {next(filter(None, made)) for line in LINES for made in MADE.findall(line)}
    found = sorted(path for path in {*found, *DEFAULTS} if not path.startswith("/"))
    assert {"data/train", "model_stopped", "predictions.txt", "ml/input/config"} <= set(found)
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, text=True, capture_output=True,
        input="".join(f"{path}/x\n" if "." not in path else f"{path}\n" for path in found),
    )  # fmt: skip
    if done.returncode == 128:
        pytest.skip("this is no git checkout")
    ignored = {line[: -len("/x")] if line.endswith("/x") else line for line in done.stdout.split()}
    assert sorted(ignored) == found
