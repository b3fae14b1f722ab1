"""The configuration as pydantic models; those of the sections `source` and `handlers` have modules of their own."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from relay.config.dsn import DatabaseAccess, Dsn
from relay.config.fields import JSON_FIELDS, is_header, is_name, suggestion
from relay.config.handlers import (
    BatchHandler,
    HandlerSettings,
    Recorded,
    SinkHandler,
    SparkHandler,
)
from relay.config.intake import IntakeSettings
from relay.config.secrets import Secret, known_text
from relay.config.source import SourceSettings
from relay.config.types import (
    Alike,
    Duration,
    Name,
    Number,
    Own,
    Seconds,
    SecondsOrZero,
    Section,
    duration,
)
from relay.model.cron import timing, zone_of

ENV_PREFIX = "RELAY_"
"""The beginning of the variables that are settings."""


Scalar = str | int | float | bool


def _patterns(value: Any) -> list[Scalar]:
    patterns = value if isinstance(value, list) else [value]
    if not patterns or not all(isinstance(item, Scalar) for item in patterns):
        raise ValueError("must be a value, a pattern such as order.*, or a list of them")
    return patterns


Patterns = Annotated[Any, BeforeValidator(_patterns)]
"""A list of values and globs; one of them must match."""


def _switch(value: Any) -> Any:
    """`on` or `off` for the boolean that YAML makes of it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class TargetSettings(Section):
    """Where effects, dead letters and offsets are written."""

    dsn: Dsn | None = None
    """The connection string of the database for effects, dead letters and offsets; null: that of the source. Where
    there is a Python handler, a session with temporary tables or prepared statements left in it is closed."""
    password: Secret | None = None
    """The password of the role in `dsn`; null: the one in `dsn`, if any."""
    synchronous_commit: Annotated[Literal["on", "off"], BeforeValidator(_switch)] = "on"
    """`off`: commits do not wait for the target's disk; relay still confirms a position only after the target's WAL is
    flushed."""

    @model_validator(mode="after")
    def _password_is_of_a_role(self) -> TargetSettings:
        if self.password is not None and self.dsn is None:
            raise ValueError("password: needs a dsn; that of the source is source.password")
        return self

    @property
    def durable(self) -> bool:
        """Whether a commit is on the target's disk when it returns."""
        return self.synchronous_commit == "on"


class PollSettings(Section):
    """How relay polls the outbox."""

    wait_period_ms: Annotated[PositiveInt, Number] = 1_000
    """The longest wait between polls, in milliseconds; it doubles from 10 while there are no events."""
    batch_size: Annotated[PositiveInt, Number] = 1_000
    """The approximate number of events in a poll at the head of the outbox."""
    listen: bool = False
    """Publishers send NOTIFY, which starts a poll at once; their commits are then serialised."""
    partition_ids: list[Annotated[NonNegativeInt, Number]] | None = None
    """With `mode: poll`, the partitions of this instance; null: any free ones."""


class BatchLimits(Section):
    """How much work is done at once."""

    max_events: Annotated[PositiveInt, Number] = 10_000
    """The most events of a batch."""
    max_bytes: Annotated[int, Field(ge=1024), Number] = 16 * 1024 * 1024
    """The most bytes of a batch; a larger commit is spooled to a file."""
    inline_max_events: Annotated[NonNegativeInt, Number] | None = None
    """The most events of a batch that runs in this process; a larger one runs on Spark, with 0 every one. null: 1000,
    and every batch in this process where Spark is not installed."""
    inline_workers: Annotated[PositiveInt, Number] = 2
    """Threads, each with a connection, for the tasks of an inline batch."""
    spool_directory: Path | None = None
    """The folder for commits that are too large for memory; null: the system's folder for temporary files."""


INLINE_MAX_EVENTS = 1_000
"""What `batch.inline_max_events` is by default where Spark is installed."""


def has_spark() -> bool:
    """Whether PySpark is installed; it is not imported."""
    return find_spec("pyspark") is not None


_SPARK_SECRET = "spark.authenticate.secret"  # noqa: S105 the name of a key


