"""The conditions of readers: `where` and `params` mean what PostgreSQL's SQL/JSON says, as they do for queues."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from relay.client.reader import ReaderError, subscribe
from tests.outbox import Outbox
from tests.process import relay

_HOST = uuid.uuid4()
_Connection = psycopg.Connection[Any]

_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, 1.0, 2, -1, 10**30, 0.1, "", "1", "a", "b", "2026-01-02", "Ä"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=3,
)
_PATHS = st.sampled_from(
    ["$.payload.a", "$.payload.b", "$.payload.a[*]", "$.payload.*", "$.payload.a.b", "$.metadata.a", "$.event_type",
     "$.payload.a.size()", "$.payload.a.double()", "$.payload.a.datetime()", "$.**.b", "$.aggregate_version",
     "$.host_id"]
)  # fmt: skip
_OPERANDS = st.one_of(
    _PATHS, st.sampled_from(["$x", "$y", "1", '"a"', "null", "true", '"2026-01-01".datetime()'])
)
_COMPARISONS = st.builds(
    "({} {} {})".format, _PATHS, st.sampled_from(["==", "!=", "<", ">="]), _OPERANDS
)
_PREDICATES = st.recursive(
    st.one_of(
        _COMPARISONS,
        st.builds("exists ({})".format, _PATHS),
        st.builds('({} like_regex "^[a-b1]" flag "i")'.format, _PATHS),
        st.builds("({} starts with $x)".format, _PATHS),
        st.builds("({} / ($x) > 1)".format, _PATHS),
    ),
    lambda inner: st.one_of(
        st.builds("({} && {})".format, inner, inner),
        st.builds("({} || {})".format, inner, inner),
        st.builds("!({})".format, inner),
        st.builds("(({}) is unknown)".format, inner),
    ),
    max_leaves=4,
)
_CONDITIONS = st.builds(
    "{}{}".format,
    st.sampled_from(["", "strict "]),
    st.one_of(_PREDICATES, _PATHS, st.builds("{} ? (@ == $x)".format, _PATHS)),
)
_EVENT = """
    jsonb_build_object('id', id, 'event_type', event_type, 'host_id', host_id, 'user_id', user_id,
                       'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id,
                       'aggregate_version', aggregate_version, 'event_ts', event_ts, 'transaction_id', transaction_id,
                       'payload', payload, 'metadata', metadata)
"""
_ANSWER = f"""
    select jsonb_path_query_first_tz({_EVENT}, %(path)s::jsonpath, %(params)s, true)
      from outbox_message_t where id = %(id)s
"""
_QUEUED = f"""
    select relay.satisfies({_EVENT}, %(path)s::jsonpath, %(params)s) from outbox_message_t where id = %(id)s
