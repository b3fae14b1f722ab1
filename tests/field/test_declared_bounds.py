"""What others declare is bounded when it is declared and when it is evaluated, and stops by itself, by name.

Reports of users of comparable systems are named where they are tried. Declarations are those of ordinary roles.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from relay.admin.check import examine
from relay.admin.queues import listed as queues_listed
from relay.admin.readers import listed as readers_listed
from relay.model import exact_json
from relay.model.json_fields import json_fields
from relay.queues import conditions
from relay.store import schedules
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running

HUGE = '{"payload.x": 1e5000}'
"""Of 18 characters, 5,001 digits: more than the 4,300 that Python converts."""


@pytest.mark.parametrize(
    ("match", "why"),
    [
        # openvang/vanguarstew#1665, Liquid4All/ifstruct#3: json.loads raises a ValueError that nobody expects.
        # flop-labs/technocore-chat#399: to bound integers where they come in is what helps.
        (HUGE, "250 digits"),
        ('{"payload.x": [1, 1e-300]}', "250 digits"),
        ('{"payload.x": "%s"}' % ("x" * 20_001), "20000 characters"),
    ],
)
@pytest.mark.parametrize("declare", ["declare_queue('q', ", "declare_reader('r', "])
def test_a_match_is_bounded_when_it_is_declared(
    outbox: Outbox, declare: str, match: str, why: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=why):
        outbox.conn.execute(f"select relay.{declare}%s::jsonb)".encode(), (match,))


def test_a_subscriber_is_bounded_as_its_reader_is(outbox: Outbox) -> None:
    outbox.reader.execute("select relay.declare_reader('r')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="250 digits"):
        outbox.reader.execute("select relay.declare_subscriber('r', 's', %s::jsonb)", (HUGE,))


def test_a_match_of_a_former_edition_that_cannot_be_read_stops_its_queue(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """Liquid4All/ifstruct#3: one number ended a batch of 2,000. Here it ended relay, and each start after that."""
    outbox.worker.execute("select relay.declare_queue('q', '{\"payload.x\": 1}')")
    outbox.worker.execute("select relay.declare_queue('other')")
    outbox.conn.execute("update relay.queues set match = %s::jsonb where name = 'q'", (HUGE,))
    outbox.conn.execute("update relay.queue_revisions set revision = revision + 1")
    with (
        outbox.limited_role() as (_, dsn),
        caplog.at_level(logging.ERROR),
        relaying(outbox.settings(target={"dsn": dsn})),
    ):
        for number in (1, 2):
            outbox.publish(host(number), event(number))
            outbox.wait_handled()
    outbox.assert_exact()
    assert [each.__dict__["queue"] for each in caplog.records if "is stopped" in each.message] == [
        "q"
    ]
    settings = outbox.settings()
    assert outbox.value("select count(*) from relay.queue_items where queue = 'other'") == 2
    by_name = {each.queue: each for each in queues_listed(settings)}
    assert by_name["q"].fault == "match: relay cannot read a value of it"
    assert [each.text for each in examine(settings) if "the queue q is stopped" in each.text]
    assert by_name["other"].stopped_at is None
    # It goes on when it is declared otherwise.
    outbox.worker.execute("select relay.declare_queue('q')")
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert outbox.value("select count(*) from relay.queue_items where queue = 'q'") == 1
    assert all(each.stopped_at is None for each in queues_listed(settings))


def test_a_reader_of_a_former_edition_with_a_long_number_is_listed(outbox: Outbox) -> None:
    """openvang/vanguarstew#1665: a command was a traceback, and exited with 1."""
    outbox.reader.execute("select relay.declare_reader('r')")
    outbox.conn.execute("update relay.log_readers set match = %s::jsonb, params = match", (HUGE,))
    (found,) = readers_listed(outbox.settings())
    assert json_fields(found)["match"] == {"payload.x": "1" + "0" * 5000}
    assert exact_json.dumps(found.match, "match") == '{"payload.x": 1' + "0" * 5000 + "}"


