"""Reads dead transactions of `relay.dead_letters`: selects, lists, counts, shows and exports them.

The view has the events that could not be brought to the target or to a sink, and the dead messages of work queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString, TypeVar

from psycopg import sql
from psycopg.rows import class_row, dict_row, scalar_row
from pydantic import Field

from relay.store import states
from relay.store.actions import Acted
from relay.store.dead_letters import DeadLetterRow, of_queue, queue_of
from relay.store.filters import Filter, Moment, Text
from relay.store.states import DeadStatus

if TYPE_CHECKING:
    # The module imports the connection pool, which `relay --help` does not need.
    from relay.store.connections import Connection


_CHUNK = 1_000
"""How many dead transactions are fetched at once."""
SHOWN_CHARACTERS = 16_000
"""How much of a payload and of an exception a page of events has, in characters."""
_LINE_CHARACTERS = 300
_KIND = sql.SQL("split_part(split_part(d.exception, chr(10), 1), ':', 1)")
"""An SQL expression: the kind of fault of a dead letter `d`."""


class DeadLetterSelection(Filter):
    """A filter for dead transactions: it selects those with an event that meets every condition.

    `ids` are those of a queue's messages with its `sink`, else of the target and sinks.
    """

    ids: Sequence[int] = Field(
        [],
        description="Ids of dead letters; selects their whole transactions. Those of a queue need its `sink`.",
    )
    transaction: Text | None = Field(None, description="Its transaction_id.")
    host: Text | None = Field(None, description="Its host_id.")
    sink: Text | None = Field(
        None,
        description="The sink to which it belongs; '' for the target, queue:NAME for a work queue.",
    )
    handler: Text | None = Field(None, description="The handler that failed.")
    kind: Text | None = Field(
        None, description="The kind of fault, as the exception begins: CheckViolation [23514]."
    )
    event_type: Text | None = Field(None, description="Its event_type.")
    since: Moment | None = Field(None, description="Dead-lettered at this time (UTC) or later.")
    until: Moment | None = Field(None, description="Dead-lettered before this time (UTC).")
    exception: Text | None = Field(None, description="A part of the exception.")
    endpoint: Text | None = Field(
        None, description="The one of a sink's endpoints that it was for."
    )
    status: DeadStatus | None = Field(None, description=f"{states.listed(states.DEAD)}.")

    @property
    def queue(self) -> str | None:
        """The work queue that it is limited to; None if it is not."""
        return None if self.sink is None else queue_of(self.sink)

    def where(self) -> tuple[sql.Composable, dict[str, Any]]:
        """Return the condition on a dead letter `d`, and its parameters."""
        of_any_queue: LiteralString = "" if self.queue is not None else " and d.queue_id is null"
        queue = "d.queue_id = (select q.id from relay.queues as q where q.name = %(queue)s)"
        tests: dict[str, tuple[LiteralString, Any]] = {
            "ids": (f"d.id = any(%(ids)s){of_any_queue}", list(self.ids) or None),
            "transaction": ("d.transaction_id = %(transaction)s", self.transaction),
            "host": ("d.host_id = %(host)s", self.host),
            "handler": ("d.handler = %(handler)s", self.handler),
            "event_type": ("d.event_type = %(event_type)s", self.event_type),
            "since": ("d.created_dt >= %(since)s", self.since),
            "until": ("d.created_dt < %(until)s", self.until),
            "exception": ("strpos(d.exception, %(exception)s) > 0", self.exception),
            "status": ("d.status = %(status)s", self.status),
            "sink": (f"d.consumer = %(sink)s{of_any_queue}", self.sink),
            "queue": (queue, self.queue),
            "kind": ("{kind} = %(kind)s", self.kind),
            "endpoint": ("d.endpoint = %(endpoint)s", self.endpoint),
        }
        given = {name: test for name, test in tests.items() if test[1] is not None}
        conditions = [sql.SQL(condition).format(kind=_KIND) for condition, _ in given.values()]
        return (
            sql.SQL(" and ").join([sql.SQL("d.group_id = %(group)s"), *conditions]),
            {name: value for name, (_, value) in given.items()},
        )


def one(dead_letter_id: int, queue: str | None = None) -> DeadLetterSelection:
    """Select one dead letter of the target or of a sink, or with a queue one of it."""
    return DeadLetterSelection(
        ids=(dead_letter_id,), sink=None if queue is None else of_queue(queue)
    )


@dataclass(frozen=True, slots=True)
class DeadTransaction:
    """A dead business transaction, or message of a work queue, in a list.

    `number` is its key, `id` the dead letter of its first event, or that of the message in its queue. `fault` is the
    first line of the exception. `sink` is empty if it could not be applied to the target, `queue:NAME` for a queue.
    """

    number: int
    id: int
    transaction_id: str | None
    host_id: str | None
    events: int
    event_type: str | None
    sink: str
    handler: str | None
    fault: str
    status: str
    attempts: int
    since: datetime
    endpoint: str | None

    @property
    def queue(self) -> str | None:
        """The work queue whose message it is; None for the target and sinks."""
        return queue_of(self.sink)

    @property
    def name(self) -> str:
        """Its id as `relay dlq --id` takes it: with the queue, if it is of one."""
        return str(self.id) if self.queue is None else f"{self.queue}/{self.id}"


@dataclass(frozen=True, slots=True)
class WholeDeadTransaction(DeadTransaction):
    """The same with its whole exception, the dead letters of all its events, and the id of the first.

    `key` is what ordered a message in its queue.
    """

    exception: str
    letters: list[int]
    event_id: str | None
    key: str | None


Row = TypeVar("Row", bound=DeadTransaction)


@dataclass(frozen=True, slots=True)
class FoundDeadLetters:
    """The dead transactions that a filter selected at a moment, without those that are dead-lettered later.

    `messages` of them are messages of work queues, which have one event each. `last` is the greatest number.
    """

    wanted: DeadLetterSelection
    statuses: Sequence[str]
    last: int
    transactions: int
    events: int
    messages: int


@dataclass(frozen=True, slots=True)
class FoundTransaction:
    """A found transaction: its number, how many events it has, and the size of their payloads and metadata in bytes.

    A replay delivers it to `sink`. '' is the target, and the sinks too if it is `undelivered`. `message` is the id of a
    message of a queue, whose name `sink` has; None of the target and sinks. Of several endpoints of a sink, a replay
    goes to `endpoint` alone.
    """

    number: int
    events: int
    size: int
    sink: str
    undelivered: bool
    message: int | None
    endpoint: str | None


def listed(
    conn: Connection,
    group: str,
    wanted: DeadLetterSelection,
    limit: int,
    kind: type[Row],
    statuses: Sequence[str] | None = None,
    before: int | None = None,
) -> list[Row]:
    """List dead transactions with an event that the filter selects, newest first, from before the number `before`.

    `kind` is what is read of each; they have any status where `statuses` is None. The cost does not depend on how many
    dead letters exist.
    """
    where, parameters = wanted.where()
    whole = sql.SQL(
        ", min(d.exception) as exception, array_agg(d.id order by d.id) as letters,"
        " (array_agg(d.event_id order by d.id))[1] as event_id, min(d.key) as key"
    )
    with conn.cursor(row_factory=class_row(kind)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                with page as materialized (
                    select distinct d.dead_transaction from relay.dead_letters d
                     where {where} and (%(before)s::bigint is null or d.dead_transaction < %(before)s)
                       and (%(statuses)s::text[] is null or d.status = any(%(statuses)s))
                     order by d.dead_transaction desc limit %(limit)s)
                select d.dead_transaction as number, min(d.id) as id, min(d.transaction_id) as transaction_id,
                       min(d.host_id) as host_id, count(*)::int as events,
                       (array_agg(d.event_type order by d.id))[1] as event_type, min(d.consumer) as sink,
                       min(d.handler) as handler, min(left(split_part(d.exception, chr(10), 1), {line})) as fault,
                       min(d.status) as status, max(d.attempts) as attempts, min(d.created_dt) as since,
                       min(d.endpoint) as endpoint{whole}
                  from page join relay.dead_letters d using (dead_transaction)
                 group by d.dead_transaction order by d.dead_transaction desc
                """
            ).format(
                where=where,
                line=_LINE_CHARACTERS,
                whole=whole if issubclass(kind, WholeDeadTransaction) else sql.SQL(""),
            ),
            {
                **parameters,
                "group": group,
                "before": before,
                "limit": limit,
                "statuses": None if statuses is None else list(statuses),
            },
        ).fetchall()


