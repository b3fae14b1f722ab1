"""Deferred transactions: how they are stored, who may take them when, and what an operator does about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from relay.admin import sinks
from relay.admin.dead_letters import DeadLetters
from relay.cli.app import app
from relay.faults import ConfigurationError, Rejected, RelayError
from relay.model.keys import of_endpoint
from relay.model.transactions import Rows, Undecoded
from relay.pipeline.apply import Applier
from relay.pipeline.routing import BatchRouter
from relay.store import (
    actions,
    dead_letters,
    deferred,
    migrations,
)
from relay.store.dead_letters import NewDeadTransaction
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.deferred import Deferral
from relay.store.deferred import due as deferred_due
from tests.deferrals import undecoded
from tests.outbox import APPEND, Outbox, event, host, initialise, relaying, wait_until
from tests.process import relay, running
from tests.roles import Role

SINK = {"type": "http", "url": "http://127.0.0.1:1/", "timeout": 1}


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml", **WITH_SINK)


WITH_SINK: dict[str, Any] = {
    "handlers": {
        "projection": {"type": "sql", "statement": APPEND},
        "hook": SINK,
        "users": {**SINK, "order_by": "user"},
        "loose": {**SINK, "reliable": False},
    },
    "routes": [{"match": {"event_type": "order.placed"}, "handlers": ["projection"]}],
}


def command(config: Path, *words: str, status: int = 0) -> str:
    """What a command says; it runs in this process."""
    done = CliRunner().invoke(app, [*words[:2], "--config", str(config), *words[2:]])
    fault = done.exception if isinstance(done.exception, RelayError) else None
    assert (fault.exit_status if fault else done.exit_code) == status, f"{done.output}{fault}"
    return f"{done.output}{fault or ''}"


def defer(
    conn: psycopg.Connection[Any], *waits: Deferral, sink: str = "", group: str = "default"
) -> list[int]:
    """Defer a transaction for each; returns their ids."""
    deferred.defer(conn, group, ((undecoded(), wait) for wait in waits), sink)
    found = conn.execute("select id from relay.deferred order by id desc limit %s", (len(waits),))
    return sorted(number for (number,) in found)


@contextmanager
def connected(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as conn:
        yield conn


MUCH = 1 << 40
"""More bytes than anything here has."""


def ids(due: Sequence[deferred_due.DueTransaction]) -> list[int]:
    return [each.id for each in due]


# What is stored.


def test_what_is_deferred_comes_back_as_it_was(outbox: Outbox) -> None:
    rows = [b"", b"\0\\\n\t", bytes(range(256)) * 20]
    texts = ['a "b" \\ {c}, \t\n\r', "é \u2028", ""]
    one = undecoded(
        *rows, hosts=texts, transaction_id="a\tb\\N\n", columns=["c", 'd "e"'], offset=12
    )
    wait = Deferral(
        {"k 1", 'k "2" \\'},
        attempts=3,
        failing_seconds=1_000_000.5,
        handler="h\t1",
        reason="it's \\N\n",
        dead_transaction=7,
        undelivered=True,
    )
    deferred.defer(outbox.conn, "default", [(one, wait), (one, Deferral(()))], "s")
    assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
    first, second = deferred_due.heads(outbox.conn, "default", "s", 10, MUCH)
    assert (set(first.keys), first.holds) == (set(wait.keys), True)
    assert (first.attempts, first.handler) == (3, "h\t1")
    assert first.failing_seconds == pytest.approx(1_000_000.5, abs=30)
    assert (first.dead_transaction, first.undelivered) == (7, True)
    assert (second.keys, second.undelivered, second.failing_seconds) == ([], False, None)
    assert outbox.column("select reason from relay.deferred where id = %s", [first.id]) == [
        wait.reason
    ]
    found = deferred_due.transactions(outbox.conn, [first, second], 1_000_000, None)
    assert [output(each) for each in found] == [output(one), output(one)]


def test_keys_are_found_as_they_were_asked_for(outbox: Outbox, narrow: str) -> None:
    """Also those at single endpoints, where the target cannot spell them."""
    asked = ["a 🚚", "b 🚚", "c"]
    with Outbox(narrow) as target:
        target.install()
        held = [frozenset({"a 🚚"}), of_endpoint(["b 🚚"], "one"), of_endpoint(["c"], "two")]
        defer(target.conn, *map(Deferral, held))
        found = deferred.held(target.conn, "default", "", asked)
    assert found == frozenset[str]().union(*held)


def test_large_transactions_come_back_from_portions(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deferred, "_PORTION_EVENTS", 2)
    monkeypatch.setattr(deferred, "_DEFERRED_AT_ONCE", 2)
    many = [undecoded(*(b"%d" % row for row in range(size))) for size in (1, 5, 2, 1)]
    # One whose rows are read from somewhere as they are written.
    streamed = many[1]._replace(tuples=Streamed(outbox, list(many[1].tuples)))
    deferred.defer(outbox.conn, "g", ((each, Deferral({"k"})) for each in (*many, streamed)))
    assert outbox.value("select count(*) from relay.deferred_rows") == 6
    due = deferred_due.claim(outbox.conn, "g", 10, MUCH)
    for spool_above in (1_000, 0):
        found = deferred_due.transactions(outbox.conn, due, spool_above, tmp_path)
        assert [output(each) for each in found] == [output(each) for each in (*many, many[1])]


class Streamed:
    """Rows that need the connection for being read."""

    def __init__(self, outbox: Outbox, rows: list[bytes]) -> None:
        self.outbox = outbox
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[bytes]:
        for row in self.rows:
            assert self.outbox.value("select 1") == 1
            yield row


def output(one: Undecoded) -> tuple[Any, ...]:
    return (*one[:4], list(one.tuples), *one[5:])


def test_many_wait_again_at_once(outbox: Outbox) -> None:
    first, second, third = defer(
        outbox.conn, Deferral({"a"}), Deferral({"a"}), Deferral({"b"}, holds=False, after=60)
    )
    assert deferred.held(outbox.conn, "default", "", ["a", "b", "c"]) == {"a"}
    gone = 999
    again = {
        first: Deferral((), after=60, attempts=2, failing_seconds=5, handler="h", reason='a "b"\\'),
        third: Deferral((), attempts=1, blocked=True, dead_transaction=3),
        gone: Deferral(()),
    }
    assert deferred.defer_again(outbox.conn, list(again.items())) == {first, third}
    assert deferred.defer_again(outbox.conn, []) == set()
    assert deferred.held(outbox.conn, "default", "", ["a", "b", "c"]) == {"a", "b"}
    assert outbox.conn.execute(
        """
        select holds, blocked, attempts, handler, reason, dead_transaction, retry_at > now()
          from relay.deferred order by id
        """
    ).fetchall() == [
        (True, False, 2, "h", 'a "b"\\', None, True),
        (True, False, 0, None, None, None, False),
        (True, True, 1, None, None, 3, False),
    ]
    times = deferred_due.times(outbox.conn, "default")
    assert not times.may_be_due
    assert times.seconds_to_next is not None
    assert 50 < times.seconds_to_next <= 60
    outbox.conn.execute("update relay.deferred set retry_at = 'infinity' where id = %s", (first,))
    assert deferred_due.times(outbox.conn, "default").seconds_to_next is None
    assert deferred.remove(outbox.conn, [first, gone]) == {first}
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [second]
    assert deferred.remove(outbox.conn, [second, third]) == {second, third}
    assert not outbox.column("select 1 from relay.deferred_keys")
    assert not outbox.column("select 1 from relay.deferred_rows")
    assert deferred_due.times(outbox.conn, "default") == (False, None)


def test_whoever_deletes_rows_releases_their_keys(outbox: Outbox) -> None:
    first, second = defer(outbox.conn, Deferral({"a", "b"}), Deferral({"b"}))
    assert outbox.column("select predecessor from relay.deferred order by id") == [None, first]
    outbox.conn.execute("delete from relay.deferred where id = %s", (first,))
    assert deferred.held(outbox.conn, "default", "", ["a", "b"]) == {"b"}
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [second]
    outbox.conn.execute("truncate relay.deferred cascade")
    assert deferred.held(outbox.conn, "default", "", ["a", "b"]) == set()


def test_no_more_are_due_than_asked_for_where_one_makes_room_for_another(outbox: Outbox) -> None:
    """What follows the first one was what the third one waited for."""
    first, second = defer(outbox.conn, Deferral(["a"]), Deferral(["a"]))
    (third,) = defer(outbox.conn, Deferral(["a"]))
    assert ids(deferred_due.heads(outbox.conn, "default", "", 2, MUCH)) == [first, second]
    assert ids(deferred_due.heads(outbox.conn, "default", "", 3, MUCH)) == [first, second, third]


def test_a_replay_that_follows_another_is_due_once(outbox: Outbox) -> None:
    """The first one holds no key, since it was scheduled, so both are ready, and the replay follows it too."""
    first, replay = defer(
        outbox.conn, Deferral(["a"], holds=False), Deferral(["a", "c"], dead_transaction=2)
    )
    assert ids(deferred_due.heads(outbox.conn, "default", "", 100, MUCH)) == [first, replay]


# Whose turn it is.


def test_a_run_of_one_key_is_taken_together_and_leaves_room_for_others(outbox: Outbox) -> None:
    run = defer(outbox.conn, *(Deferral({"a"}) for _ in range(1_200)))
    others = defer(outbox.conn, *(Deferral({f"b{number}"}) for number in range(10)))
    taken = ids(deferred_due.claim(outbox.conn, "default", 500, MUCH))
    assert taken == run[:490] + others
    deferred.remove(outbox.conn, taken)
    assert ids(deferred_due.claim(outbox.conn, "default", 500, MUCH)) == run[490:990]
    assert ids(deferred_due.heads(outbox.conn, "default", "", 500, MUCH, run[490:990])) == []


def test_one_with_several_keys_waits_for_all_of_them(outbox: Outbox) -> None:
    first, second, both, third = defer(
        outbox.conn,
        Deferral({"a"}),
        Deferral({"b"}, after=60),
        Deferral({"a", "b"}),
        Deferral({"a"}),
    )
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [first]
    deferred.remove(outbox.conn, [first])
    assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
    deferred.remove(outbox.conn, [second])
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [both, third]


def test_only_one_claims_of_a_group(outbox: Outbox) -> None:
    (first,) = defer(outbox.conn, Deferral({"a"}))
    (other,) = defer(outbox.conn, Deferral({"a"}), group="other")
    with connected(outbox) as conn, conn.transaction():
        assert ids(deferred_due.claim(conn, "default", 10, MUCH)) == [first]
        assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
        assert ids(deferred_due.claim(outbox.conn, "other", 10, MUCH)) == [other]
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [first]


def test_transactions_of_another_layout_are_read_apart(outbox: Outbox) -> None:
    layouts = [("c",), ("c",), ("c", "d"), ("c",)]
    deferred.defer(
        outbox.conn, "g", ((undecoded(columns=each), Deferral({"k"})) for each in layouts)
    )
    runs = list(deferred_due.runs(deferred_due.claim(outbox.conn, "g", 10, MUCH)))
    assert [len(run) for run in runs] == [2, 1, 1]
    read = [deferred_due.transactions(outbox.conn, run, MUCH, None).columns for run in runs]
    assert read == [("c",), ("c", "d"), ("c",)]


def test_deferred_after_one_that_is_removed_at_the_same_time(outbox: Outbox) -> None:
    (first,) = defer(outbox.conn, Deferral({"a"}))
    with connected(outbox) as conn:
        with conn.transaction():
            assert deferred.held(conn, "default", "", ["a"]) == {"a"}
            with outbox.conn.transaction():
                assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [first]
                second, third = defer(conn, Deferral({"a"}), Deferral({"a"}))
                deferred.remove(outbox.conn, [first])
        assert ids(deferred_due.claim(conn, "default", 10, MUCH)) == [second, third]


def test_a_predecessor_that_is_removed_meanwhile_holds_up_nobody(outbox: Outbox) -> None:
    """A transaction that deletes a row waits for the one that notes it as a predecessor, and removes that note."""
    (first,) = defer(outbox.conn, Deferral({"a"}, blocked=True, dead_transaction=1))
    (second,) = defer(outbox.conn, Deferral({"a"}))
    with connected(outbox) as conn:
        remover = Thread(target=deferred.remove, args=(conn, [first]))
        with outbox.conn.transaction():
            assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
            remover.start()
            wait_until(lambda: waits_for_a_lock(outbox))
        remover.join()
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [second]


def test_a_predecessor_that_is_just_being_removed_is_not_noted(outbox: Outbox) -> None:
    (first,) = defer(outbox.conn, Deferral({"a"}, blocked=True, dead_transaction=1))
    (second,) = defer(outbox.conn, Deferral({"a"}))
    with connected(outbox) as conn:
        with conn.transaction():
            deferred.remove(conn, [first])
            assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
        assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [second]


def waits_for_a_lock(outbox: Outbox) -> bool:
    return bool(outbox.value("select count(*) from pg_locks where not granted"))


def test_keys_are_not_held_by_what_is_cancelled_meanwhile(outbox: Outbox) -> None:
    """A scheduled one that fails would hold its keys from then on."""
    (first,) = defer(outbox.conn, Deferral({"a"}, holds=False))
    with connected(outbox) as conn:
        failed: list[set[int]] = []

        def fail() -> None:
            failed.append(deferred.defer_again(conn, [(first, Deferral({"a"}, after=60))]))

        failing = Thread(target=fail)
        with outbox.conn.transaction():
            deferred.remove(outbox.conn, [first])
            failing.start()
            wait_until(lambda: waits_for_a_lock(outbox))
        failing.join()
    assert failed == [set()]
    assert deferred.held(outbox.conn, "default", "", ["a"]) == set()


@pytest.mark.server(15)
@pytest.mark.parametrize(
    ("rows", "keys"), [(20_000, 1), (20_000, 20_000)], ids=["of one key", "of a key each"]
)
def test_a_backlog_costs_no_more_than_a_few(outbox: Outbox, rows: int, keys: int) -> None:
    """If the first transaction of a key is deferred, the query reads no other one of the key, nor other keys."""
    deferred.defer(
        outbox.conn,
        "default",
        (
            (undecoded(), Deferral({f"k{n % keys} host"}, after=0 if n >= keys else 60))
            for n in range(rows)
        ),
    )
    outbox.conn.execute("analyze")
    asked = [f"k{n}" for n in range(100)] + [f"other{n}" for n in range(100)]

    def work() -> None:
        assert deferred_due.claim(outbox.conn, "default", 500, MUCH) == []
        assert len(deferred.held(outbox.conn, "default", "", [f"{n} host" for n in asked])) == min(
            keys, 100
        )
        (holding,) = outbox.column(
            "select holding from relay.lock_positions('default', 1, '{}', %s) where partition_id is null",
            [asked],
        )
        assert len(holding) == min(keys, 100)
        assert deferred_due.times(outbox.conn, "default").seconds_to_next is not None

    assert pages_touched(outbox, work) < 2_000


def pages_touched(outbox: Outbox, work: Callable[[], None]) -> int:
    """How many pages of relay's tables and indexes a session reads, wherever they are."""
    query = """
        select sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint
          from pg_statio_all_tables where schemaname = 'relay' and relname ~ '^deferred'
    """

    def touched() -> int:
        outbox.conn.execute("select pg_stat_force_next_flush()")
        return int(outbox.value(query))

    before = touched()
    work()
    return touched() - before