@pytest.mark.parametrize(
    ("where", "params", "why"),
    [
        # Each .** visits all that is below: four of them, and 500 levels, are 2,600,000,000 visits.
        ('$.**.**.**.** ? (@ == "zz")', None, "two .[*][*]"),
        ("$.payload.x >= $least", '{"least": 1e131071}', "250 digits"),
        ("$.payload.x >= $least", '{"least": "%s"}' % ("x" * 20_001), "20000 characters"),
        ('$.payload.x == "%s"' % ("x" * 10_000), None, "10000 characters"),
    ],
)
def test_a_condition_is_bounded_when_it_is_declared(
    outbox: Outbox, where: str, params: str | None, why: str
) -> None:
    outbox.reader.execute("select relay.declare_reader('r')")
    for call in ("declare_queue('q', ", "declare_reader('s', ", "declare_subscriber('r', 's', "):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=why):
            outbox.conn.execute(
                f'select relay.{call}"where" => %s, params => %s::jsonb)'.encode(),
                (where, params),
            )


SLOW = """
    $.payload.a[*] ? (exists ($.payload.a[*] ? (exists ($.payload.a[*] ? (exists ($.payload.a[*] ? (@ == 0)))))))
"""
"""Without `.**`, but it visits the fourth power of the number of items."""
MANY: dict[str, Any] = {"payload": {"a": list(range(1, 1001))}}


def _declare_conditions(conn: psycopg.Connection[Any], *more: str) -> None:
    for name, where in (("slow", SLOW), ("large", "$.payload.amount >= 2"), ("slow too", SLOW)):
        conn.execute(
            'select relay.declare_queue(%s, "where" => %s'
            + "".join(f", {each}" for each in more)
            + ")",
            (name, where),
        )


def _in_queue(outbox: Outbox, name: str) -> list[Any]:
    return outbox.column(
        "select m.payload->>'amount' from relay.queue_messages as m join relay.queues as q on q.id = m.queue_id"
        " where q.name = %s order by m.id",
        (name,),
    )


def test_a_condition_that_takes_too_long_stops_its_queue_alone(outbox: Outbox) -> None:
    """Of 21 events of other hosts, none was applied for 174 s.

    json-path/JsonPath#874: a path of a customer blocked its thread, and nothing could end it. floci-io/floci#2697: an
    expression without bounds of time and depth pinned a core, without a word. IBM/JSONata4Java#23: the same.
    """
    _declare_conditions(outbox.worker)
    with outbox.limited_role() as (_, dsn):
        settings = outbox.settings(target={"dsn": dsn})
        with relaying(settings):
            outbox.publish(host(1), event(0, **MANY))
            for number in range(1, 22):
                outbox.publish(host(number + 1), event(number))
            outbox.wait_handled(120)
            by_name = {each.queue: each for each in queues_listed(settings)}
    outbox.assert_exact()
    assert _in_queue(outbox, "large") == [str(number) for number in range(2, 22)]
    for name in ("slow", "slow too"):
        assert by_name[name].stopped_at is not None
        assert by_name[name].fault == "where: it takes too long to evaluate: make it simpler"
    assert by_name["large"].stopped_at is None
    outbox.worker.value("select relay.drop_queue('slow')::text")


def test_a_lock_of_the_table_takes_no_condition_s_time(outbox: Outbox) -> None:
    """As `relay init` of another edition has it. The queue was stopped, and lacked what came.

    reorg/pg_repack#200 and #349, dalibo/temboard#1381: a limit of a statement's time ends what waits for a lock.
    strelov1/freehire#1284: readers wait behind a migration.
    """
    outbox.worker.execute(
        "select relay.declare_queue('large', \"where\" => '$.payload.amount >= 2')"
    )
    waits = (
        "select count(*) from pg_locks where relation = 'relay.queues'::regclass and not granted"
    )
    with relaying(outbox.settings()), psycopg.connect(outbox.superuser_dsn) as conn:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        conn.execute("lock table relay.queues in access exclusive mode")
        outbox.publish(host(2), event(2))
        wait_until(lambda: outbox.value(waits) > 0)
        # More than a condition of one event is given.
        conn.execute(
            "select pg_sleep(%s)", (conditions.LIMIT_SECONDS + conditions.LAST_SECONDS + 1,)
        )
        conn.rollback()
        wait_until(lambda: _in_queue(outbox, "large") == ["2"])
    assert outbox.value("select count(*) from relay.queues where stopped_at is not null") == 0
    outbox.assert_exact()


