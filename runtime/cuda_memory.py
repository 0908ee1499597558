"""Device memory of a runner: pieces with names, weights copied through page-locked memory, regions that grow."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.cuda import Driver

Progress = Callable[[str, int, int], None]

ALIGNMENT = 256
# Two of these are in flight: while one is copied to the device, the other is filled from the file.
STAGING_BYTES = 32 * 2**20


class DeviceMemory:
    """What one owner allocated, all given back together. It must not be used after `release`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._device: set[int] = set()
        self._host: list[NDArray[np.uint8]] = []

    def allocate(self, num_bytes: int) -> int:
        address = self.driver.allocate(num_bytes)
        self._device.add(address)
        return address

    def free(self, address: int) -> None:
        self._device.remove(address)
        self.driver.free(address)

    def allocate_host(self, num_bytes: int) -> NDArray[np.uint8]:
        self._host.append(self.driver.allocate_host(num_bytes))
        return self._host[-1]

    def free_host(self, array: NDArray[np.uint8]) -> None:
        self._host = [other for other in self._host if other is not array]
        self.driver.free_host(array)

    def release(self) -> None:
        """Free all of it."""
        self.driver.activate()
        while self._device:
            self.driver.free(self._device.pop())
        while self._host:
            self.driver.free_host(self._host.pop())


class Region:
    """Device memory that is replaced by a larger piece when a step needs more."""

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        self._memory = memory
        self.num_bytes = max(num_bytes, 1)
        self.address = memory.allocate(self.num_bytes)

    def grow(self, num_bytes: int) -> bool:
        """Hold at least so much; whether the address changed. The device must be done with the old piece."""
        if num_bytes <= self.num_bytes:
            return False
        self._memory.free(self.address)
        self.address = self._memory.allocate(num_bytes)
        self.num_bytes = num_bytes
        return True


def upload_weights(
    memory: DeviceMemory, weights: Mapping[str, NDArray[Any]], stream: int, progress: Progress | None = None
) -> dict[str, int]:
    """Copy the weights to the device; their addresses. progress: called with (name, bytes done, bytes in all)."""
    driver = memory.driver
    starts, end = {}, 0
    for name, array in weights.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    base = memory.allocate(end)
    staging = [memory.allocate_host(STAGING_BYTES) for _ in range(2)]
    events = [driver.create_event() for _ in staging]
    turn = done = 0
    total = sum(array.nbytes for array in weights.values())
    for name, array in weights.items():
        content = array.reshape(-1).view(np.uint8)
        for start in range(0, content.size, STAGING_BYTES):
            piece = content[start : start + STAGING_BYTES]
            buffer, event = staging[turn % 2], events[turn % 2]
            if turn >= 2:
                driver.wait(event)  # until what the buffer held has been copied
            buffer[: piece.size] = piece
            driver.upload(base + starts[name] + start, buffer[: piece.size], stream)
            driver.record(event, stream)
            turn += 1
            done += piece.size
            if progress is not None:
                progress(name, done, total)
    driver.synchronize(stream)
    for buffer, event in zip(staging, events, strict=True):
        memory.free_host(buffer)
        driver.free_event(event)
    return {name: base + start for name, start in starts.items()}