def test_hosts_that_hold_something_in_the_target(outbox: Outbox) -> None:
    defer(
        outbox.conn,
        Deferral({"h1 host"}),
        Deferral({"h2 user u", "h3 aggregate t i"}),
        Deferral({" host"}),
    )
    defer(outbox.conn, Deferral({"h5 host"}, holds=False, after=60), Deferral(()))
    defer(outbox.conn, Deferral({"h6 host"}), sink="hook")
    defer(outbox.conn, Deferral({"h7 host"}), group="other")
    hosts = ["h1", "h", "h2", "h11", "h3", "", "h5", "h6", "h7", "é"]
    (holding,) = outbox.column(
        "select holding from relay.lock_positions('default', 1, '{}', %s) where partition_id is null",
        [hosts],
    )
    assert set(holding) == {"h1", "h2", "h3", ""}


# Dead letters of sinks.


def decoded(outbox: Outbox) -> tuple[BatchRouter, Undecoded]:
    """A transaction of the outbox as it is deferred, and what decodes it."""
    settings = outbox.settings(**WITH_SINK)
    outbox.publish(host(1), event(1, "odd", deliver_at="2999-01-01"), event(2, "odd"))
    with relaying(outbox.settings()):
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    due = deferred_due.claim(outbox.conn, "default", 1, MUCH)
    (one,) = deferred_due.transactions(outbox.conn, due, 1_000_000, None)
    deferred.remove(outbox.conn, ids(due))
    return BatchRouter(settings), one


