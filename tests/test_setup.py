"""Tests of the set-up: the pins, and scripts/setup.sh without a network.

Where setup.sh would install, it gets a stand-in for Python 3.7: a shell script that answers as
Python would and writes down how it was called.
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import importlib_metadata
import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent
OWN_PACKAGES = {
    *(path.stem for path in ROOT.glob("scripts/**/*.py")),
    *(path.stem for path in (ROOT / "tests").glob("*.py")),
    *("deepfm", "data_tools", "deepfm_sklearn", "scripts", "tests"),
}

# Claims to be 3.7, makes a .venv with itself as the Python, and builds a wheel unless told to
# fail, as a compiler would: after something was written.
PYTHON_STAND_IN = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  "-c import ensurepip"*) echo "(3, 7)" ;;
  -VV) echo "Python 3.7.0" ;;
  "-m venv --clear "*)
    mkdir -p "$4/bin" "$4/lib/python3.7/site-packages" && cp "$0" "$4/bin/python"
    echo "VIRTUAL_ENV=$PWD/$4" > "$4/bin/activate" ;;
  "-m deepfm.kernels") [[ -z ${FAIL_KERNELS:-} ]] || { echo "error: no such type"; exit 1; } ;;
  "-m pip wheel "*)
    while [[ $1 != --wheel-dir ]]; do shift; done
    mkdir -p "$2" && echo half > "$2/horovod-0.28.1.whl"
    [[ -z ${FAIL_BUILD:-} ]] || { echo "error: no such header"; exit 1; } ;;
esac
"""


def pins(name):
    """The (name, version) pairs of one requirements file; fails on a line that is not a pin."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line and not line.startswith("-r "):
            match = re.match(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)$", line)
            assert match, f"{name}: not pinned exactly: {line!r}"
            found[normalize(match.group(1))] = match.group(2)
    return found


def normalize(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(package):
    """The name of a pinned package here: `setup.sh --gpu` installs another tensorflow."""
    gpu = any(importlib_metadata.Distribution.discover(name="tensorflow-gpu"))
    return "tensorflow-gpu" if gpu and package == "tensorflow" else package


def imported_packages(path):
    """The top-level names that a source file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def is_standard_library(name):
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    compiled = (folder / "lib-dynload").glob(f"{name}.*.so")
    files = folder / f"{name}.py", folder / name / "__init__.py", *compiled
    return name in sys.builtin_module_names or any(path.exists() for path in files)


def unpinned_imports(sources, allowed):
    """'FILE imports NAME' for each that is neither a pinned package nor the standard library."""
    providers = importlib_metadata.packages_distributions()
    problems = []
    for path in sources:
        for name in sorted(set(imported_packages(path)) - OWN_PACKAGES):
            distributions = {normalize(d) for d in providers.get(name, [])}
            distributions.add(normalize(name))  # of .venv-sagemaker, which is not looked into
            if not distributions & set(allowed) and not is_standard_library(name):
                problems.append(f"{path.relative_to(ROOT)} imports {name}")
    return problems


def test_every_requirement_is_pinned_exactly_and_once():
    runtime, dev = pins("requirements.txt"), pins("requirements-dev.txt")
    assert runtime["tensorflow"] == "1.15.5"
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert not set(runtime) & set(dev)


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_what_a_pinned_package_requires_is_pinned_and_fits(name):
    allowed = dict(pins("requirements.txt"), **pins(name))
    for package in pins(name):
        for line in importlib_metadata.requires(installed(package)) or []:
            required = Requirement(line)
            if required.marker and not required.marker.evaluate({"extra": ""}):
                continue
            version = allowed.get(normalize(required.name))
            assert version, f"{package} requires {line}, which {name} does not pin"
            assert required.specifier.contains(version), f"{package} requires {line}, not {version}"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_the_installed_versions_are_the_pinned_ones(name):
    found = {package: importlib_metadata.version(installed(package)) for package in pins(name)}
    assert found == pins(name)


def test_the_application_imports_only_runtime_pins_and_the_standard_library():
    sources = [*ROOT.glob("deepfm/**/*.py"), *ROOT.glob("data_tools/**/*.py"), ROOT / "train.py"]
    of_spark = [*ROOT.glob("data_tools/engines/spark*.py"), ROOT / "data_tools" / "on_spark.py"]
    of_spark.append(ROOT / "data_tools" / "engines" / "executors.py")
    assert not unpinned_imports(of_spark, pins("requirements-spark.txt"))
    rest = [*set(sources) - set(of_spark)]
    assert not unpinned_imports(rest, pins("requirements.txt"))


