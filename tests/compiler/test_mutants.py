"""Wrong rewrites, seeded one at a time: each must make lowering fail and name the pass and the place."""

import dataclasses
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import HIDDEN, tiny
from mutants import (
    Call,
    Mutant,
    also,
    check_of,
    is_caught,
    one_later,
    reordered,
    said,
    swapped,
    then,
    through,
    times,
    verdict,
    with_argument,
    without,
)  # fmt: skip
from stages import BF16, SETTINGS, captured
from torch.fx import GraphModule, Node

import octavo
from octavo.compiler.errors import PassError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import PIPELINE, Step, lower
from octavo.passes import canonicalize, fold_constants, fold_position_tables, insert_paged_kv
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder

ops = torch.ops.octavo


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


def other_logit_rows(call: Call, x: Node, rows: Node) -> Node:
    """Every gather."""
    return call(ops.gather_logits.default, x, call(aten.flip.default, rows, [0]))


def biased_logits(call: Call, logits: Node, bias: Node, *rest: Any) -> Node:
    return call(ops.router.default, call(aten.add.Tensor, logits, bias), bias, *rest)


def second_twice(call: Call, x: Node, y: Node) -> Node:
    return call(ops.add.default, x, call(aten.add.Tensor, y, y))


def other_item(call: Call, both: Node, index: int) -> Node:
    return call(operator.getitem, both, 1 - index)


def first_part(call: Call, x: Node, axis: int, start: int, end: int) -> Node:
    return call(aten.slice.Tensor, x, axis, 0, end - start)


def part_shifted(call: Call, x: Node, axis: int, start: int, end: int) -> Node:
    return (
        call(aten.slice.Tensor, x, axis, start - 1, end - 1)
        if start
        else call(aten.slice.Tensor, x, axis, 1, end + 1)
    )


def without_bias(call: Call, x: Node, weight: Node, *_: Any) -> Node:
    return call(ops.linear.default, x, weight)


def other_text(*pairs: tuple[str, str]) -> Any:
    """A pointwise expression with the first of these words that it has exchanged."""

    def change(call: Call, *args: Any) -> Node:
        text = args[4]
        for old, new in pairs:
            if old in text:
                return call(ops.pointwise.default, *args[:4], text.replace(old, new), *args[5:])
        return call(ops.pointwise.default, *args)

    return change


def other_weight(make: Callable[..., Node], *args: Any) -> Node:
    """A pass that makes a weight keeps its rows in another order."""
    graph_module, name, tensor, *rest = args
    return make(graph_module, name, tensor.roll(1, 0), *rest)


def one_name(_: Any, node: Node) -> str:
    return "folded.weight"


def first_caches(add: Callable[..., Any], graph_module: GraphModule, index: int, *args: Any) -> Any:
    """Every layer gets the caches of the first."""
    made = add(graph_module, index, *args)
    return graph_module.meta.setdefault("first caches", made)


def remove_write(graph_module: GraphModule) -> None:
    """As if what writes without a result were dead."""
    write = next(n for n in graph_module.graph.nodes if n.target is ops.kv_write.default)
    graph_module.graph.erase_node(write)


def write_last(graph_module: GraphModule) -> None:
    """A write behind the attention that reads it."""
    write = next(n for n in graph_module.graph.nodes if n.target is ops.kv_write.default)
    graph_module.graph.output_node().prepend(write)


def gather_twice(graph_module: GraphModule) -> None:
    gather = next(n for n in graph_module.graph.nodes if n.target is ops.gather_logits.default)
    with graph_module.graph.inserting_after(gather):
        again = graph_module.graph.call_function(gather.target, gather.args)
    again.meta = dict(gather.meta)
    gather.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    again.args = (gather, gather.args[1])


