"""Whether the other processes of a job are still there; a process that has lost one ends.

All-reduce over MPI and calls to parameter servers have no timeout: if the host or the network of
one process goes down, the others wait forever. So a process checks every second, in one thread for
each process that it depends on, whether that still accepts connections, and ends with a sentence if
it has not for a while. Parameter servers, the chief and workers listen anyway; a rank of Horovod
opens a port for this. This module does not load TensorFlow.
"""

import secrets
import socket
import threading
import time
from typing import Callable, List, NamedTuple, Optional

from absl import logging

from deepfm.runtime import program

_BETWEEN_LOOKS = 1.0  # seconds
_TIMEOUT = 2.0  # seconds for one look
# Seconds after which a process that has never answered counts as lost. Its host may still be
# starting; if the host refuses, the process may still be starting, or has failed already.
_HOST_PATIENCE, _START_PATIENCE = 300, 50
# The same for Horovod's ranks. No rank is restarted alone, so a rank whose host refuses has ended.
# This leaves Horovod or the launcher time to report that first.
_RANK_PATIENCE, _ENDED_RANK_PATIENCE = 20, 5


class Other(NamedTuple):
    """A process to watch.

    Attributes:
        name: what messages call it, e.g. "worker 0".
        address: "host:port", where it listens.
        patience: seconds of silence after which it counts as lost, once it has answered.
        ended_patience: the same if its host refuses: the host is up, the process is not.
    """

    name: str
    address: str
    patience: float
    ended_patience: float


def answers(address: str) -> Optional[bool]:
    """Whether a process listens at host:port; None if its host does not answer."""
    try:
        _connect(address).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT)


class Watch:
    """Ends this process, with a sentence and exit code 1, when one of the others is lost."""

    def __init__(self, others: List[Other]):
        self._stopped = threading.Event()
        for other in others:
            threading.Thread(target=self._look_at, args=[other], daemon=True).start()

    def _look_at(self, other):
        answered, silent, last = False, 0.0, time.monotonic()
        while not self._stopped.wait(_BETWEEN_LOOKS):
            found = answers(other.address)
            now = time.monotonic()
            # While this process itself is held up, it cannot know whether the other one is silent.
            passed, last = min(now - last, _BETWEEN_LOOKS + _TIMEOUT), now
            if found:
                answered, silent = True, 0.0
                continue
            silent += passed
            if answered:
                patience = other.patience if found is None else other.ended_patience
            else:
                patience = _HOST_PATIENCE if found is None else _START_PATIENCE
            if silent > patience and not self._stopped.is_set():
                said = f"{other.name} ({other.address}) has not answered for {silent:.0f} s"
                program.end_at_once(f"{said}, {program.SO_THIS_ENDS}", 1)

    def stop(self):
        """Stops watching: from now on the others may end."""
        self._stopped.set()


class Contact(NamedTuple):
    """Where a rank can be found: any "host:port" that answers with its token is the rank."""

    host: str
    addresses: List[str]
    token: bytes


def watch_ranks(rank: int, gather: Callable[[tuple], List[tuple]]) -> Watch:
    """Starts the Watch of a Horovod rank: rank 0 watches all others, and they watch rank 0.

    If one is lost, rank 0 ends and then all others do, each within its patience. `gather` takes a
    tuple of this process and returns those of all, by rank; all processes must call it.
    """
    contacts = [Contact(*found) for found in gather(tuple(listen()))]
    watched = range(1, len(contacts)) if rank == 0 else [0]
    others = []
    for other in watched:
        contact = contacts[other]
        address = find(contact)
        if address:
            name = f"rank {other} on {contact.host}"
            others.append(Other(name, address, _RANK_PATIENCE, _ENDED_RANK_PATIENCE))
        else:
            logging.warning(
                "Rank %d on %s cannot be reached at any of %s. If it dies, this process may "
                "wait forever; open all ports between the hosts of a job.",
                other, contact.host, ", ".join(contact.addresses),
            )  # fmt: skip
    return Watch(others)


def listen() -> Contact:
    """Answers from now on, until this process ends; returns its Contact."""
    server = socket.socket()
    server.bind(("", 0))
    server.listen(128)
    port, token = server.getsockname()[1], secrets.token_bytes(16)

    def answer():
        while True:
            try:
                with server.accept()[0] as connection:
                    connection.sendall(token)
            except OSError:  # the other one is gone, or this process has too many files open
                time.sleep(_BETWEEN_LOOKS)

    threading.Thread(target=answer, daemon=True).start()
    return Contact(socket.gethostname(), [f"{host}:{port}" for host in _own_addresses()], token)


def _own_addresses():
    """IPv4 addresses of this host, the loopback last.

    Does not resolve the host's name, for which Debian writes 127.0.1.1 into /etc/hosts.
    """
    import psutil  # Horovod needs it too

    found = {
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
    }
    return sorted(found, key=lambda address: (address.startswith("127."), address))


def find(contact: Contact) -> Optional[str]:
    """The first address at which a rank answers, or None.

    Hosts may share an address, such as that of Docker's bridge, and have the same port in use.
    """
    for address in contact.addresses:
        try:
            with _connect(address) as connection:
                if connection.recv(len(contact.token)) == contact.token:
                    return address
        except OSError:
            continue
    return None