class SparkSettings(Section):
    """The Spark session for large batches and Spark sinks."""

    master: str = "local[*]"
    """The master of the Spark session."""
    remote: Secret | None = None
    """A Spark Connect server, `sc://host`, in place of `master`."""
    eager: bool = False
    """Start the session when relay starts, not with the first large batch."""
    conf: dict[str, Secret] = Field(default_factory=dict)
    """More Spark configuration, such as `spark.driver.memory`."""

    @field_validator("conf", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: _plain(item) for key, item in value.items()}
        return value

    @model_validator(mode="after")
    def _secret_of_a_cluster(self) -> SparkSettings:
        if self.remote is not None or not self.master.startswith("spark://"):
            return self
        if self.authenticates and _SPARK_SECRET not in self.conf:
            raise ValueError(
                f"conf: {_SPARK_SECRET} is missing: set the secret of the cluster's master and workers, or "
                "spark.authenticate: false on a network that you trust"
            )
        return self

    @property
    def authenticates(self) -> bool:
        """Whether the driver, the executors and a standalone cluster's daemons authenticate each other."""
        switch = self.conf.get("spark.authenticate")
        return switch is None or switch.get_secret_value() != "false"

    @property
    def plain_conf(self) -> dict[str, str]:
        """`conf` with its secrets: for Spark only."""
        return {key: value.get_secret_value() for key, value in self.conf.items()}


class SinksSettings(Section):
    """How long relay keeps the WAL for a sink, and how many bytes of its events, before the sink polls instead."""

    attach_seconds: Seconds = 5.0
    """The seconds for which relay keeps the WAL of a commit that a sink has not delivered; then the sink polls."""
    attach_bytes: Annotated[int, Field(ge=65536), Number] = 8 * 1024 * 1024
    """The most bytes of a sink's events that are buffered from the stream; beyond that the sink polls."""
    connections: Annotated[int, Field(ge=2, le=1000), Number] = 3
    """The most connections to the source, and to the target, that all sinks of an instance have together, beside the
    one with their claims; a Spark sink has two of its own."""


class AttemptSettings(Section):
    """Which attempts to deliver are kept, for how long, and in how much room: `relay.attempts` of the target."""

    record: Recorded = "failures"
    """Which attempts of sinks and queues are kept, unless a sink says otherwise: `failures` are those that fail, those
    that drop, and the delivery of what has failed or was deferred before; `all` are those that succeed at once, too."""
    keep: Annotated[Duration, Field(le=timedelta(days=7))] = timedelta(days=7)
    """How long they are kept, at most `7d`; they are removed within a day after that."""
    answers: bool = False
    """Keep the first 1,000 bytes of HTTP responses with them. A response may quote what was sent."""
    max_bytes: Annotated[int, Field(ge=1024 * 1024), Number] = 1024**3
    """The most octets of the table with its indexes: beyond that the oldest day of attempts is removed. Groups that
    share a target share the room: it is the sum of theirs."""


class DeadLetterLimits(Section):
    """When a handler that dead-letters one transaction after another is stopped."""

    brake: Annotated[NonNegativeInt, Number] | None = 100
    """The transactions in a row that a handler may dead-letter for one kind of fault before it is stopped; 0 or null:
    no limit. A sink's success takes a twentieth from the count and does not end it."""
    brake_of: dict[str, Annotated[NonNegativeInt, Number]] = Field(default_factory=dict)
    """The brake of single handlers, by name."""


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def require_event_fields(match: dict[str, Any]) -> dict[str, Any]:
    """Return what an event must match unchanged. Raises ValueError for a name that is no field of events."""
    for name in match:
        if not is_name(name):
            raise ValueError(
                f"{name!r} is neither a field of an event nor a path such as payload.customer.tier"
                f"{suggestion(name)}"
            )
    return match


class Route(Section):
    """Which events go to which handlers."""

    match: dict[str, Patterns] = Field(default_factory=dict)
    """Values, globs or lists of them, by field or path into payload and metadata; every key must match."""
    handlers: Annotated[list[str], Field(min_length=1)]
    """The names of the handlers that receive the event."""
    continue_: bool = Field(default=False, alias="continue")
    """Apply the following routes too."""

    @field_validator("match")
    @classmethod
    def _known_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        return require_event_fields(value)


