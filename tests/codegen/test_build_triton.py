"""Ahead-of-time builds for b200 without a GPU, and what happens to kernels that must not ship."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.codegen import build_triton
from octavo.codegen.attention_triton import Attention, attention_spec
from octavo.codegen.build_triton import build_kernels
from octavo.codegen.evidence import evidence_row
from octavo.codegen.kernel import Kernel, KernelSpec, Param
from octavo.codegen.linear_triton import Product, few_rows_form, linear_tma_spec, many_rows_spec, with_param
from octavo.codegen.render import render
from octavo.codegen.specs_triton import Heads, add_spec, layer_norm_spec, pointwise_spec, rms_norm_spec
from octavo.compiler.errors import CodegenError
from octavo.compiler.pointwise import FUNCTIONS
from octavo.compiler.target import load_target

B200 = load_target("b200")
PRODUCT = Product("T", 576, 576, "bf16", "bf16", bias=False)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def numbers(spec: KernelSpec, **values: Param) -> KernelSpec:
    """The spec with other tile numbers and nothing to fall back on."""
    for name, value in values.items():
        spec = with_param(spec, name, value)
    return alone(replace(spec, alternatives=(), also=()))


def alone(spec: KernelSpec) -> KernelSpec:
    """The spec in its first form only."""
    return replace(spec, candidates=())


def build(spec: KernelSpec) -> Kernel:
    return build_kernels([spec], B200)[0]


def test_kernels_of_a_linear_and_an_attention_keep_every_limit() -> None:
    attention = attention_spec(Attention(Heads(9, 3, 64, 64, 64), "bf16", 0.125), B200)
    specs = [alone(spec) for spec in (*linear_tma_spec(PRODUCT, B200).launches, *attention.launches)]
    calls: list[tuple[str, int, int]] = []
    kernels = build_kernels(specs, B200, lambda *call: calls.append(call))
    assert [kernel.spec for kernel in kernels] == specs
    assert calls == [(spec.name, done, len(specs)) for done, spec in enumerate(specs, start=1)]
    for kernel in kernels:
        row = evidence_row(kernel)
        assert kernel.binary is not None and kernel.binary.startswith(b"\x7fELF")
        assert row["spill_bytes"] == 0
        assert kernel.metadata["evidence"]["ptx_target"] == "sm_100a"
        assert kernel.metadata["launch"]["cubin_sha256"] == hashlib.sha256(kernel.binary).hexdigest()
    opcodes = {kernel.spec.name: str(evidence_row(kernel)["key_opcodes"]) for kernel in kernels}
    assert all("UTCHMMA" in opcodes[spec.name] for spec in (specs[2], specs[5]))
    assert "UTMALDG" in opcodes[specs[0].name]


def test_kernels_of_rows_build_without_spills() -> None:
    operands = {"a": ("bf16", "rows"), "b": ("fp32", "column"), "c": ("bf16", "vector")}
    every = " + ".join(f"{name}(a)" for name in FUNCTIONS) + " - b * c"
    specs = [
        layer_norm_spec("T", 4096, "bf16", 1e-5, {"weight": "bf16", "bias": "bf16"}),
        layer_norm_spec("T", 1000, "fp32", 1e-5, {}),
        pointwise_spec("T", 4096, operands, every, "bf16"),
        pointwise_spec("T", 7, operands, "20.0 * tanh(a / 20.0)", "fp32"),
    ]
    for kernel in build_kernels(specs, B200):
        row = evidence_row(kernel)
        assert kernel.binary is not None and kernel.binary.startswith(b"\x7fELF")
        assert (row["spill_bytes"], row["refused"]) == (0, 0)


def test_launch_record_says_how_to_call_the_kernel() -> None:
    spec = alone(replace(many_rows_spec(PRODUCT, B200), when="T > 64"))
    launch = build(spec).metadata["launch"]
    x, weight, out, rows = launch["parameters"]
    assert launch["function"] == spec.name
    assert launch["num_warps"] > spec.num_warps  # warp specialisation adds some
    assert launch["global_scratch"] == [0, 1]
    assert launch["constexprs"]["BLOCK_M"] == 128
    assert (x["kind"], x["dtype"], x["box"], x["shape"]) == ("descriptor", 9, [128, 64], ["T", 576])
    assert (weight["element_bytes"], weight["swizzle"], weight["shape"]) == (2, 3, [576, 576])
    assert out["block"] == [128, 64]
    assert rows == {"name": "M", "kind": "scalar", "type": "i32", "divisible_by_16": False}


def test_pointers_and_divisible_sizes_are_read_in_wide_pieces() -> None:
    census = build(add_spec("T", 576, "bf16")).metadata["evidence"]["census"]
    assert any(opcode.startswith("LDG.E.128") for opcode in census)
    odd = build(add_spec("T", 7, "bf16")).metadata["evidence"]["census"]
    assert not any(opcode.startswith("LDG.E.128") for opcode in odd)


def test_a_kernel_that_spills_is_refused() -> None:
    spec = replace(rms_norm_spec("T", 8192, "fp32", 1e-5, 0.0, residual=False), num_warps=1)
    with pytest.raises(
        CodegenError, match=r"no form of rms_norm.* b200 .*spilled bytes: at most 0, got \d{2,}"
    ):
        build(spec)


def test_a_kernel_that_needs_too_much_shared_memory_is_refused() -> None:
    product = replace(PRODUCT, n=32768, k=4096)
    spec = numbers(linear_tma_spec(product, B200), STAGES=14)
    with pytest.raises(CodegenError, match=r"shared-memory bytes: at most 232448, got \d+"):
        build(replace(spec, num_stages=14))


def test_a_kernel_that_needs_too_much_tensor_memory_is_refused() -> None:
    spec = numbers(many_rows_spec(PRODUCT, B200), BLOCK_N=256, warp_specialize=False)
    wide = tuple(replace(arg, block=(256, 64)) if arg.name == "weight" else arg for arg in spec.args)
    wide = tuple(replace(arg, block=(128, 128)) if arg.name == "out" else arg for arg in wide)
    spec = numbers(replace(spec, args=wide), BLOCK_M=128)
    with pytest.raises(CodegenError, match=r"tensor-memory columns: at most 128, got \d+"):
        build_kernels([spec], replace(B200, tmem_columns=128))


def test_a_large_product_that_misses_the_tensor_core_is_refused() -> None:
    spec = numbers(many_rows_spec(PRODUCT, B200), BLOCK_M=32, warp_specialize=False)
    args = tuple(replace(arg, block=(32, 64)) if arg.name in ("x", "out") else arg for arg in spec.args)
    with pytest.raises(CodegenError, match=r"instructions: expected mma_16bit \(UTCHMMA\), got .*HMMA"):
        build(replace(spec, args=args))


def test_the_next_form_is_taken_and_the_reason_kept() -> None:
    good = rms_norm_spec("T", 8192, "fp32", 1e-5, 0.0, residual=False)
    kernel = build(replace(good, num_warps=1, alternatives=(good,)))
    assert kernel.spec == good  # the program calls what was built
    assert kernel.metadata["launch"]["function"] == good.name
    assert f"num_warps={good.num_warps}" in kernel.metadata["choice"]["numbers"]
    (refused,) = kernel.metadata["choice"]["refused"]
    assert "spilled bytes" in refused["reasons"][0]
    assert evidence_row(kernel)["refused"] == 1


def test_a_text_that_does_not_compile_names_the_kernel() -> None:
    spec = numbers(add_spec("T", 576, "bf16"), BLOCK=1000)
    with pytest.raises(CodegenError, match=rf"(?s){spec.name} .*does not compile: .*power of 2"):
        build(spec)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos.write(2, b'Assertion x failed\\n')\nos.abort()", "with code -6: Assertion x failed"),
        ("import time\ntime.sleep(60)", "did not compile within 3 s"),
    ],
)
def test_a_compiler_that_aborts_or_hangs_costs_one_kernel(
    monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    bad, good = numbers(add_spec("T", 48, "bf16"), BLOCK=512), add_spec("T", 576, "bf16")
    monkeypatch.setattr(build_triton, "render", lambda spec: source if spec == bad else render(spec))
    with pytest.raises(CodegenError, match=message):
        build_kernels([bad, good], B200, timeout_s=3.0)
    assert build_kernels([good], B200)[0].binary


def test_a_second_build_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = add_spec("T", 576, "bf16")
    first = build(spec)

    def refuse(worker: build_triton._Worker) -> None:
        raise AssertionError("started a compiler")

    monkeypatch.setattr(build_triton._Worker, "_start", refuse)
    assert build(spec) == first
    with pytest.raises(AssertionError, match="started a compiler"):
        build(numbers(spec, BLOCK=512))


def test_a_damaged_cache_entry_is_built_again(tmp_path: Path) -> None:
    spec = add_spec("T", 576, "bf16")
    first = build(spec)
    (cubin,) = (tmp_path / "cache").rglob("kernel.cubin")
    cubin.write_bytes(cubin.read_bytes()[:-1])
    assert build(spec).binary == first.binary


def test_a_target_without_an_arch_is_refused() -> None:
    with pytest.raises(CodegenError, match="b200 names no arch"):
        build_kernels([add_spec("T", 576, "bf16")], replace(B200, arch=None))


def test_the_form_with_the_shortest_predicted_time_is_chosen_and_the_others_are_noted() -> None:
    """16 tall tiles would leave most multiprocessors idle; the first form listed is not the best then."""
    product = replace(PRODUCT, n=2048, k=4096)
    tall, short = (few_rows_form(product, 16, block_n) for block_n in (128, 32))
    too_deep = replace(numbers(short, STAGES=40), num_stages=40)
    first = replace(tall, when="T <= 16", candidates=(short, too_deep))
    same_name = replace(first, when="T <= 8")
    kernel, again = build_kernels([first, same_name], B200)
    assert (kernel.spec.name, kernel.spec.grid, kernel.spec.when) == (short.name, short.grid, "T <= 16")
    assert (again.spec, again.form) == (replace(kernel.spec, when="T <= 8"), 1)
    assert kernel.metadata["launch"]["function"] == short.name
    choice = kernel.metadata["choice"]
    (loser,), (dropped,) = choice["losers"], choice["dropped"]
    (kept,) = kernel.losers
    assert (kept.spec.name, kept.binary is not None) == (tall.name, True)
    assert loser["name"] == tall.name and loser["predicted_us"] > 1.03 * choice["predicted_us"]
    assert dropped["name"] == too_deep.name and "shared-memory" in str(dropped["refused"])


def test_forms_that_are_about_as_fast_leave_the_first() -> None:
    product = replace(PRODUCT, n=28672, k=4096)
    tall, short = (few_rows_form(product, 16, block_n) for block_n in (128, 64))
    for first, second in ((tall, short), (short, tall)):
        kernel = build(replace(first, when="T <= 16", candidates=(second,)))
        assert (kernel.spec.name, kernel.form) == (first.name, 0)
        (loser,) = kernel.metadata["choice"]["losers"]
        assert loser["predicted_us"] == pytest.approx(kernel.metadata["choice"]["predicted_us"], rel=0.03)


def test_a_kernel_of_which_no_form_builds_names_what_each_broke() -> None:
    product = replace(PRODUCT, n=32768, k=4096)
    deep = [replace(numbers(few_rows_form(product, 16, n), STAGES=40), num_stages=40) for n in (64, 128)]
    with pytest.raises(CodegenError, match=r"(?s)no form of .*BLOCK_N=64 .*BLOCK_N=128 .*shared-memory"):
        build(replace(deep[0], candidates=(deep[1],)))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 1, 256), (4, 4, 80), (71, 1, 64)], ids=str)
def test_attention_of_every_shape_has_a_form_that_builds(
    heads: tuple[int, int, int], dtype: str, page_size: int
) -> None:
    shape = Heads(*heads, heads[2], page_size)
    plain = Attention(shape, dtype, 0.1)
    for attention in (plain, replace(plain, window=1024, softcap=50.0, sinks=True)):
        build_kernels(attention_spec(attention, B200).launches, B200)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "out_dtype"), [(6144, 4096, "bf16"), (49152, 576, "fp32"), (28672, 8192, "bf16")]
)
def test_linear_of_every_size_has_a_form_that_builds(n: int, k: int, out_dtype: str, bias: bool) -> None:
    product = Product("T", n, k, "bf16", out_dtype, bias)
    for kernel in build_kernels(linear_tma_spec(product, B200).launches, B200):
        assert evidence_row(kernel)["refused"] == 0
