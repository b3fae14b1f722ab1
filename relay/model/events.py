"""Events, commits and business transactions as handlers see them, and positions in the WAL. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, LiteralString, NamedTuple, Protocol
from uuid import UUID

from relay.model import exact_json
from relay.model import headers as header_fields

FIELDS = (
    "id",
    "host_id",
    "user_id",
    "aggregate_id",
    "aggregate_version",
    "aggregate_type",
    "event_type",
    "event_ts",
    "payload",
    "metadata",
    "c_offset",
    "transaction_id",
    "transaction_ordinal",
    "transaction_count",
    "deliver_at",
)
"""The fields of an event that are columns of the outbox."""

NEEDED_FIELDS = ("id", "host_id", "event_type", "payload", "c_offset")
"""Fields whose columns an outbox must have."""

ID_FIELDS = ("id", "host_id", "user_id", "transaction_id")
"""Fields whose columns may be of the type uuid, text or bigint."""

INSERTED_BY = "c_xid"
"""The outbox's column with the id of the transaction that inserted the row; updates and moves do not change it."""

NOTE = "relay: undecodable"
"""A column that relay adds to rows of a source whose encoding is not UTF-8: the undecodable bytes, or null."""

COMMIT_FIELDS = ("commit_lsn", "commit_ts", "xid")
"""The fields that an event gets from its commit."""

EVENT_FIELDS = FIELDS + COMMIT_FIELDS
"""Every field that a statement, a `batch` relation or a route may name."""

SQL_TYPES: Mapping[str, LiteralString] = {
    "id": "uuid",
    "host_id": "uuid",
    "user_id": "uuid",
    "aggregate_id": "text",
    "aggregate_version": "bigint",
    "aggregate_type": "text",
    "event_type": "text",
    "event_ts": "timestamptz",
    "payload": "jsonb",
    "metadata": "jsonb",
    "c_offset": "bigint",
    "transaction_id": "uuid",
    "transaction_ordinal": "int",
    "transaction_count": "int",
    "deliver_at": "timestamptz",
    "commit_lsn": "pg_lsn",
    "commit_ts": "timestamptz",
    "xid": "bigint",
}
"""The PostgreSQL type of each event field; for ID_FIELDS the default, which `source.types` overrides."""

Row = tuple[str | None, ...]
"""One event as PostgreSQL's text output, in the order of `EVENT_FIELDS`."""

Headers = Mapping[str, str | None]
"""The values of extra columns, by their names in `source.headers`."""
_NO_HEADERS: Headers = MappingProxyType({})

_INDEX = {name: index for index, name in enumerate(EVENT_FIELDS)}

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
"""A UUID in the form that PostgreSQL prints."""
_LSN = re.compile(r"[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}", re.ASCII)


