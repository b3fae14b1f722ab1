"""Many sinks in one process cost little more than one, and none of them feels another.

Public reports: feldera/feldera#6867, Nordstrom/kafka-connect-lambda#53, wepay/kafka-connect-bigquery#117 (threads for
each sink), and those of the docstrings.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import psutil
import psycopg
import pytest

from relay.model.events import Lsn, Transaction
from relay.model.snapshots import Snapshot
from relay.service import Service
from relay.sinks.http import Http
from relay.store import locks
from relay.store.connections import connect
from relay.store.positions import sinks as positions
from relay.store.positions.sinks import Claim, Claims, SinkEntry
from tests.outbox import APPEND, Outbox, event, host, relaying, run_until_fault, wait_until
from tests.process import running
from tests.webhook import Answer, Webhook, hanging_until

MANY = 32
RETRY = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01, "defer_after": 0.0}

SESSIONS = """
    select count(*) from pg_stat_activity
     where datname = current_database() and usename = 'app_relay' and backend_type = 'client backend'
"""
COMMITS = "select xact_commit from pg_stat_database where datname = current_database()"
CLAIMS = """
    select pid from pg_locks where locktype = 'advisory' and classid = %s and database =
           (select oid from pg_database where datname = current_database()) group by pid
"""
WAITS = (
    "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)
REFUSE = """
    create function refuse() returns trigger language plpgsql as $$
    begin
        raise 'refused' using errcode = '40001';
    end $$;
    create trigger refuse before insert on relay.positions for each row when (new.owner = 'hook1')
        execute function refuse();
"""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as running:
        yield running


def posting(urls: list[str], **more: Any) -> dict[str, Any]:
    """Every event goes to a sink for each address (`hook0`, `hook1`, …), and into the projection."""
    handlers: dict[str, Any] = {
        f"hook{number}": {"type": "http", "url": url, "retry": RETRY, **more}
        for number, url in enumerate(urls)
    }
    handlers = {"projection": {"type": "sql", "statement": APPEND}, **handlers}
    return {"handlers": handlers, "routes": [{"handlers": list(handlers)}]}


def in_state(outbox: Outbox, state: str) -> int:
    """How many sinks are in a state."""
    return int(outbox.value("select count(*) from relay.sinks where state = %s", (state,)))


def wait_dead(outbox: Outbox, sink: str, count: int) -> None:
    """Wait until a sink has stored so many dead letters."""
    query = "select count(*) from relay.dead_letter_queue where sink = %s"
    wait_until(lambda: outbox.value(query, (sink,)) == count)


def claims(outbox: Outbox) -> list[int]:
    """The sessions that have claims of sinks."""
    return outbox.column(CLAIMS, (locks.sink("", "").space,))


@pytest.mark.rare
def test_many_idle_sinks_cost_little(outbox: Outbox, webhook: Webhook, tmp_path: Path) -> None:
    """Each had a loop, threads, sessions, and queries twice a second: 296 threads, 72 sessions, 10 % of a processor."""
    config = outbox.config_file(tmp_path / "relay.yaml", **posting([webhook.url] * MANY))
    with running(config) as service:
        wait_until(lambda: in_state(outbox, "attached") == MANY)
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhook.accepted) == MANY)
        process = psutil.Process(service.process.pid)
        assert process.num_threads() <= 40
        assert len(claims(outbox)) == 1

        def is_quiet() -> bool:
            commits, used = outbox.value(COMMITS), sum(process.cpu_times()[:2])
            time.sleep(3)
            # Without sinks there are 4 to 5 commits a second.
            return (
                outbox.value(COMMITS) - commits < 3 * 20
                and sum(process.cpu_times()[:2]) - used < 3 * 0.05
                and outbox.value(SESSIONS) <= 12
            )

        # What happened at the start is counted late, and connections stay open for a while.
        wait_until(is_quiet, 60)


@pytest.mark.rare
def test_many_sinks_that_poll_share_connections(outbox: Outbox, webhook: Webhook) -> None:
    """Other clients were refused: risingwavelabs/risingwave#11116, sequinstream/sequin#1811, lf-edge/ekuiper#1766."""
    source = {**outbox.config()["source"], "mode": "poll"}
    with relaying(outbox.settings(source=source)):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
    config = posting([webhook.url] * MANY, start="beginning")
    settings = outbox.settings(source=source, **config, poll={"wait_period_ms": 100})
    for number in range(40):
        outbox.publish(host(number % 4), event(number))
    counts: list[int] = []
    with relaying(settings, accept_configuration=True):
        wait_until(lambda: len(webhook.accepted) >= 41 * MANY)
        for number in range(40):
            outbox.publish(host(number % 4), event(number))

        def is_delivered() -> bool:
            counts.append(outbox.value(SESSIONS))
            return len(webhook.accepted) >= 81 * MANY

        wait_until(is_delivered)
    # One more than before relay noted witnesses.
    assert median(counts) <= 17
    # There are short sessions, too.
    assert max(counts) <= 24
    assert set(webhook.ids().values()) == {MANY}


