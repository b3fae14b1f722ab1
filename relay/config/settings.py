"""The configuration: a YAML file and `RELAY_*` environment variables, validated whole before anything connects."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, LiteralString
from uuid import UUID

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from relay.config import environment
from relay.config.dsn import check_dsn
from relay.config.event_types import REGISTRY, TYPES, EventsSettings
from relay.config.fields import is_header, is_name
from relay.config.handlers import KINDS, HandlerSettings, SinkHandler, SparkHandler
from relay.config.observe import ObserveSettings
from relay.config.profiles import expanded
from relay.config.retention import RetentionSettings
from relay.config.suggestions import keys_at, nearest
from relay.config.types import Name, Number, Seconds, Secret, Section, resolve_secret
from relay.faults import ConfigurationError
from relay.model import headers as header_fields
from relay.model.events import FIELDS, ID_FIELDS, NEEDED_FIELDS, SQL_TYPES

_UNKNOWN = "unknown key; see docs/reference/settings.md for the keys there are"
DEFAULT_PATH = Path("relay.yaml")
ENV_PREFIX = environment.PREFIX
OWN_OUTBOX = "public.outbox_message_t"
"""The outbox that `relay init` makes, and that `relay.publish` inserts into."""


def _dsn(value: Any) -> Any:
    return check_dsn(value) if isinstance(value, str) else value


Dsn = Annotated[SecretStr, BeforeValidator(_dsn), BeforeValidator(resolve_secret)]


Scalar = str | int | float | bool


def _patterns(value: Any) -> list[Scalar]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(item, Scalar) for item in found):
        raise ValueError("must be a value, a pattern such as order.*, or a list of them")
    return found


Patterns = Annotated[Any, BeforeValidator(_patterns)]
"""Values and globs, of which one must match."""


def _bigint(text: str) -> str:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError("out of range")
    return str(number)


_PRINTED: Mapping[str, Callable[[str], str]] = {
    "uuid": lambda text: str(UUID(text)),
    "text": str,
    "bigint": _bigint,
}
"""An id of each type as PostgreSQL prints it. Each raises ValueError for what is none."""


class SourceSettings(Section):
    """Where events come from."""

    dsn: Dsn = SecretStr("postgresql:///")
    """The connection string of the database that has the outbox; libpq's PG* variables give what it lacks."""
    profile: Literal["relay", "debezium", "pg-transactional-outbox", "blumchen"] = "relay"
    """Whose table the outbox is: gives `table`, `columns` and `types` where they are not set."""
    table: str = OWN_OUTBOX
    """The outbox, as schema.table."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """The column of each field, where the names differ; null where the outbox has no such column."""
    types: dict[str, Literal["uuid", "text", "bigint"]] = Field(default_factory=dict)
    """The type of `id`, `host_id`, `user_id` and `transaction_id`, where it is not uuid."""
    headers: Annotated[dict[str, Name], BeforeValidator(header_fields.named)] = Field(
        default_factory=dict
    )
    """Extra columns of the outbox as fields `headers.*`: the column of each; a list where they have the columns'
    names."""
    message_prefix: Name | None = None
    """The prefix of the messages of pg_logical_emit_message that are the outbox, in place of a table; needs `mode:
    wal`."""
    slot: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")] = "relay"
    """The replication slot; each group has its own."""
    publication: Name = "relay"
    """The publication that the slot is read with."""
    mode: Literal["auto", "wal", "poll"] = "auto"
    """`auto` streams the WAL and polls for what the slot does not have; `wal` only streams; `poll` only polls."""
    offsets: Literal["sequence", "gapless"] = "sequence"
    """Where `c_offset` comes from: a sequence, or a counter without gaps at which publishers take turns."""
    buffer_bytes: Annotated[int, Field(ge=65536), Number] = 32 * 1024 * 1024
    """How much may be received before it is durable in the target, in bytes."""
    max_event_bytes: Annotated[int, Field(ge=1024), Number] = 16 * 1024 * 1024
    """The largest payload and metadata that relay's own outbox accepts, together, in bytes."""

    @model_validator(mode="before")
    @classmethod
    def _of_profile(cls, value: Any) -> Any:
        return expanded(value) if isinstance(value, Mapping) else value

    @field_validator("table")
    @classmethod
    def _qualified(cls, value: str) -> str:
        if value.count(".") != 1 or not all(value.split(".")):
            raise ValueError("must be schema.table, such as public.outbox_message_t")
        return value

    @field_validator("columns")
    @classmethod
    def _known_fields(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for name, column in value.items():
            if name not in FIELDS:
                raise ValueError(
                    f"{name!r} is not a field of an event; the fields are {', '.join(FIELDS)}"
                )
            if not column and name in NEEDED_FIELDS:
                raise ValueError(f"{name} needs a column: name the one that holds it")
        return value

    @field_validator("types")
    @classmethod
    def _of_ids(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in ID_FIELDS:
                raise ValueError(
                    f"{name!r} has one type only; those to choose are of {', '.join(ID_FIELDS)}"
                )
        return value

    @field_validator("headers")
    @classmethod
    def _headers_have_names(cls, value: dict[str, str]) -> dict[str, str]:
        header_fields.require_names(value)
        return value

    @model_validator(mode="after")
    def _messages_have_no_table(self) -> SourceSettings:
        if self.message_prefix is None:
            return self
        if self.mode != "wal":
            raise ValueError(
                f"message_prefix: messages are in the WAL only, and mode says {self.mode}: set source.mode: wal"
            )
        given = {
            "table": self.table != OWN_OUTBOX,
            "profile": self.profile != "relay",
            "columns": self.columns,
            "headers": self.headers,
            "offsets": self.offsets != "sequence",
        }
        for name in (key for key, is_given in given.items() if is_given):
            raise ValueError(
                f"message_prefix: the outbox is messages and no table, so {name} means nothing: leave one of the two "
                "out"
            )
        return self

    @property
    def sql_types(self) -> Mapping[str, LiteralString]:
        """The PostgreSQL type of each event field, of `headers` too where there are any."""
        found: dict[str, LiteralString] = {**SQL_TYPES, **self.types}
        return {**found, header_fields.FIELD: "jsonb"} if self.headers else found

    def printed_id(self, field: str, value: str, option: str) -> str:
        """An id that an option of a command names, as PostgreSQL prints it.

        Raises ConfigurationError if it is not of its field's type.
        """
        kind = self.types.get(field, "uuid")
        try:
            return _PRINTED[kind](value)
        except ValueError:
            raise ConfigurationError(f"{option}: {value!r} is no {kind}") from None

    @property
    def owns_table(self) -> bool:
        """Whether the outbox is relay's own, which `relay init` makes, and not one that was there before."""
        return self.message_prefix is None and self.table == OWN_OUTBOX

    @property
    def outbox(self) -> str:
        """What holds the events, in words."""
        prefix = self.message_prefix
        return self.table if prefix is None else f"messages with the prefix {prefix!r}"

    @property
    def table_name(self) -> tuple[str, str]:
        """The schema and the name of the outbox."""
        schema, name = self.table.split(".")
        return schema, name

    @property
    def mapping(self) -> dict[str, str]:
        """The outbox's column for each field; "", which names no column, for one that is left out.

        Each header is a field of its own, such as `headers.region`.
        """
        fields = {name: self.columns.get(name, name) or "" for name in FIELDS}
        return {
            **fields,
            **{header_fields.PREFIX + name: column for name, column in self.headers.items()},
        }


def _switch(value: Any) -> Any:
    """`on` and `off`, which YAML reads as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class TargetSettings(Section):
    """Where effects, dead letters and offsets are written."""

    dsn: Dsn | None = None
    """The connection string of the database for effects, dead letters and offsets; null: that of the source."""
    synchronous_commit: Annotated[Literal["on", "off"], BeforeValidator(_switch)] = "on"
    """`off`: commits do not wait for the target's disk; relay confirms a position only when the target's WAL is
    flushed."""

    @property
    def durable(self) -> bool:
        """Whether a commit is on the target's disk when it returns."""
        return self.synchronous_commit == "on"


class PollSettings(Section):
    """How the polling path reads."""

    wait_period_ms: Annotated[PositiveInt, Number] = 1_000
    """The longest wait between polls, in milliseconds: it doubles from 10 while no events come."""
    batch_size: Annotated[PositiveInt, Number] = 1_000
    """Events of a poll at the head of the outbox, about."""
    listen: bool = False
    """Publishers send NOTIFY, which wakes polling at once, and commit one after the other."""
    partition_ids: list[Annotated[NonNegativeInt, Number]] | None = None
    """With `mode: poll`, the partitions of this instance; null: any that are free."""


class BatchLimits(Section):
    """How much work is done at once."""

    max_events: Annotated[PositiveInt, Number] = 10_000
    """The most events of a batch."""
    max_bytes: Annotated[int, Field(ge=1024), Number] = 16 * 1024 * 1024
    """The most bytes of a batch; a larger commit goes through a file."""
    inline_max_events: Annotated[NonNegativeInt, Number] = 1_000
    """Batches up to this size run in this process, larger ones on Spark; 0 sends all to Spark."""
    inline_workers: Annotated[PositiveInt, Number] = 2
    """Threads, each with a connection, for the tasks of an inline batch."""
    spool_directory: Path | None = None
    """Where commits larger than memory are written; null: the system's folder for temporary files."""


_SPARK_SECRET = "spark.authenticate.secret"  # noqa: S105 the name of a key


class SparkSettings(Section):
    """The Spark session that runs large batches."""

    master: str = "local[*]"
    """The master of the Spark session."""
    remote: Secret | None = None
    """A Spark Connect server, `sc://host`, in place of `master`."""
    eager: bool = False
    """Start the session with relay, not with the first large batch."""
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
                f"conf: {_SPARK_SECRET} is missing, the secret that the cluster's master and workers have: "
                "set it, or spark.authenticate: false on a network that you trust"
            )
        return self

    @property
    def authenticates(self) -> bool:
        """Whether the driver, the executors and a standalone cluster's daemons authenticate each other."""
        return self.plain_conf.get("spark.authenticate") != "false"

    @property
    def plain_conf(self) -> dict[str, str]:
        """`conf` with its secrets: for Spark only."""
        return {key: value.get_secret_value() for key, value in self.conf.items()}


class SinksSettings(Section):
    """How long the WAL waits for a sink, which then polls: so many seconds for a commit, so many bytes of them."""

    attach_seconds: Seconds = 5.0
    """How long the WAL of a commit is kept for a sink that has not delivered it, in seconds; then the sink polls."""
    attach_bytes: Annotated[int, Field(ge=65536), Number] = 8 * 1024 * 1024
    """How many bytes of a sink's events are buffered from the stream; beyond that the sink polls."""


class DeadLetterLimits(Section):
    """How many transactions in a row a handler may let die of one kind of fault; 0 or null: any number."""

    brake: Annotated[NonNegativeInt, Number] | None = 100
    """How many transactions in a row a handler may dead-letter for one kind of fault before it is stopped; 0 or null:
    any number."""
    brake_of: dict[str, Annotated[NonNegativeInt, Number]] = Field(default_factory=dict)
    """The same for single handlers, by their names."""


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


class Route(Section):
    """Which events go to which handlers."""

    match: dict[str, Patterns] = Field(default_factory=dict)
    """Values, globs or lists of them, by field or path into payload and metadata; every key must match."""
    handlers: Annotated[list[str], Field(min_length=1)]
    """The names of the handlers that get the event."""
    continue_: bool = Field(default=False, alias="continue")
    """Look at the following routes as well."""

    @field_validator("match")
    @classmethod
    def _known_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not is_name(name):
                raise ValueError(
                    f"{name!r} is neither a field of an event nor a path such as payload.customer.tier"
                )
        return value


class Settings(BaseSettings):
    """The whole configuration; see docs/reference/settings.md for every key."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    source: SourceSettings = Field(default_factory=SourceSettings)
    """Where events come from."""
    target: TargetSettings = Field(default_factory=TargetSettings)
    """Where effects, dead letters and offsets are written."""
    group: Name = "default"
    """The consumer group: progress is kept for each group."""
    partitions: Annotated[int, Field(ge=1, le=1024), Number] = 8
    """Into how many partitions the hosts are split; fixed once the group is initialised."""
    poll: PollSettings = Field(default_factory=PollSettings)
    """How relay polls the outbox."""
    batch: BatchLimits = Field(default_factory=BatchLimits)
    """How much work is done at once."""
    spark: SparkSettings = Field(default_factory=SparkSettings)
    """The Spark session that runs large batches."""
    handlers: dict[str, HandlerSettings] = Field(default_factory=dict)
    """What is done with events: a mapping of names to handlers."""
    events: EventsSettings = Field(default_factory=dict)
    """Types of events with versions: a mapping of types, or `module:name` of a `relay.EventTypes`."""
    routes: list[Route] = Field(default_factory=list)
    """Which events go to which handlers: a list, of which the first route that matches wins."""
    sinks: SinksSettings = Field(default_factory=SinksSettings)
    """How long the WAL waits for a sink."""
    dead_letters: DeadLetterLimits = Field(default_factory=DeadLetterLimits)
    """How many transactions may be dead-lettered in a row."""
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    """How long events stay."""
    observe: ObserveSettings = Field(default_factory=ObserveSettings)
    """Metrics, health, traces and the console."""
    crash_limit: Annotated[PositiveInt, Number] = 3
    """After so many deaths of a process over one transaction the transaction is dead-lettered."""
    unrouted: Literal["dead_letter", "ignore", "fail"] = "dead_letter"
    """What happens to an event that no route matches: its transaction is dead-lettered, the event is ignored, or relay
    stops."""
    shutdown_timeout: Seconds = 20.0
    """How long a stop may wait for the batch in flight, in seconds; for deliveries half of that."""

    @field_validator("handlers")
    @classmethod
    def _handlers_have_names(cls, value: dict[str, HandlerSettings]) -> dict[str, HandlerSettings]:
        if "" in value:
            # Which stands for the target where something belongs to a sink or to the target.
            raise ValueError("there is a handler without a name")
        return value

    @model_validator(mode="after")
    def _handlers_exist(self) -> Settings:
        for position, route in enumerate(self.routes):
            for name in route.handlers:
                if name not in self.handlers:
                    known = ", ".join(self.handlers) or "none"
                    raise ValueError(
                        f"routes.{position}.handlers: there is no handler {name!r} (handlers: {known})"
                    )
        return self

    @model_validator(mode="after")
    def _headers_exist(self) -> Settings:
        named = [
            (f"routes.{position}.match", name)
            for position, route in enumerate(self.routes)
            for name in route.match
        ]
        named += [
            (f"handlers.{handler}.{key}", name)
            for handler, each in self.handlers.items()
            for key, template in each.templates.items()
            for name in template.names
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
            raise ValueError("poll.partition_ids: needs source.mode: poll; the WAL is read by one")
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
                "poll.listen: needs source.mode: auto or poll; mode wal has no use for notifications"
            )
        return self

    @model_validator(mode="after")
    def _spark_can_read(self) -> Settings:
        for name in self.spark_handlers:
            if self.source.mode == "wal":
                raise ValueError(
                    f"handlers.{name}.type: spark reads the outbox as a table, which source.mode: wal rules out: set "
                    "the mode to auto"
                )
        return self

    @model_validator(mode="after")
    def _sinks_can_begin(self) -> Settings:
        for name, handler in self.sink_handlers.items():
            if handler.start == "beginning" and self.source.mode == "wal":
                raise ValueError(
                    f"handlers.{name}.start: source.mode: wal has nothing older than the slot: set it to now, or the "
                    "mode to auto"
                )
        return self

    @model_validator(mode="after")
    def _archive_is_written_with_spark(self) -> Settings:
        name = self.retention.archive
        if name is not None and name not in self.spark_handlers:
            known = ", ".join(self.spark_handlers) or "none"
            raise ValueError(
                f"retention.archive: {name!r} is no handler of type: spark (such handlers: {known})"
            )
        return self

    @model_validator(mode="after")
    def _what_is_read_is_known(self) -> Settings:
        if self.retention.keep and self.source.mode == "wal" and not self.source.owns_table:
            raise ValueError(
                "retention.keep: source.mode: wal leaves a table of yours untouched: set the mode to auto"
            )
        return self

    @model_validator(mode="after")
    def _addresses_differ(self) -> Settings:
        of = self.observe
        if of.listen and of.console and of.listen.port and of.listen == of.console.listen:
            raise ValueError("observe.console.listen: is observe.listen too: give another port")
        return self

    @property
    def brakes(self) -> dict[str, int]:
        """How many dead transactions in a row stop a handler, for each that has a brake."""
        limits = dict.fromkeys(self.handlers, self.dead_letters.brake)
        limits |= self.dead_letters.brake_of
        return {name: limit for name, limit in limits.items() if limit}

    @property
    def source_dsn(self) -> str:
        """The source's connection string, password included: for connecting only."""
        return self.source.dsn.get_secret_value()

    @property
    def target_dsn(self) -> str:
        """The target's connection string; the source's where none is given."""
        dsn = self.target.dsn
        return self.source_dsn if dsn is None else dsn.get_secret_value()

    @property
    def needs_spark(self) -> bool:
        """Whether a batch can be too large for this process, or a handler writes with Spark."""
        return self.batch.inline_max_events < self.batch.max_events or bool(self.spark_handlers)

    @property
    def spark_handlers(self) -> dict[str, SparkHandler]:
        """The sinks that Spark writes, by name."""
        return {
            name: each for name, each in self.handlers.items() if isinstance(each, SparkHandler)
        }

    @property
    def sink_handlers(self) -> dict[str, SinkHandler]:
        """The handlers that have a position of their own in the log, by name."""
        return {name: each for name, each in self.handlers.items() if isinstance(each, SinkHandler)}

    @property
    def one_database(self) -> bool:
        """Whether effects are written to the database that the events come from."""
        return self.target_dsn == self.source_dsn

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes before the file, which arrives as keyword arguments."""
        return env_settings, init_settings


def load(path: Path | None, beside: Sequence[Path] = ()) -> Settings:
    """Read and validate the configuration.

    Without a path, `RELAY_CONFIG` names the file, else `relay.yaml` where it exists, else only the environment counts.
    Variables that only a file of `beside` takes (`{env: NAME}`) are no mistake.
    Raises ConfigurationError with one line a fault: what is wrong, where (file and key), what to do; also if there is
    neither a file nor a setting in the environment.
    """
    file = path or _default_file()
    if file is None and not environment.settings(Settings):
        raise ConfigurationError(
            f"there is no configuration: {Path.cwd() / DEFAULT_PATH} does not exist, and neither --config nor "
            f"{ENV_PREFIX}CONFIG names a file: write one (config/relay.yaml of the project has every key), or set "
            f"{ENV_PREFIX}SOURCE__DSN"
        )
    content = {} if file is None else _read(file)
    taken = [content, *map(_read, beside)]
    if unrecognised := list(environment.unknown_variables(Settings, taken)):
        raise ConfigurationError("\n".join(unrecognised))
    unknown = [key for key in content if key.startswith("_")]
    if unknown:
        # pydantic-settings would take these for arguments of its own.
        raise ConfigurationError(f"{file}: {unknown[0]}: {_unknown(unknown[:1])}")
    try:
        return Settings(**content)
    except ValidationError as error:
        raise ConfigurationError("\n".join(dict.fromkeys(_lines(error, file)))) from None
    except SettingsError as error:
        key = re.search(r'field "(\w+)"', str(error))
        raise ConfigurationError(
            f"environment: {key[1] if key else ENV_PREFIX}: is not JSON, as a whole section in a variable must be"
        ) from None


def _unknown(location: Sequence[int | str]) -> str:
    meant = nearest(str(location[-1]), keys_at(Settings, location[:-1]))
    return f"unknown key; did you mean {meant}?" if meant else _UNKNOWN


def _default_file() -> Path | None:
    named = os.environ.get("RELAY_CONFIG")
    if named:
        return Path(named)
    return DEFAULT_PATH if DEFAULT_PATH.exists() else None


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is a mistake, instead of the last one winning silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    problem = f"the key {key.value!r} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506 a safe loader's child
    except OSError as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error.strerror}); give the configuration with --config FILE"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        origin = f"{file}:{mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigurationError(f"{origin}: is not valid YAML: {problem}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file}: is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(
            f"{file}: must be a mapping of keys such as source, handlers and routes"
        )
    return content


_NO_MAPPING = frozenset({"dict_type", "model_type", "model_attributes_type"})


def _lines(error: ValidationError, file: Path | None) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        location = _location(fault["loc"])
        key = _key(location)
        origin = "environment" if file is None or _in_environment(location) else str(file)
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = _unknown(location)
        elif fault["type"] == "missing":
            message = "is required"
        elif fault["type"] in _NO_MAPPING:
            message = "must be a mapping of keys"
        elif fault["type"].startswith("union_tag"):
            key, message = f"{key}.type", f"must be one of {', '.join(KINDS)}"
        else:
            message = message[:1].lower() + message[1:]
        yield f"{origin}: {key}: {message}" if key else f"{origin}: {message}"


# Members of unions that pydantic adds to the place of a fault, but that no user wrote.
_INVISIBLE = frozenset({"function-before", "str", "int", "float", "bool"})
_KIND_DEPTH = 2
"""Where pydantic names the kind of a handler: (handlers, its name, its kind, …)."""


def _location(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where the fault is in the file, without the form of `events` that pydantic takes it for."""
    if len(location) > 1 and location[0] == "events" and location[1] in (TYPES, REGISTRY):
        return (location[0], *location[2:])
    return location


def _key(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    kept = [
        part
        for depth, part in enumerate(parts)
        if not (depth == _KIND_DEPTH and part in KINDS)
        and not (depth >= 2 and part in _INVISIBLE)
        and "[" not in part
    ]
    return ".".join(kept)


def _in_environment(location: tuple[int | str, ...]) -> bool:
    """Whether a variable gives the value at a place, or the section that it stands in."""
    given = {name.upper() for name in os.environ}
    parts = [str(part).upper() for part in location]
    return any(ENV_PREFIX + "__".join(parts[:depth]) in given for depth in range(1, len(parts) + 1))
