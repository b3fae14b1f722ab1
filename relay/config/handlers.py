"""The settings of handlers: a model for each type, and the models that they inherit from.

Long because each key has the sentence that docs/reference/settings.md prints, and the models inherit from each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    PositiveInt,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from relay.config import sink_types
from relay.config.addresses import AddressTemplate, require_http, require_port, split_address
from relay.config.dsn import DatabaseAccess, Dsn
from relay.config.fields import EndpointTemplate, Template, has_name, is_name, suggestion
from relay.config.imports import require_path
from relay.config.secrets import CallSecret, Reference, Secret, known_text
from relay.config.types import (
    MOST_SECONDS,
    Alike,
    Duration,
    Number,
    Own,
    Seconds,
    SecondsOrZero,
    Section,
)
from relay.faults import ConfigurationError
from relay.model.events import EVENT_FIELDS

_CURVES = ("exponential", "linear", "constant")


def _is_wait(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MOST_SECONDS


def _backoff(value: Any) -> Any:
    if isinstance(value, list):
        if not value or not all(map(_is_wait, value)):
            raise ValueError("must be waits of more than 0 seconds, such as [5, 60, 300]")
        return list(map(float, value))
    try:
        return value if value in _CURVES else require_path(value)
    except (ValueError, TypeError):
        raise ValueError(
            "must be exponential, linear, constant, a list of seconds such as [5, 60, 300], or module:function"
        ) from None


class RetrySettings(Section):
    """What is retried, how often, and after how many seconds.

    The wait grows from `wait` up to `max_wait` as `backoff` says, with up to `jitter` seconds more. A sink makes the
    attempts of the first `defer_after` seconds without deferring the transaction. After `attempts` attempts or
    `max_elapsed` seconds, the transaction is dead-lettered.
    """

    on: Literal["outages", "any"] = "outages"
    """`outages`: a transaction is retried after an outage or `RetryLater`, and dead-lettered after any other fault;
    `any`: it is retried after every fault but `relay.Fail`; needs `attempts` or `max_elapsed`, or `attempts: null`:
    until it succeeds."""
    backoff: Annotated[str | list[float], BeforeValidator(_backoff)] = "exponential"
    """How the wait grows with each attempt: `exponential` (it doubles), `linear` (by `wait`) or `constant`; or a list
    of waits in seconds, of which the last one repeats; or `module:function`, called with the number of failed
    attempts, which returns seconds or a timedelta, at most a day."""

    attempts: Annotated[PositiveInt, Number] | None = None
    """The attempts after which the transaction is dead-lettered; null: no limit."""
    wait: Seconds = 1.0
    """The wait before the second attempt, in seconds."""
    max_wait: Seconds = 300.0
    """The longest wait, in seconds. With a function in `backoff`, `wait` and `max_wait` are for when it fails."""
    jitter: SecondsOrZero = 0.5
    """The most seconds that are added to each wait, at random."""
    max_elapsed: Seconds | None = None
    """The transaction is dead-lettered if its next attempt would begin more than this many seconds after the first
    failure; null: no limit."""
    defer_after: SecondsOrZero = 0.5
    """Sinks only: the seconds within which attempts are made without deferring the transaction."""

    @model_validator(mode="before")
    @classmethod
    def _on_is_a_text(cls, value: Any) -> Any:
        # YAML 1.1 reads the key `on` as a boolean.
        if isinstance(value, dict) and True in value and "on" not in value:
            return {"on" if key is True else key: each for key, each in value.items()}
        return value

    @model_validator(mode="after")
    def _ends(self) -> RetrySettings:
        limited = self.attempts is not None or self.max_elapsed is not None
        if self.on == "any" and not limited and "attempts" not in self.model_fields_set:
            raise ValueError(
                "on: any needs attempts or max_elapsed, since a fault of the event does not pass by itself; to retry "
                "until it succeeds, say attempts: null"
            )
        given = [key for key in ("wait", "max_wait") if key in self.model_fields_set]
        if isinstance(self.backoff, list) and given:
            raise ValueError(f"{given[0]} has no effect with a list of waits in backoff: remove it")
        return self


class CircuitBreakerSettings(Section):
    """Stops a sink at its position after `failures` failed attempts in a row, so that no delivery uses up its attempts.

    One delivery at a time then tests whether the destination is back, at first soon, later every `cool_down` seconds.
    """

    failures: Annotated[PositiveInt, Number] = 5
    """The failed attempts in a row after which the sink stops."""
    cool_down: Seconds = 30.0
    """The longest time between two trials of a stopped sink, in seconds."""


_PARTITIONED_FORMATS = ("parquet", "orc", "json", "csv", "avro", "delta")
"""Formats in which a DataFrame writer can replace single partitions; others would replace all files of a path."""

SPARK_COLUMNS = (*EVENT_FIELDS, "date", "host_bucket")
"""The columns of a Spark sink's frame, besides `headers`; `date` is the date of `event_ts` in UTC."""


