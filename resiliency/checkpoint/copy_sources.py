"""The sources of a save: from which memory each byte of a file is copied, and whether that memory has changed."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

__all__ = ["ChangeWatch", "CopyTask", "Sources"]


class CopyTask(NamedTuple):
    """A copy of ``nbytes`` bytes to file offset ``start``.

    Attributes:
        source: the CPU tensor that the bytes come from.
        address: of the tensor's bytes; 0: the bytes are its elements in C order, whatever its strides.
        storage: number of the storage, for messages; -1: private memory or a header, which the user does not know.
    """

    source: Tensor
    start: int
    nbytes: int
    address: int = 0
    storage: int = -1


class Sources:
    """Maps byte ranges of the file to the memory they are copied from. Thread: any.

    Args:
        copies: in file order.
    """

    def __init__(self, copies: Sequence[CopyTask]) -> None:
        self._copies = copies
        self._starts = [copy.start for copy in copies]
        self._ordered: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that fill bytes ``[start, end)`` of the file, in order, as (address, file offset, bytes). Thread:
        any.

        Raises:
            ValueError: a byte has no source, or two sources.
        """
        at, begin = start, max(0, bisect.bisect_right(self._starts, start) - 1)
        for index in range(begin, len(self._copies)):
            copy = self._copies[index]
            if at >= end or copy.start >= end or (copy.start != at and (copy.start > at or index > begin)):
                break
            first, last = max(at, copy.start), min(copy.start + copy.nbytes, end)
            if last > first:
                yield self._address(index) + first - copy.start, first, last - first
                at = last
        if at < end:
            raise ValueError(f"no source fills bytes {at} to {end} of the file")  # no digest would cover them

    def storage_at(self, offset: int) -> int:
        """Number of the storage whose bytes fill the file from ``offset`` on; -1: no storage of the user's."""
        return self._copies[max(0, bisect.bisect_right(self._starts, offset) - 1)].storage

    def _address(self, index: int) -> int:
        """Address of the first byte of a copy. A tensor that is not in C order is first copied into C order, once."""
        copy = self._copies[index]
        tensor = copy.source
        if copy.address and not tensor.is_neg():
            return copy.address
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            with self._lock:
                if index not in self._ordered:
                    self._ordered[index] = tensor.detach().resolve_conj().resolve_neg().contiguous()
                tensor = self._ordered[index]
        return tensor.data_ptr()


_count: Callable[[Tensor], int] = attrgetter("_version")


class ChangeWatch:
    """Notices in-place changes of live tensors, by torch's count of them. Thread: any.

    Constructed at every save while the training thread waits, so that facts needed only after a change are looked up
    later.

    Args:
        copies: those that read live tensors are watched; the others are headers or copies from private memory.
        others: further tensors, each with the number of its storage.

    Attributes:
        tensors: the watched tensors. Inference tensors have no count, and are not watched.
    """

    def __init__(self, copies: Sequence[CopyTask], others: Sequence[tuple[Tensor, int]]) -> None:
        self._copies, self._others = [copy for copy in copies if copy.storage >= 0], others
        self.tensors: list[Tensor] = [*[copy.source for copy in self._copies], *[tensor for tensor, _ in others]]
        try:
            self._before = list(map(_count, self.tensors))
        except RuntimeError:
            self._copies = [copy for copy in self._copies if not copy.source.is_inference()]
            self._others = [(tensor, number) for tensor, number in others if not tensor.is_inference()]
            self.tensors = [*[copy.source for copy in self._copies], *[tensor for tensor, _ in self._others]]
            self._before = list(map(_count, self.tensors))

    def changed(self) -> list[int]:
        """Numbers of the storages changed since construction."""
        now = list(map(_count, self.tensors))
        if now == self._before:
            return []
        numbers = [*[copy.storage for copy in self._copies], *[number for _, number in self._others]]
        counts_of = zip(numbers, self._before, now, strict=True)
        return [number for number, before, after in counts_of if before != after]