def test_scripts_and_tests_import_only_pins_and_the_standard_library():
    names = ("", "-dev", "-sagemaker", "-search", "-peers")
    files = [f"requirements{name}.txt" for name in names]
    allowed = {package for name in files for package in pins(name)}
    folders = "scripts", "tests", "deepfm_sklearn"
    sources = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    # Of the package fbgemm-gpu-cpu, whose modules are named otherwise.
    assert unpinned_imports(sources, allowed) == [
        "scripts/benchmarks/torch_reference.py imports fbgemm_gpu"
    ]


def test_nothing_installs_from_a_named_host():
    for name in (*map(str, ROOT.glob("requirements*.txt")), "scripts/setup.sh"):
        assert "://" not in (ROOT / name).read_text(), name


@pytest.mark.parametrize("name", ["/no/such/python", "true", "false", "bash", "python3.8"])
def test_refuses_a_python_that_is_not_3_7_with_one_sentence(name, tmp_path):
    write_program(tmp_path / "python3.8", "#!/bin/bash\necho '(3, 8)'\n")
    python = str(tmp_path / name) if name == "python3.8" else name
    environment = dict(os.environ, PYTHON=python, DEEPFM_CACHE=str(tmp_path / "cache"))
    result = run_setup(ROOT, environment)
    assert f"PYTHON={python} is not a Python 3.7" in refusal(result)
    assert result.stdout == ""
    assert not (tmp_path / "cache").exists()


