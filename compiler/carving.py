"""Which neurons of a gated FFN become which expert, and the router that predicts who matters, without training.

A neuron's part in the output is |h_j| * |d_j|, with its column d_j of the down projection. The neurons with most energy
are shared. The others are clustered by the tokens for which they are among their tenth that matters most, in clusters
of equal size. The router is a ridge regression, in closed form, of the logarithm of each expert's energy (the square of
what it adds to the output) on the FFN's input. In the layers of SmolLM2-135M where it was measured, it lost less of the
output than representative neurons of the experts in its place.

Clusters of neurons that are active together: Zhang et al., MoEfication, arXiv 2110.01786; shared experts and routers
without training: Pei et al., CMoE, arXiv 2502.04416.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.compiler.errors import OptionError
from octavo.compiler.expert_bias import Selection, balance_bias
from octavo.compiler.ops.moe import router
from octavo.compiler.options import CarveConfig

BLOCK = 16  # widths are whole blocks of four-bit formats where they can be
ACTIVE_PART = 10  # one neuron of so many counts as active
CLUSTER_TOKENS = 2048  # by which neurons are told apart
ROUNDS = 10  # of clustering; it settles earlier
RIDGE = 1e-2  # of the mean square of inputs
BIAS_SPEED, BIAS_ROUNDS = 0.02, 200  # of the scores' standard deviation


@dataclass(frozen=True)
class Carving:
    """The experts of one FFN.

    shared  (S,) int64 neurons that always compute, ascending
    routed  (E, width) int64 neurons of each expert, ascending
    router  (E, hidden) fp32; bias (E,) fp32: an expert's score is router @ x + bias
    loads   (E,) int64 calibration tokens that chose each expert, before the bias was moved; balanced: and after
    """

    shared: Tensor
    routed: Tensor
    router: Tensor
    bias: Tensor
    loads: Tensor
    balanced: Tensor

    def selected(self, x: Tensor, top_k: int) -> Tensor:
        """(T, intermediate) whether a neuron computes for each row of x (T, hidden)."""
        scores = (x.float() @ self.router.T)[None]
        _, experts = router(scores, self.bias, top_k, "unit", False, 1, 1, "", 1.0)
        chosen = torch.zeros_like(scores[0], dtype=torch.bool).scatter_(1, experts[0], True)
        mask = torch.ones(len(x), len(self.shared) + self.routed.numel(), dtype=torch.bool)
        mask[:, self.routed.flatten()] = chosen.repeat_interleave(self.routed.shape[1], 1)
        return mask


def check_carve(config: CarveConfig) -> None:
    """Raises OptionError for numbers of experts that cannot be."""
    wholes = (
        ("num_experts", 2, 4096),
        ("num_shared", 0, config.num_experts - 1),
        ("top_k", 1, config.num_routed),
    )
    for name, least, most in wholes:
        value = getattr(config, name)
        if type(value) is not int or not least <= value <= most:
            raise OptionError(f"carve: expected {name} of {least} to {most}, got {value!r}")


def width_of(intermediate: int, config: CarveConfig) -> int:
    """Neurons of a routed expert, 0 where there are fewer neurons than experts. What is left over is shared."""
    width = intermediate // config.num_experts
    return width - width % BLOCK if width >= BLOCK else width


def carve(x: Tensor, hidden: Tensor, down: Tensor, config: CarveConfig) -> Carving:
    """x (T, H) what the FFN reads for calibration tokens, hidden (T, I) its activated neurons, down (H, I)."""
    x, hidden, down = x.float(), hidden.float(), down.float()
    part = hidden.abs() * down.norm(dim=0)
    width, count = width_of(part.shape[1], config), config.num_routed
    order = part.square().sum(0).argsort(descending=True, stable=True)
    shared = order[: part.shape[1] - width * count].sort().values
    others = order[len(shared) :].sort().values
    owners = cluster(_active(part[:, others]).T.float(), count)
    routed = torch.stack([others[owners == e] for e in range(count)])
    energy = torch.stack([(hidden[:, rows] @ down[:, rows].T).square().sum(1) for rows in routed], 1)
    weight, bias = ridge(x, energy.clamp_min(torch.finfo(torch.float32).tiny).log())
    selection, scores = Selection(config.top_k, "unit"), x @ weight.T
    loads = selection.loads(scores, bias)
    if config.balance and not config.is_whole:
        speed = BIAS_SPEED * float((scores + bias).std())
        bias = balance_bias(scores, selection, bias, speed, BIAS_ROUNDS).bias
    return Carving(shared, routed, weight, bias, loads, selection.loads(scores, bias))


def _active(part: Tensor) -> Tensor:
    """(tokens, N) the largest tenth of each token's neurons, of tokens that lie evenly."""
    rows = part[:: -(-len(part) // CLUSTER_TOKENS)]
    least = rows.topk(max(rows.shape[1] // ACTIVE_PART, 1)).values[:, -1:]
    return (rows >= least) & (rows > 0)


def cluster(features: Tensor, count: int) -> Tensor:
    """(N,) the cluster of each row of features (N, D): `count` of equal size, by the angle between rows.

    The first centres are far from each other. The rows that lose most by their second choice choose first.
    """
    rows = F.normalize(features, dim=1)
    centres = rows[:1]
    for _ in range(count - 1):
        nearest = (rows @ centres.T).amax(1)
        centres = torch.cat([centres, rows[nearest.argmin()][None]])
    owners = torch.full((len(rows),), -1)
    for _ in range(ROUNDS):
        found = _assign(rows @ centres.T, len(rows) // count)
        if torch.equal(found, owners):
            break
        owners = found
        centres = F.normalize(torch.stack([rows[owners == e].mean(0) for e in range(count)]), dim=1)
    return owners


def _assign(likeness: Tensor, size: int) -> Tensor:
    """(N,) of each row of (N, count) the column that it likes best and that has room for it."""
    best, columns = likeness.sort(dim=1, descending=True, stable=True)
    regret = best[:, 0] - best[:, 1] if best.shape[1] > 1 else best[:, 0]
    wishes, room = columns.tolist(), [size] * best.shape[1]
    owners = [0] * len(wishes)
    for row in regret.argsort(descending=True, stable=True).tolist():
        owners[row] = next(column for column in wishes[row] if room[column])
        room[owners[row]] -= 1
    return torch.tensor(owners)


def ridge(x: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """weight (E, H) and bias (E,) of least squares from x (T, H) to wanted (T, E), but for what all E have in common.

    Only differences between experts select, so their mean is left out: smaller numbers round less.
    """
    wanted = wanted - wanted.mean(1, keepdim=True)
    middle, centred = wanted.mean(0), x - x.mean(0)
    moments = (centred.T @ centred).double()
    moments += (
        RIDGE * moments.diagonal().mean().clamp_min(1e-30) * torch.eye(len(moments), dtype=torch.float64)
    )
    weight = torch.linalg.solve(moments, (centred.T @ (wanted - middle)).double()).T.float()
    return weight.contiguous(), middle - weight @ x.mean(0)
