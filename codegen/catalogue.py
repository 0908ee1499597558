"""Every corner of every Triton template, family by family: what `octavo kernels --check` builds."""

from octavo.codegen import quantize_triton
from octavo.codegen.corner import Corner

CORNERS: tuple[Corner, ...] = (*quantize_triton.CORNERS,)
