"""Deaths, cuts and zombies in each mode. Each ends exact: nothing lost, nothing twice, order per host held."""

from __future__ import annotations

import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from psycopg.conninfo import make_conninfo

from relay.faults import RelayError
from relay.source import polling
from relay.source.stream import replication
from tests.chaos.proxy import through_proxy
from tests.chaos.test_faults import progress
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running

pytestmark = pytest.mark.chaos

CHANCE = random.Random(7)
RECORD = {"audit": {"type": "python", "callable": "tests.callables:die_of_666"}}


def source(outbox: Outbox, mode: str) -> dict[str, Any]:
    return {**outbox.config()["source"], "mode": mode}


@pytest.mark.timeout(300)
def test_polling_instances_are_killed_and_join(outbox: Outbox, tmp_path: Path) -> None:
    outbox.fill(6_000, events=5, hosts=64)
    configs = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        configs.append(
            outbox.config_file(
                tmp_path / str(number) / "relay.yaml",
                source=source(outbox, "poll"),
                batch={"inline_max_events": 10**9, "max_events": 500},
            )
        )
    with running(configs[0]) as steady:
        for _ in range(4):
            with running(configs[1]) as one, running(configs[2]) as two:
                goal = progress(outbox) + CHANCE.randrange(1, 3_000)
                wait_until(lambda goal=goal: progress(outbox) >= min(goal, 30_000))  # type: ignore[misc]
                one.kill()
                two.kill()
        outbox.wait_handled(120)
        assert steady.terminate() == 0
    outbox.assert_exact()


@pytest.mark.server(15)
def test_an_error_that_came_with_the_answer_to_start_replication_is_read_at_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A filter that no row passes: it divides by zero. relay would refuse any filter before, or when it compares the
    # stream with the outbox, which it does as soon as the stream has begun.
    for checks in (replication, polling):
        monkeypatch.setattr(checks, "require_published", lambda *_: None)
    outbox.conn.execute(
        f'alter publication "{outbox.slot}" set table outbox_message_t where (1 / (c_offset - c_offset) > 0)'.encode()
    )
    outbox.publish(host(1), event(1))
    with through_proxy(outbox.relay_dsn) as proxy:
        proxy.gather_after = lambda data: b"START_REPLICATION" in data
        settings = outbox.settings(source={**source(outbox, "wal"), "dsn": proxy.dsn})
        with pytest.raises(RelayError, match="division by zero"), relaying(settings):
            # An unread error is noticed by the silence alone, after 90 s.
            wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()}, 20)


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_two_relays_take_over_from_each_other(outbox: Outbox, tmp_path: Path) -> None:
    configs = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        configs.append(
            outbox.config_file(
                tmp_path / str(number) / "relay.yaml",
                batch={"inline_max_events": 10**9, "max_events": 500},
            )
        )
    outbox.fill(3_000, events=5, hosts=64)
    standby = ExitStack()
    active = standby.enter_context(running(configs[0]))
    for number in range(5):
        following = ExitStack()
        successor = following.enter_context(running(configs[(number + 1) % 2]))
        # All may be applied before the successor has begun.
        goal = min(progress(outbox) + CHANCE.randrange(1, 2_000), 15_000 + 1_000 * number)
        wait_until(lambda goal=goal: progress(outbox) >= goal)  # type: ignore[misc]
        active.kill() if number % 2 else active.terminate()
        standby.close()
        outbox.fill(200, events=5, hosts=64)
        active, standby = successor, following
    outbox.wait_handled(60)
    outbox.wait_drained()
    assert active.terminate() == 0
    standby.close()
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("stays_live")
def test_killed_while_the_ways_change(outbox: Outbox, tmp_path: Path) -> None:
    outbox.fill(3_000, events=5, hosts=64)
    batch = {"inline_max_events": 10**9, "max_events": 500}
    for number in range(8):
        mode = ("auto", "poll")[number % 2]
        config = outbox.config_file(
            tmp_path / "relay.yaml", source=source(outbox, mode), batch=batch
        )
        if number % 4 == 2:
            outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
        outbox.fill(200, events=5, hosts=64)
        with running(config) as service:
            published = 15_000 + 1_000 * (number + 1)
            goal = min(progress(outbox) + CHANCE.randrange(1, 2_000), published)
            wait_until(lambda goal=goal: progress(outbox) >= goal, 60)  # type: ignore[misc]
            service.kill()
        wait_until(
            lambda: (
                not outbox.value(
                    "select count(*) from pg_replication_slots where active and slot_name = %s",
                    (outbox.slot,),
                )
            )
        )
    config = outbox.config_file(tmp_path / "relay.yaml", source=source(outbox, "auto"), batch=batch)
    with running(config) as service:
        outbox.wait_handled(120)
        outbox.wait_drained()
        assert service.terminate() == 0
    outbox.assert_exact()


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_the_outcome_of_a_commit_is_not_known(outbox: Outbox, mode: str) -> None:
    with through_proxy(outbox.relay_dsn) as proxy:
        settings = outbox.settings(
            source=source(outbox, mode), target={"dsn": proxy.dsn}, poll={"batch_size": 10}
        )
        outbox.publish(host(1), event(1))
        with relaying(settings):
            outbox.wait_handled()
            proxy.cut_after = lambda data: b"commit;" in data and CHANCE.random() < 0.3
            while proxy.cuts < 5:
                for number in range(9):
                    outbox.publish(host(number), event(number), event(number))
                outbox.wait_handled()
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.assert_exact()


