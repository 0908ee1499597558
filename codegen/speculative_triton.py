"""Acceptance of drafted chains of the Triton family. R requests, L rows: one more than drafts for each request.

Chains only: a tree's siblings need a residual after each of them. A step of greedy requests alone needs
greedy_spec; verify_spec serves any mixture, since a greedy row's record keeps one token.
"""

from dataclasses import dataclass, replace

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.sampling_triton import (
    ACCEPT_STREAM,
    RECORD_WORDS,
    RESIDUAL_STREAM,
    VOCABULARIES,
    vocabulary_refusal,
    vocabulary_splits,
)  # fmt: skip
from octavo.codegen.specs_triton import ceil_div, in_order, power_of_2
from octavo.compiler.target import Target


@dataclass(frozen=True)
class Chains:
    """Drafts to verify.

    max_drafts  the most that a request has
    sampled     they were drawn from distributions, which are given; otherwise each is a point mass (the best
                token, an n-gram, what a grammar forces)
    philox      random numbers are made in the kernel of (seed, request) keys; otherwise they are given
    """

    vocab: int
    max_drafts: int
    sampled: bool
    philox: bool = True

    @property
    def label(self) -> str:
        kinds = "sampled" if self.sampled else "point_mass", "philox" if self.philox else "points"
        return "_".join((f"v{self.vocab}_k{self.max_drafts}", *kinds))

    @property
    def args(self) -> tuple[Arg, ...]:
        drafted = (pointer("draft_logits", "fp32"), pointer("draft_record", "i64")) if self.sampled else ()
        return (
            pointer("logits", "fp32"), pointer("record", "i64"), pointer("draft", "i64"), pointer("cu_rows", "i32"),
            *drafted, *((pointer("key", "i64"), pointer("place", "i64")) if self.philox else ()),
        )  # fmt: skip


def verify_spec(chains: Chains, target: Target, block: int = 2048) -> KernelSpec:
    """accepted (R,) i32 and token (R, max_drafts + 1) i64: accepted drafts, one more token, then -1."""
    assert vocabulary_refusal(chains.vocab) is None, vocabulary_refusal(chains.vocab)
    block = min(power_of_2(chains.vocab), block)
    splits = vocabulary_splits(chains.vocab, block, target)
    turns = ceil_div(ceil_div(chains.vocab, block), splits)
    row_bytes = chains.vocab * 4 * (1 + chains.sampled) + 8 * RECORD_WORDS * (1 + chains.sampled)
    width = chains.max_drafts + 1
    numbers: tuple[tuple[str, Param], ...] = (
        ("sampled", chains.sampled), ("philox", chains.philox), ("VOCAB", chains.vocab), ("BLOCK", block),
        ("SPLITS", splits), ("BLOCK_K", power_of_2(width)),
    )  # fmt: skip
    results = pointer("accepted", "i32"), pointer("sums", "i64")
    verify = KernelSpec(
        op="speculative_verify",
        template="triton/speculative_verify.py.jinja",
        params=(*numbers, ("STREAM", ACCEPT_STREAM)),
        args=(*chains.args, *(() if chains.philox else (pointer("accept_point", "i64"),)), *results),
        grid=("R", str(splits), "1"),
        bytes=f"R * {row_bytes + 8 * splits} + L * {8 * (1 + RECORD_WORDS)}",
        flops=f"R * {chains.vocab * (6 + 5 * chains.sampled)}",
        num_warps=max(min(block // 512, 4), 1),
        label=chains.label,
        scratch=(("sums", "i64", ("R", splits)),),
        iterations=f"R * {splits * turns}",
    )
    draw = replace(
        verify,
        template="triton/speculative_draw.py.jinja",
        params=(*numbers, ("BLOCK_S", power_of_2(splits)), ("WIDTH", width), ("STREAM", RESIDUAL_STREAM)),
        args=(
            *chains.args, *(() if chains.philox else (pointer("draw_point", "i64"),)), *results,
            pointer("token", "i64"),
        ),
        grid=("R", "1", "1"),
        bytes=f"R * {turns * block * 4 * (1 + chains.sampled) + 8 * (splits + width)}",
        flops=f"R * {turns * block * (6 + 5 * chains.sampled)}",
        scratch=(),
        iterations=f"R * {turns}",
    )  # fmt: skip
    return in_order(verify, draw)


def greedy_spec(max_drafts: int) -> KernelSpec:
    """best (L,) i64 of argmax_spec and drafts -> accepted (R,) i32 and token (R, max_drafts + 1) i64."""
    width = max_drafts + 1
    names = (("best", "i64"), ("draft", "i64"), ("cu_rows", "i32"), ("accepted", "i32"), ("token", "i64"))
    return KernelSpec(
        op="speculative_greedy",
        template="triton/speculative_greedy.py.jinja",
        params=(("WIDTH", width), ("BLOCK_K", power_of_2(width))),
        args=tuple(pointer(*entry) for entry in names),
        grid=("R", "1", "1"),
        bytes=f"L * 16 + R * {8 * width + 4}",
        num_warps=1,
        label=f"k{max_drafts}",
    )


def _corner(chains: Chains) -> Corner:
    return Corner(f"speculative {chains.label}", lambda target: verify_spec(chains, target))


def _greedy_corner(max_drafts: int) -> Corner:
    return Corner(f"speculative greedy k{max_drafts}", lambda target: greedy_spec(max_drafts))


CORNERS: tuple[Corner, ...] = (
    *(
        _corner(Chains(vocab, drafts, sampled))
        for vocab, drafts in zip(VOCABULARIES, (1, 3, 4, 7, 8), strict=True)
        for sampled in (True, False)
    ),
    _corner(Chains(129280, 1, sampled=True, philox=False)),
    _greedy_corner(1),
    _greedy_corner(8),
)
