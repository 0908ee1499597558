"""Specs of the C++ kernels that quantise and multiply codes, and the order in which those add, in NumPy."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from cpp_kernels import cpp_spec
from lowered import LoweredGraph
from nvfp4 import E2M1
from torch import Tensor

from octavo.codegen.kernel import KernelSpec

Array = np.ndarray[Any, Any]
E4M3 = torch.float8_e4m3fn
LANES = {"avx512_bf16": 16, "avx512": 16, "avx2": 8, "portable": 4}


@cache
def producer(
    op: str, width: int, dtype: torch.dtype, format: str, is_static: bool, layout: str = "linear"
) -> KernelSpec:
    """A kernel that quantises rows of `width` elements. The norms' weight is fp32."""
    graph = LoweredGraph()
    graph.input("input_ids")
    names = ("x", "residual") if op.startswith("add") else ("x",)
    read = 2 * width if op == "act_mul_quantize" else width
    args: list[Any] = [graph.tokens(name, (read,), dtype) for name in names]
    if op == "act_mul_quantize":
        args.append("silu")
    elif op != "quantize":
        args += [graph.weight("w", torch.zeros(width)), 1e-5, 1.0]
    outer = graph.weight("outer", torch.ones(1)) if is_static else None
    return cpp_spec(graph.call(op, *args, outer, format, layout))


@cache
def product(
    op: str, columns: int, length: int, dtype: torch.dtype, is_full: bool, layout: str = "linear"
) -> KernelSpec:
    """A product that writes `dtype`. is_full: an alpha a column, a bias, and row scales where the op has them."""
    graph = LoweredGraph()
    graph.input("input_ids")
    args: list[Any]
    if op == "fp8_linear":
        args = [graph.tokens("x", (length,), E4M3), graph.weight("w", torch.zeros(columns, length).to(E4M3))]
    else:
        codes = graph.weight("w", torch.zeros(columns, length // 2, dtype=torch.uint8))
        scales = graph.weight("s", torch.zeros(columns, length // 16).to(E4M3))
        if op == "nvfp4_linear":
            x = [
                graph.tokens("x", (length // 2,), torch.uint8),
                graph.tokens("x_scale", (length // 16,), E4M3),
            ]
        else:
            x = [graph.tokens("x", (length,), dtype)]
        args = [*x, codes, scales]
    args.append(graph.weight("alpha", torch.zeros(columns if is_full else 1)))
    if op != "nvfp4_weight_linear":
        args.append(graph.tokens("row_scale", (1,), torch.float32) if is_full else None)
    args.append(graph.weight("b", torch.zeros(columns, dtype=dtype)) if is_full else None)
    if op != "nvfp4_weight_linear":
        args.append("fp32" if dtype == torch.float32 else "bf16")
    if op != "fp8_linear":
        args.append(layout)
    node = graph.call(op, *args)
    graph.finish(graph.call("add", node, node))
    return cpp_spec(node)


def e4m3(values: Tensor) -> Array:
    """fp64 values of E4M3 codes."""
    decoded: Array = values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return decoded


def e2m1(packed: Tensor) -> Array:
    """fp64 values (rows, K) of bytes (rows, K / 2)."""
    raw = packed.numpy()
    values: Array = E2M1[np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)]
    return values


def weights(packed: Tensor, scales: Tensor) -> Array:
    """fp64 values of NVFP4 without an outer scale."""
    values: Array = e2m1(packed) * np.repeat(e4m3(scales), 16, axis=1)
    return values


def block_sums(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor]) -> Array:
    """fp64 (M, N, K / 16): what each block adds. All of it fits into fp32."""
    left, right = (e2m1(codes).reshape(len(codes), -1, 16) for codes, _ in (x, w))
    sums: Array = np.einsum("mbk,nbk->mnb", left, right)
    sums = sums * e4m3(x[1])[:, None] * e4m3(w[1])[None]
    assert np.array_equal(sums.astype(np.float32), sums, equal_nan=True)
    return sums


def add_blocks(sums: Array) -> Array:
    """fp32 (M, N): lane j of eight takes block j of each group of eight, in parts of equal numbers of groups."""
    groups = -(-sums.shape[2] // 8)
    parts = -(-groups // 12)
    part = -(-groups // parts)
    padded = np.zeros((*sums.shape[:2], groups * 8), np.float32)
    padded[..., : sums.shape[2]] = sums
    total = np.zeros(sums.shape[:2], np.float32)
    for start in range(0, groups, part):
        lanes = np.zeros((*sums.shape[:2], 8), np.float32)
        for group in range(start, min(start + part, groups)):
            lanes += padded[..., 8 * group : 8 * group + 8]
        a = [lanes[..., j] for j in range(8)]
        total += ((a[0] + a[1]) + (a[4] + a[5])) + ((a[2] + a[3]) + (a[6] + a[7]))
    return total


def add_products(x: Array, w: Array, lanes: int, order: tuple[int, ...]) -> Array:
    """fp32 (M, N): products of fp64 rows, eight elements at a time in `order`, into as many lanes; one part.

    Every product must fit into fp32, so that a fused addition and one after the product are the same.
    """
    length = -(-x.shape[1] // 32) * 32
    left, right = (np.zeros((len(side), length)) for side in (x, w))
    left[:, : x.shape[1]], right[:, : w.shape[1]] = x, w
    index = (np.arange(0, length, 8)[:, None] + np.array(order)).reshape(-1)
    left, right = left[:, index], right[:, index]
    acc = np.zeros((len(x), len(w), lanes), np.float32)
    for k in range(0, length, lanes):
        products = left[:, None, k : k + lanes] * right[None, :, k : k + lanes]
        assert np.array_equal(products.astype(np.float32), products)
        acc = (acc.astype(np.float64) + products).astype(np.float32)
    if lanes == 16:
        acc = acc[..., :8] + acc[..., 8:]
    while acc.shape[2] > 1:
        acc = acc[..., 0::2] + acc[..., 1::2]
    result: Array = acc[..., 0]
    return result


def finish(
    sums: Array, alpha: Tensor, row_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """sums * alpha * row_scale + bias, each step rounded to fp32, the last to dtype."""
    y = sums * alpha.numpy()
    if row_scale is not None:
        y = y * row_scale.numpy()[:, None]
    if bias is not None:
        y = y + bias.float().numpy()
    assert y.dtype == np.float32
    return torch.from_numpy(y).to(dtype)
