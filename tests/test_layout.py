"""The rooms of the house: which imports what, who reads flags, and who knows a mode."""

import ast
import functools
import pathlib
import re
import shutil
import subprocess

import pytest

from deepfm.modes import NAMES

ROOT = pathlib.Path(__file__).resolve().parent.parent
BELOW = {"kernels", "runtime", "records", "config", "errors"}
ROOMS = {"model", "data", "state", "modes.common"} | BELOW
STORY = (
    "jobs",
    "training",
    "importance",
    "evaluation",
    "inference",
    "export",
    "plan",
    "estimators",
    "model_config",
    "open_data",
)  # in order

# What each part of deepfm/ may import of it, beside itself.
MAY = {
    "errors": set(),
    "config": set(),
    "records": {"config", "errors"},
    "runtime": {"records", "config", "errors"},
    "kernels": {"runtime", "records", "config", "errors"},
    "model": BELOW,
    "data": BELOW,
    "state": BELOW | {"data"},
    "modes": {"runtime", "records", "config", "errors", "model.gradients"},
    "flags": {"errors", "modes", "runtime", "config"},
    **{name: ROOMS | set(STORY[i + 1 :]) for i, name in enumerate(STORY)},
    "__main__": {"jobs", "flags", "modes"} | BELOW,
    "train": set(),
    "data_tools": {"data", "kernels", "runtime", "records", "errors"},
    "deepfm_sklearn": {"records"},
    "scripts": {"runtime.program", "errors"},
}
ANYTHING = {"scripts/benchmarks/measures.py"}  # which times parts of deepfm
PROGRAMS = {path.stem for path in ROOT.glob("data_tools/[!_]*.py")}


