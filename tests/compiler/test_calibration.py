"""What calibration says a model's products read, beside what hooks on the model's own modules see."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from models import VOCAB
from stages import BF16, FP32, before, calls, model_of
from torch import Tensor, nn

from octavo.compiler.calibration import calibrate, digest_of
from octavo.compiler.errors import OptionError
from octavo.compiler.observed import Observed
from octavo.passes.rewrite import held

PAGE_SIZE = 4
LENGTHS = (12, 30, 48, 10)
KEPT = 90  # of 100 tokens


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def inputs_of(model: nn.Module, *endings: str) -> dict[str, list[Tensor]]:
    """Positional arguments of the modules whose names end so, over all sequences, as rows."""
    seen: dict[str, list[list[Tensor]]] = defaultdict(list)
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: seen[name].append([value.flatten(0, -2) for value in given])
        )
        for name, module in model.named_modules()
        if name.endswith(endings)
    ]
    with torch.no_grad():
        for sequence in sequences():
            model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return {name: [torch.cat(parts) for parts in zip(*calls, strict=True)] for name, calls in seen.items()}


def assert_seen(observed: Observed, name: str, x: Tensor, kept: int = KEPT, rtol: float = 1e-4) -> None:
    rows, late = (part.double().numpy() for part in (x[:kept], x[kept:]))
    seen = observed.products[name]
    assert seen.rows == kept
    np.testing.assert_allclose(seen.amax, np.abs(rows).max(), rtol=rtol)
    np.testing.assert_allclose(seen.held_out_amax, np.abs(late).max(), rtol=rtol)
    np.testing.assert_allclose(seen.second_moments, (rows**2).mean(0), rtol=rtol)
    if seen.moments is not None:
        wanted = rows.T @ rows / len(rows)
        np.testing.assert_allclose(seen.moments, wanted, atol=rtol * np.abs(wanted).max())
    blocks = np.abs(rows).reshape(len(rows), -1, 16).max(-1)
    for got, q in zip(seen.block_amax, (0.01, 0.5, 0.99), strict=True):
        exact = np.quantile(blocks, q, method="inverted_cdf")
        assert exact * (1 - rtol) <= got <= exact * 1.04


def test_products_are_seen_as_the_model_computes_them() -> None:
    observed = calibrate(before("", "llama"), sequences(), PAGE_SIZE, moments=True)
    seen = inputs_of(model_of("llama"), "q_proj", "o_proj", "gate_proj", "down_proj", "lm_head")
    merged = {name.rpartition("_cat")[0]: name for name in observed.products}
    for module, (x,) in seen.items():
        own = {"q_proj": "q_proj_k_proj_v_proj", "gate_proj": "gate_proj_up_proj"}
        path, _, leaf = module.rpartition(".")
        name = merged[f"{path}.{own[leaf]}"] if leaf in own else f"{module}.weight"
        assert_seen(observed, name, x)
    assert len(seen) == len(observed.products) == 9
    assert observed.tokens == 100


def test_pages_are_seen_as_keys_are_cached() -> None:
    observed = calibrate(before("", "llama"), sequences(), PAGE_SIZE)
    model = model_of("llama")
    with torch.no_grad():
        caches = [model(torch.tensor([s]), use_cache=True).past_key_values for s in sequences()]
    assert list(observed.pages) == [0, 1]
    for number, pages in observed.pages.items():
        k_amax = max(float(cache.layers[number].keys.abs().max()) for cache in caches)
        v_amax = max(float(cache.layers[number].values.abs().max()) for cache in caches)
        np.testing.assert_allclose([pages.k_amax, pages.v_amax], [k_amax, v_amax], rtol=1e-4)


def test_experts_are_seen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.compiler.calibration.STEP_TOKENS", 45)  # three steps
    observed = calibrate(before("", "mixtral"), sequences(), PAGE_SIZE)
    model = model_of("mixtral")
    weights: dict[str, Any] = dict(model.named_parameters())
    seen = inputs_of(model, "mlp.experts")
    assert len(seen) == 2
    for name, (x, experts, _) in seen.items():
        assert_seen(observed, f"{name}.gate_up_proj", x)
        halves = [
            (x[row] @ weights[f"{name}.gate_up_proj"][e].detach().T).chunk(2)
            for row, chosen in enumerate(experts.tolist())
            for e in chosen
        ]
        hidden = torch.stack([torch.nn.functional.silu(gate) * up for gate, up in halves])
        assert_seen(observed, f"{name}.down_proj", hidden, KEPT * experts.shape[1])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_second_run_sees_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.compiler.calibration.STEP_TOKENS", 45)  # three steps
    first, second = (calibrate(before("", "llama", dtype), sequences(), PAGE_SIZE, True) for _ in range(2))
    assert first.digest == second.digest == digest_of(sequences())
    assert first.pages == second.pages
    for name, one in first.products.items():
        other = second.products[name]
        assert (one.amax, one.block_amax, one.held_out_amax) == (
            other.amax,
            other.block_amax,
            other.held_out_amax,
        )
        assert torch.equal(one.second_moments, other.second_moments)
        assert one.moments is not None and other.moments is not None
        assert torch.equal(one.moments, other.moments)


def test_steps_and_dtypes_see_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = calibrate(before("", "llama"), sequences(), PAGE_SIZE, True)
    narrow = calibrate(before("", "llama", BF16), sequences(), PAGE_SIZE)
    monkeypatch.setattr("octavo.compiler.calibration.STEP_TOKENS", 45)
    parts = calibrate(before("", "llama"), sequences(), PAGE_SIZE, True)
    for name, one in whole.products.items():
        other = parts.products[name]
        assert other.rows == one.rows
        np.testing.assert_allclose(other.amax, one.amax, rtol=1e-5)
        np.testing.assert_allclose(other.held_out_amax, one.held_out_amax, rtol=1e-5)
        np.testing.assert_allclose(other.second_moments, one.second_moments, rtol=1e-5)
        assert one.moments is not None and other.moments is not None
        np.testing.assert_allclose(other.moments, one.moments, atol=1e-5 * float(one.moments.max()))
        np.testing.assert_allclose(narrow.products[name].second_moments, one.second_moments, rtol=0.05)


def test_a_weight_of_two_products_counts_both() -> None:
    graph_module = before("", "llama")
    first, second, *_ = calls(graph_module, torch.ops.octavo.linear.default)
    apart = calibrate(before("", "llama"), sequences(), PAGE_SIZE).products
    x, weight = second.args[0], first.args[1]
    with graph_module.graph.inserting_after(second):
        twin = graph_module.graph.call_function(torch.ops.octavo.linear.default, (x, weight))
    twin.meta = dict(first.meta)
    products = calibrate(graph_module, sequences(), PAGE_SIZE).products
    one, other = apart[str(weight.target)], apart[str(second.args[1].target)]  # type: ignore[union-attr]
    both = products[str(weight.target)]  # type: ignore[union-attr]
    assert both.rows == 2 * KEPT and both.amax == max(one.amax, other.amax)
    torch.testing.assert_close(both.second_moments, (one.second_moments + other.second_moments) / 2)
    assert products[str(second.args[1].target)].rows == KEPT  # type: ignore[union-attr]


def test_what_is_not_finite_is_refused_by_name() -> None:
    graph_module = before("", "llama")
    second = calls(graph_module, torch.ops.octavo.linear.default)[1]
    name = str(second.args[1].target)  # type: ignore[union-attr]
    weight = held(graph_module, str(calls(graph_module, torch.ops.octavo.linear.default)[0].args[1].target))  # type: ignore[union-attr]
    kept = weight.clone()
    try:
        weight.data.fill_(float("inf"))
        with pytest.raises(OptionError, match=rf"^calibration: the input of {name} is not finite .*\Z"):
            calibrate(graph_module, sequences(), PAGE_SIZE)
    finally:
        weight.data.copy_(kept)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(OptionError, match="calibration: expected tokens, got none"):
        calibrate(before("", "llama"), [[], []], PAGE_SIZE)


def test_progress_reaches_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.compiler.calibration.STEP_TOKENS", 45)
    shown: list[tuple[str, int, int]] = []
    calibrate(before("", "llama"), sequences(), PAGE_SIZE, progress=lambda *given: shown.append(given))
    assert [done for _, done, _ in shown] == list(range(len(shown)))
    assert {total for _, _, total in shown} == {len(shown)}
    assert shown[1][0].endswith("o_proj.weight")