def dead_letter_of_sink(outbox: Outbox, sink: str) -> int:
    router, one = decoded(outbox)
    dead = NewDeadTransaction(router.events(one), sink or None, Rejected("HTTP 400"))
    (number,) = dead_letters.insert(outbox.conn, "default", [dead], sink)
    return number


@pytest.mark.parametrize(
    ("sink", "keys"),
    [("hook", [f"{host(1)} host"]), ("users", [f"{host(1)} user {host(999)}"]), ("loose", [])],
)
def test_a_dead_letter_of_a_sink_is_replayed_to_that_sink_alone(
    outbox: Outbox, config: Path, sink: str, keys: list[str]
) -> None:
    number = dead_letter_of_sink(outbox, sink)
    (listed,) = json.loads(command(config, "dlq", "list", "--sink", sink, "--json"))
    assert (listed["sink"], listed["handler"], listed["events"]) == (sink, sink, 2)
    assert json.loads(command(config, "dlq", "list", "--sink", "", "--json")) == []
    assert f"\t{sink}\t" in command(config, "dlq", "list")
    assert "1 transaction is queued" in command(config, "dlq", "replay", "--sink", sink, "--yes")
    assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
    (due,) = deferred_due.heads(outbox.conn, "default", sink, 10, MUCH)
    assert (due.keys, due.dead_transaction, due.events) == (keys, number, 2)
    assert deferred.held(outbox.conn, "default", sink, keys) == set(keys)


