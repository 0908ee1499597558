"""Which process a rank is, and whether it still runs."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

STOPPED, GONE = "is stopped", "is gone"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Identity:
    """A process of some machine.

    host     its name, for messages
    machine  equal for processes that see each other by their ids: of one boot and one namespace
    started  clock ticks after the boot, as ids are used again; 0: not known
    """

    host: str
    machine: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def own_identity() -> Identity:
    """This process."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:  # no Linux: other ranks are then looked for by their sign of life
        machine = f"pid {os.getpid()} of {socket.gethostname()}"
    return Identity(socket.gethostname(), machine, os.getpid(), _stat(os.getpid())[1])


def state(identity: Identity) -> str:
    """ "" for a process of this machine that runs, STOPPED or GONE."""
    letter, started = _stat(identity.pid)
    if letter in ("", "Z", "X", "x") or started != identity.started:
        return GONE
    return STOPPED if letter in ("T", "t") else ""


def _stat(pid: int) -> tuple[str, int]:
    """The state's letter and the start of a process; "" and 0 if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return fields[0], int(fields[19])
