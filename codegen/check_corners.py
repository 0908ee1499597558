"""Every corner of the catalogue built for every arch: what the machine code shows, what is refused, what fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from octavo.codegen.build_triton import each_kernel
from octavo.codegen.corner import Corner
from octavo.codegen.evidence import evidence_row
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.errors import CodegenError, OctavoError
from octavo.compiler.target import Target

TEMPLATES = Path(__file__).with_name("templates") / "triton"
# One target for each arch that is built for.
TARGETS = ("b200", "b300", "rtx_pro_6000", "h100")
OK, REFUSED, FAILED = "ok", "refused", "FAILED"


@dataclass(frozen=True)
class Outcome:
    """A kernel of a corner on a target.

    result  OK, REFUSED (the corner says what serves instead) or FAILED
    reason  empty for OK
    """

    corner: str
    kernel: str
    target: str
    arch: str
    result: str
    reason: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    tmem_columns: int | None = None
    key_opcodes: str = ""


class Bar(Protocol):
    """Begins a phase and gives what its progress is told."""

    def __call__(self, phase: str) -> Callable[[str, int, int], None]: ...


def check_corners(corners: Sequence[Corner], targets: Sequence[Target], bar: Bar) -> Iterator[Outcome]:
    """All outcomes, target by target. A corner that cannot even make its spec fails."""
    for target in targets:
        made = [(corner, _launches(corner, target)) for corner in corners]
        specs = [spec for _, launches in made if not isinstance(launches, Outcome) for spec in launches]
        results = dict(each_kernel(specs, target, bar(target.name)))
        for corner, launches in made:
            if isinstance(launches, Outcome):
                yield launches
                continue
            yield from (_outcome(corner, spec, target, results[spec.name]) for spec in launches)


def _launches(corner: Corner, target: Target) -> tuple[KernelSpec, ...] | Outcome:
    """The corner's launches, or why there are none."""
    arch = f"sm_{target.arch}"
    reason = corner.refuse(target)
    if reason is not None:
        return Outcome(corner.name, "", target.name, arch, REFUSED, reason)
    try:
        return corner.make(target).launches
    except (OctavoError, ValueError, AssertionError) as error:
        return Outcome(corner.name, "", target.name, arch, FAILED, f"no spec: {error}")


def _outcome(corner: Corner, spec: KernelSpec, target: Target, result: Kernel | CodegenError) -> Outcome:
    where = (corner.name, spec.name, target.name, f"sm_{target.arch}")
    if isinstance(result, CodegenError):
        return Outcome(*where, FAILED, str(result))
    launch, evidence = result.metadata["launch"], result.metadata["evidence"]
    return Outcome(
        *where, OK, "", evidence["registers"], evidence["spill_bytes"], launch["shared_bytes"],
        launch["tmem_columns"], str(evidence_row(result)["key_opcodes"]),
    )  # fmt: skip


def uncovered_templates(corners: Sequence[Corner], targets: Sequence[Target]) -> list[str]:
    """Templates of the Triton family of which no corner builds a kernel on any of the targets."""
    made = [_launches(corner, target) for target in targets for corner in corners]
    specs = [spec for launches in made if not isinstance(launches, Outcome) for spec in launches]
    used = {spec.template.rsplit("/", 1)[-1] for spec in specs}
    names = sorted(path.name for path in TEMPLATES.glob("*.jinja") if not path.name.startswith("_"))
    return [name for name in names if name not in used]
