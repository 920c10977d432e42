"""Checks of the arguments of ``ModelCheckpoint``: a wrong one is refused where it is written, with what to pass
instead."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any

from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval

__all__ = ["check_own", "check_stock", "misconfigured"]


def check_stock(
    stock: Callable[..., Any], own: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Checks arguments meant for the stock constructor ``stock``; ``own`` is ours, for the list of known names.

    Raises:
        TypeError: an unknown argument, or a value of a wrong type.
        ConfigError: a value that cannot work.
    """
    signature = inspect.signature(stock)
    known = [name for name in signature.parameters if name != "self"]
    mine = [p.name for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *mine], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join([*known, *mine])}"
            raise TypeError(f"ModelCheckpoint has no argument {name!r}; {hint}")
    given = signature.bind_partial(None, *args, **kwargs).arguments
    for name, value in given.items():
        check = _STOCK.get(name)
        if check is not None and value is not None:
            check(name, value)


def check_own(**values: Any) -> None:
    """Checks this library's own arguments.

    Raises:
        TypeError, ConfigError: as :func:`check_stock`.
    """
    for name in ("lazy", "auto_resume", "exact_resume"):
        _flag(name, values[name])
    if values["local_dir"] is not None:
        _path("local_dir", values["local_dir"])
        if "://" in os.fspath(values["local_dir"]):
            raise ConfigError(
                f"local_dir={values['local_dir']!r} is an address; pass a folder, and the address as dirpath= or in"
                " remotes="
            )
    if values["persist"] is not None and not isinstance(values["persist"], Interval):
        raise TypeError(
            f"persist={values['persist']!r}: pass Interval(steps=...) or Interval(time=timedelta(...)), or None for"
            " every save"
        )
    remotes = values["remotes"]
    if isinstance(remotes, (str, RemoteTierOptions)) or not isinstance(remotes, Sequence):
        raise TypeError(f"remotes={remotes!r}: pass a list such as [RemoteTierOptions(address='gs://bucket/job')]")
    for remote in remotes:
        if not isinstance(remote, RemoteTierOptions):
            raise TypeError(f"remotes holds {remote!r}: pass RemoteTierOptions(address={str(remote)!r}) instead")
    run = values["run"]
    if run is not None and (not isinstance(run, str) or not run or "/" in run or run.startswith(".")):
        raise ConfigError(f"run={run!r}: pass a word that can name a folder, such as 'pretrain-7b'")
    if values["options"] is not None and not isinstance(values["options"], CheckpointerOptions):
        raise TypeError(f"options={values['options']!r}: pass CheckpointerOptions(...)")
    if not isinstance(values["flush_timeout"], timedelta):
        raise TypeError(f"flush_timeout={values['flush_timeout']!r}: pass a timedelta, such as timedelta(minutes=10)")
    if values["flush_timeout"] < timedelta(0):
        raise ConfigError(f"flush_timeout={values['flush_timeout']} is negative; pass a timedelta of zero or more")


def misconfigured(error: Exception) -> Exception:
    """Lightning's exception for wrong arguments as one that is a ``ConfigError`` (a ``ValueError``) too."""
    kind = type(
        "ConfigError",
        (ConfigError, type(error)),
        {"__doc__": ConfigError.__doc__, "__module__": ConfigError.__module__},
    )
    combined: Exception = kind(str(error))
    return combined


# -- one value --------------------------------------------------------------------------------------------------------


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False")


def _word(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a str")


def _path(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass the path of a folder as str or Path")


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a whole number, such as {name}=100")
    if value < 0:
        raise ConfigError(f"{name}={value} is negative; pass 1 or more, or 0 or None to switch this trigger off")


def _top_k(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; pass a whole number: -1 keeps all, 0 none, k the best k"
        )


def _interval(name: str, value: Any) -> None:
    if not isinstance(value, timedelta):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; pass a timedelta, such as timedelta(minutes=30)"
        )
    if value < timedelta(0):
        raise ConfigError(f"{name}={value} is negative; pass a timedelta of zero or more")


def _save_last(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value != "link":
        raise ConfigError(f"{name}={value!r}; pass True, False, None or 'link'")


def _filename(name: str, value: Any) -> None:
    _word(name, value)
    if value.startswith((".", "/")) or ".." in value.split("/"):
        raise ConfigError(
            f"{name}={value!r} must be relative to dirpath and must not start with a dot; pass the folder as dirpath="
        )


_STOCK: dict[str, Callable[[str, Any], None]] = {
    "dirpath": _path,
    "filename": _filename,
    "monitor": _word,
    "verbose": _flag,
    "save_last": _save_last,
    "save_top_k": _top_k,
    "save_on_exception": _flag,
    "save_weights_only": _flag,
    "mode": _word,
    "auto_insert_metric_name": _flag,
    "every_n_train_steps": _count,
    "train_time_interval": _interval,
    "every_n_epochs": _count,
    "save_on_train_epoch_end": _flag,
    "enable_version_counter": _flag,
}