CAST, ATTENTION, ROPE, PAGED = (
    aten._to_copy.default, ops.attention.default, ops.rope.default, ops.paged_attention.default,
)  # fmt: skip
KV_WRITE, FUSED_WRITE, MLP = ops.kv_write.default, ops.rope_kv_write.default, ops.gated_mlp.default
NORM, ADD_NORM, EMBED, GATHER = (
    ops.rms_norm.default, ops.add_rms_norm.default, ops.embedding.default, ops.gather_logits.default,
)  # fmt: skip
LINEAR, LAYER_NORM, ACT_MUL, POINTWISE = (
    ops.linear.default, ops.layer_norm.default, ops.act_mul.default, ops.pointwise.default,
)  # fmt: skip
ROUTER, MLA, LATENT, HEADS = (
    ops.router.default, ops.mla_attention.default, ops.latent_attention.default, ops.head_linear.default,
)  # fmt: skip
LATENT_WRITE, PAGED_MLA, MOE = ops.latent_write.default, ops.paged_mla_attention.default, ops.moe.default
CAT, SLICE, PERMUTE, RESHAPE = aten.cat.default, aten.slice.Tensor, aten.permute.default, aten.reshape.default
ZEROS, FLIP, ROLL = aten.zeros_like.default, aten.flip.default, aten.roll.default

CANON, FOLD, SPLIT, DEAD = "canonicalize", "fold_constants", "split_linear", "eliminate_dead_code"
LAYER, ROPES, PARTIAL, HOIST = "fuse_layer_norm", "fuse_rope", "fuse_partial_rope", "hoist_transposes"
NORMS, ATTENTIONS, PAGES, TABLES = (
    "fuse_rms_norm",
    "fuse_attention",
    "insert_paged_kv",
    "fold_position_tables",
)
GATED, QKV, GATE_UP, WRITES = "fuse_gated_mlp", "merge_qkv", "merge_gate_up", "fuse_rope_kv_write"
SUMS, POINTS, ROUTERS, MIXTURES = "fuse_add_norm", "lower_elementwise", "fuse_router", "fuse_moe"
LATENTS, ABSORB, SCATTERS, TRANSPOSES = "fuse_mla", "absorb_mla", "join_scatters", "lower_transposes"
PAIR_ROPE, REPEATS, REPEAT = "fuse_pair_rope", "hoist_repeats", aten.repeat_interleave.self_int
HEAD, ROTARY, NORM_AT, ANY = "head", "rotary_emb", "norm", ""

