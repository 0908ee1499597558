"""KV pages on a device, and the host slots that they move to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.compiler.errors import ExecutionError
from octavo.runtime.cuda import Pieces
from octavo.runtime.cuda_memory import DeviceMemory
from octavo.runtime.page_moves import Move, check_moves

# Kernels are compiled for addresses that are multiples of this, and tensor maps ask for it.
CACHE_ALIGNMENT = 16


@dataclass(frozen=True)
class _Stack:
    """Buffers whose pages have equal sizes. slots: address of their host slots, a piece of every buffer in each."""

    page_bytes: int
    count: int
    base: int
    stride: int
    slots: int

    def page(self, page: int) -> Pieces:
        return Pieces(self.base + page * self.page_bytes, self.stride)

    def slot(self, slot: int) -> Pieces:
        return Pieces(self.slots + slot * self.page_bytes * self.count, self.page_bytes)


class DevicePages:
    """Pages of zeros in all cache buffers, moved by the driver in order with all else on the stream.

    page_bytes  cache buffer -> bytes of one page in it
    addresses   of each buffer: page p lies page_bytes * p behind it

    Buffers of equal pages lie one behind another, equally far apart. So what a page holds in all of them is moved
    by one copy, and a page of NVFP4, whose scales have buffers of their own, by two.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        stream: int,
        page_bytes: Mapping[str, int],
        num_pages: int,
        num_host_pages: int,
    ) -> None:
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        self.addresses: dict[str, int] = {}
        self._driver = memory.driver
        self._stream = stream
        self._stacks: list[_Stack] = []
        for size in dict.fromkeys(page_bytes.values()):
            names = [name for name, other in page_bytes.items() if other == size]
            step = CACHE_ALIGNMENT // math.gcd(size, CACHE_ALIGNMENT)
            stride = -(-num_pages // step) * step * size
            base = memory.allocate(stride * len(names))
            self._driver.fill(base, 0, stride * len(names), stream)
            self.addresses |= {name: base + stride * place for place, name in enumerate(names)}
            slots = memory.allocate_host(num_host_pages * size * len(names)) if num_host_pages else None
            host = 0 if slots is None else slots.ctypes.data
            self._stacks.append(_Stack(size, len(names), base, stride, host))
        self._driver.synchronize(stream)

    def move(self, moves: Sequence[Move]) -> None:
        """Queue all of them in order, or none and ExecutionError."""
        check_moves(moves, self.num_pages, self.num_host_pages)
        for move in moves:
            for stack in self._stacks:
                source = stack.slot(move.source) if move.kind == "in" else stack.page(move.source)
                target = stack.slot(move.target) if move.kind == "out" else stack.page(move.target)
                try:
                    self._driver.copy(target, source, stack.page_bytes, stack.count, self._stream)
                except ExecutionError as error:
                    raise ExecutionError(f"move_pages: {error}") from None
