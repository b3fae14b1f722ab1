"""Structured logs: text for people, JSON lines for machines. No caller logs a payload or a password."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


REPEAT_SECONDS = 10.0
"""The interval at which a repeated line is logged again."""
FORGET_AFTER = 60
"""A line that has not come for so many of these intervals counts as new."""

_group: ContextVar[str | None] = ContextVar("group", default=None)


def of_group(name: str) -> None:
    """Add the group to every log line of this context and of the threads that relay starts in it."""
    _group.set(name)


class _GroupFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        name = _group.get()
        if name is not None and not hasattr(record, "group"):
            record.group = name
        return True


BATCH: ContextVar[int | None] = ContextVar("batch", default=None)
"""The number of the batch that the current thread works on."""


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {"batch": BATCH.get(), **_span(), **record.__dict__}
    return {
        key: value for key, value in fields.items() if key not in _STANDARD and value is not None
    }


def _span() -> dict[str, object]:
    """Return the ids of the current span, if there is one."""
    # Not imported: while no module has imported OpenTelemetry, there is no span.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_shown(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    text = str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text)


class RepeatedLines:
    """A log line that repeats: logged at once when it is new, then every `interval` seconds with the sum since.

    `counted` names the field of the sum. Lines whose other fields differ are counted apart. Safe in several threads.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int,
        text: str,
        counted: str,
        interval: float = REPEAT_SECONDS,
    ) -> None:
        self._log, self._level, self._text, self._counted = log, level, text, counted
        self._interval = interval
        self._logged: dict[tuple[object, ...], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def note(
        self, number: int, *, sample: Mapping[str, object] | None = None, **fields: object
    ) -> None:
        """Add `number` to the sum, and log the line if the interval has passed.

        `sample` are fields of one of those that are counted: they tell no lines apart, so that they may be many.
        """
        now, key = time.monotonic(), tuple(fields.items())
        with self._lock:
            at, before = self._logged.get(key, (-math.inf, 0))
            total = before + number
            if now - at < self._interval:
                self._logged[key] = (at, total)
                return
            # Old lines are forgotten, so that faults with ever new texts do not fill the memory.
            kept = self._logged.items()
            self._logged = {k: v for k, v in kept if now - v[0] < FORGET_AFTER * self._interval}
            self._logged[key] = (now, 0)
        self._log.log(
            self._level, self._text, extra={**fields, **(sample or {}), self._counted: total}
        )


def configure(log_format: LogFormat, level: str) -> None:
    """Send every log line to standard error in one format. Raises ValueError for an unknown level."""
    global _own, _level
    _own = handler = logging.StreamHandler(sys.stderr)
    _level = level.upper()
    handler.setFormatter(_Json() if log_format is LogFormat.JSON else _Text())
    handler.addFilter(_GroupFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    relay = logging.getLogger("relay")
    relay.setLevel(_level)
    relay.propagate = True
    relay.handlers[:] = []
    enable()
    quiet_libraries()


_own: logging.Handler | None = None
"""The handler of `configure`."""
_level = "INFO"


class _Lasting(logging.Logger):
    """A logger of relay's: its lines survive that users' code configures logging, when it is imported or called.

    `logging.config` disables all loggers that exist, unless it is told not to.
    """

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass

    def handle(self, record: logging.LogRecord) -> None:
        _keep()
        super().handle(record)


def enable() -> None:
    """Let relay's loggers log, now and from now on, whatever users' code has configured."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "relay" and isinstance(logger, logging.Logger):
            logger.disabled = False
            if type(logger) is logging.Logger:
                logger.__class__ = _Lasting


def _keep() -> None:
    """Give relay's lines their handler again, without the others' lines, where users' code has taken it from the root.

    Not where it has given the logger `relay` another one.
    """
    relay = logging.getLogger("relay")
    if _own is None or _own in logging.getLogger().handlers or relay.handlers:
        return
    relay.addHandler(_own)
    relay.setLevel(_level)
    relay.propagate = False
    relay.warning(
        "code of yours has configured logging: relay's lines keep their form, and all others are that code's"
    )


def is_json() -> bool:
    """Return whether `configure` has chosen JSON lines."""
    return _own is not None and isinstance(_own.formatter, _Json)


_LIBRARIES = (
    *("aiobotocore", "aiohttp", "botocore", "confluent_kafka", "google", "grpc", "nats", "pika"),
    *("psycopg", "py4j"),
)
_SPARK = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark's loggers of failed queries: they log the message, which quotes values, and the stack."""


def quiet_libraries() -> None:
    """Silence libraries that repeat relay's faults in their own logs, with host names or values."""
    for name in (*_LIBRARIES, *_SPARK):
        logging.getLogger(name).setLevel(logging.CRITICAL)