def find(
    conn: Connection, group: str, wanted: DeadLetterSelection, statuses: Sequence[str]
) -> FoundDeadLetters:
    """Count the dead transactions of some statuses that a filter selects."""
    where, parameters = wanted.where()
    counts = conn.execute(
        sql.SQL(
            """
            select coalesce(max(d.dead_transaction), 0), count(distinct d.dead_transaction), count(*), count(d.queue_id)
              from relay.dead_letters d
             where d.status = any(%(statuses)s) and d.dead_transaction in (
                   select d.dead_transaction from relay.dead_letters d where {where})
            """
        ).format(where=where),
        {**parameters, "group": group, "statuses": list(statuses)},
    ).fetchall()[0]
    return FoundDeadLetters(wanted, tuple(statuses), *counts)


def numbers(conn: Connection, group: str, found: FoundDeadLetters) -> Iterator[FoundTransaction]:
    """Yield the found transactions in the order of publishing. Needs an open database transaction."""
    where, parameters = found.wanted.where()
    with conn.cursor("dead_transactions", row_factory=class_row(FoundTransaction)) as cursor:
        cursor.itersize = _CHUNK
        cursor.execute(
            sql.SQL(
                """
                select d.dead_transaction as number, count(*) as events,
                       sum(coalesce(octet_length(d.payload::text), 0) + coalesce(octet_length(d.metadata::text), 0))
                           ::bigint as size,
                       min(d.consumer) as sink, bool_or(d.undelivered) as undelivered,
                       min(d.id) filter (where d.queue_id is not null) as message,
                       min(d.endpoint) as endpoint
                  from relay.dead_letters d
                 where d.status = any(%(statuses)s) and d.dead_transaction in (
                       select d.dead_transaction from relay.dead_letters d
                        where d.dead_transaction <= %(last)s and {where})
                 group by d.dead_transaction
                 order by min(d.c_offset) nulls last, min(d.id), d.dead_transaction
                """
            ).format(where=where),
            {
                **parameters,
                "group": group,
                "statuses": list(found.statuses),
                "last": found.last,
            },
        )
        yield from cursor


