"""Ranks as processes that find each other as under torchrun: the store is in this process, as in torchrun's agent."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

dist: Any = distributed

# One process imports all of it once, and ranks are forked from there.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["octavo.runtime.process_group", "octavo.runtime.collectives", "rank_processes", "rank_work", "octavo.compiler.cli",
     "octavo.compiler.commands.run"]
)  # fmt: skip


@dataclass
class Outcome:
    """What became of a rank: a value, the error that it raised, or neither if it was killed or stopped."""

    value: Any = None
    error: str = ""
    seconds: float = 0.0


def on_processes(size: int, work: Callable[..., Any], *args: Any, limit_s: float = 30.0) -> list[Outcome]:
    """What `work(rank, *args)` came to on each of `size` ranks. Those that have not ended by then are killed."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
    )
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    started = []
    for rank in range(size):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(theirs, rank, environment, work, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    outcomes = _outcomes([(process.pid or 0, pipe) for process, pipe in started], limit_s)
    for process, _ in started:
        process.join(0 if state_of(process.pid or 0) == "T" else 5)
        process.kill()
        process.join()
    return outcomes


def _outcomes(ranks: list[tuple[int, Connection]], limit_s: float) -> list[Outcome]:
    """Of each rank. A stopped one is waited for no longer once the others have ended."""
    outcomes = [Outcome() for _ in ranks]
    waiting = dict(enumerate(ranks))
    end = time.monotonic() + limit_s
    while waiting and time.monotonic() < end and any(state_of(pid) != "T" for pid, _ in waiting.values()):
        for rank, (_, pipe) in list(waiting.items()):
            if pipe.poll(0.01):
                del waiting[rank]
                with suppress(EOFError):
                    outcomes[rank] = pipe.recv()
    return outcomes


def state_of(pid: int) -> str:
    """The letter of a process's state, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _run(
    pipe: Connection, rank: int, environment: dict[str, str], work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True")
    began = time.monotonic()
    try:
        outcome = Outcome(value=work(rank, *args))
    except Exception as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
        if not str(error):
            outcome.error += traceback.format_exc()
    outcome.seconds = time.monotonic() - began
    pipe.send(outcome)
    pipe.close()
