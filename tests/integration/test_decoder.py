"""Every value that PostgreSQL can hold in the outbox comes out of the WAL as PostgreSQL prints it."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import chain, islice
from typing import Any, LiteralString, Self

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.conninfo import make_conninfo

from relay.config.settings import Settings
from relay.model.events import FIELDS, Event, Lsn
from relay.model.transactions import Transactions, Undecoded
from relay.model.tuples import RowDecoder
from relay.source.decode.assembler import Assembler
from relay.source.given import encode
from relay.source.stream.receiver import Receiver
from relay.source.stream.slot import ensure_publication, ensure_slot
from relay.store.connections import connect
from tests.outbox import initialise
from tests.postgres import Server

UNLIMITED = 1 << 40
OUTBOX = "public.outbox_message_t"
HOST = uuid.UUID(int=1, version=4)

Printed = dict[str, str | None]
"""The fields of one event as text."""


class Decoded:
    """A database with an outbox and a slot, read as relay's receiver reads it."""

    def __init__(self, dsn: str, table: str = OUTBOX, columns: Mapping[str, str] = {}) -> None:
        self.name = f"decoder_{uuid.uuid4().hex}"
        self.settings = Settings.model_validate(
            {
                "source": {
                    "dsn": dsn,
                    "table": table,
                    "columns": dict(columns),
                    "slot": self.name,
                    "publication": self.name,
                }
            }
        )
        self.mapping = self.settings.source.mapping
        self.table = sql.Identifier(*self.settings.source.table_name)
        # The session that decodes is set up as relay's replication connection is.
        self.conn = connect(dsn)
        self.conn.execute("set search_path to default")
        self.assembler = Assembler(self.settings.source.table_name, self.mapping, UNLIMITED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.conn.close()

    def listen(self) -> Self:
        """Create publication and slot for a table that the test has made."""
        ensure_publication(self.conn, self.settings.source)
        ensure_slot(self.conn, self.name)
        return self

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with self.conn.transaction():
            for statement in statements:
                self.conn.execute(statement.encode())

    def messages(self) -> list[tuple[str, int, bytes]]:
        """What the slot has to say: position, transaction and message. Reading consumes."""
        return self.conn.execute(
            "select lsn::text, xid::text::bigint, data from pg_logical_slot_get_binary_changes("
            "%s, null, null, 'proto_version', '1', 'publication_names', %s)",
            (self.name, self.name),
        ).fetchall()

    def commits(self) -> list[Transactions]:
        """The commits with events since the last call; each call sends the table's description again."""
        self.assembler.reset()
        self.assembler.feed([data for _, _, data in self.messages()])
        assert not self.assembler.open
        return self.assembler.fetch()

    def events(self) -> list[Event]:
        """The events since the last reading."""
        return [
            event
            for received in self.commits()
            for transaction in received
            for event in self.decode(transaction)
        ]

    def decode(self, transaction: Undecoded) -> list[Event]:
        decoder = RowDecoder(transaction.columns, self.mapping)
        return [decoder.event(row, transaction.commit.fields) for row in transaction.tuples]

    def relayed(self) -> list[Printed]:
        """The events since the last reading, as their fields."""
        return [{name: event.text(name) for name in FIELDS} for event in self.events()]

    def printed(self, order: str = "ctid") -> list[Printed]:
        """The rows of the outbox as PostgreSQL prints them; a field without a column is null."""
        there = self.conn.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped",
            (self.table.as_string(self.conn),),
        ).fetchall()
        columns = {name for (name,) in there}
        fields = [
            sql.SQL("{}::text").format(sql.Identifier(self.mapping[name]))
            if self.mapping[name] in columns
            else sql.SQL("null")
            for name in FIELDS
        ]
        query = sql.SQL("select {} from {} order by {}").format(
            sql.SQL(", ").join(fields),
            self.table,
            sql.SQL(order),
        )
        return [dict(zip(FIELDS, row, strict=True)) for row in self.conn.execute(query)]


@pytest.fixture
def outbox(server: Server, installed: str) -> Iterator[Decoded]:
    """Relay's own outbox, as `relay init` makes it."""
    name = f"decoded_{uuid.uuid4().hex}"
    with Decoded(server.create_database(name, template=installed)) as made:
        yield made.listen()
    server.drop_database(name)


