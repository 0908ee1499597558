"""The bookkeeping after an interrupt at any point of a step: what requests hold is what counts."""

from octavo.runtime.request import Request, Status
from octavo.runtime.scheduler import Scheduler, end_reason, rank


def recover(scheduler: Scheduler) -> None:
    """Make it whole. A request whose pages cannot be trusted gives them up and is computed again."""
    memory = scheduler.memory
    for request in scheduler.requests.values():
        _end_finished(request)
    unfinished = [r for r in scheduler.requests.values() if r.status is not Status.FINISHED]
    lost = memory.is_moving
    branches = [branch for request in scheduler.requests.values() for branch in request.branches]
    memory.rebuild(
        [branch.table for branch in branches if branch.finish_reason is None],
        [branch.table for branch in branches if branch.finish_reason is not None],
    )
    for request in unfinished:
        tables = [branch.table for branch in request.live]
        is_half = any(table.in_host for table in tables) and not all(table.in_host for table in tables)
        if lost or is_half or not _can_go_on(request):
            scheduler.release(request)
        is_running = not request.is_swapped and any(not table.is_empty for table in tables)
        request.status = Status.RUNNING if is_running else Status.WAITING
    scheduler.requests = {r.request_id: r for r in unfinished}
    scheduler.running = sorted((r for r in unfinished if r.status is Status.RUNNING), key=rank)
    scheduler.waiting = sorted((r for r in unfinished if r.status is Status.WAITING), key=rank)


def _end_finished(request: Request) -> None:
    for branch in request.branches:
        if request.params.beam_width is None:  # a search ends by itself
            branch.finish_reason = branch.finish_reason or end_reason(request, branch)
        branch.finish_reason = branch.finish_reason or request.finish_reason
    if not request.live:
        request.finish_reason = request.finish_reason or request.branches[-1].finish_reason
        request.status = Status.FINISHED


def _can_go_on(request: Request) -> bool:
    """Whether what its branches hold can be used: the admission was complete, and no token is missing."""
    is_admitted = request.status is Status.RUNNING or request.is_swapped
    return is_admitted and all(branch.num_uncomputed > 0 for branch in request.live)
