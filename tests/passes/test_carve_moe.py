"""FFNs become experts: the dense one where all are active, the dense one without the others' neurons where not."""

from dataclasses import replace

import pytest
import torch
from stages import BF16, BOUND, FP32, LENGTHS, before, calls, logits, tokens
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.carve_model import prove
from octavo.compiler.carving import Carving
from octavo.compiler.errors import PassError
from octavo.compiler.options import CarveConfig
from octavo.passes.carve_moe import carve_moe, find_ffns
from octavo.passes.products import find_products
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo
WHOLE, SOME, UNSHARED = CarveConfig(4, 1, 3), CarveConfig(4, 1, 1), CarveConfig(4, 0, 2)


def carvings(graph_module: GraphModule, config: CarveConfig) -> dict[str, Carving]:
    """Neurons in random order, a random router."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for ffn in find_ffns(graph_module, config):
        hidden, intermediate = ffn.weights[1].meta["val"].shape
        width = intermediate // config.num_experts
        order = torch.randperm(intermediate, generator=generator)
        shared, routed = order.split([intermediate - width * config.num_routed, width * config.num_routed])
        router = torch.randn(config.num_routed, hidden, generator=generator)
        bias = torch.randn(config.num_routed, generator=generator)
        none = torch.zeros(config.num_routed, dtype=torch.int64)
        found[ffn.name] = Carving(shared, routed.view(config.num_routed, width), router, bias, none, none)
    return found


def carved(graph_module: GraphModule, config: CarveConfig) -> PassReport:
    given = carvings(graph_module, config)
    return run_pass(lambda graph: carve_moe(graph, config, given, prove), graph_module)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_with_all_experts_active_it_is_the_dense_model(dtype: torch.dtype) -> None:
    graph_module = before("", dtype=dtype)
    expected = {length: logits(graph_module, tokens(length)) for length in LENGTHS}
    report = carved(graph_module, WHOLE)
    assert report.matched == 2 and report.exactness == "reassociates"
    assert report.proof.sites == 2 and report.proof.worst < report.proof.bound
    for target, count in ((octavo.moe.default, 2), (octavo.router.default, 2), (octavo.act_mul.default, 2)):
        assert len(calls(graph_module, target)) == count
    for length, wanted in expected.items():
        difference = (logits(graph_module, tokens(length)) - wanted).abs().max() / wanted.abs().max()
        assert float(difference) < BOUND[dtype]


@pytest.mark.parametrize("config", [SOME, UNSHARED])
def test_with_fewer_it_is_the_dense_model_without_the_others(config: CarveConfig) -> None:
    """One FFN by itself, its input random: the sum over the neurons that the carving selects, in fp64."""
    graph_module = before("")
    given = carvings(graph_module, config)
    ffn = find_ffns(graph_module, config)[0]
    gate_up, down = (held(graph_module, str(weight.target)).double() for weight in ffn.weights)
    carving = given[ffn.name]
    report = run_pass(lambda graph: carve_moe(graph, config, given, prove), graph_module)
    assert report.proof.sites == 2
    x = torch.randn(20, down.shape[0], generator=torch.Generator().manual_seed(1))
    gate, up = (x.double() @ gate_up.T).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    scores = x.double() @ carving.router.double().T + carving.bias.double()
    chosen = scores.argsort(1, descending=True)[:, : config.top_k].tolist()
    rows = [torch.cat([carving.shared, *(carving.routed[e] for e in experts)]) for experts in chosen]
    wanted = torch.stack([hidden[i, row] @ down[:, row].T for i, row in enumerate(rows)])
    site = report.sites[0]
    result = run_form(graph_module, site.after, x, x @ carving.router.T)
    assert torch.allclose(result.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def run_form(graph_module: GraphModule, form: GraphModule, x: Tensor, scores: Tensor) -> Tensor:
    """A site's new form on rows and scores, its other inputs the weights of the layer."""
    values: list[Tensor] = []
    for node in (n for n in form.graph.nodes if n.op == "placeholder"):
        shape = tuple(node.meta["val"].shape)
        if len(shape) == 3 and not isinstance(shape[1], int):
            values.append((scores if shape[-1] == scores.shape[1] else x)[None])
        else:
            (match,) = [n for n in graph_module.graph.find_nodes(op="get_attr") if n.name == node.name] or [
                None
            ]
            values.append(torch.zeros(shape) if match is None else held(graph_module, str(match.target)))
    results: tuple[Tensor, ...] = torch.fx.Interpreter(form).run(*values)
    return results[0][0]


@pytest.mark.parametrize("config", [WHOLE, SOME])
@pytest.mark.parametrize("what", ["twice", "owner"])
def test_a_carving_that_loses_neurons_is_refuted(config: CarveConfig, what: str) -> None:
    """A neuron in two experts, or shared ones that are also routed: not what the form claims."""
    graph_module = before("")
    given = carvings(graph_module, config)
    name, carving = next(iter(given.items()))
    wrong = carving.routed.clone()
    wrong[0, 0] = wrong[1, 0] if what == "twice" else carving.shared[0]
    given[name] = replace(carving, routed=wrong)
    with pytest.raises(PassError, match=r"carve_moe: the rewrite of .* is not equal to what it replaced"):
        carve_moe(graph_module, config, given, prove)


def test_old_weights_go_and_a_second_run_changes_nothing() -> None:
    graph_module = before("")
    (gate_up, down) = find_ffns(graph_module, SOME)[0].weights
    carved(graph_module, SOME)
    for weight in (gate_up, down):
        with pytest.raises(AttributeError):
            held(graph_module, str(weight.target))
    again = carve_moe(graph_module, SOME, {})
    assert again.matched == 0 and len(again.rejected) == 2
    assert {one.reason for one in again.rejected} == {"it is the shared expert of a mixture of experts"}


def test_what_cannot_be_carved_says_why() -> None:
    graph_module = before("")
    report = PassReport("carve_moe")
    many = CarveConfig(10_000, 1, 1)
    assert find_ffns(graph_module, many, report) == []
    assert all("neurons, fewer than 10000 experts" in one.reason for one in report.rejected)
    ffn, other = find_ffns(graph_module, SOME)
    with graph_module.graph.inserting_after(ffn.activated):
        graph_module.graph.call_function(octavo.add.default, (ffn.activated, ffn.activated))
    other.down.args = (*other.down.args[:2], graph_module.graph.find_nodes(op="get_attr")[0])
    report = PassReport("carve_moe")
    assert find_ffns(graph_module, SOME, report) == []
    reasons = [one.reason for one in report.rejected]
    assert reasons == ["what it computes in between is read elsewhere too", "its products have a bias"]


def test_weights_know_what_they_are_made_of() -> None:
    """So that globs of the model's own modules name them."""
    graph_module = before("")
    carved(graph_module, SOME)
    products = {product.name: product for product in find_products(graph_module)}
    experts = next(product for product in products.values() if product.kind == "moe")
    gate_up, down = experts.sources
    assert gate_up.startswith("model.layers.0.mlp.gate_proj_up_proj")
    assert down == "model.layers.0.mlp.down_proj.weight"
    router = next(product for name, product in products.items() if name.endswith("_router.weight"))
    assert router.high == "selects experts"
