"""The configuration of handlers: a model for each kind, and what all of them have.

Long because each key has the sentence that docs/reference/settings.md prints; the models refine each other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from relay.config.dsn import check_dsn
from relay.config.templates import Template
from relay.config.types import Number, Seconds, SecondsOrZero, Secret, Section
from relay.model.events import EVENT_FIELDS


class RetrySettings(Section):
    """How often, and after how many seconds, a transaction that met a transient fault is tried again.

    The wait doubles from `wait` up to `max_wait`, with up to `jitter` seconds more. Waits that fit into `defer_after`
    seconds are waited in place; beyond, the transaction is deferred. `attempts` and `max_elapsed` seconds end it.
    """

    attempts: Annotated[PositiveInt, Number] | None = None
    """The transaction is dead-lettered after so many attempts; null: after any number."""
    wait: Seconds = 1.0
    """The wait before the second attempt, in seconds; it doubles with each attempt."""
    max_wait: Seconds = 300.0
    """The longest wait, in seconds."""
    jitter: SecondsOrZero = 0.5
    """Up to so many seconds are added to each wait, at random."""
    max_elapsed: Seconds | None = None
    """The transaction is dead-lettered when the next attempt would come more than so many seconds after the first
    failure; null: never."""
    defer_after: SecondsOrZero = 0.5
    """Attempts within so many seconds are made at once, without deferring the transaction; of sinks only."""


class CircuitBreaker(Section):
    """After so many failures in a row the sink stops where it is in the log: nothing is copied, no attempt is spent.

    One delivery at a time tries whether its destination is back, first soon, later every `cool_down` seconds.
    """

    failures: Annotated[PositiveInt, Number] = 5
    """So many attempts in a row must fail before the sink stops."""
    cool_down: Seconds = 30.0
    """The longest time between two trials of a stopped sink, in seconds."""


_PARTITIONED_FORMATS = ("parquet", "orc", "json", "csv", "avro", "delta")
"""Of which a DataFrame writer can replace single partitions; others would replace everything below a path."""

SPARK_COLUMNS = (*EVENT_FIELDS, "date", "host_bucket")
"""The columns of a Spark sink's frame, besides `headers`: `date` is that of `event_ts` in UTC."""


class _HandlerSettings(Section):
    reliable: bool = True
    """`false`: what fails is logged and dropped, and blocks nothing."""
    order_by: Literal["host", "user", "aggregate", "none"] = "host"
    """What stays in order when a transaction is deferred: events of a host, a user, an aggregate, or nothing."""
    on_exhausted: Literal["dead_letter", "block_key"] = "dead_letter"
    """`block_key`: a dead transaction holds its keys until it is replayed or discarded."""

    @property
    def blocks_key(self) -> bool:
        """Whether a dead transaction goes on holding its keys."""
        return self.on_exhausted == "block_key"

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are names made of an event's fields."""
        return {}


class SqlHandler(_HandlerSettings):
    """A statement, run for each event or once over a relation `batch`."""

    type: Literal["sql"]
    each: Literal["event", "batch"] = "event"
    """Run the statement for each event, or once for all events of a task."""
    statement: Annotated[str, Field(min_length=1)]
    """The SQL statement: with the event's fields as `%(name)s`, or over the relation `batch`."""


