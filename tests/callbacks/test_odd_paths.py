"""Odd names of files and folders: what the stock class can write is there in the end, under the same names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.harness import NAMESPACES, loader, make_net, make_trainer, ours, stock


def fit(namespace: str, who: str, folder: Path, inside: str, filename: str) -> tuple[list[str], str]:
    """Names below the folder, and the best path within it."""
    made: Any = ours if who == "ours" else (lambda name, dirpath, **given: stock(name)(dirpath=dirpath, **given))
    dirpath = os.path.join(folder, inside)
    callback = made(namespace, dirpath, filename=filename, every_n_train_steps=3, save_top_k=-1, save_last=True)
    make_trainer(namespace, [callback], root=folder / "root", max_epochs=1).fit(make_net(namespace), loader())
    best = callback.best_model_path
    assert torch.load(best, weights_only=False)["global_step"] == 6
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".resiliency", "root")]
        found += [os.path.relpath(os.path.join(where, name), folder) for name in names]
    return sorted(found), os.path.relpath(best, folder)


@pytest.mark.parametrize(
    ("inside", "filename"),
    [
        ("c", "s//x-{step}"),
        ("c", "s/./x-{step}"),
        ("c//d", "{step}"),
        ("c/", "s/x-{step}"),
        ("c", "\udcff-{step}"),
        ("c", "a\udc80b/{step}"),
        ("c-\udcff", "{step}"),
        ("ü", "ö-{step}"),
        ("c", "a b-{step}"),
    ],
    ids=["s//x", "s/./x", "c//d", "c/", "not UTF-8", "folder not UTF-8", "dirpath not UTF-8", "umlauts", "space"],
)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_checkpoints_have_the_names_that_the_stock_class_gives(
    namespace: str, inside: str, filename: str, tmp_path: Path
) -> None:
    assert fit(namespace, "ours", tmp_path / "ours", inside, filename) == fit(
        namespace, "stock", tmp_path / "stock", inside, filename
    )
