"""`relay top`: what it shows of a real group, at what cost, at a terminal and without one."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from relay.admin.sinks import listed
from relay.admin.status import Watch
from relay.demo.screen import Screen
from relay.observe import engines
from relay.observe.top import Trends
from relay.source import hybrid
from relay.source.outbox.unread import MOST_ROWS
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.process import relay
from tests.terminal import at_terminal
from tests.webhook import Answer, Webhook


def with_shop(outbox: Outbox, url: str) -> dict[str, Any]:
    handlers = {**outbox.config()["handlers"], "shop": {"type": "http", "url": url}}
    return {"handlers": handlers, "routes": [{"handlers": ["projection", "shop"]}]}


def test_a_read_shows_target_sinks_and_throughput(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "STORE_SECONDS", 0.2)
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.2)
    with Webhook(lambda headers, body: Answer(503)) as webhook:
        settings = outbox.settings(**with_shop(outbox, webhook.url), sinks={"attach_seconds": 0.5})
        outbox.install_again(settings)
        with closing(Watch(settings)) as watch, relaying(settings):
            trends = Trends()
            trends.note(watch.read())
            outbox.fill(200, events=2)
            outbox.publish(host(1), event(amount=-1))
            wait_until(lambda: watch.read().unread.get("shop") is not None)
            wait_until(lambda: sum(each.transactions for each in watch.read().engines) == 201)
            wait_until(lambda: watch.read().dead == {("", "projection"): 1})
            wait_until(lambda: watch.read().unread[""].events == 0)
            picture = watch.read()
            trends.note(picture)
            rates = trends.rates()
    assert picture.faults == {}
    assert picture.source_mode == "wal"
    assert picture.active in picture.instances
    assert picture.slot is not None
    assert picture.slot.active
    assert sum(each.events for each in picture.engines) == 401
    assert rates is not None
    assert rates.events > 0
    assert picture.unread[""].events == 0


def test_what_is_not_read_is_counted_up_to_a_limit(outbox: Outbox) -> None:
    settings = outbox.settings()
    with closing(Watch(settings)) as watch:
        outbox.fill(50, events=3)
        few = watch.read().unread[""]
        assert (few.events, few.more) == (150, False)
        assert sum(few.partitions.values()) == 150
        assert few.oldest_seconds is not None
        # One that is open across the snapshot, and one that stays open.
        with psycopg.connect(outbox.publisher_dsn) as late:
            late.execute(
                "select relay.publish(%s, null, %s::jsonb)", (host(1), json.dumps([event()]))
            )
            outbox.fill(MOST_ROWS // 100 + 1, events=100)
            watch._unread.clear()
            many = watch.read().unread[""]
    assert (many.events, many.more) == (MOST_ROWS, True)


def test_an_attached_sink_of_a_dead_instance_lags(outbox: Outbox) -> None:
    """Nobody feeds it from the stream, as `relay sink list` says too."""
    settings = outbox.settings(**with_shop(outbox, "http://127.0.0.1:9/"))
    initialise(settings)
    outbox.conn.execute("update relay.sink_claims set state = 'attached', instance = 'gone:1'")
    outbox.fill(2, events=3)
    with closing(Watch(settings)) as watch:
        assert watch.read().unread["shop"].events == 6
    assert [each.unread for each in listed(settings)] == [6]


def test_polling_lets_the_backlog_fall_to_nothing(outbox: Outbox) -> None:
    settings = outbox.settings(source={"dsn": outbox.relay_dsn, "mode": "poll"})
    outbox.fill(30, events=3)
    with closing(Watch(settings)) as watch:
        assert watch.read().unread[""].events == 90
        with relaying(settings):
            wait_until(lambda: outbox.value("select count(*) from projection") == 90)
            wait_until(lambda: watch.read().unread[""].events == 0)
        assert watch.read().source_mode == "poll"


def test_a_database_that_goes_away_is_a_line_and_comes_back(outbox: Outbox) -> None:
    name = outbox.slot
    with (
        closing(Watch(outbox.settings())) as watch,
        psycopg.connect(outbox.superuser_dsn, dbname="postgres", autocommit=True) as admin,
    ):
        before = watch.read()
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
        )
        wait_until(lambda: "not currently accepting" in watch.read().faults.get("target.dsn", ""))
        gone = watch.read()
        assert gone.partitions == before.partitions
        assert set(gone.faults) == {"source.dsn", "target.dsn"}
        admin.execute(f"alter database {name} allow_connections true".encode())
        assert watch.read().faults == {}
    outbox.reconnect()


@pytest.mark.rare
def test_without_a_terminal_one_frame_is_printed(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    shown = relay("top", "--config", str(config))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"slot         {outbox.slot}  inactive reserved" in shown.stdout
    assert "no instance is active" in shown.stdout
    away = outbox.config_file(
        tmp_path / "away.yaml", source={"dsn": "host=127.0.0.1 port=1 dbname=x"}
    )
    shown = relay("top", "--once", "--config", str(away))
    assert shown.returncode == 1
    assert "source.dsn: " in shown.stdout
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("end", ["q", "SIGINT", pytest.param("SIGTERM", marks=pytest.mark.rare)])
def test_at_a_terminal_it_is_renewed_until_q(outbox: Outbox, tmp_path: Path, end: str) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    with at_terminal("top", "--interval", "0.2", "--config", str(config)) as top:
        wait_until(lambda: top.shows("all is read"))
        if end == "q":
            outbox.publish(host(1), event())
            wait_until(lambda: top.shows("unread in"))
            top.press(b"q")
        else:
            top.process.send_signal(signal.Signals[end])
        assert top.process.wait(40) == 0
        assert not top.shows("Traceback")
        # The screen that was there before is shown again.
        wait_until(lambda: top.drawn.rstrip().endswith((b"\x1b[?25h", b"\x1b[?1049l")))


def test_it_is_interrupted_where_the_shell_ignores_sigint(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with at_terminal("top", "--interval", "0.2", "--config", str(config)) as top:
            wait_until(lambda: top.shows("all is read"))
            top.process.send_signal(signal.SIGINT)
            assert top.process.wait(40) == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_demo_shows_the_same_below_its_bar(outbox: Outbox) -> None:
    drawn = StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, height=30)
    with Screen(console) as screen, screen.watching(outbox.settings()):
        screen.step("publishing")
        screen.show("published", 3, 10)
        wait_until(lambda: "all is read" in drawn.getvalue())
    assert outbox.slot in drawn.getvalue()
    assert "published 3 of 10 events" in drawn.getvalue()
    piped = StringIO()
    with Screen(Console(file=piped)) as screen, screen.watching(outbox.settings()):
        screen.step("publishing")
    assert "source" not in piped.getvalue()