def test_the_replication_connection_is_cut_and_stalled(outbox: Outbox) -> None:
    with through_proxy(outbox.relay_dsn) as proxy:
        dsn = make_conninfo(proxy.dsn, options="-c wal_sender_timeout=2s")
        settings = outbox.settings(
            source={**outbox.config()["source"], "dsn": dsn}, target={"dsn": outbox.relay_dsn}
        )
        with relaying(settings):
            for number in range(5):
                outbox.publish(host(number), event(number))
                outbox.wait_handled()
                proxy.cut()
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            proxy.stall()
            for number in range(50):
                outbox.publish(host(number % 5), event(number))
            # Nobody closes the connection: only its silence tells.
            wait_until(
                lambda: (
                    not outbox.value(
                        "select count(*) from pg_replication_slots where active and slot_name = %s",
                        (outbox.slot,),
                    )
                )
            )
            proxy.resume()
            outbox.wait_handled(60)
    outbox.assert_exact()


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
@pytest.mark.usefixtures("stays_live")
def test_a_transaction_that_kills_its_process_is_dead_lettered(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        source=source(outbox, mode),
        handlers=RECORD,
        routes=[{"handlers": ["audit"]}],
    )
    for number in range(30):
        outbox.publish(host(number % 3), event(number % 5), event(1))
    killer = outbox.publish(host(1), event(1), event(666))
    for number in range(30):
        outbox.publish(host(number % 3), event(number % 5), event(1))
    deaths = 0
    while True:
        with running(config) as service:
            wait_until(
                lambda service=service: (
                    service.process.poll() is not None or outbox.handled() == 122
                )  # type: ignore[misc]
            )
            if service.process.poll() is None:
                assert service.terminate() == 0
                break
            deaths += 1
            assert service.process.returncode == 66
    # Once unawares, then as often as crash_limit says.
    assert deaths == 4
    assert outbox.column("select distinct transaction_id::uuid from relay.dead_letter_queue") == [
        killer
    ]
    assert "3 processes died" in outbox.value("select min(exception) from relay.dead_letter_queue")
    assert outbox.value("select count(*) from relay.suspects") == 0
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("stays_live")
def test_a_transaction_that_kills_spark_workers_is_dead_lettered(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers=RECORD,
        routes=[{"handlers": ["audit"]}],
        batch={"inline_max_events": 0},
    )
    outbox.publish(host(1), event(1))
    killer = outbox.publish(host(1), event(666))
    outbox.publish(host(1), event(2))
    with running(config) as service:
        outbox.wait_handled(200)
        assert service.terminate() == 0
    assert outbox.column("select transaction_id::uuid from relay.dead_letter_queue") == [killer]
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(300)
def test_the_work_of_a_zombie_is_refused(outbox: Outbox, tmp_path: Path) -> None:
    """A worker is stopped with its transaction open; the server lets go of it, and another does the work."""
    handlers = {"audit": {"type": "python", "callable": "tests.callables:stop_once"}}
    dsn = make_conninfo(outbox.relay_dsn, options="-c idle_in_transaction_session_timeout=2s")
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        handlers=handlers,
        routes=[{"handlers": ["audit"]}],
        target={"dsn": dsn},
        batch={"inline_max_events": 0},
    )
    outbox.conn.execute("create table stopped (pid int)")
    for number in range(20):
        outbox.publish(host(number % 2), event(number))
    with running(config) as service:
        wait_until(lambda: outbox.value("select count(*) from stopped") == 1, 120)
        zombie = psutil.Process(outbox.value("select pid from stopped"))
        wait_until(lambda: zombie.status() == psutil.STATUS_STOPPED)
        # The relay dies, and its worker survives.
        service.kill()
        with running(config) as successor:
            outbox.wait_handled(120)
            if zombie.is_running():
                zombie.send_signal(signal.SIGCONT)
            outbox.publish(host(1), event(9))
            outbox.wait_handled()
            outbox.wait_drained()
            assert successor.terminate() == 0
    outbox.assert_exact()


def test_another_server_has_other_positions_and_c_offset_decides(outbox: Outbox) -> None:
    outbox.fill(40)
    with relaying(outbox.settings()):
        outbox.wait_handled()
    before = outbox.value("select count(*) from projection")
    # As after pg_upgrade: the same rows, positions that mean nothing.
    outbox.conn.execute("update relay.groups set system_identifier = '7'")
    outbox.conn.execute(
        "update relay.positions set applied_lsn = applied_lsn + 100000000 where partition_id < 4"
    )
    outbox.fill(40)
    with relaying(outbox.settings()):
        outbox.wait_handled()
        outbox.wait_drained()
    assert outbox.value("select count(*) from projection") == before * 2
    outbox.assert_exact()


@pytest.mark.skipif(
    not hasattr(psutil, "RLIMIT_DATA"), reason="Linux limits another process's memory"
)
@pytest.mark.rare
def test_a_row_larger_than_memory_is_dead_lettered_by_reference(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.conn.execute("alter table outbox_message_t drop constraint relay_max_event_bytes")
    outbox.publish(host(1), event(1))
    with running(outbox.config_file(tmp_path / "relay.yaml"), memory="own") as service:
        outbox.wait_drained()
        # Less than the row has, beside what threads have for their stacks.
        process = psutil.Process(service.process.pid)
        limit = process.memory_info().data + 96 * 1024 * 1024
        process.rlimit(psutil.RLIMIT_DATA, (limit, limit))
        outbox.conn.execute(
            "insert into outbox_message_t (host_id, event_type, payload)"
            " values (%s, 'x', jsonb_build_object('note', repeat('x', 100 * 1024 * 1024)))",
            (host(2),),
        )
        outbox.publish(host(3), event(3))
        outbox.wait_drained()
        assert service.terminate() == 0
    assert outbox.column("select c_offset from projection order by c_offset") == [1, 3]
    assert outbox.column(
        "select c_offset from relay.dead_letter_queue where by_reference and payload is null"
    ) == [2]
    outbox.assert_exact()
