"""Trains with odd tensors in the state, with the stock callback and with ours."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import odd_tensors
from tests.callbacks.harness import loader, make_net, make_trainer, ours, stock

EVERY: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
#: One of each root.
SOME = ["fake", "functional", "freed", "part of a freed one", "made smaller", "uint4"]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _net(namespace: str, odd: dict[str, Any], place: str) -> Any:
    """A module with odd tensors as buffers, or one whose optimizer has them from the second batch on."""
    net = make_net(namespace)
    if place == "buffers":
        for name, tensor in odd.items():
            net.register_buffer(name, tensor)
    else:

        def on_train_batch_start(batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                net.trainer.optimizers[0].state[next(net.parameters())] |= odd

        net.on_train_batch_start = on_train_batch_start
    return net


def _fit(namespace: str, who: str, folder: Path, odd: dict[str, Any], place: str) -> None:
    made = ours if who == "ours" else (lambda name, dirpath, **given: stock(name)(dirpath=dirpath, **given))
    callback = made(namespace, folder / who, **EVERY)
    trainer = make_trainer(namespace, [callback], root=folder, max_epochs=1)
    trainer.fit(_net(namespace, odd, place), loader())
    assert trainer.global_step == 6


def _found(path: Path, place: str) -> dict[str, Any]:
    state = torch.load(path, weights_only=False)
    held: dict[str, Any] = state["state_dict"] if place == "buffers" else state["optimizer_states"][0]["state"][0]
    return held


def _kept(namespace: str, place: str, folder: Path) -> list[str]:
    """All that torch keeps, in one fit. Returns which tensors our checkpoint has otherwise than the stock one.

    Without those that Lightning does not train with: buffers on the meta device, or not made yet.
    """
    known = enumerate(odd_tensors.KEPT.items())
    odd = {f"odd{n}": make() for n, (name, make) in known if "meta" not in name and name != "not made yet"}
    for who in ("stock", "ours"):
        _fit(namespace, who, folder, odd, place)
    theirs, mine = (_found(folder / who / "step=6.ckpt", place) for who in ("stock", "ours"))
    tree = odd_tensors.tree
    different = [key for key in odd if odd_tensors.stored(tree(theirs[key])) != odd_tensors.stored(tree(mine[key]))]
    return [list(odd_tensors.KEPT)[int(key.removeprefix("odd"))] for key in different]


def _refused(namespace: str, place: str, make: Callable[[], Any], folder: Path) -> list[str]:
    """One that torch does not keep. Returns what the fit, its log and its folder say wrongly."""
    said = Kept()
    logging.getLogger("resiliency").addHandler(said)
    _fit(namespace, "ours", folder, {"odd": make()}, place)
    found = [name for name in sorted(path.name for path in (folder / "ours").glob("*.ckpt"))]
    warned = [text for text in said.texts if "no checkpoint at step" in text]
    if len(warned) != 1 or "odd" not in warned[0] or "raining goes on" not in warned[0]:
        found.append(f"warnings: {warned}")
    if not any("3 saves, the last of step 6, were given up" in text for text in said.texts):
        found.append(f"at the end: {said.texts}")
    logs = (folder / "ours" / ".resiliency").glob("*/events/rank-*.jsonl")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    reasons = [line["reason"] for line in lines if line["event_type"] == "checkpoint_failed"]
    if len(reasons) != 3 or "odd" not in reasons[0]:
        found.append(f"events: {reasons}")
    return found


def run(*, namespace: str, place: str, name: str, folder: str, result: str) -> None:
    """Fits with one tensor that torch refuses, or with all that it keeps (no name). Writes what it finds as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    where = Path(folder)
    if name:
        found = _refused(namespace, place, odd_tensors.REFUSED[name], where)
    else:
        found = _kept(namespace, place, where)
    Path(result).write_text(json.dumps(found))
