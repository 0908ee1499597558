"""What speculation did, counted: accepted tokens a round and by depth, where the time went, and what it gained."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.runtime.chunk import Chunk
from octavo.runtime.speculative.draft import ROOT, Draft


@dataclass
class Plain:
    """Steps in which every request decoded one token and none had a draft, by how many requests there were."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.steps


@dataclass
class Figures:
    """Counts since the engine was made. A round is a draft of one branch that was verified.

    rounds    and their tokens: drafted, accepted of these, and emitted (accepted ones and one more; nothing behind the
              end of an answer counts)
    offered   by depth: rounds in which a token of that depth was drafted behind accepted ones; accepted_at: those in
              which it was accepted too. Behind the end of an answer nothing was drafted
    plain     steps without drafts, by their requests; drafted_steps: those with some, likewise; undrafted: requests in
              these that had none
    draft_s   seconds of proposers; target_s: of the target in steps with drafts; verify_s: of verification
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    offered: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    plain: dict[int, Plain] = field(default_factory=dict)
    drafted_steps: dict[int, int] = field(default_factory=dict)
    undrafted: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0

    def add(self, other: "Figures") -> None:
        """Count what another engine did too."""
        for name in (
            "rounds",
            "drafted",
            "accepted",
            "emitted",
            "undrafted",
            "draft_s",
            "target_s",
            "verify_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.offered, other.offered), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]
        for size, count in other.drafted_steps.items():
            self.drafted_steps[size] = self.drafted_steps.get(size, 0) + count
        for size, plain in other.plain.items():
            own = self.plain.setdefault(size, Plain())
            own.steps, own.seconds = own.steps + plain.steps, own.seconds + plain.seconds

    def count_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """The target ran these."""
        if any(len(chunk.draft) for chunk in chunks):
            self.target_s += seconds
            self.drafted_steps[len(chunks)] = self.drafted_steps.get(len(chunks), 0) + 1
            self.undrafted += sum(chunk.is_sampled and not len(chunk.draft) for chunk in chunks)
        elif all(chunk.is_sampled and chunk.length == 1 for chunk in chunks):
            plain = self.plain.setdefault(len(chunks), Plain())
            plain.steps, plain.seconds = plain.steps + 1, plain.seconds + seconds

    def count_round(self, draft: Draft, path: Sequence[int], emitted: int, has_ended: bool) -> None:
        """A draft was verified. path: its accepted nodes; emitted: tokens that its branch goes on with."""
        self.rounds += 1
        self.drafted += len(draft)
        self.accepted += len(path)
        self.emitted += emitted
        has_missed = not has_ended and bool(draft.children(path[-1] if path else ROOT))
        for counts, reached in ((self.offered, len(path) + has_missed), (self.accepted_at, len(path))):
            counts += [0] * (len(path) + has_missed - len(counts))
            for depth in range(reached):
                counts[depth] += 1

    @property
    def mean_emitted(self) -> float:
        """Tokens a round, the one behind the accepted ones included: 1 is what plain decoding makes of a step."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By depth: of the rounds with a token drafted there, behind accepted ones, the share that accepted it."""
        return tuple(
            accepted / offered for accepted, offered in zip(self.accepted_at, self.offered, strict=True)
        )

    @property
    def speed_up(self) -> float | None:
        """Tokens a second of steps with drafts over those of plain steps of as many requests, in this same run.

        None where no such plain step ran. Time outside of model, proposer and verification is the same for both.
        """
        known = {size: count for size, count in self.drafted_steps.items() if size in self.plain}
        if not known or not self.rounds:
            return None
        spent = self.draft_s + self.target_s + self.verify_s
        steps = sum(self.drafted_steps.values())
        plain_s = sum(count * self.plain[size].mean for size, count in known.items()) / sum(known.values())
        tokens = (self.emitted + self.undrafted) / (self.rounds + self.undrafted)
        return tokens * plain_s * steps / spent