def test_a_dead_letter_of_a_sink_that_is_gone_is_not_replayed(outbox: Outbox, config: Path) -> None:
    dead_letter_of_sink(outbox, "gone")
    output = command(config, "dlq", "replay", "--all", "--yes", status=2)
    assert "handlers.gone: there is no such sink any more, and 1 of these transactions" in output
    assert "1 transaction is discarded" in command(
        config, "dlq", "discard", "--sink", "gone", "--yes"
    )
    defer(outbox.conn, Deferral({"a"}), sink="gone")
    found = json.loads(command(config, "check", "--json", status=2))
    assert "handlers.gone: there is no such sink, but 1 transaction is deferred for it" in "".join(
        each["text"] for each in found if each["level"] == "error"
    )


# What no sink has had.


def test_what_was_not_routed_reaches_the_sinks_of_todays_routes_once_it_is_applied(
    outbox: Outbox,
) -> None:
    settings = outbox.settings(**WITH_SINK)
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    outbox.publish(host(1), event(-1, "odd"), event(2, "other"))
    outbox.publish(host(1), event(-3))
    outbox.drain(settings)
    assert outbox.conn.execute(
        "select sink, handler, undelivered from relay.dead_letter_queue order by id"
    ).fetchall() == [("", None, True), ("", None, True), ("", "projection", False)]
    routes = [
        {"match": {"event_type": "odd"}, "handlers": ["projection", "users"]},
        {"match": {"event_type": "other"}, "handlers": ["users", "loose"]},
        {"handlers": ["projection"]},
    ]
    routed = outbox.settings(**{**WITH_SINK, "routes": routes})
    # It is still refused by the target, and remembered as what no sink has had.
    dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None)
    retry_deferred(routed)
    assert outbox.column("select count(*) from relay.deferred") == [0]
    assert outbox.column("select distinct undelivered from relay.dead_letter_queue order by 1") == [
        False,
        True,
    ]
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")
    dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None)
    retry_deferred(routed)
    assert outbox.column("select amount from projection order by seq") == [-1, -3]
    assert outbox.conn.execute(
        "select sink, keys, holds, events, undelivered, dead_transaction from relay.deferred order by sink"
    ).fetchall() == [
        ("loose", [], True, 1, False, None),
        ("users", [f"{host(1)} user {host(999)}"], True, 2, False, None),
    ]
    (due,) = deferred_due.heads(outbox.conn, "default", "loose", 10, MUCH)
    (one,) = deferred_due.transactions(outbox.conn, [due], 1_000_000, None)
    assert [each.event_type for each in BatchRouter(routed).events(one)] == ["other"]