MUTANTS = (
    Mutant("transposes dropped", CANON, PERMUTE, as_reshape),
    Mutant("conversion dropped", CANON, CAST, lambda call, x, dtype: x, dtype=BF16, in_place=ANY),
    Mutant("bias of a product dropped", CANON, LINEAR, without_bias, "biased"),
    Mutant("ids one too large", CANON, EMBED, with_argument(EMBED, 0, one_later(0)), in_place="embed"),
    Mutant("part cut in the wrong place", CANON, SLICE, part_shifted, "fused"),
    Mutant("heads of an einsum out of order", CANON,
           aten.matmul.default, through(aten.matmul.default, 1, FLIP, [1]), "einsum"),
    Mutant("unequal calls merged", CANON,
           exchange=(canonicalize, "_call_key", lambda key, node: (*key(node)[:2], node.args[:1]))),
    Mutant("folded rows in another order", FOLD,
           exchange=(fold_constants, "new_weight", other_weight), model="gpt2", in_place=r"h\.\d"),
    Mutant("folded weights under one name", FOLD,
           exchange=(fold_constants, "constant_name", one_name), model="gpt2", in_place=r"h\.\d"),
    Mutant("merged weights out of order", FOLD, exchange=(fold_constants, "new_weight", other_weight), turn=2),
    Mutant("first part thrice", SPLIT, SLICE, first_part, "fused"),
    Mutant("rows of a part one off", SPLIT, SLICE, part_shifted, "fused"),
    Mutant("part without its bias", SPLIT, LINEAR, without_bias, "gpt2", in_place=r"h\.\d"),
    Mutant("write taken for dead code", DEAD, damage=remove_write, model="gpt2", in_place=r"h\.\d", turn=1),
    Mutant("eps of a layer norm lost", LAYER,
           LAYER_NORM, with_argument(LAYER_NORM, 3, 0.0), "gpt2", in_place="ln_"),
    Mutant("layer norm without its bias", LAYER,
           LAYER_NORM, with_argument(LAYER_NORM, 2, None), "gpt2", in_place="ln_"),
    Mutant("weight and bias of a norm swapped", LAYER,
           LAYER_NORM, swapped(LAYER_NORM, 1, 2), "gpt2", in_place="ln_"),
    Mutant("mean not subtracted", LAYER,
           LAYER_NORM, lambda call, x, w, b, eps: call(NORM, x, w, eps), "gpt2", in_place="ln_"),
    Mutant("eps lost", NORMS, NORM, with_argument(NORM, 2, 0.0), in_place=NORM_AT),
    Mutant("eps lost in bf16", NORMS, NORM, with_argument(NORM, 2, 0.0), dtype=BF16, in_place=NORM_AT),
    Mutant("norm weight lost", NORMS, NORM, through(NORM, 1, aten.ones_like.default), in_place=NORM_AT),
    Mutant("norm weight counted from one", NORMS, NORM, also(NORM, 1.0), in_place=NORM_AT),
    Mutant("cos and sin swapped", ROPES, ROPE, swapped(ROPE, 1, 2)),
    Mutant("pairs rotated, not halves", ROPES, ROPE, also(ROPE, True)),
    Mutant("halves rotated, not pairs", ROPES, ROPE, without(ROPE, 3), "cohere2"),
    Mutant("rotated the other way", ROPES, ROPE, through(ROPE, 2, aten.neg.default)),
    Mutant("angles of the token before", ROPES, ROPE, through(ROPE, 1, ROLL, [1], [1])),
    Mutant("scale of the token before", ROPES, aten.mul.Tensor, through(aten.mul.Tensor, 1, ROLL, [1], [1]),
           "ministral3", in_place=ANY),
    Mutant("heads repeated as a whole", REPEATS, REPEAT, lambda call, x, n, axis: call(CAT, [x] * n, axis),
           "falcon_grouped", in_place=r"h\.\d"),
    Mutant("repeated heads in another order", REPEATS, REPEAT, then(REPEAT, FLIP, [2]), "falcon_grouped",
           in_place=r"h\.\d"),
    Mutant("heads in another order", ROPES, ROPE, then(ROPE, FLIP, [2])),
    Mutant("scale 1 % too large", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 4, 0.2525), "softmax"),
    Mutant("scale squared", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 4, 0.25**2), "softmax"),
    Mutant("causal mask dropped", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 5, False), "softmax"),
    Mutant("is_causal dropped", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 5, False), "biased"),
    Mutant("causal mask from nowhere", ATTENTIONS,
           ATTENTION, with_argument(ATTENTION, 5, True), "bidirectional"),
    Mutant("window one too long", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 6, 6), "window"),
    Mutant("window one too short", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 6, 4), "window"),
    Mutant("window lost", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 6, 0), "window"),
    Mutant("soft-cap from nowhere", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 7, 50.0), "einsum"),
    Mutant("q and k swapped", ATTENTIONS, ATTENTION, swapped(ATTENTION, 0, 1), "einsum"),
    Mutant("heads repeated, not interleaved", ATTENTIONS, ATTENTION, heads_as_if_repeated, "softmax"),
    Mutant("values of the head before", ATTENTIONS,
           ATTENTION, through(ATTENTION, 2, ROLL, [1], [2]), "softmax"),
    Mutant("slopes of the wrong sign", ATTENTIONS, ATTENTION, through(ATTENTION, 8, aten.neg.default), "alibi"),
    Mutant("slopes of the head before", ATTENTIONS, ATTENTION, through(ATTENTION, 8, ROLL, [1], [0]), "alibi"),
    Mutant("slopes lost", ATTENTIONS, ATTENTION, with_argument(ATTENTION, 8, None), "alibi"),
    Mutant("slopes lost in the pages", PAGES, PAGED, without(PAGED, 10), "alibi"),
    Mutant("transpose in front of a norm lost", HOIST, PERMUTE, as_reshape, "gemma3"),
    Mutant("norm of another weight", HOIST, NORM, through(NORM, 1, FLIP, [0]), "gemma3"),
    Mutant("eps lost on the way", HOIST, NORM, with_argument(NORM, 2, 1e-3), "gemma3"),
    Mutant("slice of the wrong part on the way", HOIST, SLICE, part_shifted, "gpt_neox"),
    Mutant("rotated part of another table", PARTIAL, ROPE, swapped(ROPE, 1, 2), "gpt_neox"),
    Mutant("rotated part in another style", PARTIAL, ROPE, also(ROPE, True), "gpt_neox"),
    Mutant("rest rotated, not the first part", PARTIAL, ROPE, through(ROPE, 0, FLIP, [3]), "gpt_neox"),
    Mutant("gate and up swapped", GATED, MLP, swapped(MLP, 1, 2)),
    Mutant("gate taken for up", GATED, MLP, lambda call, x, gate, up, *rest: call(MLP, x, gate, gate, *rest)),
    Mutant("another activation", GATED, MLP, with_argument(MLP, 4, "gelu")),
    Mutant("gelu spelled with tanh", GATED, MLP, with_argument(MLP, 4, "gelu"), "gemma2"),
    Mutant("table one row off", TABLES, EMBED, through(EMBED, 0, aten.sub.Tensor, 1), in_place=ROTARY),
    Mutant("table past its end", TABLES, EMBED, with_argument(EMBED, 0, one_later(0)), in_place=ROTARY),
    Mutant("rows of a table moved", TABLES,
           exchange=(fold_position_tables, "new_weight", other_weight), in_place=ROTARY),
    Mutant("positions one off", TABLES,
           RESHAPE, with_argument(RESHAPE, 0, one_later(0)), "softmax", in_place=ANY),
    Mutant("k and v swapped", PAGES, KV_WRITE, swapped(KV_WRITE, 0, 1)),
    Mutant("caches swapped", PAGES, PAGED, swapped(PAGED, 1, 2)),
    Mutant("written one slot late", PAGES, KV_WRITE, with_argument(KV_WRITE, 4, one_later(4))),
    Mutant("not written at all", PAGES, exchange=(Builder, "effect", lambda *_, **__: None)),
    Mutant("written behind its reader", PAGES, damage=write_last),
    Mutant("cache of another layer", PAGES, exchange=(insert_paged_kv, "_add_caches", first_caches)),
    Mutant("pages of another request", PAGES, PAGED, through(PAGED, 3, FLIP, [0])),
    Mutant("last token forgotten", PAGES, PAGED, through(PAGED, 4, aten.sub.Tensor, 1)),
    Mutant("requests cut one token late", PAGES, PAGED, through(PAGED, 5, aten.add.Tensor, 1)),
    Mutant("window lost in the pages", PAGES, PAGED, with_argument(PAGED, 8, 0), "window"),
    Mutant("scale lost in the pages", PAGES, PAGED, with_argument(PAGED, 7, 1.0)),
    Mutant("soft-cap lost in the pages", PAGES, PAGED, with_argument(PAGED, 9, 0.0), "gemma2"),
    Mutant("sinks lost in the pages", PAGES, PAGED, with_argument(PAGED, 6, None), "gpt_oss"),
    Mutant("sinks of the head before", PAGES, PAGED, through(PAGED, 6, ROLL, [1], [0]), "gpt_oss"),
    Mutant("hidden states of other rows", PAGES, GATHER, other_hidden_rows, in_place="lm_head"),
    Mutant("logits of other rows", PAGES, GATHER, other_logit_rows, in_place=ANY),
    Mutant("rows gathered twice", PAGES, damage=gather_twice, in_place=ANY),
    Mutant("soft-cap of the logits lost", PAGES, aten.tanh.default, lambda call, x: x, "gemma2", in_place=ANY),
    Mutant("k and v in the wrong order", QKV, CAT, reordered(0, 2, 1)),
    Mutant("k merged twice", QKV, CAT, reordered(0, 1, 1)),
    Mutant("merged bias dropped", QKV, LINEAR, without_bias, "biased"),
    Mutant("parts of the merged product one off", QKV, SLICE, part_shifted),
    Mutant("up before gate", GATE_UP, CAT, reordered(1, 0)),
    Mutant("activation changed in the merge", GATE_UP, ACT_MUL, with_argument(ACT_MUL, 1, "relu")),
    Mutant("rotated one position late", WRITES, FUSED_WRITE, with_argument(FUSED_WRITE, 3, one_later(3))),
    Mutant("tables swapped", WRITES, FUSED_WRITE, swapped(FUSED_WRITE, 1, 2)),
    Mutant("fused write one slot late", WRITES, FUSED_WRITE, with_argument(FUSED_WRITE, 4, one_later(4))),
    Mutant("fused write into swapped caches", WRITES, FUSED_WRITE, swapped(FUSED_WRITE, 5, 6)),
    Mutant("fused write rotates pairs", WRITES, FUSED_WRITE, with_argument(FUSED_WRITE, 8, True)),
    Mutant("residual dropped", SUMS, ADD_NORM, through(ADD_NORM, 1, ZEROS)),
    Mutant("residual twice", SUMS,
           ADD_NORM, lambda call, x, residual, *rest: call(ADD_NORM, residual, residual, *rest)),
    Mutant("norm and sum swapped", SUMS, operator.getitem, other_item),
    Mutant("eps lost in the sum's norm", SUMS, ADD_NORM, with_argument(ADD_NORM, 3, 0.0)),
    Mutant("difference for a sum", POINTS,
           POINTWISE, other_text(("+", "-"), ("*", "+")), "granite", in_place=ANY),
    Mutant("multiplier lost", POINTS, POINTWISE, other_text(("0.5", "1.0")), "granite", in_place=ANY),
    Mutant("sigmoid for tanh", POINTS, POINTWISE, other_text(("tanh", "sigmoid")), "gemma2", in_place=ANY),
    Mutant("sum of one term", POINTS,
           ops.add.default, through(ops.add.default, 1, ZEROS), "gpt2", in_place=r"h\.\d"),
    Mutant("ups before gates", MIXTURES, CAT, reordered(1, 0), "mixture"),
    Mutant("another activation", MIXTURES, MOE, with_argument(MOE, 7, "relu"), "mixture"),
    Mutant("all weights alike", MIXTURES, MOE, through(MOE, 2, aten.ones_like.default), "mixture"),
    Mutant("one expert too few", ROUTERS, ROUTER, with_argument(ROUTER, 2, 1), "mixtral"),
    Mutant("scores of the wrong kind", ROUTERS, ROUTER, with_argument(ROUTER, 3, "softmax"), "deepseek_v3"),
    Mutant("weights not divided by their sum", ROUTERS, ROUTER, with_argument(ROUTER, 4, False), "mixtral"),
    Mutant("selection without its bias", ROUTERS, ROUTER, with_argument(ROUTER, 1, None), "deepseek_v3"),
    Mutant("groups ignored", ROUTERS,
           ROUTER, with_argument(ROUTER, 6, lambda call, *args: args[5]), "deepseek_v3"),
    Mutant("groups by their best, not two", ROUTERS, ROUTER, with_argument(ROUTER, 7, "max"), "deepseek_v3"),
    Mutant("scaling of the weights lost", ROUTERS, ROUTER, with_argument(ROUTER, 8, 1.0), "deepseek_v3"),
    Mutant("bias of the selection in the weights", ROUTERS, ROUTER, biased_logits, "deepseek_v3"),
    Mutant("shared expert twice", POINTS, ops.add.default, second_twice, "deepseek_v3", in_place=ANY),
    Mutant("weights and experts swapped", ROUTERS, operator.getitem, other_item, "mixtral"),
    Mutant("parts joined in the wrong order", SCATTERS, CAT, reordered(1, 0), "latent"),
    Mutant("turned by the angles of the token before", PAIR_ROPE,
           ROPE, through(ROPE, 1, ROLL, [1], [1]), "latent"),
    Mutant("pairs turned as halves", PAIR_ROPE, ROPE, without(ROPE, 3), "latent"),
    Mutant("latent and rotated part swapped", LATENTS, MLA, swapped(MLA, 0, 1), "latent"),
    Mutant("keys' and values' weights swapped", LATENTS, MLA, swapped(MLA, 4, 5), "latent"),
    Mutant("scale of the plain part only", LATENTS, MLA, times(MLA, 6, 1.5), "latent"),
    Mutant("causal mask of the latents dropped", LATENTS, MLA, with_argument(MLA, 7, False), "latent"),
    Mutant("latent and rotated part written swapped", PAGES,
           LATENT_WRITE, through(LATENT_WRITE, 0, FLIP, [2]), "latent"),
    Mutant("latents of another request", PAGES, PAGED_MLA, through(PAGED_MLA, 4, FLIP, [0]), "latent"),
    Mutant("view that moves tokens", TRANSPOSES, RESHAPE, then(RESHAPE, FLIP, [1]), "deepseek_v3"),
    Mutant("view of the heads before", TRANSPOSES, RESHAPE, then(RESHAPE, FLIP, [3]), "deepseek_v3"),
    Mutant("another head's keys absorbed", ABSORB, HEADS, through(HEADS, 1, ROLL, [1], [0]), "latent"),
    Mutant("rotated part not counted", ABSORB, LATENT, through(LATENT, 1, ZEROS), "latent"),
    Mutant("latent mixed without its scale", ABSORB, LATENT, with_argument(LATENT, 4, 1.0), "latent"),
)  # fmt: skip


