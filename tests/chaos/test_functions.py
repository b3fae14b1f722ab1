"""Functions whose process is killed, stopped or frozen, or whose sessions are cut: another process takes over."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.outbox import Outbox, event, host, wait_until
from tests.process import Running, running

pytestmark = [pytest.mark.chaos]

EFFECTS = (
    "create table effects (seq bigserial, id uuid, host_id uuid, c_offset bigint, attempt int)"
)
CUT = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and application_name like 'relay%%'
       and random() < %s
"""
HOSTS = 8
RETRY = {"wait": 0.1, "max_wait": 0.3, "jitter": 0.05, "defer_after": 0.05, "attempts": 1000}


def calling(outbox: Outbox, name: str, mode: str) -> dict[str, Any]:
    handler = {
        "type": "function",
        "callable": f"tests.callables:{name}",
        "retry": RETRY,
        "circuit_breaker": {"cool_down": 0.5},
    }
    return {
        "handlers": {"mail": handler},
        "routes": [{"handlers": ["mail"]}],
        "source": {**outbox.config()["source"], "mode": mode},
        "poll": {"wait_period_ms": 100},
    }


def disturb(outbox: Outbox, config: Path, chance: random.Random, seconds: float, **env: str) -> int:
    """Publish, and kill, stop, freeze, cut and take over at random; returns the number of events, all delivered.

    A process that a second one replaces is killed at a random moment, or goes on beside it.
    """
    published = 0
    ends = time.monotonic() + seconds
    with ExitStack() as stack:
        processes: list[Running] = []

        def start(number: int) -> None:
            own = config.with_name(f"relay{number}.yaml")
            own.write_text(config.read_text())
            processes.append(stack.enter_context(running(own, **env)))

        number = 0
        while time.monotonic() < ends or not processes:
            if len(processes) < 2 and (not processes or chance.random() < 0.5):
                number += 1
                start(number)
            for _ in range(chance.randrange(30)):
                published += 2
                amount = published
                outbox.publish(host(chance.randrange(HOSTS)), event(amount), event(amount + 1))
            time.sleep(chance.random() * 1.5)
            kind = chance.choice(("kill", "stop", "cut", "cut", "freeze", "go on"))
            victim = chance.choice(processes)
            if kind == "kill":
                victim.kill()
                processes.remove(victim)
            elif kind == "stop":
                assert victim.terminate() == 0
                processes.remove(victim)
            elif kind == "cut":
                outbox.conn.execute(CUT, (chance.random(),))
            elif kind == "freeze":
                # Others may claim its sink meanwhile; it goes on in the middle of its calls.
                victim.process.send_signal(signal.SIGSTOP)
                outbox.conn.execute(CUT, (chance.random(),))
                time.sleep(chance.random() * 4)
                victim.process.send_signal(signal.SIGCONT)
        if not processes:
            start(number + 1)
        wait_until(
            lambda: outbox.value(
                """
                    select (s.snapshot is null or not exists (
                               select from outbox_message_t where not pg_visible_in_snapshot(c_xid, s.snapshot)
                                  and c_xid not in (select unnest(xids) from relay.sink_commits)))
                       and not exists (select from relay.deferred)
                      from relay.sinks as s
                    """
            ),
            90,
        )
    return published


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["auto", "poll"])
@pytest.mark.parametrize("name", ["complete", "complete_plain"])
def test_effects_are_there_exactly_once(
    outbox: Outbox, tmp_path: Path, name: str, mode: str, seed: int
) -> None:
    outbox.conn.execute(EFFECTS)
    config = outbox.config_file(tmp_path / "relay.yaml", **calling(outbox, name, mode))
    outbox.install_again(outbox.settings(**calling(outbox, name, mode)))
    published = disturb(outbox, config, random.Random(f"{name} {mode} {seed}"), 20)
    assert outbox.value("select count(*) from outbox_message_t") == published
    assert outbox.value("select count(*) from effects") == published
    assert outbox.value("select count(distinct id) from effects") == published
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    # In order: the sequence counts inserts, and a transaction of a host begins after the one before it has committed.
    wrong = outbox.column(
        """
        select c_offset from (
            select c_offset, c_offset < lag(c_offset) over (partition by host_id order by seq) as wrong from effects
        ) as found where wrong
        """
    )
    assert wrong == []


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_calls_are_made_at_least_once_and_in_order(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    file = tmp_path / "written"
    file.touch()
    config = outbox.config_file(tmp_path / "relay.yaml", **calling(outbox, "write_down", mode))
    outbox.install_again(outbox.settings(**calling(outbox, "write_down", mode)))
    disturb(outbox, config, random.Random(mode), 20, TEST_FUNCTION_FILE=str(file))
    written: dict[str, list[int]] = defaultdict(list)
    for line in file.read_text().splitlines():
        key, offset = line.split()
        written[key].append(int(offset))
    for number in range(HOSTS):
        offsets = outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )
        assert list(dict.fromkeys(written[str(host(number))])) == offsets
