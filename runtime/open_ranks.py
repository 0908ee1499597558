"""Artifact for several ranks -> this rank's part of an engine over all of them.

What ranks say to each other goes through torch.distributed, which is loaded here, where there are several.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import OptionError
from octavo.compiler.host import usable_cores
from octavo.compiler.program import ITEM_BYTES
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_rank_runner import CudaRankRunner
from octavo.runtime.distributed_engine import DistributedEngine
from octavo.runtime.distributed_runner import RankRunner
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
    dispatcher   how tokens travel to experts: "all_to_all" (None), "padded", "all_gather"; "deepep" or "flashinfer"
                 where that is installed and the program keeps its limits (plugins.py)
    timeout_s    longest that a rank waits for another in a step
    num_pages    None: what this machine's memory is enough for, shared by its ranks
    num_threads  None: the cores of this machine, shared by its ranks
    Raises OptionError if the processes are not as many as ranks or the dispatcher is none or names the limit that the
    program does not keep, RankError if a rank is lost.
    """
    torch_parts: Any = import_module("octavo.runtime.process_group")
    dispatchers: Any = import_module("octavo.runtime.dispatchers")
    collectives: Any = import_module("octavo.runtime.collectives")
    plugins: Any = import_module("octavo.runtime.plugins")
    check_dispatcher(artifact, dispatcher, (*dispatchers.DISPATCHERS, *plugins.LIMITS))
    sent = plugins.Traffic(**traffic(artifact))
    if dispatcher in plugins.LIMITS:
        plugins.check_limits(dispatcher, sent)
    ranks = torch_parts.Ranks(artifact.program.mesh, group, timeout_s=timeout_s)
    try:
        own = ranks.identities[ranks.rank].machine
        here = sum(identity.machine == own for identity in ranks.identities)
        ranks.meet()

        def agree(pages: int) -> int:
            counts: list[int] = [count for (count,) in ranks.replica.gather_numbers([pages])]
            return min(counts)

        if dispatcher in plugins.LIMITS:
            way = plugins.open_plugin(dispatcher, ranks.dp, sent)
        else:
            way = dispatchers.DISPATCHERS[dispatcher or DEFAULT_DISPATCHER](ranks.dp)
        together = collectives.Collectives(ranks.axes, way)
        runner: RankRunner
        if is_for_gpu(artifact):
            ordinal = sum(each.machine == own for each in ranks.identities[: ranks.rank])
            driver = CudaDriver(ordinal)
            collectives.use_gpu(ordinal)
            runner = CudaRankRunner(
                artifact,
                together,
                ranks.rank,
                num_pages,
                num_host_pages,
                agree=agree,
                driver=driver,
            )
        else:
            runner = NativeRunner(
                artifact,
                agree(default_num_pages(artifact, here) if num_pages is None else num_pages),
                max(1, usable_cores() // here) if num_threads is None else num_threads,
                num_host_pages,
                ranks.rank,
                together,
            )
        engine = DistributedEngine(runner, ranks, make_engine)
        ranks.meet()
    except BaseException as error:
        ranks.fail(f"{type(error).__name__}: {error}")
        raise
    return engine


def check_dispatcher(artifact: Artifact, dispatcher: str | None, known: Sequence[str]) -> None:
    """OptionError for a dispatcher that there is not, or that the program does not ask."""
    mesh = artifact.program.mesh
    if dispatcher is not None and mesh.dp == 1:
        raise OptionError(f"dispatcher: no tokens travel, as all ranks see the same ({mesh}); leave it out")
    if dispatcher is not None and dispatcher not in known:
        raise OptionError(f"dispatcher: expected one of {', '.join(known)}, got {dispatcher!r}")


def traffic(artifact: Artifact) -> dict[str, Any]:
    """The fields of plugins.Traffic: what the program sends at most."""
    buffers = {buffer.name: buffer for buffer in artifact.program.buffers}
    found = {"top_k": 0, "row_bytes": 0}
    for step in artifact.program.collectives:
        if step.kernel == "dispatch":
            x, experts = (buffers[str(name)] for name in step.args[:2])
            top_k, hidden = int(experts.shape[-1]), int(x.shape[-1])
            found["top_k"] = max(found["top_k"], top_k)
            found["row_bytes"] = max(found["row_bytes"], hidden * ITEM_BYTES[x.dtype] + 8 * top_k + 4)
    tokens = artifact.model.max_batch_tokens
    device = "cuda" if is_for_gpu(artifact) else "cpu"
    return {"device": device, "ranks": artifact.program.mesh.dp, "max_tokens": tokens, **found}
