"""Checks this library's own arguments of ``ModelCheckpoint`` in the constructor; errors say what to pass instead.

The stock class checks its own arguments.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval

__all__ = ["check_own", "refuse_unknown"]


def refuse_unknown(names: Iterable[str], stock: Callable[..., Any], own: Callable[..., Any]) -> None:
    """Refuses arguments that neither constructor has, and suggests a known name, which Python's own error does not.

    Args:
        names: names of the keyword arguments that will be passed to ``stock``.
        stock: the stock class's constructor, bound.
        own: this library's constructor, for its keyword-only arguments.

    Raises:
        TypeError: with the nearest known name, or all of them.
    """
    parameters = inspect.signature(stock).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    ours = [p.name for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *ours], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join([*known, *ours])}"
            raise TypeError(f"ModelCheckpoint.__init__() got an unexpected keyword argument {name!r}; {hint}")


def check_own(**values: Any) -> None:
    """Checks this library's own arguments.

    Raises:
        TypeError: a value of a wrong type.
        ConfigError: a value that cannot work.
    """
    _flag("lazy", values["lazy"])
    if values["exact_resume"] != "reread":
        _flag("exact_resume", values["exact_resume"])
    if values["auto_resume"] is not None:
        _flag("auto_resume", values["auto_resume"])
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


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False")


def _path(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass the path of a folder as str or Path")
