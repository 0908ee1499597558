"""The `octavo::` dialect. Importing this package makes every op callable as `torch.ops.octavo.<name>`."""

from octavo.compiler.ops.attention import ATTENTION
from octavo.compiler.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ARRIVED,
    COMBINE,
    DISPATCH,
    MAP_EXPERTS,
    REDUCE_SCATTER,
)
from octavo.compiler.ops.linear import LINEAR
from octavo.compiler.ops.mla import (
    HEAD_LINEAR,
    LATENT_ATTENTION,
    LATENT_WRITE,
    MLA_ATTENTION,
    PAGED_MLA_ATTENTION,
)
from octavo.compiler.ops.mlp import ACT_MUL, GATED_MLP
from octavo.compiler.ops.moe import MOE, ROUTER
from octavo.compiler.ops.norm import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from octavo.compiler.ops.op import Op, register
from octavo.compiler.ops.paging import KV_WRITE, PAGED_ATTENTION, ROPE_KV_WRITE
from octavo.compiler.ops.pointwise import POINTWISE
from octavo.compiler.ops.quantize import ACT_MUL_QUANTIZE, ADD_RMS_NORM_QUANTIZE, QUANTIZE, RMS_NORM_QUANTIZE
from octavo.compiler.ops.quantized_linear import FP8_LINEAR, NVFP4_LINEAR, NVFP4_WEIGHT_LINEAR
from octavo.compiler.ops.quantized_moe import FP8_MOE, NVFP4_MOE, NVFP4_WEIGHT_MOE
from octavo.compiler.ops.rope import ROPE
from octavo.compiler.ops.rows import ADD, EMBEDDING, GATHER_LOGITS

OPS: tuple[Op, ...] = (
    EMBEDDING, RMS_NORM, ADD_RMS_NORM, LINEAR, ROPE, ATTENTION, KV_WRITE, PAGED_ATTENTION, ROPE_KV_WRITE,
    ACT_MUL, GATED_MLP, GATHER_LOGITS, ADD,
    LAYER_NORM, POINTWISE, ROUTER, MOE,
    QUANTIZE, RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE, ACT_MUL_QUANTIZE,
    NVFP4_LINEAR, NVFP4_WEIGHT_LINEAR, FP8_LINEAR, NVFP4_MOE, NVFP4_WEIGHT_MOE, FP8_MOE,
    MLA_ATTENTION, HEAD_LINEAR, LATENT_ATTENTION, LATENT_WRITE, PAGED_MLA_ATTENTION,
    MAP_EXPERTS, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, DISPATCH, ARRIVED, COMBINE,
)  # fmt: skip

for _op in OPS:
    register(_op)
