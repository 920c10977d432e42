"""Captures and restores the accumulated states of the module's torchmetrics objects.

torchmetrics leaves them out of ``state_dict()`` unless asked (``persistent``), and Lightning saves only rank 0's.
Private names of torchmetrics used: ``_defaults``, ``_update_count``, ``_update_called`` (before 1.0), ``_computed``,
``_forward_cache``. Everything here runs on the training thread and is not collective.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from torch import Tensor, device

from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain

__all__ = ["capture_metrics", "find_metric", "metric_names", "restore_metrics", "update_counts"]

#: Attributes that count the updates. Which of them exist depends on the version of torchmetrics.
_COUNTS = ("_update_count", "_update_called")


def metric_names(module: Any) -> dict[int, tuple[str, Any]]:
    """The metrics below ``module``, also inside wrappers and collections: id -> (dotted name, metric)."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    kind = torchmetrics.Metric
    return {id(found): (name, found) for name, found in module.named_modules() if isinstance(found, kind)}


def update_counts(module: Any) -> dict[int, int]:
    """The number of updates of each metric below ``module`` since its last reset, by id."""
    return {
        identity: int(next((vars(metric)[key] for key in _COUNTS if key in vars(metric)), 0))
        for identity, (_, metric) in metric_names(module).items()
    }


def find_metric(module: Any, name: str) -> Any:
    """The metric with this dotted name below ``module``; None when the module has none."""
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        return None
    return found if hasattr(found, "_defaults") else None


def capture_metrics(module: Any, *, reset: Collection[int]) -> tuple[dict[str, Any], list[str]]:
    """Captures the states of all metrics of the module.

    Args:
        reset: ids of the metrics that Lightning resets before it trains on. They are saved as reset.

    Returns:
        name -> plain data, or None for a metric that a restart must reset; and a caveat for each metric whose state has
        no plain form and was not saved.
    """
    states: dict[str, Any] = {}
    caveats = []
    for identity, (name, metric) in metric_names(module).items():
        if identity in reset:
            states[name] = None
            continue
        try:
            states[name] = {
                "states": to_plain({key: getattr(metric, key) for key in metric._defaults}, name, non_blocking=True),
                "counts": {key: vars(metric)[key] for key in _COUNTS if key in vars(metric)},
            }
        except NotPlain as error:
            caveats.append(f"a metric's state was not saved, and starts anew: {error}")
    return states, caveats


def restore_metrics(module: Any, states: dict[str, Any]) -> list[str]:
    """Restores the states. Returns the names of metrics that are missing or have other states; those stay unchanged."""
    unknown = []
    for name, saved in states.items():
        metric = find_metric(module, name)
        if metric is None or (saved is not None and saved["states"].keys() != metric._defaults.keys()):
            unknown.append(name)
            continue
        if saved is None:
            metric.reset()
            continue
        for key, value in saved["states"].items():
            in_memory = isinstance(value, list) and getattr(metric, "compute_on_cpu", False)
            setattr(metric, key, _moved(from_plain(value), device("cpu") if in_memory else metric.device))
        vars(metric).update({key: value for key, value in saved["counts"].items() if key in vars(metric)})
        metric._computed = metric._forward_cache = None
    return unknown


def _moved(value: Any, to: device) -> Any:
    if isinstance(value, Tensor):
        return value.to(to)
    return [_moved(item, to) for item in value] if isinstance(value, list) else value
