"""Named readers of the log in SQL: each event once and in order, whoever advances, and whose they are."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from relay.client import claimed_reader
from relay.retention import reader_positions
from tests.outbox import Outbox
from tests.postgres import Server, start_server
from tests.process import relay

_HOST = uuid.uuid4()
_Connection = psycopg.Connection[Any]


def _publish(conn: _Connection, *numbers: int, event_type: str = "order.placed") -> None:
    events = [
        {
            "event_type": event_type,
            "aggregate_type": "Order",
            "aggregate_id": str(number),
            "payload": {"number": number, "tier": "gold" if number % 2 else "tin"},
        }
        for number in numbers
    ]
    conn.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _read(conn: _Connection, most: int = 1000, reader: str = "r") -> tuple[list[int], str | None]:
    """The numbers of the events that are next, and the position after them."""
    rows = conn.execute(
        "select position, id, payload from relay.read(%s, %s)", (reader, most)
    ).fetchall()
    return [row[2]["number"] for row in rows if row[1]], rows[0][0] if rows else None


def _drain(conn: _Connection, most: int = 1000, reader: str = "r") -> list[int]:
    """Read and advance until nothing is new."""
    found: list[int] = []
    while True:
        with conn.transaction():
            numbers, position = _read(conn, most, reader)
            if position is None:
                return found
            conn.execute("select relay.advance(%s, %s)", (reader, position))
        found += numbers


def _declare(
    conn: _Connection, start: str = "now", match: Mapping[str, object] | None = None
) -> None:
    conn.execute("select relay.declare_reader('r', %s, %s)", (Jsonb(match or {}), start))


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_a_page_is_full(outbox: Outbox, size: int) -> None:
    """Whatever the size of the transactions, as many as fit come at once, as long as there are so many."""
    _declare(outbox.reader)
    transactions = 450 // size + 200
    for number in range(transactions):
        _publish(outbox.publisher, *range(number * size, (number + 1) * size))
    whole = 301 // size * size
    read: list[int] = []
    while len(read) < transactions * size:
        numbers, position = _read(outbox.reader, 301)
        assert len(numbers) == min(whole, transactions * size - len(read))
        outbox.reader.execute("select relay.advance('r', %s)", (position,))
        read += numbers
    assert read == list(range(transactions * size))


def test_a_backlog_is_read_in_order_of_insertion(outbox: Outbox) -> None:
    """A transaction that began first and inserted after all others is read after them, also from a large backlog."""
    _declare(outbox.reader)
    with psycopg.connect(outbox.publisher_dsn) as long:
        long.execute("select pg_current_xact_id()")
        for number in range(600):
            _publish(outbox.publisher, number)
        _publish(long, 1000)
        long.commit()
    assert _drain(outbox.reader, 5) == [*range(600), 1000]


def test_a_prepared_transaction_is_read_after_its_commit() -> None:
    """As one that is open for long, whatever became of its session."""
    with (
        start_server({"max_prepared_transactions": "4"}) as server,
        Outbox(server.create_database("prepared")) as outbox,
    ):
        outbox.install()
        _declare(outbox.reader)
        outbox.conn.execute("begin")
        _publish(outbox.publisher, 1)
        outbox.conn.execute("prepare transaction 'one'")
        _publish(outbox.publisher, 2)
        assert _drain(outbox.reader) == [2]
        number, seen = outbox.conn.execute(
            "select (relay.log_reader('r', relay.this_call())).number, pg_current_snapshot()::text"
        ).fetchall()[0]
        given = (seen, f"{number}/{seen}")
        assert outbox.reader.value(claimed_reader._IS_QUIET, given), "nothing is new"
        outbox.conn.execute("commit prepared 'one'")
        assert outbox.reader.value(claimed_reader._IS_QUIET, given) is None
        assert _drain(outbox.reader) == [1]


def test_an_idle_reader_does_not_look_at_the_log_while_no_transaction_has_ended(
    outbox: Outbox,
) -> None:
    unusable = "no position: whoever looks at the log fails"
    with outbox.reader.transaction():
        # One snapshot, whatever goes on in other databases of the server.
        outbox.reader.execute("set transaction isolation level repeatable read")
        seen = str(outbox.reader.value("select pg_current_snapshot()::text"))
        assert outbox.reader.value(claimed_reader._IS_QUIET, (seen, unusable)) == seen
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        outbox.reader.value(claimed_reader._IS_QUIET, ("1:1:", unusable))


def test_reading_changes_nothing(outbox: Outbox) -> None:
    """Two reads return the same, in a transaction that may not write, and a rollback undoes an advance."""
    _declare(outbox.reader)
    _publish(outbox.publisher, 1, 2)
    with psycopg.connect(outbox.reader_dsn) as conn:
        conn.read_only = True
        first = _read(conn)
        assert _read(conn) == first
        assert first[0] == [1, 2]
        conn.rollback()
        conn.read_only = False
        conn.execute("select relay.advance('r', %s)", (first[1],))
        assert _read(conn) == ([], None)
        conn.rollback()
        assert _read(conn) == first


def test_of_two_that_advance_one_is_refused(outbox: Outbox) -> None:
    """The loser waits for the other one, and its transaction fails."""
    _declare(outbox.reader)
    _publish(outbox.publisher, 1)
    _, position = _read(outbox.reader)
    outbox.reader.execute("select relay.advance('r', %s)", (position,))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another session"):
        outbox.reader.execute("select relay.advance('r', %s)", (position,))
    _publish(outbox.publisher, 2)
    _, position = _read(outbox.reader)
    with (
        psycopg.connect(outbox.reader_dsn) as other,
        psycopg.connect(outbox.reader_dsn) as late,
    ):
        other.execute("select relay.advance('r', %s)", (position,))
        late.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            late.execute("select relay.advance('r', %s)", (position,))
        late.rollback()
        other.rollback()
        late.execute("select relay.advance('r', %s)", (position,))
        late.commit()
    assert _drain(outbox.reader) == []


def test_a_match_skips_events_and_moves_on(outbox: Outbox) -> None:
    """Patterns, values, lists and paths; an only row without id moves the reader past what does not match."""
    _declare(outbox.reader, match={"event_type": ["order.*", "exact"], "payload.tier": "gold"})
    _publish(outbox.publisher, 2, 4)
    numbers, position = _read(outbox.reader)
    assert numbers == []
    assert position is not None
    _publish(outbox.publisher, 1, 2, 3)
    _publish(outbox.publisher, 5, event_type="orders.placed")
    _publish(outbox.publisher, 7, event_type="exact")
    assert _drain(outbox.reader) == [1, 3, 7]
    outbox.reader.execute("""select relay.declare_reader('r', '{"payload.number": [8, 9]}')""")
    _publish(outbox.publisher, 7, 8, 9)
    assert _drain(outbox.reader) == [8, 9]


_PATTERN = st.text(alphabet="ab*?[]!-^\\.x\nÄ ", max_size=8)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(pattern=_PATTERN, value=st.text(alphabet="ab[]!-^\\.x\nÄ ", max_size=5))
@example(pattern="[]a]", value="]")
@example(pattern="[!a]", value="b")
@example(pattern="[]", value="[]")
@example(pattern="[!]", value="[!]")
@example(pattern="[c-a]", value="[c-a]")
@example(pattern="[!c-a]", value="x")
@example(pattern="[!]]", value="a")
@example(pattern="[b-a]", value="a")
@example(pattern="[a", value="[a")
@example(pattern="[^a]", value="^")
@example(pattern="a?", value="a\n")
@example(pattern="[\\d]", value="1")
@example(pattern="[[:alpha:]]", value="a")
@example(pattern="[a.b]", value=".")
@example(pattern="[a--b]", value="-")
def test_a_pattern_means_what_it_means_in_a_route(
    pattern_session: _Connection, pattern: str, value: str
) -> None:
    """As fnmatch in Python has it."""
    statement = "select relay.match_condition(jsonb_build_object('event_type', %s::text))"
    ((condition,),) = pattern_session.execute(statement, (pattern,)).fetchall()
    query = f"select {condition} from (select %s::text as event_type) as o"
    ((found,),) = (
        psycopg.ClientCursor(pattern_session)
        .execute(query.replace("%", "%%").replace("select %%s", "select %s").encode(), (value,))
        .fetchall()
    )
    assert found == fnmatchcase(value, pattern)


@pytest.fixture(scope="module")
def pattern_session(server: Server, installed: str) -> Iterator[_Connection]:
    """A session of a database with readers, for all examples."""
    name = "reader_patterns"
    with psycopg.connect(server.create_database(name, template=installed), autocommit=True) as conn:
        yield conn
    server.drop_database(name)


NO_MATCH: list[str] = [
    '{"nothing": 1}',
    '{"payload": 1}',
    '{"event_type": []}',
    "[]",
    '{"id": null}',
]


def test_a_match_that_cannot_be_is_refused(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """At once, by whom it was declared."""
    for match in NO_MATCH:
        with (
            subtests.test(match),
            pytest.raises(psycopg.errors.InvalidParameterValue, match="match"),
        ):
            outbox.reader.execute("select relay.declare_reader('r', %s::jsonb)", (match,))


def test_a_match_is_no_statement(outbox: Outbox) -> None:
    """Quotes and parentheses in a path or a pattern are text."""
    for hostile in ("'); drop table x; --", "a' or true or 'a", "\\", "a\\'"):
        _declare(outbox.reader, match={f"payload.{hostile}": hostile, "event_type": hostile})
        _publish(outbox.publisher, 1)
        assert _drain(outbox.reader) == []


def test_seek_and_drop(outbox: Outbox) -> None:
    """A reader goes back to the beginning, to a position, and to now; a dropped one has no position."""
    _publish(outbox.publisher, 1)
    _declare(outbox.reader, "beginning")
    assert _drain(outbox.reader) == [1]
    _publish(outbox.publisher, 2)
    _, position = _read(outbox.reader)
    outbox.reader.execute("select relay.seek('r', 'beginning')")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another session"):
        outbox.reader.execute("select relay.advance('r', %s)", (position,))
    assert _drain(outbox.reader) == [1, 2]
    outbox.reader.execute("select relay.seek('r', 'beginning'); select relay.seek('r', 'now')")
    assert _drain(outbox.reader) == []
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="neither now"):
        outbox.reader.execute("select relay.seek('r', 'tomorrow')")
    ahead = re.sub("/.*@", "/9000000000:9000000000:@", position or "")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="of another server"):
        outbox.reader.execute("select relay.seek('r', %s)", (ahead,))
    outbox.reader.execute("select relay.drop_reader('r')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="no reader 'r'"):
        _read(outbox.reader)
    assert not outbox.column("select 1 from relay.readers where reader = 'r'")
    _declare(outbox.reader)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="another session"):
        outbox.reader.execute("select relay.advance('r', %s)", (position,))


def test_each_role_has_its_own_readers(outbox: Outbox) -> None:
    """A member of relay_reader moves what it has declared, and finds out nothing about other readers and the tables."""
    roles = [f"{outbox.slot}_reads_{number}" for number in (1, 2)]
    for role in roles:
        outbox.conn.execute(f"create role {role} login password 'p' in role relay_reader".encode())
    try:
        first, second = (psycopg.connect(outbox.dsn_as(role), autocommit=True) for role in roles)
        with first, second:
            _declare(first)
            _publish(outbox.publisher, 1)
            _, position = _read(first)
            for statement in (
                "select relay.read('r')",
                f"select relay.advance('r', '{position}')",
                "select relay.seek('r', 'now')",
                "select relay.drop_reader('r')",
                "select relay.declare_reader('r')",
                "select relay.move_reader('r', relay.this_call(), null, '3:3:')",
                "select * from relay.log_positions",
                "select * from public.outbox_message_t",
            ):
                for conn in (
                    (second, first) if "from" in statement or "move" in statement else (second,)
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        conn.execute(statement.encode())
            assert _drain(first) == [1]
    finally:
        for role in roles:
            outbox.conn.execute(f"drop role {role}".encode())


def test_a_reader_expires_without_signs_of_life(outbox: Outbox) -> None:
    """It then fails until it is moved, and is dropped a week later; an advance or a declaration is a sign of life."""
    expire = "select relay.expire_readers()"
    outbox.reader.execute("select relay.declare_reader('other', expires => '5 minutes')")
    outbox.reader.execute("select relay.declare_reader('r', expires => '10 minutes')")
    older = "update relay.readers set noted_at = noted_at - interval '11 minutes'"
    outbox.conn.execute(older.encode())
    outbox.reader.execute("select relay.declare_reader('r', expires => '10 minutes')")
    assert outbox.column(expire) == ["other"]
    _publish(outbox.publisher, 1)
    outbox.conn.execute(older.encode())
    _, position = _read(outbox.reader)
    outbox.reader.execute("select relay.advance('r', %s)", (position,))
    assert outbox.column(expire) == []
    outbox.conn.execute(older.encode())
    assert outbox.column(expire) == ["r"]
    assert outbox.column(expire) == []
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=r"retention \(expires\)"):
        _read(outbox.reader)
    outbox.reader.execute("select relay.seek('r', 'beginning')")
    assert _drain(outbox.reader) == [1]
    outbox.conn.execute("update relay.log_readers set expired_at = now() - interval '8 days'")
    outbox.column(expire)
    assert not outbox.column("select name from relay.log_readers")
    for limit in ("expires", "max_lag"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="at least five minutes"):
            outbox.reader.execute(f"select relay.declare_reader('r', {limit} => '1 s')".encode())


def test_a_reader_that_cannot_expire_writes_nothing_while_it_waits(outbox: Outbox) -> None:
    """The database stays quiet. Another session may say at any time that it expires."""

    def writes() -> bool:
        with outbox.reader.transaction():
            outbox.reader.execute("select relay.keep_reader('r')")
            return outbox.reader.value("select pg_current_xact_id_if_assigned()") is not None

    older = "update relay.readers set noted_at = now() - interval '4 minutes'"
    outbox.reader.execute("select relay.declare_reader('r')")
    outbox.conn.execute(older.encode())
    assert not writes()
    outbox.reader.execute("select relay.declare_reader('r', expires => '5 minutes')")
    outbox.conn.execute(older.encode())
    assert writes()
    assert not writes(), "it has just been said"
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="there is no reader 'nobody'"):
        outbox.reader.execute("select relay.keep_reader('nobody')")


def test_a_reader_has_its_own_max_lag(outbox: Outbox) -> None:
    """Also where retention has none."""
    settings = outbox.settings(retention={"keep": "1d"})
    reader_positions.retain(outbox.conn, settings.source)
    outbox.reader.execute("select relay.declare_reader('r', max_lag => '1 hour')")
    outbox.reader.execute("select relay.declare_reader('patient')")
    _publish(outbox.publisher, 1)
    found = [
        each
        for each in reader_positions.readers(outbox.conn, settings)
        if each.target == "relay.declare_reader"
    ]
    present = datetime.now(UTC)
    soon, later = present + timedelta(minutes=59), present + timedelta(minutes=62)
    assert reader_positions.lagging(found, soon, None) == []
    assert [each.reader for each in reader_positions.lagging(found, later, None)] == ["r"]
    both = reader_positions.lagging(found, later, timedelta(minutes=1))
    assert [each.reader for each in both] == ["patient", "r"]


def test_commands_list_move_and_drop_readers(outbox: Outbox, tmp_path: Path) -> None:
    """Whoever has declared them; each act is recorded."""
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    with psycopg.connect(outbox.reader_dsn, autocommit=True) as conn:
        conn.execute(
            "select relay.declare_reader('r', '{\"event_type\": \"a\"}', expires => '1 day')"
        )
        _publish(outbox.publisher, 1)
        claimed = conn.execute("select relay.claim_reader('r')").fetchall()
        (found,) = json.loads(relay("reader", "list", "-c", config, "--json").stdout)
        assert (found["name"], found["pid"], found["expires"]) == (
            "r",
            conn.info.backend_pid,
            86400,
        )
        assert (found["position"], found["match"]) == (claimed[0][0], {"event_type": "a"})
        assert found["lag_seconds"] > 0
        shown = relay("reader", "show", "r", "-c", config).stdout
        assert "after 1 day" in shown
        done = relay("reader", "seek", "r", "-c", config, "--to", "now", "--yes")
        assert done.stdout == "reader r is moved to now\n", done.stderr
        refused = relay("reader", "seek", "r", "-c", config, "--to", "noon", "--yes")
        assert (refused.returncode, "neither now" in refused.stderr) == (2, True), refused.stderr
        assert relay("reader", "drop", "r", "-c", config, "--yes").stdout == "reader r is dropped\n"
        unknown = relay("reader", "drop", "r", "-c", config, "--yes")
        assert "the outbox has no reader 'r' (it has none)" in unknown.stderr
    assert outbox.column("select action from relay.actions order by id") == [
        "reader seek",
        "reader drop",
    ]


def test_retention_keeps_what_is_not_read_until_it_gives_up(outbox: Outbox) -> None:
    """The row of relay.readers is what retention goes by; a reader that was given up says so until it is moved."""
    settings = outbox.settings(retention={"keep": "1d"})
    reader_positions.retain(outbox.conn, settings.source)
    _declare(outbox.reader)
    _publish(outbox.publisher, 1)
    (mine,) = [
        each for each in reader_positions.readers(outbox.conn, settings) if each.reader == "r"
    ]
    assert mine.unread_since is not None
    held = "select relay.is_held('public.outbox_message_t', 'public.outbox_message_t', 'c_offset')"
    assert outbox.column(held) == [True]
    later = datetime.now(UTC) + timedelta(days=3)
    assert mine in reader_positions.lagging([mine], later, timedelta(days=1))
    reader_positions.give_up(outbox.conn, mine)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="given up by retention"):
        _read(outbox.reader)
    outbox.reader.execute("select relay.seek('r', 'beginning')")
    assert _drain(outbox.reader) == [1]