@pytest.mark.rare
def test_what_hangs_or_is_locked_holds_up_no_other_sink(outbox: Outbox) -> None:
    """One stops all: vectordotdev/vector#22064, #14828, #13679, sequinstream/sequin#1358, MagicStack/asyncpg#1247."""
    let_go = Event()

    def refusing(_: dict[str, str], body: bytes) -> Answer:
        return Answer(400 if b'"amount": 13' in body or b'"amount":13' in body else 204)

    with ExitStack() as stack:
        failing = stack.enter_context(Webhook(lambda _, body: Answer(503)))
        stuck = stack.enter_context(Webhook(hanging_until(let_go)))
        healthy = [stack.enter_context(Webhook(refusing)) for _ in range(4)]
        urls = [each.url for each in (failing, failing, stuck, *healthy)]
        config = posting(urls, circuit_breaker=None)
        settings = outbox.settings(
            **config, sinks={"attach_seconds": 2, "connections": 2}, shutdown_timeout=4
        )
        service = stack.enter_context(relaying(settings))
        stack.callback(let_go.set)
        wait_until(lambda: in_state(outbox, "attached") == len(urls))
        with psycopg.connect(outbox.superuser_dsn) as other:
            # Two sinks cannot store what they defer.
            other.execute(
                "select from relay.sink_claims where sink in ('hook0', 'hook1') for update"
            )
            numbers = range(60)
            for number in numbers:
                outbox.publish(host(number % 4), event(13 if number % 16 == 0 else 1))
            dead = len(numbers[::16])
            for each in range(3, len(urls)):
                wait_dead(outbox, f"hook{each}", dead)
            for webhook in healthy:
                wait_until(lambda found=webhook: len(found.accepted) == len(numbers) - dead)  # type: ignore[misc]
            states = "select array_agg(state order by sink) from relay.sinks where sink > 'hook1'"
            wait_until(lambda: outbox.value(states) == ["lagging", *["attached"] * len(healthy)])
            for webhook in healthy:
                assert set(webhook.ids().values()) == {1}
            outbox.wait_drained()
        wait_until(
            lambda: outbox.value("select count(*) from relay.deferred where sink = 'hook0'") > 0
        )
        assert service.error is None
    outbox.assert_exact()


def test_a_lost_session_with_the_claims_is_replaced(outbox: Outbox, webhook: Webhook) -> None:
    """All sinks claim again in one session; nothing is lost, and each key stays in order: neochaotic/leoflow#1199."""
    settings = outbox.settings(**posting([webhook.url] * 8))
    with relaying(settings):
        wait_until(lambda: in_state(outbox, "attached") == 8)
        for turn in range(3):
            (pid,) = claims(outbox)
            for number in range(20):
                outbox.publish(host(number % 4), event(turn))
                if number == 10:
                    outbox.conn.execute("select pg_terminate_backend(%s)", (pid,))
            wait_until(lambda pid=pid: claims(outbox) not in ([], [pid]))  # type: ignore[misc]
            wait_until(lambda: in_state(outbox, "attached") == 8)
        wait_until(lambda: len(webhook.ids()) == 60 and min(webhook.ids().values()) >= 8)
        for number in range(4):
            assert webhook.order(host(number)) == outbox.column(
                "select c_offset from outbox_message_t where host_id = %s order by 1",
                (host(number),),
            )