class AnyHandler(Section):
    """The keys of every handler."""

    type: Alike[str]
    """The type of the handler."""
    reliable: Alike[bool] = True
    """`false`: a transaction that fails is logged and dropped, and blocks nothing."""
    order_by: Alike[Literal["host", "user", "aggregate", "none"]] = "host"
    """The key of order when a transaction is deferred: events of a host, a user or an aggregate stay in order, or
    none."""
    on_exhausted: Alike[Literal["dead_letter", "block_key"]] = "dead_letter"
    """`block_key`: a dead transaction holds its keys until it is replayed or discarded."""

    @property
    def blocks_key(self) -> bool:
        """Whether a dead transaction still holds its keys."""
        return self.on_exhausted == "block_key"

    @property
    def is_ordered(self) -> bool:
        """Whether the events of an ordering key stay in order."""
        return self.reliable and self.order_by != "none"

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates over an event's fields."""
        return {}

    @property
    def field_names(self) -> list[tuple[str, str]]:
        """The fields and paths of events that keys name, each with its key."""
        return [(key, name) for key, each in self.templates.items() for name in each.names]


class TransactionalHandler(AnyHandler):
    """A handler with code of the user that runs in the target's database transaction."""

    publishes: Alike[bool] = False
    """`true`: the handler publishes events into the outbox, and `relay.publish` knows which event is the cause."""


class SqlHandler(TransactionalHandler):
    """A statement, run for each event or once over a relation `batch`."""

    type: Alike[Literal["sql"]]
    each: Alike[Literal["event", "batch"]] = "event"
    """Run the statement for each event, or once for all events of a task."""
    statement: Alike[Annotated[str, Field(min_length=1)]]
    """The SQL statement: with the event's fields as `%(name)s`, or over the relation `batch`."""


class PythonHandler(TransactionalHandler):
    """A callable `module:function(transaction, cursor)`."""

    type: Alike[Literal["python"]]
    callable: Alike[Annotated[str, BeforeValidator(require_path)]]
    """`module:function`, called with (transaction, cursor)."""
    timeout: Own[Seconds | None] = 30.0
    """The most seconds for one transaction, which is then deferred as `retry` says; null: no limit. Other events of the
    batch wait meanwhile: what waits for others belongs into a `function` or a queue."""
    retry: Own[RetrySettings] = Field(default_factory=RetrySettings)
    """How a transaction is retried after RetryLater or, with `on: any`, after any fault."""


class QueueHandler(AnyHandler):
    """A work queue: the events become messages that workers take."""

    type: Alike[Literal["queue"]]
    queue: Alike[Annotated[str, Field(min_length=1, max_length=100)] | None] = None
    """The queue, which somebody has declared (`relay.declare_queue`); null: that of the handler's name."""


class JdbcSettings(Section):
    """A table of a PostgreSQL database."""

    dsn: Dsn
    """The connection string of the database."""
    password: Secret | None = None
    """The password of the role; null: the one in `dsn`, if any."""
    table: Annotated[str, Field(min_length=1)]
    """The table, with its schema unless that is in the search_path."""

    @property
    def access(self) -> DatabaseAccess:
        """How to connect to the database."""
        return DatabaseAccess("jdbc.dsn", self.dsn, self.password)


class SinkHandler(AnyHandler):
    """A handler with its own position in the log."""

    start: Own[Literal["now", "beginning"]] = "now"
    """Where a new sink of the group begins: with the events that are not applied yet, or with the oldest row of the
    outbox."""


