"""Artifact for several ranks -> this rank's part of an engine over all of them.

What ranks say to each other goes through torch.distributed, which is loaded here, where there are several.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import OptionError
from octavo.compiler.host import usable_cores
from octavo.runtime.distributed_engine import DistributedEngine
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import ModelRunner, NativeRunner, default_num_pages
from octavo.runtime.open_runner import is_for_gpu

DEFAULT_DISPATCHER = "all_to_all"
TIMEOUT_S = 20.0


def open_ranks(
    artifact: Artifact, make_engine: Callable[[ModelRunner], Engine], *, group: Any = None,
    dispatcher: str | None = None, timeout_s: float = TIMEOUT_S, num_pages: int | None = None,
    num_threads: int | None = None, num_host_pages: int = 0,
) -> DistributedEngine:  # fmt: skip
    """Every rank calls it. Returns when all ranks are there and hold their weights.

    make_engine  the engine of a leader, over a runner
    group        a ProcessGroup of as many processes as the artifact has ranks; None: those that torchrun started
    dispatcher   how tokens travel to experts: "all_to_all" (None), "padded", "all_gather"
    timeout_s    longest that a rank waits for another in a step
    num_pages    None: what this machine's memory is enough for, shared by its ranks
    num_threads  None: the cores of this machine, shared by its ranks
    Raises OptionError if the processes are not as many as ranks or the dispatcher is none, RankError if one is lost.
    """
    if is_for_gpu(artifact):
        raise OptionError(
            f"{artifact.path}: expected an artifact for cpu, got target {artifact.manifest['target']}: "
            "programs of several ranks run on processors; on GPUs one rank's program can only be built and inspected"
        )
    torch_parts: Any = import_module("octavo.runtime.process_group")
    dispatchers: Any = import_module("octavo.runtime.dispatchers")
    collectives: Any = import_module("octavo.runtime.collectives")
    if dispatcher is not None and artifact.program.mesh.dp == 1:
        raise OptionError(
            f"dispatcher: no tokens travel, as all ranks see the same ({artifact.program.mesh}); leave it out"
        )
    dispatcher = dispatcher or DEFAULT_DISPATCHER
    if dispatcher not in dispatchers.DISPATCHERS:
        raise OptionError(
            f"dispatcher: expected one of {', '.join(dispatchers.DISPATCHERS)}, got {dispatcher!r}"
        )
    ranks = torch_parts.Ranks(artifact.program.mesh, group, timeout_s=timeout_s)
    try:
        own = ranks.identities[ranks.rank].machine
        here = sum(identity.machine == own for identity in ranks.identities)
        pages = default_num_pages(artifact, here) if num_pages is None else num_pages
        ranks.meet()
        runner = NativeRunner(
            artifact,
            min(count for (count,) in ranks.replica.gather_numbers([pages])),
            max(1, usable_cores() // here) if num_threads is None else num_threads,
            num_host_pages,
            ranks.rank,
            collectives.Collectives(ranks.axes, dispatchers.DISPATCHERS[dispatcher](ranks.dp)),
        )
        engine = DistributedEngine(runner, ranks, make_engine)
        ranks.meet()
    except BaseException as error:
        ranks.fail(f"{type(error).__name__}: {error}")
        raise
    return engine