def failed_handlers(conn: Connection, group: str, found: FoundDeadLetters) -> dict[str, int]:
    """Count the found transactions by the handler of the target that failed."""
    return _by_name(conn, group, found, sql.SQL("case when d.consumer = '' then d.handler end"))


def sinks(conn: Connection, group: str, found: FoundDeadLetters) -> dict[str, int]:
    """Count the found transactions by the sink that they could not be delivered to."""
    name = sql.SQL("case when d.queue_id is null then nullif(d.consumer, '') end")
    return _by_name(conn, group, found, name)


def _by_name(
    conn: Connection, group: str, found: FoundDeadLetters, name: sql.SQL
) -> dict[str, int]:
    where, parameters = found.wanted.where()
    rows = conn.execute(
        sql.SQL(
            """
            select {name}, count(distinct d.dead_transaction) from relay.dead_letters d
             where {name} is not null and d.status = any(%(statuses)s) and d.dead_transaction <= %(last)s and {where}
             group by 1 order by 1
            """
        ).format(name=name, where=where),
        {
            **parameters,
            "group": group,
            "statuses": list(found.statuses),
            "last": found.last,
        },
    )
    return dict(rows.fetchall())


_PRINTED = (
    *("id", "transaction_id", "host_id", "events", "event_type", "sink", "handler", "exception"),
    *("status", "attempts", "created_dt", "letters", "event_id", "key", "endpoint"),
)