class QueueSettings(Section):
    """A work queue that relay declares when it starts, as `relay.declare_queue` does."""

    match: dict[str, Patterns] | None = Field(default_factory=dict)
    """Which events of the log go into the queue, as in a route; null: none, only direct messages do."""
    where: str | None = None
    """A path of SQL/JSON which the events that match must satisfy, such as `$.payload.amount >= $least`; null: none."""
    params: dict[str, Any] | None = None
    """The variables of `where`."""
    key: str = "none"
    """What orders its messages: `none`, `host`, `user`, `aggregate`, or a path into payload or metadata."""
    attempts: Annotated[PositiveInt, Number] = 5
    """The failed attempts after which a message becomes a dead letter."""
    backoff: SecondsOrZero = 1.0
    """The seconds to wait after the first failed attempt; they double with each."""
    max_backoff: SecondsOrZero = 300.0
    """The longest wait, in seconds."""
    keep_done: Duration | None = None
    """How long done messages stay in `relay.queue_items`; null: not at all."""
    workers: str = "relay_worker"
    """The role whose members may take from the queue."""
    paused: bool = False
    """Whether nobody can take from the queue at first, until `relay.pause_queue(name, false)`."""
    start: str | None = None
    """Which events of the log go into the queue when it is made: those from the `beginning`, from a c_offset or from a
    time on; null: those that are published from then on."""

    @field_validator("match")
    @classmethod
    def _known_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if is_header(name):
                raise ValueError(f"{name!r}: queues match by fields and paths, not by headers")
        return value if value is None else require_event_fields(value)

    @field_validator("key")
    @classmethod
    def _orders(cls, value: str) -> str:
        is_path = is_name(value) and value.partition(".")[0] in JSON_FIELDS
        if value not in QUEUE_KEYS and (value in JSON_FIELDS or not is_path):
            raise ValueError(
                f"{value!r} is neither {', '.join(QUEUE_KEYS)} nor a path such as payload.customer.id"
            )
        return value

    @field_validator("start", mode="before")
    @classmethod
    def _is_a_start(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, date):
            value = value.isoformat()
        if not isinstance(value, str) or value == "beginning" or re.fullmatch(r"\d{1,18}", value):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(
                f"{value!r} is neither beginning, a c_offset, nor a time such as 2026-03-01T12:00"
            ) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()

    @model_validator(mode="after")
    def _can_be_declared(self) -> QueueSettings:
        if self.max_backoff < self.backoff:
            raise ValueError("max_backoff: is shorter than backoff")
        if self.where is not None and self.match is None:
            raise ValueError("where: without match, no events go into the queue")
        return self


class ScheduledEvent(Section):
    """The event that a schedule publishes."""

    event_type: Annotated[str, Field(min_length=1)]
    """Its type."""
    host_id: UUID
    """The tenant that it belongs to."""
    user_id: UUID | None = None
    """The user whom it concerns."""
    aggregate_type: str | None = None
    """What kind of thing it concerns."""
    aggregate_id: str | None = None
    """Which one."""
    aggregate_version: Annotated[int, Number] | None = None
    """The version of that."""
    payload: Any = Field(default_factory=dict)
    """Its content."""
    metadata: dict[str, Any] | None = None
    """Its metadata; `schedule` and `scheduled_at` are added."""


def _period(value: Any) -> timedelta:
    """Parse a duration that may be of seconds: `30s`."""
    if isinstance(value, str) and re.fullmatch(r"0+\s*[smhdw]", value.strip()):
        raise ValueError("must be at least a second: 30s")
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,5}\s*s", value.strip()):
        return timedelta(seconds=int(value.strip()[:-1]))
    try:
        return duration(value)
    except ValueError:
        raise ValueError(
            "must be a number of seconds, minutes, hours, days or weeks: 30s, 15m, 6h, 7d, 2w"
        ) from None