@pytest.mark.rare
def test_a_sink_that_cannot_be_stored_ends_no_other(outbox: Outbox, webhook: Webhook) -> None:
    """One row of a common statement fails: the others are stored one by one."""
    settings = outbox.settings(**posting([webhook.url] * 4))
    with relaying(settings) as service:
        wait_until(lambda: in_state(outbox, "attached") == 4)
        outbox.conn.execute(REFUSE)
        outbox.publish(host(1), event(1))
        stored = "select count(*) from relay.sinks where updated_at > %s and sink <> 'hook1'"
        now = outbox.value("select clock_timestamp()")
        wait_until(lambda: outbox.value(stored, (now,)) == 3)
        wait_until(lambda: failing(service) == {"sink hook1"})
        outbox.conn.execute("drop trigger refuse on relay.positions")
        wait_until(lambda: failing(service) == set(), 30)
        outbox.publish(host(1), event(2))
        wait_until(lambda: min(webhook.ids().values()) >= 4 and len(webhook.ids()) == 2)
    for number in (0, 2, 3):
        assert (
            outbox.value("select fault from relay.sinks where sink = %s", (f"hook{number}",))
            is None
        )


def test_a_sink_that_has_lost_its_positions_is_named(outbox: Outbox, webhook: Webhook) -> None:
    """One of two tables was restored: the sink must neither begin as a new one nor wait in silence."""
    outbox.begin_sink("hook1", "pg_current_snapshot()")
    outbox.conn.execute("delete from relay.positions where owner = 'hook1'")
    fault = run_until_fault(outbox.settings(**posting([webhook.url] * 2)))
    assert "relay.positions: has none of the sink 'hook1', which relay.sink_claims has" in fault


def failing(service: Service) -> set[str]:
    """The parts that do not do their work."""
    return {each.part for each in service.conditions if each.fault is not None}


