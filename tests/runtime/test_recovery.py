"""An interrupt at each line of a step: pages come back, and all other requests go on exactly."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from octavo.runtime.beam import ranked_branches
from octavo.runtime.engine import Engine
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams

Make = Callable[..., Engine]
Greedy = Callable[..., list[int]]


def interrupt_at(engine: Engine, count: int) -> Callable[[], int]:
    """Raise KeyboardInterrupt at the count-th line inside Engine.step; returns the count so far."""
    seen = 0
    is_inside = False

    def trace_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen, is_inside
        if event == "return" and frame.f_code is Engine.step.__code__:
            is_inside = False
        if event == "line" and is_inside:
            seen += 1
            if seen == count:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace_line

    def trace_call(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal is_inside
        if frame.f_code is Engine.step.__code__:
            is_inside = True
        return trace_line if is_inside and "/runtime/" in frame.f_code.co_filename else None

    sys.settrace(trace_call)
    return lambda: seen


SERVED = {
    "one": SamplingParams(max_tokens=6),
    "answers": SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=5, logprobs=1),
    "beams": SamplingParams(max_tokens=4, beam_width=2, n=2, logprobs=0),
}


def answers(engine: Engine, request: Request) -> list[tuple[list[int], list[float | None]]]:
    """Tokens and their log-probabilities, once everything has ended."""
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity and not engine._outputs
    return [
        (branch.tokens[request.prompt_len :], [chosen.logprob for chosen in branch.chosen])
        for branch in ranked_branches(request)
    ]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(("num_host_pages", "windows"), [(0, (None,)), (12, (None, 4))])
def test_control_c_anywhere_in_a_step_loses_nothing(
    make_engine: Make, greedy: Greedy, kind: str, num_host_pages: int, windows: tuple[int | None, ...]
) -> None:
    options = {"num_pages": 8 * len(windows), "page_size": 2, "num_host_pages": num_host_pages}
    params = SERVED[kind]
    alone = make_engine(**options, windows=windows)
    wanted = answers(alone, alone.scheduler.requests[alone.add_request([9, 9, 9], params)])
    at = 1
    hits = 0
    while True:
        engine = make_engine(**options, windows=windows)
        other = engine.scheduler.requests[engine.add_request([9, 9, 9], params)]
        previous = sys.gettrace()
        count = interrupt_at(engine, at)
        try:
            engine.generate([[1, 2], [3]], SamplingParams(max_tokens=4))
        except KeyboardInterrupt:
            hits += 1
        else:
            assert count() < at
            break
        finally:
            sys.settrace(previous)
        engine.scheduler.check()
        assert answers(engine, other) == wanted
        assert engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids == tuple(
            greedy([1, 2], 3)
        )
        at += 1 if at < 30 else 37
    assert hits > 40
