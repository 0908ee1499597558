"""Wrong rewrites, seeded one at a time: each must make lowering fail and name the pass and the place.

A mutant is the real pass, except that one kind of call that it makes comes out differently. It goes in
through the `pipeline` argument, as a user's own pass would.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from models import HIDDEN, tiny
from stages import BF16, FP32, SETTINGS, captured, step_of
from torch.fx import GraphModule, Node

import octavo
from octavo.compiler.errors import PassError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import PIPELINE, Step, lower
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport

ops = torch.ops.octavo
Call = Callable[..., Node]
# What a mutant makes instead of a call: given how to make calls, and the call's own arguments.
Change = Callable[..., Node]


def with_argument(op: Any, index: int, new: Any) -> Change:
    """The same call with another argument; `new` is a value, or makes one of the call's arguments."""

    def change(call: Call, *args: Any, **options: Any) -> Node:
        value = new(call, *args) if callable(new) else new
        return call(op, *args[:index], value, *args[index + 1 :], **options)

    return change


def swapped(op: Any, first: int, second: int) -> Change:
    def change(call: Call, *args: Any) -> Node:
        mixed = list(args)
        mixed[first], mixed[second] = args[second], args[first]
        return call(op, *mixed)

    return change


def heads_as_if_repeated(call: Call, q: Node, k: Node, *rest: Any) -> Node:
    """Groups of query heads share keys as `repeat` would give them, not `repeat_interleave`."""
    heads, width = q.meta["val"].shape[2:]
    groups = heads // k.meta["val"].shape[2]
    apart = call(aten.reshape.default, q, [1, -1, heads // groups, groups, width])
    mixed = call(
        aten.reshape.default, call(aten.permute.default, apart, [0, 1, 3, 2, 4]), [1, -1, heads, width]
    )
    return call(ops.attention.default, mixed, k, *rest)


def as_reshape(call: Call, x: Node, order: list[int]) -> Node:
    sizes = [x.meta["val"].shape[d] for d in order]
    return call(aten.reshape.default, x, [d if isinstance(d, int) else -1 for d in sizes])


def other_hidden_rows(call: Call, x: Node, rows: Node) -> Node:
    """Only the gather in front of the last product, not the one behind it."""
    is_hidden = x.meta["val"].shape[-1] == HIDDEN
    return call(ops.gather_logits.default, x, call(aten.flip.default, rows, [0]) if is_hidden else rows)


def reordered(*order: int) -> Change:
    return lambda call, parts, *rest: call(aten.cat.default, [parts[i] for i in order], *rest)


def through(op: Any, index: int, function: Any, *rest: Any) -> Change:
    """The same call with `function` applied to one of its arguments."""
    return with_argument(op, index, lambda call, *args: call(function, args[index], *rest))


def other_item(call: Call, both: Node, index: int) -> Node:
    return call(operator.getitem, both, 1 - index)


def first_part(call: Call, x: Node, axis: int, start: int, end: int) -> Node:
    return call(aten.slice.Tensor, x, axis, 0, end - start)


def one_later(index: int) -> Callable[..., Node]:
    return lambda call, *args: call(aten.add.Tensor, args[index], 1)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`change` takes the place of each call of `op` by the pass; the message names the place as in_place."""

    name: str
    step: str
    op: Any
    change: Change
    model: str = "llama"
    dtype: torch.dtype = FP32
    in_place: str = r"layers\.\d+\."


CAST, ATTENTION, ROPE, PAGED = (
    aten._to_copy.default,
    ops.attention.default,
    ops.rope.default,
    ops.paged_attention.default,
)
KV_WRITE, FUSED_WRITE, MLP = ops.kv_write.default, ops.rope_kv_write.default, ops.gated_mlp.default
NORM, ADD_NORM, EMBED, GATHER = (
    ops.rms_norm.default, ops.add_rms_norm.default, ops.embedding.default, ops.gather_logits.default,
)  # fmt: skip

ATTENTIONS, PAGES, TABLES = "fuse_attention", "insert_paged_kv", "fold_position_tables"
WRITES = "fuse_rope_kv_write"
MUTANTS = (
    Mutant("scale 1 % too large", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 4, 0.2525), "softmax"),
    Mutant("causal mask dropped", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 5, False), "softmax"),
    Mutant("is_causal dropped", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 5, False), "sdpa"),
    Mutant("window one too long", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 6, 6), "window"),
    Mutant("window lost", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 6, 0), "window"),
    Mutant("soft-cap from nowhere", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 7, 50.0), "einsum"),
    Mutant("q and k swapped", ATTENTIONS, ATTENTION, swapped(ATTENTION, 0, 1), "einsum"),
    Mutant("heads repeated, not interleaved", ATTENTIONS, ATTENTION, heads_as_if_repeated, "softmax"),
    Mutant("k and v swapped", PAGES, KV_WRITE, swapped(KV_WRITE, 0, 1)),
    Mutant("caches swapped", PAGES, PAGED, swapped(PAGED, 1, 2)),
    Mutant("written one slot late", PAGES, KV_WRITE, with_argument(KV_WRITE, 4, one_later(4))),
    Mutant("window lost in the pages", PAGES, PAGED, with_argument(PAGED, 8, 0), "window"),
    Mutant("scale lost in the pages", PAGES, PAGED, with_argument(PAGED, 7, 1.0)),
    Mutant("hidden states of other rows", PAGES, GATHER, other_hidden_rows, in_place="lm_head"),
    Mutant("cos and sin swapped", "fuse_rope", ROPE, swapped(ROPE, 1, 2)),
    Mutant("pairs rotated, not halves", "fuse_rope", ROPE, lambda call, *args: call(ROPE, *args, True)),
    Mutant("rotated the other way", "fuse_rope", ROPE, through(ROPE, 2, aten.neg.default)),
    Mutant("angles of the token before", "fuse_rope", ROPE, through(ROPE, 1, aten.roll.default, [1], [1])),
    Mutant("table one row off", TABLES, EMBED, through(EMBED, 0, aten.sub.Tensor, 1), in_place="rotary_emb"),
    Mutant("table past its end", TABLES, EMBED, with_argument(EMBED, 0, one_later(0)), in_place="rotary_emb"),
    Mutant("rotated one position late", WRITES, FUSED_WRITE, with_argument(FUSED_WRITE, 3, one_later(3))),
    Mutant("tables swapped", WRITES, FUSED_WRITE, swapped(FUSED_WRITE, 1, 2)),
    Mutant("eps lost", "fuse_rms_norm", NORM, with_argument(NORM, 2, 0.0), in_place="norm"),
    Mutant(
        "eps lost in bf16", "fuse_rms_norm", NORM, with_argument(NORM, 2, 0.0), dtype=BF16, in_place="norm"
    ),
    Mutant(
        "norm weight lost", "fuse_rms_norm", NORM, through(NORM, 1, aten.ones_like.default), in_place="norm"
    ),
    Mutant("gate and up swapped", "fuse_gated_mlp", MLP, swapped(MLP, 1, 2)),
    Mutant("another activation", "fuse_gated_mlp", MLP, with_argument(MLP, 4, "gelu")),
    Mutant("up before gate", "merge_gate_up", aten.cat.default, reordered(1, 0)),
    Mutant("k and v in the wrong order", "merge_qkv", aten.cat.default, reordered(0, 2, 1)),
    Mutant("residual dropped", "fuse_add_norm", ADD_NORM, through(ADD_NORM, 1, aten.zeros_like.default)),
    Mutant("norm and sum swapped", "fuse_add_norm", operator.getitem, other_item),
    Mutant("transposes dropped", "canonicalize", aten.permute.default, as_reshape),
    Mutant("conversion dropped", "canonicalize", CAST, lambda call, x, dtype: x, dtype=BF16, in_place=""),
    Mutant("first part thrice", "split_linear", aten.slice.Tensor, first_part, "fused"),
)


def mutated(mutant: Mutant) -> tuple[Step, ...]:
    """The pipeline with the mutant in its pass's place, cut off behind it."""
    step = step_of(mutant.step)
    original = Builder.call

    def call(self: Builder, target: Any, *args: Any, **options: Any) -> Node:
        make = functools.partial(original, self)
        return (
            mutant.change(make, *args, **options) if target is mutant.op else make(target, *args, **options)
        )

    def wrong(graph_module: GraphModule, **settings: int) -> PassReport:
        with mock.patch.object(Builder, "call", call):
            return step.run(graph_module, **settings)

    wrong.__name__ = step.name
    return (*PIPELINE[: PIPELINE.index(step)], dataclasses.replace(step, run=wrong))


def verdict(mutant: Mutant, verify: Any = "sites") -> str:
    """What lowering says of the mutant; "survived" if nothing."""
    options = CompileOptions(verify=verify)
    try:
        lower(captured(mutant.model, mutant.dtype), options, SETTINGS, mutated(mutant))
    except PassError as error:
        return str(error)
    return "survived"


def said(text: str) -> str:
    """What differs, without the place and the history."""
    return text.rpartition(" is not equal to what it replaced: ")[2].partition(" (after: ")[0][:70]


def test_every_mutant_is_caught(print_at_end: Callable[[str, list[str]], None]) -> None:
    verdicts = {mutant: verdict(mutant) for mutant in MUTANTS}
    expected = {m: rf"{m.step}: the rewrite of node .*{m.in_place}" for m in MUTANTS}
    caught = [m for m, text in verdicts.items() if re.match(expected[m], text)]
    rows = [f"{m.step:<22} {m.name:<32} {said(text)}" for m, text in verdicts.items()]
    print_at_end(f"mutants: {len(caught)} of {len(MUTANTS)} caught", rows)
    assert {m.name: verdicts[m] for m in MUTANTS if m not in caught} == {}


def test_the_message_has_pass_node_module_line_error_and_history() -> None:
    text = verdict(MUTANTS[0])
    assert re.fullmatch(
        r"fuse_attention: the rewrite of node matmul_1, inner\.layers\.0\.attention, models\.py:\d+ is not "
        r"equal to what it replaced: relative error \d\.\d\de-\d\d, bound \d\.\d\de-\d\d \(fp64, 5 tokens\) "
        r"\(after: canonicalize, .*, fuse_rms_norm, .*fuse_rope\)",
        text,
    )


def test_without_proofs_the_mutants_would_pass() -> None:
    assert verdict(MUTANTS[0], verify="off") == "survived"


def test_the_pipeline_as_it_is_passes() -> None:
    untouched = Mutant("none", "fuse_attention", None, lambda call: call(None), "softmax")
    assert verdict(untouched) == "survived"


def test_compile_fails_on_a_mutant_too() -> None:
    dropped = MUTANTS[2]
    with pytest.raises(
        PassError, match=r"^fuse_attention: the rewrite of node .*, layers\.0\.attention, models\.py"
    ):
        octavo.compile(tiny("sdpa"), pipeline=mutated(dropped), max_model_len=SETTINGS.max_model_len)
