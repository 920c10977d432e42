"""Three small models whose training is the same at every run, with states that are hard in different ways."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn


def digest(value: Any) -> str:
    """Digest of a tree: types, keys, dtypes, shapes and every bit."""
    found = xxhash.xxh3_128()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        found.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        found.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, dict):
        found.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            found.update(f"{key!r}:".encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _add(found, item)
    else:
        found.update(f"{type(value).__name__} {value!r};".encode())


def _batch(step: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


class Model:
    """One training: ``forward_backward`` reads the parameters, ``update`` changes everything in :meth:`lazy`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def loss(self, step: int) -> Tensor:
        raise NotImplementedError

    def forward_backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def update(self, step: int) -> None:
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Live tensors, as a script passes them to ``save``."""
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def late(self) -> list[Tensor]:
        """What changes in :meth:`update` only, and so may be copied late."""
        moments = [value for of in self.optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        return [*self.module.parameters(), *moments]

    def lazy(self) -> Callable[[Tensor], bool]:
        places = {tensor.data_ptr() for tensor in self.late()}
        return lambda tensor: tensor.data_ptr() in places


class Plain(Model):
    """A multilayer perceptron with Adam."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 128))
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)

    def loss(self, step: int) -> Tensor:
        return self.module(_batch(step, 4, 64)).square().mean()


class Tied(Model):
    """Tied weights, buffers that the forward changes, and a moving average of the weights."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        layer, middle, again = nn.Linear(200, 250, bias=False), nn.Linear(250, 200), nn.Linear(200, 250, bias=False)
        again.weight = layer.weight
        self.module = nn.Sequential(layer, nn.BatchNorm1d(250), nn.ReLU(), middle, again)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-2, momentum=0.9)
        self.average = {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def loss(self, step: int) -> Tensor:
        return self.module(_batch(step, 4, 200)).square().mean()

    def update(self, step: int) -> None:
        super().update(step)
        for name, value in self.module.named_parameters():
            self.average[name].lerp_(value.detach(), 0.1)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "average": dict(self.average)}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        for name, value in state["average"].items():
            self.average[name].copy_(value)

    def late(self) -> list[Tensor]:
        return [*super().late(), *self.average.values()]


class Objects(Model):
    """An embedding, half precision, and lists and objects of many kinds beside the tensors."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.module = nn.ModuleDict({"table": nn.Embedding(2000, 64), "head": nn.Linear(64, 32)})
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.history: list[float] = []
        self.notes: dict[str, Any] = {}

    def loss(self, step: int) -> Tensor:
        rows = torch.randint(0, 2000, (16,), generator=torch.Generator().manual_seed(step))
        found: Tensor = self.module["head"](self.module["table"](rows)).square().mean()
        return found

    def forward_backward(self, step: int) -> None:
        super().forward_backward(step)
        self.history.append(step / 7)  # while the last save may still be copied
        self.notes[f"at {step}"] = (step, None, [True, b"\x00" * (step % 5)])
        while len(self.notes) > 20:
            del self.notes[next(iter(self.notes))]

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "history": self.history,
            "notes": self.notes,
            "half": self.module["head"].weight.detach().to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "objects": [
                PurePosixPath("/data") / str(len(self.history)),
                datetime.date(2024, 1, 1) + datetime.timedelta(days=len(self.history)),
                np.float64(len(self.history) / 3),
                OrderedDict(a=1, b=torch.tensor(len(self.history))),
                ("nested", {"deeper": [1, 2.5, None]}),
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.history, self.notes = list(state["history"]), dict(state["notes"])


MODELS: dict[str, type[Model]] = {"plain": Plain, "tied": Tied, "objects": Objects}
