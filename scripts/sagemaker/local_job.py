"""Runs a SageMaker training job on this machine, through SageMaker's own training toolkit.

    scripts/setup.sh --sagemaker
    .venv/bin/python scripts/sagemaker/local_job.py --training=data/train -- --num_epochs=2
    .venv/bin/python scripts/sagemaker/local_job.py --input_mode=Pipe --hosts=2 \\
        --distribution=horovod --processes_per_host=2 --s3_shard --training=data/train/part- \\
        --evaluation=data/val/part- -- --feature_size=117581 --field_size=39

The flags after `--` are train.py's, and travel as hyperparameters. Each host has its own network,
process and mount namespace and its own /opt/ml, and runs the toolkit's `train`. Nothing outlives
this program. It needs root, or a system that lets users make namespaces.

As in SageMaker, --training and --evaluation are prefixes: the hosts get all files whose paths begin
so, in Pipe mode dataset.json too. A comma list gives each process of a host its own channel.

output_dir then holds HOST.log, model/ (/opt/ml/model of all hosts), output/ (/opt/ml/output/data)
and, if the job failed, failure. Exit codes: 0 done, 1 the job failed, 2 bad flags.
"""

import json
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import programs  # first
from programs import ROOT, BadInput, fail, program, run_program

# isort: split
from absl import flags

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_enum("input_mode", "File", ["File", "Pipe"],
    "How the hosts get the channels: File as folders, Pipe as FIFOs.")
flags.DEFINE_integer("hosts", 1, "Number of hosts.", 1, 250)
flags.DEFINE_enum("distribution", "none", ["none", "ps", "horovod"],
    "How to distribute training: one host, parameter servers or Horovod.")
flags.DEFINE_integer("processes_per_host", 1, "Horovod ranks on each host.", 1)
flags.DEFINE_bool("s3_shard", False,
    "Give each host its own part of the training files, and not all of them.")
flags.DEFINE_list("training", None,
    "Files to train on: a folder or the beginning of paths, or a comma list, one per process.")
flags.DEFINE_string("evaluation", None,
    "Files to evaluate on: a folder or the beginning of paths. Default: no evaluation.")
flags.DEFINE_string("checkpoints_dir", None,
    "Folder that every host sees as /opt/ml/checkpoints, its model_dir. It outlives the job, as "
    "checkpoint_s3_uri does.")
flags.DEFINE_string("custom_mpi_options", "", "More options for mpirun.")
flags.DEFINE_string("output_dir", "sagemaker_output", "Folder for logs, model and failure.")
# fmt: on

VENV = ROOT / ".venv-sagemaker"
_INSIDE = "DEEPFM_SAGEMAKER_LOCAL"  # set when this program runs in its own network
_JOB = f"local-{secrets.token_hex(4)}"  # its name, as SageMaker gives each job one of its own
_PASSED_ON = ("CXX", "DEEPFM_KERNELS_DIR")  # read when a host builds the kernels
_OVER = threading.Event()  # no host runs any more
_REPLACED = ("model", "output", "failure")  # in --output_dir


def main(argv):
    _check_flags()
    if _INSIDE not in os.environ:  # once more, in a network of which this process is root
        own = ["unshare", "--net", *(["--user", "--map-root-user"] if os.geteuid() else [])]
        os.execvpe(own[0], [*own, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})
    program.handle_signals(lambda number, _: sys.exit(128 + number))
    # Booleans become words, as the SDK would pass them.
    given = {name: str(value) for name, value in programs.flag_values(argv[1:]).items()}
    with tempfile.TemporaryDirectory(prefix="sagemaker-") as folder:
        return _run(pathlib.Path(folder), given)


def _check_flags():
    """Refuses what is wrong with the flags or the machine."""
    if not (VENV / "deepfm-setup").exists():  # written when the set-up is complete
        raise BadInput("the toolkit is not installed; run scripts/setup.sh --sagemaker.")
    _check_output_dir()
    if not FLAGS.training:
        raise BadInput(
            "--training is missing; give a folder or the beginning of paths, e.g. data/train."
        )
    for name in (*FLAGS.training, *filter(None, [FLAGS.evaluation])):
        if not _files(name):
            raise BadInput(f"{name}: no file has a path that begins so; give a folder or a prefix.")
    if FLAGS.processes_per_host > 1 and FLAGS.distribution != "horovod":
        raise BadInput("--processes_per_host needs Horovod; add --distribution=horovod.")
    if FLAGS.distribution == "none" and FLAGS.hosts > 1:
        raise BadInput(f"--hosts={FLAGS.hosts} needs --distribution=ps or --distribution=horovod.")
    if len(FLAGS.training) not in (1, FLAGS.processes_per_host):
        raise BadInput(
            f"--training names {len(FLAGS.training)} channels for {FLAGS.processes_per_host} "
            f"process(es) on a host; give one channel, or {FLAGS.processes_per_host}."
        )


