"""Long commands show how far they are at a terminal, and only there; what does the work reports it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from relay.admin.connections import reach_target
from relay.admin.dead_letters import DeadLetters
from relay.admin.publish import business_transactions, publish
from relay.retention.erasure import erase
from relay.spark.package import build
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay
from tests.terminal import at_terminal

Reports = list[tuple[str, int, int | None]]


def teller(output: Reports):  # type: ignore[no-untyped-def]
    def progress(what: str, done: int = 0, total: int | None = None) -> None:
        output.append((what, done, total))

    return progress


@pytest.mark.rare
def test_what_is_published_is_shown_with_rate_and_time_left(outbox: Outbox, tmp_path: Path) -> None:
    outbox.let_handlers_publish()
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    command = ("publish", "--generate", "1500", "--config", config)
    printed = tmp_path / "printed"
    with (
        printed.open("wb") as file,
        at_terminal(*command, columns=120, stdout=file.fileno()) as shown,
    ):
        assert shown.process.wait(60) == 0
        wait_until(lambda: shown.shows("of 1,500, "))
        assert "publishing transactions" in shown.text
        assert "/s" in shown.text
    assert printed.read_text().startswith("published 1500 transactions with ")
    assert len(printed.read_text().splitlines()) == 1
    assert outbox.value("select count(distinct transaction_id) from outbox_message_t") == 1500
    plain = relay("publish", "--generate", "2", "--config", config)
    assert plain.stderr == ""


def test_init_shows_what_the_slot_waits_for(database: str, tmp_path: Path) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute("create table held (n int)")
        config = str(outbox.config_file(tmp_path / "relay.yaml", handlers={}, routes=[]))
        with (
            psycopg.connect(database, application_name="report of March") as held,
            at_terminal(
                *("init", "--config", config, "--admin-dsn", outbox.installer_dsn), columns=140
            ) as shown,
        ):
            held.execute("insert into held values (1)")
            # The schema is installed first, which does not wait.
            wait_until(lambda: shown.shows("the slot waits for the transaction of process"))
            assert shown.shows("report of March")
            held.rollback()
            assert shown.process.wait(30) == 0
            wait_until(lambda: shown.shows("created replication slot"))


@pytest.mark.rare
def test_functions_report_without_a_terminal(outbox: Outbox, tmp_path: Path) -> None:
    settings = outbox.settings()
    output: Reports = []
    progress = teller(output)
    publish(outbox.conn, business_transactions(3), progress, 3)
    assert output[-1] == ("publishing transactions", 3, 3)
    for _ in range(4):
        outbox.publish(host(1), event(amount=-1))
    outbox.conn.execute("alter table projection alter column amount drop not null")
    outbox.drain(settings)
    with reach_target(settings) as target:
        dead_letters = DeadLetters(settings, target)
        found = dead_letters.find(DeadLetterSelection())
        numbers = dead_letters.replay(found, None, report=progress)
        assert output[-1] == ("queuing transactions", 4, 4)
        with relaying(settings):
            assert dead_letters.outcome(numbers, progress).dead == 4
        assert output[-1] == ("waiting for transactions", 4, 4)
        dead_letters.discard(dead_letters.find(DeadLetterSelection()), None, progress)
        assert output[-1] == ("discarding transactions", 4, 4)
        dead_letters.purge(dead_letters.find(DeadLetterSelection(), ("discarded",)), None, progress)
        assert output[-1] == ("deleting dead letters", 4, 4)
        erase(settings, outbox.conn, target, str(host(1)), progress=progress)
    what, done, total = output[-1]
    assert what == "scanning the outbox: pages"
    assert total is not None
    assert done <= total
    built = build(settings, tmp_path / "executors.tar.gz", progress)
    what, done, total = output[-1]
    assert (what, done) == ("packing bytes", total)
    assert built.file.exists()


def test_an_export_to_a_pipe_is_whole_while_the_bar_is_shown(
    outbox: Outbox, tmp_path: Path
) -> None:
    for _ in range(3):
        outbox.publish(host(1), event(amount=-1))
    outbox.drain(outbox.settings())
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    written = tmp_path / "letters"
    with (
        written.open("wb") as file,
        at_terminal("dlq", "export", "--config", config, stdout=file.fileno()) as shown,
    ):
        assert shown.process.wait(30) == 0
    assert len(written.read_text().splitlines()) == 3
    assert "writing dead letters" not in written.read_text()
