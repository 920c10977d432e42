"""Encodes Python objects as JSON and decodes them, without running stored code.

Values that JSON cannot represent are tagged: ``{"!": "tuple", "value": [...]}``. Objects of unknown classes are stored
as pickles, but unpickled only when the reader allows it (``allow_pickle``); otherwise an instance of a builtin's
subclass becomes that builtin, and any other object becomes :class:`Opaque`.

Tensors are replaced by placeholders and tables (:mod:`resiliency.storage.tensor_table`), which
:mod:`resiliency.checkpoint.state` does through ``leaf``.
"""

from __future__ import annotations

import base64
import collections
import datetime
import pathlib
import pickle
import types
from collections.abc import Callable
from typing import Any

from resiliency.errors import ConfigError

__all__ = ["Opaque", "decode", "encode"]

_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
    "tuple": tuple,
}


#: Larger integers are written in hexadecimal: Python refuses to print or read very long decimal ones.
_JSON_INT = 1 << 64


class Opaque:
    """Placeholder of a stored object that was not unpickled; load with ``weights_only=False`` to get the object."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"Opaque({self.type_name!r})"


def encode(value: Any, *, leaf: Callable[[Any, tuple[str, ...]], Any]) -> Any:
    """Turns ``value`` into what :func:`json.dumps` accepts.

    Args:
        value: any tree of Python objects. Not changed; nothing in the result aliases it.
        leaf: called as ``leaf(object, keys from the root)`` for every dict and every object that is not a plain Python
            value; returns a JSON value to use instead, or ``NotImplemented`` to let this module handle it.

    Raises:
        ConfigError: an object that can be neither encoded nor pickled; names where it is.
    """
    try:
        return _encode(value, leaf, ())
    except RecursionError:
        raise ConfigError("the state is nested too deeply, or contains itself; store a plain tree") from None


def _encode(value: Any, leaf: Callable[[Any, tuple[str, ...]], Any], path: tuple[str, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else {"!": "int", "value": hex(value)}
    if kind is list:
        return [_encode(item, leaf, (*path, str(i))) for i, item in enumerate(value)]
    if kind is tuple:
        return {"!": "tuple", "value": [_encode(item, leaf, (*path, str(i))) for i, item in enumerate(value)]}
    if kind is dict:
        return _encode_dict(value, leaf, path)
    replaced = leaf(value, path)
    if replaced is not NotImplemented:
        return replaced
    return _encode_other(value, leaf, path)


def _encode_dict(value: dict[Any, Any], leaf: Callable[[Any, tuple[str, ...]], Any], path: tuple[str, ...]) -> Any:
    replaced = leaf(value, path)
    if replaced is not NotImplemented:
        return replaced
    if all(type(key) is str and key != "!" for key in value):
        return {key: _encode(item, leaf, (*path, key)) for key, item in value.items()}
    return {
        "!": "dict",
        "value": [[_encode(k, leaf, path), _encode(v, leaf, (*path, str(k)))] for k, v in value.items()],
    }


def _encode_other(value: Any, leaf: Callable[[Any, tuple[str, ...]], Any], path: tuple[str, ...]) -> Any:
    kind = type(value)

    def items(values: Any) -> list[Any]:
        return [_encode(item, leaf, (*path, str(i))) for i, item in enumerate(values)]

    if kind in (bytes, bytearray):
        return {"!": kind.__name__, "value": base64.b64encode(value).decode()}
    if kind in (set, frozenset):
        return {"!": kind.__name__, "value": items(value)}
    if kind is complex:
        return {"!": "complex", "value": [value.real, value.imag]}
    if kind is range:
        return {"!": "range", "value": [value.start, value.stop, value.step]}
    if kind is slice:
        return {"!": "slice", "value": items((value.start, value.stop, value.step))}
    if kind is collections.OrderedDict or kind is collections.Counter:
        tagged = {"!": kind.__name__, "value": _encode_dict(dict(value), leaf, path)}
        if vars(value):  # torch keeps the versions of modules as an attribute of a state_dict
            tagged["attributes"] = _encode_dict(dict(vars(value)), leaf, path)
        return tagged
    if kind is collections.defaultdict:
        factory = getattr(value.default_factory, "__name__", None)
        if value.default_factory is None or _FACTORIES.get(str(factory)) is value.default_factory:
            return {"!": "defaultdict", "factory": factory, "value": _encode_dict(dict(value), leaf, path)}
    if kind is collections.deque:
        return {"!": "deque", "maxlen": value.maxlen, "value": items(value)}
    if isinstance(value, pathlib.PurePath):
        return {"!": "path", "value": str(value)}
    if kind is datetime.datetime:
        return {"!": "datetime", "value": value.isoformat()}
    if kind is datetime.date:
        return {"!": "date", "value": value.isoformat()}
    if kind is datetime.timedelta:
        return {"!": "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    if kind is types.SimpleNamespace:
        return {"!": "namespace", "value": _encode_dict(vars(value), leaf, path)}
    if (
        kind.__module__ == "numpy"
        and hasattr(value, "dtype")
        and hasattr(value, "tobytes")
        and _is_plain_dtype(value.dtype)
    ):
        tag = "ndarray" if kind.__name__ == "ndarray" else "npscalar"
        data = base64.b64encode(value.tobytes()).decode()
        dtype = value.dtype.str if value.dtype.names is None else [list(part) for part in value.dtype.descr]
        return {"!": tag, "dtype": dtype, "shape": list(value.shape), "value": data}
    return _encode_pickle(value, leaf, path)


def _is_plain_dtype(dtype: Any) -> bool:
    """True for a numpy dtype without Python objects and without nested fields."""
    flat = dtype.names is None or all(dtype[name].names is None for name in dtype.names)
    return not dtype.hasobject and dtype.subdtype is None and flat


def _encode_pickle(value: Any, leaf: Callable[[Any, tuple[str, ...]], Any], path: tuple[str, ...]) -> Any:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        data = base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:  # Boundary: __reduce__ of a user's class may raise anything.
        raise ConfigError(
            f"the object at {'/'.join(path) or 'the root'} is a {name}, which cannot be stored ({error}); "
            "remove it from the state (for hyper-parameters: save_hyperparameters(ignore=[...]))"
        ) from error
    result: dict[str, Any] = {"!": "pickle", "class": name, "value": data}
    plain = _as_builtin(value)
    if plain is not None:
        result["plain"] = _encode(plain, leaf, path)
    return result


def _as_builtin(value: Any) -> Any:
    """An instance of a builtin's subclass (an enum of strings, a named tuple) as that builtin; None for others."""
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return list(value) if isinstance(value, list) else tuple(value)
    return dict(value.items()) if isinstance(value, dict) else None


