"""The order by expert; experts in parallel, all ranks in one process: over the wire to the experts and back."""

from collections.abc import Callable

import nvfp4
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.dispatch_triton import order_spec, pack_spec, unpack_spec, wire_bytes
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe_grouped import Places
from octavo.codegen.moe_permute_triton import permute_specs, placed_sum_spec
from octavo.codegen.specs_triton import in_order
from octavo.compiler.expression import evaluate
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
B200 = load_target("b200")
RANKS, LOCAL, TOP_K, CAPACITY, K = 3, 2, 3, 7, 80
FP8 = torch.float8_e4m3fn


def places_of(experts: Tensor, num_experts: int, tile: int) -> tuple[list[int], list[int]]:
    """Row of every pair, and the expert of every tile, by the book."""
    place = [-1] * experts.numel()
    owners: list[int] = []
    for e in range(num_experts):
        mine = [p for p, x in enumerate(experts.flatten().tolist()) if x == e]
        for i, p in enumerate(mine):
            place[p] = len(owners) * tile + i
        owners += [e] * -(-len(mine) // tile)
    return place, owners


@pytest.mark.parametrize(
    ("experts", "num_experts", "tile"),
    [
        (torch.zeros(0, 2), 5, 16),
        (torch.tensor([[4]]), 5, 128),
        (torch.full((67, 2), 3), 4, 128),
        (torch.tensor([[-1, 2], [7, 0], [9, -5], [1, 6]]), 7, 16),  # some live elsewhere
        (torch.arange(128).remainder(64).view(64, 2), 64, 16),
        (torch.randint(0, 36, (340, 3), generator=torch.Generator().manual_seed(1)) * 2 % 37, 37, 16),
        (torch.randint(-1, 3, (1025, 1), generator=torch.Generator().manual_seed(2)), 3, 64),
        (torch.randint(0, 129, (137, 8), generator=torch.Generator().manual_seed(3)), 131, 128),
    ],
    ids=["none", "one", "one_expert", "elsewhere", "a_chunk", "gaps", "two_blocks", "many"],
)
def test_places_are_those_of_a_stable_sort(
    launch: Launch, experts: Tensor, num_experts: int, tile: int
) -> None:
    places = Places("T", num_experts, experts.shape[1], tile)
    pairs = experts.numel()
    found = {
        "place": poisoned([pairs], "i32"), "tile_expert": poisoned([pairs], "i32"), "num_tiles": poisoned([1], "i32"),
        "counts": poisoned([pairs // 1024 + 1, 256], "i32"),
    }  # fmt: skip
    dims = {"T": experts.shape[0]}
    ran = launch(in_order(*permute_specs(places)), {"experts": experts.long(), **found}, dims)
    assert len(ran) == (1 if pairs <= 1024 else 2)
    place, owners = places_of(experts, num_experts, tile)
    assert found["place"].tolist() == place
    assert found["num_tiles"].tolist() == [len(owners)]
    assert found["tile_expert"][: len(owners)].tolist() == owners
    assert set(found["tile_expert"][len(owners) :].tolist()) <= {-(2**30)}
    assert len(owners) <= evaluate(places.tiles, dims)


def order_by_the_book(experts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens that go to every rank, and for every token its slot at each."""
    order = [
        [t for t, row in enumerate(experts.tolist()) if any(e // LOCAL == rank for e in row)]
        for rank in range(RANKS)
    ]
    back = [
        [rank * CAPACITY + order[rank].index(t) if t in order[rank] else -1 for rank in range(RANKS)]
        for t in range(len(experts))
    ]
    return order, back


def ordered(launch: Launch, experts: Tensor, capacity: int = CAPACITY) -> dict[str, Tensor]:
    found = {
        "order": poisoned([RANKS, capacity], "i32"), "counts": poisoned([RANKS], "i32"),
        "back": poisoned([len(experts), RANKS], "i32"),
    }  # fmt: skip
    spec = order_spec("T", TOP_K, LOCAL, RANKS, capacity)
    launch(spec, {"experts": experts, **found}, {"T": len(experts)})
    return found


@pytest.mark.parametrize("tokens", [0, 1, 5, 7])
def test_order_names_the_tokens_of_every_rank(launch: Launch, tokens: int) -> None:
    experts = torch.rand(tokens, 5).argsort(1)[:, :TOP_K].contiguous()  # none for the last expert
    found = ordered(launch, experts)
    order, back = order_by_the_book(experts)
    assert found["order"].tolist() == [row + [-1] * (CAPACITY - len(row)) for row in order]
    assert found["counts"].tolist() == [len(row) for row in order]
    assert found["back"].tolist() == back


def test_order_of_more_tokens_than_are_read_at_once(launch: Launch) -> None:
    experts = torch.randint(0, 6, (1030, TOP_K))
    found = ordered(launch, experts, 1031)
    for rank in range(RANKS):
        mine = (experts // LOCAL == rank).any(1).nonzero().flatten().tolist()
        assert found["order"][rank].tolist() == mine + [-1] * (1031 - len(mine))


def packed(
    launch: Launch, kind: str, x: Tensor, experts: Tensor, weights: Tensor, outer: float
) -> dict[str, Tensor]:
    found = ordered(launch, experts)
    slots = RANKS * CAPACITY
    found |= {
        "wire": poisoned([slots, wire_bytes(kind, K)], "u8"), "local": poisoned([slots, TOP_K], "i64"),
        "gains": poisoned([slots, TOP_K], "fp32"),
    }  # fmt: skip
    tensors = {"x": x, "experts": experts, "weights": weights, "outer": torch.tensor([outer]), **found}
    launch(pack_spec(kind, K, "bf16", TOP_K, LOCAL, RANKS, CAPACITY, B200), tensors, {"T": len(x)})
    return found


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
def test_rows_travel_as_bytes_with_their_experts_and_weights(launch: Launch, kind: str) -> None:
    experts = torch.rand(6, 5).argsort(1)[:, :TOP_K].contiguous()
    weights, x = torch.rand(6, TOP_K), torch.randn(6, K).bfloat16()
    outer = float(x.abs().max()) / 2688
    found = packed(launch, kind, x, experts, weights, outer)
    order, _ = order_by_the_book(experts)
    codes, scales = nvfp4.quantize(x, outer)
    for slot in range(RANKS * CAPACITY):
        rank, index = slot // CAPACITY, slot % CAPACITY
        row = found["wire"][slot]
        if index >= len(order[rank]):
            assert found["local"][slot].tolist() == [-1] * TOP_K
            assert found["gains"][slot].tolist() == [0.0] * TOP_K
            assert bool((row == 0xFF).all())
            continue
        token = order[rank][index]
        wanted = [e - rank * LOCAL if e // LOCAL == rank else -1 for e in experts[token].tolist()]
        assert found["local"][slot].tolist() == wanted
        assert torch.equal(found["gains"][slot], weights[token])
        if kind == "nvfp4":
            assert torch.equal(row[: K // 2], codes[token])
            assert torch.equal(row[K // 2 : K // 2 + K // 16], scales[token].view(torch.uint8))
        elif kind == "fp8":
            scale = row[K : K + 4].view(torch.float32)
            assert float(scale) == pytest.approx(float(x[token].abs().max()) / 448, rel=1e-6)
            value = (x[token].double() / scale.double()).to(FP8)
            assert torch.equal(row[:K], value.view(torch.uint8))
        else:
            assert torch.equal(row.view(torch.bfloat16), x[token])


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
def test_what_two_ranks_send_comes_to_the_experts_and_back(launch: Launch, kind: str) -> None:
    """An expert doubles its row and adds its number: every token gets its weighted sum over all ranks."""
    steps = []
    for tokens in (5, 7):
        experts = torch.rand(tokens, RANKS * LOCAL).argsort(1)[:, :TOP_K].contiguous()
        x, weights = torch.randn(tokens, K).bfloat16(), torch.rand(tokens, TOP_K)
        steps.append((x, experts, weights, packed(launch, kind, x, experts, weights, 0.001)))
    answers = [torch.full((RANKS * CAPACITY, K), float("nan"), dtype=torch.bfloat16) for _ in steps]
    for rank in range(RANKS):
        mine = slice(rank * CAPACITY, (rank + 1) * CAPACITY)
        arrived = {
            name: torch.cat([sent[name][mine] for *_, sent in steps]) for name in ("wire", "local", "gains")
        }
        for source, part in enumerate(served(launch, kind, rank, arrived).chunk(2)):
            answers[source][mine] = part
    for (x, experts, weights, sent), answer in zip(steps, answers, strict=True):
        out, shared = poisoned([len(x), K], "bf16"), torch.randn(len(x), K).bfloat16()
        spec = placed_sum_spec("T", RANKS, K, "bf16", "bf16", weighted=False, shared=True)
        tensors = {"parts": answer, "place": sent["back"], "shared": shared, "out": out}
        launch(spec, tensors, {"T": len(x)})
        wide = carried(x, kind)[:, None] * 2 + experts[:, :, None]
        expected = shared.double() + (weights.double()[:, :, None] * wide).sum(1)
        assert float((out.double() - expected).abs().max() / wide.abs().max()) < 0.01


def carried(x: Tensor, kind: str) -> Tensor:
    """What is left of the rows after the wire."""
    if kind == "nvfp4":
        return nvfp4.dequantize(*nvfp4.quantize(x, 0.001), 0.001)
    if kind == "fp8":
        scale = x.float().abs().amax(1, keepdim=True) / 448
        return (x.double() / scale.double()).to(FP8).double() * scale.double()
    return x.double()


def served(launch: Launch, kind: str, rank: int, arrived: dict[str, Tensor]) -> Tensor:
    """What a rank sends back: for each slot that arrived the weighted sum over its experts there."""
    slots, dims = len(arrived["wire"]), {"T": len(arrived["wire"])}
    places = Places("T", LOCAL, TOP_K, 16)
    place, rows = poisoned([slots, TOP_K], "i32"), (slots * TOP_K // 16 + LOCAL) * 16
    tables = {
        "place": place, "tile_expert": poisoned([slots * TOP_K], "i32"), "num_tiles": poisoned([1], "i32"),
        "counts": poisoned([1, 32], "i32"),
    }  # fmt: skip
    launch(in_order(*permute_specs(places)), {"experts": arrived["local"], **tables}, dims)
    values = rows_of(launch, kind, arrived["wire"], place, rows)
    owners = tables["tile_expert"].repeat_interleave(16)[:rows].double()
    parts = (values * 2 + (owners + rank * LOCAL)[:rows, None]).bfloat16()
    out = poisoned([slots, K], "bf16")
    spec = placed_sum_spec("T", TOP_K, K, "bf16", "bf16")
    launch(spec, {"parts": parts, "place": place, "weights": arrived["gains"], "out": out}, dims)
    return out


def rows_of(launch: Launch, kind: str, wire: Tensor, place: Tensor, rows: int) -> Tensor:
    """(rows, K) values in the order by expert; those that no token has are nan, or what poison stands for."""
    if kind == "bf16":
        values = torch.full((rows, K), float("nan"), dtype=torch.float64)
        for slot, places in enumerate(place.tolist()):
            values[[p for p in places if p >= 0]] = wire[slot].view(torch.bfloat16).double()
        return values
    is_fp4 = kind == "nvfp4"
    codes = poisoned([rows, K // 2 if is_fp4 else K], "u8" if is_fp4 else "fp8")
    scales = poisoned([-(-rows // 128) * 2 * 512] if is_fp4 else [rows], "fp8" if is_fp4 else "fp32")
    spec = unpack_spec(kind, K, TOP_K, len(wire))
    launch(spec, {"wire": wire, "place": place, "rows": codes, "rows_scale": scales}, {})
    if is_fp4:
        return nvfp4.dequantize(codes, nvfp4.unswizzle(scales, rows, K // 16), 0.001)
    return codes.double() * scales[:, None].double()
