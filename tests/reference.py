"""Writes the pages of docs/reference that are generated from the code: `python -m tests.reference`, `make reference`.

They are committed, so that the repository shows them; tests/unit/test_reference.py fails when they are stale.
Long because it has the generator of each page.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, get_args, get_origin

import typer
from pydantic import BaseModel

from relay.cli.app import app
from relay.config.description import DescribedKey, described, first_paragraph, keys, model_in
from relay.config.handlers import KINDS, AnyHandler, BrokerHandler, DeliveryHandler, SinkHandler
from relay.config.intake import INTAKES, BrokerSource
from relay.config.settings import (
    EventTypeSettings,
    QueueSettings,
    ScheduledEvent,
    ScheduleSettings,
    Settings,
)
from tests.pages import DOCS
from tests.process import ROOT
from tests.sql_meanings import COLUMNS, TABLES

MODULES = (
    "relay",
    "relay.testing",
    "relay.sinks",
    "relay.sinks.brokers",
    "relay.sinks.batching",
    "relay.sinks.cloudevents",
    "relay.client",
    "relay.client.schedule",
    "relay.client.enqueueing",
    "relay.client.scheduled",
    "relay.client.worker",
    "relay.client.saga",
    "relay.client.reader",
    "relay.client.middleware",
    "relay.client.testing",
    "relay.spark",
)
"""The modules that users' code may import."""
_BRIEF = ("relay.testing", "relay.sinks.")
"""Of these, whose names a guide explains, the page has no members."""
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TYPES: dict[str, type[AnyHandler]] = KINDS | {
    kind: import_module(module).Settings
    for kind, module in sorted(PROJECT["entry-points"]["relay.sinks"].items())
}
"""The settings of each type of handlers that relay brings."""
_NOTE = "This page is generated from the code: `make reference` writes it.\n"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in line)} |\n"
        for line in lines
    )


# Configuration


def row(key: DescribedKey) -> tuple[str, ...]:
    """The row of a key. Raises ValueError for one without a docstring."""
    if not key.meaning:
        raise ValueError(f"{key.name} has no docstring")
    default = key.default if key.default in ("", "required") else f"`{key.default}`"
    kind = re.sub(r"\bsecret\b", "[secret](../how-to/secrets.md)", key.type)
    return f"`{key.name}`", kind, default, key.meaning


def keys_table(model: type[BaseModel], only: set[str] | None = None) -> str:
    return table(("key", "type", "default", "meaning"), list(map(row, keys(model, only=only))))


def own(model: type[BaseModel]) -> set[str]:
    """The fields that a class adds to those of the classes that have a table of their own."""
    shared = {each for each, _ in _SHARED.values()} if model in TYPES.values() else set()
    added = [each for each in model.__mro__ if each not in shared] if shared else [model]
    names = {name for each in added for name in inspect.get_annotations(each)}
    return names & model.model_fields.keys() - {"type"}


def types_of(settings: type[BaseModel]) -> str:
    """The types of handlers that have the keys of these settings."""
    *others, last = [f"`{kind}`" for kind, each in TYPES.items() if issubclass(each, settings)]
    return f"{', '.join(others)} and {last}."


_SHARED = {
    "Every handler": (SinkHandler.__mro__[1], "Every `type`."),
    **{
        title: (settings, types_of(settings))
        for title, settings in (
            ("Every sink", SinkHandler),
            ("Deliveries", DeliveryHandler),
            ("Brokers", BrokerHandler),
        )
    },
}


def handlers() -> Iterator[str]:
    """The tables of handlers: the keys of several types, then those of each type."""
    for title, (model, of) in _SHARED.items():
        yield f"### {title}\n\n{of}\n\n{keys_table(model, own(model))}"
    for name, settings in TYPES.items():
        yield f"### type: {name}\n\n{first_paragraph(settings)}\n\n{keys_table(settings, own(settings))}"


