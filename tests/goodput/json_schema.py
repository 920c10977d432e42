"""The part of JSON Schema that ``report.schema.json`` uses; unknown words are refused, so that none is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_KNOWN = {
    "$schema",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
}
_KNOWN |= {"minimum", "maximum", "oneOf", "propertyNames", "additionalProperties"}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "$") -> Iterator[str]:
    """What of ``value`` is not as ``schema`` says; a field that it does not name is a problem, too."""
    unknown = schema.keys() - _KNOWN
    assert not unknown, f"{where}: this validator does not know {unknown}"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from problems(value, root["$defs"][name], root, where)
        return
    if "oneOf" in schema:
        fits = [each for each in schema["oneOf"] if not list(problems(value, each, root, where))]
        if len(fits) != 1:
            yield f"{where}: {value!r} fits {len(fits)} of {len(schema['oneOf'])} forms"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    types = schema.get("type", list(_TYPES))
    names = [types] if isinstance(types, str) else types
    is_number_for_bool = isinstance(value, bool) and "boolean" not in names
    if is_number_for_bool or not any(isinstance(value, _TYPES[name]) for name in names):
        yield f"{where}: {value!r} is no {' or '.join(names)}"
        return
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where}: {value!r} is out of bounds"
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from problems(each, schema.get("items", {}), root, f"{where}[{number}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{where}: {name} is missing"
        for name, each in value.items():
            yield from problems(name, schema.get("propertyNames", {}), root, f"{where}: name {name}")
            if name in properties:
                yield from problems(each, properties[name], root, f"{where}.{name}")
            elif "additionalProperties" in schema:
                yield from problems(each, schema["additionalProperties"], root, f"{where}.{name}")
            else:
                yield f"{where}: {name} is not in the schema"