class Lsn(int):
    """A position in the write-ahead log, in bytes; printed as PostgreSQL's `pg_lsn` (`16/B374D848`).

    Source: PostgreSQL documentation, "pg_lsn Type".
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read `X/Y` in hexadecimal; raises ValueError for anything else."""
        if not _LSN.fullmatch(text):
            raise ValueError(f"{text!r} is not a position in the WAL, such as 16/B374D848")
        high, _, low = text.partition("/")
        return cls(int(high, 16) << 32 | int(low, 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    __repr__ = __str__


POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Commit(NamedTuple):
    """A commit of the source: its position in the WAL and its time.

    `ts` is in microseconds since POSTGRES_EPOCH, in the years 1 to 9999. Polled rows have only the xid, and rows that
    were inserted before the outbox had `c_xid` not even that; unknown values are 0.
    """

    lsn: Lsn
    end_lsn: Lsn
    ts: int
    xid: int

    @property
    def fields(self) -> Row:
        """The values of `COMMIT_FIELDS`, as text."""
        xid = str(self.xid) if self.xid else None
        if not self.lsn:
            return (None, None, xid)
        return (str(self.lsn), timestamp(self.ts), xid)


def timestamp(microseconds: int) -> str:
    """A time since POSTGRES_EPOCH as PostgreSQL prints it in UTC. Raises OverflowError outside the years 1 to 9999."""
    moment = POSTGRES_EPOCH + timedelta(microseconds=microseconds)
    text = str(moment).removesuffix("+00:00")
    return f"{text.rstrip('0') if moment.microsecond else text}+00"


def microseconds(moment: datetime) -> int:
    """The microseconds from POSTGRES_EPOCH to a moment. Raises TypeError for one without a time zone."""
    return (moment - POSTGRES_EPOCH) // timedelta(microseconds=1)


class Event:
    """One row of the outbox. Properties parse their value at each access, so that unread ones cost nothing."""

    __slots__ = ("_headers", "row")

    def __init__(self, row: Row, headers: Headers | None = None) -> None:
        self.row = row
        self._headers = headers

    def text(self, name: str) -> str | None:
        """The field as PostgreSQL prints it, or None; raises KeyError for an unknown field.

        `headers` is the text of a JSON object, `headers.NAME` the text of one column.
        """
        try:
            return self.row[_INDEX[name]]
        except KeyError:
            return self._header(name)

    def _header(self, name: str) -> str | None:
        if name == header_fields.FIELD:
            return None if self._headers is None else header_fields.as_json(self._headers)
        if not name.startswith(header_fields.PREFIX):
            raise KeyError(name)
        return self.headers[name.removeprefix(header_fields.PREFIX)]

    def without(self, names: Collection[str]) -> Event:
        """The same event with some fields null."""
        return Event(
            tuple(
                None if name in names else value
                for name, value in zip(EVENT_FIELDS, self.row, strict=True)
            ),
            self._headers,
        )

    def with_texts(self, texts: Mapping[str, str | None]) -> Row:
        """The event's row with the texts of some fields replaced; headers cannot be."""
        row = list(self.row)
        for name, text in texts.items():
            row[_INDEX[name]] = text
        return tuple(row)

    def _id(self, name: str) -> UUID | str | None:
        value = self.text(name)
        return UUID(value) if value is not None and _UUID.fullmatch(value) else value

    def _int(self, name: str) -> int | None:
        value = self.text(name)
        return None if value is None else int(value)

    def _json(self, name: str) -> Any:
        value = self.text(name)
        return None if value is None else exact_json.loads_floats(value)

    def _timestamp(self, name: str) -> datetime | None:
        value = self.text(name)
        return None if value is None else datetime.fromisoformat(value)

    @property
    def id(self) -> UUID | str | None:
        """The event's id, the idempotency key: a UUID, or the text of an id of another type, such as bigint."""
        return self._id("id")

    @property
    def host_id(self) -> UUID | str | None:
        """The host (tenant), as a UUID or a text. Events of one host are applied in commit order."""
        return self._id("host_id")

    @property
    def user_id(self) -> UUID | str | None:
        """The user on whose behalf the event was published, as a UUID or a text."""
        return self._id("user_id")

    @property
    def aggregate_id(self) -> str | None:
        """The aggregate that the event is about."""
        return self.text("aggregate_id")

    @property
    def aggregate_version(self) -> int | None:
        """The aggregate's version after the event."""
        return self._int("aggregate_version")

    @property
    def aggregate_type(self) -> str | None:
        """The type of the aggregate."""
        return self.text("aggregate_type")

    @property
    def event_type(self) -> str | None:
        """The type of the event."""
        return self.text("event_type")

    @property
    def event_ts(self) -> datetime | None:
        """The publisher's time of the event. Raises ValueError outside Python's years 1 to 9999."""
        return self._timestamp("event_ts")

    @property
    def payload(self) -> Any:
        """The payload, parsed again at each access. Raises ValueError if a column of text has no JSON."""
        return self._json("payload")

    @property
    def metadata(self) -> Any:
        """The metadata, parsed again at each access. Raises ValueError if a column of text has no JSON."""
        return self._json("metadata")

    @property
    def headers(self) -> Headers:
        """The extra columns of `source.headers`, by their names there, each as PostgreSQL prints it."""
        return _NO_HEADERS if self._headers is None else MappingProxyType(self._headers)

    @property
    def c_offset(self) -> int | None:
        """The event's number in the order of insertion. Gaps mean nothing."""
        return self._int("c_offset")

    @property
    def transaction_id(self) -> UUID | str | None:
        """The id of the business transaction, as a UUID or a text."""
        return self._id("transaction_id")

    @property
    def transaction_ordinal(self) -> int | None:
        """The event's number in its business transaction, from 1."""
        return self._int("transaction_ordinal")

    @property
    def transaction_count(self) -> int | None:
        """The number of events of the business transaction."""
        return self._int("transaction_count")

    @property
    def deliver_at(self) -> datetime | None:
        """The earliest time of delivery; None for at once. Raises ValueError outside Python's years 1 to 9999."""
        return self._timestamp("deliver_at")

    @property
    def commit_lsn(self) -> Lsn | None:
        """The position of the commit record in the WAL."""
        value = self.text("commit_lsn")
        return None if value is None else Lsn.parse(value)

    @property
    def commit_ts(self) -> datetime | None:
        """The time of the source's commit."""
        return self._timestamp("commit_ts")

    @property
    def xid(self) -> int | None:
        """The source's transaction id."""
        return self._int("xid")

    @property
    def model(self) -> Any:
        """The payload as an object of the type's pydantic model; None where the configuration's `events` has none."""
        return None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Event) and self.row == other.row and self._headers == other._headers
        )

    def __hash__(self) -> int:
        return hash(self.row)

    def __repr__(self) -> str:
        # Without the payload: logs and tracebacks may show it.
        return f"Event(id={self.text('id')}, event_type={self.text('event_type')!r}, c_offset={self.text('c_offset')})"


class TypedEvent(Event):
    """An event in the current version of its type."""

    __slots__ = ("_model",)

    def __init__(self, row: Row, model: Any, headers: Headers | None = None) -> None:
        super().__init__(row, headers)
        self._model = model

    @property
    def model(self) -> Any:
        """The payload as an object of the type's pydantic model; None where the configuration's `events` has none."""
        return self._model


class Tuples(Protocol):
    """The undecoded rows of a transaction, in order: in memory, or in a spool file."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class Decoder(Protocol):
    """Decodes the rows of one table layout."""

    def event(self, data: bytes, commit_fields: Row) -> Event:
        """Decode one row."""


class Events:
    """The events of a transaction, in order.

    Each iteration decodes them: unread events cost nothing, and a large transaction is never in memory as a whole.
    """

    __slots__ = ("commit", "decoder", "tuples")

    def __init__(self, tuples: Tuples, decoder: Decoder, commit: Commit) -> None:
        self.tuples = tuples
        self.decoder = decoder
        self.commit = commit

    def __len__(self) -> int:
        return len(self.tuples)

    def __iter__(self) -> Iterator[Event]:
        fields = self.commit.fields
        for row in self.tuples:
            yield self.decoder.event(row, fields)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A business transaction for a handler: the events that are routed to the handler, in order.

    `attempt` is 1 for the first attempt, and one more after each that failed and counted.
    """

    transaction_id: str | None
    commit: Commit
    events: Events
    attempt: int = 1

    def __len__(self) -> int:
        return len(self.events)
