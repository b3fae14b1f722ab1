"""Subscribers of a reader: they are for the events that a reader of their own would get, whatever their number."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from tests.outbox import Outbox

_HOST = uuid.uuid4()
_Connection = psycopg.Connection[Any]

_TEXTS = st.sampled_from(["a", "b", "a*", "[ab]", "1", "", "ä"])
_MATCHES = st.dictionaries(
    st.sampled_from(["event_type", "payload.a", "payload.b.c", "aggregate_id", "host_id"]),
    _TEXTS | st.sampled_from([1, True]) | st.lists(_TEXTS, min_size=1, max_size=2),
    max_size=3,
)
_CONDITIONS = st.one_of(
    st.just((None, None)),
    st.tuples(st.just("$.payload.a == $x"), st.fixed_dictionaries({"x": st.sampled_from(["a", 1, None])})),
    st.tuples(st.sampled_from(["$.payload.b.c", "strict $.payload.b.c != 1"]), st.none()),
)  # fmt: skip
_VALUES = st.sampled_from(["a", "b", "ab", "1", 1, True, None, "", "ä", ["a"]])
_PAYLOADS = st.fixed_dictionaries(
    {}, optional={"a": _VALUES, "b": st.fixed_dictionaries({"c": _VALUES})}
)


def _publish(conn: _Connection, *payloads: object) -> None:
    events = [
        {"event_type": "a", "aggregate_type": "Order", "aggregate_id": "1", "payload": each}
        for each in payloads
    ]
    conn.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _subscribe(conn: _Connection, name: str, match: object, *more: object) -> bool:
    row = conn.execute(
        "select relay.declare_subscriber('r', %s, %s, %s, %s)", (name, Jsonb(match), *(more or (None, None)))
    ).fetchone()  # fmt: skip
    return bool(row and row[0])


def _subscribers(outbox: Outbox) -> list[set[str]]:
    """For each event of the outbox, in order, the subscribers that it is for."""
    ids = outbox.column("select id from outbox_message_t order by c_offset")
    found: dict[uuid.UUID, list[str]] = {each: [] for each in ids}
    for event, subscriber in outbox.reader.execute(
        "select * from relay.subscribers_of('r', %s)", (ids,)
    ):
        found[event].append(subscriber)
    for each in found.values():
        assert len(each) == len(set(each))
    return [set(each) for each in found.values()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(_PAYLOADS, min_size=1, max_size=5),
    st.lists(st.tuples(_MATCHES, _CONDITIONS), min_size=1, max_size=8),
)
def test_an_event_is_for_whose_own_reader_would_get_it(
    outbox: Outbox,
    payloads: list[Any],
    asked: list[tuple[dict[str, Any], tuple[str | None, dict[str, Any] | None]]],
) -> None:
    conn = outbox.reader
    outbox.conn.execute("truncate outbox_message_t")
    outbox.conn.execute("select relay.drop_reader(name) from relay.log_readers")
    conn.execute("select relay.declare_reader('r')")
    for number, (match, (where, params)) in enumerate(asked):
        given_params = None if params is None else Jsonb(params)
        assert _subscribe(conn, f"s{number}", match, where, given_params)
        conn.execute(
            'select relay.declare_reader(%s, %s, "where" => %s, params => %s)',
            (f"s{number}", Jsonb(match), where, given_params),
        )
    _publish(outbox.publisher, *payloads)
    ids = [
        row[0] for row in outbox.conn.execute("select id from outbox_message_t order by c_offset")
    ]
    expected: list[set[str]] = [set() for _ in ids]
    for number in range(len(asked)):
        for (found,) in conn.execute("select id from relay.read(%s)", (f"s{number}",)):
            if found is not None:
                expected[ids.index(found)].add(f"s{number}")
    assert _subscribers(outbox) == expected


def test_a_second_declaration_changes_a_subscriber(outbox: Outbox) -> None:
    conn = outbox.reader
    conn.execute("select relay.declare_reader('r')")
    _publish(outbox.publisher, {"a": "x"}, {"a": "y"})
    assert _subscribe(conn, "s", {"payload.a": "x"})
    assert _subscribers(outbox) == [{"s"}, set()]
    assert not _subscribe(conn, "s", {"payload.a": "y"})
    assert _subscribers(outbox) == [set(), {"s"}]
    assert not _subscribe(conn, "s", {}, '$.payload.a starts with "x"', None)
    assert _subscribers(outbox) == [{"s"}, set()]
    assert outbox.reader.value("select relay.drop_subscriber('r', 's')")
    assert not outbox.reader.value("select relay.drop_subscriber('r', 's')")
    assert _subscribers(outbox) == [set(), set()]


def test_thousands_share_a_condition(outbox: Outbox) -> None:
    """Those whose texts differ; and they go with their reader."""
    conn = outbox.reader
    conn.execute("select relay.declare_reader('r')")
    conn.execute(
        "select relay.declare_subscriber('r', 's' || n, jsonb_build_object('event_type', '[ab]', 'payload.a', n::text))"
        " from generate_series(1, 10000) as n"
    )
    _publish(outbox.publisher, {"a": "17"}, {"a": 18}, {"a": "none"})
    assert _subscribers(outbox) == [{"s17"}, {"s18"}, set()]
    assert outbox.value("select count(*) from relay.log_conditions") == 1
    conn.execute("select relay.drop_reader('r')")
    assert outbox.value("select count(*) from relay.log_subscribers") == 0


def test_who_is_idle_is_dropped(outbox: Outbox) -> None:
    """Ten thousand readers and as many subscribers at once; who was declared again stays."""
    conn = outbox.reader
    conn.execute("select relay.declare_reader('r')")
    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match="expires must be at least five minutes"
    ):
        conn.execute("select relay.declare_subscriber('r', 's', expires => '1 minute')")
    conn.execute(
        "select relay.declare_reader('r' || n, expires => '1 hour') from generate_series(1, 10000) as n"
    )
    conn.execute(
        "select relay.declare_subscriber('r', 's' || n, expires => '1 hour') from generate_series(1, 10000) as n"
    )
    outbox.conn.execute("update relay.log_subscribers set noted_at = now() - interval '2 hours'")
    outbox.conn.execute("update relay.readers set noted_at = now() - interval '2 hours'")
    assert not _subscribe(conn, "s1", {})
    conn.execute("select relay.declare_reader('r1', expires => '1 hour')")
    assert outbox.value("select relay.expire_subscribers()") == 9999
    assert outbox.column("select name from relay.log_subscribers") == ["s1"]
    assert outbox.value("select count(*) from relay.expire_readers()") == 9999
    outbox.conn.execute("update relay.log_readers set expired_at = expired_at - interval '8 days'")
    assert outbox.value("select count(*) from relay.expire_readers()") == 0
    assert outbox.column("select name from relay.log_readers order by 1") == ["r", "r1"]
    conn.execute("select relay.drop_subscriber('r', 's1')")
    assert outbox.value("select relay.expire_subscribers()") == 0
    assert outbox.value("select count(*) from relay.log_conditions") == 0


def test_subscribers_are_of_who_may_read_the_reader(outbox: Outbox) -> None:
    role = f"{outbox.slot}_reads"
    outbox.conn.execute(f"create role {role} login password 'p' in role relay_reader".encode())
    try:
        outbox.reader.execute("select relay.declare_reader('r')")
        with psycopg.connect(outbox.dsn_as(role), autocommit=True) as conn:
            for statement in (
                "select relay.declare_subscriber('r', 's')",
                "select relay.drop_subscriber('r', 's')",
                "select relay.subscribers_of('r', '{}')",
            ):
                with pytest.raises(
                    psycopg.errors.InsufficientPrivilege, match="there is no reader 'r'"
                ):
                    conn.execute(statement.encode())
            conn.execute("select relay.declare_reader('own')")
            conn.execute("select relay.declare_subscriber('own', 's')")
            conn.execute("select relay.subscribers_of('own', '{}')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("select * from relay.log_subscribers")
            conn.execute("select relay.drop_reader('own')")
    finally:
        outbox.conn.execute(f"drop role {role}".encode())
