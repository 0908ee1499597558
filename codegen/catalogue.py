"""Every corner of every Triton template, family by family: what `octavo kernels --check` builds."""

from octavo.codegen import (
    attention_corners,
    kv_quantize_triton,
    linear_corners,
    mla_fp8_triton,
    moe_corners,
    norm_quantize_triton,
    quantize_triton,
    row_corners,
    sampling_triton,
    speculative_triton,
)
from octavo.codegen.corner import Corner

CORNERS: tuple[Corner, ...] = (
    *quantize_triton.CORNERS,
    *norm_quantize_triton.CORNERS,
    *kv_quantize_triton.CORNERS,
    *row_corners.CORNERS,
    *linear_corners.CORNERS,
    *attention_corners.CORNERS,
    *moe_corners.CORNERS,
    *mla_fp8_triton.CORNERS,
    *sampling_triton.CORNERS,
    *speculative_triton.CORNERS,
)
