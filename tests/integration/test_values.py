"""Values arrive as the outbox has them: whatever sessions print, whatever its columns, partitions and encoding are."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from relay.preflight import reach
from relay.replay import DeadLetters
from relay.store.dead_letters import Filter
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay

SEEN = "insert into seen values (%(id)s, %(event_ts)s, %(payload)s)"


def odd_sessions(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let database, role, connection string and environment each ask for another form of times."""
    name = outbox.slot
    outbox.conn.execute(
        f"alter database \"{name}\" set datestyle = 'SQL, DMY';"
        f"alter database \"{name}\" set timezone = 'America/St_Johns';"
        f"alter role postgres in database \"{name}\" set datestyle = 'German'".encode()
    )
    monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
    monkeypatch.setenv("PGTZ", "Asia/Kathmandu")
    return make_conninfo(outbox.dsn, options="-c datestyle=SQL,MDY -c timezone=Asia/Tokyo")


@pytest.mark.parametrize("mode", ["poll", "wal"])
def test_no_setting_of_a_session_changes_a_time(
    outbox: Outbox, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.conn.execute("create table seen (id uuid, event_ts timestamptz, payload jsonb)")
    dsn = odd_sessions(outbox, monkeypatch)
    settings = outbox.settings(
        source={**outbox.config()["source"], "dsn": dsn, "mode": mode},
        handlers={"seen": {"type": "sql", "statement": SEEN}},
        routes=[{"handlers": ["seen"]}],
    )
    moment = "2025-11-12 01:02:03.5+00"
    outbox.publish(host(1), event(1, event_ts=moment, deliver_at=moment))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from seen") == 1)
    assert outbox.value("select event_ts = %s::timestamptz from seen", (moment,)) is True
    assert outbox.value("select count(*) from relay.deferred") == 0


def test_no_setting_of_a_session_changes_a_dead_letter(
    outbox: Outbox, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = odd_sessions(outbox, monkeypatch)
    overrides: dict[str, Any] = {"source": {**outbox.config()["source"], "dsn": dsn}}
    config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
    moment = "2025-11-12 01:02:03.5+00"
    outbox.publish(host(1), event(-1, event_ts=moment))
    settings = outbox.settings(**overrides)
    outbox.drain(settings)
    shown = relay("dlq", "export", "--config", str(config))
    assert '"event_ts": "2025-11-12T01:02:03.500000+00:00"' in shown.stdout
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")
    outbox.conn.execute("alter table projection add event_ts timestamptz")
    with reach(dsn, "target.dsn") as conn:
        letters = DeadLetters(settings, conn)
        assert letters.replay(letters.find(Filter()), None) == 1
    statement = "insert into projection (id, event_ts) values (%(id)s, %(event_ts)s)"
    handlers = {"projection": {"type": "sql", "statement": statement}}
    with relaying(outbox.settings(**overrides, handlers=handlers)):
        wait_until(lambda: outbox.value("select count(*) from projection") == 1)
    assert outbox.value("select event_ts = %s::timestamptz from projection", (moment,)) is True
