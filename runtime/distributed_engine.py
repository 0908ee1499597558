"""An engine on every rank of a mesh: each rank calls what it would call alone, and gets the same answers."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from octavo.compiler.errors import RankError, RequestError
from octavo.runtime.distributed_runner import LeaderRunner, World, follow
from octavo.runtime.engine import Engine, Prompt
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.request import Completion, Token
from octavo.runtime.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class Exchange(Protocol):
    """Objects between ranks: process_group.AxisGroup."""

    def gather_objects(self, value: Any) -> list[Any]: ...


class Peers(World, Protocol):
    """All ranks: process_group.Ranks."""

    @property
    def all(self) -> Exchange: ...

    def meet(self) -> None: ...

    def fail(self, message: str) -> None: ...


class DistributedEngine:
    """Serves requests over all ranks. Every rank makes one and makes the same calls; what rank 0 is given counts.

    Prompts go round along dp; the ranks along ep and tp compute the same. A rank that fails ends the others, with an
    error that names it.

    local        this rank's runner
    make_engine  the engine of a leader, over a runner
    """

    def __init__(
        self, local: ModelRunner, ranks: Peers, make_engine: Callable[[ModelRunner], Engine]
    ) -> None:
        self.ranks = ranks
        self._local = local
        self._place = ranks.mesh.coordinates(ranks.rank)["dp"]
        self._leader: LeaderRunner | None = None
        self.engine: Engine | None = None  # None: this rank follows
        if ranks.replica.coordinate == 0:
            self._leader = LeaderRunner(local, ranks)
            self.engine = make_engine(self._leader)

    def generate(self, prompts: Prompt | Sequence[Prompt] = (), params: Params = None) -> list[Completion]:
        """Answers to the prompts of rank 0, in their order, on every rank."""
        with self._together(prompts, params) as (own, own_params):
            mine: list[Completion] = []
            if self.engine is not None and self._leader is not None:
                mine = self.engine.generate(own, own_params) if own else []
                self._leader.finish()
            else:
                follow(self._local, self.ranks)
            return dealt(self.gather(mine))

    def stream(
        self, prompts: Prompt | Sequence[Prompt] = (), params: Params = None
    ) -> Generator[Token, None, None]:
        """Tokens of this rank's share of the prompts as they come, `Token.index` telling whose. Followers get none, but
        every rank reads its iterator to the end, or closes it.
        """
        with self._together(prompts, params) as (own, own_params):
            if self.engine is None or self._leader is None:
                follow(self._local, self.ranks)
                return
            try:
                with self._leader.reading(), closing(self._tokens(own, own_params)) as tokens:
                    for token in tokens:
                        yield replace(token, index=token.index * self.ranks.mesh.dp + self._place)
            except GeneratorExit:  # the others go on
                self._leader.finish()
                raise
            self._leader.finish()

    def _tokens(self, own: list[Prompt], params: list[SamplingParams]) -> Any:
        return self.engine.stream(own, params) if self.engine is not None and own else iter(())

    def gather(self, mine: Sequence[Any]) -> list[list[Any]]:
        """What the leader of each dp coordinate has, by coordinate, on every rank."""
        gathered = self.ranks.all.gather_objects(list(mine))
        return [gathered[self.ranks.mesh.rank(d)] for d in range(self.ranks.mesh.dp)]

    @contextmanager
    def _together(
        self, prompts: Prompt | Sequence[Prompt], params: Params
    ) -> Iterator[tuple[list[Prompt], list[SamplingParams]]]:
        """This rank's share of what rank 0 was given, once all ranks are here. An error of one ends all."""
        try:
            self.ranks.meet()
            given = self.ranks.all.gather_objects(self._checked(prompts, params))[0]
            if isinstance(given, RequestError):
                raise given
            many, each = given
            dp = self.ranks.mesh.dp
            yield many[self._place :: dp], each[self._place :: dp]
        except (GeneratorExit, RankError, RequestError):
            raise
        except BaseException as error:
            self.ranks.fail(f"{type(error).__name__}: {error}")
            raise

    def _checked(self, prompts: Prompt | Sequence[Prompt], params: Params) -> Any:
        """On rank 0 prompts and parameters, one for each, or why they cannot run."""
        if self.ranks.rank != 0 or self.engine is None:
            return None
        try:
            return self.engine.checked(prompts, params)
        except RequestError as error:
            return error


def dealt(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """What was dealt round, in order again."""
    most = max(map(len, parts), default=0)
    return [part[place] for place in range(most) for part in parts if place < len(part)]