def retry_deferred(settings: Any) -> None:
    """Retry what is due in the target, without delivering to sinks there."""
    applier = Applier(settings, 1)
    try:
        applier.retry_deferred()
    finally:
        applier.close()


# The commands.


def test_the_commands(outbox: Outbox, config: Path) -> None:
    def listed(*words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            command(config, "deferred", "list", "--json", *words)
        )
        return found

    assert "there is no deferred transaction in group 'default'" in command(
        config, "deferred", "list"
    )
    failed = Deferral({"a"}, after=3_600, attempts=2, handler="projection", reason="busy")
    first, second, dead = defer(
        outbox.conn,
        failed,
        Deferral({"a"}),
        Deferral({"x"}, blocked=True, attempts=1, handler="projection", dead_transaction=1),
    )
    third, fourth = defer(
        outbox.conn,
        Deferral({"a", "b", "c", "d"}, after=3_600, attempts=1, handler="hook", reason="HTTP 503"),
        Deferral({"e"}, holds=False, after=3_600),
        sink="hook",
    )
    assert [each["id"] for each in listed()] == [first, second, dead, third, fourth]
    assert [each["kind"] for each in listed()] == [
        "retry",
        "blocked",
        "holding",
        "retry",
        "scheduled",
    ]
    one = listed("--id", str(first))[0]
    assert (one["sink"], one["keys"], one["attempts"], one["reason"]) == ("", ["a"], 2, "busy")
    assert one["next"] is not None
    for words, expected in (
        (["--sink", "hook"], [third, fourth]),
        (["--sink", ""], [first, second, dead]),
        (["--handler", "hook"], [third]),
        (["--kind", "retry"], [first, third]),
        (["--key", "b"], [third]),
        (["--host", "h", "--limit", "2"], [first, second]),
        (["--host", "nobody"], []),
    ):
        assert [each["id"] for each in listed(*words)] == expected
    assert "a, b, c and 1 more" in command(config, "deferred", "list")
    assert "--kind: 'odd' is not retry, holding, replay, resend, scheduled or blocked" in command(
        config, "deferred", "list", "--kind", "odd", status=2
    )

    assert "by a filter such as --id" in command(config, "deferred", "run", "--yes", status=2)
    output = command(config, "deferred", "run", "--all", "--dry-run")
    assert "4 transactions with 4 events will be tried now" in output
    assert "1 more are dead letters that hold their keys" in output
    assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
    output = command(config, "deferred", "run", "--sink", "hook", "--reason", "it is back", "--yes")
    assert "2 transactions are due" in output
    assert "no instance of group 'default' is running" in output
    assert deferred_due.claim(outbox.conn, "default", 10, MUCH) == []
    due = deferred_due.heads(outbox.conn, "default", "hook", 10, MUCH)
    assert [(each.id, each.attempts) for each in due] == [(third, 1), (fourth, 0)]
    (action,) = actions.recent(outbox.conn, "default", 10)
    assert (action.sink, action.action, action.reason) == ("hook", "deferred run", "it is back")
    assert action.detail == {"transactions": 2, "filter": {"sink": "hook"}}
    assert action.acted_by == Role.RELAY


