"""Quantisation to NVFP4 and FP8 of the Triton family: kernels by themselves, and what fused ones share."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.specs_triton import ceil_div, number, power_of_2, tiles, warps_for
from octavo.compiler.program import ITEM_BYTES, Dim
from octavo.compiler.target import Target

BLOCK_ELEMENTS = 16
# The largest value that codes (and scales) hold: 6 * 448 and 448. An outer scale is a row's largest over it.
LIMITS = {"nvfp4": 2688.0, "fp8": 448.0}
# A program's tile: the rows share sectors of scales, which one row fills to an eighth.
TILE_ROWS, TILE_COLS = 16, 128
# Elements of a row that a program holds at once, in fp32: 16 a thread of 16 warps.
MAX_COLS = 8192


def has_fp4_conversion(target: Target) -> bool:
    """Whether the arch converts between E2M1 and wider types by itself: sm_100a and newer."""
    return target.arch is not None and target.arch >= 100


def nvfp4_bytes(k: int) -> int:
    """Bytes of the codes and scales of k elements."""
    return k // 2 + k // BLOCK_ELEMENTS


def scale_tiles(rows: Dim) -> str:
    """Tiles of 128 rows that the 128 x 4 layout holds the scales of `rows` rows in, as an expression."""
    return f"((({rows}) + 127) // 128)"


def scale_bytes(rows: Dim, k: int) -> str:
    """Bytes of the scales of `rows` rows in the 128 x 4 layout, as an expression."""
    return f"{scale_tiles(rows)} * {512 * ceil_div(k, 64)}"


def scale_map(name: str, row_tiles: Dim, k: int, block_rows: int, block_k: int) -> Arg:
    """Scales in the 128 x 4 layout as a tensor map: row_tiles tiles of 128 rows, read block_rows x block_k at once."""
    shape: tuple[Dim, ...] = (1, row_tiles, ceil_div(k, 64), 2, 256)
    return tiles(name, "fp8", shape, (1, block_rows // 128, block_k // 64, 2, 256))


@dataclass(frozen=True)
class Quantization:
    """How a producer writes its rows.

    format    "nvfp4": u8 codes and E4M3 scales in the 128 x 4 layout; "fp8": E4M3
    by_token  the outer scale, fp32, is each row's own and a result; else it is given, one for all rows
    """

    format: str
    by_token: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        """Dtypes of what is written, in order: codes, scales, outer scales."""
        parts = ("u8", "fp8") if self.format == "nvfp4" else ("fp8",)
        return (*parts, "fp32") if self.by_token else parts

    @property
    def features(self) -> tuple[str, ...]:
        return ("fp4_convert", "fp8_convert") if self.format == "nvfp4" else ("fp8_convert",)

    @property
    def label(self) -> str:
        return f"{self.format}_token" if self.by_token else self.format

    def row_bytes(self, k: int) -> int:
        """Bytes that a row of k elements is written in."""
        codes = nvfp4_bytes(k) if self.format == "nvfp4" else k
        return codes + (4 if self.by_token else 0)

    def hardware(self, target: Target) -> bool:
        """The kernel's HW: only codes of NVFP4 depend on the arch."""
        return self.format == "nvfp4" and has_fp4_conversion(target)

    def check(self, k: int) -> None:
        """Raises ValueError for rows that the format cannot hold."""
        if self.format == "nvfp4" and k % BLOCK_ELEMENTS:
            raise ValueError(f"rows of NVFP4 must have a multiple of {BLOCK_ELEMENTS} elements, got {k}")


FORMATS = tuple(Quantization(format, by_token) for format in ("nvfp4", "fp8") for by_token in (False, True))


def numbered(dtypes: Iterable[str]) -> tuple[Arg, ...]:
    """Arguments for a node's results: out, or out_0, out_1, ..."""
    kinds = tuple(dtypes)
    names = ["out"] if len(kinds) == 1 else [f"out_{i}" for i in range(len(kinds))]
    return tuple(pointer(name, dtype) for name, dtype in zip(names, kinds, strict=True))


def quantize_spec(
    count: Dim, k: int, dtype: str, quantization: Quantization, target: Target, activation: str = ""
) -> KernelSpec:
    """x (count, k), or with an activation gate and up (count, 2 k) -> quantization.results of (count, k).

    An outer scale that is given is the argument `outer`, (1,) fp32 and at least 2^-80.
    """
    quantization.check(k)
    reads = 2 if activation else 1
    source = pointer("gate_up" if activation else "x", dtype)
    shared: tuple[tuple[str, Param], ...] = (
        ("dtype", dtype), ("quantize", quantization.format), ("activation", activation), ("K", k),
    )  # fmt: skip
    common = KernelSpec(
        op=f"{'act_mul_' if activation else ''}quantize_{quantization.format}",
        template="",
        params=shared,
        args=(source,),
        bytes=f"({count}) * {reads * k * ITEM_BYTES[dtype] + quantization.row_bytes(k)}",
        flops=f"({count}) * {(9 if activation else 4) * k}",
        label="_".join(part for part in (activation, dtype, quantization.label, f"k{k}") if part),
        features=quantization.features,
        waits=True,
    )
    if quantization.by_token:
        return _by_row(common, count, k, quantization, target)
    return _by_tile(common, count, k, quantization, target)


