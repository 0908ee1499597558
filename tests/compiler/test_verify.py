"""Proofs: what they see in fp64, bit for bit and over pages, what they cost, and what their errors say."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lowered import LoweredGraph
from models import HEAD_DIM
from stages import BF16, FP32, after
from torch import fx

from octavo.compiler import verify
from octavo.compiler.errors import PassError
from octavo.compiler.verify import Evidence, prove, prove_report, rounding_bound
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
MUL, ADD, NEG = aten.mul.Tensor, aten.add.Tensor, aten.neg.default
Form = Callable[[Any, fx.Node], fx.Node]


def site(before: Form, after: Form, dtype: torch.dtype = FP32, width: int = 8) -> Site:
    """A site of x (1, T, width). Both forms get something with `function`-like calls: (call, x) -> result."""
    g = LoweredGraph()
    x = g.tokens("x", (width,), dtype)
    root = before(g.function, x)
    graph_module = g.finish(root)
    return replace(graph_module, [root], lambda b: [after(b.call, x)], [x])


def norm(eps: float) -> Form:
    def form(call: Any, x: fx.Node) -> fx.Node:
        wide = call(aten._to_copy.default, x, dtype=FP32)
        mean = call(aten.mean.dim, call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
        scaled = call(MUL, wide, call(aten.rsqrt.default, call(ADD, mean, eps)))
        return call(aten._to_copy.default, scaled, dtype=x.meta["val"].dtype)  # type: ignore[no-any-return]

    return form


def failure(broken: Site, exactness: Any = "reassociates") -> str:
    with pytest.raises(PassError) as raised:
        prove_report(PassReport("test", exactness, sites=[broken]), {})
    return str(raised.value)


def test_equal_forms_are_proven_with_their_error_and_bound() -> None:
    report = PassReport("test", "reassociates", sites=[site(norm(1e-5), norm(1e-5))])
    prove_report(report, {})
    assert report.proof.sites == 1
    assert 0 < report.proof.worst <= report.proof.bound < 1e-3


def test_sees_in_fp64_what_bf16_would_hide() -> None:
    wrong = site(norm(1e-5), norm(1.001e-5), BF16)
    narrow = torch.randn(1, 5, 8).bfloat16()
    assert torch.equal(wrong.before(narrow)[0], wrong.after(narrow)[0])  # bf16 itself sees nothing
    assert "(fp64, 5 tokens)" in failure(wrong)


def test_a_lost_eps_shows_on_rows_that_are_small() -> None:
    assert "(fp64" in failure(site(norm(1e-5), norm(0.0), BF16))


def test_rounding_in_the_models_dtype_is_bounded() -> None:
    def rounded(call: Any, x: fx.Node) -> fx.Node:
        x = call(MUL, call(aten._to_copy.default, x, dtype=torch.float16), 1.0)
        return call(aten._to_copy.default, x, dtype=FP32)  # type: ignore[no-any-return]

    prove(site(lambda call, x: call(MUL, x, 1.0), rounded))  # conversions are left out in fp64

    def coarse(call: Any, x: fx.Node) -> fx.Node:
        whole = call(aten._to_copy.default, call(MUL, x, 4.0), dtype=torch.int32)
        return call(aten.div.Tensor, whole, 4.0)  # type: ignore[no-any-return]

    assert "relative error" in failure(site(lambda call, x: call(MUL, x, 1.0), coarse))


def test_bound_grows_with_the_dtype_and_the_length_of_sums() -> None:
    identity: Form = lambda call, x: call(MUL, x, 1.0)  # noqa: E731
    assert rounding_bound(site(identity, identity, BF16)) > 100 * rounding_bound(site(identity, identity))
    wide, slim = (site(identity, identity, width=width) for width in (4096, 8))
    assert rounding_bound(wide) > 10 * rounding_bound(slim)


def test_a_claim_of_every_bit_is_enforced() -> None:
    sums = site(
        lambda call, x: call(ADD, call(MUL, x, 0.1), call(MUL, x, 0.2)),
        lambda call, x: call(MUL, x, 0.1 + 0.2),
    )
    prove_report(PassReport("test", "reassociates", sites=[sums]), {})
    assert "claims to keep every bit" in failure(sums, "bitwise")


def test_evidence_without_the_claim_does_not_serve_the_claim() -> None:
    sums = site(
        lambda call, x: call(ADD, call(MUL, x, 0.1), call(MUL, x, 0.2)),
        lambda call, x: call(MUL, x, 0.1 + 0.2),
    )
    proven: dict[str, Evidence] = {}
    prove_report(PassReport("first", "reassociates", sites=[sums]), proven)
    with pytest.raises(PassError, match="every bit"):
        prove_report(PassReport("second", "bitwise", sites=[sums]), proven)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((NEG,), (aten.sum.dim_IntList, [-1]), "shape (1, 5), expected (1, 5, 8) (fp64, 5 tokens)"),
        ((NEG,), (aten.slice.Tensor, 1, 0, 2), "shape (1, 2, 8), expected (1, 5, 8) (fp64, 5 tokens)"),
        ((aten.gt.Scalar, 0.0), (aten.lt.Scalar, 0.0), "integer results differ"),
        ((NEG,), (MUL, float("nan")), "relative error nan"),
    ],
)
def test_says_what_differs(before: tuple[Any, ...], after: tuple[Any, ...], said: str) -> None:
    def form(target: Any, *rest: Any) -> Form:
        return lambda call, x: call(target, x, *rest)

    assert said in failure(site(form(*before), form(*after)))


def test_a_form_that_does_not_run_is_a_failure() -> None:
    broken = site(
        lambda call, x: call(NEG, x),
        lambda call, x: call(aten.index_select.default, x, 1, call(aten.arange.default, 40)),
    )
    assert "it does not run (RuntimeError: INDICES element is out of DATA bounds" in failure(broken)


def test_error_names_pass_node_module_and_source_line() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (8,), FP32)
    root = g.function(NEG, x)
    root.meta["nn_module_stack"] = {"k": ("layers.3.mlp", torch.nn.Module)}
    root.meta["stack_trace"] = '  File "/home/me/model.py", line 212, in forward\n    y = -x'
    graph_module = g.finish(root)
    wrong = replace(graph_module, [root], lambda b: [b.call(MUL, x, 1.0)], [x])
    with pytest.raises(PassError) as raised:
        prove_report(PassReport("fuse_x", sites=[wrong]), {}, " (after: canonicalize)")
    assert str(raised.value).startswith(
        "fuse_x: the rewrite of node neg_default, layers.3.mlp, model.py:212 is not equal to what it "
        "replaced: relative error "
    )
    assert str(raised.value).endswith("(fp64, 5 tokens) (after: canonicalize)")


def test_equal_sites_are_proven_once() -> None:
    _, report = after("fuse_rms_norm")
    with mock.patch.object(verify, "prove", wraps=prove) as proof:
        proven: dict[str, Evidence] = {}
        prove_report(report, proven)
        assert (report.matched, report.proof.sites, proof.call_count) == (5, 1, 1)
        prove_report(report, proven)
        assert proof.call_count == 1


def paging(change: Callable[[Builder, list[fx.Node], fx.Node], list[fx.Node]]) -> Site:
    """Attention over pages of four tokens, with the write's arguments changed."""
    g = LoweredGraph()
    q, k, v = (g.tokens(name, (2, HEAD_DIM), FP32) for name in "qkv")
    step = {
        name: g.input(name)
        for name in ("positions", "slot_mapping", "page_table", "seq_lens", "cu_seqlens_q")
    }
    caches = [g.cache(f"{kind}_cache_0", 2, 4, HEAD_DIM, FP32) for kind in "kv"]
    root = g.call("attention", q, k, v, None, 0.25)
    graph_module = g.finish(root)

    def build(b: Builder) -> list[fx.Node]:
        arguments = change(b, [k, v, *caches, step["slot_mapping"]], step["seq_lens"])
        b.effect(octavo.kv_write.default, *arguments)
        table = (step["page_table"], step["seq_lens"], step["cu_seqlens_q"])
        return [b.call(octavo.paged_attention.default, q, *caches, *table, None, 0.25)]

    return replace(graph_module, [root], build, [q, k, v])