def _check_output_dir():
    """Refuses to replace what the job needs, or what no job has written."""
    inputs = [*(FLAGS.training or ()), FLAGS.evaluation, FLAGS.checkpoints_dir]
    for left in (pathlib.Path(FLAGS.output_dir, name) for name in _REPLACED):
        for path in filter(None, inputs):
            if left.resolve() in pathlib.Path(path, "x").resolve().parents:
                raise BadInput(
                    f"{path} is in {left}, which a job replaces; give another --output_dir."
                )
        if left.exists() and not pathlib.Path(FLAGS.output_dir, "algo-1.log").exists():
            raise BadInput(
                f"--output_dir={FLAGS.output_dir}: {left} would be replaced, but no job of this "
                "program has written it; give another folder."
            )


def _files(beginning):
    """The files whose paths begin with `beginning`, sorted, as S3 finds objects by prefix."""
    path = pathlib.Path(beginning)
    folder = path if path.is_dir() else path.parent
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return found if path.is_dir() else [p for p in found if str(p).startswith(str(path))]


def _channels():
    """{name: the beginning of its files}."""
    several = FLAGS.input_mode == "Pipe" or len(FLAGS.training) > 1
    count = FLAGS.processes_per_host if several else 1
    return programs.channels(FLAGS.training, count, FLAGS.evaluation)


def _job_configuration(given):
    """hyperparameters.json: what was given, and what the SDK and launch_sagemaker.py add."""
    added = {
        "sagemaker_program": "train.py", "sagemaker_submit_directory": "/opt/ml/source",
        "sagemaker_container_log_level": 20, "sagemaker_job_name": _JOB,
        "sagemaker_region": "us-east-1",
    }  # fmt: skip
    if FLAGS.distribution == "ps":
        added["sagemaker_parameter_server_enabled"] = True
    if FLAGS.distribution == "horovod":
        added["sagemaker_mpi_enabled"] = True
        added["sagemaker_mpi_num_of_processes_per_host"] = FLAGS.processes_per_host
        added["sagemaker_mpi_custom_mpi_options"] = FLAGS.custom_mpi_options
    if "checkpoint_dir" not in given:
        added["model_dir"] = "/opt/ml/checkpoints" if FLAGS.checkpoints_dir else "/opt/ml/model"
    if FLAGS.input_mode == "Pipe":
        added["pipe_mode"] = True
    if len(FLAGS.training) > 1:
        added["enable_data_multi_path"] = True
    return {name: json.dumps(value) for name, value in {**added, **given}.items()}


def _lay_out(folder, names, hyperparameters):
    """Makes the folder of each host, with its /opt/ml; starts what feeds FIFOs."""
    _make_home(folder)
    addresses = "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(names))
    for i, name in enumerate(names):
        host = folder / name
        config, data = host / "ml/input/config", host / "ml/input/data"
        of_ml = [host / "ml" / name for name in ("model", "output/data", "source")]
        for path in (config, data, *of_ml):
            path.mkdir(parents=True)
        if FLAGS.checkpoints_dir:
            kept = pathlib.Path(FLAGS.checkpoints_dir).absolute()
            kept.mkdir(parents=True, exist_ok=True)
            (host / "ml/checkpoints").symlink_to(kept)
        (host / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        programs.copy_source(programs.TRAINING_SOURCE, host / "ml/source")
        told = {}
        for channel, beginning in _channels().items():
            sharded = FLAGS.s3_shard and channel != "evaluation"
            told[channel] = {
                "TrainingInputMode": FLAGS.input_mode,
                "S3DistributionType": "ShardedByS3Key" if sharded else "FullyReplicated",
                "RecordWrapperType": "None",
            }
            files = _files(beginning)
            _provide(data, channel, files[i :: len(names)] if sharded else files, beginning)
        described = {
            "hyperparameters": hyperparameters,
            "inputdataconfig": told,
            "resourceconfig": {
                "current_host": name, "hosts": names, "network_interface_name": "eth0",
            },
        }  # fmt: skip
        for file, content in described.items():
            (config / f"{file}.json").write_text(json.dumps(content))


def _provide(data, channel, files, beginning):
    """Gives a host the files of a channel, as links or through FIFOs."""
    if FLAGS.input_mode == "Pipe":
        os.mkfifo(data / f"{channel}_0")
        threading.Thread(target=_feed, args=(data, channel, files), daemon=True).start()
        return
    top = pathlib.Path(beginning)
    top = top if top.is_dir() else top.parent
    (data / channel).mkdir()
    for path in files:
        link = data / channel / path.relative_to(top)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())