class SparkHandler(SinkHandler):
    """A writer of batches: files below `path`, a `table`, a PostgreSQL table through `jdbc`, or a callable.

    The callable is `module:function(frame, batch)`.
    """

    type: Alike[Literal["spark"]]
    path: Alike[str | None] = None
    """Write files below this path."""
    table: Alike[str | None] = None
    """Write to a table of the session's catalog."""
    jdbc: Alike[JdbcSettings | None] = None
    """Write to a table of a PostgreSQL database."""
    callable: Alike[Annotated[str, BeforeValidator(require_path)] | None] = None
    """Call `module:function` with (frame, batch)."""
    sql: Alike[Annotated[str, Field(min_length=1)] | None] = None
    """A query over the view `events` and any table of the catalog, whose result is written."""
    transform: Alike[Annotated[str, BeforeValidator(require_path)] | None] = None
    """`module:function(frame)`, which returns the frame to write; after `sql` where both are set."""
    format: Alike[str] = "parquet"
    """With `path`: parquet, orc, json, csv, avro or delta. With `table`: a format of the session, or iceberg."""
    options: Alike[dict[str, Secret]] = Field(default_factory=dict)
    """Options of the writer."""
    partition_by: Alike[list[str]] = Field(default_factory=lambda: ["date", "host_bucket"])
    """The columns that files are partitioned by, before `relay_batch`; with `sql` or `transform` none by default."""
    host_buckets: Alike[Annotated[PositiveInt, Number]] = 8
    """The number of values of the column `host_bucket`."""
    max_events: Own[Annotated[PositiveInt, Number]] = 100_000
    """The most events of a batch, which its last transaction may exceed."""
    every: Own[Seconds] = 60.0
    """The seconds after which a batch begins that is not full."""
    mode: Alike[Literal["append", "upsert"]] = "append"
    """Delta and Iceberg: `append` writes each event as a row; `upsert` keeps the newest event of each `key`."""
    on_bad_row: Alike[Literal["dead_letter", "stop"]] = "dead_letter"
    """What becomes of events with which `sql` or `transform` fails: their commit is a dead letter of the sink, and the
    others are written, or the sink stops."""
    schema_: Alike[Literal["evolve", "fixed"]] = Field("fixed", alias="schema")
    """Delta, Iceberg and PostgreSQL: `evolve` adds columns that a batch has and the table lacks, widens types and sets
    comments; `fixed` stops the sink, and names the statement to run."""
    key: Alike[list[str]] = Field(default_factory=list)
    """With `mode: upsert`: the columns that identify a row."""
    deletes: Alike[Annotated[str, Field(min_length=1)] | None] = None
    """With `mode: upsert`: a condition on the batch's columns, in Spark's SQL, for events that delete their key."""
    upkeep: Own[Annotated[PositiveInt, Number] | None] = 100
    """Delta and Iceberg: the batches between two merges of small files, with removals of old ones; null: never."""

    @property
    def is_table(self) -> bool:
        """Whether relay commits to a Delta or Iceberg table by itself, without a format of the session."""
        kind = self.format.lower()
        return (kind == "delta" and self.path is not None) or (
            kind == "iceberg" and self.table is not None
        )

    @property
    def evolves(self) -> bool:
        """Whether the table gets the columns of a batch."""
        return self.schema_ == "evolve"

    @property
    def plain_options(self) -> dict[str, str]:
        """`options` with their secrets: for the writer and its library only."""
        return {name: text.get_secret_value() for name, text in self.options.items()}

    @property
    def target(self) -> str:
        """The text that identifies the destination, without secrets."""
        if self.jdbc is not None:
            # A new role or password does not make it another destination.
            fields = self.jdbc.access.parameters()
            named = [str(fields.get(key) or "") for key in ("host", "port", "dbname")]
            return f"jdbc {':'.join(named)} {self.jdbc.table}"
        kinds = {"path": self.path, "table": self.table, "callable": self.callable}
        named = [f"{kind} {value}" for kind, value in kinds.items() if value is not None]
        return f"{self.format.lower()} {named[0]}"

    @model_validator(mode="before")
    @classmethod
    def _no_default_partitions(cls, value: Any) -> Any:
        if isinstance(value, dict) and (
            value.get("sql") or value.get("transform") or value.get("mode") == "upsert"
        ):
            return {"partition_by": [], **value}
        return value

    @field_validator("partition_by")
    @classmethod
    def _columns(cls, value: list[str], info: ValidationInfo) -> list[str]:
        changes = info.data.get("sql") is not None or info.data.get("transform") is not None
        for name in value:
            if name not in SPARK_COLUMNS and not changes:
                raise ValueError(f"{name!r} is not one of the columns {', '.join(SPARK_COLUMNS)}")
        return value

    @model_validator(mode="after")
    def _one_destination(self) -> SparkHandler:
        targets = (self.path, self.table, self.jdbc, self.callable)
        if sum(target is not None for target in targets) != 1:
            raise ValueError("needs one of path, table, jdbc and callable")
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> SparkHandler:
        if self.path is not None or self.table is not None:
            return self
        destination = "callable" if self.jdbc is None else "jdbc"
        given = {"format": self.format, "options": self.options, "partition_by": self.partition_by}
        for key, value in given.items():
            if key in self.model_fields_set and value:
                raise ValueError(f"{key} has no effect with {destination}: remove it")
        return self

    @model_validator(mode="after")
    def _replaces_partitions(self) -> SparkHandler:
        if self.path is not None and self.format.lower() not in _PARTITIONED_FORMATS:
            if self.format.lower() == "iceberg":
                raise ValueError(
                    "format: iceberg needs table, such as lake.events, in place of path"
                )
            raise ValueError(
                f"format: must be one of {', '.join(_PARTITIONED_FORMATS)}; write {self.format} with a callable"
            )
        return self

    @model_validator(mode="after")
    def _has_namespace(self) -> SparkHandler:
        if self.format.lower() == "iceberg" and "." not in (self.table or "."):
            raise ValueError("table: needs a namespace with format: iceberg, such as lake.events")
        return self

    @model_validator(mode="after")
    def _has_key(self) -> SparkHandler:
        if self.mode == "append":
            if self.key or self.deletes is not None:
                raise ValueError("key and deletes are for mode: upsert")
            return self
        if not self.is_table:
            raise ValueError(
                "mode: upsert is for Delta tables (path, format: delta) and Iceberg tables (table, format: iceberg)"
            )
        if not self.key:
            raise ValueError(
                "mode: upsert needs key, the columns of a row, such as [aggregate_type, aggregate_id]"
            )
        if self.sql is None and self.transform is None:
            for name in self.key:
                if name not in SPARK_COLUMNS:
                    raise ValueError(
                        f"key: {name!r} is not one of the columns {', '.join(SPARK_COLUMNS)}"
                    )
        return self

    @model_validator(mode="after")
    def _has_schema(self) -> SparkHandler:
        if self.evolves and not (self.is_table or self.jdbc is not None):
            why = "files have the columns of their batch, and readers join them with mergeSchema"
            raise ValueError(
                f"schema: evolve is for Delta tables, Iceberg tables and jdbc{f' ({why})' if self.path else ''}"
            )
        return self

    @model_validator(mode="after")
    def _has_upkeep(self) -> SparkHandler:
        if "upkeep" in self.model_fields_set and self.upkeep is not None and not self.is_table:
            raise ValueError(
                "upkeep: is for Delta tables (path, format: delta) and Iceberg tables (table, format: iceberg)"
            )
        return self


