"""target="auto": which file is taken for which device."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from fake_cuda import B200, RecordingDriver

from octavo.compiler import device_target
from octavo.compiler.device_target import automatic_target, choose_target, resolve_target
from octavo.compiler.errors import MissingDependencyError, OptionError
from octavo.compiler.target import load_target, target_names
from octavo.runtime.cuda import Device


def device(name: str, arch: int, sm_count: int) -> Device:
    return replace(B200, name=name, arch=arch, sm_count=sm_count)


NAMES = {
    "b200": "NVIDIA B200", "b300": "NVIDIA B300 SXM6 AC", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200",
    "rtx_5090": "NVIDIA GeForce RTX 5090",
    "rtx_pro_6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in target_names() if name != "cpu"])
def test_every_gpu_that_has_a_file_is_recognised(name: str) -> None:
    target = load_target(name)
    assert target.arch is not None and target.sm_count is not None
    choice = choose_target(device(NAMES[name], target.arch, target.sm_count))
    assert (choice.target.name, choice.warning) == (name, "")
    assert choice.reason.startswith(f"the GPU is {NAMES[name]} (sm_{target.arch}, ")


@pytest.mark.parametrize(
    ("found", "name", "said"),
    [
        (("NVIDIA H100 PCIe", 90, 114), "h100", r"H100 PCIe \(sm_90, 114 SMs\); compiling for h100 \(132 SMs\)"),
        (("NVIDIA GB200", 100, 152), "b200", r"no target file is for NVIDIA GB200 .*compiling for b200 \(148 SMs\)"),
        (("NVIDIA GeForce RTX 5080", 120, 84), "rtx_5090", "RTX 5080 .*compiling for rtx_5090"),
        (("NVIDIA A100-SXM4-80GB", 80, 108), "cpu", r"no kernels are made for NVIDIA A100.*sm_100, .*for cpu"),
    ],
)  # fmt: skip
def test_the_nearest_is_taken_with_a_warning(
    found: tuple[str, int, int], name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = RecordingDriver(device(*found))
    monkeypatch.setattr(device_target, "CudaDriver", lambda: driver)
    with pytest.warns(UserWarning, match=said):
        assert resolve_target("auto").name == name


def test_without_a_gpu_it_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> Any:
        raise MissingDependencyError("GPU: none")

    monkeypatch.setattr(device_target, "CudaDriver", no_driver)
    choice = automatic_target()
    assert (choice.target.name, choice.reason) == ("cpu", "no GPU can be used (GPU: none)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_target("auto").name == "cpu"


def test_names_are_as_they_were() -> None:
    assert resolve_target("h200").name == "h200"
    with pytest.raises(OptionError, match="expected one of b200"):
        resolve_target("z80")