def sources():
    """{path from the root: text} of all code that is not a test."""
    found = [path for top in ("deepfm*", "data_tools") for path in ROOT.glob(f"{top}/**/*.py")]
    found += [*ROOT.glob("scripts/**/*.py"), ROOT / "train.py"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def part_of(path):
    """The key of MAY that a file is under: a room or a module of deepfm/, or a top folder."""
    first, *rest = path[: -len(".py")].split("/")
    return rest[0] if first == "deepfm" else first


@functools.lru_cache(maxsize=None)
def modules(path, text):
    """The modules of this project that a file imports anywhere, as deepfm.data.records."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                there = (ROOT / full.replace(".", "/")).with_suffix(".py").exists()
                there = there or (ROOT / full.replace(".", "/")).is_dir()
                found.append(full if there else node.module)
    return found


def wrong_imports(files):
    """What is imported against the arrows, one sentence each."""
    for path, text in files.items():
        part = part_of(path)
        if path in ANYTHING or part == "__init__":
            continue
        for module in modules(path, text):
            package, _, rest = module.partition(".")
            room = rest.partition(".")[0]
            names = {room, rest, rest.rpartition(".")[0]}
            if package in ("scripts", "train", "tests", "deepfm_sklearn") and package != part:
                yield f"{path} imports {module}, which is above"
            elif package == "data_tools":
                if part not in ("data_tools", "deepfm_sklearn") or room in PROGRAMS:
                    yield f"{path} imports {module}"
            elif package == "deepfm" and rest and room != part and not names & MAY[part]:
                yield f"{path} imports {module}"


def test_arrows_point_down():
    assert list(wrong_imports(sources())) == []


def test_only_the_seam_imports_tensorflow():
    """So that what its versions call otherwise is in one place; peers.py is for other versions."""
    for path, text in sources().items():
        if path not in ("deepfm/runtime/tf.py", "scripts/benchmarks/peers.py"):
            packages = {module.partition(".")[0] for module in modules(path, text)}
            assert "tensorflow" not in packages, path


@pytest.mark.parametrize(
    "path, line",
    [
        ("deepfm/errors.py", "from deepfm import config"),
        ("deepfm/config/job.py", "from deepfm.runtime import program"),
        ("deepfm/records/frames.py", "from deepfm.runtime import program"),
        ("deepfm/runtime/program.py", "from deepfm.data import records"),
        ("deepfm/kernels/build.py", "from deepfm.model import network"),
        ("deepfm/model/layers/terms.py", "from deepfm.data import records"),
        ("deepfm/data/records.py", "from deepfm.state import checkpoints"),
        ("deepfm/data/records.py", "from deepfm.config import InputConfig\nimport deepfm.jobs"),
        ("deepfm/state/resume.py", "def f():\n    from deepfm.model import metrics"),
        ("deepfm/modes/common/peers.py", "from deepfm.data import records"),
        ("deepfm/modes/mirrored.py", "from deepfm.model import optimizers"),
        ("deepfm/flags.py", "from deepfm import jobs"),
        ("deepfm/estimators.py", "from deepfm import training"),
        ("deepfm/training.py", "from deepfm import jobs"),
        ("deepfm/jobs.py", "from deepfm.modes import local"),
        ("deepfm/model/model_fn.py", "from deepfm.modes.common import mode"),
        ("deepfm/__main__.py", "from deepfm.state import checkpoints"),
        ("train.py", "from deepfm import jobs"),
        ("deepfm_sklearn/children.py", "from deepfm import jobs"),
        ("deepfm_sklearn/children.py", "from data_tools import prepare"),
        ("data_tools/rebalance.py", "import deepfm_sklearn"),
        ("deepfm/jobs.py", "from deepfm_sklearn import children"),
        ("data_tools/rebalance.py", "from deepfm import estimators"),
        ("data_tools/rebalance.py", "from data_tools import inspect_dataset"),
        ("deepfm/data/records.py", "from data_tools.common import progress"),
        ("scripts/tune.py", "from deepfm.data import datasets"),
        ("deepfm/jobs.py", "import train"),
    ],
)
def test_an_arrow_that_is_turned_round_is_found(path, line):
    files = sources()
    assert path in files
    before = list(wrong_imports(files))
    files[path] += f"\n{line}\n"
    (found,) = [sentence for sentence in wrong_imports(files) if sentence not in before]
    assert found.startswith(f"{path} imports ")


def test_only_flags_py_the_program_and_the_start_of_programs_touch_flags():
    may = ("deepfm/flags.py", "deepfm/__main__.py", "deepfm/runtime/program.py")
    for path, text in sources().items():
        if path.startswith("deepfm/") and path not in may:
            assert not re.search(r"\bFLAGS\b", text), path


def names_of_modes(text):
    """The modes that code names, outside of its docstrings."""
    tree = ast.parse(text)
    told = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if hasattr(n, "body")
            and isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Str) and node.s not in told:
            if node.s in set(NAMES) - {"auto"} or re.search(
                r"--distribution|horovod|\btower|mirrored", node.s
            ):
                yield node.s
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in ("hvd", "horovod"):
                yield name


def test_no_mode_is_named_in_the_model_the_data_the_state_and_the_jobs():
    for path, text in sources().items():
        if part_of(path) in ("model", "data", "state", *STORY) and path.startswith("deepfm/"):
            assert list(names_of_modes(text)) == [], path


def test_the_name_of_a_mode_is_found():
    assert list(names_of_modes('"""horovod"""\nx = mode.name == "ps"')) == ["ps"]
    assert list(names_of_modes('log("try --distribution=local")')) == ["try --distribution=local"]


def test_no_folder_is_crowded_and_no_file_is_long():
    for path, text in sources().items():
        folder = (ROOT / path).parent
        assert len(list(folder.glob("[!_]*.py"))) <= 12, folder
        assert len(text.splitlines()) <= 400, path


def test_each_family_of_operators_has_a_module_of_its_name():
    kernels = ROOT / "deepfm" / "kernels"
    modules = {path.stem for path in kernels.glob("*.py")}
    assert {path.stem for path in kernels.glob("csrc/*.cc")} == modules - {
        "__init__", "__main__", "build", "compiled", "ops"
    }  # fmt: skip


PARSES = """
import ast, sys, warnings
warnings.simplefilter("error")
assert sys.version_info >= (3, 8)
for path in sys.argv[1:]:
    compile(ast.parse(open(path).read(), path, feature_version=(3, 8)), path, "exec")
"""


def test_python_3_8_is_as_good_as_3_7_where_tensorflow_1_15_is_there(tmp_path):
    """NVIDIA's build of TensorFlow 1.15, for newer GPUs, is for Python 3.8."""
    places = [ROOT / ".venv-spark-newer" / "bin" / "python", shutil.which("python3")]
    newer = [p for p in places if p and subprocess.run([p, "-c", PARSES]).returncode == 0]
    if not newer:
        pytest.skip("needs a Python from 3.8 on")
    run = functools.partial(subprocess.run, cwd=ROOT, check=True)
    run([newer[0], "-c", PARSES, *sources()])
    for name in ("absl", "tensorflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    run([newer[0], "-m", "deepfm.runtime.check_python"], env={"PYTHONPATH": str(tmp_path)})
    for path, text in sources().items():
        assert not re.search(r"version_info\S*\s*[<>=!]=?\s|\bpython_requires\b", text), path
