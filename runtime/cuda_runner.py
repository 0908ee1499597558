"""Runs steps of a GPU artifact: weights and pages on the device, steps of one token a request from CUDA graphs."""

import json
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, ExecutionError, OptionError
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.program import DIMS, FEATURES, Step, input_and_group
from octavo.runtime.batch import Batch
from octavo.runtime.cuda import Driver
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_launch import Kernel, Sizes, parse_record
from octavo.runtime.cuda_memory import ALIGNMENT, DeviceMemory, Progress, Region, upload_weights
from octavo.runtime.cuda_outputs import Outputs
from octavo.runtime.cuda_pages import DevicePages
from octavo.runtime.features import check_features
from octavo.runtime.kv_cache import NULL_PAGE
from octavo.runtime.model_runner import (
    ONE_PAGE,
    check_page_counts,
    check_rank,
    num_bytes,
    page_bytes,
    weight_piece,
)
from octavo.runtime.page_moves import Move

DEFAULT_MAX_REQUESTS = 64
# Of the memory that weights and workspace leave free, this share becomes pages; graphs and other libraries
# take from the rest.
PAGE_MEMORY_SHARE = 0.9
MAX_GRAPHS = 64
MAX_PREPARED = 16
# What a padded request has for inputs.
PADDING = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "seq_lens": 1, "tree": 0}

_Launches = list[tuple[str, Any]]


