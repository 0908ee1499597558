"""An engine over the ranks of a mesh: each rank calls what it would call alone, and rank 0 says what is done."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError, RankError, RequestError
from octavo.compiler.expert_placement import ExpertPlacement
from octavo.runtime.distributed_runner import LeaderRunner, RankRunner, World, follow
from octavo.runtime.engine import Engine, Prompt
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.request import Completion, Token
from octavo.runtime.sampling_params import SamplingParams

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Kind = Literal["generate", "stream", "count_experts", "expert_loads", "place_experts", "close", "refused"]


class Call(NamedTuple):
    """What rank 0 asks of all ranks. given: prompts and their parameters, why they were refused, or other arguments."""

    kind: Kind
    given: Any = None


class Exchange(Protocol):
    """Objects between ranks: process_group.AxisGroup."""

    def gather_objects(self, value: Any) -> list[Any]: ...


class Peers(World, Protocol):
    """All ranks: process_group.Ranks."""

    @property
    def all(self) -> Exchange: ...

    def meet(self) -> None: ...

    def fail(self, message: str) -> None: ...

    def close(self) -> None: ...

    def explaining_termination(self) -> AbstractContextManager[None]: ...


class DistributedEngine:
    """Serves requests over all ranks. Every rank makes one, and then makes the same calls as rank 0, or `serve`s.

    What rank 0 is given counts. Prompts go round along dp; ranks along ep and tp compute the same. A rank that fails
    ends the others, with an error that names it.

    local        this rank's runner
    make_engine  the engine of a leader, over a runner
    """

    def __init__(self, local: RankRunner, ranks: Peers, make_engine: Callable[[ModelRunner], Engine]) -> None:
        self.ranks = ranks
        self._local = local
        self._place = ranks.mesh.coordinates(ranks.rank)["dp"]
        self._leader: LeaderRunner | None = None
        self.engine: Engine | None = None  # None: this rank follows
        if ranks.replica.coordinate == 0:
            self._leader = LeaderRunner(local, ranks)
            self.engine = make_engine(self._leader)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def explaining_termination(self) -> AbstractContextManager[None]:
        """In the main thread: where torchrun ends this rank as another is lost, a RankError says which."""
        return self.ranks.explaining_termination()

    def generate(self, prompts: Prompts = (), params: Params = None) -> list[Completion]:
        """Answers to the prompts of rank 0, in their order, on every rank."""
        with self._together("generate", lambda: self._checked(prompts, params)) as call:
            return self._generate(*self._share(call))

    def stream(self, prompts: Prompts = (), params: Params = None) -> Generator[Token, None, None]:
        """On rank 0 tokens as they come, `Token.index` telling whose; those of other ranks' prompts once all ended.
        Other ranks get none, but read their iterators to the end too.
        """
        with self._together("stream", lambda: self._checked(prompts, params)) as call:
            yield from self._stream(*self._share(call))

    def count_experts(self, is_on: bool = True) -> None:
        """On every rank: count how many tokens each expert gets from now on, or stop."""
        with self._together("count_experts", lambda: is_on) as call:
            self._local.count_experts(call.given)

    def expert_loads(self) -> NDArray[np.int64]:
        """On every rank: tokens that each expert of each layer got since count_experts (layers, E), of all ranks."""
        with self._together("expert_loads"):
            return self._loads()

    def place_experts(self, placements: Sequence[ExpertPlacement], loads: NDArray[Any] | None = None) -> None:
        """On every rank, between calls: hold other experts, as rank 0 says by layer. Outputs stay as they are, within
        what another order of sums over ranks makes of them.

        loads  by which the holders of an expert share its tokens (layers, E); None: equally
        """
        with self._together("place_experts", lambda: (placements, loads)) as call:
            self._local.place_experts(*call.given)

    def serve(self) -> None:
        """Take part in whatever rank 0 does, until it closes."""
        while True:
            with self._together(None) as call:
                if call.kind == "close":
                    break
                if call.kind == "generate":
                    self._generate(*self._share(call))
                elif call.kind == "stream":
                    for _ in self._stream(*self._share(call)):
                        pass
                elif call.kind == "count_experts":
                    self._local.count_experts(call.given)
                elif call.kind == "expert_loads":
                    self._loads()
                elif call.kind == "place_experts":
                    self._local.place_experts(*call.given)
        self.ranks.close()

    def close(self) -> None:
        """End the ranks that serve."""
        with self._together("close"):
            pass
        self.ranks.close()

    def _generate(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[Completion]:
        mine: list[Completion] = []
        if self.engine is not None and self._leader is not None:
            mine = self.engine.generate(prompts, params) if prompts else []
            self._leader.finish()
        else:
            follow(self._local, self.ranks)
        return dealt(self._gather(mine))

    def _stream(self, prompts: list[Prompt], params: list[SamplingParams]) -> Generator[Token, None, None]:
        others: list[Token] = []
        try:
            if self.engine is None or self._leader is None:
                follow(self._local, self.ranks)
            elif prompts:
                stream: Any = self.engine.stream(prompts, params)
                with self._leader.reading(), closing(stream) as tokens:
                    for token in tokens:
                        own = replace(token, index=token.index * self.ranks.mesh.dp + self._place)
                        if self.rank == 0:
                            yield own
                        else:
                            others.append(own)
        except GeneratorExit:  # the others go on
            self._finish(others)
            raise
        gathered = self._finish(others)
        yield from gathered if self.rank == 0 else ()

    def _finish(self, tokens: list[Token]) -> list[Token]:
        """Once all have ended: the tokens that other ranks kept for rank 0."""
        if self._leader is not None:
            self._leader.finish()
        return [token for part in self._gather(tokens) for token in part]

    def _gather(self, mine: Sequence[Any]) -> list[list[Any]]:
        """What the leader of each dp coordinate has, by coordinate."""
        gathered = self.ranks.all.gather_objects(list(mine))
        return [gathered[self.ranks.mesh.rank(d)] for d in range(self.ranks.mesh.dp)]

    def _share(self, call: Call) -> tuple[list[Prompt], list[SamplingParams]]:
        """This rank's part of what rank 0 was given."""
        prompts, params = call.given
        dp = self.ranks.mesh.dp
        return prompts[self._place :: dp], params[self._place :: dp]

    def _loads(self) -> NDArray[np.int64]:
        parts = self.ranks.all.gather_objects(self._local.expert_loads())
        total: NDArray[np.int64] = np.stack(parts).sum(0)
        return total

    @contextmanager
    def _together(self, kind: Kind | None, given: Callable[[], Any] = lambda: None) -> Iterator[Call]:
        """What rank 0 calls, once all ranks are here. An error of one ends all, but prompts that cannot run only the
        call.

        kind   what this rank calls; None: whatever rank 0 does
        given  its arguments, asked for on rank 0
        """
        try:
            self.ranks.meet()
            mine = self._call(kind, given) if kind and self.rank == 0 else None
            call = self.ranks.all.gather_objects(mine)[0]
            if kind is not None and call.kind == "refused":
                raise call.given
            if kind not in (None, call.kind):
                raise ExecutionError(f"ranks: expected the call of rank 0, {call.kind}, got {kind}")
            yield call
        except (GeneratorExit, RankError, RequestError):
            raise
        except BaseException as error:
            self.ranks.fail(f"{type(error).__name__}: {error}")
            raise

    def _call(self, kind: Kind, given: Callable[[], Any]) -> Call:
        try:
            return Call(kind, given())
        except RequestError as error:
            return Call("refused", error)

    def _checked(self, prompts: Prompts, params: Params) -> tuple[list[Prompt], list[SamplingParams]]:
        """Prompts one by one, and parameters for each. RequestError if one cannot run."""
        assert self.engine is not None, "rank 0 leads"
        return self.engine.checked(prompts, params)


def dealt(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """What was dealt round, in order again."""
    most = max(map(len, parts), default=0)
    return [part[place] for place in range(most) for part in parts if place < len(part)]