def _feed(data, channel, files):
    """Sends all files through the FIFO of each epoch, as long as the job reads."""
    epoch = 0
    while True:
        try:
            with open(data / f"{channel}_{epoch}", "wb", buffering=0) as fifo:
                epoch += 1
                os.mkfifo(data / f"{channel}_{epoch}")
                for path in files:
                    with open(path, "rb") as f:
                        shutil.copyfileobj(f, fifo, 1 << 20)
        except BrokenPipeError:
            pass  # the job reads no further in this epoch
        except OSError as error:
            if _OVER.is_set():  # and the FIFOs are being deleted
                return
            sys.stderr.write(f"local_job.py: channel {channel}: {error}; ending the job.\n")
            os._exit(1)  # the others wait for more


def _make_home(folder):
    """The home of all hosts, whose .ssh is their /etc/ssh: root may log in from one to the others,
    with a key made here."""
    # By default, newer curl rejects gRPC's answer, and the toolkit thinks the master dead.
    (folder / ".curlrc").write_text("http0.9\n")
    (folder / ".ssh").mkdir()
    key = folder / ".ssh/id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (folder / ".ssh/sshd_config").write_text(
        "HostKey /etc/ssh/id_ed25519\nAuthorizedKeysFile /etc/ssh/id_ed25519.pub\n"
        "StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n"
    )
    (folder / ".ssh/ssh_config").write_text(
        "Host *\n  IdentityFile /etc/ssh/id_ed25519\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )


def _run(folder, given):
    """Runs the job; returns 0, or 1 if a host failed."""
    names = [f"algo-{i + 1}" for i in range(FLAGS.hosts)]
    output = pathlib.Path(FLAGS.output_dir)
    for left in _REPLACED:
        shutil.rmtree(output / left, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    for left in (*output.glob("algo-*.log"), *output.glob("failure")):
        left.unlink()
    _lay_out(folder, names, _job_configuration(given))
    _ip("link", "add", "hosts", "type", "bridge")
    _ip("link", "set", "hosts", "up")
    hosts = {}

    def code_of(name):
        """The exit code of a host's `train`, or of the host if it failed to become one."""
        path = folder / name / "code"
        return int(path.read_text()) if path.exists() else programs.code_of(hosts[name])

    try:
        for i, name in enumerate(names):
            hosts[name] = _start(folder / name, i, output)
        failed = programs.first_failure(names, code_of)
    finally:
        programs.end(hosts.values())
        _OVER.set()
    _gather([folder / name / "ml" for name in names], output)
    return fail("{} ended with code {}, so all hosts end.".format(*failed), 1) if failed else 0


def _ip(*words):
    subprocess.run(["ip", *words], check=True)


def _start(host, index, output):
    """(the first process of a host, the thread that shows and keeps its lines)."""
    environment = {
        "HOME": str(host.parent),
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_tensorflow_container.training:main",
        "TRAINING_JOB_NAME": _JOB,
        "OMPI_MCA_orte_tmpdir_base": "/run",
        "TMPDIR": "/run/tmp",
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
    }
    own = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
    log = open(output / f"{host.name}.log", "w", 1)  # noqa: SIM115  to the end of this program

    def show(line):
        log.write(line)
        print(f"{host.name} | {line}", end="", flush=True)

    process, reader = programs.start(
        [
            *own, "--kill-child", "bash", str(programs.SCRIPTS / "sagemaker/host.sh"), str(host),
            f"10.77.0.{index + 1}", "train",
        ],
        show, cwd="/", env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    outside = f"host{index + 1}"
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    _ip("link", "set", outside, "master", "hosts", "up")
    return process, reader


def _gather(hosts, output):
    """Copies what the job left: the model and output of all hosts, the first failure file."""
    for name, source in (("model", "model"), ("output", "output/data")):
        for host in reversed(hosts):  # so that the first host's files stay
            for path in filter(pathlib.Path.is_file, (host / source).rglob("*")):
                to = output / name / path.relative_to(host / source)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)
    failures = [path for path in (host / "output/failure" for host in hosts) if path.exists()]
    if failures:
        shutil.copy(min(failures, key=lambda path: path.stat().st_mtime), output / "failure")


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
