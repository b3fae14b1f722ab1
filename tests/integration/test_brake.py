"""A handler that fails with one transaction after the other is stopped, instead of burying the stream."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from relay.admin import status
from relay.config.settings import Settings
from relay.pipeline.apply import Applier
from relay.spark.session import Session
from relay.store import brakes
from relay.store.brakes import Streak
from tests.outbox import Outbox, event, host, relaying, wait_until, work_and_crash
from tests.webhook import Answer, Webhook

LIMIT = 5


def braking(
    outbox: Outbox, engine: str = "inline", limit: int | None = LIMIT, **more: Any
) -> Settings:
    return outbox.settings(engine, dead_letters={"brake": limit}, **more)


def dead(outbox: Outbox) -> int:
    return int(outbox.value("select count(distinct transaction_id) from relay.dead_letter_queue"))


def stopped(outbox: Outbox) -> bool:
    return bool(outbox.column("select 1 from relay.brakes where braked_at is not null"))


def break_the_handler(outbox: Outbox) -> None:
    outbox.conn.execute("alter table projection add constraint broken check (amount is null)")


def mend_the_handler(outbox: Outbox) -> None:
    outbox.conn.execute("alter table projection drop constraint broken")


def test_a_broken_handler_is_stopped_and_goes_on_when_it_is_mended(
    outbox: Outbox,
    engine: str,
    session: Session | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def errors() -> set[str]:
        logged = (record for record in caplog.records if record.levelname == "ERROR")
        faults = {str(getattr(record, "fault", "")) for record in logged}
        return {fault for fault in faults if fault.startswith("Braked: ")}

    break_the_handler(outbox)
    settings = braking(outbox, engine)
    with relaying(settings, session):
        for number in range(3):
            outbox.publish(host(number), event(number))
        wait_until(lambda: dead(outbox) == 3)
        # Several partitions, and so several tasks.
        for number in range(20):
            outbox.publish(host(number), event(number))
        wait_until(lambda: stopped(outbox) and bool(errors()))
        assert dead(outbox) <= LIMIT
    (line,) = errors()
    assert line.startswith(
        "Braked: handlers.projection: more than 5 transactions in a row failed with CheckViolation"
    )
    (shown,) = status.read(settings).braked
    assert (shown.handler, shown.fault) == ("projection", "CheckViolation 23514")
    # Of a task that was rolled back nothing is left to look at, but for one of its transactions.
    assert shown.failed > 0
    assert shown.sample is not None
    assert 'violates check constraint "broken"' in shown.sample
    assert shown.sample_hosts is not None
    assert shown.sample_hosts[0] in shown.sample
    # A restart grants no more, and what is mended goes on by itself.
    with relaying(settings, session):
        outbox.publish(host(1), event(1))
        caplog.clear()
        wait_until(lambda: bool(errors()))
        mend_the_handler(outbox)
        outbox.wait_drained()
    if engine == "inline":
        assert "a stopped handler goes on" in caplog.messages
    # Each task of the rest that begins below the limit may reach it.
    assert dead(outbox) <= LIMIT
    assert outbox.value("select count(*) from relay.brakes") == 0
    assert status.read(settings).braked == []
    outbox.assert_exact()


def test_a_restart_grants_no_more_dead_letters(outbox: Outbox) -> None:
    break_the_handler(outbox)
    for _ in range(3):
        for number in range(2):
            outbox.publish(host(number), event(1))
        with relaying(braking(outbox)):
            wait_until(lambda: stopped(outbox) or dead(outbox) == handled(outbox))
    assert stopped(outbox)
    assert dead(outbox) <= LIMIT
    mend_the_handler(outbox)
    outbox.drain(braking(outbox))
    assert dead(outbox) <= LIMIT
    outbox.assert_exact()


def handled(outbox: Outbox) -> int:
    return int(outbox.value("select count(*) from outbox_message_t"))


def test_tasks_side_by_side_count_together(outbox: Outbox) -> None:
    break_the_handler(outbox)
    outbox.fill(200, events=1)
    with relaying(braking(outbox, limit=150, batch={"inline_workers": 4})):
        wait_until(lambda: stopped(outbox))
        assert dead(outbox) <= 150
        mend_the_handler(outbox)
        outbox.wait_drained()
    outbox.assert_exact()


@pytest.mark.parametrize("limit", [0, None, 100])
def test_a_poisonous_run_is_let_through(outbox: Outbox, limit: int | None) -> None:
    break_the_handler(outbox)
    for number in range(LIMIT + 1):
        outbox.publish(host(number), event(1))
    with relaying(braking(outbox)):
        wait_until(lambda: stopped(outbox))
    outbox.drain(braking(outbox, limit=limit))
    assert dead(outbox) == LIMIT + 1
    assert not stopped(outbox)


def test_poison_between_good_transactions_never_stops_a_handler(outbox: Outbox) -> None:
    for number in range(4 * LIMIT):
        outbox.publish(host(1), event(-1))
        if number % LIMIT == LIMIT - 1:
            outbox.publish(host(2), event(1))
    outbox.drain(braking(outbox))
    assert dead(outbox) == 4 * LIMIT
    assert outbox.value("select count(*) from relay.brakes") == 0


def test_replayed_dead_letters_die_again_without_stopping_anything(outbox: Outbox) -> None:
    from relay.admin.dead_letters import DeadLetters
    from relay.store.dead_letters.selection import DeadLetterSelection

    break_the_handler(outbox)
    for number in range(LIMIT * 2):
        outbox.publish(host(number), event(1))
    outbox.drain(braking(outbox, limit=0))
    dead_letters = DeadLetters(braking(outbox), outbox.conn)
    assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == LIMIT * 2
    with relaying(braking(outbox)):
        wait_until(
            lambda: (
                outbox.value("select count(*) from relay.dead_letter_queue where status = 'dead'")
                == LIMIT * 2
            )
        )
    assert not stopped(outbox)


def test_a_replay_hides_no_failure_of_what_is_due_with_it(outbox: Outbox) -> None:
    from relay.admin.dead_letters import DeadLetters
    from relay.store.dead_letters.selection import DeadLetterSelection

    break_the_handler(outbox)
    outbox.publish(host(1), event(1))
    for number in range(LIMIT * 3):
        outbox.publish(host(number), event(1, deliver_at="2999-01-01"))
    outbox.drain(braking(outbox, limit=0))
    dead_letters = DeadLetters(braking(outbox), outbox.conn)
    assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == 1
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    with relaying(braking(outbox)):
        wait_until(lambda: stopped(outbox))
        assert dead(outbox) <= LIMIT + 1


def test_a_retry_reports_what_a_task_does(outbox: Outbox) -> None:
    """It measured no handler, and said that one is stopped before that was committed."""
    for number in range(LIMIT + 2):
        outbox.publish(host(number), event(1, deliver_at="2999-01-01"))
    settings = braking(outbox)
    outbox.drain(settings)
    break_the_handler(outbox)
    outbox.conn.execute("update relay.deferred set retry_at = now()")
    applier = Applier(settings, 1)
    try:
        retried = applier.retry_deferred()
    finally:
        applier.close()
    assert (retried.tried, retried.applied, len(retried.dead)) == (LIMIT + 2, 0, LIMIT)
    assert len(retried.braked) == 1
    assert retried.seconds["projection"] > 0


def test_the_target_leaves_the_streaks_of_sinks_alone(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """It passed an event of a stopped sink, and took that for the sink's success."""
    settings = braking(
        outbox,
        handlers={**outbox.config()["handlers"], "hook": {"type": "http", "url": "http://[::1]:1"}},
        routes=[{"handlers": ["projection", "hook"]}],
    )
    brakes.store(outbox.conn, settings.group, "hook", Streak("Rejected", LIMIT, True))
    outbox.publish(host(1), event(1))
    work_and_crash(settings, 1)
    assert outbox.value("select count(*) from projection") == 1
    assert stopped(outbox)
    assert "a stopped handler goes on" not in caplog.messages


