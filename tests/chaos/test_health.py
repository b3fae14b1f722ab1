"""/livez and /readyz in faults: never dead while relay recovers by itself, always dead when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from relay.demo.embedded import free_port
from relay.model.events import Transaction
from relay.observe import (
    databases,
    liveness,
    observer,
)
from relay.observe.batch_log import BatchLog
from relay.source.outbox.rows import OutboxRows
from relay.source.stream import receiver
from relay.spark import session as spark_session_module
from tests.chaos.proxy import through_proxy
from tests.observing import Poller, Scrape, ask, is_good
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.postgres import Server

pytestmark = pytest.mark.chaos

STALL = 3
released = threading.Event()


@pytest.fixture
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """relay is looked at more often than in production, and the server asked sooner."""
    monkeypatch.setattr(observer, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(databases, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(receiver, "ASK_SECONDS", 1.0)


@contextmanager
def asked(outbox: Outbox, **overrides: Any) -> Iterator[Poller]:
    """A relay in this process that is ready, and whose /livez is asked all the time."""
    port = free_port()
    observe = {"listen": f"127.0.0.1:{port}", "stall_seconds": STALL, "busy_seconds": 30}
    with relaying(outbox.settings(observe=observe, **overrides)):
        wait_until(lambda: is_good(port, "/readyz"))
        poller = Poller(port)
        try:
            yield poller
        finally:
            poller.close()


def hang(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Wait for something that never comes, until the test says so."""
    released.wait()


def compute(transaction: Transaction, cursor: psycopg.Cursor[Any]) -> None:
    """Compute for longer than a stall may last."""
    ends = time.monotonic() + STALL + 3
    while time.monotonic() < ends:
        pass


def handling(name: str) -> dict[str, Any]:
    return {
        "handlers": {"slow": {"type": "python", "callable": f"{__name__}:{name}"}},
        "routes": [{"handlers": ["slow"]}],
    }


@pytest.mark.usefixtures("short_intervals")
def test_a_handler_that_hangs(outbox: Outbox) -> None:
    released.clear()
    with asked(outbox, **handling("hang")) as poller:
        try:
            outbox.publish(host(1), event(1))
            began = time.monotonic()
            wait_until(lambda: bool(poller.bad), 30)
            assert time.monotonic() - began > STALL - 1
            assert "handler slow: hangs: no statement and no computing" in poller.bad[0]
            assert ask(poller.port, "/readyz").status == 503
            assert Scrape(poller.port).value("relay_live") == 0
        finally:
            released.set()
        outbox.wait_drained()
        wait_until(lambda: is_good(poller.port, "/livez"))


@pytest.mark.rare
@pytest.mark.usefixtures("short_intervals")
@pytest.mark.parametrize("what", ["computes", "waits for the target"])
def test_a_handler_that_takes_long_is_no_hang(outbox: Outbox, what: str) -> None:
    statement = {"type": "sql", "statement": f"select pg_sleep({STALL + 3}), %(id)s"}
    slow = {"handlers": {"slow": statement}, "routes": [{"handlers": ["slow"]}]}
    with asked(outbox, **(handling("compute") if what == "computes" else slow)) as poller:
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        assert poller.good > 2 * STALL
    assert poller.bad == []


@pytest.mark.rare
@pytest.mark.usefixtures("short_intervals")
def test_a_half_open_stream(outbox: Outbox) -> None:
    """Only the source is cut off: relay would connect again, and may not, so it is alive and not ready."""
    with through_proxy(outbox.relay_dsn) as proxy:
        source = {**outbox.config()["source"], "dsn": proxy.dsn}
        with asked(outbox, source=source, target={"dsn": outbox.relay_dsn}) as poller:
            time.sleep(STALL + 1)
            # An idle stream is none: the server answers when it is asked.
            assert is_good(poller.port, "/readyz")
            proxy.stall()
            wait_until(lambda: not is_good(poller.port, "/readyz"), 30)
            assert "source: not ready: " in ask(poller.port, "/readyz").text
            proxy.resume()
            wait_until(lambda: is_good(poller.port, "/readyz"))
        assert poller.bad == []