@pytest.fixture
def foreign(database: str) -> Iterator[Callable[..., Decoded]]:
    """Makes an outbox of the test's own: `foreign(ddl, table, columns)`."""
    opened: list[Decoded] = []

    def make(ddl: str, table: str, columns: Mapping[str, str]) -> Decoded:
        made = Decoded(database, table, columns)
        opened.append(made)
        made.execute(ddl)
        return made.listen()

    yield make
    for made in opened:
        made.conn.close()


# Values.

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
AWKWARD = st.text("\\'\"%$\t\n\r\b\x01\x7f\x85\u2028é\N{GRINNING FACE}N{},;tu0", max_size=20)
BIGINT = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), -1, 0, 2**63 - 1])
INT = st.integers(-(2**31), 2**31 - 1)

# Between the first and the last time that PostgreSQL has, in microseconds since 2000.
FIRST, LAST = -211_813_488_000_000_000, 9_223_371_331_199_999_999
TIMESTAMP = st.one_of(
    st.sampled_from(["infinity", "-infinity"]),
    st.sampled_from([FIRST, LAST, 0, -1, 1, 500_000]),
    st.integers(FIRST, LAST),
    st.integers(-(10**15), 10**15),
)
JSON_NUMBER = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:f}"),
    st.sampled_from(["-0", "0.10", "1e400", "-1E-400", "1e+5", "9" * 5000, f"0.{'3' * 5000}"]),
)


@st.composite
def json_string(draw: st.DrawFn) -> str:
    """A string with some characters escaped that need not be, as jsonb takes them."""
    text = draw(TEXT | AWKWARD)
    return json.dumps(text, ensure_ascii=draw(st.booleans()))