def decode(value: Any, *, leaf: Callable[[dict[str, Any]], Any], allow_pickle: bool = False) -> Any:
    """Turns JSON written by :func:`encode` back into objects.

    Args:
        leaf: called with each dict whose tag this module does not know; returns the decoded object, or raises.
        allow_pickle: unpickle objects of unknown classes. Only for files you trust: it can run code.
    """

    def walk(item: Any) -> Any:
        if isinstance(item, list):
            return [walk(v) for v in item]
        if not isinstance(item, dict):
            return item
        tag = item.get("!")
        if tag is None:
            return {k: walk(v) for k, v in item.items()}
        return _decode_tagged(tag, item, walk, leaf, allow_pickle)

    return walk(value)


def _decode_tagged(
    tag: str,
    item: dict[str, Any],
    walk: Callable[[Any], Any],
    leaf: Callable[[dict[str, Any]], Any],
    allow_pickle: bool,
) -> Any:
    if "value" not in item:
        return leaf(item)
    v = item["value"]
    if tag == "int":
        return int(str(v), 16)
    if tag == "tuple":
        return tuple(walk(v))
    if tag == "dict":
        return {walk(k): walk(x) for k, x in v or ()}
    if tag in ("bytes", "bytearray"):
        raw = base64.b64decode(v or "")
        return raw if tag == "bytes" else bytearray(raw)
    if tag in ("set", "frozenset"):
        return {"set": set, "frozenset": frozenset}[tag](walk(v))
    if tag == "complex":
        return complex(*v) if v else 0j
    if tag == "range":
        return range(*v) if v else range(0)
    if tag == "slice":
        return slice(*walk(v))
    if tag in ("OrderedDict", "Counter"):
        made = getattr(collections, tag)(walk(v))
        for name, attribute in walk(item.get("attributes", {})).items():
            setattr(made, str(name), attribute)
        return made
    if tag == "defaultdict":
        name = item.get("factory")
        return collections.defaultdict(_FACTORIES[name] if name else None, walk(v))
    if tag == "deque":
        return collections.deque(walk(v), maxlen=item.get("maxlen"))
    if tag == "path":
        return pathlib.Path(str(v))
    if tag == "datetime":
        return datetime.datetime.fromisoformat(str(v))
    if tag == "date":
        return datetime.date.fromisoformat(str(v))
    if tag == "timedelta":
        return datetime.timedelta(*v) if v else datetime.timedelta()
    if tag == "namespace":
        return types.SimpleNamespace(**walk(v))
    if tag in ("ndarray", "npscalar"):
        import numpy

        dtype = (
            item["dtype"]
            if isinstance(item["dtype"], str)
            else [(str(n), str(k), *map(tuple, shape)) for n, k, *shape in item["dtype"]]
        )
        array = numpy.frombuffer(base64.b64decode(v or ""), dtype=numpy.dtype(dtype)).reshape(item["shape"])
        return array.copy() if tag == "ndarray" else array[()]
    if tag == "pickle":
        if allow_pickle:
            return pickle.loads(base64.b64decode(v or ""))  # noqa: S301 - the caller vouches for the file
        return walk(item["plain"]) if "plain" in item else Opaque(str(item.get("class")))
    return leaf(item)