Recorded = Literal["none", "failures", "all"]
"""Which attempts to deliver are kept."""


class DeliveryHandler(SinkHandler):
    """A handler that delivers events to another system, and the limits of its deliveries."""

    retry: Own[RetrySettings] = Field(default_factory=RetrySettings)
    """How a transaction is retried after a transient fault."""
    timeout: Own[Seconds] = 10.0
    """HTTP: seconds for a whole request, to the last byte of the response. Brokers: seconds to connect, and to confirm
    a message."""
    rate_limit: Own[Annotated[float, Field(ge=1e-5), Number] | None] = None
    """The most attempts in a second; null: no limit."""
    concurrency: Own[Annotated[PositiveInt, Number]] = 16
    """The most transactions that are delivered at once."""
    circuit_breaker: Own[CircuitBreakerSettings | None] = Field(
        default_factory=CircuitBreakerSettings
    )
    """When an outage of the destination stops the sink; null: never."""
    attempts: Own[Recorded | None] = None
    """Which attempts are kept: `none`, `failures` or `all`; null: as `attempts.record` says."""


class BatchHandler(DeliveryHandler):
    """A handler that can deliver many transactions at once."""

    each: Alike[str]
    max_batch: Own[Annotated[PositiveInt, Field(le=10_000), Number]] = 100
    """With `each: batch`: the most transactions of a batch."""
    max_wait: Own[SecondsOrZero] = 1.0
    """With `each: batch`: the most seconds for which a transaction waits until the batch is full; less than
    `sinks.attach_seconds`."""
    one_of_key: Own[bool] = False
    """With `each: batch`: a batch has at most one transaction of an ordering key, for a destination that stores others
    although an earlier one of their key has failed."""

    @property
    def in_batches(self) -> bool:
        """Whether many transactions are delivered at once."""
        return self.each == "batch"

    @model_validator(mode="after")
    def _limits_are_of_batches(self) -> Self:
        keys = ("max_batch", "max_wait", "one_of_key")
        given = [key for key in keys if key in self.model_fields_set]
        if given and not self.in_batches:
            raise ValueError(
                f"{given[0]} has no effect without each: batch: set that, or remove it"
            )
        return self


class FunctionRetrySettings(RetrySettings):
    """What is retried of a function: whatever it raises, up to `attempts`; about an hour with the waits' defaults."""

    on: Literal["outages", "any"] = "any"
    """`any`: a transaction is retried after every exception but `relay.Fail`; `outages`: after an outage or
    `RetryLater` only, and dead-lettered after any other exception."""
    attempts: Annotated[PositiveInt, Number] | None = 20
    """The attempts after which the transaction is dead-lettered; null: no limit."""


class FunctionHandler(BatchHandler):
    """A function of yours, `module:function(delivery)`, that may call other services."""

    type: Alike[Literal["function"]]
    callable: Alike[Annotated[str, BeforeValidator(require_path)]]
    """`module:function`, called with a `relay.Delivery`, or with `each: batch` with `relay.Deliveries`: an `async def`,
    or a plain function, which runs in a thread."""
    each: Alike[Literal["transaction", "batch"]] = "transaction"
    """Call the function for each transaction, or for many at once; `concurrency` and `rate_limit` then count calls."""
    open: Alike[Annotated[str, BeforeValidator(require_path)] | None] = None
    """`module:function`, called without arguments, that returns a context manager (for an `async def` an asynchronous
    one): it is entered before the first call and left at the end, and its value is `delivery.resource`."""
    retry: Own[FunctionRetrySettings] = Field(default_factory=FunctionRetrySettings)
    """How a transaction is retried."""
    timeout: Own[Seconds] = 30.0
    """Seconds for a call; after that it is cancelled, and the attempt has failed."""


class TlsSettings(Section):
    """How an endpoint's certificate is verified, and the certificate that relay presents."""

    verify: bool = True
    """Verify the certificate of the server."""
    ca_file: Path | None = None
    """The certificates that are trusted, in PEM; null: those of the system."""
    cert_file: Path | None = None
    """The certificate that relay presents, in PEM."""
    key_file: Path | None = None
    """Its private key, in PEM."""


# RFC 9110, "Field Names" and "Field Values", restricted to ASCII.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OWN_HEADERS = frozenset(
    {
        *("content-length", "transfer-encoding", "content-encoding"),
        *("idempotency-key", "ce-id", "webhook-id"),
    }
)
"""Headers of a single request: a fixed one would cut its body, or give all events one identity."""
_HEADER_VALUE = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")


