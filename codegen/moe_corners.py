"""Corners of the kernels of mixtures of experts: layers that models have, and edges of what the templates take."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from octavo.codegen.corner import Corner, never
from octavo.codegen.dispatch_triton import order_spec, pack_spec, unpack_spec
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe import Mixture, Numbering, Router
from octavo.codegen.moe_grouped import FEW_TILE, MANY_TILE, WEIGHT_ONLY_TILE, Experts, Places, Unit
from octavo.codegen.moe_nvfp4_triton import refuse_nvfp4
from octavo.codegen.moe_permute_triton import permute_specs, placed_sum_spec, quantize_rows_spec
from octavo.codegen.moe_quantized_triton import product_spec, products
from octavo.codegen.moe_triton import map_spec, moe_spec, router_spec
from octavo.codegen.specs_triton import in_order
from octavo.compiler.target import Target

OAI = Unit(7.0, 1.702, 1.0)
DEEPSEEK = Experts("T", "bf16", 256, 8, 7168, 2048, shared=True)
LAYERS = {
    "deepseek": DEEPSEEK,
    "qwen": Experts("T", "bf16", 128, 8, 2048, 768),
    "gpt-oss": Experts("T", "bf16", 32, 4, 2880, 2880, OAI, "bf16"),
    "tiny": Experts("T", "fp32", 3, 1, 64, 64, Unit(1.0), "fp32", shared=True),
}
TILES = {"nvfp4": MANY_TILE, "fp8": MANY_TILE, "weight_only": WEIGHT_ONLY_TILE}
MIXTURES = {
    "deepseek": Mixture("T", "bf16", "", "", 256, 8, 7168, 2048, 7168, "silu", 0.0, 0.0),
    "qwen": Mixture("T", "bf16", "", "", 128, 8, 2048, 768, 2048, "silu", 0.0, 0.0),
    "gpt-oss": Mixture("T", "bf16", "bf16", "bf16", 32, 4, 2880, 2880, 2880, "swiglu_oai", 7.0, 1.702),
    "fp32": Mixture("T", "fp32", "fp32", "fp32", 5, 2, 264, 136, 264, "gelu", 0.0, 0.0),
}
ROUTERS = {
    "256 experts, 8 of the best 4 groups of 8": Router(
        "T", "bf16", "fp32", 256, 8, "sigmoid", True, 8, 4, "top2_sum", 2.5
    ),
    "128 experts, 8": Router("T", "bf16", "", 128, 8, "softmax", True, 1, 1, "", 1.0),
    "32 experts, 4": Router("T", "bf16", "bf16", 32, 4, "softmax_selected", False, 1, 1, "", 1.0),
    "8 experts, 2": Router("T", "fp32", "", 8, 2, "softmax", True, 1, 1, "", 1.0),
    "1 expert": Router("T", "fp32", "", 1, 1, "sigmoid", False, 1, 1, "", 1.0),
    "4096 experts, 16": Router("T", "bf16", "", 4096, 16, "softmax", True, 1, 1, "", 1.0),
}


def _products(layer: Experts, scheme: str, tile: int, target: Target) -> KernelSpec:
    places = Places("T", layer.experts, layer.top_k, tile)
    return in_order(*(product_spec(product, scheme, target) for product in products(layer, places, scheme)))


def _grouped() -> Iterator[Corner]:
    """Both products of every layer, with tall tiles and with short ones; FP8 as it is quantised, by row."""
    for scheme, tall in TILES.items():
        refuse = refuse_nvfp4 if scheme == "nvfp4" else never
        for name, one in LAYERS.items():
            layer = replace(one, by_row=scheme == "fp8" and name != "tiny")
            for word, tile in (("many", tall), ("few", FEW_TILE)):
                yield Corner(f"moe {scheme} {word} {name}", partial(_products, layer, scheme, tile), refuse)


def _order(layer: Experts, target: Target) -> KernelSpec:
    """What puts rows into the order by expert, of every kind, and the sum behind the products."""
    places = Places("T", layer.experts, layer.top_k, MANY_TILE)
    rows = [
        quantize_rows_spec(places, kind, layer.hidden, layer.dtype, "x", "rows", target)
        for kind in ("nvfp4", "fp8", "fp16")
    ]
    hidden = quantize_rows_spec(
        places, "fp8", layer.intermediate, "bf16", "wide", "rows", target, in_order=True
    )
    total = placed_sum_spec("T", layer.top_k, layer.hidden, layer.dtype, "bf16", shared=layer.shared)
    return in_order(*permute_specs(places), *rows, hidden, total)


def _parallel(k: int, experts: int, top_k: int, ranks: int, capacity: int, target: Target) -> KernelSpec:
    """What a rank sends and receives, of every kind of row."""
    local, slots = experts // ranks, ranks * capacity
    packs = [
        pack_spec(kind, k, "bf16", top_k, local, ranks, capacity, target) for kind in ("nvfp4", "fp8", "bf16")
    ]
    unpacks = [unpack_spec(kind, k, top_k, slots) for kind in ("nvfp4", "fp8")]
    back = placed_sum_spec("T", ranks, k, "bf16", "bf16", weighted=False, shared=True)
    return in_order(order_spec("T", top_k, local, ranks, capacity), *packs, *unpacks, back)


def _mixture(mixture: Mixture, target: Target) -> KernelSpec:
    return moe_spec(mixture, is_tma=mixture.dtype == "bf16")


def _router(router: Router, target: Target) -> KernelSpec:
    return router_spec(router)


def _numbers(target: Target) -> KernelSpec:
    return in_order(map_spec(Numbering("T * 8", 256)), map_spec(Numbering("T * 1", 1)))


CORNERS: tuple[Corner, ...] = (
    *_grouped(),
    *(Corner(f"moe order {name}", partial(_order, layer)) for name, layer in LAYERS.items()),
    Corner("moe parallel k7168, 8 ranks", partial(_parallel, 7168, 256, 8, 8, 128)),
    Corner("moe parallel k2880, 2 ranks", partial(_parallel, 2880, 32, 4, 2, 4096)),
    *(Corner(f"moe sorted {name}", partial(_mixture, mixture)) for name, mixture in MIXTURES.items()),
    Corner("moe numbers of experts", _numbers),
    *(Corner(f"router {name}", partial(_router, router)) for name, router in ROUTERS.items()),
)
