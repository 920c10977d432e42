"""Copies CUDA tensors to page-locked memory on a side stream. At the fence the compute stream waits, not the CPU.

The page-locked memory belongs to this process, and the next save uses it again: registering each shard file as
page-locked would take as long as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """The GPU copies of one snapshot.

    Args:
        pairs: (CUDA source, page-locked CPU target of the same shape and dtype). Sources stay referenced until the
            copies are done.

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
        """Makes later work of the compute streams wait for the copies. Blocks: no."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Blocks until all bytes are in host memory."""
        for _, event in self._events:
            event.synchronize()
        self._pairs.clear()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of a device: one for the life of the process."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
