"""How long a step takes by how many tokens it has: T(M), from what was measured when it was built, and what runs."""

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import STEP_TIMES
from octavo.compiler.errors import ArtifactError

# Before anything is known: weights are read once for this many tokens, which takes as long as for one; behind that
# arithmetic counts, and time grows with every token.
FLAT_TOKENS = 8

# The latest times of a size that its median is of.
_WINDOW = 16

# Fewer times than this may be all of disturbed steps. If they keep a size from being used it is measured no more; so
# they are left out after a while, and what the curve says is tried once more.
_MIN_TRUSTED = 3
_DOUBT_STEPS = 32

# Measurements, and steps, that one table of all sizes serves at most.
_REFRESH = 4

Curve = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def flat_then_linear(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of steps of which nothing is known, as a multiple of that of one token."""
    return np.maximum(counts / FLAT_TOKENS, 1.0)


def linear(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of drafting tokens one after another, as a multiple of that of one."""
    return counts


def read_step_times(text: str, where: str = STEP_TIMES) -> Curve:
    """The curve in an artifact's file: {"tokens": [1, 2, ...], "seconds": [...], "source": "..."}.

    Straight between what was measured; behind the last, on as between the last two. ArtifactError for another file.
    """
    try:
        table = json.loads(text)
        tokens, seconds = (np.array(table[name], np.float64) for name in ("tokens", "seconds"))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{where}: expected tokens and seconds as lists, got: {error!r}") from None
    is_table = tokens.ndim == 1 and tokens.shape == seconds.shape and len(tokens) > 0
    if (
        not (is_table and np.isfinite(seconds).all() and (seconds > 0).all())
        or tokens[0] < 1
        or (np.diff(tokens) <= 0).any()
    ):
        raise ArtifactError(
            f"{where}: expected as many positive seconds as ascending tokens from 1, got {table['tokens']!r:.80} and "
            f"{table['seconds']!r:.80}; compile again"
        )
    seconds = np.maximum.accumulate(seconds)
    slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0

    def curve(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        beyond = np.maximum(counts - tokens[-1], 0) * slope
        result: NDArray[np.float64] = np.interp(counts, tokens, seconds) + beyond
        return result

    return curve


@dataclass
class _Size:
    """What was measured of steps of about `count` tokens. latest: the step of the last measurement."""

    count: float
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    latest: int = 0

    @property
    def median(self) -> float:
        """The lower of the middle ones: what disturbs makes steps slower, never faster."""
        return sorted(self.seconds)[(len(self.seconds) - 1) // 2]


class Times:
    """Seconds by count, never falling: the median of the latest of each size; between sizes and beyond them as the
    curve runs.

    curve  (n,) counts -> (n,), never falling and positive from 1 on: its form before and beside measurements, and
           if is_absolute its seconds too; otherwise nothing is known before the first measurement
    """

    def __init__(self, curve: Curve, is_absolute: bool = False) -> None:
        self._curve = curve
        self._sizes: dict[int, _Size] = {}
        self._step = 0
        self._num_measured = 0
        self._table: NDArray[np.float64] | None = None  # by count, until what it is made from changes
        self._num_doubtful = 0
        self.is_known = is_absolute
        self.largest = 0  # count measured

    def observe(self, count: int, seconds: float) -> None:
        """What `count` tokens, at least 1, took. A time that is no positive number is none."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        key = _bucket(count)
        size = self._sizes.setdefault(key, _Size(float(count)))
        size.seconds.append(seconds)
        size.count += (count - size.count) / len(size.seconds)
        self._num_measured += 1
        size.latest = self._step
        self.largest = max(self.largest, count)
        self.is_known = True
        # Making the table takes as long as all else that is done here: one for some measurements is enough.
        if len(size.seconds) <= _MIN_TRUSTED or self._num_measured % _REFRESH == 0:
            self._num_doubtful = sum(len(each.seconds) < _MIN_TRUSTED for each in self._sizes.values())
            self._table = None

    def tick(self) -> None:
        """A step goes by, whether anything is measured in it or not."""
        self._step += 1
        if self._num_doubtful and self._step % _REFRESH == 0:
            self._table = None

    def age(self, count: int) -> int | None:
        """Steps since the last measurement of about this count; None: there was none."""
        size = self._sizes.get(_bucket(count))
        return None if size is None else self._step - size.latest

    def is_sure(self, count: int) -> bool:
        """Whether this size was measured often enough to be trusted for good."""
        size = self._sizes.get(_bucket(count))
        return size is not None and len(size.seconds) >= _MIN_TRUSTED

    def seconds(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) whole counts from 0 on -> (n,)"""
        top = int(counts.max(initial=0.0))
        if self._table is None or len(self._table) <= top:
            self._table = self._tabulate(np.arange(2.0 ** max(top.bit_length(), 6)))
        return self._table[counts.astype(np.intp)]

    def _tabulate(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._sizes:
            return self._curve(counts)
        places, seconds = self._fit()
        asked = self._place(counts)
        # Beyond the ends: in proportion to the curve.
        below, above = np.minimum(asked / places[0], 1.0), np.maximum(asked / places[-1], 1.0)
        result: NDArray[np.float64] = np.interp(asked, places, seconds) * below * above
        return result

    def _place(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The curve, tilted a little, so that where it is flat times are straight between two sizes."""
        curve = self._curve(counts)
        return curve + 1e-9 * counts * self._curve(np.ones(1))

    def _fit(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The sizes' places on the curve, ascending, and the never falling seconds nearest to their medians."""
        sizes = sorted(filter(self._is_trusted, self._sizes.values()), key=lambda size: size.count)
        sizes = sizes or list(self._sizes.values())[:1]
        places = self._place(np.array([size.count for size in sizes]))
        rising = _never_falling([size.median for size in sizes], [len(size.seconds) for size in sizes])
        return places, np.array(rising)

    def _is_trusted(self, size: _Size) -> bool:
        number = len(size.seconds)
        return number >= _MIN_TRUSTED or self._step - size.latest <= _DOUBT_STEPS * number


def _bucket(count: int) -> int:
    """Sizes that are measured together: each count up to 32; behind that, 8 for each doubling."""
    if count <= 32:
        return count
    exponent = count.bit_length() - 1
    return 8 * exponent + ((count << 3 >> exponent) & 7)


def _never_falling(values: list[float], weights: list[int]) -> list[float]:
    """The nearest such sequence in weighted squares: neighbours that fall are pooled."""
    pools: list[tuple[float, int, int]] = []  # value, weight, members
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / total
            pool = (mean, total, before[2] + pool[2])
        pools.append(pool)
    return [value for value, _, members in pools for _ in range(members)]