class CudaRunner:
    """A ModelRunner on one GPU. No Triton and no torch: cubins of the artifact through the CUDA driver.

    num_pages         KV pages with the null page; None: what free memory holds, at most `max_requests` of full length
    num_host_pages    slots in page-locked host memory that pages move out to
    max_requests      most requests of a step, for which memory is planned and graphs are made
    max_batch_tokens  most tokens of a step; None: the model's
    graphs            False: launch every kernel of every step. Logits are the same, bit for bit
    driver            None: device 0 of this machine
    rank              of the program's mesh: which pieces of the weights this runner holds
    progress          called with (weight, bytes copied, bytes in all)

    A step of one token for each request is padded to a bucket of requests and of page-table columns, so that few
    graphs serve all. A padded request writes no page: its slot is -1. It reads one row of the null page, which is
    zero, so nothing of it is ever infinite or nan; its logits are dropped.
    """

    def __init__(
        self, artifact: Artifact, num_pages: int | None = None, *, num_host_pages: int = 0,
        max_requests: int = DEFAULT_MAX_REQUESTS, max_batch_tokens: int | None = None, graphs: bool = True,
        driver: Driver | None = None, progress: Progress | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        check_rank(artifact, rank)
        self.program = artifact.program
        self.rank = rank
        self.page_size = artifact.program.page_size
        self.page_windows = artifact.program.page_windows
        self.page_bytes = page_bytes(artifact.program)
        self.vocab_size = artifact.model.vocab_size
        self.graphs = graphs
        tokens = artifact.model.max_batch_tokens if max_batch_tokens is None else max_batch_tokens
        if min(tokens, max_requests) < 1:
            raise OptionError(
                f"runner: expected 1 request and 1 token or more, got {max_requests} and {tokens}"
            )
        self.max_requests = min(max_requests, tokens)
        self._buckets = buckets(self.max_requests)
        self._max_pages = -(-artifact.model.max_model_len // self.page_size)
        self._driver = CudaDriver() if driver is None else driver
        self._driver.activate()
        self._kernels = load_kernels(artifact, self._driver)
        self._memory = DeviceMemory(self._driver)
        self._stream = self._driver.create_stream()
        self._prepared: OrderedDict[tuple[int, ...], _Launches] = OrderedDict()
        self._captured: OrderedDict[tuple[int, ...], int] = OrderedDict()
        # by hand, when the runner is dropped, or when the process ends
        self.close = weakref.finalize(
            self, _close, self._memory, self._stream, self._captured, owns_driver=driver is None
        )
        self._inputs = self.program.of_kind("input")
        # sizes of the last step, as it was padded, and how many tokens it had
        self._made: tuple[Mapping[str, int], int] = ({}, 0)
        self.addresses = upload_weights(
            self._memory, {name: weight_piece(artifact, name, rank) for name in artifact.weights}, self._stream,
            progress,
        )  # fmt: skip
        self._make_regions(tokens)
        self.num_pages = self._default_num_pages() if num_pages is None else num_pages
        self.num_host_pages = num_host_pages
        check_page_counts(self.num_pages, num_host_pages)
        sizes = {buffer.name: num_bytes(buffer, ONE_PAGE) for buffer in self.program.of_kind("cache")}
        self._pages = DevicePages(self._memory, self._stream, sizes, self.num_pages, num_host_pages)
        self.addresses |= self._pages.addresses

    @property
    def features(self) -> NDArray[np.generic] | None:
        """Of the tokens of the last run, (T, F), valid until the next; copied from the device when it is asked for."""
        dims, num_tokens = self._made
        return self._outputs.features(dims, num_tokens, self._stream) if num_tokens else None

    def move_pages(self, moves: Sequence[Move]) -> None:
        """Queue the moves behind all that was run, before all that will be. ExecutionError for one that cannot be."""
        self._driver.activate()
        self._pages.move(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits (L, vocab), valid until the next run. Other Python threads go on meanwhile."""
        self._driver.activate()
        self._driver.synchronize(self._stream)  # an interrupt may have left a step running
        check_features(self.program, batch)
        dims = {**batch.dims, "num_pages": self.num_pages}
        if not dims["T"] == dims["R"] <= self.max_requests:
            self._run_eagerly(batch.inputs, dims)
            return self._download(dims["L"])
        inputs, padded = self._padded(batch, dims)
        if self.graphs:
            graph = self._graph(padded)
            self._upload(inputs, padded)
            self._driver.launch_graph(graph, self._stream)
        else:
            self._run_eagerly(inputs, padded)
        self._made = padded, dims["T"]
        logits = self._download(dims["R"])
        return logits if dims["L"] == dims["R"] else logits[batch.logit_rows]

    def _run_eagerly(self, inputs: Mapping[str, NDArray[Any]], dims: Mapping[str, int]) -> None:
        launches = self._launches(dims)  # before the inputs: it may move their memory
        self._upload(inputs, dims)
        self._launch(launches)
        self._made = dims, dims["T"]

    def _padded(
        self, batch: Batch, dims: Mapping[str, int]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """The inputs and sizes of the bucket that a step of one token a request goes into."""
        requests, columns = batch.page_table.shape
        size = next(size for size in self._buckets if size >= requests)
        width = 1 << (columns - 1).bit_length()
        inputs: dict[str, NDArray[Any]] = {
            **_padded_features(batch.features, size),
            "cu_seqlens_q": np.arange(size + 1, dtype=np.int32),
            "logit_rows": np.arange(size, dtype=np.int64),
        }
        for name, array in batch.inputs.items():
            kind, _ = input_and_group(name)
            if kind == "page_table":
                inputs[name] = np.full((size, width), NULL_PAGE, np.int32)
                inputs[name][:requests, :columns] = array
            elif kind in PADDING:
                inputs[name] = _extended(array, size, PADDING[kind])
            elif kind not in inputs:
                inputs[name] = array
        return inputs, {**dims, "T": size, "R": size, "L": size, "P": width}

    def _graph(self, dims: Mapping[str, int]) -> int:
        """The graph of a bucket, captured when it is first wanted."""
        key = tuple(dims[name] for name in DIMS)
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key]
        if len(self._captured) >= MAX_GRAPHS:
            self._driver.free_graph(self._captured.popitem(last=False)[1])
        launches = self._bind(dims)
        self._driver.begin_capture(self._stream)
        try:
            self._launch(launches)
        except BaseException:
            with suppress(ExecutionError):  # the first error is the one to be told
                self._driver.free_graph(self._driver.end_capture(self._stream))
            raise
        self._captured[key] = self._driver.end_capture(self._stream)
        return self._captured[key]

    def _launches(self, dims: Mapping[str, int]) -> _Launches:
        """Every launch of a step of these sizes; those of the latest sizes are kept."""
        key = tuple(dims[name] for name in DIMS)
        if key not in self._prepared:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.popitem(last=False)
            self._prepared[key] = self._bind(dims)
        self._prepared.move_to_end(key)
        return self._prepared[key]

    def _bind(self, dims: Mapping[str, int]) -> _Launches:
        """Launches of sizes that are not bound yet, once there is memory for them."""
        self._reserve(dims)
        sizes = Sizes(dims)
        places = self._places(sizes)
        launches = []
        for step in self.program.steps:
            if holds(step.when, dims):
                prepared = self._prepare(step, places, sizes)
                if prepared is not None:
                    launches.append((step.kernel, prepared))
        return launches

    def _prepare(self, step: Step, places: Mapping[str, int], sizes: Sizes) -> Any:
        """A launch with its arguments; None where the step has nothing to do."""
        if step.axis:
            raise ExecutionError(
                f"runner: the program is rank {self.rank} of {self.program.mesh.world} ({self.program.mesh}); start "
                f"all of them: torchrun --nproc-per-node {self.program.mesh.world} -m octavo run ..."
            )
        arguments = [_argument(argument, places, sizes) for argument in step.args]
        return self._kernels[step.kernel].prepare(arguments, sizes, step.grid)

    def _places(self, sizes: Sizes) -> dict[str, int]:
        """The address of every buffer in a step of these sizes."""
        places = dict(self.addresses)
        places.update(
            {name: self._input.address + start for name, start in self._input_starts(sizes).items()}
        )
        places |= self._outputs.places(sizes.dims)
        for buffer in self.program.of_kind("workspace"):
            assert buffer.offset is not None, f"{buffer.name} has no place"
            places[buffer.name] = self._workspace.address + sizes(buffer.offset)
        return places

    def _input_starts(self, sizes: Sizes) -> dict[str, int]:
        starts, end = {}, 0
        for buffer in self._inputs:
            starts[buffer.name] = end
            end += -(-num_bytes(buffer, sizes.dims) // ALIGNMENT) * ALIGNMENT
        return starts

    def _launch(self, launches: _Launches) -> None:
        for name, prepared in launches:
            try:
                self._driver.launch(prepared, self._stream)
            except ExecutionError as error:
                raise ExecutionError(f"{name}: {error}") from None

    def _upload(self, inputs: Mapping[str, NDArray[Any]], dims: Mapping[str, int]) -> None:
        """All inputs in one copy."""
        end = 0
        for name, start in self._input_starts(Sizes(dims)).items():
            content = np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8)
            end = start + content.size
            self._input_host[start:end] = content
        self._driver.upload(self._input.address, self._input_host[:end], self._stream)

    def _download(self, count: int) -> NDArray[np.float32]:
        """Logits of the first rows, once all work is done."""
        return self._outputs.logits(count, self.vocab_size, self._stream)

    def _make_regions(self, max_tokens: int) -> None:
        """Memory of the largest step: inputs, workspace, logits."""
        self._input = Region(self._memory, 0)
        self._workspace = Region(self._memory, 0)
        self._outputs = Outputs(self._memory, self.program)
        self._input_host = self._memory.allocate_host(1)
        steps = list(largest_steps(max_tokens, self.max_requests, self._max_pages, self.program.mesh.dp))
        self._grow(
            max(self._input_bytes(dims) for dims in steps),
            max(evaluate(self.program.workspace, dims) for dims in steps),
            max(self._outputs.num_bytes(dims) for dims in steps),
        )

    def _input_bytes(self, dims: Mapping[str, int]) -> int:
        return sum(-(-num_bytes(buffer, dims) // ALIGNMENT) * ALIGNMENT for buffer in self._inputs)

    def _reserve(self, dims: Mapping[str, int]) -> None:
        """Have the memory of a step that is larger than those planned for. What was bound is bound anew."""
        moved = self._grow(
            self._input_bytes(dims), evaluate(self.program.workspace, dims), self._outputs.num_bytes(dims)
        )
        if moved:
            self._prepared.clear()
            while self._captured:
                self._driver.free_graph(self._captured.popitem()[1])

    def _grow(self, input_bytes: int, workspace_bytes: int, output_bytes: int) -> bool:
        """Whether anything moved. Nothing runs meanwhile: a run ends with all work done."""
        moved = self._workspace.grow(workspace_bytes)
        if self._input.grow(input_bytes):
            self._memory.free_host(self._input_host)
            self._input_host = self._memory.allocate_host(input_bytes)
            moved = True
        return self._outputs.grow(output_bytes) or moved

    def _default_num_pages(self) -> int:
        """Pages for `max_requests` sequences of full length, or what a share of free memory holds if less."""
        free, _ = self._driver.memory()
        size = max(self.page_bytes, 1)
        affordable = int(free * PAGE_MEMORY_SHARE) // size
        if affordable < 2:
            raise ExecutionError(
                f"page pool: expected room for 2 pages of {size} bytes in {PAGE_MEMORY_SHARE:.0%} of "
                f"{free} free bytes of {self._driver.device.name}, got {affordable}; free device memory, or "
                "compile with a smaller max_batch_tokens"
            )
        return min(self.max_requests * self._max_pages + 1, affordable)


def _close(
    memory: DeviceMemory, stream: int, captured: OrderedDict[tuple[int, ...], int], owns_driver: bool
) -> None:
    driver = memory.driver
    with suppress(ExecutionError):  # after a fault of the device there is nothing left to give back
        driver.activate()
        while captured:
            driver.free_graph(captured.popitem()[1])
        memory.release()
        driver.free_stream(stream)
        if owns_driver:
            driver.close()


def load_kernels(artifact: Artifact, driver: Driver) -> dict[str, Kernel]:
    """Every kernel that the program launches. ArtifactError for one that is missing or for another GPU."""
    kernels = {}
    for name in dict.fromkeys(step.kernel for step in artifact.program.steps if not step.axis):
        where = f"{artifact.path}/kernels/{name}"
        try:
            launch = json.loads(artifact.read(f"kernels/{name}.json"))["launch"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{where}.json: expected a launch record, got {error}; compile the model again"
            ) from None
        record = parse_record(launch, f"{where}.json")
        kernels[name] = Kernel(driver, record, artifact.read(f"kernels/{name}.cubin"), f"{where}.cubin")
    return kernels


def buckets(max_requests: int) -> list[int]:
    """Numbers of requests that steps are padded to: 1, 2, 4, multiples of 8 up to 64, then of 16, and the most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_requests, 16)]
    return [size for size in sizes if size < max_requests] + [max_requests]


def largest_steps(
    max_tokens: int, max_requests: int, max_pages: int, dp: int = 1
) -> Iterator[dict[str, int]]:
    """Sizes of steps, one of which needs the most memory: every number of requests, all else at its most.

    dp  ranks with tokens of their own, which all may come here
    """
    columns = 1 << (max_pages - 1).bit_length()
    for requests in range(1, max_requests + 1):
        yield {
            "T": max_tokens,
            "R": requests,
            "L": requests,
            "P": columns,
            "num_pages": 0,
            "N": dp * max_tokens,
        }


def _argument(argument: str | int | float, places: Mapping[str, int], sizes: Sizes) -> int | float:
    """The address of a buffer, a number, or the value of an expression."""
    if isinstance(argument, float):
        return argument
    if isinstance(argument, str) and argument in places:
        return places[argument]
    return sizes(argument)


def _padded_features(features: NDArray[np.generic] | None, size: int) -> dict[str, NDArray[np.generic]]:
    """Those of a draft head, and zeros for requests that pad."""
    if features is None:
        return {}
    return {FEATURES: np.pad(features, ((0, size - len(features)), (0, 0)))}


def _extended(array: NDArray[Any], size: int, value: int) -> NDArray[Any]:
    """The array, followed by so many times the value that it has `size` elements."""
    return np.concatenate([array, np.full(size - len(array), value, array.dtype)])