def test_scheduled_transactions_are_moved(outbox: Outbox, config: Path) -> None:
    later = Deferral({"a"}, holds=False, after=3_600)
    scheduled, retried = defer(outbox.conn, later, Deferral({"a"}, after=3_600, attempts=1))
    (of_sink,) = defer(outbox.conn, later, sink="hook")
    assert "by a filter such as --id" in command(
        config, "deferred", "move", "--to", "2999-01-01", "--yes", status=2
    )
    words = ("deferred", "move", "--key", "a", "--to")
    assert "only scheduled" in command(config, *words, "2999-01-01", "--kind", "retry", status=2)
    assert "'soon' is not a time" in command(config, *words, "soon", status=2)
    output = command(config, *words, "2999-01-01T12:00+02:00", "--reason", "not yet", "--yes")
    assert "2 transactions with 2 events will be moved to 2999-01-01 12:00:00" in output
    assert "2 transactions are moved" in output
    assert "meanwhile" not in output
    moved = "select id from relay.deferred where retry_at = '2999-01-01 10:00Z' order by id"
    assert outbox.column(moved) == [scheduled, of_sink]
    to = "2999-01-01T12:00:00+02:00"
    assert {
        (each.sink, each.action, each.reason, each.detail and each.detail["to"])
        for each in actions.recent(outbox.conn, "default", 10)
    } == {(sink, "deferred move", "not yet", to) for sink in ("", "hook")}
    command(config, "deferred", "move", "--id", str(scheduled), "--to", "2000-01-01", "--yes")
    assert ids(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == [scheduled]
    assert retried not in outbox.column(moved)


@pytest.mark.parametrize("verb", ["move", "cancel"])
def test_what_is_being_applied_is_neither_moved_nor_cancelled(
    outbox: Outbox, config: Path, verb: str
) -> None:
    for number in range(2):
        outbox.publish(host(number), event(number, deliver_at="2999-01-01"))
    outbox.drain(outbox.settings(**WITH_SINK))
    applied, left = outbox.column("select id from relay.deferred where sink = '' order by id")
    said: list[str] = []
    words = ("--kind", "scheduled", "--yes", *(("--to", "2999-01-01") if verb == "move" else ()))
    asking = Thread(target=lambda: said.append(command(config, "deferred", verb, *words)))
    with connected(outbox) as worker, worker.transaction():
        deferred.lock(worker, "default")
        deferred.remove(worker, [applied])
        asking.start()
        wait_until(lambda: waits_for_a_lock(outbox))
    asking.join()
    assert "1 transaction is" in said[0]
    assert "1 transaction was delivered, tried or given up meanwhile" in said[0]
    assert outbox.column("select id from relay.deferred") == ([left] if verb == "move" else [])


def test_a_transaction_is_found_by_the_id_of_an_event(outbox: Outbox, config: Path) -> None:
    later = {"deliver_at": "2999-01-01"}
    outbox.publish(host(1), event(1, **later), event(2))
    first = outbox.value("select id::text from outbox_message_t order by c_offset limit 1")
    # One event mentions the id of another, and one transaction is stored as if it were too large for its row.
    outbox.publish(host(2), event(3, payload={"amount": 3, "about": first}, **later))
    second, third = outbox.column(
        "select id::text from outbox_message_t order by c_offset offset 1"
    )
    outbox.drain(outbox.settings(**WITH_SINK))
    outbox.conn.execute(
        """
        insert into relay.deferred_rows select id, 0, sizes, data from relay.deferred where events = 2 and sink = '';
        update relay.deferred set sizes = null, data = null where events = 2 and sink = ''
        """
    )

    def hosts(event_id: str) -> set[tuple[str, ...]]:
        words = ("deferred", "list", "--json", "--sink", "", "--event", event_id)
        return {tuple(each["hosts"]) for each in json.loads(command(config, *words))}

    assert hosts(first) == hosts(second) == {(str(host(1)),)}
    assert hosts(third) == {(str(host(2)),)}
    words = ("--sink", "", "--event", second, "--yes")
    assert "1 transaction is a dead letter" in command(config, "deferred", "cancel", *words)
    assert f"event {second} is not deferred" in command(
        config, "deferred", "cancel", *words, status=2
    )


def test_what_nobody_tries_now_is_reported(outbox: Outbox, tmp_path: Path) -> None:
    settings, path = outbox.settings(**WITH_SINK), tmp_path / "other.yaml"
    config = outbox.config_file(path, **WITH_SINK)
    outbox.drain(settings)
    later = Deferral({"a"}, after=3_600)
    defer(outbox.conn, later, sink="hook")
    defer(outbox.conn, later, later, sink="gone")
    sinks.pause(settings, "hook")
    output = command(config, "deferred", "run", "--all", "--yes")
    assert "3 transactions are due" in output
    assert (
        "2 of them go to sink gone, which is not configured any more: put it back, or give"
        in output
    )
    assert "`relay deferred cancel --sink gone`" in output
    assert "1 of them go to sink hook, which is paused" in output
    assert "no instance" not in output
    defer(outbox.conn, later)
    output = command(config, "deferred", "run", "--sink", "", "--yes")
    assert "no instance of group 'default' is running" in output
    assert "sink" not in output


def test_what_is_cancelled_can_be_replayed(outbox: Outbox, config: Path) -> None:
    settings = outbox.settings(**WITH_SINK)
    later = {"deliver_at": "2999-01-01"}
    outbox.publish(host(1), event(1, **later), event(2))
    outbox.publish(host(2), event(-3))
    outbox.publish(host(3), event(4, **later))
    outbox.drain(settings)
    dead_letter_admin = DeadLetters(settings, outbox.conn)
    outbox.conn.execute("update relay.dead_letter_queue set exception = 'as it was'")
    dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None)
    outbox.conn.execute(
        "update relay.deferred set sink = 'hook' where hosts[1] = %s", (str(host(3)),)
    )
    output = command(config, "deferred", "cancel", "--all", "--reason", "too late", "--yes")
    assert "3 transactions are dead letters" in output
    assert outbox.value("select count(*) from relay.deferred") == 0
    assert outbox.value("select count(*) from relay.deferred_rows") == 0
    user = Role.RELAY
    said = f"Cancelled: cancelled by {user}: too late"
    assert outbox.conn.execute(
        """
        select sink, handler, status, attempts, (payload->>'amount')::int, exception
          from relay.dead_letter_queue order by (payload->>'amount')::int
        """
    ).fetchall() == [
        ("", "projection", "dead", 1, -3, said),
        # Their time had not come: nothing was tried.
        ("", None, "dead", 0, 1, said),
        ("", None, "dead", 0, 2, said),
        ("hook", "hook", "dead", 0, 4, said),
    ]
    assert sorted(outbox.column("select action from relay.dead_letter_actions")) == [
        "cancel",
        "cancel",
        "cancel",
        "replay",
    ]
    assert [
        (each.sink, each.action, each.detail and each.detail["transactions"])
        for each in actions.recent(outbox.conn, "default", 10)
    ] == [("hook", "deferred cancel", 1), ("", "deferred cancel", 2)]
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")
    assert (
        len(dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection(sink="")), None))
        == 2
    )
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 3)


