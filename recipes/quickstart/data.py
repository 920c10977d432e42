"""Training data that every machine has: the sources of Python's own library, as windows of bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ByteWindows", "read_corpus"]

MAX_BYTES = 4 * 1024 * 1024


def read_corpus(folder: str | None = None) -> bytes:
    """Up to 4 MiB of text: the ``*.py`` and ``*.txt`` files of ``folder`` in order of their names; None: those of
    Python's library."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.iterdir() if path.suffix in (".py", ".txt"))
    text = b"\n".join(path.read_bytes() for path in files)[:MAX_BYTES]
    if len(text) < 65_536:
        raise SystemExit(
            f"{root} holds {len(text)} bytes of *.py and *.txt text; give --data a folder with 64 KiB or more"
        )
    return text


class ByteWindows(Dataset[Tensor]):
    """``count`` windows of ``length + 1`` bytes, spread evenly over the text. Items: int64 [length + 1] on the CPU."""

    def __init__(self, text: bytes, *, length: int, count: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length
        self._count = count
        self._stride = (len(text) - length - 1) / max(1, count - 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        start = int(index * self._stride)
        return self._text[start : start + self._length + 1].long()
