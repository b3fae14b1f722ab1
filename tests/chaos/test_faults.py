"""Kills, stops and cuts. Each ends in: projection + dead letters = outbox, order per host held, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.outbox import PROJECTION, Outbox, event, host, relaying, wait_until
from tests.postgres import Server
from tests.process import administer, running

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("stays_live")]

EVERYTHING = 200_000
CHANCE = random.Random(20_26)


def progress(outbox: Outbox) -> int:
    """Events applied so far, as the sequence tells: cheap, and not held up by anybody's lock."""
    return int(outbox.value("select last_value from projection_seq_seq"))


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["inline", "spark"])
def test_two_hundred_thousand_events_drain_exactly(
    outbox: Outbox, engine: str, request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue("spark_session") if engine == "spark" else None
    outbox.fill(40_000, events=5, hosts=64)
    outbox.drain(outbox.settings(engine), session, timeout=300)
    assert outbox.value("select count(*) from projection") == EVERYTHING
    assert outbox.value("select max(next_offset) from relay.consumer_offsets") == EVERYTHING + 1
    last = outbox.value("select max(applied_lsn)::text from relay.consumer_offsets")
    assert outbox.confirmed(last)
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_a_hundred_thousand_old_rows_are_read_by_the_executors(
    outbox: Outbox, tmp_path: Path
) -> None:
    outbox.fill(20_000, events=5, hosts=64)
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        source={**outbox.config()["source"], "slot": f"{outbox.slot}_late"},
        group="late",
        batch={"max_events": 5_000, "inline_max_events": 0},
    )
    assert (
        administer(outbox, "init", "--from", "beginning", "--config", str(config)).returncode == 0
    )
    outbox.publish(host(1), event(1))
    # It dies on the way, and goes on where it was.
    with running(config) as service:
        wait_until(lambda: progress(outbox) > 8_000, 120)
        for program, goal in (("pyspark.daemon", 24_000), ("java", 48_000)):
            kill_children(service.process.pid, program)
            wait_until(lambda goal=goal: progress(outbox) > goal, 120)  # type: ignore[misc]
        service.kill()
    with running(config) as service:
        wait_until(lambda: outbox.value("select count(*) from projection") > 100_000, 240)
        service.wait_said("caught up")
        assert service.terminate() == 0
        assert {line["engine"] for line in service.lines() if line["message"] == "batch"} == {
            "spark"
        }
    outbox.assert_exact()


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_killed_at_random_moments(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml", batch={"inline_max_events": 1_000_000_000, "max_events": 2_000}
    )
    outbox.fill(40_000, events=5, hosts=64)
    kills = 0
    while kills < 5:
        goal = progress(outbox) + CHANCE.randrange(1, 36_000)
        with running(config) as service:
            wait_until(lambda goal=goal: progress(outbox) >= goal, 60)  # type: ignore[misc]
            service.kill()
            kills += 1
    with running(config) as service:
        outbox.wait_drained(240)
        assert service.terminate() == 0
    assert outbox.value("select count(*) from projection") == EVERYTHING
    outbox.assert_exact()


@pytest.mark.rare
def test_the_target_is_down_for_a_while(outbox: Outbox, killable_server: Server) -> None:
    target = killable_server.create_database("target")
    with Outbox(target) as effects:
        effects.conn.execute(PROJECTION)
    settings = outbox.settings(target={"dsn": target})
    outbox.install_again(settings)
    outbox.fill(8_000)
    with relaying(settings):
        with Outbox(target) as effects:
            wait_until(lambda: progress(effects) > 5_000)
        killable_server.stop("immediate")
        down = outbox.wal_end()
        outbox.fill(200)
        # Longer than every time-out of the pool and of the connection attempts together.
        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: outbox.confirmed(down))
        killable_server.start()
        outbox.wait_drained(120)
    with Outbox(target) as effects:
        assert effects.value("select count(*) from relay.dead_letter_queue") == 0
        assert effects.value("select count(*) from projection") == 41_000
        assert effects.value("select count(distinct id) from projection") == 41_000


@pytest.fixture
def mortal_outbox(killable_server: Server) -> Iterator[Outbox]:
    with Outbox(killable_server.create_database("source")) as made:
        made.install()
        yield made


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
def test_the_server_crashes_and_comes_back(
    killable_server: Server, mortal_outbox: Outbox, mode: str
) -> None:
    mortal_outbox.fill(6_000)
    source = {**mortal_outbox.config()["source"], "mode": mode}
    with relaying(mortal_outbox.settings(source=source, batch={"max_events": 1_000})):
        for goal in (1_000, 8_000, 16_000):
            wait_until(lambda goal=goal: progress(mortal_outbox) > goal)  # type: ignore[misc]
            mortal_outbox.conn.close()
            killable_server.kill() if goal == 8_000 else killable_server.stop("immediate")
            killable_server.start()
            mortal_outbox.reconnect()
        mortal_outbox.publish(host(1), event(1))
        wait_until(lambda: mortal_outbox.value("select count(*) from projection") == 30_001, 120)
    assert mortal_outbox.value("select count(*) from projection") == 30_001
    mortal_outbox.assert_exact()


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
def test_every_session_is_terminated_again_and_again(outbox: Outbox, mode: str) -> None:
    outbox.fill(4_000)
    source = {**outbox.config()["source"], "mode": mode}
    with relaying(outbox.settings(source=source, batch={"max_events": 500})):
        for goal in range(0, 16_000, 4_000):
            wait_until(lambda goal=goal: progress(outbox) > goal)  # type: ignore[misc]
            outbox.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        wait_until(lambda: outbox.value("select count(*) from projection") == 20_000)
    outbox.assert_exact()


def kill_children(parent: int, name: str) -> None:
    """SIGKILL every descendant whose command line has the name in it."""
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # which a zombie is, too
            if name in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_spark_workers_and_the_jvm_are_killed(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml", batch={"inline_max_events": 0, "max_events": 1_000}
    )
    outbox.fill(4_000)
    with running(config) as service:
        service.wait_said("batch", 120)
        for program in ("pyspark.daemon", "java", "pyspark.daemon"):
            seen = progress(outbox)
            kill_children(service.process.pid, program)
            wait_until(lambda seen=seen: progress(outbox) > seen + 1_000, 120)  # type: ignore[misc]
        outbox.wait_drained(120)
        assert service.terminate() == 0
        assert {line["engine"] for line in service.lines() if line["message"] == "batch"} == {
            "spark"
        }
        assert service.said("the Spark session died")
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.assert_exact()