def test_a_name_that_is_not_resolved_holds_up_no_other(
    outbox: Outbox, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups wait in the threads of one executor: python/cpython#112169, #120644, aio-libs/aiohttp#6837."""
    let_go = Event()
    resolve = socket.getaddrinfo

    def slowly(name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name).endswith(".example"):
            let_go.wait(60)
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return resolve(name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    away = [f"http://nowhere{number}.example/" for number in range(12)]
    here = webhook.url.replace("127.0.0.1", "localhost")
    with ExitStack() as stack:
        stack.enter_context(relaying(outbox.settings(**posting([*away, here]), shutdown_timeout=2)))
        stack.callback(let_go.set)
        wait_until(lambda: in_state(outbox, "attached") == 13)
        for number in range(10):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(webhook.accepted) == 10)
        assert not let_go.is_set()


def test_what_blocks_the_loop_delays_the_other_sinks_and_nothing_else(
    outbox: Outbox, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What remains of sharing a thread: a sink whose code blocks it, as none of relay's own should."""
    deliver = Http.deliver
    blocked, let_go = Event(), Event()

    async def blocking(self: Http, transaction: Transaction) -> None:
        if self.name == "hook0" and not blocked.is_set():
            blocked.set()
            assert let_go.wait(60)
        await deliver(self, transaction)

    monkeypatch.setattr(Http, "deliver", blocking)
    with ExitStack() as stack:
        stack.enter_context(relaying(outbox.settings(**posting([webhook.url] * 4))))
        stack.callback(let_go.set)
        wait_until(lambda: in_state(outbox, "attached") == 4)
        outbox.publish(host(0), event(0))
        assert blocked.wait(60)
        for number in range(1, 5):
            outbox.publish(host(number), event(number))
        outbox.wait_handled()
        assert len(webhook.accepted) < 20
        let_go.set()
        wait_until(lambda: len(webhook.accepted) == 20)
        assert in_state(outbox, "attached") == 4
    assert set(webhook.ids().values()) == {4}


UPCASTING = Event()


def blocking_upcaster(payload: dict[str, Any]) -> dict[str, Any]:
    """An upcaster that waits for something, as one that asks another system does."""
    UPCASTING.wait(90)
    return payload


def test_an_upcaster_that_blocks_holds_up_its_own_sink_only(
    outbox: Outbox, webhook: Webhook
) -> None:
    """Users' code runs beside the loop."""
    events = {"slow": {"version": 2, "upcast": {1: f"{__name__}:blocking_upcaster"}}}
    config = posting([webhook.url] * 2)
    config["routes"] = [
        {"match": {"event_type": "slow"}, "handlers": ["hook0"]},
        {"handlers": ["projection", "hook1"]},
    ]
    UPCASTING.clear()
    with ExitStack() as stack:
        stack.enter_context(relaying(outbox.settings(events=events, **config)))
        stack.callback(UPCASTING.set)
        wait_until(lambda: in_state(outbox, "attached") == 2)
        for number in range(6):
            outbox.publish(host(number), event(number, "slow"))
        outbox.publish(host(1), event(7))
        wait_until(lambda: len(webhook.accepted) == 1)
        UPCASTING.set()
        wait_until(lambda: len(webhook.accepted) == 7)


def test_only_the_newest_claim_stores_anything(outbox: Outbox) -> None:
    """Whoever has lost a claim goes on for a while, in other sessions too: oban-bg/oban#1488."""
    first, second = (Claims(outbox.relay_dsn, "default") for _ in range(2))
    assert first.take(["a", "b"]) == {"a", "b"}
    stale = first.load({"a": "now", "b": "now"})
    assert second.take(["a", "b"]) == set()
    first.release("a")
    assert second.take(["a", "b"]) == {"a"}
    (state,) = second.load({"a": "now"}).values()

    def entry(sink: str, of: positions.SinkState) -> SinkEntry:
        return SinkEntry(sink, of.claim, of.epoch, of.position, (7,), "lagging", None)

    late = [entry(sink, of) for sink, of in stale.items()]
    # In whatever session it tries, and beside others that it may still store.
    assert positions.store(outbox.conn, "default", late) == {"b": False}
    assert positions.store(outbox.conn, "default", [entry("a", state)]) == {"a": False}
    assert positions.move(outbox.conn, "default", "a", state.position)
    assert second.store([entry("a", state)]) == {}
    assert outbox.column("select sink from relay.sink_commits") == ["b"]
    with psycopg.connect(outbox.superuser_dsn) as other:
        other.execute("select from relay.sink_claims where sink = 'b' for update")
        # It waits for nobody.
        assert first.store([entry("b", stale["b"])]) == {}
        assert first.load({"b": "now"}) == {}
    newest = "select * from relay.positions where owner = 'b' order by number desc limit 1"
    with pytest.raises(psycopg.errors.UniqueViolation):
        outbox.conn.execute(f"insert into relay.positions {newest}".encode())
    for each in (first, second):
        each.close()


def test_a_claim_goes_on_from_what_the_one_before_was_about_to_store(outbox: Outbox) -> None:
    """A statement that waits for a lock still reads what there was when it began."""
    former = Claims(outbox.relay_dsn, "default")
    former.take(["a"])
    state = former.load({"a": "now"})["a"]
    position = replace(state.position, delivered_lsn=Lsn(77))
    entry = SinkEntry("a", state.claim, state.epoch, position, (7,), "lagging", None)
    claim = Claim(outbox.relay_dsn, "default", "a")
    with ThreadPoolExecutor() as pool, connect(outbox.relay_dsn) as storing:
        with storing.transaction():
            assert positions.store(storing, "default", [entry]) == {"a": False}
            former.close()
            wait_until(claim.take)
            loading = pool.submit(claim.load, "now")
            wait_until(lambda: bool(outbox.column(WAITS)))
        loaded = loading.result()
    assert loaded.position == position
    assert loaded.done.tolist() == [7]
    # It has one number as long as it is held, whatever it loads.
    assert claim.load("now").claim == loaded.claim == state.claim + 1
    claim.release()


def test_what_others_note_as_done_is_kept_by_who_works_the_sink(outbox: Outbox) -> None:
    """Replays in two partitions note what sinks leave out, in any order of the sinks, while these are worked."""
    for sink in ("a", "b"):
        outbox.begin_sink(sink, "'100:100:'")
    claim = Claim(outbox.relay_dsn, "default", "a")
    assert claim.take()
    state = claim.load("now")
    with (
        ThreadPoolExecutor() as pool,
        connect(outbox.relay_dsn) as first,
        connect(outbox.relay_dsn) as second,
    ):
        with first.transaction():
            positions.add_done(first, "default", {"b": [108], "a": [107]})
            noting = pool.submit(positions.add_done, second, "default", {"a": [109], "b": [110]})
            wait_until(lambda: bool(outbox.column(WAITS)))
        noting.result()
    position = replace(state.position, snapshot=Snapshot(108, 109, ()))
    claim.store(position, state.epoch, "lagging", [120])
    assert sorted(claim.load("now").done.tolist()) == [109, 120]
    assert sorted(positions.done(outbox.conn, "default", "b").tolist()) == [108, 110]
    claim.release()
