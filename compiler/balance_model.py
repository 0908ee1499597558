"""By how much the channels of a lowered graph's products are scaled: what a short calibration saw of them decides."""

from collections.abc import Sequence

from torch.fx import GraphModule

from octavo.compiler.calibration import STEP_TOKENS, calibrate
from octavo.compiler.options import QuantConfig
from octavo.compiler.progress import Bars
from octavo.compiler.verify import prove_report
from octavo.passes.assign_precision import holds, quantisable
from octavo.passes.balance_channels import Balance, balance_channels
from octavo.passes.rule import PassReport, Prove

MODES = ("nvfp4", "nvfp4_weight_only")


def balance_model(
    graph_module: GraphModule, config: QuantConfig, sequences: Sequence[Sequence[int]], page_size: int, layout: str,
    bars: Bars, prove: Prove | None,
) -> tuple[PassReport | None, Balance]:  # fmt: skip
    """None and nothing to scale where a mode is not of NVFP4 alone, and where weights go to nearest as they are.

    sequences  of calibration tokens, of which a few that lie evenly are run
    prove      None: nothing is proven
    """
    if config.mode not in MODES or config.weights == "nearest":
        return None, Balance()
    every = max(1, sum(map(len, sequences)) // STEP_TOKENS)
    seen = calibrate(graph_module, sequences[::every], page_size, progress=bars("calibrate")).products
    linears = [product for product in quantisable(graph_module, config) if product.kind == "linear"]
    products = [product for product in linears if not holds(product, "nvfp4", layout)]
    moments = {p.name: seen[p.name].second_moments for p in products if p.name in seen}
    report, balance = balance_channels(graph_module, moments.keys(), moments)
    if prove is not None:
        prove_report(report, {})
    return report, balance