@pytest.mark.rare
def test_a_half_open_stream_is_reported_within_thirty_seconds(outbox: Outbox) -> None:
    """With the limits of production."""
    port = free_port()
    with through_proxy(outbox.relay_dsn) as proxy:
        source = {**outbox.config()["source"], "dsn": proxy.dsn}
        observe = {"listen": f"127.0.0.1:{port}"}
        settings = outbox.settings(source=source, target={"dsn": outbox.relay_dsn}, observe=observe)
        with relaying(settings):
            wait_until(lambda: is_good(port, "/readyz"))
            proxy.stall()
            wait_until(lambda: not is_good(port, "/readyz"), 30)
            assert is_good(port, "/livez")
            proxy.resume()


@pytest.mark.rare
@pytest.mark.usefixtures("short_intervals")
def test_a_source_that_answers_no_more_while_it_is_polled(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a task, which waits for it in the target's transaction: nothing hangs, and the target is up."""
    read = OutboxRows.commits
    with through_proxy(outbox.relay_dsn) as proxy:
        reading = threading.Event()

        def stalled(*arguments: Any) -> Any:
            if not reading.is_set():
                reading.set()
                proxy.stall()
            return read(*arguments)

        monkeypatch.setattr(OutboxRows, "commits", stalled)
        monkeypatch.setattr(liveness, "UP_SECONDS", 2.0)
        monkeypatch.setattr(observer, "UP_SECONDS", 2.0)
        source = {**outbox.config()["source"], "dsn": proxy.dsn, "mode": "poll"}
        with asked(outbox, source=source, target={"dsn": outbox.relay_dsn}) as poller:
            outbox.publish(host(1), event(1))
            assert reading.wait(30)
            time.sleep(STALL + 3)
            output = ask(poller.port, "/readyz").text
            assert "source: not ready: cannot be polled" in output
            assert "target" not in output
            assert Scrape(poller.port).value("relay_database_up", database="target") == 1
            proxy.resume()
            outbox.wait_handled()
        assert poller.bad == []


@pytest.mark.rare
@pytest.mark.usefixtures("short_intervals")
def test_the_database_is_away_for_longer_than_a_stall(killable_server: Server) -> None:
    with Outbox(killable_server.create_database("source")) as outbox:
        outbox.install()
        with asked(outbox) as poller:
            outbox.conn.close()
            killable_server.stop("immediate")
            wait_until(lambda: not is_good(poller.port, "/readyz"), 30)
            time.sleep(STALL + 1)
            found = Scrape(poller.port)
            assert found.value("relay_database_up", database="target") == 0
            assert found.value("relay_slot_active") is None
            killable_server.start()
            wait_until(lambda: is_good(poller.port, "/readyz"))
            outbox.reconnect()
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
        assert poller.bad == []
        assert poller.good > STALL


@pytest.mark.usefixtures("short_intervals")
def test_spark_is_gone_for_good(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("no master answers")

    # It would end the JVM of the session that the tests share.
    monkeypatch.setattr(spark_session_module, "_clear_remains", lambda: None)
    monkeypatch.setattr(spark_session_module, "_open", refuse)
    with asked(outbox, batch={"inline_max_events": 0}) as poller:
        outbox.publish(host(1), event(1))
        wait_until(lambda: bool(poller.bad), 30)
        assert "spark: hangs: no session can be built for" in poller.bad[0]
        assert Scrape(poller.port).value("relay_spark_failing") == 1


@pytest.mark.rare
@pytest.mark.usefixtures("short_intervals")
def test_a_loop_that_hangs(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the handlers, where nothing but its pulse tells."""
    released.clear()
    with asked(outbox) as poller:
        try:
            monkeypatch.setattr(BatchLog, "durable", lambda *_: released.wait())
            outbox.publish(host(1), event(1))
            wait_until(lambda: bool(poller.bad), 30)
            assert "loop: hangs: no heartbeat for" in poller.bad[0]
        finally:
            released.set()


def test_limits_of_observations() -> None:
    assert liveness.UP_SECONDS >= 2 * observer.PROBE_SECONDS