def test_a_stopped_sink_keeps_its_position_and_others_go_on(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    mended = False

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        return Answer(200 if mended else 400)

    retry = {"wait": 0.2, "max_wait": 0.2, "jitter": 0}
    with Webhook(answers) as webhook:
        hook = {"type": "http", "url": webhook.url, "order_by": "none", "retry": retry}
        settings = braking(
            outbox,
            handlers={**outbox.config()["handlers"], "hook": hook},
            routes=[
                {"match": {"event_type": "hook"}, "handlers": ["hook"]},
                {"handlers": ["projection"]},
            ],
        )
        with relaying(settings):
            for number in range(LIMIT * 3):
                outbox.publish(host(number), event(number, event_type="hook"))
                outbox.publish(host(number), event(number))
            wait_until(lambda: outbox.value("select count(*) from projection") == LIMIT * 3)
            # The last dead letter may be stored a moment after the streak that it ended.
            wait_until(lambda: stopped(outbox) and dead(outbox) >= LIMIT)
            assert dead(outbox) == LIMIT
            assert outbox.value("select count(*) from relay.deferred") < LIMIT
            wait_until(
                lambda: any(r.getMessage() == "a handler is stopped" for r in caplog.records)
            )
            (said,) = (r for r in caplog.records if r.getMessage() == "a handler is stopped")
            assert (
                "and more than one in 20, failed with Rejected: HTTP 400: no more of them"
                in str(said.__dict__["fault"])
            )
            mended = True
            wait_until(lambda: len(webhook.accepted) == LIMIT * 2)
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
            wait_until(lambda: not stopped(outbox))
    assert dead(outbox) == LIMIT
    assert len(webhook.accepted) == LIMIT * 2


@pytest.mark.parametrize("amount", [pytest.param(-1, marks=pytest.mark.rare), 1])
def test_what_is_deferred_with_transactions_of_a_stopped_handler_flows(
    outbox: Outbox, amount: int, caplog: pytest.LogCaptureFixture
) -> None:
    outbox.conn.execute("create table broken as select 1")
    retry = {"wait": 0.1, "max_wait": 0.1, "jitter": 0}
    with Webhook() as webhook:
        handlers = {
            "python": {
                "type": "python",
                "callable": "tests.callables:refuse_or_ask_again",
                "retry": {**retry, "attempts": 2},
            },
            "hook": {"type": "http", "url": webhook.url, "order_by": "none", "retry": retry},
        }
        routes = [
            {"match": {"event_type": "hook"}, "handlers": ["hook"]},
            {"handlers": ["python"]},
        ]
        with relaying(braking(outbox, handlers=handlers, routes=routes)):
            outbox.publish(host(0), event(0, event_type="hook"))
            wait_until(lambda: len(webhook.accepted) == 1)
            # Not due before they are deferred, also on a slow machine.
            soon = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
            for number in range(LIMIT * 2):
                outbox.publish(host(number), event(amount, deliver_at=soon))
            wait_until(lambda: stopped(outbox))
            assert dead(outbox) == LIMIT
            for number in range(3):
                outbox.publish(host(number), event(number, event_type="hook", deliver_at=soon))
            wait_until(lambda: len(webhook.accepted) == 4)
            outbox.conn.execute(
                "truncate broken; alter table projection drop constraint projection_amount_check"
            )
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
            wait_until(lambda: not stopped(outbox))
    assert len(webhook.accepted) == 4
    assert dead(outbox) == LIMIT
    assert outbox.value("select count(*) from projection") == LIMIT
    assert "a handler is stopped" in caplog.messages
