"""`relay status --check`: what a health check must notice, each as a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.pq import ExecStatus

from relay.admin.status import lag_seconds, read
from relay.faults import ConfigurationError
from relay.observe.health import Limits, failures
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import administer, relay, running


def failed(outbox: Outbox, limits: Limits | None = None, **overrides: Any) -> list[str]:
    """What a health check says."""
    settings = outbox.settings(**overrides)
    found = read(settings)
    seconds = lag_seconds(settings)
    return list(failures(found, limits or Limits(), seconds, {}))


@contextmanager
def other_role(outbox: Outbox) -> Iterator[None]:
    """Another program that reads the slot."""
    dsn = make_conninfo(outbox.superuser_dsn, application_name="pg_recvlogical")
    connection = psycopg.connect(
        dsn, autocommit=True, replication="database", cursor_factory=psycopg.ClientCursor
    )
    with closing(connection) as reader:
        reader.pgconn.nonblocking = 0
        options = f"(proto_version '1', publication_names '{outbox.slot}')"
        started = reader.pgconn.exec_(
            f"START_REPLICATION SLOT {outbox.slot} LOGICAL 0/0 {options}".encode()
        )
        assert started.status == ExecStatus.COPY_BOTH
        yield


def test_another_program_that_reads_the_slot_is_no_relay(outbox: Outbox) -> None:
    with other_role(outbox):
        assert failed(outbox) == [
            "no instance of group 'default' runs: start `relay run`",
            f"the slot '{outbox.slot}' is read by pg_recvlogical, which is not an instance of group 'default'",
        ]
    with relaying(outbox.settings()):
        wait_until(lambda: not failed(outbox))


def test_a_stopped_relay_and_a_missing_slot(outbox: Outbox) -> None:
    assert failed(outbox) == [
        "no instance of group 'default' runs: start `relay run`",
        f"no process reads the slot '{outbox.slot}'",
    ]
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    assert "the replication slot is missing: run `relay init`" in failed(outbox)


def test_polling_needs_an_instance_and_no_slot(outbox: Outbox) -> None:
    source = {**outbox.config()["source"], "mode": "poll"}
    assert len(failed(outbox, source=source)) == 1
    with relaying(outbox.settings(source=source)):
        wait_until(lambda: not failed(outbox, source=source))


def test_each_limit_is_a_line(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    none = Limits(lag_bytes=10_000_000, lag_seconds=600, deferred=0, dead=0)
    with running(config) as service:
        service.wait_said("streaming")
        outbox.publish(host(1), event(-1))
        outbox.publish(host(2), event(1, deliver_at="2999-01-01T00:00:00Z"))
        outbox.wait_drained()
        assert failed(outbox, none) == [
            "1 transaction is deferred, the limit is 0",
            "there is 1 dead letter, the limit is 0: see `relay dlq list`",
        ]
        limits = ("--max-deferred", "0", "--max-dead", "0", "--max-lag-seconds", "600")
        result = relay("status", "--config", str(config), "--json", *limits)
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 2
        found = json.loads(result.stdout)
        assert found["instances"] == [found["slot_reader"]]
        assert relay("status", "--config", str(config), "--check").returncode == 0
        assert service.terminate() == 0
    outbox.publish(host(1), event(2, event_ts="2026-01-01T00:00:00Z"))
    outbox.conn.execute(f"select pg_logical_emit_message(false, '', repeat('x', {10**6}))".encode())
    lagging = failed(outbox, Limits(lag_bytes=1000, lag_seconds=600))[2:]
    assert [line.split(" the limit ")[1] for line in lagging] == ["is 1000", "is 600"]


@pytest.mark.parametrize("column", ["event_ts", "c_offset"])
def test_a_lag_that_is_unknown(outbox: Outbox, column: str) -> None:
    outbox.publish(host(1), event(1))
    outbox.conn.execute(f"alter table outbox_message_t rename column {column} to other".encode())
    with pytest.raises(ConfigurationError, match=f"without {column} there is no lag in seconds"):
        failed(outbox)


def test_a_sink_that_lags_is_reported_only_where_its_lag_is_limited(
    outbox: Outbox, tmp_path: Path
) -> None:
    hook = {"type": "http", "url": "http://127.0.0.1:9/"}
    config = outbox.config_file(
        tmp_path / "relay.yaml", handlers={"hook": hook}, routes=[{"handlers": ["hook"]}]
    )
    assert administer(outbox, "init", "--config", str(config)).returncode == 0
    outbox.publish(host(1), event(1, event_ts="2026-01-01T00:00:00Z"))
    with running(config) as service:
        assert relay("sink", "pause", "hook", "--config", str(config)).returncode == 0
        outbox.wait_drained()
        wait_until(lambda: relay("status", "--check", "--config", str(config)).returncode == 0)
        result = relay("status", "--max-sink-lag-seconds", "600", "--config", str(config))
        assert result.returncode == 1
        assert re.match(
            r"relay: the oldest event that sink hook has not read is \S+ s old", result.stderr
        )
        assert service.terminate() == 0
