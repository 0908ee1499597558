import io
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as official_load
from safetensors.numpy import save as official_save

from octavo.compiler.errors import ArtifactError
from octavo.compiler.weights import DTYPES, MappedWeight, Weight, map_weights, write_weights

PATH = Path("w.safetensors")


def to_map(content: bytes) -> mmap.mmap:
    mapped = mmap.mmap(-1, max(len(content), 1))
    mapped.write(content)
    return mapped


def to_bytes(weights: dict[str, Weight]) -> bytes:
    file = io.BytesIO()
    write_weights(file, weights)
    return file.getvalue()


def read(content: bytes) -> dict[str, MappedWeight]:
    return map_weights(PATH, to_map(content))


def with_header(entries: Any, data: bytes = bytes(64)) -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


# The official reader for numpy knows no fp8.
READABLE = sorted(name for name in DTYPES if not name.startswith("f8"))
_arrays = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=6).filter(
        lambda name: not name.startswith("__")
    ),
    st.tuples(st.sampled_from(READABLE), st.lists(st.integers(0, 5), max_size=3)),
    max_size=6,
)


@settings(deadline=None)
@given(_arrays)
def test_round_trip_and_official_reader_agree(spec: dict[str, tuple[str, list[int]]]) -> None:
    rng = np.random.default_rng(0)
    weights, expected = {}, {}
    for name, (dtype, shape) in spec.items():
        raw = rng.bytes(int(np.prod(shape)) * DTYPES[dtype][1].itemsize)
        weights[name] = Weight(dtype, tuple(shape), raw)
        expected[name] = (dtype, tuple(shape), raw)
    content = to_bytes(weights)
    back = read(content)
    assert {n: (w.dtype, w.shape, w.array.tobytes()) for n, w in back.items()} == expected
    assert all(w.array.size == 0 or w.array.ctypes.data % 64 == 0 for w in back.values())
    if not any(
        dtype in ("bf16", "fp8") for dtype, _ in spec.values()
    ):  # numpy, the official reader, has none
        official = official_load(content)
        assert {n: a.tobytes() for n, a in official.items() if n in spec} == {
            n: raw for n, (_, _, raw) in expected.items()
        }
        assert all(name in spec or name.startswith(".padding.") for name in official)


def test_reads_what_others_wrote() -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(3, dtype=np.int64)}
    back = read(official_save(arrays, metadata={"format": "np"}))
    assert all((back[name].array == array).all() for name, array in arrays.items()) and len(back) == 2


def test_data_may_be_bytes_an_array_a_view_or_a_function() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    forms: list[Any] = [array.tobytes(), bytearray(array.tobytes()), array.data, array, lambda: array]
    assert len({to_bytes({"x": Weight("fp32", (3, 4), form)}) for form in forms}) == 1
    strided = np.ascontiguousarray(array.T).T
    assert to_bytes({"x": Weight("fp32", (3, 4), strided)}) == to_bytes({"x": Weight("fp32", (3, 4), array)})


def test_functions_are_called_one_after_another() -> None:
    file = io.BytesIO()
    sizes: list[int] = []

    def make() -> bytes:
        sizes.append(len(file.getvalue()))
        return bytes(400)

    write_weights(file, {name: Weight("fp32", (100,), make) for name in "abc"})
    assert sizes == sorted(set(sizes)), "each is written before the next is asked for"


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"'x' expected 16 bytes for fp32 \[4\], got 12"):
        to_bytes({"x": Weight("fp32", (4,), bytes(12))})


@pytest.mark.parametrize(
    ("name", "dtype"), [("x", "fp7"), ("", "fp32"), (".padding.1", "fp32"), ("__metadata__", "fp32")]
)
def test_unknown_dtypes_and_reserved_names_are_refused(name: str, dtype: str) -> None:
    with pytest.raises(ArtifactError, match="expected a plain name and a dtype of fp32, bf16, i32, i64, u8"):
        to_bytes({name: Weight(dtype, (1,), bytes(4))})


GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a header within"),
        (b"\x00" * 8, "a header within"),
        ((2**60).to_bytes(8, "little") + b"{}", "a header within"),
        ((-1).to_bytes(8, "little", signed=True) + b"{}", "a header within"),
        (with_header(b"{nope"), "a JSON header"),
        (with_header(b"\xff\xfe{}"), "a JSON header"),
        (with_header(b"[" * 200_000), "a JSON header"),
        (with_header([]), "a JSON object as header"),
        (with_header(b'{"x":1,"x":2}'), "a JSON header, got a name occurs twice"),
        (with_header({"x": 3}), "dtype, shape and data_offsets of 'x'"),
        (with_header({"x": {**GOOD, "dtype": "F4"}}), "a dtype of F32"),
        (with_header({"x": {**GOOD, "shape": [-4, -4]}}), "sizes of 0 or more"),
        (with_header({"x": {**GOOD, "shape": [2**60, 2**60]}}), "sizes of 0 or more"),
        (with_header({"x": {**GOOD, "shape": [1] * 9}}), "at most 8 sizes"),
        (with_header({"x": {**GOOD, "shape": ["4", 4]}}), "sizes of 0 or more"),
        (with_header({"x": {**GOOD, "shape": [4, 5]}}), "80 bytes for 'x'"),
        (with_header({"x": {**GOOD, "data_offsets": [64, 0]}}), "64 bytes for 'x'"),
        (with_header({"x": {**GOOD, "data_offsets": [-64, 0]}}), "64 bytes for 'x'"),
        (with_header({"x": {**GOOD, "data_offsets": [64, 128]}}), "ends within the file"),
        (with_header({"x": GOOD}, bytes(60)), "ends within the file"),
        (with_header({"x": GOOD}, bytes(68)), "tensors fill the file"),
        (with_header({"x": GOOD, "y": GOOD}), "starts at 64"),
        (with_header({"x": {**GOOD, "data_offsets": [4, 68]}}, bytes(68)), "starts at 0"),
    ],
)
def test_unsound_headers_are_refused(content: bytes, expected: str) -> None:
    with pytest.raises(ArtifactError, match=f"safetensors: expected (.|\n)*{expected}"):
        read(content)


@settings(deadline=None)
@given(st.data())
def test_any_damage_gives_tensors_inside_the_file_or_an_artifact_error(data: st.DataObject) -> None:
    content = bytearray(
        to_bytes({"a": Weight("fp32", (3,), bytes(12)), "b": Weight("i64", (2, 2), bytes(32))})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    mapped = to_map(bytes(content))
    try:
        weights = map_weights(PATH, mapped)
    except ArtifactError:
        return
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    for weight in weights.values():
        begin = weight.array.ctypes.data
        assert start <= begin and begin + weight.array.nbytes <= start + len(content)
