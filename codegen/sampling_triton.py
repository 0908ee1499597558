"""Sampling kernels of the Triton family: argmax, processing of logits, draws. Rows L, vocabulary fixed.

A step of one kind needs one of them: greedy rows argmax_spec, all others process_spec (if anything is to be
processed) and sample_spec, which serves greedy rows among the others too.
"""

from dataclasses import dataclass

from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import with_stages
from octavo.codegen.specs_triton import ceil_div, gather_rows_spec, in_order, power_of_2
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# The third word of a random number's counter. 0 is what runtime/sampler.py draws with.
SAMPLE_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = range(4)

# A weight is at most 2^45, and those of a row must stay below 2^63 together.
MAX_VOCAB = 2**18 - 1
RECORD_WORDS = 5
# Candidates that a nucleus is looked for in before the whole row is.
FEW = 512


def vocabulary_refusal(vocab: int) -> str | None:
    """Why no kernel here draws from a vocabulary."""
    if 1 <= vocab <= MAX_VOCAB:
        return None
    return (
        f"a vocabulary must have 1 to {MAX_VOCAB} tokens for weights of 45 bits, got {vocab}; the host draws"
    )


def vocabulary_splits(vocab: int, block: int, target: Target) -> int:
    """Parts of a row, of one tile or more, that keep every multiprocessor busy with a few rows."""
    return min(ceil_div(vocab, block), max((target.sm_count or 1) // 4, 1))


def argmax_spec(vocab: int, dtype: str, target: Target, block: int = 4096) -> KernelSpec:
    """logits (L, vocab) -> token (L,) i64: the lowest id of the largest; -1 for nan, +inf or nothing finite."""
    block = min(power_of_2(vocab), block)
    splits = vocabulary_splits(vocab, block, target)
    turns = ceil_div(ceil_div(vocab, block), splits)
    part = KernelSpec(
        op="argmax",
        template="triton/argmax.py.jinja",
        params=(("dtype", dtype), ("VOCAB", vocab), ("BLOCK", block), ("SPLITS", splits), ("STAGES", 2)),
        args=(pointer("logits", dtype), pointer("best", "fp32"), pointer("best_id", "i32")),
        grid=("L", str(splits), "1"),
        bytes=f"L * {vocab * ITEM_BYTES[dtype] + 8 * splits}",
        flops=f"L * {vocab}",
        num_warps=max(min(block // 512, 8), 1),
        num_stages=2,
        label=f"{dtype}_v{vocab}",
        scratch=(("best", "fp32", ("L", splits)), ("best_id", "i32", ("L", splits))),
        iterations=f"L * {splits * turns}",
    )
    joined = KernelSpec(
        op="argmax",
        template="triton/argmax_join.py.jinja",
        params=(("SPLITS", splits), ("BLOCK", power_of_2(splits))),
        args=(pointer("best", "fp32"), pointer("best_id", "i32"), pointer("token", "i64")),
        grid=("L", "1", "1"),
        bytes=f"L * {8 * splits + 8}",
        num_warps=1,
        label=f"s{splits}",
    )
    return in_order(with_stages(part, 1), joined)


@dataclass(frozen=True)
class Processing:
    """What is done to logits before they are drawn from; drafts (of a verified chain) only matter to penalties."""

    penalties: bool = False
    drafts: bool = False
    bias: bool = False
    bitmask: bool = False

    @property
    def args(self) -> tuple[Arg, ...]:
        numbers = tuple(pointer(name, "fp32") for name in ("repetition", "presence", "frequency"))
        penalties = (pointer("request", "i32"), *numbers, pointer("counts", "i32"), pointer("prompt", "i32"))
        bias = pointer("bias_start", "i32"), pointer("bias_id", "i32"), pointer("bias_value", "fp32")
        return (
            *(penalties if self.penalties else ()),
            *((pointer("place", "i32"), pointer("draft", "i64")) if self.drafts else ()),
            *(bias if self.bias else ()),
            *((pointer("allowed", "i32"),) if self.bitmask else ()),
        )

    @property
    def params(self) -> tuple[tuple[str, Param], ...]:
        names = ("penalties", "drafts", "bias", "bitmask")
        return tuple((name, getattr(self, name)) for name in names)


def process_spec(vocab: int, dtype: str, processing: Processing, block: int = 2048) -> KernelSpec:
    """logits (L, vocab) -> out (L, vocab) fp32."""
    assert processing.penalties or not processing.drafts, "drafts only matter to penalties"
    block = min(power_of_2(vocab), block)
    words = ceil_div(vocab, 32)
    row_bytes = vocab * (ITEM_BYTES[dtype] + 4) + 4 * words * processing.bitmask
    row_bytes += 4 * (vocab + words) * processing.penalties
    marks = [name for name, value in processing.params if value]
    return KernelSpec(
        op="process_logits",
        template="triton/process_logits.py.jinja",
        params=(("dtype", dtype), *processing.params, ("VOCAB", vocab), ("WORDS", words), ("BLOCK", block)),
        args=(pointer("logits", dtype), *processing.args, pointer("out", "fp32")),
        grid=("L", str(ceil_div(vocab, block)), "1"),
        bytes=f"L * {row_bytes}",
        flops=f"L * {vocab * (1 + 6 * processing.penalties)}",
        num_warps=max(min(block // 512, 4), 1),
        label="_".join((dtype, f"v{vocab}", *marks)),
    )


def random_args(philox: bool) -> tuple[Arg, ...]:
    """Where a kernel's random numbers come from: (L, 2) keys and places, or (L,) points of 53 bits."""
    return (pointer("key", "i64"), pointer("place", "i64")) if philox else (pointer("point", "i64"),)


def sample_spec(
    vocab: int, philox: bool, block: int = 2048, few: int = FEW, stream: int = SAMPLE_STREAM
) -> KernelSpec:
    """logits (L, vocab) fp32 -> token (L,) i64 and record (L, RECORD_WORDS) i64 of what was kept."""
    assert vocabulary_refusal(vocab) is None, vocabulary_refusal(vocab)
    block = min(power_of_2(vocab), block)
    numbers = (("temperature", "fp32"), ("top_k", "i32"), ("top_p", "fp32"), ("min_p", "fp32"))
    results = (("token", "i64"), ("record", "i64"), ("few", "fp32"), ("few_ids", "i32"))
    spec = KernelSpec(
        op="sample",
        template="triton/sample.py.jinja",
        params=(
            ("philox", philox), ("VOCAB", vocab), ("BLOCK", block), ("STREAM", stream), ("FEW", min(few, block)),
            ("STAGES", 2),
        ),
        args=(
            pointer("logits", "fp32"), *(pointer(*entry) for entry in numbers), *random_args(philox),
            *(pointer(*entry) for entry in results),
        ),
        grid=("L", "1", "1"),
        bytes=f"L * {4 * vocab}",
        flops=f"L * {4 * vocab}",
        num_warps=max(min(block // 256, 16), 1),
        num_stages=2,
        label=f"v{vocab}_{'philox' if philox else 'points'}",
        scratch=(("few", "fp32", ("L", block)), ("few_ids", "i32", ("L", block))),
        iterations=f"L * {3 * ceil_div(vocab, block)}",
    )  # fmt: skip
    return with_stages(spec, 1)


def probabilities_spec(vocab: int, block: int = 2048) -> KernelSpec:
    """logits (L, vocab) fp32 and a sample's record -> out (L, vocab) fp32 probabilities."""
    block = min(power_of_2(vocab), block)
    return KernelSpec(
        op="probabilities",
        template="triton/probabilities.py.jinja",
        params=(("VOCAB", vocab), ("BLOCK", block)),
        args=(pointer("logits", "fp32"), pointer("record", "i64"), pointer("out", "fp32")),
        grid=("L", str(ceil_div(vocab, block)), "1"),
        bytes=f"L * {8 * vocab + 8 * RECORD_WORDS}",
        flops=f"L * {4 * vocab}",
        num_warps=max(min(block // 512, 4), 1),
        label=f"v{vocab}",
    )


VOCABULARIES = (128256, 151936, 129280, 32000, 50257)
EVERY_STEP = Processing(penalties=True, drafts=True, bias=True, bitmask=True)


def _corner(name: str, spec: KernelSpec) -> Corner:
    return Corner(name, lambda target: spec)


def _argmax_corner(vocab: int, dtype: str) -> Corner:
    return Corner(f"argmax {dtype} v{vocab}", lambda target: argmax_spec(vocab, dtype, target))


def _embedding_corner(width: int) -> Corner:
    return _corner(f"embedding w{width}", gather_rows_spec("embedding", "ids", "weight", "T", width, "bf16"))


CORNERS: tuple[Corner, ...] = (
    *(_corner(f"sample v{vocab}", sample_spec(vocab, philox=True)) for vocab in VOCABULARIES),
    _corner("sample given points v1", sample_spec(1, philox=False)),
    _corner(f"sample v{MAX_VOCAB}, the most", sample_spec(MAX_VOCAB, philox=True)),
    _argmax_corner(128256, "fp32"),
    _argmax_corner(151936, "bf16"),
    _argmax_corner(50257, "fp32"),
    _argmax_corner(1, "fp16"),
    _corner("process_logits, nothing, v50257", process_spec(50257, "bf16", Processing())),
    *(_corner(f"process_logits, all, v{v}", process_spec(v, "fp32", EVERY_STEP)) for v in VOCABULARIES),
    _corner("probabilities v151936", probabilities_spec(151936)),
    *(_embedding_corner(width) for width in (576, 4096, 7168, 16384)),
)
