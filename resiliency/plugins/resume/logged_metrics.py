"""Saves and restores the values that ``self.log`` has collected in the running epoch.

Lightning saves no metric. A run resumed within an epoch would compute the epoch's metrics only from the batches after
the restart, and ``ReduceLROnPlateau``, ``EarlyStopping`` and ``ModelCheckpoint`` would decide differently. Each rank
saves the values that it has collected itself, before any reduction over the ranks.

Private attributes of Lightning used, all reached from the trainer object: the result collections (``_results`` of
``epoch_loop`` and ``val_loop``), in them ``_ResultMetric``, ``_Metadata`` and ``_Sync``, and of the logger connector
``_callback_metrics``, ``_logged_metrics``, ``_progress_bar_metrics``, ``_first_loop_iter`` and ``_current_fx``.

Entries are saved as numbers, text and tensors. A restart builds Lightning's objects from them, so a checkpoint depends
on no class of Lightning. The metadata of a rebuilt entry must equal those that the next call of ``self.log`` creates.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from resiliency.plugins.resume.metric_states import capture_metrics, find_metric, metric_names, restore_metrics
from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain

__all__ = ["capture_logged", "restore_logged"]

#: Those fields of an entry's metadata that are numbers or text.
_PLAIN_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
#: The reductions that Lightning allows, by the name under which they are saved. Lightning compares them by identity.
_REDUCTIONS = {f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")} | {
    f"builtins.{name}": getattr(builtins, name) for name in ("sum", "min", "max")
}
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_COUNTS = ("_update_count", "_update_called")


# ---- save


def capture_logged(trainer: Any, *, reset: Collection[int] = ()) -> tuple[dict[str, Any], list[str]]:
    """Captures the logged values as plain data that shares no memory with live objects.

    Args:
        reset: ids of further metrics that are reset before training goes on.

    Thread: training. Collective: at the end of an epoch, where Lightning reduces the same metrics right afterwards on
    every rank; otherwise no, nor while an exception ends training. Blocks: for one copy from the device.

    Returns:
        The state for :func:`restore_logged`, and caveats: sentences that say what will not be exact.
    """
    connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    results, validated = epoch_loop._results, epoch_loop.val_loop._results
    caveats: list[str] = []
    shown = {name: dict(getattr(connector, name)) for name in _SHOWN}
    epoch = trainer.fit_loop.epoch_progress.current
    over = epoch.processed > epoch.completed
    if over and trainer.state.status != "interrupted":
        # Lightning does the same right after the hook, and then resets the results.
        for name, key in zip(_SHOWN, ("callback", "log", "pbar"), strict=True):
            shown[name] |= results.metrics(on_step=False)[key]
    elif over:
        caveats.append("saved by an exception at the end of an epoch, whose metrics are lost")
    first_batch = connector._first_loop_iter
    if trainer.validating:
        first_batch = epoch_loop.batch_progress.current.ready <= 1  # the value that Lightning sets after the validation

    if not over and first_batch is not None:
        _leave_out_last_batch(results, shown)
    due = [entry for entry in validated.values() if not entry.has_reset]
    due += list(results.values()) if over else []
    resets = {id(entry.value) for entry in due if not entry.is_tensor}
    metrics, lost = capture_metrics(trainer.lightning_module, reset=resets.union(reset))
    known = metric_names(trainer.lightning_module)
    entries = {}
    for key, entry in results.items():
        try:
            entries[key] = _entry(entry, trainer, known, reset=over or entry.has_reset)
        except NotPlain as error:
            lost.append(f"what was logged before the save is not in the epoch's metric: {error}")
    state = {
        "entries": entries,
        "metrics": metrics,
        "first_batch": None if over else first_batch,
        "hook": None if over or trainer.validating else connector._current_fx,
    }
    for name in _SHOWN:
        state[name] = _plain_items(shown[name])
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()  # waits once for all copies
    return state, caveats + lost


def _leave_out_last_batch(results: Any, shown: dict[str, dict[str, Any]]) -> None:
    """Removes the last batch's values from ``shown``, because a restart computes them from the entries again."""
    for _, entry in results.valid_items():
        if entry.meta.on_step and isinstance(entry._forward_cache, Tensor):
            name, forked = results._forked_name(entry, True)
            for key in (name, forked):
                shown["_callback_metrics"].pop(key, None)
            shown["_logged_metrics"].pop(forked, None)
            shown["_progress_bar_metrics"].pop(forked, None)