def test_a_running_relay_obeys(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    with running(config) as service:
        for number in range(3):
            outbox.publish(host(number), event(number, deliver_at="2999-01-01"))
        outbox.wait_drained()
        assert outbox.value("select count(*) from relay.deferred") == 3
        command(config, "deferred", "cancel", "--host", str(host(1)), "--yes")
        words = ("deferred", "run", "--config", str(config), "--kind", "scheduled", "--yes")
        output = relay(*words).stdout
        assert "2 transactions are due" in output
        assert "no instance" not in output
        wait_until(lambda: outbox.value("select count(*) from projection") == 2)
        assert service.terminate() == 0
    assert outbox.column("select amount from projection order by 1") == [0, 2]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1


def test_more_than_a_portion_is_cancelled(outbox: Outbox, config: Path) -> None:
    outbox.fill(1_100, events=1, hosts=7)
    outbox.conn.execute("update outbox_message_t set deliver_at = '2999-01-01'")
    settings = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1_100)
    output = command(config, "deferred", "cancel", "--kind", "scheduled", "--yes")
    assert "1100 transactions are dead letters" in output
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1_100


# The schema.

FORMER = """
    drop view relay.watermarks, relay.dead_letters;
    drop table relay.completeness;
    insert into relay.deferred_rows select id, 0, sizes, data from relay.deferred;
    drop trigger hold_keys on relay.deferred;
    drop trigger release_keys on relay.deferred;
    drop trigger release_all_keys on relay.deferred;
    drop table relay.deferred_keys, relay.actions;
    drop index relay.deferred_others, relay.deferred_replayed, relay.deferred_waiting, relay.deferred_predecessor;
    alter table relay.deferred drop column sink, drop column predecessor, drop column undelivered,
                               drop column sizes, drop column data;
    alter table relay.dead_letter_queue drop column sink, drop column undelivered;
    create index deferred_due on relay.deferred (group_id, retry_at) where not blocked;
    create index deferred_keys on relay.deferred using gin (keys) where holds;
    create index deferred_hosts on relay.deferred using gin (hosts) where holds;
"""


STAGED = """
    drop table relay.spark_batches;
    create sequence relay.spark_batches;
    create table relay.spark_portions (id bigint, events bigint);
    create table relay.spark_events (portion bigint);
    insert into relay.spark_portions values (1, 7);
"""


def test_events_that_are_staged_for_spark_are_not_dropped(outbox: Outbox) -> None:
    outbox.conn.execute(STAGED.encode())
    outbox.conn.execute("alter table relay.spark_portions owner to app_owner")
    outbox.conn.execute(
        "update relay.migrations set digest = %s where name = 'target/001_target.sql'",
        (max(migrations.FORMER["target/001_target.sql"]),),
    )
    with pytest.raises(ConfigurationError, match=r"target\.dsn: events are staged for Spark"):
        initialise(outbox.settings())
    assert outbox.value("select events from relay.spark_portions") == 7
    outbox.conn.execute("delete from relay.spark_portions")
    assert initialise(outbox.settings()) == ["schema file target/001_target.sql"]
    assert outbox.value("select to_regclass('relay.spark_events')") is None
    assert outbox.value("select count(*) from relay.spark_batches") == 0