def mutated(mutant: Mutant) -> tuple[Step, ...]:
    """The pipeline with the mutant in its pass's place, cut off behind it."""
    return (*PIPELINE[: mutant.index], mutant.wrong_step())


def named(name: str) -> Mutant:
    return next(m for m in MUTANTS if m.name == name)


def test_every_mutant_is_caught(print_at_end: Callable[[str, list[str]], None]) -> None:
    verdicts = {mutant: verdict(mutant) for mutant in MUTANTS}
    caught = [m for m, text in verdicts.items() if is_caught(m, text)]
    rows = [f"{m.step:<20} {m.name:<36} {check_of(text):<6} {said(text)}" for m, text in verdicts.items()]
    print_at_end(f"mutants: caught {len(caught)} / seeded {len(MUTANTS)}", rows)
    assert {m.name: verdicts[m] for m in MUTANTS if m not in caught} == {}


def test_every_pass_has_mutants() -> None:
    assert {step.name for step in PIPELINE} - {m.step for m in MUTANTS} == set()


def lowered(mutant: Mutant, verify: Any = "sites") -> str:
    """What the whole of lowering says."""
    try:
        lower(captured(mutant.model, mutant.dtype), CompileOptions(verify=verify), SETTINGS, mutated(mutant))
    except PassError as error:
        return str(error)
    return "survived"


