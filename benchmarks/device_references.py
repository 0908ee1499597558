"""What kernels must compute, in fp64 or fp32 torch on the tensors that they were given, and torch's own for the time.

A reference is registered for an op. It returns the expected tensors by argument name, and a function that does the
same work by torch's own kernels, or None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.codegen.kernel import KernelSpec

Params = Mapping[str, Any]
Held = Mapping[str, Tensor]
Dims = Mapping[str, int]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Largest error over the largest expected value: a rounding to bf16 and sums in another order.
TOLERANCE = 0.01
# Private in torch, and its only FP8 product.
SCALED_MM: Any = vars(torch)["_scaled_mm"]


@dataclass(frozen=True)
class Reference:
    """expected: by argument name; torch_own: the same work by torch, whose name is `how`."""

    expected: Mapping[str, Tensor]
    torch_own: Callable[[], object] | None = None
    how: str = ""


def reference_of(spec: KernelSpec, launches: list[KernelSpec], held: Held, dims: Dims) -> Reference | None:
    """None where no reference is registered for what the spec does."""
    make = REFERENCES.get(spec.op)
    params = {name: value for launch in launches for name, value in launch.params}
    for launch in launches:  # the first of two products is the gated one
        own = dict(launch.params)
        if own.get("gated"):
            params |= {f"gated_{name.lower()}": value for name, value in own.items()}
    return None if make is None else make(params, held, dims)


def worst_error(got: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest expected value; infinite where something is not a number."""
    found = got.reshape(-1)[: expected.numel()].reshape(expected.shape).float()
    if not bool(found.isfinite().all()):
        return float("inf")
    largest = float(expected.abs().max().clamp(min=1e-30))
    return float((found - expected.float()).abs().max()) / largest


def rows_of(tensor: Tensor, *shape: int) -> Tensor:
    """The first elements of a flat tensor in a shape."""
    count = 1
    for size in shape:
        count *= size
    return tensor.reshape(-1)[:count].reshape(shape)


def linear(params: Params, held: Held, dims: Dims) -> Reference:
    n, k, rows = params["N"], params["K"], dims["T"]
    x, w = rows_of(held["x"], rows, k), rows_of(held["weight"], n, k)
    expected = _epilogue(x.float() @ w.float().T, params, held, rows, n)
    if params["dtype"] == "fp8":
        one = torch.ones((), device=x.device)
        own = lambda: SCALED_MM(x, w.T, one, one, out_dtype=torch.bfloat16)  # noqa: E731
        return Reference({"out": expected}, own if rows % 16 == 0 else None, "torch._scaled_mm")
    return Reference({"out": expected}, lambda: F.linear(x, w), "cuBLAS")


def _epilogue(sums: Tensor, params: Params, held: Held, rows: int, n: int) -> Tensor:
    if params.get("alpha"):
        sums = sums * (held["alpha"][0] if params["alpha"] == "scalar" else held["alpha"][:n])
    if params.get("row_scale"):
        sums = sums * held["row_scale"][:rows, None]
    if params.get("bias"):
        sums = sums + held["bias"][:n].float()
    if params.get("residual"):
        sums = sums + rows_of(held["residual"], rows, n).float()
    return sums


def nvfp4_linear(params: Params, held: Held, dims: Dims) -> Reference:
    n, k, rows = params["N"], params["K"], dims["T"]
    w = dequantised(held["weight"], held["weight_scale"], n, k, swizzled=True)
    if "x_scale" in held:
        x = dequantised(held["x"], held["x_scale"], rows, k, swizzled=True)
    else:
        x = rows_of(held["x"], rows, k).float()
    half = w.to(torch.bfloat16), x.to(torch.bfloat16)
    expected = _epilogue(x @ w.T, params, held, rows, n)
    return Reference({"out": expected}, lambda: F.linear(half[1], half[0]), "cuBLAS bf16")


def dequantised(codes: Tensor, scales: Tensor, rows: int, k: int, swizzled: bool) -> Tensor:
    """fp32 values (rows, k) of E2M1 codes and E4M3 scales; swizzled: scales lie in atoms of 128 x 4."""
    raw = rows_of(codes, rows, k // 2)
    table = torch.tensor(E2M1, device=codes.device)
    values = table[torch.stack([raw & 15, raw >> 4], -1).reshape(rows, k).int()]
    blocks, wide = k // 16, -(-k // 64)
    if not swizzled:
        steps = rows_of(scales.view(torch.uint8), rows, blocks)
    else:
        tall = -(-rows // 128)
        atoms = rows_of(scales.view(torch.uint8), tall, wide, 32, 4, 4)
        steps = atoms.permute(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)[:rows, :blocks]
    return values * steps.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=1)


def rms_norm(params: Params, held: Held, dims: Dims) -> Reference | None:
    if params["quantize"]:
        return None
    rows, hidden = dims["T"], params["HIDDEN"]
    x, weight = rows_of(held["x"], rows, hidden), held["weight"][:hidden]
    residual = rows_of(held["residual"], rows, hidden) if params["residual"] else None

    def own() -> Tensor:
        total = x if residual is None else x + residual
        return F.rms_norm(total, (hidden,), weight, params["EPS"])

    total = x if residual is None else x + residual  # rounded, as the kernel does
    wide = total.double()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + params["EPS"])
    y = y * (params["OFFSET"] + weight.double())
    expected = {"out": y} if residual is None else {"out_0": y, "out_1": total}
    return Reference(expected, own, "torch.compile")