def _with_offset(value: datetime) -> datetime:
    """Require the offset of a time: without one, it would depend on the host."""
    if value.utcoffset() is None:
        raise ValueError("needs its offset from UTC: 2027-01-01T00:00:00+01:00")
    return value


class ScheduleSettings(Section):
    """An event that is published at given times; one of `cron`, `every` and `at` says when."""

    cron: str | None = None
    """Minute, hour, day of month, month and day of week, such as `0 3 * * *`, or `@daily`."""
    every: Annotated[timedelta, BeforeValidator(_period)] | None = None
    """An interval such as `30s` or `15m`, counted from the beginning of 1970 in UTC."""
    at: Annotated[datetime, AfterValidator(_with_offset)] | None = None
    """A single time, with its offset: `2027-01-01T00:00:00+01:00`."""
    timezone: str = "UTC"
    """The time zone of `cron`, such as Europe/Paris."""
    missed: Literal["latest", "all", "skip"] = "latest"
    """Which of several times that have passed are published: the latest, all of them, or none."""
    jitter: Annotated[float, Field(ge=0, le=86_400), Number] = 0.0
    """Each event is published up to so many seconds later."""
    publish: ScheduledEvent
    """The event."""

    @model_validator(mode="after")
    def _is_understood(self) -> ScheduleSettings:
        if sum(each is not None for each in (self.cron, self.every, self.at)) != 1:
            raise ValueError("give one of cron, every and at")
        if self.cron is None and self.timezone != "UTC":
            raise ValueError("timezone: only cron has one: remove it")
        try:
            zone_of(self.timezone)
        except ValueError as error:
            raise ValueError(f"timezone: {error}") from None
        try:
            timing(self.cron, self.every, self.at, self.timezone)
        except ValueError as error:
            raise ValueError(error if self.cron is None else f"cron: {error}") from None
        return self

    @property
    def declared(self) -> dict[str, Any]:
        """The arguments of `relay.declare_schedule`."""
        values = self.model_dump(exclude={"publish"})
        return {**values, "publish": self.publish.model_dump(mode="json", exclude_none=True)}


LONGEST_NAME = 100
"""Of a queue or a schedule, in characters."""
QUEUE_KEYS = ("none", "host", "user", "aggregate")
"""What can order the messages of a queue, beside a path."""
VERSION_FROM = "metadata.version"
"""The default path of an event's version."""


def check_version_from(path: str) -> str:
    """Return the path unchanged. Raises ValueError if it does not lead into payload or metadata."""
    if not is_name(path) or path in JSON_FIELDS or path.partition(".")[0] not in JSON_FIELDS:
        raise ValueError(f"{path!r} is not a path into payload or metadata, such as {VERSION_FROM}")
    return path


def _object_path(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("must be module:name, such as shop.events:OrderPlaced")
    return value


ObjectPath = Annotated[str, BeforeValidator(_object_path)]
Version = Annotated[PositiveInt, Number]


class EventTypeSettings(Section):
    """An event type: its current version, the model of that version, and the upcasters from older versions."""

    version: Version | None = None
    """The current version; null: the one after the last upcaster's, else 1."""
    model: ObjectPath | None = None
    """`module:name` of a pydantic model of the current version's payload."""
    upcast: dict[Version, ObjectPath] = Field(default_factory=dict)
    """`module:function` for each older version: it takes the version's payload and returns the next version's."""
    version_from: Annotated[str, AfterValidator(check_version_from)] = VERSION_FROM
    """The path to an event's version in payload or metadata; an event without a value there has version 1."""


TYPES, REGISTRY = "types", "registry"
"""The names of the two forms in the location of a pydantic error."""


def _form(value: Any) -> str:
    return REGISTRY if isinstance(value, str) else TYPES


EventsSettings = Annotated[
    Annotated[dict[str, EventTypeSettings], Tag(TYPES)] | Annotated[ObjectPath, Tag(REGISTRY)],
    Discriminator(_form),
]


_DAY = timedelta(days=1)


class RetentionSettings(Section):
    """How long events stay in the outbox once every reader is past them, and rows in relay's own tables.

    Without `keep`, relay removes nothing from the outbox. It removes no event that the Spark sink `archive` has not
    written. A reader with unread events older than `max_lag` no longer holds events back; null: every reader does.
    """

    keep: Duration | None = None
    """How long events stay in the outbox once every reader is past them; null: for ever."""
    ahead: Duration = timedelta(days=14)
    """How far ahead partitions are created."""
    archive: str | None = None
    """The sink of `type: spark`, with `start: beginning`, that must have written events before they are removed."""
    max_lag: Duration | None = None
    """The age of an unread event from which on its reader no longer holds events back; null: no limit."""
    keep_letters: Annotated[Duration, Field(ge=_DAY)] = timedelta(days=90)
    """How long replayed and discarded dead letters, and actions, are kept, at least `1d`."""


_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_MOST_PORT = 65_535
LEAST_TOKEN = 16
"""The least characters of a token: a shorter one can be guessed."""


def _origin(value: str) -> str:
    """Require a scheme, a host and at most a port, as browsers send an origin."""
    if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]{1,255}", value):
        raise ValueError("must be an origin without a path, such as https://app.example")
    return value


