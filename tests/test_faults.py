"""What happens to a job if a process is killed, or the network between two hosts fails.

Each job either continues and ends well, or all its processes end within a minute and say why.
`pytest -m table` runs the whole table; the suite runs its ends.
"""

import contextlib
import time

import psutil
import pytest
from conftest import make_records, report, small_job, started_horovod, until, write_tfrecords
from hosts import gloo_job, mpi_job, ps_job, two_hosts

EACH_ALONE = 8
ROWS = 1000
LIMIT = 60  # seconds from a fault to the end of the last process
LOST = "so this process ends too; the log of that process says why."


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a.tfrecords"
    return write_tfrecords(path, make_records(ROWS))


def flags(data, model_dir, epochs=1000000):
    """Flags of a job that shows that it trains, and that evaluates at its end."""
    more = ("--log_steps=4", "--eval_every_steps=1000000", f"--num_epochs={epochs}")
    return small_job(data, model_dir, *more)


JOBS = {"gloo": (gloo_job, 0), "mpi": (mpi_job, "mpirun"), "ps": (ps_job, "chief 0")}


@contextlib.contextmanager
def hosts_for(kind):
    # Gloo itself wants the names of hosts to resolve to what others can reach.
    with two_hosts("127.0.1.1" if kind == "mpi" else None) as hosts:
        yield hosts


def test_a_network_that_fails_ends_all_processes_with_a_sentence(data, tmp_path):
    """Side by side: ranks that all-reduce with Gloo, and parameter servers."""
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        gloo = stack.enter_context(gloo_job(hosts, *flags(data, tmp_path / "gloo")))
        ps = stack.enter_context(ps_job(hosts, *flags(data, tmp_path / "ps")))
        gloo.wait_for(0, " step ")
        ps.wait_for("worker 0", " step ")
        hosts.cut()
        last = time.time() + LIMIT
        for job in (gloo, ps):
            codes = job.codes(last - time.time())
            assert set(codes.values()) == {1}, codes
            for name in codes:
                assert "has not answered for" in job.last_line(name), job.text(name)
                assert LOST in job.last_line(name)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.table), 1])
def test_a_rank_that_is_killed_ends_the_others_with_a_sentence(data, tmp_path, rank):
    with two_hosts() as hosts, gloo_job(hosts, *flags(data, tmp_path / "model")) as job:
        job.wait_for(0, " step ")
        job.processes[rank].kill()
        assert job.codes(LIMIT) == {rank: -9, 1 - rank: 1}
        assert LOST in job.last_line(1 - rank)
        assert "Traceback" not in job.text(1 - rank)


@pytest.mark.table
def test_a_network_that_fails_ends_mpirun_and_its_ranks(data, tmp_path):
    with hosts_for("mpi") as hosts, mpi_job(hosts, *flags(data, tmp_path / "model")) as job:
        job.wait_for("mpirun", " step ")
        ranks = [p for p in psutil.process_iter() if is_rank_of(p, tmp_path)]
        assert len(ranks) == 2
        hosts.cut()
        (code,) = job.codes(LIMIT).values()
        assert code not in (0, None)
        assert "ORTE has lost communication with a remote daemon" in job.text("mpirun")
        assert not psutil.wait_procs(ranks, timeout=LIMIT)[1]


def is_rank_of(process, folder):
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "train.py" in words[:3] and any(str(folder) in word for word in words)
    return False


@pytest.mark.table
@pytest.mark.parametrize("kind", JOBS)
def test_a_network_that_is_away_for_five_seconds_costs_nothing_but_them(data, tmp_path, kind):
    make, first = JOBS[kind]
    epochs = {"gloo": 60, "mpi": 30, "ps": 150}[kind]
    with hosts_for(kind) as hosts, make(hosts, *flags(data, tmp_path / "model", epochs)) as job:
        job.wait_for(first, " step ")
        hosts.cut()
        time.sleep(5)
        assert all(process.poll() is None for process in job.processes.values())
        hosts.mend()
        assert set(job.codes(150).values()) == {0}, job.text(first)
    assert report(tmp_path / "model")["examples"] == epochs * ROWS
    assert report(tmp_path / "model")["eval"]["examples"] == ROWS


@pytest.mark.table
def test_a_chief_that_is_killed_ends_the_others_with_a_sentence(data, tmp_path):
    with two_hosts() as hosts, ps_job(hosts, *flags(data, tmp_path / "model")) as job:
        job.wait_for("worker 0", " step ")
        job.processes["chief 0"].kill()
        codes = job.codes(LIMIT)
        assert codes.pop("chief 0") == -9
        assert set(codes.values()) == {1}
        for name in codes:
            assert "chief 0 (10.78.0.1:2222) has not answered for" in job.last_line(name)


@pytest.mark.table
def test_when_rank_0_fails_at_the_end_alone_all_ranks_fail(data, tmp_path):
    model_dir = tmp_path / "model"
    (model_dir / "report.json").mkdir(parents=True)  # so that it cannot be written
    with two_hosts() as hosts, gloo_job(hosts, *flags(data, model_dir, 1)) as job:
        assert job.codes(100) == {0: 1, 1: 1}
        assert "report.json" in job.last_line(0)
        assert LOST in job.last_line(1)


@pytest.mark.table
@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_launcher_ends_with_a_code_when_a_process_is_killed(data, tmp_path, launcher, processes):
    job = started_horovod(processes, *flags(data, tmp_path / "model"), launcher=launcher)
    with job as process:
        until(process.stdout, r"\bstep\b.* loss")
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if is_rank_of(child, tmp_path)]
        assert len(ranks) == processes
        ranks[-1].kill()
        process.communicate(timeout=LIMIT)
        assert process.returncode not in (0, None)
        assert not psutil.wait_procs(ranks, timeout=10)[1]
