"""Deferred transactions survive kills: order per key held, effects exact, deliveries at least once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from relay.admin.dead_letters import DeadLetters
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import APPEND, Outbox, host, relaying, wait_until
from tests.process import running
from tests.webhook import Answer, Webhook

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("stays_live")]

CHANCE = random.Random()
SHORT_INTERVALS = {"wait": 0.3, "max_wait": 1.0, "jitter": 0.2, "defer_after": 0}


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_ten_thousand_deferred_over_a_thousand_keys_killed_ten_times(
    outbox: Outbox, tmp_path: Path
) -> None:
    """The handler is busy until the middle of it, so that everything is deferred first."""
    outbox.conn.execute("create table busy (amount int)")
    outbox.conn.execute("insert into busy select generate_series(1, 5)")
    handlers = {
        "projection": {"type": "sql", "statement": APPEND},
        "slow": {
            "type": "python",
            "callable": "tests.callables:unless_busy",
            "retry": SHORT_INTERVALS,
        },
    }
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers=handlers,
        routes=[{"handlers": list(handlers)}],
        batch={"inline_max_events": 1_000_000_000, "max_events": 1_000},
    )
    outbox.fill(10_000, events=1, hosts=1_000)

    def deferred() -> int:
        return int(outbox.value("select count(*) from relay.deferred"))

    for kill in range(5):
        with running(config) as service:
            wait_until(lambda goal=(kill + 1) * 1_900: deferred() >= goal, 120)  # type: ignore[misc]
            service.kill()
    with running(config) as service:
        wait_until(lambda: deferred() == 10_000, 120)
        assert outbox.value("select count(*) from projection") == 0
        wait_until(lambda: outbox.value("select max(attempts) from relay.deferred") > 1, 60)
        service.kill()
    outbox.conn.execute("delete from busy")
    for kill in range(4):
        with running(config) as service:
            wait_until(lambda goal=10_000 - (kill + 1) * 2_000: deferred() <= goal, 120)  # type: ignore[misc]
            service.kill()
    with running(config) as service:
        wait_until(lambda: deferred() == 0, 120)
        assert service.terminate() == 0
    assert outbox.value("select count(*) from projection") == 10_000
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert outbox.value("select count(*) from relay.deferred_rows") == 0
    outbox.assert_exact()


@pytest.mark.rare
def test_a_replay_with_relay_killed_in_its_midst_is_exact(outbox: Outbox, tmp_path: Path) -> None:
    """Each kill meets relay within a commit that has done a part of its inserts and waits for the next."""
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.conn.execute("alter table projection add constraint odd check (amount is null)")
    outbox.fill(1_000, events=3, hosts=20)
    outbox.drain(outbox.settings(dead_letters={"brake": 0}))
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 3_000
    outbox.conn.execute("alter table projection drop constraint odd")
    dead_letters = DeadLetters(outbox.settings(), outbox.conn)
    assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), "mended")) == 1_000

    outbox.conn.execute(
        """
        create function gate() returns trigger language plpgsql as
            $$ begin perform pg_advisory_xact_lock_shared(new.c_offset); return new; end $$;
        create trigger gate before insert on projection for each row execute function gate()
        """
    )

    for index in (200, 1_400, 2_800):
        outbox.conn.execute("select pg_advisory_lock(%s)", [index])
        with running(config) as service:
            wait_until(lambda: outbox.value("select count(*) from pg_locks where not granted") > 0)
            service.kill()
        assert outbox.value("select count(*) from relay.deferred") > 0
        outbox.conn.execute("select pg_advisory_unlock(%s)", [index])
    with running(config):
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert (
        dead_letters.purge(dead_letters.find(DeadLetterSelection(), ("replayed",)), None) == 3_000
    )
    assert outbox.value("select count(*) from projection") == 3_000
    outbox.assert_exact()


@pytest.mark.rare
def test_an_endpoint_with_every_fault_loses_nothing_and_delays_nobody_else(
    outbox: Outbox, tmp_path: Path
) -> None:
    """Half of the hosts meet every fault there is, relay is killed twice, and the endpoint dies and comes back."""
    faulty = [host(number) for number in range(10)]
    faults = [
        Answer(500),
        Answer(429, (("retry-after", "1"),)),
        Answer(0),
        Answer(200, after=0.3),
        Answer(200, after=3),
    ]
    healed = False

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        ill = not healed and any(str(each).encode() in body for each in faulty)
        return CHANCE.choice(faults) if ill and CHANCE.random() < 0.3 else Answer(200)

    with Webhook(answers) as webhook:
        hook: dict[str, Any] = {
            "type": "http",
            "url": webhook.url,
            "timeout": 1,
            "retry": SHORT_INTERVALS,
            "concurrency": 8,
        }
        handlers = {"projection": {"type": "sql", "statement": APPEND}, "hook": hook}
        config = outbox.config_file(
            tmp_path / "relay.yaml", handlers=handlers, routes=[{"handlers": list(handlers)}]
        )
        outbox.fill(400, events=2, hosts=20)
        for goal in (150, 400):
            with running(config) as service:
                wait_until(lambda goal=goal: len(webhook.accepted) > goal, 60)  # type: ignore[misc]
                service.kill()
        with running(config) as service:
            wait_until(lambda: len(webhook.accepted) > 600, 60)
        port = webhook.port
    outbox.fill(100, events=1, hosts=20)
    with running(config) as service:
        # The target does not wait for the endpoint, and the sink stops in the log.
        wait_until(lambda: outbox.value("select count(*) from projection") == 900, 60)
        wait_until(lambda: outbox.value("select fault is not null from relay.sinks"), 60)
        with Webhook(port=port) as again:
            healed = True
            outbox.wait_delivered("hook")
            assert service.terminate() == 0
            taken = webhook.accepted + again.accepted
    stored = outbox.column("select id::text from outbox_message_t order by c_offset")
    assert {request.event["id"] for request in taken} == set(stored)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    assert outbox.value("select count(*) from relay.deferred") == 0
    outbox.assert_exact()
    # Every event may come again, but the first of each host's come in order.
    for number in range(20):
        first = list(
            dict.fromkeys(
                int(request.event["sequence"])
                for request in taken
                if request.event["hostid"] == str(host(number))
            )
        )
        assert first == sorted(first)


def test_a_host_that_hangs_delays_no_other(outbox: Outbox) -> None:
    def answers(headers: dict[str, str], body: bytes) -> Answer:
        return Answer(200, after=30 if str(host(1)).encode() in body else 0)

    with Webhook(answers) as webhook:
        hook = {
            "type": "http",
            "url": webhook.url,
            "timeout": 3,
            "retry": {**SHORT_INTERVALS, "wait": 1},
        }
        settings = outbox.settings(
            handlers={"hook": hook}, routes=[{"handlers": ["hook"]}], batch={"max_events": 20}
        )
        for number in range(400):
            outbox.publish(
                host(number % 4),
                {"event_type": "a", "aggregate_type": "A", "aggregate_id": "1", "payload": {}},
            )
        with relaying(settings):
            outbox.wait_drained()
            others = [request.at for request in webhook.accepted]
            assert len(others) == 300
            # Not even the first of the host that hangs costs them its timeout.
            assert max(others) - min(others) < 2