@pytest.mark.parametrize(
    "who",
    [
        "relay_dsn",
        # Before, who makes a role is no member of it.
        pytest.param("installer_dsn", marks=pytest.mark.server(16)),
        "superuser_dsn",
    ],
)
def test_an_operator_who_declares_a_queue_otherwise_leaves_it_to_its_workers(
    outbox: Outbox, who: str
) -> None:
    """As the runbook of a queue that is stopped says: it was the operator's then, and its workers were refused."""
    outbox.worker.execute("select relay.declare_queue('mail', '{}')")
    with psycopg.connect(getattr(outbox, who), autocommit=True) as conn:
        conn.execute("select relay.declare_queue('mail', '{\"event_type\": \"order.*\"}')")
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    assert outbox.worker.column("select payload->>'amount' from relay.take('mail')") == ["1"]
    assert outbox.worker.value("select relay.declare_queue('mail', '{}')")


@pytest.mark.parametrize("declared", ["slow", "large"])
def test_a_declaration_that_is_open_holds_back_nobody(outbox: Outbox, declared: str) -> None:
    """What stops a queue waited for its row, or for the revision of all queues.

    graphile/worker#121, oban-bg/oban#493: all wait for one client's lock; pikkujs/pikku#1360: idle in transaction.
    """
    _declare_conditions(outbox.worker)
    with relaying(outbox.settings()), psycopg.connect(outbox.worker_dsn) as worker:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        worker.execute(
            'select relay.declare_queue(%s, "where" => %s)', (declared, "$.payload.amount >= 3")
        )
        outbox.publish(host(1), event(0, **MANY))
        for number in range(2, 6):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from projection") == 6)
        wait_until(lambda: _in_queue(outbox, "large") == ["2", "3", "4", "5"])
        worker.rollback()
        outbox.publish(host(6), event(6))
        stopped = "select count(*) from relay.queues where stopped_at is not null"
        wait_until(lambda: outbox.value(stopped) == 2)
        outbox.wait_handled()
    outbox.assert_exact()


def test_a_fill_with_a_condition_that_takes_too_long_goes_on_when_that_is_another(
    outbox: Outbox,
) -> None:
    """What a queue that is filled from the log has missed is not lost: the fill goes on where it was."""
    settings = outbox.settings()
    for number in range(1, 4):
        outbox.publish(host(number), event(number))
    outbox.publish(host(1), event(0, **MANY))
    with relaying(settings):
        outbox.wait_handled()
        _declare_conditions(outbox.worker, "start => 'beginning'")
        stopped = "select count(*) from relay.queues where stopped_at is not null"
        wait_until(lambda: outbox.value(stopped) == 2, 120)
        outbox.publish(host(1), event(4))
        outbox.wait_handled()
        outbox.worker.execute(
            "select relay.declare_queue('slow', \"where\" => '$.payload.amount >= 1')"
        )
        wait_until(lambda: len(_in_queue(outbox, "slow")) == 4, 120)
        wait_until(lambda: _in_queue(outbox, "large") == ["2", "3", "4"], 120)
    assert sorted(_in_queue(outbox, "slow")) == ["1", "2", "3", "4"]


def test_what_relay_runs_is_cancelled_when_it_ends(outbox: Outbox, tmp_path: Path) -> None:
    """A statement that outlived relay kept its locks, for which the next instance waited."""
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers={"projection": {"type": "sql", "statement": "select pg_sleep(600)"}},
        shutdown_timeout=0.5,
    )
    sleeps = (
        "select count(*) from pg_stat_activity where datname = current_database() and state = 'active'"
        " and strpos(query, 'pg_sleep(600)') > 0 and pid <> pg_backend_pid()"
    )
    outbox.publish(host(1), event(1))
    with running(config) as process:
        wait_until(lambda: outbox.value(sleeps) == 1)
        process.terminate()
        wait_until(lambda: outbox.value(sleeps) == 0)


@contextmanager
def _publishers(outbox: Outbox, *names: str) -> Iterator[list[psycopg.Connection[Any]]]:
    """Sessions of new roles that may publish."""
    roles = [sql.Identifier(f"{outbox.slot}_{name}") for name in names]
    with ExitStack() as sessions:
        for role in roles:
            create = "create role {} login password 'p' in role relay_publisher"
            outbox.conn.execute(sql.SQL(create).format(role))
            sessions.callback(outbox.conn.execute, sql.SQL("drop role {}").format(role))
        yield [
            sessions.enter_context(
                psycopg.connect(
                    outbox.dsn_as(f"{outbox.slot}_{name}"),
                    autocommit=True,
                )
            )
            for name in names
        ]


