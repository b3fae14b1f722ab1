"""What has happened is told when it has happened: not later, and not only if everything else went well.

Public reports: spring-cloud/spring-cloud-stream#2672 (nothing is logged once there is a dead-letter queue),
JSONbored/metagraphed#9731 (dead letters that nobody reads).
"""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from relay.admin import status
from relay.cli.app import app
from relay.model.batch import DeadLetterReport
from relay.pipeline.listeners import Meter
from tests.console import Visitor, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until


def test_dead_letters_are_told_while_another_task_of_their_batch_waits(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[DeadLetterReport] = []
    monkeypatch.setattr(Meter, "committed", lambda _, task: counted.extend(task.dead))
    settings = outbox.settings(batch={"inline_workers": 2})
    held = (
        "select from relay.group_partitions"
        " where partition_id = (select mod(abs(hashtext(%s)::bigint), 8)) for update"
    )
    with relaying(settings), psycopg.connect(outbox.superuser_dsn) as other:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        assert other.execute(held, (str(host(2)),)).rowcount == 1
        # One commit is one batch; above 100 events it is several tasks.
        with outbox.conn.transaction():
            for number in range(60):
                outbox.publish(host(1), event(-1))
                outbox.publish(host(2), event(number))
        dead = "select count(*) from relay.dead_letter_queue"
        wait_until(lambda: outbox.value(dead) == 60)
        wait_until(lambda: caplog.messages.count("dead letter") == 60)
        assert len(counted) == 60
        other.rollback()
        outbox.wait_handled()
    assert caplog.messages.count("dead letter") == len(counted) == 60
    outbox.assert_exact()


def test_dead_messages_of_queues_are_told_beside_dead_letters(
    outbox: Outbox, tmp_path: Path
) -> None:
    """`dead letters 0`, in the status and on the overview, beside a dead message of a queue."""
    settings = outbox.settings(observe=console_of())
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    outbox.worker.execute("select relay.enqueue('mail', '{}')")
    outbox.conn.execute(
        """
        with taken as (delete from relay.queue_messages returning *)
        insert into relay.queue_dead_letters (id, queue_id, attempts, enqueued_at, event_id, event_type)
        select id, queue_id, 1, enqueued_at, event_id, event_type from taken
        """
    )
    read = status.read(settings)
    assert (read.dead_letters, read.dead_messages) == (1, 1)
    with served(settings) as address:
        overview = Visitor(address).page("/groups/default/")
    tile = overview[overview.index("<h2>Dead letters</h2>") :].partition("</section>")[0]
    assert "1 of them in queues" in tile
    assert 'class="big bad"' in tile
    file = outbox.config_file(tmp_path / "relay.yaml")
    lines = CliRunner().invoke(app, ["status", "--config", str(file)])
    assert "dead letters 1, 1 of them in queues" in " ".join(lines.output.split())