"""


def _publish(conn: _Connection, *payloads: object, **more: object) -> None:
    events = [
        {"event_type": "order.placed", "aggregate_type": "Order", "aggregate_id": "1", "payload": each, **more}
        for each in payloads
    ]  # fmt: skip
    conn.execute("select relay.publish(%s, null, %s)", (_HOST, Jsonb(events)))


def _declare(conn: _Connection, where: str | None, params: object = None, **more: Any) -> None:
    conn.execute(
        "select relay.declare_reader('r', %s, %s, \"where\" => %s, params => %s)",
        (
            Jsonb(more.get("match", {})),
            more.get("start", "now"),
            where,
            None if params is None else Jsonb(params),
        ),
    )


def _read(conn: _Connection, reader: str = "r") -> list[Any]:
    rows = conn.execute("select id, payload from relay.read(%s)", (reader,)).fetchall()
    return [payload for number, payload in rows if number is not None]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.dictionaries(st.sampled_from("ab"), _VALUES), min_size=1, max_size=6),
    st.lists(st.tuples(_CONDITIONS, st.fixed_dictionaries({"x": _VALUES, "y": _VALUES})), min_size=4, max_size=4),
)  # fmt: skip
def test_a_reader_gets_what_sql_finds(
    outbox: Outbox, payloads: list[dict[str, Any]], conditions: list[tuple[str, dict[str, Any]]]
) -> None:
    """Whatever the condition: what fails in PostgreSQL is not satisfied, and a queue would get the same."""
    conn = outbox.reader
    outbox.conn.execute("truncate outbox_message_t")
    for each in (outbox.conn, conn):
        each.execute("set timezone = 'UTC'")
    _declare(conn, None)
    conn.execute("select relay.seek('r', 'now')")
    _publish(outbox.publisher, *payloads, aggregate_version=3, metadata={"a": 1})
    for where, params in conditions:
        try:
            conn.execute("select %s::jsonpath", (where,))
        except psycopg.Error:
            with pytest.raises(
                psycopg.errors.InvalidParameterValue, match="is no path of SQL/JSON"
            ):
                _declare(conn, where, params)
            continue
        _declare(conn, where, params)
        numbers = [
            number
            for (number,) in conn.execute("select id from relay.read('r')").fetchall()
            if number is not None
        ]
        expected = []
        for number in outbox.column("select id from outbox_message_t order by c_offset"):
            asked = {"path": where, "params": Jsonb(params), "id": number}
            try:
                found = outbox.conn.execute(_ANSWER, asked).fetchone()
            except psycopg.Error:
                found = None
            satisfied = found is not None and found[0] is not None and found[0] is not False
            assert outbox.conn.execute(_QUEUED, asked).fetchone() == (satisfied,)
            if satisfied:
                expected.append(number)
        assert numbers == expected, (where, params)


def test_where_comes_after_match(outbox: Outbox) -> None:
    """Both have to be satisfied; a second declaration replaces both, and does not move the reader."""
    _declare(outbox.reader, "$.payload.n > $least", {"least": 1}, match={"event_type": "order.*"})
    _publish(outbox.publisher, {"n": 1}, {"n": 2}, {"n": 3})
    _publish(outbox.publisher, {"n": 4}, event_type="other")
    assert _read(outbox.reader) == [{"n": 2}, {"n": 3}]
    _declare(outbox.reader, "$.payload.n > $least", {"least": 2})
    assert _read(outbox.reader) == [{"n": 3}, {"n": 4}]
    _declare(outbox.reader, None)
    assert len(_read(outbox.reader)) == 4


IMPOSSIBLE: list[tuple[str, object, str]] = [
    ("$.payload.", None, "where is no path of SQL/JSON: syntax error"),
    ("payload ->> 'a' = 'b'; drop table outbox_message_t", None, "where is no path of SQL/JSON"),
    (
        '$.payload.a like_regex "("',
        None,
        "where is no path of SQL/JSON: invalid regular expression",
    ),
    ("$.payload.n > $least", None, "params: the variable least of where is missing"),
    ("$.payload.n > $least", {"most": 1}, "params: the variable least of where is missing"),
    ("$.payload.n > $least", [1], "params must be an object"),
    ("$.a" + " " * 10_000, None, "where must have at most 10000 characters"),
]


def test_a_condition_that_cannot_be_is_refused(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """When it is declared, in one line, and nothing is declared."""
    for where, params, words in IMPOSSIBLE:
        with subtests.test(where[:80]):
            with pytest.raises(psycopg.errors.InvalidParameterValue) as said:
                _declare(outbox.reader, where, params)
            assert words in str(said.value)
            assert str(said.value).startswith("relay.declare_reader: ")
            assert outbox.column("select name from relay.log_readers") == []


def test_the_time_zone_of_the_session_changes_nothing(outbox: Outbox) -> None:
    """The times of events are in UTC, and so are those without an offset."""
    where = '$.event_ts like_regex "[+]00:00$" && $.payload.at.datetime() < "2026-01-01T00:00:00+00:00".datetime()'
    _declare(outbox.reader, where)
    _publish(outbox.publisher, {"at": "2025-12-31T23:30:00"}, {"at": "2026-01-01T00:30:00"})
    for zone in ("Pacific/Auckland", "America/New_York", "UTC"):
        outbox.reader.execute("select set_config('timezone', %s, false)", (zone,))
        assert [each["at"] for each in _read(outbox.reader)] == ["2025-12-31T23:30:00"]


def test_a_costly_condition_harms_its_reader_only(outbox: Outbox) -> None:
    """The caller's statement_timeout ends it; another reader of the same events goes on."""
    # Quadratic in what the event has, and more for each level.
    _declare(outbox.reader, "$.payload.a[*] ? (@ < $.payload.a[*] ? (@ < $.payload.a[*]))")
    outbox.reader.execute("select relay.declare_reader('other')")
    _publish(outbox.publisher, {"a": list(range(3000))})
    outbox.reader.execute("set statement_timeout = '200ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        _read(outbox.reader)
    assert len(_read(outbox.reader, "other")) == 1
    _declare(outbox.reader, "$.payload.a.size() > 1")
    assert len(_read(outbox.reader)) == 1


def _first(outbox: Outbox, **options: Any) -> Any:
    found: list[Any] = []
    reader = subscribe(outbox.reader_dsn, "p", poll=0.05, start="beginning", **options)
    for transaction in reader:
        found += [event.payload for event in transaction.events]
        reader.stop()
    return found[0]


def test_subscribe_has_a_condition(outbox: Outbox) -> None:
    """One that is refused ends the iteration with the server's words."""
    _publish(outbox.publisher, {"n": 1}, {"n": 2}, {"n": 30})
    assert _first(outbox, where="$.payload.n > $least", params={"least": 1}) == {"n": 2}
    assert _first(outbox, where="$.payload.n > $least", params={"least": 2}) == {"n": 30}
    assert _first(outbox) == {"n": 1}
    with pytest.raises(
        ReaderError, match=r"reader p: relay\.declare_reader: where is no path of SQL/JSON: syntax"
    ):
        _first(outbox, where="$.payload.")
    with pytest.raises(ValueError, match=r"^params: must have values that JSON has: "):
        _first(outbox, where="$.payload.n > $least", params={"least": object()})


def test_relay_reader_shows_the_condition(outbox: Outbox, tmp_path: Any) -> None:
    _declare(outbox.reader, "$.payload.n > $least", {"least": 1})
    file = outbox.config_file(tmp_path / "relay.yaml")
    shown = relay("reader", "show", "r", "-c", str(file)).stdout
    assert '\nwhere\t($."payload"."n" > $"least")\nparams\t{"least": 1}\n' in shown
    found = json.loads(relay("reader", "show", "r", "--json", "-c", str(file)).stdout)
    assert (found["where"], found["params"]) == ('($."payload"."n" > $"least")', {"least": 1})
