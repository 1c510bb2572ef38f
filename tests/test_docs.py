"""README.md and docs/: what they link to and name exists, and their commands run as printed.

A block of commands is ```sh. An HTML comment before it says why it does not run here, or not in the
suite:

    <!-- not run: needs AWS -->     one of NOT_RUN; the commands have to be of that kind
    <!-- slow: takes 4 minutes -->  runs with `pytest -m table` alone

A ```python is a program that test_npz.py runs. A ```diff is applied before the slow commands below
it run, and undone before the next one. The suite applies it to a copy, where test_layout.py, this
file and what a comment names must pass:

    <!-- tests: test_model.py -->

The blocks of a page run in order in a scratch copy of the checkout, in which README's have run. In
the suite they start Python from warm.py and have a twentieth of the synthetic rows, of two days.
`pytest -m table tests/test_docs.py` runs all as printed.
"""

import contextlib
import os
import random
import re
import shutil
import subprocess
import uuid
from typing import NamedTuple

import psutil
import pytest
import warm
from conftest import ROOT, marked, wait_until

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
TEXTS = {page: (ROOT / page).read_text() for page in [*PAGES, "CONTRIBUTING.md"]}
LANGUAGES = {"sh", "text", "json", "diff", "python"}
# Why a block does not run: what each of its commands that has to be excused looks like.
NOT_RUN = {
    "needs a cluster": r"spark-submit --master",
    "needs a GPU": r"\[and-cuda\]|^export CUDA_|--num_gpus=1|tests/test_gpus\.py",
    "needs Docker": r"^docker (build|run) ",
    "needs AWS": r"scripts/launch_sagemaker\.py --role|s3://BUCKET/",
    "the set-up, which tests/test_setup.py tests": r"^scripts/setup\.sh --\w+$",
    "does not end by itself": r"^\.venv/bin/tensorboard ",
    "needs a9a, which others publish": r" data/a9a$",
    "takes half an hour": r"--train_rows=4000000",
}
# Flags of programs that are not ours.
FOREIGN = {
    "docker": {"build-arg", "rm", "init", "user", "volume", "gpus", "workdir"},
    "horovodrun": {"gloo"},
    "saved_model_cli": {"all", "dir", "signature_def", "tag_set"},
    "spark-submit": {"master", "py-files", "executor-memory", "executor-cores", "conf"},
    "tensorboard": {"logdir"},
    "timeout": {"preserve-status"},
    "pytest": set(),
    "git": {"check"},
}
PROGRAM = re.compile(r"(?:\./)?((?:scripts|tests)/[\w/]+\.(?:py|sh)|train\.py)(?= |$)")
FOLDERS = ("deepfm", "data_tools", "deepfm_sklearn", "scripts", "tests", "docs", "docker", ".ci")
# What flags name, or have where they are not given; and what a shell writes to.
MADE = re.compile(
    r"--(?:output_dir|model_dir|servable_model_dir|predictions_file|output_path)=([\w./]+)"
    r"|(?<=mkdir -p )([\w/]+)|> ([\w/.]+)"
)
DEFAULTS = ["quickstart_output", "sagemaker_output", "search", "tune"]
QUICK, SLOW = 300, 900  # seconds that a block may take


class Block(NamedTuple):
    """A fenced block: its page, the line of its fence, its language, its comment, its text."""

    page: str
    line: int
    language: str
    comment: str
    text: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    def reason(self, kind):
        """What the comment gives as the reason for a kind, "not run" or "slow"; or None."""
        found = re.fullmatch(rf"<!-- {kind}: (.+) -->", self.comment)
        return found and found[1]

    @property
    def commands(self):
        """Its commands, each with the lines that it goes on in joined."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [line for line in joined.splitlines() if line and not line.startswith("#")]


def blocks_of(page, text):
    lines, start = text.splitlines(), None
    for i, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start = i
        elif start is not None and line == "```":
            before = lines[start - 1] if start else ""
            inside = "\n".join(lines[start + 1 : i]) + "\n"
            yield Block(page, start + 1, lines[start][3:], before, inside)
            start = None
    assert start is None, f"{page}:{start + 1}: a block without an end"


BLOCKS = [block for page, text in TEXTS.items() for block in blocks_of(page, text)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
DIFFS = [block for block in BLOCKS if block.language == "diff"]
PROSE = {
    page: re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
INLINE = [
    (page, " ".join(code.split())) for page, text in PROSE.items()
    for code in re.findall(r"`([^`]+)`", text)
]  # fmt: skip
COMMANDS = [
    *((block.place, command) for block in SHELL for command in block.commands),
    *((page, code) for page, code in INLINE if " " in code),
]


# What is there.


def test_readme_is_one_page_and_leads_to_every_other():
    assert TEXTS["README.md"].count("\n") <= 150
    linked = {target for _, target in links("README.md")}
    assert {*PAGES[1:], "CONTRIBUTING.md", "LICENSE"} <= linked


def links(page):
    """(text, target) of the links of a page."""
    return re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", PROSE[page])


def anchors(text):
    """What the headings of a page can be linked by, as GitHub makes it."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    for _, target in links(page):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert there.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(there.read_text()), f"{page}: {target}"


