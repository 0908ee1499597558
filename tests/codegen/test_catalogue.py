"""Every corner on every kind of arch, short of building it: what it says of itself must make sense."""

import pytest

from octavo.codegen.catalogue import CORNERS
from octavo.codegen.corner import Corner
from octavo.codegen.gates import FEATURES
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.render import render
from octavo.compiler.expression import evaluate, validate, validate_condition
from octavo.compiler.program import DIMS
from octavo.compiler.target import Target, load_target

TARGETS = [load_target(name) for name in ("b200", "b300", "h100", "rtx_pro_6000")]
SIZES = (*DIMS, "S")


def launches(corner: Corner, target: Target) -> list[KernelSpec]:
    return [] if corner.refuse(target) else list(corner.make(target).launches)


def check_expressions(kernel: KernelSpec) -> None:
    validate_condition(kernel.when, DIMS)
    shapes = [size for arg in kernel.args for size in (*arg.shape, arg.value) if size != ""]
    shapes += [size for _, _, shape in kernel.scratch for size in shape]
    for expression in (*kernel.grid, *shapes):
        if not isinstance(expression, float):
            validate(expression, DIMS)
    for expression in (kernel.bytes, kernel.flops, kernel.iterations or "0", kernel.tiles or "0"):
        validate(expression, SIZES)
        assert evaluate(expression, dict.fromkeys(SIZES, 3)) >= 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_corner_has_sound_expressions_known_features_and_a_text(target: Target) -> None:
    rendered: set[str] = set()
    for corner in CORNERS:
        for kernel in launches(corner, target):
            for choice in (choice for form in kernel.forms for choice in form.choices):
                check_expressions(choice)
            assert set(kernel.features) <= set(FEATURES), corner.name
            if kernel.template not in rendered:
                compile(render(kernel), kernel.template, "exec")
                rendered.add(kernel.template)


def test_blackwell_has_no_corner_refused_for_lack_of_a_tensor_core() -> None:
    """What is refused on B200 is refused for its shape or because it is another arch's form."""
    for corner in CORNERS:
        reason = corner.refuse(TARGETS[0])
        assert reason is None or "sm_100" not in reason or "no " not in reason, (corner.name, reason)