def settings() -> str:
    """The page of all keys of the configuration."""
    lone, sections = [], []
    texts = described(Settings)
    for name, field in Settings.model_fields.items():
        if name == "handlers":
            sections.append(f"## handlers\n\n{texts[name]}\n\n" + "\n".join(handlers()))
        elif name == "events":
            sections.append(f"## events\n\n{texts[name]}\n\n{keys_table(EventTypeSettings)}")
        elif name == "queues":
            sections.append(f"## queues\n\n{texts[name]}\n\n{keys_table(QueueSettings)}")
        elif name == "schedules":
            sections.append(
                f"## schedules\n\n{texts[name]}\n\n{keys_table(ScheduleSettings)}"
                f"\n### schedules: publish\n\n{keys_table(ScheduledEvent)}"
            )
        elif name == "intake":
            sections.append(
                f"## intake\n\n{texts[name]}\n\n{keys_table(BrokerSource)}\n"
                + "\n".join(
                    f"### intake: {kind}\n\n{first_paragraph(each)}\n\n"
                    + keys_table(
                        each, set(each.model_fields) - set(BrokerSource.model_fields) - {"type"}
                    )
                    for kind, each in INTAKES.items()
                )
            )
        elif name == "routes":
            (route,) = get_args(field.annotation)
            sections.append(f"## routes\n\n{texts[name]}\n\n{keys_table(route)}")
        elif (section := model_in(field.annotation)) is not None:
            sections.append(f"## {name}\n\n{first_paragraph(section)}\n\n{keys_table(section)}")
        else:
            lone.append(name)
    top = keys_table(Settings, set(lone))
    return (
        f"# Configuration keys\n\n{_NOTE}\nEvery key with its type, bounds and default. "
        "[Configuration](configuration.md) describes how they work together, with examples; "
        "`config/relay.yaml` has them all in a file.\n\n"
        f"## Without a section\n\n{top}\n" + without_repetitions("\n".join(sections))
    )


def without_repetitions(text: str) -> str:
    """Tables in which a key of a section that another table has, such as `retry.wait`, is only named."""
    rows: set[str] = set()
    made: list[str] = []
    named: list[str] = []
    for line in text.splitlines():
        if re.match(r"\| `\w+\.", line) and line in rows:
            named.append(line.split(" | ")[0].removeprefix("| "))
            continue
        rows.add(line)
        if named and not line.startswith("|"):
            made += ["", f"Also, as above, {', '.join(named)}."]
            named = []
        made.append(line)
    return "\n".join(made) + "\n"


# Commands


def commands(group: Any, above: str) -> Iterator[tuple[str, Any]]:
    """Every command, and every group before its commands."""
    for name, command in sorted(group.commands.items()):
        path = f"{above} {name}"
        yield path, command
        if hasattr(command, "commands"):
            yield from commands(command, path)


def parameter(each: Any) -> tuple[str, str, str]:
    """The row of an option or an argument."""
    if type(each).__name__ == "TyperArgument":
        return f"`{each.metavar or each.name.upper()}`", "", each.help or ""
    value = "" if each.is_flag else f" {each.metavar or each.opts[0].lstrip('-').upper()}"
    names = ", ".join(f"`{name}{value}`" for name in (*each.opts, *each.secondary_opts))
    default = getattr(each.default, "value", each.default)
    variable = f" Also `{each.envvar}`." if each.envvar else ""
    return names, "" if default in (None, False) else f"`{default}`", (each.help or "") + variable


def cli() -> str:
    """The page of all commands: options of several commands, then of each group, then of each command."""
    found = list(commands(typer.main.get_command(app), "relay"))
    rows = {
        path: [parameter(each) for each in command.params if not each.hidden]
        for path, command in found
        if not hasattr(command, "commands")
    }
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, given in rows.items():
        for row in given:
            groups.setdefault(row, []).append(path.split()[1])
    common = [row for row, of in groups.items() if len(of) > 3 and len(set(of)) > 1]
    text = (
        f"# Commands\n\n{_NOTE}\nExit status: 0, 1 for a failure, 2 for bad usage or configuration.\n\n"
        f"## Common options\n\n{options(common)}"
    )
    for path, command in found:
        text += f"\n{'##' if path.count(' ') == 1 else '###'} {path}\n\n{inspect.cleandoc(command.help or '')}\n"
        name = path.split()[1]
        of_group = [row for row, of in groups.items() if of.count(name) > 1 and row not in common]
        if hasattr(command, "commands"):
            text += f"\n{options(of_group)}" if of_group else ""
            continue
        elsewhere = [row for row in rows[path] if row in common or row in of_group]
        if rest := [row for row in rows[path] if row not in elsewhere]:
            text += f"\n{options(rest)}"
        if elsewhere:
            named = ", ".join(f"`{re.split('[ ,`]', row[0])[1]}`" for row in elsewhere)
            text += f"\n{'Also ' if rest else 'Options: '}{named}.\n"
    return text


def options(rows: Sequence[tuple[str, str, str]]) -> str:
    return table(("option", "default", "meaning"), rows)


# SQL