def test_every_file_of_the_project_that_is_named_is_there():
    drawn = [(block.place, block.text) for block in BLOCKS if block.language == "text"]
    found, missing = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")], []
    names, seen = {path.name for path in [*found, *ROOT.glob("*.*")]}, 0
    for place, code in [*INLINE, *drawn, *COMMANDS]:
        paths = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*)", code)
        modules = re.findall(r"(?<![\w./-])((?:data_tools|deepfm)(?:\.\w+)+)", code)
        paths += [f"{module.replace('.', '/')}*" for module in modules]
        paths += [f"deepfm/{name}" for name in re.findall(r"^  (\w+(?:\.py|/)) ", code, re.M)]
        seen += len(paths)
        missing += [(place, path) for path in paths if not list(ROOT.glob(path.rstrip("/.")))]
        if re.fullmatch(r"\w+\.(py|sh|cc|h)", code) and code not in names:
            missing.append((place, code))
    assert seen > 100 and not missing


def test_git_ignores_what_the_commands_make():
    lines = [line for block in SHELL for line in block.commands]
    found = {next(filter(None, made)) for line in lines for made in MADE.findall(line)}
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


# Flags.


def programs():
    """{how commands name a program: the words that make it list its flags}."""
    names = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/soak_*.py")]
    found = {"train.py": ["train.py", "--helpfull"]}
    for path in names:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if "__main__" in text and "add_argument" in text:  # argparse
            found[name] = [name, "--help"]
        elif "__main__" in text and re.search(r"\bFLAGS\b", text):
            found[name] = [name, "--helpfull"]
    for path in (ROOT / "data_tools").glob("[!_]*.py"):
        if "command_line" in path.read_text():  # else it has no flags
            found[f"data_tools.{path.stem}"] = ["-m", f"data_tools.{path.stem}", "--helpfull"]
    return found


@pytest.fixture(scope="module")
def flags():
    """{program: its flags}; those of a shell script are what its text names."""
    found = {"deepfm.kernels": set()}
    for name, words in programs().items():
        done = warm.run(words)
        text = done.stdout + done.stderr
        found[name] = set(re.findall(r"^ +(?:-\w,)?--(?:\[no\])?([\w-]+)", text, re.MULTILINE))
        assert found[name], f"{name}: {text}"
    for path in [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("tests/*.sh")]:
        found[str(path.relative_to(ROOT))] = set(re.findall(r"--([\w-]+)", path.read_text()))
    return found


def flags_used(command):
    """(program, flag) of a command; what follows a lone -- are the flags of train.py or a tool."""
    program, of_job = None, "train.py"
    for word in command.split():
        name = word.rsplit("/", 1)[-1]
        if PROGRAM.fullmatch(word):
            program = PROGRAM.fullmatch(word)[1]
        elif re.fullmatch(r"data_tools\.\w+|deepfm\.kernels", word):
            program = word
        elif word == "data_tools/on_spark.py":  # as spark-submit takes it
            program = "data_tools.on_spark"
        elif name in FOREIGN or name in ("mpirun", "bash"):
            program = name
        elif word in (";", "&&", "|") or word.endswith(";"):
            program = None
        elif word == "--job=processing":
            of_job = "data_tools.libsvm_to_tfrecord"
        elif word == "--job=spark":
            of_job = "data_tools.on_spark"
        elif word == "--" and program:
            program = of_job
        elif re.match(r"--\w", word):
            yield program, re.match(r"--([\w-]+)", word)[1]


