"""Describes the keys of the configuration: the type, the default and the docstring of each."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, PydanticInvalidForJsonSchema, SecretStr
from pydantic.fields import FieldInfo

from relay.config.types import written


class DescribedKey(NamedTuple):
    """A key: its path from its section on, its type with bounds, its default in YAML, and what it means.

    The default is `required` where there is none, and empty for a section.
    """

    name: str
    type: str
    default: str
    meaning: str


def first_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0]


def described(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a model, in its class or a base class."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, BaseModel) or each.__module__.startswith("pydantic"):
            continue
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        except (OSError, TypeError):
            continue  # a package without its source
        if not isinstance(body, ast.ClassDef):
            continue
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def type_of(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The description of a JSON schema, with its bounds."""
    if "$ref" in schema:
        return type_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        # Null first: the bounds follow the other type.
        ordered = sorted(alternatives, key=lambda each: each.get("type") != "null")
        return " or ".join(dict.fromkeys(type_of(each, definitions) for each in ordered))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("format") == "password":
        return "secret"
    kind = schema.get("type", "any")
    if kind == "array" and "prefixItems" in schema:
        return "`host:port`"
    if kind == "array":
        return f"list of {type_of(schema['items'], definitions)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {type_of(schema['additionalProperties'], definitions)}"
    words = {
        "object": "mapping",
        "string": "path" if schema.get("format") == "path" else "text",
        "boolean": "`true`, `false`",
    }
    name = "duration, such as `7d`" if schema.get("format") == "duration" else words.get(kind, kind)
    return name + "".join(f", {bound}" for bound in bounds(schema))


def bounds(schema: dict[str, Any]) -> Iterator[str]:
    """The bounds of a value."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for key, sign in signs.items():
        if key in schema and abs(schema[key]) < 1e9:  # the technical bound of seconds is not shown
            yield f"{sign} {schema[key]:g}"
    if schema.get("maxLength"):
        yield f"at most {schema['maxLength']} characters"
    elif schema.get("minLength"):
        yield "not empty"
    if "pattern" in schema:
        yield f"matching `{schema['pattern']}`"


def default_of(field: FieldInfo) -> str:
    """A default value in YAML, or `required`; empty for a section."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, timedelta):
        value = written(value)
    if isinstance(value, BaseModel):
        return ""
    plain = {None: "null", True: "true", False: "false", "": '""'}
    text = plain[value] if isinstance(value, bool | str | None) and value in plain else str(value)
    return text.replace("'", "")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a section; None for another field."""
    parts = (annotation, *get_args(annotation))
    sections = [each for each in parts if inspect.isclass(each) and issubclass(each, BaseModel)]
    return sections[0] if len(sections) == 1 else None


def keys(
    model: type[BaseModel], above: str = "", only: set[str] | None = None
) -> Iterator[DescribedKey]:
    """Yield the keys of a model, or `only` some, and those of the sections in it; `above` is the path of the model."""
    try:
        schema = model.model_json_schema()
    except PydanticInvalidForJsonSchema:
        # A type that only the package of a sink knows.
        schema = {"properties": {}}
    texts = described(model)
    for name, field in model.model_fields.items():
        if only is not None and name not in only:
            continue
        key = above + (field.alias or name)
        if (section := model_in(field.annotation)) is not None and "dict" not in str(
            field.annotation
        ):
            if type(None) in get_args(field.annotation):
                yield DescribedKey(key, "null or a section", default_of(field), texts.get(name, ""))
            yield from keys(section, f"{key}.")
            continue
        of_key = schema["properties"].get(field.alias or name, {})
        if least := [m.ge for m in field.metadata if isinstance(getattr(m, "ge", None), int)]:
            # pydantic omits it beside another bound.
            of_key = {**of_key, "minimum": least[-1]}
            of_key.pop("exclusiveMinimum", None)
        kind = type_of(of_key, schema.get("$defs", {}))
        yield DescribedKey(key, kind, default_of(field), texts.get(name, ""))