def _by_tile(spec: KernelSpec, count: Dim, k: int, quantization: Quantization, target: Target) -> KernelSpec:
    cols = min(power_of_2(k, 64), TILE_COLS)
    numbers = (("ROWS", TILE_ROWS), ("COLS", cols), ("HW", quantization.hardware(target)))
    args = (pointer("outer", "fp32"), *numbered(quantization.results), number("num_rows", count))
    return replace(
        spec,
        template="triton/quantize_tile.py.jinja",
        params=(*spec.params, *numbers),
        args=(*spec.args, *args),
        grid=(f"(({count}) + {TILE_ROWS - 1}) // {TILE_ROWS}", str(ceil_div(k, cols)), "1"),
        num_warps=warps_for(TILE_ROWS * cols),
    )


def _by_row(spec: KernelSpec, count: Dim, k: int, quantization: Quantization, target: Target) -> KernelSpec:
    cols = min(power_of_2(k, 64), MAX_COLS)
    turns = 2 * ceil_div(k, cols)
    limit, hardware = LIMITS[quantization.format], quantization.hardware(target)
    return replace(
        spec,
        template="triton/quantize_row.py.jinja",
        params=(*spec.params, ("LIMIT", limit), ("COLS", cols), ("HW", hardware)),
        args=(*spec.args, *numbered(quantization.results)),
        grid=(str(count), "1", "1"),
        num_warps=warps_for(cols),
        iterations=f"({count}) * {turns}" if turns > 2 else "",
        # rows that begin anywhere; only those that are read twice are read in a loop
        narrow_loads=k % 8 > 0,
    )


def quantize_nvfp4_spec(count: Dim, k: int, dtype: str, target: Target, by_token: bool = False) -> KernelSpec:
    """x (count, k) -> codes (count, k / 2), scales in the 128 x 4 layout, with by_token outer scales (count,)."""
    return quantize_spec(count, k, dtype, Quantization("nvfp4", by_token), target)


def dequantize_spec(count: Dim, k: int, dtype: str, quantization: Quantization, target: Target) -> KernelSpec:
    """code, scale (of NVFP4) and outer, (1,) or with by_token (count,) fp32 -> (count, k) of dtype."""
    quantization.check(k)
    cols = min(power_of_2(k, 64), TILE_COLS)
    names = ("code", "scale") if quantization.format == "nvfp4" else ("code",)
    codes = tuple(pointer(name, kind) for name, kind in zip(names, quantization.results, strict=False))
    return KernelSpec(
        op=f"dequantize_{quantization.format}",
        template="triton/dequantize.py.jinja",
        params=(
            ("dtype", dtype), ("quantize", quantization.format), ("by_token", quantization.by_token), ("K", k),
            ("ROWS", TILE_ROWS), ("COLS", cols), ("HW", quantization.hardware(target)),
        ),
        args=(*codes, pointer("outer", "fp32"), pointer("out", dtype), number("num_rows", count)),
        grid=(f"(({count}) + {TILE_ROWS - 1}) // {TILE_ROWS}", str(ceil_div(k, cols)), "1"),
        bytes=f"({count}) * {k * ITEM_BYTES[dtype] + quantization.row_bytes(k)}",
        flops=f"({count}) * {2 * k}",
        num_warps=warps_for(TILE_ROWS * cols),
        label=f"{dtype}_{quantization.label}_k{k}",
        waits=True,
    )  # fmt: skip


def _corner(k: int, dtype: str, quantization: Quantization, activation: str = "") -> Corner:
    name = f"quantize {quantization.label} {activation} {dtype} k{k}".replace("  ", " ")
    return Corner(name, lambda target: quantize_spec("T", k, dtype, quantization, target, activation))


def _dequantize_corner(k: int, dtype: str, quantization: Quantization) -> Corner:
    return Corner(
        f"dequantize {quantization.label} {dtype} k{k}",
        lambda target: dequantize_spec("T", k, dtype, quantization, target),
    )


# Hidden sizes of Llama-3-8B and DeepSeek-V3; one element of scales, fp32, and rows of more than a program holds.
CORNERS: tuple[Corner, ...] = (
    *(_corner(k, "bf16", form) for form in FORMATS for k in (4096, 7168)),
    *(_corner(144, "fp32", form) for form in FORMATS),
    *(_corner(18432, "bf16", form) for form in FORMATS if form.by_token),
    _corner(16, "bf16", Quantization("nvfp4")),
    _corner(100, "bf16", Quantization("fp8")),
    *(_dequantize_corner(4096, "bf16", form) for form in FORMATS),
    _dequantize_corner(144, "fp32", Quantization("nvfp4")),
)
