"""Hidden states are Hugging Face's, numbered as there, from the model to the program's buffers."""

import numpy as np
import pytest
import torch
from heads import PROMPTS, two_prompts
from models import LAYERS, SPELLINGS, TinyLM, llama, tiny
from numpy.typing import NDArray
from passed_on import PassedOn
from stages import compiled, tokens
from torch import Tensor, nn
from zoo import build

import octavo
from octavo.compiler.capture import capture, reference_outputs
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.errors import CaptureError, OptionError, PassError
from octavo.compiler.graph_model import GraphModel
from octavo.compiler.hidden_states import decoder_layers, resolve_features
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Settings, lower
from octavo.compiler.whole_model import check_quantized_model, check_whole_model
from octavo.runtime.features import wide
from octavo.runtime.model_runner import NativeRunner

Array = NDArray[np.float32]


def theirs(model: nn.Module, ids: Tensor, features: tuple[int, ...]) -> list[Tensor]:
    """As Hugging Face's own option gives them."""
    with torch.no_grad():
        found = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return [found[number] for number in features]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_they_are_hugging_faces(name: str) -> None:
    model = llama(num_hidden_layers=3) if name == "llama" else build(name)
    numbers = (1, 0, -1)
    with torch.no_grad():
        _, *found = reference_outputs(model, tokens(7), features=numbers)
    for own, wanted in zip(found, theirs(model, tokens(7), numbers), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=0)


def test_the_last_is_what_the_last_product_reads() -> None:
    model = TinyLM(SPELLINGS["sdpa"]).eval()
    with torch.no_grad():
        logits, last = reference_outputs(model, tokens(5), features=(LAYERS,))
        torch.testing.assert_close(model.head(last), logits)

        class Tied(TinyLM):
            def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
                x = self.embed(input_ids)
                for layer in self.layers:
                    x = layer(x, positions)
                return nn.functional.linear(self.norm(x), self.embed.weight)

        tied = Tied(SPELLINGS["sdpa"]).eval()
        logits, last = reference_outputs(tied, tokens(5), features=(-1,))
        torch.testing.assert_close(last @ tied.embed.weight.T, logits)


@pytest.mark.parametrize("features", [(), (4,), (-2,), (1, 1), (3, -1)])
def test_other_numbers_are_refused(features: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match=r"expected different numbers from 0 .* to 3 .*which has 3 layers"):
        resolve_features(llama(num_hidden_layers=3), features)


def test_models_without_layers_to_count_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"has no nn\.ModuleList of layers"):
        decoder_layers(nn.Linear(3, 3))

    class Idle(TinyLM):
        def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            return self.head(self.norm(self.embed(input_ids)))  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"the layers \[1\] were given no hidden states"):
        reference_outputs(Idle(SPELLINGS["sdpa"]), tokens(4), features=(1,))


def test_a_list_inside_of_a_layer_is_none_of_layers() -> None:
    model = build("mixtral")
    assert decoder_layers(model) is model.model.layers  # type: ignore[union-attr]


@pytest.mark.parametrize("features", [(1, 3), (-1,)])
def test_graphs_hand_them_out_where_equal_layers_are_folded_too(features: tuple[int, ...]) -> None:
    model = llama(num_hidden_layers=5)
    lowered = lower(capture(model, features), CompileOptions(verify="off"), Settings(4, 48))
    seen = [r.notes["layers"] for r in lowered.reports if r.name == "unfold_layers"]
    assert len(seen) == (1 if features == (-1,) else 0)  # between those that are handed out are too few
    with torch.no_grad():
        logits, *found = GraphModel(lowered.graph_module, 4)(tokens(9), torch.arange(9)[None])
        torch.testing.assert_close(logits, model(tokens(9)).logits, rtol=1e-4, atol=1e-4)
    for own, wanted in zip(found, theirs(model, tokens(9), features), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)


class Wrong(PassedOn):
    """A runner whose features are off in one number."""

    @property
    def features(self) -> Array:
        found = wide(super().features).copy()  # type: ignore[arg-type]
        found[1, 70] += 0.02 * np.abs(found[1]).max()
        return found


def test_programs_hand_out_those_of_every_token_of_a_step() -> None:
    """One that is the sum of a fused norm, one that is nobody else's; both where pages were written before too."""
    features = (0, 1, -1)
    made = octavo.compile(tiny("llama"), page_size=4, features=features)
    names = [(b.name, b.dtype, b.shape) for b in made.artifact.program.hidden_states]
    assert names == [(f"features_{i}", "fp32", ("T", 64)) for i in range(3)]
    wanted = torch.cat(
        [torch.cat(theirs(tiny("llama"), torch.tensor([p]), features), -1)[0] for p in PROMPTS]
    )
    native = NativeRunner(made.artifact, 8)
    for runner in (native, EagerRunner(made.artifact, 8)):
        runner.run(two_prompts())
        assert runner.features is not None and runner.features.shape == (11, 192)
        torch.testing.assert_close(torch.from_numpy(wide(runner.features)), wanted, rtol=1e-5, atol=1e-5)
    large = made.runner(64)
    check_whole_model(tiny("llama"), made.artifact, large, features)
    with pytest.raises(PassError, match="verify: features of the artifact differ from the model's by 2"):
        check_whole_model(tiny("llama"), made.artifact, Wrong(large), features)
    lowered = lower(capture(tiny("llama"), features), CompileOptions(verify="off"), Settings(4, 48))
    given = tiny("llama"), GraphModel(lowered.graph_module, 4), made.artifact
    check_quantized_model(*given, large, features=features)
    with pytest.raises(PassError, match="verify: features of the artifact differ from its quantised graph's"):
        check_quantized_model(*given, Wrong(large), features=features)


def test_programs_without_them_hand_out_none() -> None:
    runner = NativeRunner(compiled("llama").artifact, 8)
    runner.run(two_prompts())
    assert runner.features is None
