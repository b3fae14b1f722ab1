"""Messages about the slot: the transaction for which its creation waits, and the WAL that it retains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.admin.status import read
from relay.observe.health import Limits, failures
from relay.source.stream import slot
from tests.outbox import PROJECTION, Outbox, event, host, initialise, relaying, wait_until
from tests.process import relay


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "REPORT_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(slot, "REPORT_EVERY_SECONDS", 0.1)


@contextmanager
def writing(outbox: Outbox) -> Iterator[psycopg.Connection]:
    """A transaction that is open, of an application with a name."""
    dsn = make_conninfo(outbox.superuser_dsn, application_name="nightly report")
    with psycopg.connect(dsn) as writer:
        writer.execute("select pg_current_xact_id()")
        yield writer


def drop_slot(outbox: Outbox) -> None:
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))


def test_init_reports_what_it_waits_for(database: str) -> None:
    output: list[str] = []
    with Outbox(database) as outbox, ThreadPoolExecutor(1) as threads:
        of_slot = f"source.slot: the slot '{outbox.slot}' is created when all"
        outbox.conn.execute(PROJECTION)
        with writing(outbox) as writer:
            writer.execute("create table prepared ()")
            writer.execute("prepare transaction 'later'")
        with writing(outbox) as writer:
            pid = writer.info.backend_pid
            done = threads.submit(initialise, outbox.settings(), warn=output.append)
            wait_until(lambda: any(line.startswith(of_slot) for line in output))
            outbox.conn.execute("rollback prepared 'later'")
            wait_until(lambda: f"process {pid} (nightly report): end it" in output[-1])
            assert not done.done()
        assert any("replication slot" in line for line in done.result(30))
    first = next(line for line in output if line.startswith(of_slot))
    assert "the oldest is the prepared transaction 'later', open for " in first
    assert first.endswith(": end it, or wait")


def test_a_slot_that_is_made_at_once_waits_for_nobody(outbox: Outbox) -> None:
    drop_slot(outbox)
    output: list[str] = []
    assert initialise(outbox.settings(), warn=output.append)
    assert not output


def test_a_slot_that_is_being_made_is_shown_as_such(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    drop_slot(outbox)
    config = outbox.config_file(tmp_path / "relay.yaml")
    settings = outbox.settings()
    with writing(outbox) as writer, relaying(settings):
        oldest = f"the transaction of process {writer.info.backend_pid} (nightly report)"
        wait_until(lambda: bool((slot := read(settings).slot) and slot.creating))
        maker = outbox.value(
            "select active_pid from pg_replication_slots where slot_name = %s", (outbox.slot,)
        )
        wait_until(
            lambda: sum(oldest in str(getattr(r, "waits_for", "")) for r in caplog.records) > 1
        )
        shown = relay("status", "--config", str(config)).stdout
        assert (
            f"slot\t{outbox.slot} (being created by process {maker})\nwaits for\t{oldest}" in shown
        )
        assert "None" not in shown
        found = json.loads(relay("status", "--config", str(config), "--json").stdout)
        assert found["slot"]["creating"]
        assert found["slot_waits_for"].startswith(oldest)
        (finding,) = (
            each
            for each in examine(settings)
            if each.subject == "slot" and each.level is Severity.WARNING
        )
        assert f"is still being created by process {maker}" in finding.text
        assert oldest in finding.text
        # Until relay polls, the slot that is missing is a failure too.
        wait_until(lambda: read(settings).source_mode == "poll")
        lag = list(failures(read(settings), Limits(lag_bytes=1), None, {}))
        assert lag == ["the lag in bytes is unknown: the slot is still being created"]
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        writer.rollback()
        wait_until(lambda: not ((slot := read(settings).slot) and slot.creating))
        outbox.wait_drained()
    assert not json.loads(relay("status", "--config", str(config), "--json").stdout)["slot"][
        "creating"
    ]
    outbox.assert_exact()


def test_a_slot_that_is_unused_after_a_change_to_polling_is_reported(outbox: Outbox) -> None:
    polling = outbox.settings(source={**outbox.config()["source"], "mode": "poll"})

    def found() -> list[str]:
        return [
            each.text
            for each in examine(polling)
            if each.subject == "slot" and each.level is Severity.WARNING
        ]

    output: list[str] = []
    assert not initialise(polling, warn=output.append)
    (line,) = output
    words = f"source.mode: is poll, but the slot '{outbox.slot}' of the group 'default' still"
    assert line.startswith(words)
    assert f"`select pg_drop_replication_slot('{outbox.slot}')`, or set source.mode: auto" in line
    (line,) = found()
    assert line.startswith(words)
    # Another group's slot is its own affair.
    other = polling.model_copy(update={"group": "other"})
    initialise(other, warn=output.append)
    assert len(output) == 1
    with relaying(outbox.settings()):
        wait_until(lambda: not found())
    drop_slot(outbox)
    assert not found()
    initialise(polling, warn=output.append)
    assert len(output) == 1


def test_status_shows_the_wal_that_an_open_transaction_lets_the_slot_hold(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    outbox.conn.execute("create table noise (filler text)")
    with writing(outbox) as publisher, relaying(outbox.settings()):
        publisher.execute("insert into noise values ('x')")
        outbox.wait_drained()
        before = read(outbox.settings()).slot
        outbox.conn.execute(
            "insert into noise select repeat('x', 2000) from generate_series(1, 2000)"
        )
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        slot = read(outbox.settings()).slot
        assert before
        assert slot
        assert slot.lag_bytes is not None
        assert slot.retained_bytes is not None
        assert slot.retained_bytes > 4_000_000 > slot.lag_bytes
        shown = relay("status", "--config", str(config)).stdout
        held = int(shown.split(" bytes retained")[0].split()[-1])
        assert held >= slot.retained_bytes
        publisher.rollback()
