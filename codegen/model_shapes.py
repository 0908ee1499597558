"""Published sizes of models, and the set of kernels that each needs at a precision: no weights, no graph, no torch."""

from dataclasses import dataclass, replace

from octavo.codegen.attention_triton import Attention, attention_spec
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.kv_quantize_triton import rope_kv_write_quantize_spec
from octavo.codegen.linear_triton import Product, linear_tma_spec
from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.mla_triton import head_linear_spec, latent_write_spec, mla_spec
from octavo.codegen.moe import Mixture, Router
from octavo.codegen.moe_grouped import Experts, Unit
from octavo.codegen.moe_quantized_triton import experts_spec
from octavo.codegen.moe_triton import moe_spec, router_spec
from octavo.codegen.norm_quantize_triton import act_mul_quantize_spec, rms_norm_quantize_spec
from octavo.codegen.nvfp4_triton import Nvfp4Product, nvfp4_linear_spec
from octavo.codegen.quantize_triton import Quantization, quantize_spec
from octavo.codegen.sampling_triton import argmax_spec
from octavo.codegen.specs_triton import (
    Heads,
    act_mul_spec,
    gather_rows_spec,
    rms_norm_spec,
    rope_kv_write_spec,
    rope_spec,
)
from octavo.compiler.target import Target

EPS = 1e-5
SWIGLU = Unit()
PRECISIONS = ("bf16", "fp8", "nvfp4")


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: widths of the compressed queries and latents, and the parts of a head."""

    q_rank: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True)
class MixtureShape:
    """Experts of a layer. shared: intermediate size of the expert that every token takes, 0 without."""

    experts: int
    top_k: int
    intermediate: int
    shared: int = 0
    scoring: str = "softmax_selected"
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    biased: bool = False
    unit: Unit = SWIGLU


@dataclass(frozen=True)
class ModelShape:
    """intermediate: of the dense layers, 0 without any. windows: of the layers' attentions, 0 being none."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int = 0
    windows: tuple[int, ...] = (0,)
    sinks: bool = False
    biased: bool = False
    latent: LatentShape | None = None
    mixture: MixtureShape | None = None


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", 4096, 32, 32, 8, 128, 128256, 14336),
        ModelShape(
            "deepseek-v3", 7168, 61, 128, 128, 192, 129280, 18432,
            latent=LatentShape(1536, 512, 64, 128, 128),
            mixture=MixtureShape(256, 8, 2048, 2048, "sigmoid", 8, 4, 2.5),
        ),
        ModelShape(
            "gpt-oss-20b", 2880, 24, 64, 8, 64, 201088, windows=(128, 0), sinks=True, biased=True,
            mixture=MixtureShape(32, 4, 2880, biased=True, unit=Unit(7.0, 1.702, 1.0)),
        ),
    )
}  # fmt: skip


def kernel_set(shape: ModelShape, precision: str, target: Target, page_size: int) -> list[KernelSpec]:
    """Every distinct kernel of a step of the model, launch by launch.

    precision  of weights and of the rows that meet them: "bf16", "fp8" (rows have scales of their own) or "nvfp4"
               (rows have one static scale; where the arch has no FP4 tensor core, only weights are NVFP4). Embeddings,
               logits, routers and the products inside latent attention stay bf16; quantised models have FP8 pages.
    """
    layer = _Layer(shape, precision, target, page_size)
    specs = [
        gather_rows_spec("embedding", "ids", "weight", "T", shape.hidden, "bf16"),
        layer.norm(shape.hidden, residual=False),
        *(layer.latent_attention() if shape.latent else layer.attention()),
        layer.norm(shape.hidden, residual=True),
        *(layer.dense(shape.intermediate) if shape.intermediate else []),
        *(layer.experts() if shape.mixture else []),
        rms_norm_spec("T", shape.hidden, "bf16", EPS, 0.0, residual=True),
        gather_rows_spec("gather_logits", "logit_rows", "hidden", "L", shape.hidden, "bf16"),
        linear_tma_spec(Product("L", shape.vocab, shape.hidden, "bf16", "fp32", bias=False), target),
        argmax_spec(shape.vocab, "fp32", target),
    ]
    launches = [replace(launch, also=()) for spec in specs for launch in spec.launches]
    return list({launch.name: launch for launch in launches}.values())


