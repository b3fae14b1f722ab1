"""The options of the data source `outbox`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn

from psycopg import sql
from pydantic import ValidationError

from relay.config.dsn import DatabaseAccess
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.model.events import SQL_TYPES
from relay.model.snapshots import BEGINNING, Snapshot
from relay.spark.query_positions import QueryPosition
from relay.spark.reading import MappedTable

_DSN = ("dsn", "dsn.env", "dsn.file", "dsn.call")
NAMES = (
    *(*_DSN, "table", "columns", "headers", "partitions", "ordered"),
    "pushFilters",
    *("fromSnapshot", "toSnapshot", "fromTime", "toTime", "fromOffset", "toOffset"),
    *("startingPosition", "maxEventsPerTrigger", "reader", "failOnDataLoss"),
)
_ONLY = {
    "batch": ("fromSnapshot", "toSnapshot", "fromTime", "toTime", "fromOffset", "toOffset"),
    "stream": ("startingPosition", "maxEventsPerTrigger"),
}
_FORMS = {
    "columns": 'must name the column of each field, such as {"payload": "body"}',
    "headers": 'must name columns, such as ["region"] or {"region": "tenant_region"}',
}
_OF_TABLES = "provider"
"""A property that Spark gives each table of `create table … using`."""
_KNOWN = {name.lower(): name for name in NAMES}
_DEFAULT_PARTITIONS = 8
_BEGINNING = QueryPosition(BEGINNING)


@dataclass(frozen=True)
class Options:
    """The parsed options. `dsn` is a secret, which `repr` does not show."""

    dsn: DatabaseAccess
    names_server: bool
    """Whether `dsn` was given; otherwise libpq's variables name the server."""
    table: MappedTable
    partitions: int
    ordered: bool
    push_filters: bool
    from_snapshot: QueryPosition
    to_snapshot: QueryPosition | None
    ranges: tuple[tuple[str, str, str], ...]
    """Conditions of a batch: field, operator and value as text."""
    starting: QueryPosition | None
    """Where a new query begins; None for now."""
    max_events: int | None
    reader: str | None
    """The name under which retention keeps the events that a query has not read."""
    fail_on_data_loss: bool
    """Whether a query fails where retention has removed events that it had still to read."""

    def __repr__(self) -> str:
        return f"Options(table={'.'.join(self.table.name)})"

    @property
    def conditions(self) -> sql.Composable | None:
        """The conditions of a batch on times and offsets; None without any."""
        conditions = [
            sql.SQL("{} {} {}::{}").format(
                sql.Identifier(self.table.mapping[field]),
                sql.SQL(">=") if operator == ">=" else sql.SQL("<"),
                sql.Literal(value),
                # A column of type `timestamp` counts as UTC, the session's time zone.
                sql.SQL(SQL_TYPES[field]),
            )
            for field, operator, value in self.ranges
        ]
        return sql.SQL(" and ").join(conditions) if conditions else None


def parse(given: Mapping[str, str], reading: Literal["batch", "stream"] | None = None) -> Options:
    """Parse options, whose names are case-insensitive.

    `reading` excludes the options of the other kind; None accepts both. Raises ConfigurationError, which names the
    option.
    """
    if _OF_TABLES in given:
        # Spark 4.3 gives the reader of such a table none of its options: it would read the server of PG* variables.
        raise ConfigurationError(
            "create table: Spark does not keep a table's options for its reader: write `create temporary view … using "
            "outbox options (…)`"
        )
    options: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() not in _KNOWN:
            raise ConfigurationError(f"option {name}: unknown; the options are {', '.join(NAMES)}")
        options[_KNOWN[name.lower()]] = value
    for kind, names in _ONLY.items():
        for name in names:
            if reading and kind != reading and name in options:
                _refuse(name, f"is of a {kind}, and this is a {reading}: leave it out")
    source = _source(options)
    before, after = _snapshot(options, "fromSnapshot"), _snapshot(options, "toSnapshot")
    if before and after and _is_before(after.snapshot, before.snapshot):
        _refuse("toSnapshot", f"{after} is before fromSnapshot, {before}: exchange the two")
    return Options(
        dsn=DatabaseAccess("option dsn", source.dsn),
        names_server=any(name in options for name in _DSN),
        table=MappedTable(
            source.table_name, source.mapping, frozenset(filter(None, source.columns.values()))
        ),
        partitions=_number(options, "partitions") or _DEFAULT_PARTITIONS,
        ordered=_flag(options, "ordered", default=True),
        push_filters=_flag(options, "pushFilters", default=False),
        from_snapshot=before or _BEGINNING,
        to_snapshot=after,
        ranges=tuple(_ranges(options)),
        starting=_starting(options),
        max_events=_number(options, "maxEventsPerTrigger"),
        reader=options.get("reader") or None,
        fail_on_data_loss=_flag(options, "failOnDataLoss", default=True),
    )


