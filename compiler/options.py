"""What a user may choose when compiling. Frozen, hashable, recorded in the artifact."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.compiler.errors import OptionError
from octavo.compiler.mesh import Mesh

Verify = Literal["off", "sites", "full"]
DType = Literal["fp32", "bf16"]
Mode = Literal["nvfp4", "nvfp4_weight_only", "fp8", "bf16", "auto", "auto_weight_only"]
PageFormat = Literal["bf16", "fp8", "nvfp4"]
WeightMethod = Literal["nearest", "search", "gptq"]
OuterScales = Literal["static", "by_token"]
Wire = Literal["model", "fp8", "nvfp4"]


@dataclass(frozen=True)
class QuantConfig:
    """What is quantised, and how. `quantize="nvfp4"` is QuantConfig("nvfp4").

    mode        of linears and experts: "nvfp4" (weights and activations), "nvfp4_weight_only", "fp8", "bf16" (none), or
                "auto": each layer in NVFP4, FP8 or BF16 by what calibration shows, within `bits` or `kl`;
                "auto_weight_only": likewise, but what is in NVFP4 reads its inputs as they are: closer to the model at
                the same bits, slower where many tokens are computed at once
    kv          of the pages; "bf16" keeps the model's dtype
    weights     "nearest": scales that carry the largest element; "search": scales of least error; "gptq": the search,
                and each column's error made up for by those behind it. Of NVFP4 alone, the last two balance channels
                first (passes/balance_channels.py)
    activations outer scales of NVFP4 activations: "static", calibrated, or "by_token"
    headroom    largest magnitude that static scales carry, over the largest seen in calibration
    bits        auto: most bits of a weight's element, on average over the products that may be quantised
    kl          auto: largest mean KL divergence of the logits from the model's own, in nats a token, as measured on
                held-out calibration tokens; `bits` is then not read. 0: not asked
    keep        globs of module paths that stay as they are, beside those that always do (lm_head, routers, ...)
    include     globs of module paths that are quantised although they would stay

    A glob names modules and all below them; an attention's pages go by its module and "pages", as in
    keep=("model.layers.0.self_attn.pages",).
    """

    mode: Mode = "nvfp4"
    kv: PageFormat = "bf16"
    weights: WeightMethod = "search"
    activations: OuterScales = "static"
    headroom: float = 1.25
    bits: float = 5.4
    kl: float = 0.0
    keep: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    @property
    def is_auto(self) -> bool:
        """Formats are chosen product by product."""
        return self.mode in ("auto", "auto_weight_only")


@dataclass(frozen=True)
class CarveConfig:
    """How dense gated FFNs are cut into experts of equal width: `num_shared` of `num_experts` always compute, and for
    each token a router chooses `top_k` of the others. With top_k = num_experts - num_shared nothing is left out.

    balance  move the router's bias until experts are chosen equally often, over the calibration tokens
    """

    num_experts: int = 8
    num_shared: int = 2
    top_k: int = 3
    balance: bool = True

    @property
    def num_routed(self) -> int:
        return self.num_experts - self.num_shared

    @property
    def is_whole(self) -> bool:
        """Every expert computes for every token."""
        return self.top_k == self.num_routed


@dataclass(frozen=True)
class Parallel:
    """How the program is spread over ranks. The collectives follow from where each value then lies.

    ep         ranks that experts are spread over; all ranks, where it is more than 1
    tp         ranks that attention's heads and the widths of FFNs are cut over; without ep, those of experts too
    dp         groups of ranks with requests of their own: tokens then travel to their experts (all-to-all). It must go
               with ep. Where ep is more than dp * tp, the others compute attention for the same tokens once more
    redundant_experts  more copies of experts, over all ranks: of those that `Program.shards` or a rebalance choose
    wire       how tokens travel to experts: "model", as they are; "fp8", with a scale a token; "nvfp4", codes and block
               scales, outer scales those of the experts' inputs where these are calibrated, else of each token

    Parallel(ep=4)             attention on every rank, experts spread, no all-to-all: partial sums are added
    Parallel(ep=4, dp=4)       requests and experts spread: all-to-all
    Parallel(ep=4, tp=4)       heads and experts spread, partial sums are added
    Parallel(ep=4, tp=2, dp=2) two groups of two
    """

    ep: int = 1
    tp: int = 1
    dp: int = 1
    redundant_experts: int = 0
    wire: Wire = "model"

    @property
    def world(self) -> int:
        return max(self.ep, self.tp * self.dp)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.dp, self.world // (self.tp * self.dp), self.tp)


_RANK_NUMBERS = ("ep", "tp", "dp", "redundant_experts")
ONE_RANK = Parallel()


def parallel_of(text: str) -> Parallel:
    """`ep=8,dp=8,wire=nvfp4` -> Parallel. Raises OptionError, naming the entry."""
    given: dict[str, Any] = {}
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        if name in _RANK_NUMBERS and value.isdecimal():
            given[name] = int(value)
        elif name == "wire" and value:
            given[name] = value
        else:
            raise OptionError(
                f"--parallel: expected entries such as ep=8, of {', '.join((*_RANK_NUMBERS, 'wire'))}, got {entry!r} "
                f"in {text!r}"
            )
    return Parallel(**given)


@dataclass(frozen=True)
class CompileOptions:
    """Options of `octavo.compile`.

    target          name of a file in compiler/targets ("cpu", "b200", ...)
    dtype           weights and activations; None keeps the model's on cpu and takes bf16 on GPUs
    page_size       tokens per KV page; None takes the target's default
    max_model_len   longest sequence in tokens; None takes the model's
    max_batch_tokens  most tokens in one step (the T of every kernel)
    verify          "sites": every rewrite site is proven; "full": whole-model logits too; "off": neither
    dump            directory for the numbered graph dumps, or None
    quantize        what is quantised, or None
    checkpoint      name of the quantised checkpoint whose products and pages are kept; quantize then adds nothing
    deterministic   a token's logits depend on no other request, bit for bit; on GPUs steps of few rows get slower
    parallel        how the program is spread over ranks
    carve           how FFNs are cut into experts, or None
    trees           steps may hold trees of drafts: several continuations of a request, verified at once
    features        hidden states as outputs too: 0 the embeddings, i of layer i, -1 what the last product reads
    """

    target: str = "cpu"
    dtype: DType | None = None
    page_size: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int = 2048
    verify: Verify = "full"
    dump: Path | None = None
    quantize: QuantConfig | None = None
    checkpoint: str | None = None
    deterministic: bool = False
    parallel: Parallel = ONE_RANK
    carve: CarveConfig | None = None
    trees: bool = False
    features: tuple[int, ...] | None = None
