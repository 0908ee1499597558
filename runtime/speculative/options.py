"""How to speculate, as a user says it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from octavo.compiler.errors import OptionError
from octavo.runtime.speculative.accept import RULES, Rule

Method = Literal["ngram", "suffix", "draft", "self"]
METHODS: tuple[Method, ...] = get_args(Method)
# Methods that need an artifact.
WITH_ARTIFACT = ("draft", "self")
DEFAULT_MOST = 8
MOST = 32


@dataclass(frozen=True)
class Speculate:
    """What drafts, and how drafts are verified. OptionError for what does not go together.

    method    "ngram": what followed the last tokens earlier in prompt or answer; "suffix": also in earlier answers of
              the engine; "draft": a compiled model of the same tokens, or a draft head; "self": the target itself
              compiled with fewer bits or layers, on the target's own pages
    artifact  of "draft" and "self"
    length    drafted tokens of every round; None: as many as make most tokens a second, by times and acceptance so far
    most      of these at most
    rule      for tokens that were drawn: "block" verification, "token" by token, or "equality": what comes out does not
              depend on drafts at all, bit for bit. All leave the target's distribution as it is; "typical" does not,
              and needs lossy=True
    """

    method: Method
    artifact: Path | None = None
    length: int | None = None
    most: int = DEFAULT_MOST
    rule: Rule = "block"
    lossy: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(f"speculate: expected {', '.join(METHODS)}, got {self.method!r}")
        if (self.artifact is not None) != (self.method in WITH_ARTIFACT):
            got = f"{self.method} with {self.artifact}" if self.artifact else f"{self.method} alone"
            raise OptionError(
                f"speculate: expected ngram, suffix, draft=ARTIFACT or self=ARTIFACT, got {got}"
            )
        if self.rule not in RULES:
            raise OptionError(f"rule: expected {', '.join(RULES)}, got {self.rule!r}")
        if (self.rule == "typical") != self.lossy:
            raise OptionError(
                f"rule: expected lossy=True with 'typical', which changes what is drawn, and with no other, got "
                f"{self.rule!r} and lossy={self.lossy}"
            )
        for name, value in (("length", self.length), ("most", self.most)):
            if value is not None and not (type(value) is int and 1 <= value <= MOST):
                raise OptionError(f"{name}: expected 1 to {MOST} drafted tokens, got {value!r}")


def speculate_of(text: str, length: int | None = None) -> Speculate:
    """ "ngram", "suffix", "draft=PATH" or "self=PATH"."""
    method, has_path, path = text.partition("=")
    if method not in METHODS or bool(has_path) != bool(path):
        raise OptionError(f"speculate: expected ngram, suffix, draft=ARTIFACT or self=ARTIFACT, got {text!r}")
    return Speculate(method, Path(path) if path else None, length)
