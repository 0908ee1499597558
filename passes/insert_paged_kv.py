"""octavo.attention  ->  octavo.kv_write and octavo.paged_attention; octavo.latent_attention  ->  octavo.latent_write
and octavo.paged_mla_attention.

The graph gets the step's inputs and one pair of caches a layer, one cache where it holds latents. Afterwards a step
holds the tokens of any number of sequences. The logits are wanted of some rows only, so the gather goes in front of
the last matrix product. Not matched: attention that is not causal (Kwon et al. 2023).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.compiler.program import FEATURES
from octavo.passes.lower_elementwise import BINARY, UNARY
from octavo.passes.pattern import Match, Var, arguments, call
from octavo.passes.rewrite import (
    Builder,
    Site,
    collect,
    fake_mode,
    placeholder,
    replace,
    symbolic_tensor,
)
from octavo.passes.rule import PassReport, Rule, apply_rule

octavo = torch.ops.octavo
ATTENTION_ARGS = ("q", "k", "v", "sinks", "scale", "causal", "window", "softcap", "slopes")
LATENT_ARGS = ("q_latent", "q_rope", "latent", "k_rope", "scale", "causal", "window", "softcap")
ATTENTIONS: dict[Any, tuple[str, ...]] = {
    octavo.attention.default: ATTENTION_ARGS,
    octavo.latent_attention.default: LATENT_ARGS,
}
DEFAULTS: dict[str, Any] = {"causal": True, "window": 0, "softcap": 0.0, "slopes": None}
# Sizes differ from each other so that no two symbols are taken for one.
INTEGER_INPUTS = {"page_table": (3, 5), "seq_lens": (3,), "cu_seqlens_q": (4,)}


def insert_paged_kv(graph_module: GraphModule, page_size: int) -> PassReport:
    """page_size in tokens. Adds placeholders: those of program.STEP_INPUTS, then k_cache_0, v_cache_0, ...

    A layer with latents has no v_cache: its one cache, k_cache_i, holds a latent and a rotated key part a token.
    """
    report = PassReport("insert_paged_kv", "reassociates")
    if all(n.name != "position_ids" for n in graph_module.graph.find_nodes(op="placeholder")):
        return report
    attentions = [n for n in graph_module.graph.nodes if n.target in ATTENTIONS]
    inputs = _add_step_inputs(graph_module)
    caches = [_add_caches(graph_module, i, node, page_size) for i, node in enumerate(attentions)]
    for node, own in zip(attentions, caches, strict=True):
        _page(graph_module, node, own, inputs, report)
    _gather(graph_module, inputs["logit_rows"], report)
    return report


def _add_step_inputs(graph_module: GraphModule) -> dict[str, Node]:
    """New placeholders after input_ids; position_ids is called positions from here on."""
    placeholders = {n.name: n for n in graph_module.graph.nodes if n.op == "placeholder"}
    old = placeholders["position_ids"]
    tokens = old.meta["val"].shape[1]
    mode = fake_mode(graph_module)
    with mode:
        slots = torch.empty((tokens,), dtype=torch.int64)
    inputs = {
        "positions": placeholder(graph_module, "positions", old.meta["val"], after=placeholders["input_ids"])
    }
    old.replace_all_uses_with(inputs["positions"])
    graph_module.graph.erase_node(old)
    last = inputs["positions"]
    values = {
        "slot_mapping": slots,
        **{n: symbolic_tensor(mode, n, s, torch.int32) for n, s in INTEGER_INPUTS.items()},
    }
    values["logit_rows"] = symbolic_tensor(mode, "logit_rows", (2,), torch.int64)
    for name, value in values.items():
        inputs[name] = last = placeholder(graph_module, name, value, after=last)
    return inputs


def _add_caches(graph_module: GraphModule, index: int, node: Node, page_size: int) -> list[Node]:
    values = _values(node)
    if "latent" in values:
        latent, k_rope = values["latent"].meta["val"], values["k_rope"].meta["val"]
        shapes = {"k": (1, latent.shape[2] + k_rope.shape[2])}
    else:
        shapes = {name: tuple(values[name].meta["val"].shape[2:]) for name in "kv"}
    dtype = values["latent" if "latent" in values else "k"].meta["val"].dtype
    caches = []
    for kind, (heads, width) in shapes.items():
        name = f"{kind}_cache_{index}"
        last = [n for n in graph_module.graph.nodes if n.op == "placeholder"][-1]
        sizes = (4, heads, page_size, width)
        cache = symbolic_tensor(fake_mode(graph_module), name, sizes, dtype, static=(1, 2, 3))
        caches.append(placeholder(graph_module, name, cache, after=last))
    return caches


def _values(node: Node) -> dict[str, Any]:
    """Arguments of an attention by name."""
    return {**DEFAULTS, **dict(zip(ATTENTIONS[node.target], node.args, strict=False))}


def _page(
    graph_module: GraphModule, node: Node, caches: list[Node], inputs: dict[str, Node], report: PassReport
) -> None:
    values = _values(node)
    if not values["causal"]:
        report.reject(node, "attention is not causal: later tokens would change the pages of earlier ones")
        return
    step = (inputs["page_table"], inputs["seq_lens"], inputs["cu_seqlens_q"])
    options = (values["scale"], values["window"], values["softcap"])

    def build(b: Builder) -> list[Node]:
        if "latent" in values:
            written, queries = (values["latent"], values["k_rope"]), (values["q_latent"], values["q_rope"])
            b.effect(octavo.latent_write.default, *written, *caches, inputs["slot_mapping"])
            return [b.call(octavo.paged_mla_attention.default, *queries, *caches, *step, *options)]
        b.effect(octavo.kv_write.default, values["k"], values["v"], *caches, inputs["slot_mapping"])
        bias = () if values["slopes"] is None else (values["slopes"],)
        rest = (values["sinks"], *options, *bias)
        return [b.call(octavo.paged_attention.default, values["q"], *caches, *step, *rest)]

    report.sites.append(replace(graph_module, [node], build, node.all_input_nodes))


SINK_GATHER = Rule(
    "sink_gather_logits",
    call(
        octavo.gather_logits.default,
        args=(call(octavo.linear.default, args=(Var("x"), Var("w"))), Var("rows")),
    ),
    lambda build, found: _sunk(build, found),
    ("x", "w", "rows"),
)


def _sunk(build: Builder, found: Match) -> Node:
    linear = found.root.args[0]
    assert isinstance(linear, Node)
    rows = build.call(octavo.gather_logits.default, found["x"], found["rows"])
    return build.call(octavo.linear.default, rows, *linear.args[1:])


def _gather(graph_module: GraphModule, logit_rows: Node, report: PassReport) -> None:
    """Logits of the wanted rows only, computed from the hidden states of those rows."""
    output = graph_module.graph.output_node()
    (results,) = arguments(output)
    logits = results[0]
    assert isinstance(logits, Node)
    with graph_module.graph.inserting_before(output):
        gathered = Builder(graph_module, logits).call(octavo.gather_logits.default, logits, logit_rows)
    output.args = ((gathered, *results[1:]),)
    leaves, inner = collect([logits], [])
    inputs = [leaf for leaf in leaves if leaf.op == "placeholder"]
    if len(results) == 1 and [leaf.name for leaf in inputs] == [FEATURES]:
        report.sites.append(_gather_first(graph_module, gathered, inputs[0], inner))
        return
    apply_rule(SINK_GATHER, graph_module, _below_arithmetic(graph_module, gathered, report), report)


def _gather_first(graph_module: GraphModule, gathered: Node, features: Node, inner: Sequence[Node]) -> Site:
    """Rows of a head without attention stand for themselves: only the wanted ones are computed at all."""
    logits, rows = arguments(gathered)

    def build(b: Builder) -> list[Node]:
        values = {features: b.call(octavo.gather_logits.default, features, rows)}
        for node in inner:
            assert callable(node.target)
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: values.get(n, n))
            values[node] = b.call(node.target, *args, **kwargs)
        return [values[logits]]

    return replace(graph_module, [gathered], build, [features, rows])


def _below_arithmetic(graph_module: GraphModule, gathered: Node, report: PassReport) -> Node:
    """Move the gather in front of what is done to each logit (soft-caps, multipliers); returns it there."""
    chain: list[Node] = []
    value, rows = arguments(gathered)
    while _is_arithmetic(value):
        chain.insert(0, value)
        value = value.args[0]
    if not chain:
        return gathered
    made: list[Node] = []

    def build(b: Builder) -> list[Node]:
        made.append(b.call(octavo.gather_logits.default, value, rows))
        result = made[0]
        for node in chain:
            assert callable(node.target)
            result = b.call(node.target, result, *node.args[1:], **node.kwargs)
        return [result]

    constants = [n for node in chain for n in node.all_input_nodes[1:]]
    report.sites.append(replace(graph_module, [gathered], build, [value, rows, *constants]))
    return made[0]


def _is_arithmetic(node: Node) -> bool:
    """One tensor of logits in, a tensor of that shape out; other operands are numbers or single constants."""
    if node.target not in (*BINARY, *UNARY) or node.args[0] not in node.all_input_nodes:
        return False
    rest = [n for n in node.all_input_nodes if n is not node.args[0]]
    same = node.args[0].meta["val"].shape == node.meta["val"].shape  # type: ignore[union-attr]
    return same and all(n.op == "get_attr" and n.meta["val"].numel() == 1 for n in rest)