def json_array(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def json_object(members: Sequence[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in members) + "}"


JSON = st.recursive(
    st.sampled_from(["null", "true", "false", "[]", "{}", '""']) | JSON_NUMBER | json_string(),
    lambda inner: (
        st.lists(inner, max_size=4).map(json_array)
        | st.lists(st.tuples(json_string(), inner), max_size=4).map(json_object)
    ),
    max_leaves=8,
)

ROW = st.fixed_dictionaries(
    {
        "id": st.uuids(),
        "host_id": st.uuids(),
        "user_id": st.none() | st.uuids(),
        "aggregate_id": st.none() | TEXT | AWKWARD,
        "aggregate_version": st.none() | BIGINT,
        "aggregate_type": st.none() | TEXT | AWKWARD,
        "event_type": TEXT | AWKWARD,
        "event_ts": TIMESTAMP,
        "payload": JSON,
        "metadata": st.none() | JSON,
        "transaction_id": st.none() | st.uuids(),
        "transaction_ordinal": st.none() | INT,
        "transaction_count": st.none() | INT,
    }
)
INSERT = """
    insert into outbox_message_t (
        id, host_id, user_id, aggregate_id, aggregate_version, aggregate_type, event_type, event_ts, payload,
        metadata, c_offset, transaction_id, transaction_ordinal, transaction_count)
    values (
        %(id)s, %(host_id)s, %(user_id)s, %(aggregate_id)s, %(aggregate_version)s, %(aggregate_type)s,
        %(event_type)s,
        case when %(finite)s then (timestamp '2000-01-01' + %(event_ts)s::interval) at time zone 'UTC'
             else %(infinite)s::timestamptz end,
        %(payload)s, %(metadata)s, %(c_offset)s, %(transaction_id)s, %(transaction_ordinal)s, %(transaction_count)s)
"""


def interval_of(microseconds: int) -> str:
    """As text that no version finds out of range: until 14, a number without a point has 32 bits."""
    days, rest = divmod(microseconds, 86_400_000_000)
    return f"{days} days {rest // 1_000_000}.{rest % 1_000_000:06} seconds"


def insert(conn: psycopg.Connection[Any], row: Mapping[str, Any], c_offset: int | None) -> None:
    """Insert a generated row. Without an offset, the trigger gives one."""
    time = row["event_ts"]
    finite = isinstance(time, int)
    conn.execute(
        INSERT,
        {
            **row,
            "c_offset": c_offset,
            "finite": finite,
            "event_ts": interval_of(time) if finite else "0",
            "infinite": "infinity" if finite else time,
        },
    )


def test_events_of_dictionaries_are_the_rows_that_the_stream_brings(outbox: Decoded) -> None:
    """Those of relay.testing, and their business transactions."""
    moment = datetime(2026, 11, 26, 13, 30, 0, 120_000, timezone(timedelta(hours=1)))
    every = {
        "id": uuid.UUID(int=1),
        "host_id": uuid.UUID(int=2),
        "user_id": uuid.UUID(int=3),
        "aggregate_id": "a\tb\\",
        "aggregate_version": -7,
        "aggregate_type": "Order",
        "event_type": "order.é",
        "event_ts": moment,
        "payload": {
            "ccc": {"ü": 1, "b": 2, "zz": 3, "a": 4},
            "a": [1.50, -12, None, True, 1e20, 1.5e-7, -0.0, 123456789.0123, 10**30, 5e-324],
            "bb": "ü\n\u2028\x01",
        },
        "metadata": [],
        "c_offset": 11,
        "transaction_id": uuid.UUID(int=4),
        "transaction_ordinal": 1,
        "transaction_count": 2,
        "deliver_at": "2027-01-01T00:00:00+02:00",
    }
    least = {**dict.fromkeys(FIELDS), "id": uuid.UUID(int=5), "c_offset": 12, "payload": "x"}
    least |= {"host_id": uuid.UUID(int=2), "event_type": "", "event_ts": moment}
    given = [every, least, {**every, "id": uuid.UUID(int=6), "c_offset": 13}]
    statement = sql.SQL("insert into outbox_message_t ({}) values ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, FIELDS)),
        sql.SQL(", ").join(map(sql.Placeholder, FIELDS)),
    )
    documents = ("payload", "metadata")
    with outbox.conn.transaction():
        for each in given:
            texts = {name: json.dumps(each[name]) for name in documents if each[name] is not None}
            outbox.conn.execute(statement, {**each, **texts})
    (streamed,) = outbox.commits()
    encoded = encode(given, outbox.settings.source)
    assert [len(each.tuples) for each in encoded] == [len(each.tuples) for each in streamed]
    assert [each.hosts for each in encoded] == [each.hosts for each in streamed]
    assert [each.transaction_id for each in encoded] == [each.transaction_id for each in streamed]
    assert [each.first_offset for each in encoded] == [each.first_offset for each in streamed]
    for own, other in zip(encoded, streamed, strict=True):
        for event, like in zip(outbox.decode(own), outbox.decode(other), strict=True):
            assert [event.text(name) for name in FIELDS] == [like.text(name) for name in FIELDS]


DOCUMENT = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | AWKWARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | AWKWARD, inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=DOCUMENT.filter(lambda each: each is not None))
def test_a_given_document_is_printed_as_jsonb_is(outbox: Decoded, document: Any) -> None:
    (own,) = encode([{"payload": document}], outbox.settings.source)
    (event,) = outbox.decode(own)
    printed = outbox.conn.execute("select %s::jsonb::text", (json.dumps(document),)).fetchone()
    assert (event.text("payload"),) == printed


def in_order(rows: Sequence[Printed]) -> list[Printed]:
    return sorted(rows, key=lambda row: str(row["id"]))


NESTED = "[" * 5000 + "]" * 5000
PLAIN: dict[str, Any] = {
    **dict.fromkeys(FIELDS),
    "id": HOST,
    "host_id": HOST,
    "event_type": "",
    "event_ts": 0,
    "payload": "{}",
}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=st.lists(ROW, min_size=1, max_size=6, unique_by=lambda row: row["id"]), data=st.data())
def test_every_value_comes_out_as_postgresql_prints_it(
    outbox: Decoded, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    offsets = st.lists(
        BIGINT | st.none(),
        min_size=len(rows),
        max_size=len(rows),
        unique_by=lambda n: n or object(),
    )
    given_offsets = data.draw(st.just([None] * len(rows)) | offsets)
    outbox.execute(
        "alter table outbox_message_t drop constraint if exists outbox_message_t_c_offset_key"
    )
    with outbox.conn.transaction():
        for row, c_offset in zip(rows, given_offsets, strict=True):
            insert(outbox.conn, row, c_offset)
    printed = outbox.printed()
    outbox.execute("delete from outbox_message_t")
    assert in_order(outbox.relayed()) == in_order(printed)


EDGES: dict[str, dict[str, Any]] = {
    "deep": {"payload": NESTED},
    "escapes": {
        "payload": json_object(
            [('"a"', "1"), ('"a"', "2"), ('"b"', '"\\u00e9\\ud83d\\ude00\\u0001"')]
        )
    },
    "huge": {"payload": "9" * 100_000, "metadata": "1e-16000"},
    "nulls": {"payload": "null", "metadata": "null", "aggregate_id": "null"},
    "copy": {"aggregate_id": "\\N", "aggregate_type": "\\.", "event_type": "\\x00"},
    "first time": {"event_ts": FIRST},
    "last time": {"event_ts": LAST},
    "integers": {
        "aggregate_version": -(2**63),
        "transaction_ordinal": -(2**31),
        "transaction_count": 2**31 - 1,
    },
    "long": {"event_type": "x" * 3_000_000},
}


def test_what_lies_at_the_edge_comes_out_as_postgresql_prints_it(
    outbox: Decoded, subtests: pytest.Subtests
) -> None:
    for name, row in EDGES.items():
        with subtests.test(name):
            outbox.execute("delete from outbox_message_t")
            insert(outbox.conn, PLAIN | row, None)
            printed = outbox.printed()
            assert outbox.relayed() == printed
            assert len(printed) == 1


def test_the_form_does_not_depend_on_the_settings_of_database_and_role(
    outbox: Decoded, server: Server
) -> None:
    insert(outbox.conn, PLAIN | {"event_ts": 123_456, "payload": "[0.1, 1e20]"}, None)
    expected = outbox.printed()
    assert expected[0]["event_ts"] == "2000-01-01 00:00:00.123456+00"
    name = outbox.conn.info.dbname
    for setting in (
        "datestyle = 'German'",
        "timezone = 'America/St_Johns'",
        "extra_float_digits = -5",
    ):
        outbox.execute(f'alter database "{name}" set {setting}')
    with Decoded(outbox.settings.source_dsn.conninfo()) as again:
        again.name = outbox.name
        assert again.relayed() == expected
    # Without relay's options the same session would print otherwise.
    with psycopg.connect(outbox.settings.source_dsn.conninfo()) as bare:
        assert bare.execute("select event_ts::text from outbox_message_t").fetchone() == (
            "31.12.1999 20:30:00.123456 NST",
        )


def test_a_large_payload_that_is_stored_out_of_line_comes_out_whole(outbox: Decoded) -> None:
    noise = random.Random(1).randbytes(1 << 20).hex()
    insert(
        outbox.conn, PLAIN | {"payload": json.dumps({"noise": noise}), "aggregate_id": noise}, None
    )
    stored = outbox.conn.execute(
        "select pg_relation_size(reltoastrelid) > 1 << 20 from pg_class where relname = 'outbox_message_t'"
    ).fetchone()
    assert stored == (True,)
    printed = outbox.printed()
    (event,) = outbox.events()
    assert {name: event.text(name) for name in FIELDS} == printed[0]
    assert event.payload == {"noise": noise}


def test_events_carry_the_commit_as_postgresql_tells_it(outbox: Decoded) -> None:
    outbox.conn.execute(
        "select relay.publish(%s, null, %s)",
        (HOST, '[{"event_type": "e", "aggregate_type": "a", "aggregate_id": "1", "payload": {}}]'),
    )
    row = outbox.conn.execute("select xmin::text, now() from outbox_message_t").fetchone()
    assert row is not None
    messages = outbox.messages()
    outbox.assembler.feed([data for _, _, data in messages])
    (commit,) = outbox.assembler.fetch()
    (event,) = outbox.decode(commit[0])
    assert event.text("xid") == row[0]
    assert event.commit_ts is not None
    assert 0 <= (row[1] - event.commit_ts).total_seconds() < 60
    # For a commit the slot's own function tells where its record ends.
    assert str(commit[0].commit.end_lsn) == messages[-1][0]
    assert event.commit_lsn is not None
    assert Lsn(0) < event.commit_lsn < commit[0].commit.end_lsn


def test_the_time_of_a_commit_is_printed_as_any_other(outbox: Decoded) -> None:
    outbox.execute(simple(1))
    (event,) = outbox.events()
    printed = outbox.conn.execute(
        "select %s::timestamptz::text", (event.text("commit_ts"),)
    ).fetchone()
    assert printed == (event.text("commit_ts"),)


# The table changes.


def simple(number: int, **cells: str) -> str:
    """An insert of a row with a recognisable id."""
    cells = {"event_type": "e", "payload": "{}"} | cells
    names = "".join(f", {name}" for name in cells)
    texts = "".join(f", '{value}'" for value in cells.values())
    return (
        f"insert into outbox_message_t (id, host_id{names}) "
        f"values ('00000000-0000-4000-8000-{number:012}', '{HOST}'{texts})"
    )


ALTERATIONS = {
    "column added": "alter table outbox_message_t add column note text default 'n'",
    "column dropped": "alter table outbox_message_t drop column metadata",
    "first column dropped": "alter table outbox_message_t drop column id",
    "column renamed": "alter table outbox_message_t rename column aggregate_id to something",
    "type changed": "alter table outbox_message_t alter column aggregate_version type text",
    "column dropped and added again": (
        "alter table outbox_message_t drop column user_id, add column user_id uuid default gen_random_uuid()"
    ),
}


@pytest.mark.parametrize("alteration", ALTERATIONS.values(), ids=ALTERATIONS)
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
def test_the_table_may_be_altered_between_transactions_and_inside(
    outbox: Decoded, alteration: str, inside: bool
) -> None:
    """Each event comes out as its row was printed when it was written."""
    transaction_id = str(uuid.uuid4())
    written: list[Printed] = []

    def write(number: int) -> None:
        event_type = f"e{number}"
        cells = {
            "event_type": event_type,
            "aggregate_version": "7",
            "transaction_id": transaction_id,
            "transaction_ordinal": str(number),
        }
        if alteration != ALTERATIONS["first column dropped"] or number < 3:
            outbox.conn.execute(simple(number, **cells).encode())
        else:
            names, texts = ", ".join(cells), ", ".join(f"'{value}'" for value in cells.values())
            outbox.conn.execute(
                f"insert into outbox_message_t (host_id, payload, {names}) "
                f"values ('{HOST}', '{{}}', {texts})".encode()
            )
        written.extend(row for row in outbox.printed() if row["event_type"] == event_type)

    def all_of_it() -> None:
        write(1)
        write(2)
        outbox.execute(alteration)
        write(3)
        write(4)

    if inside:
        with outbox.conn.transaction():
            all_of_it()
    else:
        all_of_it()
    assert outbox.relayed() == written
    assert len(written) == 4


def test_a_field_s_column_may_appear_in_the_midst_of_a_transaction(
    foreign: Callable[..., Decoded],
) -> None:
    """An outbox that had no metadata until a migration which publishes events of its own."""
    made = foreign(
        "create table outbox_message_t (id int primary key, host_id int, event_type text, payload jsonb)",
        OUTBOX,
        {},
    )
    made.execute(
        "insert into outbox_message_t values (1, 1, 'e', '{}')",
        "alter table outbox_message_t add column metadata jsonb",
        "insert into outbox_message_t values (2, 1, 'e', '{}', '[2]')",
    )
    assert [(row["id"], row["metadata"]) for row in made.relayed()] == [("1", None), ("2", "[2]")]


def test_columns_in_another_order_under_other_names(foreign: Callable[..., Decoded]) -> None:
    columns = {
        "id": "event_id",
        "host_id": "tenant",
        "payload": "body",
        "event_type": "Kind Of",
        "c_offset": "position",
    }
    made = foreign(
        """
        create schema shop;
        create table shop."Events" (
            body json, dropped int, "Kind Of" varchar(10), unused point, position bigserial,
            tenant text not null, event_id bigint primary key, transaction_id text, id int);
        alter table shop."Events" drop column dropped;
        """,
        "shop.Events",
        columns,
    )
    made.execute(
        """
        insert into shop."Events" (body, "Kind Of", tenant, event_id, transaction_id, id, unused) values
            ('{"a":  1,"a" :2}', 'k 1', 'Zoë', 10, 't', -1, '(1,2)'), (null, null, '', 11, 't', null, null),
            ('"\\ud800"', 'k', 'x', 12, null, 5, null)
        """
    )
    printed = made.printed("position")
    assert made.relayed() == printed
    assert printed[0]["payload"] == '{"a":  1,"a" :2}'
    assert [row["id"] for row in printed] == ["10", "11", "12"]


def test_partitions_with_columns_in_another_order(foreign: Callable[..., Decoded]) -> None:
    made = foreign(
        """
        create table outbox_message_t (id int, host_id int, event_type text, payload jsonb)
            partition by range (id);
        create table first_part partition of outbox_message_t for values from (0) to (10);
        create table second_part (payload jsonb, gone int, event_type text, host_id int, id int);
        alter table second_part drop column gone;
        alter table outbox_message_t attach partition second_part for values from (10) to (20);
        """,
        OUTBOX,
        {},
    )
    made.execute(
        "insert into outbox_message_t values (1, 2, 'a', '[1]'), (11, 2, 'b', '[2]')",
        "insert into second_part (id, host_id, event_type, payload) values (12, 3, 'c', '[3]')",
    )
    assert in_order(made.relayed()) == in_order(made.printed("id"))


def test_only_inserts_that_are_committed_into_the_outbox_come_out(outbox: Decoded) -> None:
    outbox.execute("create table other (id int)", "insert into other values (1)")
    outbox.execute(simple(1), "insert into other values (2)")
    outbox.execute("update outbox_message_t set event_type = 'changed'")
    with outbox.conn.transaction(force_rollback=True):
        outbox.conn.execute(simple(2).encode())
    with outbox.conn.transaction():
        outbox.conn.execute(simple(3).encode())
        with outbox.conn.transaction(force_rollback=True):
            outbox.conn.execute(simple(4).encode())
    outbox.execute("delete from outbox_message_t")
    outbox.execute("truncate outbox_message_t")
    ids = [str(row["id"])[-1] for row in outbox.relayed()]
    assert ids == ["1", "3"]


def test_a_commit_without_events_is_a_position(outbox: Decoded) -> None:
    outbox.execute(simple(1))
    outbox.events()
    outbox.execute("update outbox_message_t set event_type = 'changed'")
    # PostgreSQL 15 and later leave out transactions that are empty to the publication.
    outbox.assembler.feed([data for _, _, data in outbox.messages()])
    assert outbox.assembler.fetch() == []


# Encodings.


@pytest.fixture
def encoded(server: Server) -> Iterator[Callable[[LiteralString], str]]:
    """Makes databases of another encoding."""
    made: list[str] = []

    def make(encoding: LiteralString) -> str:
        made.append(f"decoder_{encoding.lower()}_{uuid.uuid4().hex[:8]}")
        return server.create_encoded_database(made[-1], encoding)

    yield make
    for name in made:
        server.drop_database(name)


def test_a_latin1_database_is_read_as_unicode(encoded: Callable[[LiteralString], str]) -> None:
    latin1 = "".join(map(chr, range(1, 256)))
    with Decoded(encoded("LATIN1")) as outbox:
        initialise(outbox.settings)
        insert(
            outbox.conn,
            PLAIN
            | {"event_type": latin1, "payload": json.dumps({latin1: latin1}, ensure_ascii=False)},
            None,
        )
        printed = outbox.printed()
        (event,) = outbox.events()
    assert {name: event.text(name) for name in FIELDS} == printed[0]
    assert event.event_type == latin1
    assert event.payload == {latin1: latin1}


def test_bytes_without_an_encoding_survive(encoded: Callable[[LiteralString], str]) -> None:
    """A SQL_ASCII database stores whatever bytes it is given, and one bad byte must not stop the stream."""
    dsn = encoded("SQL_ASCII")
    with Decoded(dsn) as outbox:
        outbox.execute(
            "create table outbox_message_t (id int primary key, host_id text, event_type text, payload jsonb, "
            "transaction_id text)"
        )
        outbox.listen()
        with psycopg.connect(
            make_conninfo(dsn, client_encoding="SQL_ASCII"), autocommit=True
        ) as writer:
            writer.execute(
                b"insert into outbox_message_t values (1, E'h\\xff', E'caf\\xe9', '{}', E't\\xfe')"
            )
            writer.execute(
                "insert into outbox_message_t values (2, 'h', 'café', '{}', 't')".encode()
            )
        source = Receiver(outbox.settings)
        source.start()
        try:
            taken = iter(lambda: source.take(10), None)
            transactions = list(islice(chain.from_iterable(b.transactions for b in taken), 2))
        finally:
            source.close()
        events = [event for each in transactions for event in outbox.decode(each)]
    assert [event.event_type for event in events] == [r"caf\xe9", "café"]
    assert [each.hosts for each in transactions] == [(r"h\xff",), ("h",)]
    assert [each.transaction_id for each in transactions] == [r"t\xfe", "t"]