def test_the_message_has_pass_node_module_line_error_and_history() -> None:
    text = lowered(named("scale 1 % too large"))
    assert re.fullmatch(
        r"fuse_attention: the rewrite of node matmul_1, inner\.layers\.0\.attention, models\.py:\d+ is not "
        r"equal to what it replaced: relative error \d\.\d\de-\d\d, bound \d\.\d\de-\d\d \(fp64, 5 tokens\) "
        r"\(after: canonicalize, .*, fuse_rms_norm, .*fuse_rope.*\)",
        text,
    )


def test_without_proofs_the_mutants_would_pass() -> None:
    assert lowered(named("scale 1 % too large"), verify="off") == "survived"


def test_the_passes_as_they_are_pass() -> None:
    for model in ("softmax", "llama"):
        for step in dict.fromkeys(step.name for step in PIPELINE):
            assert verdict(Mutant("none", step, model=model)) == "survived"


def test_compile_fails_on_a_mutant_too() -> None:
    dropped = dataclasses.replace(named("is_causal dropped"), model="sdpa")
    with pytest.raises(
        PassError, match=r"^fuse_attention: the rewrite of node .*, layers\.0\.attention, models\.py"
    ):
        octavo.compile(tiny("sdpa"), pipeline=mutated(dropped), max_model_len=SETTINGS.max_model_len)