@pytest.mark.parametrize("by", ["init", "psql"])
def test_the_former_schema_is_migrated(outbox: Outbox, tmp_path: Path, by: str) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(-1))
    outbox.drain(settings)
    defer(
        outbox.conn,
        Deferral({"host h1", "user h2 u v"}),
        Deferral({"host h1", "aggregate h1 t \n i"}),
        Deferral({"host "}, holds=False),
    )
    file = migrations.sql_directory() / "target" / "001_target.sql"
    former = min(migrations.FORMER[migrations.name_of(file)])
    outbox.conn.execute(FORMER.encode())
    outbox.conn.execute(
        "update relay.migrations set digest = %s where name = 'target/001_target.sql'", (former,)
    )
    config = outbox.config_file(tmp_path / "relay.yaml")
    output = command(config, "dlq", "list", status=2)
    assert "is older than this program" in output
    assert (
        "(target/001_target.sql is of a former edition): stop relay and run `relay init`" in output
    )
    if by == "init":
        assert "schema file target/001_target.sql" in initialise(settings)
        assert initialise(settings) == []
    else:
        for _ in range(2):
            outbox.conn.execute(file.read_bytes())
    keys = [["h1 host", "h2 user u v"], ["h1 aggregate t \n i", "h1 host"], [" host"]]
    assert [
        sorted(each) for each in outbox.column("select keys from relay.deferred order by id")
    ] == keys
    assert sorted(outbox.column("select key from relay.deferred_keys")) == sorted(keys[0] + keys[1])
    assert outbox.column("select undelivered from relay.deferred") == [True] * 3
    assert outbox.column("select undelivered from relay.dead_letter_queue") == [True]
    due = deferred_due.claim(outbox.conn, "default", 10, MUCH)
    found = deferred_due.transactions(outbox.conn, due, 1_000, None)
    assert [list(each.tuples) for each in found] == [[b"row"]] * 3
    first, second, third = ids(due)
    deferred.remove(outbox.conn, [first])
    defer(outbox.conn, Deferral({"h1 host"}))
    assert outbox.column("select undelivered from relay.deferred order by id") == [
        True,
        True,
        False,
    ]
    assert len(deferred_due.claim(outbox.conn, "default", 10, MUCH)) == 3
    assert second < third
    assert not outbox.column(
        "select indexdef from pg_indexes where schemaname = 'relay' and indexdef ~ 'USING gin'"
        " and tablename = 'deferred' and indexname <> 'deferred_events'"
    )


def test_the_role_relay_may_do_all_of_this(outbox: Outbox) -> None:
    with outbox.limited_role() as (name, dsn), psycopg.connect(dsn, autocommit=True) as conn:
        first, second = defer(conn, Deferral({"a"}), Deferral({"a"}, after=60))
        assert ids(deferred_due.claim(conn, "default", 10, MUCH)) == [first]
        deferred.defer_again(conn, [(first, Deferral({"a"}))])
        deferred.release(conn, {second: undecoded()})
        assert deferred.remove(conn, [first, second]) == {first, second}
        actions.record(conn, "default", "s", "pause", "why", {"a": 1})
        assert actions.recent(conn, "default", 1)[0].acted_by == name
        for forbidden in (
            "insert into relay.actions (group_id, action, acted_by) values ('g', 'pause', 'x')",
            "update relay.actions set reason = 'x'",
            "delete from relay.actions",
            "update relay.deferred_keys set key = 'x'",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(forbidden.encode())


def test_rows_are_what_a_replay_has_now(outbox: Outbox) -> None:
    (first,) = defer(outbox.conn, Deferral({"a"}, blocked=True, dead_transaction=5))
    defer(outbox.conn, Deferral({"a"}))
    assert deferred.blocked(outbox.conn, [5, 6]) == {5: first}
    deferred.release(outbox.conn, {first: undecoded(b"edited", b"too")})
    due = deferred_due.claim(outbox.conn, "default", 1, MUCH)
    assert ids(due) == [first]
    (one,) = deferred_due.transactions(outbox.conn, due, 1_000, None)
    assert isinstance(one.tuples, Rows)
    assert list(one.tuples) == [b"edited", b"too"]


def test_edits_need_a_sink_that_is_there(outbox: Outbox) -> None:
    dead_letter_of_sink(outbox, "gone")
    dead_letter_admin = DeadLetters(outbox.settings(**WITH_SINK), outbox.conn)
    with pytest.raises(ConfigurationError, match="no such sink"):
        dead_letter_admin.replay(dead_letter_admin.find(DeadLetterSelection()), None)
    assert outbox.column("select distinct status from relay.dead_letter_queue") == ["dead"]