@dataclass(frozen=True)
class _Layer:
    """Kernels of a layer at one precision on one target."""

    shape: ModelShape
    precision: str
    target: Target
    page_size: int

    @property
    def quantization(self) -> Quantization | None:
        """How rows are quantised before a product; None where they stay bf16."""
        if self.precision == "fp8":
            return Quantization("fp8", by_token=True)
        has_fp4 = self.precision == "nvfp4" and "nvfp4" in self.target.flops
        return Quantization("nvfp4") if has_fp4 else None

    @property
    def pages(self) -> str:
        return "" if self.precision == "bf16" else "fp8"

    def norm(self, width: int, residual: bool) -> KernelSpec:
        if self.quantization is None:
            return rms_norm_spec("T", width, "bf16", EPS, 0.0, residual)
        return rms_norm_quantize_spec("T", width, "bf16", EPS, 0.0, residual, self.quantization, self.target)

    def linear(self, n: int, k: int) -> KernelSpec:
        """Several weights in one (qkv, gate and up) are quantised as one, and so have one outer scale."""
        biased = self.shape.biased
        if self.precision == "bf16":
            return linear_tma_spec(Product("T", n, k, "bf16", "bf16", biased), self.target)
        if self.precision == "fp8":
            product = Product("T", n, k, "fp8", "bf16", biased, alpha="column", row_scale=True)
            return linear_tma_spec(product, self.target)
        x_dtype = "bf16" if self.quantization is None else "nvfp4"
        bias = "bf16" if biased else ""
        return nvfp4_linear_spec(Nvfp4Product("T", n, k, x_dtype, "bf16", bias=bias), self.target)

    def quantized(self, width: int) -> list[KernelSpec]:
        """The kernel that quantises rows which no norm or unit makes, such as those of an attention."""
        if self.quantization is None:
            return []
        return [quantize_spec("T", width, "bf16", self.quantization, self.target)]

    def attention(self) -> list[KernelSpec]:
        shape, target, pages = self.shape, self.target, self.pages
        size = shape.head_dim
        heads = Heads(shape.heads, shape.kv_heads, size, size, self.page_size)
        if pages:
            write = rope_kv_write_quantize_spec("T", heads, size, "bf16", False, pages, target)
        else:
            write = rope_kv_write_spec("T", heads, size, "bf16", False)
        layers = [
            Attention(heads, "bf16", size**-0.5, window=window, sinks=shape.sinks, pages=pages)
            for window in shape.windows
        ]
        return [
            self.linear((shape.heads + 2 * shape.kv_heads) * size, shape.hidden),
            write,
            *(attention_spec(layer, target) for layer in layers),
            *self.quantized(shape.heads * size),
            self.linear(shape.hidden, shape.heads * size),
        ]

    def latent_attention(self) -> list[KernelSpec]:
        """With the up-projections of keys and values absorbed into queries and results."""
        shape, part = self.shape, self.shape.latent
        assert part is not None
        heads, width = shape.heads, part.nope_dim + part.rope_dim
        latents = Latents(heads, part.rank, part.rope_dim, self.page_size, "bf16", "bf16", width**-0.5)
        return [
            self.linear(part.q_rank + part.rank + part.rope_dim, shape.hidden),
            self.norm(part.q_rank, residual=False),
            rms_norm_spec("T", part.rank, "bf16", EPS, 0.0, residual=False),
            self.linear(heads * width, part.q_rank),
            rope_spec("T", heads, part.rope_dim, part.rope_dim, "bf16", True),
            rope_spec("T", 1, part.rope_dim, part.rope_dim, "bf16", True),
            head_linear_spec(HeadProduct(heads, part.rank, part.nope_dim, "bf16", "bf16")),
            latent_write_spec(part.rank, part.rope_dim, "bf16"),
            mla_spec(latents, self.target),
            head_linear_spec(HeadProduct(heads, part.value_dim, part.rank, "bf16", "bf16")),
            *self.quantized(heads * part.value_dim),
            self.linear(shape.hidden, heads * part.value_dim),
        ]

    def dense(self, intermediate: int) -> list[KernelSpec]:
        quantization = self.quantization
        if quantization is None:
            gated = act_mul_spec("T", intermediate, "bf16", "silu")
        else:
            gated = act_mul_quantize_spec("T", intermediate, "bf16", "silu", quantization, self.target)
        hidden = self.shape.hidden
        return [self.linear(2 * intermediate, hidden), gated, self.linear(hidden, intermediate)]

    def experts(self) -> list[KernelSpec]:
        mixture, hidden = self.shape.mixture, self.shape.hidden
        assert mixture is not None
        scores = Product("T", mixture.experts, hidden, "bf16", "bf16", mixture.biased)
        has_bias = mixture.scoring == "sigmoid"
        router = Router(
            "T", "bf16", "fp32" if has_bias else "", mixture.experts, mixture.top_k, mixture.scoring, has_bias,
            mixture.groups, mixture.top_groups, "top2_sum" if mixture.groups > 1 else "", mixture.scaling,
        )  # fmt: skip
        shared = self.dense(mixture.shared) if mixture.shared else []
        return [linear_tma_spec(scores, self.target), router_spec(router), *shared, self.mixture(mixture)]

    def mixture(self, mixture: MixtureShape) -> KernelSpec:
        hidden, bias, unit = self.shape.hidden, "bf16" if mixture.biased else "", mixture.unit
        if self.precision == "bf16":
            return moe_spec(
                Mixture(
                    "T", "bf16", bias, bias, mixture.experts, mixture.top_k, hidden, mixture.intermediate, hidden,
                    "swiglu_oai" if unit.limit else "silu", unit.limit, unit.alpha,
                ),
                is_tma=True,
            )  # fmt: skip
        layer = Experts(
            "T", "bf16", mixture.experts, mixture.top_k, hidden, mixture.intermediate, unit, bias,
            shared=bool(mixture.shared),
        )  # fmt: skip
        scheme = self.precision if self.quantization is not None else "weight_only"
        return experts_spec(layer, scheme, self.target)
