"""Products and pages of a lowered graph, and the modules by which globs find them."""

from stages import before

from octavo.passes.products import find_pages, find_products, matches, source_weights
from octavo.passes.rewrite import Recipe, recipes


def test_products_of_a_tiny_llama() -> None:
    products = find_products(before(""))
    assert [p.name for p in products] == list(dict.fromkeys(p.name for p in products))
    head = [p for p in products if "lm_head" in p.name or "embed" in p.name]
    assert len(head) == 1
    assert (len(products) - 1) % 4 == 0, "qkv, o, gate and up, down of each layer"


def test_a_merged_weight_knows_its_sources() -> None:
    graph_module = before("")
    name = next(p.name for p in find_products(graph_module) if "q_proj" in p.name)
    recipes(graph_module)[name] = Recipe(("a.q.weight", "a.kv"), lambda parts: parts[0])
    recipes(graph_module)["a.kv"] = Recipe(("a.k.weight", "a.v.weight"), lambda parts: parts[0])
    assert source_weights(recipes(graph_module), name) == ["a.q.weight", "a.k.weight", "a.v.weight"]


def test_pages_are_counted_by_cache() -> None:
    products, pages = find_products(before("")), find_pages(before(""))
    assert len(pages) == (len(products) - 1) // 4


def test_globs_find_modules_by_name_and_below() -> None:
    modules = frozenset(("model.layers.3.mlp.down_proj",))
    assert matches(modules, ("model.layers.3.*",)) == "model.layers.3.*"
    assert matches(modules, ("*.down_proj",)) == "*.down_proj"
    assert not matches(modules, ("*.up_proj",))