def test_every_flag_that_is_named_is_one_of_its_program(flags):
    added = re.sub("^.", "", "".join(block.text for block in DIFFS), flags=re.MULTILINE)
    added = set(re.findall(r"^    (\w+): .*= setting\(", added, re.MULTILINE))
    known = {**flags, **FOREIGN, "train.py": flags["train.py"] | added}
    everything, seen = set().union(*known.values()), 0
    for place, command in [*COMMANDS, *INLINE]:
        for program, flag in flags_used(command):
            seen += 1
            fine = flag in known.get(program, everything) | {"help"}
            fine = fine or flag[:2] == "no" and flag[2:] in known.get(program, everything)
            assert fine, f"{place}: {program} has no --{flag}"
    assert seen > 200


# Commands.


def test_every_block_says_what_it_is_and_none_is_left_out_without_a_reason():
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.place}: {block.language or 'no language'}"
        if block.language != "sh":
            assert not re.search(r"^(\.venv/|docker |\S+\.(py|sh) --)", block.text, re.MULTILINE)
            continue
        reason = block.reason("not run")
        if reason:
            assert reason in NOT_RUN, f"{block.place}: {reason}"
            assert re.search(NOT_RUN[reason], block.text, re.MULTILINE), block.place
        elif block.comment.startswith("<!--"):
            assert block.reason("slow"), f"{block.place}: {block.comment}"


@pytest.mark.timeout(SLOW)
@pytest.mark.parametrize("diff", DIFFS, ids=lambda block: block.place)
def test_every_diff_keeps_the_layout_the_pages_and_the_tests_of_its_subject(diff, tmp_path):
    own = make_checkout(tmp_path / "checkout")
    apply(diff, own)
    tests = ["test_layout.py", "test_docs.py", *diff.reason("tests").split()]
    quick = "not test_docs and not python_3_8 or every and not diff and not flag"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", quick]
    done = warm.run([*words, *(f"tests/{name}" for name in tests)], cwd=own, timeout=SLOW)
    assert done.returncode == 0, f"{diff.place}: {done.stdout[-4000:]}{done.stderr}"


@pytest.mark.parametrize("what, files", [("mode", 1), ("layer", 3), ("hyperparameter", 2)])
def test_a_typical_change_touches_few_files(what, files):
    (section,) = re.findall(
        rf"^## A {what}\b.*?^```diff$.*?^```$", TEXTS["docs/extending.md"], re.M | re.S
    )
    assert len(re.findall(r"^\+\+\+ ", section, re.MULTILINE)) == files


def write_what_the_reader_has(checkout):
    """The files that a reader brings: LibSVM text, and rows of Criteo's log."""
    draw = random.Random(1)
    (checkout / "data").mkdir()
    with open(checkout / "data" / "clicks.libsvm", "w") as f:
        for _ in range(2000):
            ids = sorted(draw.sample(range(1, 1000), 5))
            f.write(f"{draw.randint(0, 1)} " + " ".join(f"{i}:1" for i in ids) + "\n")
    with open(checkout / "data" / "criteo.txt", "w") as f:
        for _ in range(3000):
            integers = [str(draw.randint(0, 50)) if draw.random() < 0.8 else "" for _ in range(13)]
            words = [f"{draw.randint(0, 20):08x}" for _ in range(26)]
            f.write("\t".join([str(draw.randint(0, 1)), *integers, *words]) + "\n")


