"""Serves both Lightning packages, ``lightning.pytorch`` and ``pytorch_lightning``, which share no classes.

Each adapter class (a callback, a plugin) is therefore built once per package, over that package's base class, by one
factory: :class:`AdapterClass`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from resiliency.errors import ConfigError

__all__ = ["AdapterClass", "default_namespace", "namespaces", "require_trainer_of"]

_KNOWN = ("lightning.pytorch", "pytorch_lightning")


def namespaces() -> list[str]:
    """The installed Lightning namespaces, ``lightning.pytorch`` first. Does not import them."""
    return [name for name in _KNOWN if importlib.util.find_spec(name.split(".")[0]) is not None]


def default_namespace() -> str:
    """The namespace to build classes for: the imported one if only one is imported, else the first installed.

    Raises:
        ConfigError: neither is installed.
    """
    found = namespaces()
    if not found:
        raise ConfigError("neither lightning nor pytorch-lightning is installed; pip install 'resiliency[lightning]'")
    imported = [name for name in found if name in sys.modules]
    return imported[0] if len(imported) == 1 else found[0]


class AdapterClass:
    """A class of this library with a Lightning base class, built once per namespace.

    The defining module exports ``build`` (this object's method) and, through its ``__getattr__``, the class of
    :func:`default_namespace` under its name. A module has only one adapter class, because pickles find it by ``build``.

    Args:
        module: ``__name__`` of the defining module.
        name: name of the class. Lightning stores a callback's state under this name.
        parts: classes of this library, before Lightning's in the method resolution order; the docstring comes from the
            last one.
        base: Lightning's class, as "module below the namespace:class", such as "callbacks:ModelCheckpoint".
        qualname: the class's ``__qualname__`` if it must differ from ``name``; the module exports the class under this
            name, too. Needed because a LightningCLI that is given a short name searches all subclasses of Lightning's
            class for it, and must not find two.
    """

    def __init__(self, module: str, name: str, *parts: type[Any], base: str, qualname: str | None = None) -> None:
        self._module = module
        self._name = name
        self._parts = parts
        self._base = base
        self._qualname = qualname or name
        self._built: dict[str, type[Any]] = {}

    def build(self, namespace: str) -> type[Any]:
        """The class for ``lightning.pytorch`` or ``pytorch_lightning``; the same object each time.

        The class has an attribute ``namespace``. Instances can be pickled and copied.
        """
        found = self._built.get(namespace)
        if found is None:
            where, _, base = self._base.partition(":")
            stock = getattr(importlib.import_module(f"{namespace}.{where}"), base)
            members = {
                "__module__": self._module,
                "__qualname__": self._qualname,
                "__doc__": self._parts[-1].__doc__,
                "__reduce_ex__": self._reduce_ex(namespace),
                "namespace": namespace,
            }
            own = next(part for part in self._parts if "__init__" in part.__dict__)
            members["__init__"] = _constructor(own, stock)
            found = self._built[namespace] = type(self._name, (*self._parts, stock), members)
        return found

    def _reduce_ex(self, namespace: str) -> Callable[[Any, Any], Any]:
        """Pickles an instance with its namespace, because both namespaces' classes have the same module and name."""

        def reduce_ex(instance: Any, protocol: Any) -> Any:
            reduced = object.__reduce_ex__(instance, max(2, protocol))
            if type(instance) is not self._built[namespace]:
                return reduced  # a derived class, which pickle finds by its own module and name
            return (_new, (self._module, namespace), *reduced[2:])

        return reduce_ex

    def attribute(self, name: str) -> type[Any]:
        """For the defining module's ``__getattr__``: the class for the user's namespace."""
        if name in (self._name, self._qualname):
            return self.build(default_namespace())
        raise AttributeError(f"module {self._module!r} has no attribute {name!r}")


def _constructor(own: type[Any], stock: type[Any]) -> Callable[..., None]:
    """A constructor that calls ``own``'s, with a signature that shows the arguments of both, Lightning's first."""
    parameters = list(inspect.signature(own.__init__, eval_str=True).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        inherited = inspect.signature(stock.__init__, eval_str=True).parameters.values()
        keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        parameters = [*inherited, *keywords]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        own.__init__(self, *args, **kwargs)

    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    __init__.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    __init__.__doc__ = own.__init__.__doc__
    return __init__


def _new(module: str, namespace: str) -> Any:
    return object.__new__(importlib.import_module(module).build(namespace))


def require_trainer_of(namespace: str, trainer: Any, name: str, module: str) -> None:
    """Refuses a Trainer of the other Lightning package. ``name`` and ``module``: those of the adapter class.

    Raises:
        ConfigError: the Trainer is of the other package; the message says what to import or build instead.
    """
    package = namespace.split(".")[0]
    if any(cls.__module__.startswith(package + ".") for cls in type(trainer).__mro__):
        return
    theirs = type(trainer).__module__.split(".")[0]
    wanted = "pytorch_lightning" if theirs == "pytorch_lightning" else "lightning.pytorch"
    raise ConfigError(
        f"this {name} is built for {namespace}, the Trainer comes from {theirs}; import {theirs} before"
        f" {module}, or use build({wanted!r})"
    )
