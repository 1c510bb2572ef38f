"""Processes that watch each other, with real processes and real sockets."""

import contextlib
import signal
import socket
import subprocess
import sys

import pytest
from conftest import run_python, started

from deepfm.modes.common import peers

PATIENCE = 2  # seconds


@contextlib.contextmanager
def listening():
    """(a socket that listens, its address)."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(30)  # seconds, of accept()
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def watching(*others, then="time.sleep(60)"):
    """A process that watches."""
    code = f"""
import time
from deepfm.modes.common.peers import Other, Watch
watch = Watch([Other("rank %d" % i, a, {PATIENCE}, {PATIENCE}) for i, a in enumerate({others})])
print("watching", flush=True)
{then}
"""
    with started([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "watching\n"
        yield process


def test_a_process_ends_with_a_sentence_when_any_of_the_others_has_ended():
    with contextlib.ExitStack() as stack:
        _, stays = stack.enter_context(listening())
        server, goes = stack.enter_context(listening())
        process = stack.enter_context(watching(stays, goes))
        server.accept()
        server.close()
        _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    (sentence,) = text.splitlines()
    assert f"rank 1 ({goes}) has not answered for " in sentence
    assert "so this process ends too" in sentence


LOGS = """
import sys, threading
from absl import logging
logging.use_absl_handler()
def flush(flush=sys.stderr.flush):
    flush()
    if threading.current_thread() != threading.main_thread():
        time.sleep(0.5)
sys.stderr.flush = flush
while True:
    time.sleep(0.01)
    logging.warning("a line")
"""


def test_no_other_line_comes_into_the_sentence():
    with listening() as (server, address), watching(address, then=LOGS) as process:
        server.accept()
        server.close()
        _, text = process.communicate(timeout=60)
    assert "has not answered for" in text.splitlines()[-1]


def test_a_process_ends_though_nobody_reads_what_it_writes():
    with listening() as (server, address):
        then = "import sys\nwhile True: sys.stderr.write('a line')"
        with watching(address, then=then) as process:
            server.accept()
            server.close()
            assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    "more, code",
    [
        ("", 1),
        ("import os; os.close(2)", 1),
        ("logging.get_absl_handler().python_handler.acquire()", -signal.SIGALRM),
    ],
)
def test_a_process_ends_though_no_thread_can_be_started(more, code):
    with listening() as (server, address):
        then = f"""
import threading
from absl import logging
def no_more(*_):
    raise RuntimeError("can't start new thread")
threading._start_new_thread = no_more
{more}
time.sleep(60)"""
        with watching(address, then=then) as process:
            server.accept()
            server.close()
            assert process.wait(timeout=60) == code


def test_after_stop_the_others_may_end():
    then = (
        f"time.sleep(1.5); watch.stop(); print('stopped', flush=True); time.sleep({PATIENCE + 3})"
    )
    with listening() as (server, address), watching(address, then=then) as process:
        assert process.stdout.readline() == "stopped\n"
        server.close()
        _, text = process.communicate(timeout=60)
    assert process.returncode == 0, text


def test_a_rank_is_found_where_its_token_is_and_nowhere_else():
    found, other = peers.listen(), peers.listen()
    with listening() as (_, silent):
        mixed = [silent, *other.addresses, *found.addresses]
        assert peers.find(found._replace(addresses=mixed)) == found.addresses[0]
        assert peers.find(found._replace(addresses=other.addresses)) is None


def test_a_rank_gives_all_addresses_of_its_host_and_the_loopback_last():
    *_, last = peers.listen().addresses
    assert last.startswith("127.0.0.1:")


def test_listening_keeps_no_connection_open():
    # In a process of its own: in this one threads of other tests open and close files meanwhile.
    code = """
import os, time
from deepfm.modes.common import peers
address = peers.listen().addresses[-1]
before = len(os.listdir("/proc/self/fd"))
for _ in range(200):
    assert peers.answers(address)
last = time.time() + 10
while len(os.listdir("/proc/self/fd")) > before and time.time() < last:
    time.sleep(0.1)
print(len(os.listdir("/proc/self/fd")) - before)
"""
    assert int(run_python("-c", code, fresh=True, code=0).stdout) == 0


def test_a_rank_that_cannot_be_reached_is_named(caplog):
    with listening() as (server, address):
        server.close()
        gone = peers.Contact("host-9", [address], b"token")
        peers.watch_ranks(0, lambda own: [own, tuple(gone)]).stop()
        assert f"Rank 1 on host-9 cannot be reached at any of {address}" in caplog.text