def make_checkout(folder):
    """A copy of the checkout, whose set-up has been done."""
    folder.mkdir()
    for name in ("train.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "requirements-search.txt", folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".venv", ".venv-sagemaker", ".venv-spark"):
        if (ROOT / name).exists():
            (folder / name).symlink_to((ROOT / name).resolve())
    (folder / "scripts" / "setup.sh").write_text("#!/bin/bash\n")  # test_setup.py tests it
    write_what_the_reader_has(folder)
    return folder


def start_python_warm(checkout):
    """Has a checkout's .venv/bin start Python, also for deepfm_sklearn, from warm.py."""
    real = (checkout / ".venv").resolve() / "bin"
    (checkout / ".venv").unlink()
    own = checkout / ".venv" / "bin"
    own.mkdir(parents=True)
    for program in real.iterdir():
        if program.name not in ("python", "saved_model_cli"):
            (own / program.name).symlink_to(program)
    plain = f'exec {real}/python -c "import sys; sys.executable = \'{own}/python\'; $2" "${{@:3}}"'
    text = f'case "$1 $2" in "-c import runpy"*) ;; -c*) {plain} ;; esac\n'
    for name, first in ("python", text), ("saved_model_cli", f'set {real}/saved_model_cli "$@"\n'):
        (own / name).write_text(f'#!/bin/bash\n{first}exec {warm.PYTHON} "$@"\n')
        (own / name).chmod(0o755)


@contextlib.contextmanager
def ended(mark):
    """Ends every process that was started with a mark in its environment."""
    try:
        yield
    finally:
        for process in marked("DOCS_BLOCK", mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


def run(block, checkout, fewer_rows=False):
    """Runs a block as its reader would; it must succeed, in time, and leave no process behind."""
    text = block.text
    if fewer_rows:
        text = re.sub(r"_rows=(\d+)0000\b", lambda rows: f"_rows={5 * int(rows[1])}00", text)
        text = text.replace("--days=3", "--days=2")
    mark, limit = uuid.uuid4().hex, SLOW if block.reason("slow") else QUICK
    env = dict(os.environ, DOCS_BLOCK=mark, TF_CPP_MIN_LOG_LEVEL="2", PYTHONWARNINGS="ignore")
    if not (checkout / ".venv").is_symlink():
        env = warm.for_launchers(env)
    log = checkout.parent / f"{mark}.log"
    with ended(mark), open(log, "wb") as out:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=checkout, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"not ended after {limit} s"
        # As texts, which a process has also if it ends while they are listed.
        left = lambda: list(map(str, marked("DOCS_BLOCK", mark)))
        left = [] if wait_until(lambda: not left(), 60, 0.2) else left()
    said = log.read_text(errors="replace")
    assert code == 0, f"{block.place}: {code}\n{block.text}\n{said[-4000:]}"
    assert not left, f"{block.place} leaves {left}"


def run_page(page, checkout, slow, fewer_rows=False):
    before = None  # the diff of the section before: each begins with the code as it is
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "diff" and slow:
            if before:
                apply(before, checkout, "--reverse")
            apply(block, checkout)
            before = block
        left_out = block.reason("not run") or (block.reason("slow") and not slow)
        if block.language == "sh" and not left_out:
            run(block, checkout, fewer_rows)


def apply(block, checkout, *options):
    """Applies a diff to a checkout, as `git apply` does."""
    done = subprocess.run(
        ["git", "apply", *options, "-"], cwd=checkout, input=block.text, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)},
    )  # fmt: skip
    assert done.returncode == 0, f"{block.place}: {done.stdout}"


def check_what_was_made(page, checkout):
    """The files in data/ and model/ that a page names in its text are there."""
    for place, code in INLINE:
        if place == page and re.fullmatch(r"(data|model)/[\w./-]+", code):
            assert (checkout / code).exists(), f"{page}: {code}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, request):
    """A checkout in which README's commands have run."""
    made = make_checkout(tmp_path_factory.mktemp("docs") / "checkout")
    quick = request.config.option.markexpr != "table"
    if quick:
        start_python_warm(made)
    run_page("README.md", made, slow=False, fewer_rows=quick)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def own_checkout(checkout, tmp_path):
    own = tmp_path / "checkout"
    shutil.copytree(checkout, own, symlinks=True)
    yield own
    shutil.rmtree(own)


def with_blocks(kind):
    """The pages that have such blocks to run."""
    of_kind = lambda block: bool(block.reason("slow")) == (kind == "slow")
    runs = [block for block in SHELL if not block.reason("not run") and of_kind(block)]
    return [page for page in PAGES if page in {block.page for block in runs}]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", with_blocks("quick"))
def test_the_commands_of_a_page_run(page, checkout, request):
    if page == "README.md":
        check_what_was_made(page, checkout)
        return
    own = request.getfixturevalue("own_checkout")
    run_page(page, own, slow=False, fewer_rows=True)
    check_what_was_made(page, own)


@pytest.mark.table
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", with_blocks("slow"))
def test_the_slow_commands_of_a_page_run(page, request, tmp_path):
    if page == "README.md":  # its commands have not run yet
        own = make_checkout(tmp_path / "checkout")
    else:
        own = request.getfixturevalue("own_checkout")
    run_page(page, own, slow=True)
