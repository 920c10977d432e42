"""Copies CUDA tensors to mapped memory on a side stream. At the fence the compute stream waits, not the CPU.

The mapping of a shard file is registered as page-locked once per slot, so that copies are asynchronous and run at the
bandwidth of the bus.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeviceCopies", "pin", "unpin"]

logger = logging.getLogger(__name__)


def pin(address: int, nbytes: int) -> bool:
    """Registers mapped memory as page-locked. False when the driver refuses; copies are slower then."""
    result = _runtime().cudaHostRegister(address, nbytes, 0)
    if int(result) != 0:
        logger.warning(
            "%d bytes of the arena cannot be page-locked (CUDA error %s); copies from the GPU will be slower",
            nbytes,
            result,
        )
        return False
    return True


def unpin(address: int) -> None:
    """Undoes :func:`pin`; call before the memory is unmapped."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class DeviceCopies:
    """The GPU copies of one snapshot.

    Args:
        pairs: (CUDA source, CPU target of the same shape and dtype). Sources stay referenced until the copies are done.

    Threads: constructor and :meth:`fence` on the training thread, :meth:`wait` on the copy thread.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = list(pairs)
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        for device in {source.device for source, _ in pairs}:
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for source, target in pairs:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
                        source.record_stream(stream)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            self._events.append((device, event))

    def fence(self) -> None:
        """Makes further work of the compute streams wait for the copies. Blocks: no."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Blocks until the bytes are in host memory."""
        for _, event in self._events:
            event.synchronize()
        self._pairs.clear()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for the life of the process."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