def test_pages_are_proven_over_ragged_sequences_in_two_steps() -> None:
    evidence = prove(paging(lambda _, arguments, __: arguments))
    assert 0 < evidence.error <= evidence.bound


def test_paging_proof_sees_wrong_slots_and_rows_that_were_never_written() -> None:
    def late(b: Builder, arguments: list[fx.Node], _: fx.Node) -> list[fx.Node]:
        return [*arguments[:4], b.call(ADD, arguments[4], 1)]

    def unwritten(b: Builder, arguments: list[fx.Node], _: fx.Node) -> list[fx.Node]:
        return [*arguments[:4], b.call(MUL, arguments[4], 0)]

    for change in (late, unwritten):
        assert "fp64, paged" in failure(paging(change))


def test_paging_proof_sees_values_of_other_tokens() -> None:
    def rolled(b: Builder, arguments: list[fx.Node], _: fx.Node) -> list[fx.Node]:
        return [b.call(aten.roll.default, arguments[0], [1], [1]), *arguments[1:]]

    assert "fp64, paged" in failure(paging(rolled))


def test_tables_are_proven_row_by_row_bit_for_bit() -> None:
    _, report = after("fold_position_tables")
    prove_report(report, {})
    table = next(s for s in report.sites if s.table is not None)
    wrong = dict(table.constants)
    wrong[str(table.table)] = wrong[str(table.table)].clone()
    wrong[str(table.table)][47, 3] += 1e-6
    broken = Site(
        table.node, table.where, table.before, table.after, table.examples, wrong, "other", table.table
    )
    assert "every bit" in failure(broken)


def test_proofs_run_on_one_thread_and_give_the_others_back() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with mock.patch.object(
            verify, "prove", side_effect=lambda *_, **__: seen.append(torch.get_num_threads())
        ):
            with pytest.raises(AttributeError):  # there is no evidence
                prove_report(PassReport("test", sites=[site(norm(1e-5), norm(1e-5))]), {})
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_roots_are_proven_where_they_are_numbers(sign: float) -> None:
    def before(call: Any, x: fx.Node) -> fx.Node:
        return call(MUL, call(aten.rsqrt.default, x), sign)  # type: ignore[no-any-return]

    def after(call: Any, x: fx.Node) -> fx.Node:
        return call(aten.pow.Tensor_Scalar, x, -0.5)  # type: ignore[no-any-return]

    rewritten = site(before, after)
    if sign == 1.0:
        assert 0.0 <= prove(rewritten).error <= prove(rewritten).bound
    else:
        assert "relative error 2.00e+00" in failure(rewritten)