def act_mul(params: Params, held: Held, dims: Dims) -> Reference | None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }  # fmt: skip
    if params["activation"] not in functions or "INTERMEDIATE" not in params:
        return None
    function, rows, width = functions[params["activation"]], dims["T"], params["INTERMEDIATE"]
    gate, up = rows_of(held["gate_up"], rows, 2 * width).split(width, dim=1)
    expected = function(gate.double()) * up.double()
    return Reference({"out": expected}, lambda: function(gate) * up, "torch.compile")


def attention(params: Params, held: Held, dims: Dims) -> Reference | None:
    if params["tree"]:
        return None
    requests, each = dims["R"], dims["T"] // dims["R"]
    context = dims["S"] // requests
    heads, kv_heads = params["NUM_HEADS"], params["NUM_KV_HEADS"]
    q = rows_of(held["q"], dims["T"], heads, params["HEAD_DIM"])
    k, v = (_gathered(name, size, params, held, dims, context)
            for name, size in (("k", params["HEAD_DIM"]), ("v", params["VALUE_DIM"])))  # fmt: skip
    row = torch.arange(context - each, context, device=q.device)[:, None]
    column = torch.arange(context, device=q.device)[None, :]
    seen = column <= row
    if params["WINDOW"]:
        seen &= column > row - params["WINDOW"]
    group, expected = heads // kv_heads, []
    for request in range(requests):
        one = q[request * each : (request + 1) * each].float().transpose(0, 1)
        keys, values = (x[request].float().repeat_interleave(group, dim=0) for x in (k, v))
        scores = one @ keys.transpose(1, 2) * params["SCALE"]
        if params["softcap"]:
            scores = params["SOFTCAP"] * torch.tanh(scores / params["SOFTCAP"])
        if params["slopes"]:
            scores = scores + held["slopes"][:heads, None, None] * (column - row)
        scores = scores.masked_fill(~seen, float("-inf"))
        if params.get("sinks"):
            sinks = held["sinks"][:heads, None, None].float().expand(-1, each, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        expected.append((weights @ values).transpose(0, 1))
    own = None
    is_plain = not (params["WINDOW"] or params["softcap"] or params["slopes"] or params.get("sinks"))
    is_same = not params["pages"] and params["HEAD_DIM"] == params["VALUE_DIM"]
    if q.dtype == torch.bfloat16 and is_plain and is_same:
        queries = q.reshape(requests, each, heads, -1).transpose(1, 2)
        own = lambda: F.scaled_dot_product_attention(  # noqa: E731
            queries, k, v, attn_mask=None if each == 1 else seen, scale=params["SCALE"], enable_gqa=group > 1
        )
    return Reference({"out": torch.cat(expected)}, own, "SDPA on gathered keys")


def _gathered(name: str, size: int, params: Params, held: Held, dims: Dims, context: int) -> Tensor:
    """Keys or values (requests, kv heads, context, size) of paged caches."""
    pages, heads, page = dims["num_pages"], params["NUM_KV_HEADS"], params["PAGE_SIZE"]
    cache = held[f"{name}_cache"]
    if params["pages"] == "nvfp4":
        rows = pages * heads * page
        whole = dequantised(cache, held[f"{name}_scales"], rows, size, swizzled=False)
        whole = (whole * held["multipliers"]["kv".index(name)]).reshape(pages, heads, page, size)
    else:
        whole = rows_of(cache, pages, heads, page, size)
        if params["pages"] == "fp8":
            whole = whole.float() * held["multipliers"]["kv".index(name)]
    table = rows_of(held["page_table"], dims["R"], dims["P"]).long()
    gathered = whole[table].transpose(1, 2)  # requests, kv heads, columns, page, size
    return gathered.reshape(dims["R"], heads, -1, size)[:, :, :context].contiguous()


def moe(params: Params, held: Held, dims: Dims) -> Reference | None:
    """Of the plain mixture, whose first launch sorts; activations are rounded to its dtype between the products."""
    needed = {"x", "gate_up", "down", "weights", "experts"}
    is_plain = params.get("gated_activation") == "silu" and not params.get("gated_limited")
    if not needed <= set(held) or any(name.endswith("_bias") for name in held) or not is_plain:
        return None
    experts, tokens = params["NUM_EXPERTS"], dims["T"]
    chosen = held["experts"]
    top_k = chosen.shape[-1]
    width, out = params["gated_n"], params["WIDTH"]
    hidden = params["gated_k"]
    x = rows_of(held["x"], tokens, hidden)
    gate_up = rows_of(held["gate_up"], experts, 2 * width, hidden)
    down = rows_of(held["down"], experts, out, width)
    weights = rows_of(held["weights"], tokens, top_k)
    result = torch.zeros(tokens, out, device=x.device)
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).split(width, dim=1)
        inner = (F.silu(gate) * up).to(x.dtype).float()
        result.index_add_(0, token, weights[token, slot, None] * (inner @ down[expert].float().T))
    return Reference({"out": result})


REFERENCES: dict[str, Callable[[Params, Held, Dims], Reference | None]] = {
    "linear": linear, "nvfp4_linear": nvfp4_linear, "rms_norm": rms_norm, "add_rms_norm": rms_norm,
    "act_mul": act_mul, "paged_attention": attention, "moe": moe,
}  # fmt: skip