def as_json(item: WholeDeadTransaction) -> dict[str, Any]:
    """Return the entry as JSON values, as `relay dlq list` prints it: times in ISO 8601."""
    values = {**asdict(item), "created_dt": item.since.isoformat()}
    return {name: values[name] for name in _PRINTED}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault of a handler, or of a work queue (`sink` is `queue:NAME`), and how many dead events it has."""

    sink: str
    handler: str | None
    kind: str
    events: int

    @property
    def queue(self) -> str | None:
        """The work queue; None for the target and sinks."""
        return queue_of(self.sink)


@dataclass(frozen=True, slots=True)
class ActedOnDead(Acted):
    """One action on a dead transaction; `letter` is the dead letter of its first event, as in `DeadTransaction`.

    `sink` is None in what a former edition recorded.
    """

    id: int
    sink: str | None
    letter: int | None
    transaction_id: str | None

    @property
    def queue(self) -> str | None:
        """The work queue of whose message it was; None for the target and sinks."""
        return queue_of(self.sink or "")


def statuses(conn: Connection, group: str) -> dict[str, int]:
    """Count the events of the group by status."""
    return dict(
        conn.execute(
            "select status, count(*) from relay.dead_letters where group_id = %s group by status",
            (group,),
        ).fetchall()
    )


def kinds(conn: Connection, group: str, limit: int) -> list[Kind]:
    """List the commonest kinds of fault of dead events, by handler and queue."""
    with conn.cursor(row_factory=class_row(Kind)) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.consumer as sink, d.handler, {kind} as kind, count(*) as events
                  from relay.dead_letters d
                 where d.group_id = %s and d.status = 'dead' group by 1, 2, 3 order by 4 desc, 1, 2, 3 limit %s
                """
            ).format(kind=_KIND),
            (group, limit),
        ).fetchall()


def events(conn: Connection, number: int, limit: int, after: int = 0) -> list[dict[str, Any]]:
    """List events of a dead transaction in order, after the dead letter with the id `after`.

    Long values are cut; `payload_bytes` has the whole size.
    """
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(
            sql.SQL(
                """
                select d.id, d.status, d.consumer as sink, d.handler, left(d.exception, {most}) as exception,
                       d.attempts, d.host_id, d.user_id, d.transaction_id, d.transaction_ordinal, d.transaction_count,
                       d.event_id, d.event_type, d.aggregate_type, d.aggregate_id, d.aggregate_version, d.event_ts,
                       d.deliver_at, d.key, d.c_offset, d.commit_lsn::text as commit_lsn, d.created_dt, d.by_reference,
                       {payload} as payload, coalesce(octet_length(d.payload::text), 0) as payload_bytes,
                       {original} as original_payload, {metadata} as metadata,
                       left(d.refused::text, {most}) as refused, d.endpoint
                  from relay.dead_letters d
                 where d.dead_transaction = %s and d.id > %s order by d.id limit %s
                """
            ).format(
                most=SHOWN_CHARACTERS,
                payload=_beginning("payload"),
                original=_beginning("original_payload"),
                metadata=_beginning("metadata"),
            ),
            (number, after, limit),
        ).fetchall()


def _beginning(column: str) -> sql.Composed:
    """The beginning of a JSON value, indented only if it is short: deep nesting would indent to megabytes."""
    return sql.SQL(
        "left(case when length({0}::text) <= {1} then jsonb_pretty({0}) else {0}::text end, {1})"
    ).format(sql.Identifier("d", column), SHOWN_CHARACTERS)


def transaction_of(conn: Connection, group: str, wanted: DeadLetterSelection) -> int | None:
    """Return the number of the dead transaction of a selected dead letter; None if there is none."""
    number: int | None = _of_one(conn, group, wanted, sql.SQL("d.dead_transaction"))
    return number


def payload(conn: Connection, group: str, wanted: DeadLetterSelection) -> str | None:
    """Return the whole payload of a selected dead letter as JSON text; None if there is no such dead letter."""
    text: str | None = _of_one(conn, group, wanted, sql.SQL("coalesce(d.payload::text, 'null')"))
    return text


def _of_one(conn: Connection, group: str, wanted: DeadLetterSelection, value: sql.SQL) -> Any:
    where, parameters = wanted.where()
    query = sql.SQL("select {} from relay.dead_letters d where {} limit 1").format(value, where)
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(query, {**parameters, "group": group}).fetchone()