def _source(options: Mapping[str, str]) -> SourceSettings:
    values: dict[str, Any] = {}
    given = [name for name in _DSN if name in options]
    if len(given) > 1:
        _refuse(given[1], f"{given[0]} is given too: give one")
    variable = options.get("dsn.env")
    if variable is not None and variable not in os.environ:
        # This process is the JVM's, and has the environment of the JVM's start.
        _refuse(
            "dsn",
            f"the environment has no variable {variable}: set it before the Spark session starts",
        )
    for name in given:
        _, _, kind = name.partition(".")
        values["dsn"] = {kind: options[name]} if kind else options[name]
    if "table" in options:
        values["table"] = options["table"]
    if "columns" in options:
        try:
            values["columns"] = json.loads(options["columns"])
        except ValueError:
            _refuse("columns", 'is not JSON; write {"payload": "body"}: the column of each field')
    if "headers" in options:
        try:
            values["headers"] = json.loads(options["headers"])
        except ValueError:
            _refuse("headers", 'is not JSON; write ["region"] or {"region": "tenant_region"}')
    try:
        return SourceSettings.model_validate(values)
    except ValidationError as error:
        # Pydantic's own text would show the value, which may hold a password.
        first = error.errors(include_input=False, include_url=False)[0]
        option = str(first["loc"][0])
        if first["type"] in ("dict_type", "string_type") and option in _FORMS:
            _refuse(option, _FORMS[option])
        _refuse(".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        _refuse(name, f"must be a number from 1 on, not {text!r}")
    return int(text)


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        _refuse(name, f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _snapshot(options: Mapping[str, str], name: str) -> QueryPosition | None:
    text = options.get(name)
    if text is None:
        return None
    if text == "beginning" and name == "fromSnapshot":
        return _BEGINNING
    try:
        return QueryPosition.parse(text)
    except ValueError:
        _refuse(
            name,
            "must be a snapshot as pg_current_snapshot() shows it, such as 7:9:8, and its witness after an @, not "
            f"{text!r}",
        )


def _is_before(one: Snapshot, other: Snapshot) -> bool:
    return one != other and other.covers(one)


def _starting(options: Mapping[str, str]) -> QueryPosition | None:
    text = options.get("startingPosition", "beginning")
    if text == "beginning":
        return _BEGINNING
    if text == "now":
        return None
    try:
        return QueryPosition.parse(text)
    except ValueError:
        _refuse(
            "startingPosition",
            f"must be beginning, now or a snapshot such as 7:9:8 and its witness after an @, not {text!r}",
        )


def _ranges(options: Mapping[str, str]) -> list[tuple[str, str, str]]:
    ranges = []
    for name, operator in (("fromTime", ">="), ("toTime", "<")):
        if name in options:
            ranges.append(("event_ts", operator, _time(options[name], name)))
    if len(ranges) == 2 and datetime.fromisoformat(ranges[0][2]) > datetime.fromisoformat(
        ranges[1][2]
    ):
        _refuse("toTime", f"{ranges[1][2]} is before fromTime, {ranges[0][2]}: exchange the two")
    for name, operator in (("fromOffset", ">="), ("toOffset", "<")):
        if name in options:
            text = options[name]
            if not _is_bigint(text):
                _refuse(name, f"must be a c_offset, not {text!r}")
            ranges.append(("c_offset", operator, text))
    offsets = [int(value) for field, _, value in ranges if field == "c_offset"]
    if len(offsets) == 2 and offsets[0] > offsets[1]:
        _refuse("toOffset", f"{offsets[1]} is before fromOffset, {offsets[0]}: exchange the two")
    return ranges


def _is_bigint(text: str) -> bool:
    # The length first: Python raises ValueError for thousands of digits.
    digits = text.removeprefix("-")
    if not (text.isascii() and digits.isdecimal() and len(digits) <= 19):
        return False
    return -(2**63) <= int(text) < 2**63


def _time(text: str, name: str) -> str:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        _refuse(name, f"must be a time such as 2026-11-01T00:00:00+00:00, not {text!r}")
    if moment.tzinfo is None:
        _refuse(name, f"needs an offset from UTC, such as {moment.isoformat()}+00:00")
    return moment.isoformat()


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigurationError(f"option {name}: {why}")