class Address(NamedTuple):
    """The address at which a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """The address as it is written in the configuration."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(value: Any) -> Address:
    """Parse an address such as `127.0.0.1:9464` or `[::1]:9464`; port 0 takes a free port. Raises ValueError."""
    if isinstance(value, Address):
        return value
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match["port"]) > _MOST_PORT:
        raise ValueError("must be an address and a port, such as 127.0.0.1:9464 or [::1]:9464")
    return Address(match["v6"] or match["host"], int(match["port"]))


Listen = Annotated[Address, BeforeValidator(address)]


class ConsoleSettings(Section):
    """The console and its HTTP API.

    `token` gives access to both. With `user_header`, a reverse proxy names the user in this header; only the proxy may
    then reach the address.
    """

    listen: Listen
    """The address of the console; plain HTTP."""
    token: Secret | None = None
    """The token that gives access: 16 characters or more. This or `user_header` is required."""
    user_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,100}$")] | None = None
    """The header in which a reverse proxy names the user; with a `token`, it counts only together with that."""

    @model_validator(mode="after")
    def _is_guarded(self) -> ConsoleSettings:
        if self.token is None and self.user_header is None:
            raise ValueError(
                "needs a token, or the user_header of a reverse proxy: without one, anyone who reaches the address "
                "could replay and discard events"
            )
        return self

    @model_validator(mode="after")
    def _token_is_long(self) -> ConsoleSettings:
        known = None if self.token is None else known_text(self.token)
        if known is not None and len(known) < LEAST_TOKEN:
            raise ValueError(f"token must have {LEAST_TOKEN} characters or more")
        return self


class ObserveSettings(Section):
    """Metrics and health at `listen`, traces, and the console. Everything is off by default.

    `/livez` reports that relay hangs if a thread has no heartbeat for `stall_seconds`, or one operation of it takes
    `busy_seconds`.
    """

    listen: Listen | None = None
    """The address of /metrics, /livez, /readyz and /healthz; null: off."""
    traces: bool = False
    """Send OpenTelemetry traces, as the OTEL_* variables say."""
    console: ConsoleSettings | None = None
    """The console and its HTTP API; null: off."""
    stall_seconds: Annotated[Seconds, Field(ge=2)] = 20.0
    """The seconds without a heartbeat of a thread or a handler after which /livez fails."""
    busy_seconds: Annotated[Seconds, Field(ge=30)] = 900.0
    """The seconds that one operation of a thread or a handler may take before /livez fails."""

    @property
    def observes(self) -> bool:
        """Whether relay serves metrics, health or the console."""
        return self.listen is not None or self.console is not None


