"""What calibration saw of the inputs of products and of keys and values: plain numbers, no graph."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class ObservedInput:
    """Of x (rows, K) of one product, over all calibration tokens.

    amax            largest magnitude
    block_amax      magnitudes that 1 %, 50 % and 99 % of the blocks of 16 elements stay below
    second_moments  (K,) fp32, the mean of x^2
    moments         (K, K) fp32, the mean of x^T x, where it was asked for
    held_out_amax   of the last tenth of the tokens, which counts in nothing else
    """

    rows: int
    amax: float
    block_amax: tuple[float, float, float]
    second_moments: Tensor
    moments: Tensor | None = None
    held_out_amax: float = 0.0


@dataclass
class ObservedPages:
    """Largest magnitudes of the keys and of the values of one attention, as they are written."""

    k_amax: float
    v_amax: float


@dataclass
class Observed:
    """products: by the name of the weight; of experts, by that of gate and up (x) and of down (hidden, all experts).

    pages   by the number of the cache
    digest  sha256 of the calibration tokens
    """

    products: dict[str, ObservedInput] = field(default_factory=dict)
    pages: dict[int, ObservedPages] = field(default_factory=dict)
    tokens: int = 0
    digest: str = ""
