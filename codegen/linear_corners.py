"""Corners of matrix products: the shapes of Llama-3-8B and DeepSeek-V3, and the edges of what each kernel takes."""

from dataclasses import replace
from typing import Any

from octavo.codegen.corner import Corner
from octavo.codegen.linear_triton import Product, linear_pointer_spec, linear_tma_spec, tma_refusal
from octavo.codegen.nvfp4_triton import Nvfp4Product, nvfp4_linear_spec, nvfp4_refusal
from octavo.compiler.target import Target

# (n, k) of qkv, o, gate and up, down
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# q_a and kv_a, q_b, o, gate and up of a dense layer
DEEPSEEK = ((2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168))
LOGITS: dict[str, Any] = {"n": 128256, "k": 4096, "rows": "L", "out_dtype": "fp32"}
BLOCK_SCALED = Nvfp4Product("T", 0, 0, "nvfp4", "bf16")
WEIGHT_ONLY = replace(BLOCK_SCALED, x_dtype="bf16")
FP8 = Product("T", 0, 0, "fp8", "bf16", bias=False, alpha="column", row_scale=True)
BF16 = Product("T", 0, 0, "bf16", "bf16", bias=False)
EVERYTHING: dict[str, Any] = {"out_dtype": "fp32", "alpha": "column", "bias": "bf16", "residual": True}


def _nvfp4(product: Nvfp4Product, note: str = "") -> Corner:
    kind = "nvfp4_linear" if product.is_quantized else f"nvfp4_weight_only {product.x_dtype}"
    return Corner(
        " ".join(filter(None, (kind, f"{product.n} x {product.k} {product.out_dtype}", note))),
        lambda target: nvfp4_linear_spec(product, target),
        lambda target: nvfp4_refusal(product, target),
    )


def _plain(product: Product, note: str = "") -> Corner:
    return Corner(
        " ".join(
            filter(None, (f"{product.dtype}_linear {product.n} x {product.k} {product.out_dtype}", note))
        ),
        lambda target: linear_tma_spec(product, target),
        lambda target: tma_refusal(product, target),
    )


def _pointer(product: Product) -> Corner:
    name = f"{product.dtype}_linear_pointer {product.n} x {product.k} {product.out_dtype}"
    return Corner(name, lambda target: linear_pointer_spec(product), lambda target: _no_fp8(product, target))


def _no_fp8(product: Product, target: Target) -> str | None:
    if product.dtype == "fp8" and (target.arch or 0) < 89:
        return f"sm_{target.arch} has no FP8; dequantise the weights to bf16"
    return None


CORNERS: tuple[Corner, ...] = (
    *(_nvfp4(replace(BLOCK_SCALED, n=n, k=k)) for n, k in (*LLAMA, *DEEPSEEK)),
    _nvfp4(replace(BLOCK_SCALED, **LOGITS)),
    _nvfp4(replace(BLOCK_SCALED, n=6144, k=4096, alpha="column", row_scale=True), "column alpha, row scale"),
    _nvfp4(replace(BLOCK_SCALED, n=1032, k=576, row_scale=True, **EVERYTHING), "everything"),
    _nvfp4(replace(BLOCK_SCALED, n=1032, k=7168, row_scale=True, **EVERYTHING), "everything, split"),
    _nvfp4(replace(BLOCK_SCALED, n=8, k=64)),
    *(_nvfp4(replace(WEIGHT_ONLY, n=n, k=k)) for n, k in (*LLAMA[1:3], *DEEPSEEK[:2])),
    _nvfp4(replace(WEIGHT_ONLY, **LOGITS)),
    _nvfp4(replace(WEIGHT_ONLY, n=1001, k=576, **EVERYTHING), "everything"),
    _nvfp4(replace(WEIGHT_ONLY, n=1001, k=7168, **EVERYTHING), "everything, split"),
    _nvfp4(replace(WEIGHT_ONLY, n=1, k=64)),
    _nvfp4(replace(WEIGHT_ONLY, n=6144, k=4096, x_dtype="fp16", alpha="column")),
    *(_plain(replace(FP8, n=n, k=k)) for n, k in (*LLAMA[:2], *DEEPSEEK[2:])),
    _plain(replace(FP8, **LOGITS)),
    _plain(replace(FP8, n=264, k=400, bias=True, alpha="scalar", row_scale=False), "bias, one scale"),
    _plain(replace(FP8, n=1024, k=576, bias=True, out_dtype="fp32"), "bias"),
    _plain(replace(FP8, n=16, k=16)),
    _pointer(replace(FP8, n=257, k=101, bias=True)),
    *(_plain(replace(BF16, n=n, k=k)) for n, k in (*LLAMA[1:], *DEEPSEEK[:1])),
    _plain(replace(BF16, **LOGITS)),
    _plain(replace(BF16, n=960, k=576, bias=True), "bias"),
    _plain(replace(BF16, n=8, k=8, out_dtype="fp32")),
    _pointer(replace(BF16, n=257, k=100, bias=True)),
    _pointer(Product("T", 576, 1536, "fp32", "fp32", bias=True)),
)
