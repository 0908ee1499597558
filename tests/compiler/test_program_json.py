import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.compiler.errors import ArtifactError
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import STEP_INPUTS, Buffer, ExpertLayer, Program, Shard, Step
from octavo.compiler.program_json import program_from_json, program_to_json

PROGRAM = Program(
    buffers=(
        *(Buffer(name, "input", dtype, shape) for name, (dtype, shape) in STEP_INPUTS.items()),
        Buffer("w", "weight", "bf16", (3, 5)),
        Buffer("k_cache_0", "cache", "fp32", ("num_pages", 2, 16, 4)),
        Buffer("h", "workspace", "fp32", (1, "T", 8), "(T + 15) // 16 * 64"),
        Buffer("h2", "workspace", "fp32", (1, "T", 8), 0),
        Buffer("logits", "output", "fp32", (1, "L", 11)),
    ),
    steps=(
        Step("k", ("h", "w", "T * 8", 1e-05, 3, -1e30), ("T", 1, "R + 1"), "T <= 16"),
        Step("k", ("h", "logits")),
    ),
    workspace="T * 128 + 64",
    page_size=16,
)


def hidden(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    """A buffer of hidden states, as it lies in the file."""
    return {"name": name, "kind": kind, "dtype": "bf16", "shape": ["T", 8], "offset": None, **changes}


def test_hidden_states_are_kept() -> None:
    data = json.loads(program_to_json(PROGRAM))
    data["buffers"] += [
        hidden("output", "features_0"),
        hidden("output", "features_1", dtype="fp32", shape=["T", 3]),
    ]
    data["buffers"].insert(0, hidden("input", "features", shape=["T", 11]))
    program = program_from_json(json.dumps(data))
    assert [b.shape for b in program.hidden_states] == [("T", 8), ("T", 3)]
    assert program.logits.name == "logits"
    assert program_from_json(program_to_json(program)) == program


def test_round_trip_is_exact_and_stable() -> None:
    text = program_to_json(PROGRAM)
    assert program_from_json(text) == PROGRAM
    assert program_to_json(program_from_json(text)) == text


OF_RANKS = replace(
    PROGRAM,
    buffers=(*PROGRAM.buffers, Buffer("table", "weight", "i64", (4,))),
    steps=(
        *PROGRAM.steps,
        Step("all_reduce", ("h", "h2"), axis="tp"),
        Step("all_gather", ("h", "h2"), axis="tp", options=(-1, 2)),
    ),
    mesh=Mesh(dp=1, ep=1, tp=2),
    shards={
        "w": Shard(0, (((0, 1), (4, 6)), ((1, 4),))), "table": Shard(0, (((0, 4),), ((4, 8),))),
    },
    experts=(ExpertLayer("table", ("w",)),),
)  # fmt: skip


def test_programs_of_ranks_are_kept_and_one_rank_is_not_written() -> None:
    text = program_to_json(OF_RANKS)
    assert program_from_json(text) == OF_RANKS
    assert program_to_json(program_from_json(text)) == text
    assert '"mesh"' not in program_to_json(PROGRAM) and '"axis"' not in program_to_json(PROGRAM)


def set_step(data: Any, **fields: Any) -> None:
    data["steps"][2].update(fields)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: d["mesh"].update(tp=0), "sizes of 1 or more"),
        (lambda d: d["mesh"].update(tp=10**6), "at most 4096 ranks"),
        (lambda d: d["mesh"].update(tp=True), "sizes of 1 or more"),
        (lambda d: d["shards"]["w"].update(dim=2), "an axis of a weight"),
        (lambda d: d["shards"].update(h={"dim": 0, "pieces": []}), "an axis of a weight"),
        (lambda d: d["shards"]["w"]["pieces"].pop(), "3 elements of axis 0 for each of 2 ranks"),
        (lambda d: d["shards"]["w"]["pieces"][1][0].reverse(), r"a range \[start, stop\]"),
        (lambda d: d["shards"]["w"]["pieces"][1][0].append(4), "a list of at most 2"),
        (lambda d: d["shards"]["w"]["pieces"][1].append([0, 1]), "3 elements of axis 0"),
        (lambda d: d["experts"][0].update(weights=["h"]), "weights of which ranks hold pieces"),
        (lambda d: set_step(d, kernel="k"), "one of all_reduce"),
        (lambda d: set_step(d, axis="pp"), "on one of dp, ep, tp"),
        (lambda d: set_step(d, args=["h"]), "2 buffers as arguments"),
        (lambda d: set_step(d, args=["h", "T"]), "2 buffers as arguments"),
        (lambda d: set_step(d, options=[1]), "options of"),
        (lambda d: set_step(d, when="T > 1"), "one of all_reduce"),
    ],
)
def test_damaged_programs_of_ranks_are_refused(damage: Callable[[Any], None], expected: str) -> None:
    data = json.loads(program_to_json(OF_RANKS))
    damage(data)
    with pytest.raises(ArtifactError, match=rf"program\.json(.|\n)*{expected}"):
        program_from_json(json.dumps(data))