def _entry(entry: Any, trainer: Any, known: dict[int, tuple[str, Any]], *, reset: bool) -> dict[str, Any]:
    meta, sync = entry.meta, entry.meta.sync
    if sync.group is not None:
        raise NotPlain(f"{meta.name!r} is logged with sync_dist_group, and a process group cannot be saved")
    reduction = next((name for name, function in _REDUCTIONS.items() if function is meta.reduce_fx), None)
    if reduction is None:
        raise NotPlain(f"{meta.name!r} is reduced by {meta.reduce_fx!r}")
    saved: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in _PLAIN_META},
        "reduce_fx": reduction,
        "sync": {"should": bool(sync.should), "op": sync.op, "rank_zero_only": bool(sync.rank_zero_only)},
        "reset": reset,
        "metric": None,
    }
    if not entry.is_tensor:
        name = known.get(id(entry.value), (meta.metric_attribute, None))[0]
        if name is None or find_metric(trainer.lightning_module, name) is not entry.value:
            raise NotPlain(f"{meta.name!r} is a metric that is not an attribute of the module")
        saved["metric"] = name
    if reset:
        return saved
    saved["counts"] = {name: vars(entry)[name] for name in _COUNTS if name in vars(entry)}
    saved["last"] = to_plain(entry._forward_cache, meta.name, non_blocking=True)
    if entry.is_tensor:
        saved["value"] = to_plain(entry.value, meta.name, non_blocking=True)
        saved["on_cpu"] = entry.value.device.type == "cpu"
        if meta.is_mean_reduction:
            saved["batch_size"] = to_plain(entry.cumulated_batch_size, meta.name, non_blocking=True)
    return saved


def _plain_items(items: dict[str, Any]) -> dict[str, Any]:
    """The items in plain form. Items without one are left out; callbacks add such items for progress bars."""
    plain = {}
    for name, value in items.items():
        try:
            plain[name] = to_plain(value, name, non_blocking=True)
        except NotPlain:
            continue
    return plain


# ---- restore


def restore_logged(trainer: Any, state: dict[str, Any]) -> list[str]:
    """Restores the logged values. Call it when the module is on its device and before the first hook of an epoch.

    Thread: training. Collective: no. Blocks: for copies to the device.

    Returns:
        Names of the metrics in the checkpoint that the module does not have any more.
    """
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    unknown = restore_metrics(trainer.lightning_module, state["metrics"])
    entries = {}
    for key, saved in state["entries"].items():
        entry = _rebuilt(saved, trainer, sys.modules[type(results).__module__])
        if entry is None:
            unknown.append(saved["metric"])
        else:
            entries[key] = entry
    logged_since = {key: entry for key, entry in results.items() if key not in entries}
    results.clear()
    results.update(entries | logged_since)
    device = trainer.strategy.root_device
    for name in _SHOWN:
        getattr(connector, name).update(
            {
                key: value.to(device) if isinstance(value, Tensor) else value
                for key, value in from_plain(state[name]).items()
            }
        )
    connector._first_loop_iter, connector._current_fx = state["first_batch"], state["hook"]
    if state["first_batch"] is not None:
        # Shows the values that the last batch has logged, as Lightning does after the hooks of a batch.
        for name, key in zip(_SHOWN, ("callback", "log", "pbar"), strict=True):
            getattr(connector, name).update(results.metrics(on_step=True)[key])
    return list(dict.fromkeys(unknown))


def _rebuilt(saved: dict[str, Any], trainer: Any, classes: Any) -> Any:
    """Lightning's object for a saved entry; None when the module does not have the entry's metric any more."""
    sync = saved["sync"]
    meta = classes._Metadata(**saved["meta"], reduce_fx=_REDUCTIONS[saved["reduce_fx"]])
    meta.sync = classes._Sync(
        fn=trainer.strategy.reduce, _should=sync["should"], _op=sync["op"], rank_zero_only=sync["rank_zero_only"]
    )
    is_tensor = saved["metric"] is None
    entry = classes._ResultMetric(meta, is_tensor)
    if not is_tensor:
        entry.value = find_metric(trainer.lightning_module, saved["metric"])
        if entry.value is None:
            return None
    entry.has_reset = saved["reset"]
    if saved["reset"]:
        return entry
    vars(entry).update({name: value for name, value in saved["counts"].items() if name in vars(entry)})
    entry._forward_cache = from_plain(saved["last"])
    if is_tensor:
        entry.value = from_plain(saved["value"])
        if "batch_size" in saved:
            entry.cumulated_batch_size = from_plain(saved["batch_size"])
    entry.to(torch.device("cpu") if saved.get("on_cpu") else trainer.strategy.root_device)
    return entry