class ApiSettings(Section):
    """The HTTP API for programs that read or publish events; plain HTTP, of relay's own outbox.

    Its tokens are made with `relay token create`.
    """

    listen: Listen
    """The address of the API; plain HTTP."""
    origins: list[Annotated[str, AfterValidator(_origin)]] = Field(default_factory=list)
    """The origins of other sites whose pages may use the API in a browser, such as `https://app.example`."""
    replay: Annotated[PositiveInt, Number] = 100_000
    """The most events by which a stream may lag when it begins; a client that lags more reads pages."""
    streams: Annotated[PositiveInt, Number] = 1_000
    """The most streams, and requests that wait for an answer, at once."""
    streams_per_token: Annotated[PositiveInt, Number] = 250
    """The most streams, and requests that wait for an answer, of one token at once."""


class Settings(BaseSettings):
    """The whole configuration; see docs/reference/settings.md for every key."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    source: SourceSettings = Field(default_factory=SourceSettings)
    """Where events come from."""
    target: Own[TargetSettings] = Field(default_factory=TargetSettings)
    """Where effects, dead letters and offsets are written."""
    group: Own[Name] = "default"
    """The group: instances with the same name share offsets."""
    partitions: Alike[Annotated[int, Field(ge=1, le=1024), Number]] = 8
    """The number of partitions into which hosts are split; fixed once the group is initialised."""
    poll: Own[PollSettings] = Field(default_factory=PollSettings)
    """How relay polls the outbox."""
    batch: Own[BatchLimits] = Field(default_factory=BatchLimits)
    """How much work is done at once."""
    spark: Own[SparkSettings] = Field(default_factory=SparkSettings)
    """The Spark session for large batches and Spark sinks."""
    handlers: Alike[dict[str, HandlerSettings]] = Field(default_factory=dict)
    """The handlers, by name."""
    events: Alike[EventsSettings] = Field(default_factory=dict)
    """Event types with versions: a mapping of types, or `module:name` of a `relay.EventTypes`."""
    routes: Alike[list[Route]] = Field(default_factory=list)
    """Which events go to which handlers: a list, in which the first route that matches applies."""
    queues: Alike[dict[str, QueueSettings]] = Field(default_factory=dict)
    """Work queues that relay declares when it starts, by name; others are declared in SQL."""
    schedules: Alike[dict[str, ScheduleSettings]] = Field(default_factory=dict)
    """Events that relay publishes at given times, by name; others are declared in SQL."""
    intake: Own[dict[str, IntakeSettings]] = Field(default_factory=dict)
    """Brokers whose messages relay publishes, by name."""
    sinks: Own[SinksSettings] = Field(default_factory=SinksSettings)
    """How long relay keeps the WAL for a sink."""
    attempts: Own[AttemptSettings] = Field(default_factory=AttemptSettings)
    """Which attempts to deliver are kept."""
    dead_letters: Own[DeadLetterLimits] = Field(default_factory=DeadLetterLimits)
    """When a handler that dead-letters one transaction after another is stopped."""
    retention: Own[RetentionSettings] = Field(default_factory=RetentionSettings)
    """How long events stay."""
    observe: Own[ObserveSettings] = Field(default_factory=ObserveSettings)
    """Metrics, health, traces and the console."""
    api: Own[ApiSettings | None] = None
    """The HTTP API for programs that read or publish events; null: off."""
    crash_limit: Own[Annotated[PositiveInt, Number]] = 3
    """The crashes of a process on one transaction after which the transaction is dead-lettered."""
    unrouted: Alike[Literal["dead_letter", "ignore", "fail"]] = "dead_letter"
    """What happens with an event that no route matches: its transaction is dead-lettered, the event is ignored, or
    relay stops."""
    shutdown_timeout: Own[Seconds] = 20.0
    """The seconds that relay waits for the batch in flight when it stops; half of that for deliveries."""

    @field_validator("handlers")
    @classmethod
    def _handlers_have_names(cls, value: dict[str, HandlerSettings]) -> dict[str, HandlerSettings]:
        if "" in value:
            # In relay's tables, "" stands for the target.
            raise ValueError("a handler has the name ''; give it another one")
        for name in value:
            if name.startswith("queue:"):
                # So are the dead letters of work queues named, in relay.dead_letters.
                raise ValueError(
                    f"the name of the handler {name!r} begins with queue:; give it another one"
                )
        return value

    @field_validator("queues", "schedules", "intake")
    @classmethod
    def _declared_have_names(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        kind = {"queues": "queue", "schedules": "schedule"}.get(str(info.field_name), "intake")
        article = "an" if kind == "intake" else "a"
        for name in value:
            if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
                raise ValueError(
                    f"{name!r} is no name of {article} {kind}, which has 1 to {LONGEST_NAME} characters"
                )
        return value

    @model_validator(mode="after")
    def _what_publishes_has_an_outbox(self) -> Settings:
        if self.schedules and not self.source.owns_table:
            raise ValueError(
                "schedules: relay publishes into its own outbox only: remove source.table or source.message_prefix"
            )
        if self.intake and not self.source.owns_table:
            raise ValueError(
                "intake: relay publishes into its own outbox only: remove source.table or source.message_prefix"
            )
        return self

    @model_validator(mode="after")
    def _api_has_an_outbox(self) -> Settings:
        if self.api is not None and not self.source.owns_table:
            raise ValueError(
                "api: reads and publishes in relay's own outbox only: remove source.table or source.message_prefix"
            )
        return self

    @model_validator(mode="after")
    def _handlers_exist(self) -> Settings:
        for index, route in enumerate(self.routes):
            for name in route.handlers:
                if name not in self.handlers:
                    known = ", ".join(self.handlers) or "none"
                    raise ValueError(
                        f"routes.{index}.handlers: there is no handler {name!r} (handlers: {known})"
                    )
        return self

    @model_validator(mode="after")
    def _headers_exist(self) -> Settings:
        named = [
            (f"routes.{index}.match", name)
            for index, route in enumerate(self.routes)
            for name in route.match
        ]
        named += [
            (f"handlers.{handler}.{key}", name)
            for handler, each in self.handlers.items()
            for key, name in each.field_names
        ]
        for key, name in named:
            if is_header(name) and name not in self.source.mapping:
                known = ", ".join(self.source.headers) or "none"
                raise ValueError(f"{key}: source.headers has no {name} (headers: {known})")
        return self

    @model_validator(mode="after")
    def _brakes_are_of_handlers(self) -> Settings:
        for name in self.dead_letters.brake_of:
            if name not in self.handlers:
                known = ", ".join(self.handlers) or "none"
                raise ValueError(
                    f"dead_letters.brake_of: there is no handler {name!r} (handlers: {known})"
                )
        return self

    @model_validator(mode="after")
    def _partitions_exist(self) -> Settings:
        pinned = self.poll.partition_ids
        if pinned is None:
            return self
        if self.source.mode != "poll":
            raise ValueError(
                "poll.partition_ids: needs source.mode: poll; only one instance reads the WAL"
            )
        wrong = [number for number in pinned if number >= self.partitions]
        if wrong or not pinned:
            raise ValueError(
                f"poll.partition_ids: must be partitions from 0 to {self.partitions - 1}, at least one"
            )
        return self

    @model_validator(mode="after")
    def _listens_while_it_polls(self) -> Settings:
        if self.poll.listen and self.source.mode == "wal":
            raise ValueError(
                "poll.listen: needs source.mode: auto or poll; mode wal ignores notifications"
            )
        return self

    @model_validator(mode="after")
    def _spark_can_read(self) -> Settings:
        for name in self.spark_handlers:
            if self.source.mode == "wal":
                raise ValueError(
                    f"handlers.{name}.type: spark polls the outbox, which source.mode: wal excludes: set the mode to "
                    "auto"
                )
        return self

    @model_validator(mode="after")
    def _batches_do_not_lag(self) -> Settings:
        most = self.sinks.attach_seconds
        for name, handler in self.sink_handlers.items():
            if not isinstance(handler, BatchHandler) or not handler.in_batches:
                continue
            if handler.max_wait >= most:
                raise ValueError(
                    f"handlers.{name}.max_wait: must be less than sinks.attach_seconds ({most:g}), after which a sink "
                    "lags"
                )
        return self

    @model_validator(mode="after")
    def _sinks_can_begin(self) -> Settings:
        for name, handler in self.sink_handlers.items():
            if handler.start == "beginning" and self.source.mode == "wal":
                raise ValueError(
                    f"handlers.{name}.start: source.mode: wal reads nothing older than the slot: set start to now, or "
                    "the mode to auto"
                )
        return self

    @model_validator(mode="after")
    def _queues_can_begin(self) -> Settings:
        for name, queue in self.queues.items():
            if queue.start is not None and self.source.mode == "wal":
                raise ValueError(
                    f"queues.{name}.start: source.mode: wal reads nothing older than the slot: leave start out, or set "
                    "the mode to auto"
                )
        return self

    @model_validator(mode="after")
    def _archive_is_written_with_spark(self) -> Settings:
        name = self.retention.archive
        if name is not None and name not in self.spark_handlers:
            known = ", ".join(self.spark_handlers) or "none"
            raise ValueError(
                f"retention.archive: {name!r} is not a handler of type: spark (such handlers: {known})"
            )
        if name is not None and self.spark_handlers[name].mode == "upsert":
            raise ValueError(
                f"retention.archive: {name!r} has mode: upsert, which keeps one event of each key, and the others "
                "would be removed for good: name a sink that appends"
            )
        if name is not None and self.spark_handlers[name].start == "now":
            raise ValueError(
                f"retention.archive: {name!r} has start: now, and what the outbox has already would be removed without "
                "being in the archive: set start: beginning, which a sink that has a position ignores"
            )
        return self

    @model_validator(mode="after")
    def _retention_may_change_the_table(self) -> Settings:
        if self.retention.keep and self.source.mode == "wal" and not self.source.owns_table:
            raise ValueError(
                "retention.keep: source.mode: wal does not change your own table: set the mode to auto"
            )
        return self

    @model_validator(mode="after")
    def _addresses_differ(self) -> Settings:
        of = self.observe
        if of.listen and of.console and of.listen.port and of.listen == of.console.listen:
            raise ValueError("observe.console.listen: is the same as observe.listen: name another")
        others = {
            "observe.listen": of.listen,
            "observe.console.listen": of.console and of.console.listen,
        }
        for key, other in others.items():
            if self.api and self.api.listen.port and self.api.listen == other:
                raise ValueError(f"api.listen: is the same as {key}: name another")
        return self

    @property
    def brakes(self) -> dict[str, int]:
        """How many dead transactions in a row stop a handler, for each that has a brake."""
        limits = dict.fromkeys(self.handlers, self.dead_letters.brake)
        limits |= self.dead_letters.brake_of
        return {name: limit for name, limit in limits.items() if limit}

    @property
    def source_dsn(self) -> DatabaseAccess:
        """How to connect to the source."""
        return DatabaseAccess("source.dsn", self.source.dsn, self.source.password)

    @property
    def target_dsn(self) -> DatabaseAccess:
        """How to connect to the target: to the source where the target has no connection string."""
        dsn = self.target.dsn
        if dsn is None:
            return self.source_dsn
        return DatabaseAccess("target.dsn", dsn, self.target.password)

    @property
    def inline_max_events(self) -> int:
        """The most events of a batch that runs in this process."""
        if self.batch.inline_max_events is not None:
            return self.batch.inline_max_events
        return INLINE_MAX_EVENTS if has_spark() else self.batch.max_events

    @property
    def needs_spark(self) -> bool:
        """Whether a batch may exceed `inline_max_events`, or a handler writes with Spark."""
        return self.inline_max_events < self.batch.max_events or bool(self.spark_handlers)

    @property
    def spark_handlers(self) -> dict[str, SparkHandler]:
        """The sinks that Spark writes, by name."""
        return {
            name: each for name, each in self.handlers.items() if isinstance(each, SparkHandler)
        }

    @property
    def sink_handlers(self) -> dict[str, SinkHandler]:
        """The handlers with their own position in the log, by name."""
        return {name: each for name, each in self.handlers.items() if isinstance(each, SinkHandler)}

    @property
    def one_database(self) -> bool:
        """Whether the source is also the target."""
        return self.target_dsn.leads_where(self.source_dsn)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment overrides the file, whose values are keyword arguments."""
        return env_settings, init_settings
