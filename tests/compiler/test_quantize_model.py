"""From a lowered graph to a quantised one: what is told of it, that it repeats, and that it needs little memory."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import pytest
import torch
from models import VOCAB
from stages import before, calls
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.compiler.capture import capture
from octavo.compiler.options import CompileOptions, QuantConfig
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.progress import progress_bars
from octavo.compiler.quantize_model import quantize_model
from octavo.compiler.verify_quantized import prove_quantized
from octavo.passes.rewrite import held

octavo = torch.ops.octavo
PAGE_SIZE = 4
STATIC = QuantConfig(kv="fp8")


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (40, 48, 30)]


def quantized(config: QuantConfig, calibrated: bool = True) -> tuple[GraphModule, dict[str, Any], list[str]]:
    graph_module = before("", "llama")
    with progress_bars(False) as bars:
        given = sequences() if calibrated else None
        _, provenance, _ = quantize_model(graph_module, config, given, PAGE_SIZE, "linear", bars, None)
    return graph_module, provenance, list(bars.seconds)


def values(graph_module: GraphModule) -> Mapping[str, Tensor]:
    names = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    return {name: held(graph_module, name) for name in sorted(names)}


@pytest.mark.parametrize(
    "config",
    [STATIC, QuantConfig(weights="gptq"), QuantConfig("auto"), QuantConfig("auto_weight_only", bits=6.0)],
)
def test_it_repeats_to_the_bit(config: QuantConfig) -> None:
    (first, told, _), (second, told_again, _) = quantized(config), quantized(config)
    assert told == told_again
    assert str(first.graph) == str(second.graph)
    ours, theirs = values(first), values(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))


def test_it_tells_how_it_was_done() -> None:
    graph_module, told, phases = quantized(STATIC)
    assert phases[:-1] == ["calibrate", "quantize"]
    assert (told["recipe"], told["e4m3_max"], told["config"]["kv"]) == ("octavo-v1", 256.0, "fp8")
    assert told["calibration"]["tokens"] == 118 and len(told["calibration"]["sha256"]) == 64
    formats = {name: one["format"] for name, one in told["plan"]["products"].items()}
    assert formats.pop("lm_head.weight") == "bf16" and set(formats.values()) == {"nvfp4"}
    assert len(formats) == len(calls(graph_module, octavo.nvfp4_linear.default)) == 8
    assert {page["format"] for page in told["plan"]["pages"].values()} == {"fp8"}
    scales = {
        float(tensor) for name, tensor in values(graph_module).items() if name.startswith("input_scales.")
    }
    planned = [one["input_scale"] for one in told["plan"]["products"].values() if one["input_scale"]]
    assert scales == {float(torch.tensor(scale)) for scale in planned}


def test_without_calibration_it_says_so() -> None:
    _, told, phases = quantized(QuantConfig("fp8"), calibrated=False)
    assert phases[:-1] == ["quantize"] and told["calibration"] is None and told["e4m3_max"] is None
    _, told, _ = quantized(QuantConfig("nvfp4_weight_only", weights="nearest"), calibrated=False)
    assert told["e4m3_max"] == 448.0


def test_the_search_weighs_by_what_calibration_saw() -> None:
    config = QuantConfig("nvfp4_weight_only")
    with_it, without = (values(quantized(config, calibrated)[0]) for calibrated in (True, False))
    codes = [name for name in with_it if name.endswith("_codes")]
    assert codes and any(not torch.equal(with_it[name], without[name]) for name in codes)


def test_formats_are_measured_where_auto_is_asked() -> None:
    _, told, phases = quantized(QuantConfig("auto", bits=6.0))
    assert phases[:-1] == ["calibrate", "measure", "quantize"]
    formats = [one["format"] for one in told["plan"]["products"].values()]
    assert {"nvfp4", "fp8"} <= set(formats)


class Live(TorchDispatchMode):
    """Bytes of the storages that were made inside and still live, and the most that there were after any op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, ref[Tensor]] = {}
        self.storages: dict[int, tuple[int, int]] = {}  # address: bytes, tensors
        self.bytes = self.most = 0

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self.tensors

    def add(self, tensor: Tensor) -> None:
        key, storage = id(tensor), tensor.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        if key in self.tensors or not address:
            return
        known = self.storages.get(address, (count, 0))
        self.storages[address] = (known[0], known[1] + 1)
        self.bytes += count if known[1] == 0 else 0
        self.most = max(self.most, self.bytes)
        self.tensors[key] = ref(tensor, lambda _: self.drop(key, address))

    def drop(self, key: int, address: int) -> None:
        del self.tensors[key]
        count, tensors = self.storages.pop(address)
        if tensors > 1:
            self.storages[address] = (count, tensors - 1)
        else:
            self.bytes -= count

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if type(one) is Tensor and not one.is_meta:
                self.add(one)
        return result


@pytest.fixture(scope="module")
def wide_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=32, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    bf16: nn.Module = model.to(torch.bfloat16).eval()
    return bf16


@pytest.mark.parametrize("config", [QuantConfig(), QuantConfig("fp8")])
def test_memory_stays_under_two_layers_and_the_output(
    config: QuantConfig, wide_model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.compiler.nvfp4_weights.CHUNK_BLOCKS", 256)
    monkeypatch.setattr("octavo.compiler.weight_quantizer.CHUNK_ELEMENTS", 1 << 14)
    monkeypatch.setattr("octavo.compiler.precision_report.CHUNK_ELEMENTS", 1 << 14)
    monkeypatch.setattr("octavo.compiler.quantized_forms.PRODUCT_ELEMENTS", 1 << 14)
    monkeypatch.setattr("octavo.compiler.quantized_values.CHUNK", 1 << 12)
    monkeypatch.setattr("octavo.compiler.reduced_sizes.WIDE", 64)
    captured, options = capture(wide_model), CompileOptions(verify="off")
    graph_module = lower(captured, options, settings_of(captured, options, PAGE_SIZE)).graph_module
    layer = sum(p.nbytes for name, p in wide_model.named_parameters() if ".layers.0." in name)
    with progress_bars(False) as bars, Live() as live:
        quantize_model(graph_module, config, [[*range(8)]], PAGE_SIZE, "linear", bars, prove_quantized)
    output = sum(t.nbytes for t in values(graph_module).values() if t in live)
    assert output > layer
    assert live.most < 2 * layer + output