GROUPED = replace(
    PROGRAM,
    buffers=(
        *PROGRAM.buffers,
        Buffer("page_table_1", "input", *STEP_INPUTS["page_table"]),
        Buffer("slot_mapping_2", "input", *STEP_INPUTS["slot_mapping"]),
    ),
    page_windows=(None, 4096, 512),
)


def test_page_groups_are_kept_and_one_without_a_window_is_not_written() -> None:
    assert program_from_json(program_to_json(GROUPED)) == GROUPED
    assert "page_windows" not in program_to_json(PROGRAM)
    assert program_from_json(program_to_json(replace(PROGRAM, page_windows=(7,)))).page_windows == (7,)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None, 4096], "inputs of 2 page groups, got slot_mapping_2"), ([], "for each page group"),
        ([None, 0, 1], "a window of 1 to"), ([None, True, 1], "a window of 1 to"), ([None, "1", 1], "a window of 1 to"),
        ([None, 2**31, 1], "a window of 1 to"), (None, "a list of at most"),
    ],
)  # fmt: skip
def test_windows_that_are_none_are_refused(windows: Any, expected: str) -> None:
    data = json.loads(program_to_json(GROUPED)) | {"page_windows": windows}
    with pytest.raises(ArtifactError, match=rf"program\.json(.|\n)*{expected}"):
        program_from_json(json.dumps(data))


@pytest.mark.parametrize("name", ["page_table_0", "page_table_01", "seq_lens_1", "page_table_1_1"])
def test_other_inputs_have_no_groups(name: str) -> None:
    strange = replace(GROUPED, buffers=(*PROGRAM.buffers, Buffer(name, "input", *STEP_INPUTS["page_table"])))
    with pytest.raises(ArtifactError, match="step inputs among"):
        program_from_json(program_to_json(strange))


def test_one_buffer_or_step_a_line() -> None:
    lines = program_to_json(PROGRAM).splitlines()
    assert sum('"kernel"' in line for line in lines) == len(PROGRAM.steps)
    assert sum('"dtype"' in line for line in lines) == len(PROGRAM.buffers)


def edit(change: Callable[[Any], object]) -> str:
    data = json.loads(program_to_json(PROGRAM))
    change(data)
    return json.dumps(data)


