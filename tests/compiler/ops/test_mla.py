"""Latent attention: each form against sums written out head by head, and over pages against the whole sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.compiler import ops  # noqa: F401  (registers the dialect)
from octavo.compiler.fresh_inputs import Chunk, step_inputs

octavo = torch.ops.octavo
HEADS, NOPE, ROPE, RANK, VALUE = 3, 4, 2, 8, 5
SCALE = 0.37


def inputs(length: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(length)
    shapes = {
        "q_nope": (1, length, HEADS, NOPE), "q_rope": (1, length, HEADS, ROPE), "latent": (1, length, RANK),
        "k_rope": (1, length, ROPE), "w_uk": (HEADS * NOPE, RANK), "w_uv": (HEADS * VALUE, RANK),
    }  # fmt: skip
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def by_head(given: dict[str, Tensor], window: int = 0, softcap: float = 0.0) -> Tensor:
    """The sums as the paper writes them, one query and head at a time."""
    wide = {name: value.double() for name, value in given.items()}
    w_uk, w_uv = wide["w_uk"].view(HEADS, NOPE, RANK), wide["w_uv"].view(HEADS, VALUE, RANK)
    length = wide["latent"].shape[1]
    out = torch.zeros(1, length, HEADS, VALUE, dtype=torch.float64)
    for t in range(length):
        seen = range(max(0, t - window + 1) if window else 0, t + 1)
        for h in range(HEADS):
            scores = torch.stack(
                [
                    wide["q_nope"][0, t, h] @ (w_uk[h] @ wide["latent"][0, j])
                    + wide["q_rope"][0, t, h] @ wide["k_rope"][0, j]
                    for j in seen
                ]
            )
            scores = scores * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            values = torch.stack([w_uv[h] @ wide["latent"][0, j] for j in seen])
            out[0, t, h] = scores.softmax(0) @ values
    return out


def absorbed(given: dict[str, Tensor], *options: Any) -> Tensor:
    """The absorbed form with its two products."""
    w_uk, w_uv = (given[name].unflatten(0, (HEADS, -1)) for name in ("w_uk", "w_uv"))
    q_latent = octavo.head_linear(given["q_nope"], w_uk.transpose(1, 2))
    mixed = octavo.latent_attention(
        q_latent, given["q_rope"], given["latent"], given["k_rope"], SCALE, *options
    )
    return octavo.head_linear(mixed, w_uv)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 1.5), (2, 0.7)])
def test_both_forms_match_the_sums(window: int, softcap: float) -> None:
    given = inputs(7)
    expected = by_head(given, window, softcap)
    expanded = octavo.mla_attention(*given.values(), SCALE, True, window, softcap)
    assert expanded.shape == (1, 7, HEADS, VALUE)
    torch.testing.assert_close(expanded, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(absorbed(given, True, window, softcap), expected, rtol=0, atol=1e-13)


def test_not_causal_sees_later_tokens() -> None:
    given = inputs(5)
    later = octavo.mla_attention(*given.values(), SCALE, False)
    torch.testing.assert_close(later, absorbed(given, False), rtol=0, atol=1e-13)
    assert not torch.allclose(later[:, 0], by_head(given)[:, 0])


def test_bf16_is_rounded_only_between_the_steps() -> None:
    given = inputs(6, torch.bfloat16)
    result = absorbed(given)
    assert result.dtype is torch.bfloat16
    expected = by_head(given)
    # q_latent, the mixed latents and the result are rounded once each.
    assert ((result.double() - expected).abs() <= 4 * 2.0**-8 * expected.abs().max()).all()


def test_pages_hold_what_the_sequences_hold() -> None:
    """Two sequences in two steps over shuffled pages whose other rows are NaN."""
    given, other = inputs(9), inputs(6)
    expected = [
        octavo.latent_attention(
            g["latent"].unsqueeze(2).expand(-1, -1, HEADS, -1), *rest(g), SCALE, True, 4, 0.9
        )
        for g in (given, other)
    ]
    cache = torch.full((9, 1, 4, RANK + ROPE), float("nan"), dtype=torch.float64)
    parts: list[list[Tensor]] = [[], []]
    for chunks in ([Chunk(0, 0, 5), Chunk(1, 0, 5)], [Chunk(0, 5, 4), Chunk(1, 5, 1)]):
        step = step_inputs(chunks, 4, 2, torch.Generator().manual_seed(3), 16)
        joined = {
            name: torch.cat(
                [(given, other)[c.request][name][:, c.start : c.start + c.length] for c in chunks], 1
            )
            for name in ("q_rope", "latent", "k_rope")
        }
        octavo.latent_write(joined["latent"], joined["k_rope"], cache, step.tensors["slot_mapping"])
        query = joined["latent"].unsqueeze(2).expand(-1, -1, HEADS, -1)
        table = (step.tensors[name] for name in ("page_table", "seq_lens", "cu_seqlens_q"))
        out = octavo.paged_mla_attention(query, joined["q_rope"], cache, *table, SCALE, 4, 0.9)
        for request, part in enumerate(out.split([c.length for c in chunks], 1)):
            parts[request].append(part)
    for wanted, got in zip(expected, parts, strict=True):
        torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=0, atol=1e-13)


def rest(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return given["q_rope"], given["latent"], given["k_rope"]


def test_write_skips_negative_slots_and_touches_nothing_else() -> None:
    given = inputs(3)
    cache = torch.full((2, 1, 4, RANK + ROPE), 7.0, dtype=torch.float64)
    octavo.latent_write(given["latent"], given["k_rope"], cache, torch.tensor([6, -1, 0]))
    rows = cache.view(8, RANK + ROPE)
    assert torch.equal(rows[6], torch.cat((given["latent"][0, 0], given["k_rope"][0, 0])))
    assert torch.equal(rows[0], torch.cat((given["latent"][0, 2], given["k_rope"][0, 2])))
    assert (rows[[1, 2, 3, 4, 5, 7]] == 7.0).all()