def is_header_value(text: str) -> bool:
    """Whether a text may be the value of a header."""
    return _HEADER_VALUE.fullmatch(text) is not None


def _network(value: str) -> str:
    try:
        return str(ip_network(value))
    except ValueError:
        raise ValueError("must be a network such as 10.8.0.0/16 or an address") from None


def _as_list(value: Any) -> Any:
    """A list of one value, or of none for null."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


PayloadForm = Literal["json", "text"]
StatusAction = Literal["retry", "dead", "stop"]
_STATUS = re.compile(r"[345](\d\d|xx)")
_STATUS_ACTIONS: dict[str, StatusAction] = {
    # These speak of the request's content. Others may be those of a proxy, a deployment or a token that has expired.
    **dict.fromkeys(("400", "413", "422", "431"), "dead"),
    # Standard Webhooks: the receiver wants no more events.
    "410": "stop",
}
"""What an endpoint's status means unless `statuses` says otherwise; a status that is in neither is retried."""


_LOOKUP_FIELD = re.compile(r"%(?:%|\(([^)]*)\)s|(.?))", re.DOTALL)


def lookup_names(statement: str) -> list[str]:
    """The fields and paths that a lookup binds, each once. Raises ValueError for what is no placeholder."""
    names: dict[str, None] = {}
    for match in _LOOKUP_FIELD.finditer(statement):
        name, other = match.groups()
        if other is not None:
            raise ValueError(
                f"{match.group()!r} is not a placeholder: write %(host_id)s for a field, and %% for a percent sign"
            )
        if name is None:
            continue
        if not is_name(name):
            raise ValueError(
                f"{match.group()} is neither a field of an event nor a path such as %(payload.customer.id)s"
                f"{suggestion(name)}"
            )
        names[name] = None
    return list(names)


def _lookup(value: str) -> str:
    lookup_names(value)
    return value


class EndpointsSettings(Section):
    """Endpoints that data choose: each has a circuit breaker and a rate of its own.

    One that fails is left alone while others go on, and is disabled at last: what is for it becomes dead letters.
    """

    select: Alike[Annotated[str, Field(min_length=1), AfterValidator(_lookup)] | None] = None
    """A query in the target, with fields and paths of the event as `%(host_id)s` or `%(payload.tenant)s`. It returns
    the row of the endpoint, whose columns templates name as `{endpoint.url}`; without a row, the event is dropped."""
    id: Alike[Annotated[str, Field(min_length=1)] | None] = None
    """The column with what identifies an endpoint, whatever its URL, among all of the sink: `select` may then return a
    row for each of several endpoints, to each of which the event goes by itself; null: one row, known by its URL."""
    types: Alike[Annotated[str, Field(min_length=1)] | None] = None
    """A column with the event types that an endpoint takes, an array or a text of patterns such as `order.*`; where it
    is null, or without this key, the endpoint takes all."""
    cache: Own[SecondsOrZero] = 30.0
    """For how many seconds a row, or that there is none, is used for other events with the same values; 0: once."""
    timeout: Own[Seconds] = 5.0
    """The seconds that the query may take."""
    concurrency: Own[Annotated[PositiveInt, Number]] = 4
    """The most requests that an endpoint gets at once."""
    disable_after: Own[Duration | None] = timedelta(days=5)
    """An endpoint of which every attempt fails for so long is disabled, such as `5d`; null: never. One that answers
    410, or another status that `statuses` says is `stop`, is disabled at once."""


def template_of(secret: SecretStr) -> EndpointTemplate | None:
    """The template that a value of the configuration is; None for one without names, or that is elsewhere.

    Raises ValueError for names that are none.
    """
    if isinstance(secret, Reference) or not has_name(secret.get_secret_value()):
        return None
    return EndpointTemplate(secret.get_secret_value())


