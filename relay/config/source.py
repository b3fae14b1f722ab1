"""The section `source`: the database of the outbox, and the outbox's columns and types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, LiteralString
from uuid import UUID

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from relay.causes import MAX_HOPS
from relay.config.dsn import Dsn
from relay.config.secrets import Secret
from relay.config.types import Alike, Name, Number, Own, Section
from relay.faults import ConfigurationError
from relay.model import headers as header_fields
from relay.model.events import FIELDS, ID_FIELDS, NEEDED_FIELDS, SQL_TYPES

OWN_OUTBOX = "public.outbox_message_t"
"""The outbox that `relay init` creates and `relay.publish` inserts into."""


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
"""Functions by type that return an id as PostgreSQL prints it. Each raises ValueError for text of another type."""


PROFILES: Mapping[str, Mapping[str, Any]] = {
    "relay": {},
    "debezium": {
        "table": "public.outbox",
        "columns": {
            "host_id": "aggregateid",
            "aggregate_id": "aggregateid",
            "aggregate_type": "aggregatetype",
            "event_type": "type",
        },
        "types": {"host_id": "text"},
    },
    "pg-transactional-outbox": {
        "table": "public.outbox",
        "columns": {
            "host_id": "aggregate_id",
            "event_type": "message_type",
            "event_ts": "created_at",
        },
        "types": {"host_id": "text"},
    },
    "blumchen": {
        "table": "public.outbox",
        "columns": {"host_id": "message_type", "event_type": "message_type", "payload": "data"},
        "types": {"id": "bigint", "host_id": "text"},
    },
}
"""The values of the section that each `source.profile`, the outbox table of another tool, stands for.

Sources: Debezium documentation, "Outbox Event Router" (basic outbox table); the setup scripts of
pg-transactional-outbox; Blumchen's `MessageTableOptions.cs`.
"""


def _expanded(source: Mapping[str, Any]) -> dict[str, Any]:
    """The section with its profile's values; the section's own values, columns and types override them."""
    given = PROFILES.get(str(source.get("profile", "relay")), {})
    values = {**given, **source}
    for key in ("columns", "types"):
        if isinstance(own := source.get(key), Mapping):
            values[key] = {**given.get(key, {}), **own}
    return values


class SourceSettings(Section):
    """Where events come from."""

    dsn: Own[Dsn] = SecretStr("postgresql:///")
    """The connection string of the database of the outbox; libpq's PG* variables complete it."""
    password: Own[Secret | None] = None
    """The password of the role; null: the one in `dsn`, if any."""
    profile: Own[Literal["relay", "debezium", "pg-transactional-outbox", "blumchen"]] = "relay"
    """The tool whose table the outbox is: sets the defaults of `table`, `columns` and `types`."""
    table: Alike[str] = OWN_OUTBOX
    """The outbox, as schema.table."""
    columns: Alike[dict[str, str | None]] = Field(default_factory=dict)
    """The column of each field, where the names differ; null where the outbox has no such column."""
    types: Alike[dict[str, Literal["uuid", "text", "bigint"]]] = Field(default_factory=dict)
    """The types of `id`, `host_id`, `user_id` and `transaction_id`, where they are not uuid."""
    headers: Alike[Annotated[dict[str, Name], BeforeValidator(header_fields.named)]] = Field(
        default_factory=dict
    )
    """Extra columns of the outbox, which become fields `headers.*`: a mapping of names to columns, or a list of
    columns."""
    message_prefix: Alike[Name | None] = None
    """The prefix of the pg_logical_emit_message messages that are events, in place of a table; needs `mode: wal`."""
    slot: Own[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")]] = "relay"
    """The replication slot; each group has its own."""
    publication: Own[Name] = "relay"
    """The publication that the slot is read with."""
    mode: Own[Literal["auto", "wal", "poll"]] = "auto"
    """`auto` streams the WAL and polls events that the slot does not have; `wal` only streams; `poll` only polls."""
    offsets: Own[Literal["sequence", "gapless"]] = "sequence"
    """The source of `c_offset`: a sequence, or a counter without gaps, which one publisher at a time locks."""
    index_offsets: Own[bool] = False
    """Whether `relay init` makes an index on `c_offset`, for programs that read the table in its order."""
    buffer_bytes: Own[Annotated[int, Field(ge=65536), Number]] = 32 * 1024 * 1024
    """The most bytes of the stream that are received before they are durable in the target."""
    max_event_bytes: Own[Annotated[int, Field(ge=1024), Number]] = 16 * 1024 * 1024
    """The largest event that relay's own outbox accepts: its texts and JSON together, in bytes of text."""
    max_hops: Alike[Annotated[int, Field(ge=1, le=1_000_000), Number]] = MAX_HOPS
    """The most events in a chain of which each causes the next: a handler or function that publishes one more fails."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_profile(cls, value: Any) -> Any:
        return _expanded(value) if isinstance(value, Mapping) else value

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
    def _types_are_of_ids(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in ID_FIELDS:
                raise ValueError(
                    f"{name!r} has a fixed type: set those of {', '.join(ID_FIELDS)} only"
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
                f"message_prefix: messages are in the WAL only, and mode is {self.mode}: set source.mode: wal"
            )
        given = {
            "table": self.table != OWN_OUTBOX,
            "profile": self.profile != "relay",
            "columns": self.columns,
            "headers": self.headers,
            "offsets": self.offsets != "sequence",
            "index_offsets": self.index_offsets,
        }
        for name in (key for key, is_given in given.items() if is_given):
            raise ValueError(
                f"message_prefix: the outbox is not a table, so {name} has no meaning: remove one of the two"
            )
        return self

    @property
    def sql_types(self) -> Mapping[str, LiteralString]:
        """The PostgreSQL type of each event field, with `headers` where the source has any."""
        types: dict[str, LiteralString] = {**SQL_TYPES, **self.types}
        return {**types, header_fields.FIELD: "jsonb"} if self.headers else types

    def printed_id(self, field: str, value: str, option: str) -> str:
        """The id in a command's option, as PostgreSQL prints it.

        Raises ConfigurationError if it does not have its field's type.
        """
        kind = self.types.get(field, "uuid")
        try:
            return _PRINTED[kind](value)
        except ValueError:
            raise ConfigurationError(f"{option}: {value!r} is not of type {kind}") from None

    @property
    def owns_table(self) -> bool:
        """Whether the outbox is the table that `relay init` creates, not a table of the user's."""
        return self.message_prefix is None and self.table == OWN_OUTBOX

    @property
    def outbox(self) -> str:
        """The table or the messages of the outbox, for messages to users."""
        prefix = self.message_prefix
        return self.table if prefix is None else f"messages with the prefix {prefix!r}"

    @property
    def table_name(self) -> tuple[str, str]:
        """The schema and the name of the outbox."""
        schema, name = self.table.split(".")
        return schema, name

    @property
    def mapping(self) -> dict[str, str]:
        """The column of each field and header, such as `headers.region`; "" for a field without a column."""
        fields = {name: self.columns.get(name, name) or "" for name in FIELDS}
        return {
            **fields,
            **{header_fields.PREFIX + name: column for name, column in self.headers.items()},
        }
