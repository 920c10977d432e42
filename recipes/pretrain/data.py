"""Training data: text as tokens, cut into windows; the last twentieth of it is for validation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.quickstart.data import read_corpus
from resiliency.errors import ConfigError

__all__ = ["Tokenizer", "Windows", "load_tokenizer", "make_loaders"]

#: Least number of windows in an epoch. When the text is short they overlap, so that it is seen again, cut elsewhere.
_WINDOWS = 4096


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into token numbers in [0, ``size``)."""

    size: int
    encode: Callable[[bytes], Tensor]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer that is stored in a file; None: one whose tokens are bytes.

    Raises:
        ConfigError: the package that reads the file is not installed, or its name ends in neither .model nor .json.
    """
    if path is None:
        return Tokenizer(256, _bytes)
    package = {"model": "sentencepiece", "json": "tokenizers"}.get(path.rsplit(".", 1)[-1])
    if package is None:
        raise ConfigError(
            f"--tokenizer-path {path}: pass a tokenizer.model (sentencepiece) or tokenizer.json (tokenizers)"
        )
    try:
        library = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--tokenizer-path {path} is read by {package}, which is not installed; pip install {package}, or"
            f" leave the flag"
            " out to train on bytes"
        ) from error
    if package == "sentencepiece":
        processor = library.SentencePieceProcessor(model_file=path)
        return Tokenizer(processor.vocab_size(), lambda text: torch.tensor(processor.encode(_decoded(text))))
    made = library.Tokenizer.from_file(path)
    return Tokenizer(made.get_vocab_size(), lambda text: torch.tensor(made.encode(_decoded(text)).ids))


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


class Windows(Dataset[Tensor]):
    """``count`` windows of ``length + 1`` tokens, spread evenly over the text. Items: int64 [length + 1] on the CPU."""

    def __init__(self, tokens: Tensor, *, length: int, count: int) -> None:
        if len(tokens) <= length:
            raise ConfigError(f"{len(tokens)} tokens are less than a sequence of {length}; pass more --data")
        self._tokens, self._length, self._count = tokens, length, count
        self._stride = (len(tokens) - length - 1) / max(1, count - 1)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        start = int(index * self._stride)
        return self._tokens[start : start + self._length + 1].long()


def make_loaders(
    tokenizer: Tokenizer, *, folder: str | None, length: int, batch: int, val_windows: int
) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Loaders for training (shuffled) and validation, of ``batch`` windows each."""
    tokens = tokenizer.encode(read_corpus(folder))
    cut = len(tokens) * 19 // 20
    train = Windows(tokens[:cut], length=length, count=max(_WINDOWS, (cut - 1) // length))
    val = Windows(tokens[cut:], length=length, count=max(1, val_windows))
    return DataLoader(train, batch_size=batch, shuffle=True, drop_last=True), DataLoader(val, batch_size=batch)