class HttpHandler(BatchHandler):
    """An endpoint to which relay posts CloudEvents."""

    type: Alike[Literal["http"]]
    url: Alike[str]
    """The endpoint, an address of http or https; or a template over the event's fields and the row of
    `endpoints.select`: `https://hooks.example/{payload.tenant}`, `{endpoint.url}`."""
    each: Alike[Literal["event", "transaction", "batch"]] = "event"
    """Post each event, all events of a transaction in one request, or those of many transactions, as one array of
    CloudEvents; `concurrency` and `rate_limit` then count requests."""
    payload: Alike[PayloadForm] = "json"
    """`json`: an event is a dead letter if its payload is not JSON, which a column of text permits; `text`: the payload
    is sent as a text."""
    mode: Alike[Literal["structured", "binary", "batch"] | None] = None
    """The content mode of the CloudEvents; null: structured, or batch for a transaction."""
    source: Alike[str] = "relay"
    """The attribute `source` of the CloudEvents."""
    headers: Alike[dict[str, Secret]] = Field(default_factory=dict)
    """Headers of each request; none that describes its body or is an event's identity, such as `content-length`. A
    value may be a template like `url`."""
    signing_secret: Alike[Annotated[list[Secret], BeforeValidator(_as_list)]] = Field(
        default_factory=list
    )
    """The secret that signs requests, as Standard Webhooks describes, or a list of secrets, each of which signs: while
    receivers change from one to the next. Without any, requests are not signed. One may be a template like `url`."""
    tls: Own[TlsSettings] = Field(default_factory=TlsSettings)
    """How certificates are verified."""
    compress_above: Own[Annotated[PositiveInt, Number] | None] = None
    """The bytes above which a body is compressed with gzip; null: no compression."""
    statuses: Own[dict[str, StatusAction]] = Field(default_factory=dict)
    """What is done after a status such as `404`, or one of a class such as `4xx`: `retry`, `dead` (the transaction is
    dead-lettered) or `stop` (the sink stops at its position). Without an entry 400, 413, 422 and 431 are `dead`, 410 is
    `stop`, and all others but 2xx are `retry`."""
    private_addresses: Own[
        Literal["allow", "refuse"]
        | Annotated[list[Annotated[str, AfterValidator(_network)]], Field(min_length=1)]
        | None
    ] = None
    """`refuse`: relay connects to no address that is private, loopback, link-local, a cloud's metadata or otherwise not
    of the Internet, whatever name or spelling leads there; or a list of networks, such as `[10.8.0.0/16]`, that are
    allowed beside public addresses; null: `refuse` where data choose the host of `url`, else `allow`."""
    endpoints: Alike[EndpointsSettings | None] = None
    """Where data choose the endpoint: how its address is looked up, and what becomes of one that fails."""

    def action_for(self, status: int) -> StatusAction:
        """What is done after a status that is not 2xx: what `statuses` says of it, or of its class."""
        exact, whole_class = str(status), f"{status // 100}xx"
        return (
            self.statuses.get(exact)
            or self.statuses.get(whole_class)
            or _STATUS_ACTIONS.get(exact, "retry")
        )

    @field_validator("statuses", mode="before")
    @classmethod
    def _statuses_are_texts(cls, value: Any) -> Any:
        # YAML reads 404 as a number.
        return (
            {str(key).lower(): action for key, action in value.items()}
            if isinstance(value, dict)
            else value
        )

    @field_validator("statuses")
    @classmethod
    def _are_statuses(cls, value: dict[str, StatusAction]) -> dict[str, StatusAction]:
        for status in value:
            if not _STATUS.fullmatch(status):
                raise ValueError(
                    f"{status} is neither a status from 300 to 599 nor a class such as 4xx"
                )
        return value

    @field_validator("url")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if has_name(value):
            AddressTemplate(value)
        else:
            require_http(value)
        return value

    @field_validator("headers")
    @classmethod
    def _valid_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a header: use letters, digits and -")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"{name} is set by relay for each request: remove it")
            known = known_text(text)
            if known is not None and template_of(text) is None and not is_header_value(known):
                raise ValueError(
                    f"{name} has a value that a header cannot have: use printable ASCII on one line"
                )
        return value

    @field_validator("signing_secret")
    @classmethod
    def _not_empty(cls, value: list[SecretStr]) -> list[SecretStr]:
        known = [text for text in map(known_text, value) if text is not None]
        if not all(text.strip().removeprefix("whsec_") for text in known):
            raise ValueError("is empty, so anyone could sign: set a secret, or remove the key")
        for text in value:
            template_of(text)
        return value

    @property
    def has_endpoints(self) -> bool:
        """Whether data choose the endpoint, so that the faults of one are not the sink's."""
        return has_name(self.url)

    @property
    def has_ids(self) -> bool:
        """Whether an event may go to several endpoints, which are known by ids."""
        return self.endpoints_or_default.id is not None

    @property
    def has_templates(self) -> bool:
        """Whether data choose the endpoint, or what is sent to it beside the event."""
        return self.endpoints is not None or bool(self.templates)

    @property
    def endpoints_or_default(self) -> EndpointsSettings:
        """`endpoints`, or its defaults."""
        return self.endpoints or EndpointsSettings()

    @property
    def guard(self) -> Literal["allow", "refuse"] | list[str]:
        """`private_addresses`, or its default."""
        if self.private_addresses is not None:
            return self.private_addresses
        return (
            "refuse" if has_name(self.url) and AddressTemplate(self.url).chooses_host else "allow"
        )

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates."""
        found: dict[str, Template] = dict(self.header_templates)
        found |= {f"signing_secret.{i}": each for i, each in enumerate(self.secret_templates)}
        if has_name(self.url):
            found["url"] = AddressTemplate(self.url)
        return found

    @property
    def field_names(self) -> list[tuple[str, str]]:
        """The fields and paths of events that keys name, each with its key."""
        select = self.endpoints.select if self.endpoints is not None else None
        looked_up = lookup_names(select) if select is not None else []
        return [*super().field_names, *(("endpoints.select", name) for name in looked_up)]

    @property
    def header_templates(self) -> dict[str, EndpointTemplate]:
        """The headers that are templates, as `headers.NAME`."""
        templates = {f"headers.{name}": template_of(text) for name, text in self.headers.items()}
        return {key: each for key, each in templates.items() if each is not None}

    @property
    def secret_templates(self) -> list[EndpointTemplate]:
        """The signing secrets that are templates."""
        return [each for each in map(template_of, self.signing_secret) if each is not None]

    @property
    def columns(self) -> dict[str, str]:
        """The columns of an endpoint's row that templates name, each with the key of one of these."""
        of_templates = {
            column: key
            for key, template in self.templates.items()
            if isinstance(template, EndpointTemplate)
            for column in template.columns
        }
        own = self.endpoints_or_default
        named = {own.id: "endpoints.id", own.types: "endpoints.types"}
        return of_templates | {column: key for column, key in named.items() if column}

    @model_validator(mode="after")
    def _has_lookup(self) -> HttpHandler:
        if self.columns and (self.endpoints is None or self.endpoints.select is None):
            column, key = next(iter(self.columns.items()))
            raise ValueError(f"{key}: the column {column} needs endpoints.select, which returns it")
        if self.endpoints is not None and not self.templates:
            raise ValueError(
                "endpoints: needs a template in url, headers or signing_secret, such as {endpoint.url}"
            )
        if self.has_ids and not self.has_endpoints:
            raise ValueError("endpoints.id: needs a template in url, such as {endpoint.url}")
        return self

    @model_validator(mode="after")
    def _transactions_are_batches(self) -> HttpHandler:
        if self.each != "event" and self.mode not in (None, "batch"):
            raise ValueError(
                f"each: {self.each} needs mode: batch, and mode is {self.mode}: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _batches_have_one_endpoint(self) -> HttpHandler:
        if self.in_batches and self.has_endpoints:
            raise ValueError(
                "each: batch posts transactions together, and data choose the endpoint of each event: use each: "
                "transaction"
            )
        return self


def _template(value: str) -> str:
    Template(value)
    return value


Named = Annotated[str, Field(min_length=1), AfterValidator(_template)]
"""A template over an event's fields; see `relay.config.fields`."""


def check_address(address: str, schemes: Sequence[str]) -> None:
    """Raise ValueError, whose text quotes nothing, for an address that no broker of these schemes has."""
    parts = split_address(address)
    if parts.scheme not in schemes or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError(f"must be an address such as {schemes[0]}://broker.example")
    require_port(parts)


def _address(*schemes: str) -> AfterValidator:
    def check(value: SecretStr) -> SecretStr:
        known = known_text(value)
        if known is not None:
            check_address(known, schemes)
        return value

    return AfterValidator(check)


class BrokerHandler(DeliveryHandler):
    """The settings of every broker: how an event becomes a message, and its destination."""

    RESERVED: ClassVar[tuple[str, ...]] = ()
    """The beginnings of topics that control the broker; an event whose data lead there is refused."""

    concurrency: Own[Annotated[PositiveInt, Number]] = 64
    """The most transactions that are delivered at once."""
    topic: Alike[Named]
    """A template over the event's fields, such as `shop.{event_type}`: the topic, stream, subject or routing key."""
    payload: Alike[PayloadForm] = "json"
    """`json`: an event is a dead letter if its payload is not JSON, which a column of text permits; `text`: the payload
    is sent as a text."""
    mode: Alike[Literal["structured", "binary"]] = "structured"
    """`structured`: the message is the CloudEvent; `binary`: the payload, with the attributes in headers."""
    source: Alike[str] = "relay"
    """The attribute `source` of the CloudEvents."""

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates over an event's fields."""
        return {"topic": Template(self.topic)}


class RedisHandler(BrokerHandler):
    """Redis streams; `topic` is the stream's key."""

    type: Alike[Literal["redis"]]
    url: Alike[Annotated[Secret, _address("redis", "rediss", "unix")]]
    """The server, an address of redis, rediss or unix."""
    max_length: Own[Annotated[PositiveInt, Number] | None] = None
    """The approximate number of messages that a stream keeps; null: all."""


class NatsServers(Section):
    """The servers of NATS."""

    servers: Alike[
        Annotated[
            list[Annotated[Secret, _address("nats", "tls", "ws", "wss")]], Field(min_length=1)
        ]
    ]
    """The servers: addresses of nats, tls, ws or wss."""
    tls: Own[TlsSettings] = Field(default_factory=TlsSettings)
    """How certificates are verified; if the section is set, `nats://` is encrypted too."""
    tls_first: Own[bool] = False
    """Begin TLS before the server sends anything, for a server with `handshake_first`."""

    @model_validator(mode="after")
    def _servers_are_encrypted(self) -> Self:
        if not self.tls_first and "tls" not in self.model_fields_set:
            return self
        known = [text for text in map(known_text, self.servers) if text is not None]
        if any(urlsplit(server).scheme == "ws" for server in known):
            raise ValueError("servers: ws:// is not encrypted, but tls is set: write wss://")
        return self


class NatsHandler(NatsServers, BrokerHandler):
    """NATS JetStream; `topic` is the subject."""

    RESERVED = ("$", "_INBOX.")

    type: Alike[Literal["nats"]]


class RabbitmqServer(Section):
    """The server of RabbitMQ."""

    url: Alike[Annotated[Secret, _address("amqp", "amqps")]]
    """The server, an address of amqp or amqps."""


class RabbitmqHandler(RabbitmqServer, BrokerHandler):
    """RabbitMQ; `topic` is the routing key, or the queue with the exchange ""."""

    RESERVED = ("amq.",)

    type: Alike[Literal["rabbitmq"]]
    exchange: Alike[str] = ""
    """The exchange; with "" the topic names a queue."""


def _servers(value: str) -> str:
    for server in value.split(","):
        # librdkafka accepts a server with or without a protocol.
        parts = split_address(server if "://" in server else f"//{server}")
        if not parts.hostname:
            raise ValueError("must be a server such as kafka.example:9092")
        require_port(parts)
    return value


class KafkaServers(Section):
    """The cluster of Kafka."""

    SET_BY_RELAY: ClassVar[dict[str, str]] = dict.fromkeys(
        ("bootstrap.servers", "metadata.broker.list"), "set the key bootstrap"
    )
    """Settings of librdkafka that relay sets by its own keys, or always the same, and what to do instead."""

    bootstrap: Own[Annotated[list[Annotated[str, AfterValidator(_servers)]], Field(min_length=1)]]
    """The bootstrap servers, as host:port."""
    conf: Alike[dict[str, Secret]] = Field(default_factory=dict)
    """More settings of librdkafka."""

    @field_validator("conf")
    @classmethod
    def _leaves_relay_its_own(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, key in cls.SET_BY_RELAY.items():
            if name in value:
                raise ValueError(f"{name} is set by relay: {key}")
        if "oauth_cb" in value and not isinstance(value["oauth_cb"], CallSecret):
            raise ValueError("oauth_cb needs a function: write oauth_cb: {call: module:function}")
        return value


class KafkaHandler(KafkaServers, BrokerHandler):
    """Kafka; `conf` has further settings of librdkafka."""

    # Of the broker, and of the programs of its platform, which read them at their start.
    RESERVED = ("__", "_schemas", "_confluent")
    SET_BY_RELAY: ClassVar[dict[str, str]] = {
        **KafkaServers.SET_BY_RELAY,
        **dict.fromkeys(
            ("delivery.timeout.ms", "message.timeout.ms"), "set the key timeout, in seconds"
        ),
        "enable.idempotence": "its producers are idempotent, which keeps the order: remove it",
    }

    type: Alike[Literal["kafka"]]
    key: Alike[Named] = "{host_id}"
    """A template over the event's fields: the message's key, which determines the partition."""

    @field_validator("conf")
    @classmethod
    def _confirms(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name in ("transactional.id", "delivery.report.only.error"):
            if name in value:
                raise ValueError(f"with {name} no message would be confirmed: remove it")
        return value

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates over an event's fields."""
        return {**super().templates, "key": Template(self.key)}


_OWN_KINDS: tuple[type[AnyHandler], ...] = (
    SqlHandler,
    PythonHandler,
    QueueHandler,
    SparkHandler,
    FunctionHandler,
    HttpHandler,
    RedisHandler,
    NatsHandler,
    RabbitmqHandler,
    KafkaHandler,
)
KINDS: dict[str, type[AnyHandler]] = {
    get_args(settings.model_fields["type"].annotation)[0]: settings for settings in _OWN_KINDS
}
"""The settings of each type of handlers. A sink of a type is built by `sink` of the module of its name in
`relay.sinks`; further types come with packages, see `relay.config.sink_types`."""
TRANSACTIONAL = tuple(kind for kind, each in KINDS.items() if not issubclass(each, SinkHandler))
"""The types of handlers that act in the target's transaction; the others are sinks."""

HANDLER_TYPE = "handler_type"
"""The type of pydantic's errors about the type of a handler."""


def settings_of(kind: Any) -> type[AnyHandler]:
    """The settings of a type of handlers. Raises ConfigurationError if there is none, or it cannot be used."""
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    brought = sink_types.names()
    if kind not in brought:
        raise ConfigurationError(f"must be one of {', '.join(dict.fromkeys([*KINDS, *brought]))}")
    module = sink_types.module_of(kind)
    settings = getattr(module, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, DeliveryHandler)):
        raise ConfigurationError(
            f"{module.__name__}.Settings is no child of relay.sinks.SinkSettings"
        )
    sink_types.require_keys(settings, DeliveryHandler)
    return settings


def _by_type(value: Any) -> Any:
    """The settings of a handler, by its `type`."""
    if isinstance(value, AnyHandler):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("model_type", "must be a mapping of keys")
    try:
        settings = settings_of(value.get("type"))
    except ConfigurationError as error:
        raise PydanticCustomError(HANDLER_TYPE, "{problem}", {"problem": str(error)}) from None
    try:
        return settings.model_validate(value)
    except ValidationError:
        raise
    except Exception as error:
        # Of a validator, which may name a secret.
        problem = f"{settings.__module__}.{settings.__name__} raised {type(error).__name__}"
        raise PydanticCustomError(HANDLER_TYPE, "{problem}", {"problem": problem}) from error


HandlerSettings = Annotated[
    SerializeAsAny[AnyHandler],
    PlainValidator(_by_type, json_schema_input_type=dict[str, Any]),
]
"""The settings of a handler of any type."""