_FUNCTION = re.compile(
    r"(?P<comment>(?:^-- .*\n)*)^create or replace (?P<kind>function|procedure) (?P<name>relay\.\w+)\s*\("
    r"(?P<arguments>(?:[^$()]|\([^$()]*\))*)\)\s*"
    r"(?:returns (?P<returns>table \([^$]*?\)|setof [\w.]+|[\w.\[\]]+))?\s",
    re.MULTILINE,
)
_CALL = re.compile(r"(?:, )?call relay\.call default relay\.this_call\(\)")
"""The argument that nobody gives."""
_TABLE = re.compile(
    r"(?P<comment>(?:^-- .*\n)*)^create table if not exists (?P<name>[\w.]+) \(\n(?P<columns>[^;]*?)\n\)",
    re.MULTILINE,
)
_VIEW = re.compile(
    r"^create or replace view (?P<name>[\w.]+) as\nselect (?P<columns>[^;]*?)\n +from", re.MULTILINE
)
_COLUMN = re.compile(
    r"^    (?!primary|unique|check|constraint|foreign)(\w+) +([\w.\[\]]+)", re.MULTILINE
)
_ADDED = re.compile(
    r"^alter table ([\w.]+)\s+add column if not exists (\w+) ([\w.\[\]]+)", re.MULTILINE
)
_GRANT = re.compile(
    r"grant execute on function\s([^;]*?)\sto [^;]*\brelay_(?:publisher|worker|reader)\b", re.DOTALL
)
_OF_OPERATORS = (
    *("relay.maintain", "relay.retain", "relay.cancel", "relay.reschedule"),
    *("relay.begin_history", "relay.recent_witness", "relay.holds_witness"),
)
"""Functions that users call, beside those that roles of users may call."""
_READ = (
    *("public.outbox_message_t", "relay.schedules", "relay.log_readers", "relay.readers"),
    *("relay.dead_letters", "relay.dead_letter_actions", "relay.actions"),
    *("relay.sinks", "relay.watermarks"),
    *("relay.queues", "relay.queue_items", "relay.queue_figures", "relay.inbox"),
)
"""Tables and views that are of use to users; the others are relay's own."""
_COMMENT = re.compile(
    r"^comment on (?:table|view|column|function) ([\w.]+)(?:\(.*?\))? is((?:\s+'(?:[^']|'')*')+);",
    re.MULTILINE,
)


def sql() -> str:
    """The page of the functions and tables of users. Raises KeyError where one has no text."""
    text = (
        f"# SQL functions and tables\n\n{_NOTE}\nWhat `relay init` installs and you may call or read, by file of "
        "`sql/`. Write to the tables only by commands. Other functions and tables are relay's own: "
        "`\\d+ relay.positions` in psql shows what their columns mean.\n\n"
        "Functions that decide by who calls have one more argument, the last one, `call`. It is not shown: the server "
        "fills it in ([Who calls](../security.md#who-calls)).\n"
    )
    sources = {file: file.read_text() for file in sorted((ROOT / "sql").rglob("*.sql"))}
    whole = "".join(sources.values())
    known: dict[str, str] = {}
    public = {*_OF_OPERATORS, *re.findall(r"relay\.\w+(?=\s*\()", " ".join(_GRANT.findall(whole)))}
    said = {name: unquoted(literals) for name, literals in _COMMENT.findall(whole)}
    for file, source in sources.items():
        functions = [
            (
                f"`{found['name']}({_CALL.sub('', ' '.join(found['arguments'].split()))})`",
                returned(found["name"], " ".join(found["returns"].split()), known)
                if found["returns"]
                else "nothing: `call` it"
                if found["kind"] == "procedure"
                else "its `out` arguments",
                said.get(found["name"]) or uncommented(found["comment"]),
            )
            for found in _FUNCTION.finditer(source)
            if found["name"] in public
        ]
        tables = [
            paragraphs(
                f"### {found['name']}",
                said.get(found["name"]) or uncommented(found["comment"]) or TABLES[found["name"]],
            )
            + table(
                ("column", "type", "meaning"),
                [
                    (f"`{name}`", f"`{kind}`", meaning(found["name"], name, said))
                    for name, kind in columns(found, whole).items()
                ],
            )
            for found in _TABLE.finditer(source)
            if found["name"] in _READ
        ]
        tables += [
            paragraphs(f"### {found['name']}", f"A view: {said[found['name']]}")
            + table(("column", "meaning"), list(columns_of_view(found, said)))
            for found in _VIEW.finditer(source)
            if found["name"] in _READ
        ]
        if functions or tables:
            text += f"\n## {file.relative_to(ROOT / 'sql')}\n\n"
        if functions:
            text += table(("function", "returns", "what it does"), functions) + "\n" * bool(tables)
        text += "\n".join(tables)
    return text


def returned(name: str, kind: str, known: dict[str, str]) -> str:
    """What a function returns; a table that another one has returned is not spelled out again."""
    same = known.setdefault(kind, name) if kind.startswith("table ") else name
    return f"`{kind}`" if same == name else f"as `{same}`"


