"""Which JSON schemas can be a pattern: everything that the regular expression would not enforce is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MOST_CHARACTERS = 1 << 16
MOST_LEVELS = 24
NOTES = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
    "$defs", "definitions",
}  # fmt: skip
"""Keywords that restrict nothing."""
OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems", "prefixItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""The keywords that each type may have."""
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
FORMATS = {
    "date": DATE,
    "time": f"{TIME}Z",
    "date-time": f"{DATE}T{TIME}Z",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""A pattern for each format that can be required. Days go up to 28, which every month has."""


class Checked:
    """A schema as outlines-core takes it, and the patterns that it holds."""

    def __init__(self, schema: Any) -> None:
        self.patterns: list[str] = []
        self.schema = self._rewritten(_parsed(schema), "the schema", 0)

    def _rewritten(self, schema: Any, where: str, level: int) -> Any:
        """The schema with formats as patterns; raises ValueError."""
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where} is {schema!r}; it must be an object")
        if level > MOST_LEVELS:
            raise ValueError(f"{where} is nested more than {MOST_LEVELS} levels deep")
        found, keys = dict(schema), set(schema) - NOTES
        for name in ("$defs", "definitions"):
            if name in found:
                found[name] = self._each(found[name], f"{name} of {where}", level)
        kind = next((key for key in ("$ref", "const", "enum", "anyOf") if key in keys), None)
        if kind is None:
            return self._typed(found, keys, where, level)
        _refuse(keys - {kind} - ({"type"} if kind in ("const", "enum") else set()), f"{where} beside {kind}")
        if kind == "anyOf":
            if not isinstance(found["anyOf"], list) or not found["anyOf"]:
                raise ValueError(f"anyOf of {where} must be a list of schemas")
            found["anyOf"] = [self._rewritten(s, f"anyOf of {where}", level + 1) for s in found["anyOf"]]
        elif kind == "$ref":
            if not isinstance(found["$ref"], str) or not found["$ref"].startswith("#/"):
                raise ValueError(
                    f"$ref of {where} is {found['$ref']!r}; it must point into the schema, as in #/$defs/A"
                )
        else:
            self._check_values(found, kind, where)
        return found

    def _each(self, schemas: Any, where: str, level: int) -> dict[str, Any]:
        if not isinstance(schemas, Mapping):
            raise ValueError(f"{where} is {schemas!r}; it must be an object of schemas")
        return {name: self._rewritten(s, f"{name!r} in {where}", level + 1) for name, s in schemas.items()}

    def _check_values(self, found: dict[str, Any], kind: str, where: str) -> None:
        """The values of const or enum are of the type that stands beside them."""
        values = [found["const"]] if kind == "const" else found["enum"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"enum of {where} must be a list of values")
        if "type" in found:
            wrong = [value for value in values if not _is(value, found["type"])]
            if wrong:
                raise ValueError(f"{kind} of {where} has {wrong[0]!r}, which is not of type {found['type']!r}")
            del found["type"]
        written = [_written(value, f"{kind} of {where}", 0) for value in values]
        found[kind] = written[0] if kind == "const" else written

    def _typed(self, found: dict[str, Any], keys: set[str], where: str, level: int) -> dict[str, Any]:
        kind = found.get("type")
        if kind is None:
            _refuse(keys, f"{where}, which has no type")
            raise ValueError(f"{where} has no type: give one of {', '.join(OF_TYPE)}, or const, enum, anyOf or $ref")
        if isinstance(kind, list) and kind and all(isinstance(each, str) and each in OF_TYPE for each in kind):
            _refuse(keys - {"type"}, f"{where}, which has several types")
            return found
        if not isinstance(kind, str) or kind not in OF_TYPE:
            raise ValueError(f"type of {where} is {kind!r}; it must be one of {', '.join(OF_TYPE)}")
        _refuse(keys - {"type"} - OF_TYPE[kind], f"{where}, of type {kind}")
        if kind == "string":
            self._check_string(found, where)
        elif kind == "array":
            self._check_array(found, keys, where, level)
        elif kind == "object":
            self._check_object(found, keys, where, level)
        return found

    def _check_string(self, found: dict[str, Any], where: str) -> None:
        size = {"minLength", "maxLength"} & found.keys()
        _check_counts(found, size, where)
        if bool(size) + ("pattern" in found) + ("format" in found) > 1:
            raise ValueError(
                f"{where} has more than one of pattern, format and lengths: put the lengths into a pattern"
            )
        if "format" in found:
            name = found.pop("format")
            if name not in FORMATS:
                known = ", ".join(FORMATS)
                raise ValueError(f"format of {where} is {name!r}; it can be {known}: give a pattern instead")
            found["pattern"] = f"^{FORMATS[name]}$"
        elif "pattern" in found:
            if not isinstance(found["pattern"], str):
                raise ValueError(f"pattern of {where} is {found['pattern']!r}; it must be a text")
            bare = found["pattern"].removeprefix("^").removesuffix("$")
            self.patterns.append(bare)
            found["pattern"] = f"^(?:{bare})$"

    def _check_array(self, found: dict[str, Any], keys: set[str], where: str, level: int) -> None:
        _check_counts(found, {"minItems", "maxItems"} & keys, where)
        if "prefixItems" in keys:
            _refuse(keys - {"type", "prefixItems"}, f"{where} beside prefixItems")
            if not isinstance(found["prefixItems"], list) or not found["prefixItems"]:
                raise ValueError(f"prefixItems of {where} must be a list of schemas")
            found["prefixItems"] = [self._rewritten(s, f"an item of {where}", level + 1) for s in found["prefixItems"]]
        elif "items" in keys:
            found["items"] = self._rewritten(found["items"], f"items of {where}", level + 1)

    def _check_object(self, found: dict[str, Any], keys: set[str], where: str, level: int) -> None:
        if "properties" not in keys:
            _refuse({"required"} & keys, f"{where}, which has no properties")
            if "additionalProperties" in keys:
                inner = found["additionalProperties"]
                found["additionalProperties"] = self._rewritten(inner, f"additionalProperties of {where}", level + 1)
            return
        found["properties"] = self._each(found["properties"], f"properties of {where}", level)
        found.pop("additionalProperties", None)  # a text has the named ones only, which is always allowed
        required = found.get("required", [])
        if not isinstance(required, list) or not set(map(str, required)) <= found["properties"].keys():
            raise ValueError(f"required of {where} is {required!r}; it must list some of its properties")
        found["properties"] = {_quoted(name): inner for name, inner in found["properties"].items()}
        found["required"] = [_quoted(str(name)) for name in required]


def _parsed(schema: Any) -> Any:
    """A schema from a text or an object; raises ValueError if it is no JSON or too long."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters, and at most {MOST_CHARACTERS} are allowed")
        return json.loads(text, parse_constant=_no_number)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is not JSON that can be used: {' '.join(str(error).split())}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _quoted(name: str) -> str:
    """A name as it stands between the quotes of a JSON text, which outlines-core expects."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _written(value: Any, where: str, level: int) -> Any:
    """A value of const or enum as outlines-core takes it: with keys of objects as regular expressions."""
    if level > MOST_LEVELS:
        raise ValueError(f"{where} is nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, Mapping):
        return {re.escape(_quoted(name)): _written(each, where, level + 1) for name, each in value.items()}
    if isinstance(value, list):
        return [_written(each, where, level + 1) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} has a number that is too large")
    return value


def _refuse(keywords: set[str], where: str) -> None:
    if keywords:
        names = ", ".join(sorted(keywords))
        raise ValueError(f"json_schema cannot enforce {names} in {where}: leave it out, or write a regex")


def _check_counts(found: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in sorted(names):
        value = found[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} of {where} is {value!r}; it must be a whole number of at least 0")
    for least, most in (("minLength", "maxLength"), ("minItems", "maxItems")):
        if {least, most} <= names and found[least] > found[most]:
            raise ValueError(f"{least} of {where} is {found[least]}, and {most} is {found[most]}: nothing fits both")


def _is(value: Any, kinds: Any) -> bool:
    """Whether a value is of one of the JSON types."""
    types: dict[str, Any] = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind in ("integer", "number"):
            if number and (kind == "number" or float(value).is_integer()):
                return True
        elif kind in types and isinstance(value, types[kind]):
            return True
    return False
