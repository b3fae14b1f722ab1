"""What handlers do wrong, and what the surroundings do to them: what is retried, dead-lettered, or stops relay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.pipeline.handling import HandlerRunner
from relay.service import Service
from relay.spark.session import Session
from relay.store import groups
from relay.store.connections import INSTANCE
from relay.store.presence import instances
from tests.outbox import APPEND, Outbox, event, host, relaying, wait_until
from tests.process import running


def python(outbox: Outbox, name: str, engine: str = "inline", **overrides: Any) -> Settings:
    handlers = {"python": {"type": "python", "callable": f"tests.callables:{name}"}}
    return outbox.settings(
        engine, handlers=handlers, routes=[{"handlers": ["python"]}], **overrides
    )


def dead(outbox: Outbox) -> list[tuple[object, ...]]:
    return outbox.conn.execute(
        "select transaction_id::uuid, exception from relay.dead_letter_queue order by id"
    ).fetchall()


# Outages while relay looks for what a process died of.


def test_an_outage_in_guarded_mode_is_no_death(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    outbox.conn.execute("create sequence attempts")
    outbox.conn.execute(
        "insert into relay.groups (group_id, running) values ('default', true)"
        " on conflict (group_id) do update set running = true"
    )
    outbox.publish(host(1), event(1))
    outbox.drain(python(outbox, "refused_at_first", engine, crash_limit=1), session)
    assert outbox.value("select last_value from attempts") == 4
    assert not dead(outbox)
    assert outbox.value("select count(*) from relay.suspects") == 0
    outbox.assert_exact()


def test_only_an_instance_that_vanished_has_died(outbox: Outbox) -> None:
    outbox.conn.execute("delete from relay.groups")
    this, group = INSTANCE, "default"
    assert not groups.begin(outbox.conn, group, lambda _: ())
    # Another one starts beside it, and a third after that one was killed.
    outbox.conn.execute("update relay.groups set instances = '{other:1}'")
    assert not groups.begin(outbox.conn, group, lambda _: {"other:1"})
    outbox.conn.execute("update relay.groups set instances = '{other:1,killed:2}'")
    assert groups.begin(outbox.conn, group, lambda _: {"other:1"})
    assert outbox.value("select instances from relay.groups") == ["other:1", this]
    # Its own name is that of one that was here before, as in a container.
    assert groups.begin(outbox.conn, group, lambda _: {"other:1"})
    groups.end(outbox.conn, group)
    assert outbox.value("select running from relay.groups")
    outbox.conn.execute("update relay.groups set instances = array[%s]", (this,))
    groups.end(outbox.conn, group)
    assert not outbox.value("select running from relay.groups")


def test_an_instance_that_a_fault_has_stopped_did_not_die(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1, aggregate_id="rollback"))
    with pytest.raises(ConfigurationError):
        Service(python(outbox, "obey")).run()
    assert outbox.conn.execute("select running, instances from relay.groups").fetchone() == (
        False,
        [],
    )


def test_a_stop_that_takes_longer_than_shutdown_timeout_is_no_death(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute(
        "insert into relay.groups (group_id, running) values ('default', true)"
        " on conflict (group_id) do update set running = true"
    )
    outbox.publish(host(1), event(1))
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers={"python": {"type": "python", "callable": "tests.callables:sleep_long"}},
        routes=[{"handlers": ["python"]}],
        shutdown_timeout=0.2,
    )
    noted = "select count(*) from relay.suspects where attempts = 1 and starts_with(suspect, '1/')"
    with running(config) as service:
        wait_until(lambda: outbox.value(noted) == 1)
        assert service.terminate() == 1
    # Not with 0 attempts either.
    assert outbox.column("select suspect from relay.suspects") == []


def test_transactions_of_one_commit_are_told_apart_by_their_rows(
    outbox: Outbox, tmp_path: Path
) -> None:
    """They have neither c_offset nor transaction_id, as where no trigger numbers them: only the third one is to die."""
    outbox.conn.execute(
        "create table adopted (id uuid default gen_random_uuid(), host_id uuid, user_id uuid, event_type text,"
        " payload jsonb)"
    )
    outbox.give("adopted")
    names = dict.fromkeys(("slot", "publication"), f"{outbox.slot}_adopted")
    overrides: dict[str, Any] = {
        "source": {"dsn": outbox.relay_dsn, "table": "public.adopted", "mode": "wal", **names},
        "handlers": {"python": {"type": "python", "callable": "tests.callables:die_of_666"}},
        "routes": [{"handlers": ["python"]}],
        "group": "adopted",
        "crash_limit": 1,
    }
    outbox.install_again(outbox.settings(**overrides))
    outbox.conn.execute("alter table adopted disable trigger user")
    with outbox.conn.transaction():
        for user, amount in enumerate((1, 2, 666, 3, 4)):
            outbox.conn.execute(
                "insert into adopted (host_id, user_id, event_type, payload) values (%s, %s, 'placed', %s)",
                (host(1), host(user), Jsonb({"amount": amount})),
            )
    config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
    for status in (66, 66, 0):
        with running(config) as service:
            wait_until(lambda: service.process.poll() is not None or outbox.handled() == 5)
            assert (service.process.poll() or service.terminate()) == status
    assert outbox.column("select amount from projection order by seq") == [1, 2, 3, 4]
    assert "1 processes died" in outbox.value("select exception from relay.dead_letter_queue")
    assert outbox.value("select count(*) from relay.suspects") == 0


def test_the_names_of_living_instances_are_those_that_began(outbox: Outbox) -> None:
    with relaying(outbox.settings()):
        wait_until(
            lambda: outbox.column("select unnest(instances) from relay.groups") == [INSTANCE]
        )
        assert instances(outbox.conn, "default") == [INSTANCE]
    assert outbox.column("select unnest(instances) from relay.groups") == []


# What is the event's fault, and what is not.


def test_an_os_error_that_names_no_outage_is_the_event_s(
    outbox: Outbox, engine: str, session: Session | None
) -> None:
    bad = outbox.publish(host(1), event(7))
    outbox.publish(host(1), event(1))
    outbox.drain(python(outbox, "read_what_is_no_gzip", engine), session)
    ((transaction, exception),) = dead(outbox)
    assert transaction == bad
    assert str(exception).startswith("BadGzipFile")
    outbox.assert_exact()


def test_a_handler_may_close_its_cursor(outbox: Outbox) -> None:
    for number in range(3):
        outbox.publish(host(number), event(number))
    outbox.drain(python(outbox, "close_the_cursor"))
    outbox.assert_exact()


# Handlers that end the transaction.


@pytest.mark.parametrize(
    "statements",
    [
        "rollback",
        "commit",
        "rollback;insert into projection (amount) values (99)",
        *(
            pytest.param(each, marks=pytest.mark.rare)
            for each in (
                "rollback;begin",
                "rollback;begin;select 1/0",
                "commit and chain",
                "set constraints all immediate;commit;begin",
            )
        ),
        "connection.commit",
        "close",
        "rollback;select 1;raise",
        "prepare transaction 'mine'",
    ],
)
def test_a_handler_that_ends_the_transaction_stops_relay_and_nothing_is_committed(
    outbox: Outbox, statements: str
) -> None:
    outbox.conn.execute("alter table projection alter seq drop not null")
    with outbox.conn.transaction():
        for number in range(5):
            outbox.publish(
                host(number), event(number, aggregate_id=statements if number == 3 else "1")
            )
    before = outbox.column("select next_offset from relay.consumer_offsets")
    handlers = {
        "python": {"type": "python", "callable": "tests.callables:obey"},
        # With an ordering key to hold, everything runs under a savepoint of relay's.
        "later": {"type": "sql", "statement": "select 1", "on_exhausted": "block_key"},
    }
    settings = outbox.settings(handlers=handlers, routes=[{"handlers": list(handlers)}])
    with pytest.raises(ConfigurationError, match=r"handlers.python.callable: the function ended"):
        Service(settings).run()
    assert outbox.column("select (amount, host_id) from projection") == []
    assert not dead(outbox)
    assert outbox.column("select next_offset from relay.consumer_offsets") == before


def test_a_handler_may_check_its_constraints_and_use_savepoints(outbox: Outbox) -> None:
    for statements in (
        "set constraints all immediate",
        "savepoint s;rollback to savepoint s",
        "savepoint s;release savepoint s",
        "set constraints all deferred",
        "do $$begin set constraints all immediate; end$$",
        "row_factory",
    ):
        outbox.publish(host(1), event(1, aggregate_id=statements))
    outbox.drain(python(outbox, "obey"))
    assert not dead(outbox)
    outbox.assert_exact()


def test_a_handler_that_exits_does_not_take_relay_along(outbox: Outbox) -> None:
    bad = outbox.publish(host(1), event(1, aggregate_id="sys.exit"))
    outbox.publish(host(1), event(2))
    outbox.drain(python(outbox, "obey"))
    ((transaction, exception),) = dead(outbox)
    assert transaction == bad
    assert str(exception).startswith("RuntimeError: the function called sys.exit(3)")
    outbox.assert_exact()


def test_a_handler_cannot_roll_back_to_a_savepoint_of_relay(outbox: Outbox) -> None:
    with outbox.conn.transaction():
        for number in range(4):
            outbox.publish(host(1), event(number))
        bad = outbox.publish(host(1), event(9, aggregate_id='rollback to savepoint "_pg3_1"'))
    outbox.drain(python(outbox, "obey"))
    ((transaction, exception),) = dead(outbox)
    assert transaction == bad
    assert str(exception).startswith("InvalidSavepointSpecification")
    assert outbox.value("select count(*) from projection") == 4


def test_a_handler_that_hides_an_error_is_told_so(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1))
    bad = outbox.publish(host(1), event(-1))
    outbox.publish(host(1), event(2))
    outbox.drain(python(outbox, "hide_an_error"))
    ((transaction, exception),) = dead(outbox)
    assert transaction == bad
    assert str(exception).startswith("TransactionAborted: the function caught a database error")
    outbox.assert_exact()


def test_a_loose_handler_that_ends_the_transaction_stops_relay_too(outbox: Outbox) -> None:
    outbox.publish(host(1), event(1, aggregate_id="rollback"))
    handlers = {"python": {"type": "python", "callable": "tests.callables:obey", "reliable": False}}
    settings = outbox.settings(handlers=handlers, routes=[{"handlers": ["python"]}])
    with pytest.raises(ConfigurationError, match="ended the database transaction"):
        Service(settings).run()


# Time-outs.


def slow(outbox: Outbox, seconds: str, each: str) -> dict[str, Any]:
    fields = "id, host_id, c_offset, transaction_id"
    statement = (
        f"insert into projection ({fields}, amount) select {fields}, a from (select *, "
        f"(payload->>'amount')::numeric as a, pg_sleep({seconds})::text as s from batch) x where s = ''"
        if each == "batch"
        else APPEND.replace("values (", "select ").rstrip().removesuffix(")")
        + f" from pg_sleep({seconds})"
    )
    return {
        "handlers": {"slow": {"type": "sql", "each": each, "statement": statement}},
        "routes": [{"handlers": ["slow"]}],
        "target": {"dsn": make_conninfo(outbox.relay_dsn, options="-c statement_timeout=300ms")},
    }


@pytest.mark.parametrize("each", ["event", "batch"])
def test_a_portion_that_takes_longer_than_statement_timeout_is_halved(
    outbox: Outbox, each: str
) -> None:
    outbox.fill(120, events=1)
    bad = outbox.publish(host(1), event(-1))
    outbox.drain(outbox.settings(**slow(outbox, "0.005", each)), timeout=30)
    assert outbox.value("select count(*) from projection") == 120
    assert [transaction for transaction, _ in dead(outbox)] == [bad]
    outbox.assert_exact()


def test_a_transaction_that_takes_too_long_alone_is_deferred_and_says_so(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        outbox.publish(host(1), event(1))
    outbox.conn.execute("begin; lock table projection in share mode")
    settings = outbox.settings(**slow(outbox, "0", "event"))

    def output() -> bool:
        return any(
            "handlers.slow: a single transaction takes longer" in str(getattr(record, "fault", ""))
            for record in caplog.records
        )

    with relaying(settings):
        wait_until(output)
        outbox.conn.execute("commit")
        wait_until(lambda: outbox.value("select count(*) from projection") == 3)
    assert not dead(outbox)
    outbox.assert_exact()


def test_where_all_fail_hardly_any_are_tried_together(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    call = HandlerRunner._call

    def count(self: HandlerRunner, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        call(self, *arguments, **options)

    monkeypatch.setattr(HandlerRunner, "_call", count)
    outbox.conn.execute("alter table projection add constraint broken check (amount is null)")
    outbox.fill(200, events=1)
    outbox.drain(outbox.settings(dead_letters={"brake": 0}, batch={"inline_workers": 1}))
    assert outbox.value("select count(distinct transaction_id) from relay.dead_letter_queue") == 200
    # One alone each, and what was tried with others before the first one.
    assert calls < 215