def columns(made: re.Match[str], whole: str) -> dict[str, str]:
    """The columns of a table and their types, also those that a later statement adds."""
    added = [(name, kind) for to, name, kind in _ADDED.findall(whole) if to == made["name"]]
    return dict([*_COLUMN.findall(made["columns"]), *added])


_SHOWN = {
    "relay.watermarks": "relay.completeness",
    "relay.queue_figures": "relay.queue_figures",
    "relay.queue_items": "relay.queue_items",
    "relay.dead_letters": "relay.dead_letter_queue",
    "relay.sinks": "relay.sink_claims",
}
"""Whose columns a view shows, where that is not relay.positions, or not that alone."""


def columns_of_view(made: re.Match[str], said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The columns of a view, and what they mean in the table that it shows."""
    for column in re.split(r",\s+", made["columns"]):
        name = column.partition(".")[2]
        shown = _SHOWN.get(made["name"], "relay.positions")
        yield f"`{name}`", meaning(made["name"], name, said, shown, "relay.positions")


def meaning(table_name: str, column: str, said: Mapping[str, str], *shown: str) -> str:
    """What a column means, by its comment or by what stands for one; a view has those of the tables that it shows."""
    keys = [f"{each}.{column}" for each in (table_name, *shown)]
    known = (said.get(key) or COLUMNS.get(key) for key in keys)
    return next(filter(None, known), None) or COLUMNS[column]


def paragraphs(*texts: str) -> str:
    """The texts that are not empty, each with an empty line after it."""
    return "".join(f"{text}\n\n" for text in texts if text)


def unquoted(literals: str) -> str:
    """The text of string literals that follow each other."""
    return "".join(re.findall(r"'((?:[^']|'')*)'", literals)).replace("''", "'")


def uncommented(text: str) -> str:
    return " ".join(line.removeprefix("-- ") for line in text.splitlines())


# Python


def signature(thing: Any) -> str:
    try:
        written = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", str(inspect.signature(thing)))
        return re.sub(r"(?<=: |> )'([^']*)'", r"\1", written)
    except (TypeError, ValueError):
        return ""


def members(thing: type) -> Iterator[tuple[str, str]]:
    """The public methods and properties of a class that have a docstring, and its first paragraph."""
    for name, member in vars(thing).items():
        function = (
            member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        )
        hidden = name.startswith(("_", "test_")) or not inspect.isfunction(function)
        if hidden or not function.__doc__:
            continue
        call = (
            ""
            if isinstance(member, property)
            else signature(function).replace("(self, ", "(").replace("(self)", "()")
        )
        yield f"`{name}{call}`", inspect.cleandoc(function.__doc__).partition("\n\n")[0]


def of_alias(module: ModuleType, name: str) -> str:
    """The text below an alias of a type, in the module that it is imported from."""
    for each in ast.parse(inspect.getsource(module)).body:
        if isinstance(each, ast.ImportFrom) and name in [one.name for one in each.names]:
            return of_alias(import_module(str(each.module)), name)
    body = ast.parse(inspect.getsource(module)).body
    for alias, text in pairwise(body):
        is_alias = isinstance(alias, ast.Assign) and ast.unparse(alias.targets[0]) == name
        if is_alias and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            return inspect.cleandoc(str(text.value.value))
    raise KeyError(name)


def python() -> str:
    """The page of the names that users' code may import."""
    text = (
        f"# Python API\n\n{_NOTE}\n[Python names](python.md) names the guide to each; `help()` has the "
        "whole texts. A name that ends with `_async` does the same in an asynchronous session.\n"
    )
    for module_name in MODULES:
        module = import_module(module_name)
        text += f"\n## {module_name}\n"
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if name.removesuffix("_async") in set(module.__all__) - {name}:
                continue
            if get_origin(thing) is not None:
                text += f"\n### {module_name}.{name}\n\n{of_alias(module, name)}\n"
                continue
            # The arguments of a model are its keys, and a protocol is not called.
            is_called = not (
                inspect.isclass(thing)
                and (issubclass(thing, BaseModel) or getattr(thing, "_is_protocol", False))
            )
            call = signature(thing) if callable(thing) and is_called else ""
            block = f"```text\n{name}{call}\n```\n\n" if call else ""
            is_brief = module_name.startswith(_BRIEF)
            text += f"\n### {module_name}.{name}\n\n{block}{first_paragraph(thing)}\n"
            rows = list(members(thing)) if inspect.isclass(thing) and not is_brief else []
            if rows:
                text += "\n" + table(("member", "what it does"), rows)
    return text


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "cli.md": cli,
    "sql.md": sql,
    "python-api.md": python,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / "reference" / name).write_text(page())