def _declare_schedule(conn: psycopg.Connection[Any], name: str, payload: str = "1") -> None:
    conn.execute(
        "select relay.declare_schedule(%s, jsonb_build_object('host_id', %s::text, 'event_type', 'tick',"
        " 'payload', %s::jsonb), every => '1 s')",
        (name, host(1), payload),
    )


@pytest.mark.parametrize("payload", ["[1e131071]", '"%s"' % ("x" * 100_000)])
def test_the_event_of_a_schedule_is_bounded_when_it_is_declared(
    outbox: Outbox, payload: str
) -> None:
    with (
        _publishers(outbox, "first") as (first,),
        pytest.raises(psycopg.errors.InvalidParameterValue, match=r"declare_schedule: publish"),
    ):
        _declare_schedule(first, "large", payload)


def test_schedules_of_one_owner_do_not_starve_those_of_another(outbox: Outbox) -> None:
    """timescale/timescaledb#9918: jobs were passed by for ever. citusdata/pg_cron#200: all waited for the longest one.

    Here an owner's thirty took 3.6 s a tick, and another's came after 86 s.
    """
    with _publishers(outbox, "first", "second") as (first, second):
        for number in range(50):
            _declare_schedule(first, f"many {number}")
        _declare_schedule(second, "one")
        outbox.conn.execute(
            "update relay.schedules set due_at = now() - interval '1 hour' where name <> 'one'"
        )
        outbox.conn.execute("update relay.schedules set due_at = now() where name = 'one'")
        found = [each.name for each in schedules.due(outbox.conn, 10)]
        assert len(found) == 10
        assert "one" in found[:2]


def test_an_event_that_a_former_edition_accepted_stands_still_by_itself(outbox: Outbox) -> None:
    with _publishers(outbox, "first", "second") as (first, second), outbox.limited_role() as at:
        _declare_schedule(first, "large")
        _declare_schedule(second, "small")
        outbox.conn.execute(
            "update relay.schedules set publish = publish || jsonb_build_object('payload', array_fill(%s::numeric,"
            " array[1500])) where name = 'large'",
            ("1e131071",),
        )
        published = "select published from relay.schedules where name = 'small'"
        with relaying(outbox.settings(source={**outbox.config()["source"], "dsn": at[1]})):
            wait_until(lambda: outbox.value(published) >= 2)
        assert outbox.conn.execute(
            "select published, fault from relay.schedules where name = 'large'"
        ).fetchall() == [
            (0, "publish: a number must have at most 250 digits before and after its point")
        ]
        _declare_schedule(first, "large", "2")
        assert outbox.value("select fault from relay.schedules where name = 'large'") is None


def test_transactions_for_a_queue_that_somebody_has_dropped_wait_for_it(outbox: Outbox) -> None:
    """timgit/pg-boss#463: without its queue a job ended nowhere, without a word. Here it ended relay."""
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    config = outbox.config()
    settings = outbox.settings(
        handlers={**config["handlers"], "mail": {"type": "queue"}},
        routes=[
            {"match": {"event_type": "mail.*"}, "handlers": ["projection", "mail"]},
            *config["routes"],
        ],
    )
    with relaying(settings):
        outbox.publish(host(1), event(1, "mail.due"))
        outbox.wait_handled()
        outbox.worker.execute("select relay.drop_queue('mail')")
        outbox.publish(host(1), event(2, "mail.due"))
        outbox.publish(host(2), event(3))
        wait_until(lambda: outbox.column("select amount from projection order by 1") == [1, 3])
        waiting = "select count(*) from relay.deferred where reason like %s and handler = 'mail'"
        missing = "%handlers.mail.queue: there is no queue 'mail'%"
        wait_until(lambda: outbox.value(waiting, (missing,)) == 1)
        outbox.publish(host(2), event(4))
        wait_until(lambda: outbox.column("select amount from projection order by 1") == [1, 3, 4])
        outbox.worker.execute("select relay.declare_queue('mail', null)")
        outbox.wait_handled(60)
    outbox.assert_exact()
    assert _in_queue(outbox, "mail") == ["2"]
