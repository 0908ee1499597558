"""`target="auto"`: the target file of the machine that is here."""

import re
import warnings
from dataclasses import dataclass

from octavo.compiler.errors import MissingDependencyError
from octavo.compiler.target import Target, load_target, target_names
from octavo.runtime.cuda import Device
from octavo.runtime.cuda_driver import CudaDriver

AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """What "auto" takes. warning: how the device differs from the target; empty if it is that machine."""

    target: Target
    reason: str
    warning: str = ""


def resolve_target(name: str) -> Target:
    """The target of that name; for "auto" that of this machine, with a warning if it is only the nearest one.

    Raises OptionError for a name without a file.
    """
    if name != AUTO:
        return load_target(name)
    choice = automatic_target()
    if choice.warning:
        warnings.warn(choice.warning, stacklevel=3)
    return choice.target


def automatic_target() -> Choice:
    """The choice for device 0 of this machine, or for its processor."""
    try:
        driver = CudaDriver()
    except MissingDependencyError as error:
        return Choice(load_target("cpu"), f"no GPU can be used ({error})")
    try:
        return choose_target(driver.device)
    finally:
        driver.close()


def choose_target(device: Device) -> Choice:
    """The target of the device's compute capability that has its name, or else the nearest number of SMs."""
    shown = f"{device.name} (sm_{device.arch}, {device.sm_count} SMs)"
    known = [target for target in map(load_target, target_names()) if target.arch == device.arch]
    if not known:
        archs = sorted({f"sm_{t.arch}" for t in map(load_target, target_names()) if t.arch})
        warning = f"target: no kernels are made for {shown}, only for {', '.join(archs)}; compiling for cpu"
        return Choice(load_target("cpu"), f"no target is for {shown}", warning)
    words = set(re.findall(r"[a-z0-9]+", device.name.lower()))
    named = [target for target in known if set(target.name.split("_")) <= words]
    nearest = min(named or known, key=lambda target: abs((target.sm_count or 0) - device.sm_count))
    if named and nearest.sm_count == device.sm_count:
        return Choice(nearest, f"the GPU is {shown}")
    warning = (
        f"target: no target file is for {shown}; compiling for {nearest.name} ({nearest.sm_count} SMs), the nearest "
        "of its arch: kernels run, sizes were chosen for that one"
    )
    return Choice(nearest, f"the nearest to {shown}", warning)