WEIGHT, CACHE, SPACE, OUTPUT = (len(STEP_INPUTS) + i for i in (0, 1, 2, 4))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d.pop("steps"), "an object of buffers, page_size, steps, workspace"),
        (lambda d: d.update(extra=1), "an object of buffers"),
        (lambda d: d.update(buffers={}), "a list of at most"),
        (lambda d: d.update(page_size=0), "page_size of 1 to"),
        (lambda d: d.update(page_size=True), "page_size of 1 to"),
        (lambda d: d.update(workspace="T * S"), "got 'S'"),
        (lambda d: d.update(workspace=-1), "a size of 0 or more"),
        (lambda d: d.update(workspace=None), "a size of 0 or more"),
        (lambda d: d["buffers"].append(d["buffers"][WEIGHT]), "distinct buffer names, got 1 repeated"),
        (lambda d: d["buffers"][WEIGHT].update(name="../w"), "a name"),
        (lambda d: d["buffers"][WEIGHT].update(name=3), "a name"),
        (lambda d: d["buffers"][WEIGHT].update(kind="disk"), "'w': expected a kind of input"),
        (lambda d: d["buffers"][WEIGHT].update(dtype="fp64"), "a dtype of fp32"),
        (lambda d: d["buffers"][WEIGHT].update(shape=["T", 5]), "got 'T'"),
        (lambda d: d["buffers"][WEIGHT].update(shape=[1] * 9), "a list of at most 8"),
        (lambda d: d["buffers"][WEIGHT].update(offset=0), "an offset for workspace buffers only"),
        (lambda d: d["buffers"][SPACE].update(offset=None), "an offset for workspace buffers only"),
        (lambda d: d["buffers"][SPACE].update(offset="T ** 9"), "got BinOp"),
        (lambda d: d["buffers"][0].update(dtype="i32"), "step inputs among input_ids i64"),
        (lambda d: d["buffers"][0].update(shape=["R"]), "step inputs among input_ids i64"),
        (lambda d: d["buffers"][0].update(name="tokens"), "step inputs among input_ids i64"),
        (lambda d: d["buffers"][CACHE].update(shape=["num_pages", 2, 8, 4]), r"\(num_pages, kv_heads, 16"),
        (lambda d: d["buffers"][CACHE].update(shape=["T", 2, 16, 4]), r"\(num_pages, kv_heads, 16"),
        (lambda d: d["buffers"][OUTPUT].update(dtype="bf16"), "fp32 logits as the first output"),
        (lambda d: d.update(buffers=d["buffers"][:OUTPUT], steps=[]), "fp32 logits as the first output"),
        (lambda d: d["buffers"].append(hidden("output", "features_1")), "an output buffer features_0"),
        (lambda d: d["buffers"].append(hidden("output", "more")), "an output buffer features_0"),
        (
            lambda d: d["buffers"].append(hidden("output", "features_0", dtype="i32")),
            r"width up to \d+\) of fp32, bf16",
        ),
        (
            lambda d: d["buffers"].append(hidden("output", "features_0", shape=["L", 8])),
            r"for output 'features_0'",
        ),
        (
            lambda d: d["buffers"].append(hidden("output", "features_0", shape=["T"])),
            r"for output 'features_0'",
        ),
        (
            lambda d: d["buffers"].insert(0, hidden("input", "features", shape=["T", "T"])),
            "for input 'features'",
        ),
        (
            lambda d: d["buffers"].insert(0, hidden("input", "features", shape=["T", 2**25])),
            "for input 'features'",
        ),
        (
            lambda d: d["buffers"].insert(0, hidden("input", "features", shape=["T", 0])),
            "for input 'features'",
        ),
        (lambda d: d["steps"][0].update(kernel="a b"), "a kernel name"),
        (lambda d: d["steps"][0].update(args=["unknown"]), "got 'unknown'"),
        (lambda d: d["steps"][0].update(args=[None]), "a size of 0 or more, or an expression"),
        (lambda d: d["steps"][0].update(args=[True]), "a size of 0 or more, or an expression"),
        (lambda d: d["steps"][0].update(args=[[1]]), "a size of 0 or more, or an expression"),
        (lambda d: d["steps"][0].update(args=["T"] * 300), "a list of at most 256"),
        (lambda d: d["steps"][0].update(grid=[1, 1]), "3 grid sizes, got 2"),
        (lambda d: d["steps"][0].update(grid=["T", 1, "x"]), "got 'x'"),
        (lambda d: d["steps"][0].update(when="T"), "step 0 'k' when"),
        (lambda d: d["steps"][0].update(when=None), "step 0 'k' when"),
        (lambda d: d["steps"].append([]), "step 2: expected an object of"),
    ],
)
def test_anything_unsound_is_refused(change: Callable[[Any], object], expected: str) -> None:
    with pytest.raises(ArtifactError, match=f"program.json(.|\n)*{expected}(.|\n)*compile it again"):
        program_from_json(edit(change))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 200_000, '{"a": NaN}'])
def test_anything_but_a_program_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"program\.json: expected"):
        program_from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    with pytest.raises(ArtifactError, match="expected"):
        program_from_json(program_to_json(PROGRAM).replace("1e-05", number))


def test_not_every_input_need_be_used() -> None:
    fewer = replace(PROGRAM, buffers=PROGRAM.buffers[1:])
    assert program_from_json(program_to_json(fewer)) == fewer
