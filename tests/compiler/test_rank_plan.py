"""Plans of ranks: every figure by hand for a tiny DeepSeek-V3, and destinations of tokens by trying all draws."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

import octavo
from octavo.compiler.errors import OptionError
from octavo.compiler.options import Parallel, QuantConfig
from octavo.compiler.plan_plot import draw_plans
from octavo.compiler.rank_plan import Routing, chance_of_any, spread_of
from octavo.compiler.report import Report, as_text, plan_table

MESHES = (
    Parallel(),
    Parallel(ep=4, dp=4, wire="nvfp4"),
    Parallel(ep=3, dp=3, wire="fp8", redundant_experts=2),
    Parallel(ep=4, tp=2, dp=2),
    Parallel(ep=4),
)
LENGTH = 4096


def tiny() -> torch.nn.Module:
    """Two layers, the first dense; 16 experts of width 64 in 4 groups, 4 for a token out of the best 2 groups."""
    config = DeepseekV3Config(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, q_lora_rank=64,
        kv_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, vocab_size=256,
        first_k_dense_replace=1, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


@pytest.fixture(scope="module")
def report() -> Report:
    return octavo.check(
        tiny(),
        "b200",
        max_model_len=LENGTH,
        quantize=QuantConfig("nvfp4", kv="fp8"),
        parallel=MESHES,
        progress=False,
    )


@pytest.fixture(scope="module")
def plans(report: Any) -> dict[Parallel, dict[str, Any]]:
    return dict(zip(MESHES, report.data["plans"], strict=True))


def nvfp4(rows: int, length: int) -> int:
    """Codes, two a byte; block scales in tiles of 128 rows by 4 blocks of 16 elements."""
    blocks = length // 16
    return rows * length // 2 + -(-rows // 128) * 128 * (-(-blocks // 4) * 4)


EXPERT = (
    nvfp4(2 * 64, 128) + nvfp4(128, 64) + 4 * 4
)  # alphas of gate, up and down, outer scale of the hidden state
SHARED = nvfp4(2 * 64, 128) + nvfp4(128, 64) + 2 * 4
DENSE = nvfp4(2 * 256, 128) + nvfp4(128, 256) + 2 * 4
ATTENTION = (
    2 * (64 + 64) * 128  # makes the latent and the rotated key: stays bf16
    + nvfp4(64, 128) + 4  # q_a
    + 2 * (nvfp4(4 * 64, 64) + 4)  # q_b, its plain and its rotated half
    + 2 * (2 * 4 * 64 * 64)  # the two halves of kv_b, by heads: bf16
    + nvfp4(128, 4 * 64) + 4  # o
)  # fmt: skip
# Norms of hidden, hidden and two latents a layer, and the last; tables of cos and sin; routers in fp32 with biases;
# multipliers of pages; one outer scale that inputs of linears share.
OTHER = 2 * (2 * (2 * 128 + 2 * 64) + 128) + 2 * 2 * LENGTH * 64 + 4 * (16 * 128 + 16) + 2 * 4 + 4


def test_weights_by_hand(plans: dict[Parallel, dict[str, Any]]) -> None:
    assert EXPERT == 13_840 and ATTENTION == 140_304
    whole = {
        "experts": 16 * EXPERT + 4, "attention": 2 * ATTENTION, "FFNs": DENSE + SHARED,
        "embeddings and logits": 2 * 2 * 256 * 128, "other": OTHER,
    }  # fmt: skip
    one, four, three, cut, added = (plans[mesh]["weights"] for mesh in MESHES)
    assert one == whole
    tables = {"other": OTHER + 8 * 16}
    assert four == added == whole | tables | {"experts": 4 * EXPERT + 4}
    assert three == whole | tables | {"experts": 6 * EXPERT + 4}
    # tp halves what makes the logits, both halves of q_b, from one tile of 128 rows to the next, and of kv_b.
    q_b, kv_b = 2 * (nvfp4(256, 64) - nvfp4(128, 64)), 2 * (2 * 2 * 64 * 64)
    halved = {"embeddings and logits": 2 * 256 * 128 + 256 * 128, "attention": 2 * (ATTENTION - q_b - kv_b)}
    assert cut == four | halved


def test_places_of_experts(plans: dict[Parallel, dict[str, Any]]) -> None:
    assert [plans[mesh]["experts"] for mesh in MESHES] == [
        (16, 16, 0), (16, 4, 0), (16, 6, 2), (16, 4, 0), (16, 4, 0),
    ]  # fmt: skip
    assert [plans[mesh]["ranks"] for mesh in MESHES] == [1, 4, 3, 4, 4]


def test_room_for_keys_and_values(plans: dict[Parallel, dict[str, Any]]) -> None:
    """A latent and a rotated key of 64 bytes each in two layers; pages of 64 tokens, nine tenths of the rest."""
    for plan in plans.values():
        assert plan["kv_token_bytes"] == 2 * (64 + 64) and plan["fits"]
        assert plan["used"] == sum(plan["weights"].values()) + plan["workspace"] + plan["logits"]
        rest = 192_000_000_000 - plan["used"]
        assert plan["kv_tokens"] == rest * 9 // 10 // 256 // 64 * 64
    assert {plan["logits"] for plan in plans.values()} == {64 * 256 * 4}
    # Rows of all ranks along dp come to where the experts are.
    workspace = [plans[mesh]["workspace"] for mesh in (Parallel(ep=4), Parallel(ep=4, tp=2, dp=2), MESHES[1])]
    assert workspace == sorted(workspace) and workspace[0] + 4 * 2048 * 128 * 2 < workspace[2]


def sent(plan: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, ...]]:
    """(how many, bytes of a row, other ranks that it goes to)."""
    return {
        (one["kernel"], one["axis"]): (one["count"], one["row_bytes"], one["destinations"])
        for one in plan["exchanges"]
    }


def test_the_wire_by_hand(plans: dict[Parallel, dict[str, Any]]) -> None:
    """Each slot has an id and a weight beside the row, each row of FP8 a scale of its own.

    Four ranks hold a group each. Two groups of four experts are left, of which four are drawn: a rank of these gets
    none in one case of 70. Three of four ranks are others.
    """
    others = 3 / 4 * 4 / 2 * 69 / 70
    found = {mesh: sent(plans[mesh]) for mesh in MESHES}
    assert found[MESHES[0]] == {}
    assert found[MESHES[1]] == {
        ("dispatch", "dp"): (1, 64 + 8 + 4 * 8, pytest.approx(others)),
        ("combine", "dp"): (1, 2 * 128, pytest.approx(others)),
    }
    assert found[MESHES[2]]["dispatch", "dp"][:2] == (1, 128 + 4 * 8 + 4)
    # Two columns of two ranks: a third of what was sent before goes along dp, and the columns are added up.
    assert found[MESHES[3]] == {
        ("dispatch", "dp"): (1, 2 * 128 + 4 * 8, pytest.approx(others / 3)),
        ("combine", "dp"): (1, 2 * 128, pytest.approx(others / 3)),
        ("all_reduce", "tp"): (1, 2 * 128, 1.0),
        ("all_gather", "tp"): (1, 2 * 128, 1.0),
    }
    assert found[MESHES[4]] == {("all_reduce", "ep"): (1, 2 * 128, 1.5)}
    for plan in plans.values():
        assert all(one["sent"] == one["row_bytes"] * one["destinations"] for one in plan["exchanges"])


def tried(owners: list[list[int]], own: list[int], routing: Routing) -> tuple[float, int]:
    """Every set of groups and every draw of experts from them, one by one."""
    size, counts = routing.experts // routing.groups, []
    for table, here in zip(owners, own, strict=True):
        for groups in itertools.combinations(range(routing.groups), routing.top_groups):
            allowed = [e for e in range(routing.experts) if e // size in groups]
            for drawn in itertools.combinations(allowed, routing.top_k):
                counts.append(len({table[e] for e in drawn} - {here, -1}))
    return sum(counts) / len(counts), max(counts)


@pytest.mark.parametrize(
    ("owners", "routing"),
    [
        ([[0, 0, 1, 1, 2, 2]] * 3, Routing(6, 2)),
        ([[0, 0, 0, 1, 1, 2]] * 3, Routing(6, 3, 2, 1)),
        ([[0, 1, 0, 1, 2, 2, 0, 2], [1, 1, 0, 1, 2, 2, 0, 2], [0, 1, 0, 2, 2, 2, 0, 2]], Routing(8, 3, 4, 2)),
        ([[0, 0, -1, -1, 1, 1, -1, -1]] * 2, Routing(8, 3)),
    ],
    ids=["even", "uneven", "replicas", "columns"],
)
def test_destinations_by_trying_all_draws(owners: list[list[int]], routing: Routing) -> None:
    own = list(range(len(owners)))
    average, most = spread_of(tuple(map(tuple, owners)), tuple(own), routing)
    wanted, largest = tried(owners, own, routing)
    assert average == pytest.approx(wanted, rel=1e-12) and most == largest


def test_chances() -> None:
    assert chance_of_any(0, 5, 3) == 0 and chance_of_any(3, 5, 3) == 1
    assert chance_of_any(1, 5, 3) == pytest.approx(3 / 5)


def test_the_table(report: Any) -> None:
    lines = as_text(plan_table(report.data["plans"]), width=200).splitlines()
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    rows = {name.strip(): [cell.strip() for cell in row] for name, *row in cells}
    assert lines[1].split() == "a rank one rank ep 4, dp 4 ep 3, dp 3, 2 more ep 4, tp 2, dp 2 ep 4".split()
    assert rows["experts a layer"] == ["16 of 16", "4 of 16", "6 of 16", "4 of 16", "4 of 16"]
    assert rows["KV bytes a token"] == ["256"] * len(MESHES)
    assert rows["fits 192.0 GB"] == ["yes"] * len(MESHES)
    assert rows["dispatch, dp: bytes sent a token"] == ["-", "154", "281", "142", "-"]
    assert rows["all_reduce, ep: bytes sent a token"] == ["-"] * 4 + ["384"]
    assert rows["collectives a step"] == ["0", "2", "2", "6", "1"]  # with tp, heads are gathered for o
    assert "plan:" in str(report)


def test_the_picture(report: Any, tmp_path: Any) -> None:
    rows = report.data["plans"]
    names = [str(i) for i in range(len(rows))]
    draw_plans(tmp_path / "plan.svg", rows, names, "tiny")
    text = (tmp_path / "plan.svg").read_text()
    assert all(word in text for word in ("experts", "room for KV", "dispatch", "all_reduce"))
    with pytest.raises(OptionError, match=r"expected a name that ends in \.svg or \.png"):
        draw_plans(tmp_path / "plan.pdf", rows, names, "tiny")
    with pytest.raises(OptionError, match="expected plans, got none"):
        draw_plans(tmp_path / "plan.svg", [], [], "tiny")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": [Parallel(ep=3, tp=2)]}, "ep must be a multiple of tp"),
        ({"quantize": "auto", "parallel": Parallel()}, "mode 'auto' chooses formats by what weights do"),
        ({"target": "h100", "quantize": "nvfp4"}, "expected a mode that h100 has kernels for"),
    ],
)
def test_what_cannot_be_planned_is_said_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        octavo.check(torch.nn.Linear(1, 1), **{"target": "b200", **options})


@pytest.mark.slow
def test_deepseek_v3_at_its_size() -> None:
    """256 experts and 32 copies over 72 ranks are 4 each, in 58 of 61 layers. Two minutes of a core, 1.6 GiB."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(), dtype=torch.bfloat16)
    mesh = Parallel(ep=72, dp=72, redundant_experts=32, wire="nvfp4")
    quantize = QuantConfig("nvfp4", kv="fp8")
    report = octavo.check(
        model, "b200", max_model_len=LENGTH, quantize=quantize, parallel=mesh, progress=False
    )
    (plan,) = report.data["plans"]
    assert plan["experts"] == (256, 4, 32)
    expert = nvfp4(2 * 2048, 7168) + nvfp4(7168, 2048) + 4 * 4
    assert plan["weights"]["experts"] == 58 * (4 * expert + 4)
    assert plan["weights"]["embeddings and logits"] == 2 * 2 * 129_280 * 7168
    assert plan["kv_token_bytes"] == 61 * (512 + 64)
    assert plan["fits"] and plan["used"] < 50e9
    assert [(one["kernel"], one["count"], one["row_bytes"], one["most"]) for one in plan["exchanges"]] == [
        ("dispatch", 58, 4032 + 8 * 8, 8), ("combine", 58, 2 * 7168, 8),
    ]  # fmt: skip