def _callable(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:function, such as shop.audit:on_transaction")
    return value


class PythonHandler(_HandlerSettings):
    """A callable `module:function(transaction, cursor)`."""

    type: Literal["python"]
    callable: Annotated[str, BeforeValidator(_callable)]
    """`module:function`, called with (transaction, cursor)."""
    retry: RetrySettings = Field(default_factory=RetrySettings)
    """How a transaction that raised RetryLater is tried again."""


class JdbcSettings(Section):
    """A table of a PostgreSQL database, with its schema if that is not found without."""

    dsn: Secret
    """The connection string of the database."""
    table: Annotated[str, Field(min_length=1)]
    """The table, with its schema if it is not found without."""

    @field_validator("dsn")
    @classmethod
    def _connection_string(cls, value: SecretStr) -> SecretStr:
        check_dsn(value.get_secret_value())
        return value


class SinkHandler(_HandlerSettings):
    """A handler that has a position in the log of its own."""

    start: Literal["now", "beginning"] = "now"
    """Where a sink that the group has not had begins: with what is not applied yet, or with the oldest row of the
    outbox."""


class SparkHandler(SinkHandler):
    """A writer of batches: files below `path`, a `table`, a PostgreSQL table through `jdbc`, or a callable.

    The callable is `module:function(frame, batch)`.
    """

    type: Literal["spark"]
    path: str | None = None
    """Write files below this path."""
    table: str | None = None
    """Write to a table of the session's catalog."""
    jdbc: JdbcSettings | None = None
    """Write to a table of a PostgreSQL database."""
    callable: Annotated[str, BeforeValidator(_callable)] | None = None
    """Call `module:function` with (frame, batch)."""
    sql: Annotated[str, Field(min_length=1)] | None = None
    """A query over the view `events` and any table of the catalog, whose result is written."""
    transform: Annotated[str, BeforeValidator(_callable)] | None = None
    """`module:function(frame)`, which returns the frame to write; after `sql` where both are set."""
    format: str = "parquet"
    """With `path`: parquet, orc, json, csv, avro or delta. With `table`: one of the session's, or iceberg."""
    options: dict[str, Secret] = Field(default_factory=dict)
    """Options of the writer."""
    partition_by: list[str] = Field(default_factory=lambda: ["date", "host_bucket"])
    """The columns that files are partitioned by, before `relay_batch`; with `sql` or `transform` none by default."""
    host_buckets: Annotated[PositiveInt, Number] = 8
    """How many values the column `host_bucket` has."""
    max_events: Annotated[PositiveInt, Number] = 100_000
    """A batch has at most so many events, and up to a transaction more."""
    every: Seconds = 60.0
    """A batch is begun after so many seconds at the latest, while there are events."""

    @property
    def target(self) -> str:
        """What tells destinations apart, without secrets."""
        if self.jdbc is not None:
            # Of the connection string only what tells databases apart.
            fields = conninfo_to_dict(self.jdbc.dsn.get_secret_value())
            named = [str(fields.get(key) or "") for key in ("host", "port", "dbname")]
            return f"jdbc {':'.join(named)} {self.jdbc.table}"
        kinds = {"path": self.path, "table": self.table, "callable": self.callable}
        named = [f"{kind} {value}" for kind, value in kinds.items() if value is not None]
        return f"{self.format.lower()} {named[0]}"

    @model_validator(mode="before")
    @classmethod
    def _partitions_of_its_own(cls, value: Any) -> Any:
        if isinstance(value, dict) and (value.get("sql") or value.get("transform")):
            return {"partition_by": [], **value}
        return value

    @field_validator("partition_by")
    @classmethod
    def _columns(cls, value: list[str], info: ValidationInfo) -> list[str]:
        changes = info.data.get("sql") is not None or info.data.get("transform") is not None
        for name in value:
            if name not in SPARK_COLUMNS and not changes:
                raise ValueError(f"{name!r} is no column: one of {', '.join(SPARK_COLUMNS)}")
        return value

    @model_validator(mode="after")
    def _one_destination(self) -> SparkHandler:
        targets = (self.path, self.table, self.jdbc, self.callable)
        if sum(target is not None for target in targets) != 1:
            raise ValueError("needs one of path, table, jdbc and callable")
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


class DeliveryHandler(SinkHandler):
    """A handler that delivers events to another system, and the limits of its deliveries."""

    retry: RetrySettings = Field(default_factory=RetrySettings)
    """How a transaction that met a transient fault is tried again."""
    timeout: Seconds = 10.0
    """HTTP: seconds for a whole request, to the last byte of the response. Brokers: seconds to connect, and to confirm
    a message."""
    rate_limit: Annotated[PositiveFloat, Number] | None = None
    """The most attempts in a second; null: any number."""
    concurrency: Annotated[PositiveInt, Number] = 16
    """The most transactions that are delivered at once."""
    circuit_breaker: CircuitBreaker | None = Field(default_factory=CircuitBreaker)
    """When an outage of the destination stops the sink; null: never."""


class TlsSettings(Section):
    """How an endpoint's certificate is verified, and the one that relay shows."""

    verify: bool = True
    """Verify the certificate of the server."""
    ca_file: Path | None = None
    """The certificates that are trusted, in PEM; null: those of the system."""
    cert_file: Path | None = None
    """The certificate that relay shows, in PEM."""
    key_file: Path | None = None
    """Its private key, in PEM."""


# RFC 9110, "Field Names" and "Field Values", of ASCII.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")


def _split(address: str) -> SplitResult:
    """The parts of an address. Raises ValueError, which quotes nothing: an address may hold a password."""
    try:
        return urlsplit(address)
    except ValueError:
        raise ValueError("is no address that can be read") from None


def _require_port(parts: SplitResult) -> None:
    """Raise ValueError, which quotes nothing, if an address has a port that cannot be one."""
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("has a port that is not a number from 1 to 65535")


class HttpHandler(DeliveryHandler):
    """An endpoint that CloudEvents are posted to."""

    type: Literal["http"]
    url: str
    """The endpoint, an address of http or https."""
    each: Literal["event", "transaction"] = "event"
    """Post each event, or all events of a transaction in one request."""
    mode: Literal["structured", "binary", "batch"] | None = None
    """How CloudEvents are carried; null: structured, and a transaction as a batch."""
    source: str = "relay"
    """The attribute `source` of the CloudEvents."""
    headers: dict[str, Secret] = Field(default_factory=dict)
    """Headers of each request."""
    signing_secret: Secret | None = None
    """The secret that requests are signed with, as Standard Webhooks; null: they are not signed."""
    tls: TlsSettings = Field(default_factory=TlsSettings)
    """How certificates are verified."""
    compress_above: Annotated[PositiveInt, Number] | None = None
    """Bodies of more bytes are compressed with gzip; null: none is."""

    @field_validator("url")
    @classmethod
    def _absolute(cls, value: str) -> str:
        parts = _split(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an address such as https://shop.example/events")
        _require_port(parts)
        return value

    @field_validator("headers")
    @classmethod
    def _valid_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a header: letters, digits and -")
            if not _HEADER_VALUE.fullmatch(text.get_secret_value()):
                raise ValueError(
                    f"{name} has a value that no header can have: printable ASCII on one line"
                )
        return value

    @field_validator("signing_secret")
    @classmethod
    def _not_empty(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip().removeprefix("whsec_"):
            raise ValueError("is empty, so anybody could sign: set a secret, or leave the key out")
        return value

    @model_validator(mode="after")
    def _one_body(self) -> HttpHandler:
        if self.each == "transaction" and self.mode not in (None, "batch"):
            raise ValueError(f"each: transaction is posted as a batch, and mode says {self.mode}")
        return self


def _template(value: str) -> str:
    Template(value)
    return value


Named = Annotated[str, Field(min_length=1), AfterValidator(_template)]
"""A name made of an event's fields; see `relay.config.templates`."""


def _address(*schemes: str) -> AfterValidator:
    def check(value: SecretStr) -> SecretStr:
        parts = _split(value.get_secret_value())
        if parts.scheme not in schemes or not (parts.hostname or parts.scheme == "unix"):
            raise ValueError(f"must be an address such as {schemes[0]}://broker.example")
        _require_port(parts)
        return value

    return AfterValidator(check)


class BrokerHandler(DeliveryHandler):
    """What is said of every broker: how an event becomes a message, and where it goes."""

    concurrency: Annotated[PositiveInt, Number] = 64
    """The most transactions that are delivered at once."""
    topic: Named
    """A template over the event's fields, such as `shop.{event_type}`: the topic, stream, subject or routing key."""
    mode: Literal["structured", "binary"] = "structured"
    """`structured`: the message is the CloudEvent; `binary`: the payload, with the attributes in headers."""
    source: str = "relay"
    """The attribute `source` of the CloudEvents."""

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are names made of an event's fields."""
        return {"topic": Template(self.topic)}


class RedisHandler(BrokerHandler):
    """Redis streams; `topic` is the stream's key."""

    type: Literal["redis"]
    url: Annotated[Secret, _address("redis", "rediss", "unix")]
    """The server, an address of redis, rediss or unix."""
    max_length: Annotated[PositiveInt, Number] | None = None
    """How many messages a stream keeps, about; null: all."""


class NatsHandler(BrokerHandler):
    """NATS JetStream; `topic` is the subject."""

    type: Literal["nats"]
    servers: Annotated[
        list[Annotated[Secret, _address("nats", "tls", "ws", "wss")]], Field(min_length=1)
    ]
    """The servers: addresses of nats, tls, ws or wss."""
    tls: TlsSettings = Field(default_factory=TlsSettings)
    """How certificates are verified; where the section is set, `nats://` is encrypted too."""
    tls_first: bool = False
    """Begin TLS before the server sends anything, for a server that is set up for `handshake_first`."""

    @model_validator(mode="after")
    def _encrypted_where_asked(self) -> NatsHandler:
        if not self.tls_first and "tls" not in self.model_fields_set:
            return self
        if any(urlsplit(server.get_secret_value()).scheme == "ws" for server in self.servers):
            raise ValueError("servers: ws:// is not encrypted, which tls asks for; write wss://")
        return self


class RabbitmqHandler(BrokerHandler):
    """RabbitMQ; `topic` is the routing key, and with the exchange "" the queue."""

    type: Literal["rabbitmq"]
    url: Annotated[Secret, _address("amqp", "amqps")]
    """The server, an address of amqp or amqps."""
    exchange: str = ""
    """The exchange; with the empty text the topic names a queue."""


def _servers(value: str) -> str:
    for server in value.split(","):
        # With or without a protocol.
        parts = _split(server if "://" in server else f"//{server}")
        if not parts.hostname:
            raise ValueError("must be a server such as kafka.example:9092")
        _require_port(parts)
    return value


class KafkaHandler(BrokerHandler):
    """Kafka; `conf` has further settings of librdkafka."""

    type: Literal["kafka"]
    bootstrap: Annotated[list[Annotated[str, AfterValidator(_servers)]], Field(min_length=1)]
    """The bootstrap servers, as host:port."""
    key: Named = "{host_id}"
    """A template over the event's fields: the message's key, which decides the partition."""
    conf: dict[str, Secret] = Field(default_factory=dict)
    """More settings of librdkafka."""

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are names made of an event's fields."""
        return {**super().templates, "key": Template(self.key)}


HandlerSettings = Annotated[
    SqlHandler
    | PythonHandler
    | SparkHandler
    | HttpHandler
    | RedisHandler
    | NatsHandler
    | RabbitmqHandler
    | KafkaHandler,
    Field(discriminator="type"),
]


KINDS = ("sql", "python", "spark", "http", "redis", "nats", "rabbitmq", "kafka")