def run_setup(root, environment, *words):
    return subprocess.run(
        [str(root / "scripts" / "setup.sh"), *words],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


class Machine:
    """A copy of setup.sh on a pretended machine, which has only what a test puts there."""

    TOOLS = (
        "bash cat cp date dirname env flock getconf grep mkdir mktemp mv rm sed sha256sum tail "
        "uname"
    )

    def __init__(self, folder):
        names = "checkout", "cache", "bin", "home"
        self.root, self.cache, self.bin, self.home = (folder / name for name in names)
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        self.home.mkdir()
        for name in ["scripts/setup.sh", *(path.name for path in ROOT.glob("requirements*.txt"))]:
            shutil.copy(str(ROOT / name), str(self.root / name))
        ignored = shutil.ignore_patterns("__pycache__")  # which other tests write to meanwhile
        shutil.copytree(str(ROOT / "deepfm"), str(self.root / "deepfm"), ignore=ignored)
        for tool in self.TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        for tool in ["g++", "make", "cmake", "mpicxx"]:
            write_program(self.bin / tool, "#!/bin/bash\n")
        write_program(self.bin / "mpirun", "#!/bin/bash\necho 'mpirun (Open MPI) 4.1.4'\n")

    def setup(self, *words, **environment):
        own = {"PATH": self.bin, "HOME": self.home, "DEEPFM_CACHE": self.cache}
        own["CALLS"] = self.home / "calls"
        return run_setup(self.root, {**environment, **own}, *words)

    def calls(self, pattern):
        calls = (self.home / "calls").read_text().splitlines()
        return [call for call in calls if re.search(pattern, call)]

    def wheels(self):
        return [path.parent.name for path in self.cache.glob("*/*.whl")]


@pytest.fixture
def bare(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def machine(bare):
    """A machine with Python 3.7."""
    write_program(bare.bin / "python3.7", PYTHON_STAND_IN)
    return bare


def refusal(result):
    """The one sentence of a set-up that is refused."""
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_passes_over_a_python3_7_on_the_path_that_does_not_run(bare):
    write_program(bare.bin / "python3.7", "#!/bin/bash\necho 'pyenv: not found' >&2; exit 127\n")
    real = bare.home / ".pyenv/versions/3.7.9/bin/python"
    write_program(real, PYTHON_STAND_IN)
    result = bare.setup()
    assert result.returncode == 0, result.stderr
    assert f"Making .venv with {real} ..." in result.stdout


def test_fetches_python_3_7_with_uv_where_there_is_none(bare):
    write_program(bare.home / "stand_in", PYTHON_STAND_IN)
    to = "$UV_PYTHON_INSTALL_DIR/3.7.9/bin"
    uv = f"#!/bin/bash\nmkdir -p {to} && cp {bare.home}/stand_in {to}/python3.7\n"
    write_program(bare.home / "uv", uv)
    pip = f"#!/bin/bash\nmkdir -p $5/bin && cp {bare.home}/uv $5/bin/uv\n"
    write_program(bare.bin / "python3", pip)
    result = bare.setup()
    assert result.returncode == 0, result.stderr
    assert f"Making .venv with {bare.cache}/uv-python/3.7.9/bin/python3.7 ..." in result.stdout


def test_without_any_python_3_7_one_sentence_says_what_to_do(bare):
    said = refusal(bare.setup())
    assert "pyenv install 3.7" in said and "PYTHON=/path/to/python3.7 scripts/setup.sh" in said


@pytest.mark.parametrize(
    "tool, words, said",
    [
        ("mpirun", [], "needs mpirun: run 'sudo apt-get install -y openmpi-bin'"),
        ("java", ["--spark"], "needs java: run 'sudo apt-get install -y openjdk-17-jre-headless'"),
    ],
)
def test_without_a_tool_and_root_one_sentence_says_what_to_install(machine, tool, words, said):
    if (machine.bin / tool).exists():
        (machine.bin / tool).unlink()  # no apt-get on this machine, so root cannot install it
    assert said in refusal(machine.setup(*words))


def test_a_build_that_fails_leaves_no_wheel_and_shows_its_log(machine):
    result = machine.setup(FAIL_BUILD="yes")
    assert result.returncode == 1
    assert "error: no such header" in result.stderr
    log = re.search(r"the last lines of (\S+):", result.stdout).group(1)
    assert "error: no such header" in pathlib.Path(log).read_text()
    assert not machine.wheels()
    assert not machine.calls("pip install .*horovod")

    assert machine.setup().returncode == 0  # and the next run starts that build again
    assert len(machine.calls("pip wheel")) == 2


def test_the_wheel_is_built_once_for_many_checkouts_and_again_for_another_mpi(machine):
    assert machine.setup().returncode == 0
    shutil.rmtree(str(machine.root / ".venv"))
    assert machine.setup().returncode == 0
    assert len(machine.calls("pip wheel")) == 1

    write_program(machine.bin / "mpirun", "#!/bin/bash\necho 'mpirun (Open MPI) 5.0.1'\n")
    shutil.rmtree(str(machine.root / ".venv"))
    assert machine.setup().returncode == 0
    assert len(machine.calls("pip wheel")) == 2
    assert len(machine.wheels()) == 2


@pytest.mark.parametrize(
    "name, line, said",
    [
        ("requirements-dev.txt", "six==1.16.0", "Installing the packages of tests and scripts"),
        ("requirements.txt", "six==1.16.0", "Installing TensorFlow"),
        ("deepfm/kernels/csrc/rows.cc", "// Another line.", "Compiling the kernels"),
    ],
)
def test_what_has_changed_is_made_again_in_the_same_venv(machine, name, line, said):
    assert machine.setup().returncode == 0
    assert machine.setup().stdout == "Set-up: .venv is ready.\n"
    with open(machine.root / name, "a") as changed:
        changed.write(f"{line}\n")
    assert said in machine.setup().stdout
    assert len(machine.calls("-m venv")) == 1


def test_without_horovod_neither_mpi_nor_its_wheel_is_needed_and_it_can_be_added(machine):
    (machine.bin / "mpirun").rename(machine.bin / "hidden")
    assert machine.setup("--no_horovod").returncode == 0
    assert len(machine.calls("deepfm.kernels")) == 1
    assert not machine.calls("pip wheel|requirements-dev")
    assert machine.setup("--no_horovod").stdout == "Set-up: .venv is ready.\n"

    (machine.bin / "hidden").rename(machine.bin / "mpirun")
    assert machine.setup().returncode == 0
    assert len(machine.calls("pip wheel")) == len(machine.calls("requirements-dev")) == 1
    assert len(machine.calls("-m venv")) == len(machine.calls("deepfm.kernels")) == 1
    assert machine.setup("--no_horovod").stdout == "Set-up: .venv is ready.\n"


def test_gpu_replaces_tensorflow_once_and_stays(machine):
    chosen = machine.root / ".venv" / "requirements.txt"
    assert machine.setup().returncode == 0
    assert "\ntensorflow==1.15.5" in chosen.read_text()
    assert machine.setup("--gpu").returncode == 0
    lines = chosen.read_text().splitlines()
    assert [x for x in lines if x.startswith("tensorflow")][:1] == ["tensorflow-gpu==1.15.5"]
    assert "tensorflow==1.15.5" not in lines and "sagemaker-tensorflow==" in chosen.read_text()
    assert len(machine.calls("-m venv")) == 2  # for both have the folder tensorflow_core
    for words in ((), ("--gpu",), ("--no_horovod",)):
        assert machine.setup(*words).stdout == "Set-up: .venv is ready.\n"
    assert len(machine.wheels()) == 2  # Horovod is built for the TensorFlow that is there


@pytest.mark.parametrize("there", ["nvcc", "nccl", "nvcc nccl"])
def test_horovod_is_built_with_nccl_where_nvcc_and_its_header_are_found(machine, there):
    cuda = machine.home / "cuda"
    (cuda / "include").mkdir(parents=True)
    if "nvcc" in there:
        write_program(machine.bin / "nvcc", "#!/bin/bash\n")
    if "nccl" in there:
        (cuda / "include" / "nccl.h").touch()
    assert machine.setup("--gpu", CUDA_HOME=str(cuda)).returncode == 0
    (name,) = machine.wheels()
    assert name.endswith("-NCCL" if there == "nvcc nccl" else "-CPU")
    assert machine.setup("--gpu", HOROVOD_GPU_OPERATIONS="MPI").returncode == 0
    assert len(machine.wheels()) == 2


def test_spark_gets_an_environment_without_tensorflow_once(machine):
    write_program(machine.bin / "java", "#!/bin/bash\n")
    assert machine.setup("--spark").returncode == 0
    assert len(machine.calls("pip install .*-r requirements-spark.txt")) == 1
    assert not machine.calls("requirements.txt|requirements-dev|deepfm.kernels|pip wheel")
    assert machine.setup("--spark").stdout == "Set-up: .venv-spark is ready.\n"
    for name in ("requirements-spark.txt", "requirements-spark-newer.txt"):
        assert "tensorflow" not in pins(name)


@pytest.mark.parametrize("there", [True, False])
def test_the_tests_get_a_newer_python_for_spark_once_if_there_is_one(machine, there):
    for tool in ("sshd", "ip", "curl", "java", "python3.11"):  # the last one, as a shim of pyenv
        write_program(machine.bin / tool, "#!/bin/bash\nexit 127\n")
    older, newer = (machine.home / f".pyenv/versions/3.{n}/bin/python" for n in ("9.2", "10.13"))
    if there:
        write_program(older, PYTHON_STAND_IN.replace("3, 7", "3, 9"))
        write_program(newer, PYTHON_STAND_IN.replace("3, 7", "3, 10"))
    first, second = machine.setup("--tests"), machine.setup("--tests")
    assert first.returncode == second.returncode == 0, first.stderr
    said = [] if there else ["3.10", "3.9 to 3.11"]
    *missing, last = second.stdout.splitlines()
    assert last == "Set-up: .venv is ready." and len(missing) == len(said)
    for line, which in zip(missing, said):
        assert f"Set-up: found no Python {which} with venv; " in line and line in first.stdout
    for name in ("requirements-spark-newer.txt", ".venv-tf2/requirements.txt"):
        assert len(machine.calls(f"pip install .*-r {name}")) == there
    assert len(machine.calls("pip wheel")) == 1  # 2.15's is for `--tf2` alone
    for part in ("mkl", "search"):
        assert len(machine.calls(f"pip install .*-r requirements-{part}.txt")) == 1
    assert (f"Making .venv-spark-newer with {newer} ..." in first.stdout) == there


def test_tf2_gets_an_environment_of_its_own_with_its_own_horovod_once(machine):
    wanted = "needs; install one, for example with 'pyenv install 3.10'"
    assert wanted in refusal(machine.setup("--tf2"))
    python = machine.home / ".pyenv/versions/3.10.13/bin/python"
    write_program(python, PYTHON_STAND_IN.replace("3, 7", "3, 10"))
    assert machine.setup("--tf2").returncode == 0
    lines = (machine.root / ".venv-tf2" / "requirements.txt").read_text().splitlines()
    assert not (machine.root / ".venv").exists()
    assert any(x.startswith("tensorflow==2.15") for x in lines)
    assert not any(x.startswith("horovod==") for x in lines)
    assert "tensorflow2.15.1-cp310" in machine.wheels()[0].replace("==", "")
    assert machine.setup("--tf2").stdout == "Set-up: .venv-tf2 is ready.\n"
    assert machine.setup().returncode == 0 and len(machine.wheels()) == 2


def test_kernels_that_cannot_be_built_are_told_and_done_without(machine):
    result = machine.setup(FAIL_KERNELS="yes")
    assert result.returncode == 0
    assert "error: no such type" in result.stderr
    assert "training works without the kernels" in result.stderr


def test_a_venv_that_was_moved_is_made_again(machine):
    assert machine.setup().returncode == 0
    moved = machine.root.parent / "elsewhere"
    machine.root.rename(moved)
    machine.root = moved
    assert "Making .venv" in machine.setup().stdout


@pytest.mark.parametrize("words", [(), ("--gpu",)])
@pytest.mark.parametrize("link", [False, True])
def test_a_venv_of_somebody_elses_is_not_emptied(machine, link, words):
    venv = machine.home / "venv" if link else machine.root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "mine").write_text("packages")
    if link:
        (venv / "requirements.txt").write_text("of another checkout")
        (machine.root / ".venv").symlink_to(venv)
    wanted = ".venv is a link" if link else ".venv was not made by setup.sh"
    assert wanted in refusal(machine.setup(*words))
    assert (venv / "mine").exists()
