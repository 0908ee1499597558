"""Which of several forms of a kernel that were built is kept: the one with the shortest predicted time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.cost import (
    Figures,
    Point,
    default_points,
    estimate,
    figures_of,
    geometric_mean,
    is_launched,
)
from octavo.compiler.target import Target

# Forms whose times differ by less are taken as equal: the model is no better than that, and the first listed wins.
TIE = 0.03


@dataclass(frozen=True)
class Form:
    """One form of a kernel after its build.

    kernel   None if no choice of its numbers keeps the limits
    refused  (numbers, reasons) of the choices that were tried and refused
    """

    spec: KernelSpec
    numbers: str
    kernel: Kernel | None
    refused: list[dict[str, Any]] = field(default_factory=list)


def choose(forms: Sequence[Form], target: Target) -> Kernel | None:
    """The best of the forms that were built, with the others beside it and in its metadata; None if none was."""
    built = [form for form in forms if form.kernel is not None]
    if not built:
        return None
    times = [predicted_us(form.kernel, target) for form in built] if len(built) > 1 else []
    best = (
        built[next(i for i, time in enumerate(times) if time <= min(times) * (1 + TIE))]
        if times
        else built[0]
    )
    assert best.kernel is not None
    choice = best.kernel.metadata["choice"]
    others = [(form, time) for form, time in zip(built, times, strict=False) if form is not best]
    choice["losers"] = [
        {"name": form.kernel.spec.name, "numbers": form.numbers, "predicted_us": time}
        for form, time in others
        if form.kernel is not None
    ]
    choice["dropped"] = [
        {"name": form.spec.name, "refused": form.refused} for form in forms if form.kernel is None
    ]
    if times:
        choice["predicted_us"] = times[built.index(best)]
    losers = tuple(form.kernel for form, _ in others if form.kernel is not None)
    return replace(best.kernel, losers=losers)


def predicted_us(kernel: Kernel | None, target: Target) -> float:
    """Geometric mean over the points of cost.default_points at which the kernel is launched, in microseconds."""
    assert kernel is not None
    figures = figures_of(kernel.metadata, kernel.spec.name)
    points = points_of(figures, target)
    return geometric_mean([estimate(figures, target, point.dims).predicted_s * 1e6 for point in points])


def points_of(figures: Figures, target: Target) -> list[Point]:
    """Default points of a launch. A kernel that is launched at none of them is judged at all of them."""
    points = default_points(target.page_size)
    return [point for point in points if is_launched(figures, point.dims)] or list(points)