def acted(conn: Connection, group: str, limit: int, before: int | None = None) -> list[ActedOnDead]:
    """List the last actions on dead transactions, newest first, from before the id `before`."""
    with conn.cursor(row_factory=class_row(ActedOnDead)) as cursor:
        return cursor.execute(
            """
            select id, consumer as sink, letters[1] as letter, transaction_id, action, reason, acted_by, operator,
                   acted_at
              from relay.dead_letter_actions
             where group_id = %(group)s and (%(before)s::bigint is null or id < %(before)s)
             order by id desc limit %(limit)s
            """,
            {"group": group, "limit": limit, "before": before},
        ).fetchall()


_SHOWN = (
    *("id", "group_id", "status", "sink", "endpoint", "handler", "exception", "attempts"),
    *("host_id", "user_id", "transaction_id", "transaction_ordinal", "transaction_count"),
    *("event_id", "event_type", "aggregate_type", "aggregate_id", "aggregate_version", "event_ts"),
    *("deliver_at", "c_offset", "commit_lsn", "payload", "original_payload", "metadata", "headers"),
    *("created_dt", "key", "enqueued_at", "first_taken_at"),
)
"""The columns of a dead letter that are exported and shown."""

_PRETTY_CHARACTERS = 100_000
"""JSON is indented only up to this length: deep nesting would indent to megabytes."""


def exported(conn: Connection, group: str, wanted: DeadLetterSelection) -> Iterator[str]:
    """Yield every event of the dead transactions that a filter selects, each as the text of a JSON object.

    The events come in the order of publishing and are streamed. PostgreSQL writes the JSON, so that numbers keep every
    digit and no nesting is too deep.
    """
    where, parameters = wanted.where()
    # The JSON is made after sorting, so that the sort moves stored values and not their text.
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns}
              from relay.dead_letters d
              join (select d.dead_transaction, min(d.c_offset) as first_offset, min(d.id) as first_id
                      from relay.dead_letters d
                     where d.dead_transaction in (
                           select d.dead_transaction from relay.dead_letters d where {where})
                     group by d.dead_transaction) whole using (dead_transaction)
             order by whole.first_offset nulls last, whole.first_id, d.dead_transaction, d.id) event
        """
    ).format(columns=_columns(), where=where)
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, {**parameters, "group": group})


def events_as_json(conn: Connection, number: int) -> Iterator[str]:
    """Yield every event of a dead transaction as the text of a JSON object, in order."""
    query = sql.SQL(
        """
        select row_to_json(event)::text from (
            select {columns} from relay.dead_letters d where d.dead_transaction = %s order by d.id) event
        """
    ).format(columns=_columns())
    with conn.cursor(row_factory=scalar_row) as cursor:
        yield from cursor.stream(query, (number,))


def events_as_text(conn: Connection, number: int, pretty: bool) -> Iterator[DeadLetterRow]:
    """Yield every event of a dead transaction in order, each field as PostgreSQL prints it; `pretty` indents JSON."""
    columns = [
        _indented(name) if pretty and name in _JSON else sql.SQL("{}::text").format(_column(name))
        for name in (*_SHOWN, "refused")
    ]
    query = sql.SQL(
        "select {} from relay.dead_letters d where d.dead_transaction = %s order by d.id"
    ).format(
        sql.SQL(", ").join(
            sql.SQL("{} as {}").format(column, sql.Identifier(name))
            for column, name in zip(columns, (*_SHOWN, "refused"), strict=True)
        )
    )
    with conn.cursor(row_factory=dict_row) as cursor:
        yield from cursor.stream(query, (number,))


_JSON = ("payload", "original_payload", "metadata", "headers")


def _column(name: str) -> sql.Composed:
    return sql.SQL("d.{}").format(sql.Identifier("consumer" if name == "sink" else name))


def _columns() -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("{} as {}").format(_column(name), sql.Identifier(name)) for name in _SHOWN
    )


def _indented(name: str) -> sql.Composed:
    return sql.SQL(
        "case when length(jsonb_pretty({0})) <= {1} then jsonb_pretty({0}) else {0}::text end"
    ).format(_column(name), sql.Literal(_PRETTY_CHARACTERS))
