"""Sampling kernels: what is refused, what a spec says, and real builds for b200 at one vocabulary."""

from pathlib import Path

import pytest

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.evidence import evidence_row
from octavo.codegen.sampling_triton import MAX_VOCAB, argmax_spec, sample_spec, vocabulary_refusal
from octavo.codegen.speculative_triton import CORNERS, Chains, greedy_spec, verify_spec
from octavo.compiler.expression import evaluate
from octavo.compiler.target import load_target

B200 = load_target("b200")


def test_weights_of_a_vocabulary_stay_below_the_largest_number() -> None:
    assert MAX_VOCAB * 2**45 < 2**63
    assert vocabulary_refusal(MAX_VOCAB) is None
    assert vocabulary_refusal(MAX_VOCAB + 1) is not None and vocabulary_refusal(0) is not None
    with pytest.raises(AssertionError, match="the host draws"):
        sample_spec(MAX_VOCAB + 1, philox=True)


def test_parts_of_a_row_hold_whole_tiles_and_all_of_it() -> None:
    dims = {"L": 3, "R": 2}
    for vocab in (1, 4096, 4097, 128256):
        part, _ = argmax_spec(vocab, "fp32", B200).launches
        numbers = dict(part.params)
        tiles = -(-vocab // int(numbers["BLOCK"]))
        assert int(numbers["SPLITS"]) <= tiles
        assert evaluate(part.iterations, dims) >= 3 * tiles
    verify, draw = verify_spec(Chains(128256, 4, sampled=True), B200).launches
    assert evaluate(verify.bytes, dims) > 2 * 2 * 128256 * 4 > evaluate(draw.bytes, dims)


def test_arguments_of_given_numbers_and_of_keys() -> None:
    names = [
        [arg.name for arg in spec.args]
        for spec in verify_spec(Chains(64, 1, False, philox=False), B200).launches
    ]
    assert "accept_point" in names[0] and "draw_point" in names[1] and "key" not in names[0]
    assert "draft_logits" not in names[0]


def test_kernels_build_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    specs = [*verify_spec(Chains(129280, 1, sampled=True), B200).launches, greedy_spec(8)]
    for kernel in build_kernels([*specs, *argmax_spec(128256, "bf16", B200).launches], B200):
        row = evidence_row(kernel)
        assert (row["spill_bytes"], row["refused"]) == (0, 0)


def test_corners_hold_every_length_of_chain_from_1_to_8() -> None:
    drafts = {dict(spec.params)["BLOCK_K"] for corner in CORNERS for spec in corner.make(B200).launches}
    assert {2, 4, 8, 16} <= drafts
