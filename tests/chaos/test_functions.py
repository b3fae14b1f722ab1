"""Functions whose process is killed, stopped or frozen, or whose sessions are cut: another process takes over."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import yaml

from relay.admin import sinks
from tests.chaos.proxy import through_proxy
from tests.outbox import Outbox, event, host, wait_until
from tests.process import Running, running
from tests.webhook import Answer, Webhook

pytestmark = [pytest.mark.chaos]

EFFECTS = """
    create function series() returns text language sql as 'select series::text from relay.sinks';
    create table effects (
        seq bigserial, id uuid, host_id uuid, c_offset bigint, attempt int, series text default series()
    )
"""
COUNT = "select count(distinct id) from effects where series = series()"
CUT = """
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and application_name like 'relay%%'
       and random() < %s
"""
HOSTS = 8
RETRY = {"wait": 0.1, "max_wait": 0.3, "jitter": 0.05, "defer_after": 0.05, "attempts": 1000}
BATCH = {"each": "batch", "max_batch": 20, "max_wait": 0.05}
ONE, BATCHES = ("complete", "complete_plain"), ("complete_batch", "complete_batch_plain")
MODES = ("auto", "poll", "wal")
FAULTS = ("kill", "stop", "cut", "cut source", "cut target", "stall", "freeze", "go on")
REPEATED_SECONDS = 3.0
"""What was delivered longer before a kill is stored; the documented second, and two for a machine that is busy."""


def sink(outbox: Outbox, mode: str, **handler: Any) -> dict[str, Any]:
    common = {"retry": RETRY, "circuit_breaker": {"cool_down": 0.5}}
    return {
        "handlers": {"mail": {**common, **handler}},
        "routes": [{"handlers": ["mail"]}],
        "source": {**outbox.config()["source"], "mode": mode},
        "poll": {"wait_period_ms": 100},
    }


def calling(outbox: Outbox, name: str, mode: str) -> dict[str, Any]:
    more = {} if name in (*ONE, "write_down") else BATCH
    return sink(outbox, mode, type="function", callable=f"tests.callables:{name}", **more)


Operate = Callable[[random.Random, dict[str, Any]], None]


def disturb(
    outbox: Outbox,
    folder: Path,
    parts: Mapping[str, Any],
    chance: random.Random,
    seconds: float,
    delivered: Callable[[], int],
    operate: Operate | None = None,
    **env: str,
) -> int:
    """Publish, and kill, stop, freeze, cut and take over at random; returns the number of events.

    All are `delivered`. A process that a second one replaces is killed at a random moment, or goes on beside it.
    Meanwhile an operator may `operate`, and change the handler of those that are started from then on.
    """
    outbox.install_again(outbox.settings(**parts))
    published = number = 0
    with ExitStack() as stack:
        source, target = (stack.enter_context(through_proxy(outbox.relay_dsn)) for _ in range(2))
        config = outbox.config(**parts)
        config["source"]["dsn"], config["target"] = source.dsn, {"dsn": target.dsn}
        processes: list[Running] = []

        def ensure(count: int) -> None:
            # Some end by themselves: whoever runs them starts them again.
            nonlocal number
            processes[:] = [each for each in processes if each.process.poll() is None]
            while len(processes) < count:
                number += 1
                own = folder / f"relay{number}.yaml"
                own.write_text(yaml.safe_dump(config))
                processes.append(stack.enter_context(running(own, "--accept-configuration", **env)))

        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            ensure(chance.choice((1, 2)))
            for _ in range(chance.randrange(30)):
                published += 2
                outbox.publish(host(chance.randrange(HOSTS)), event(published), event(published))
            if operate is not None:
                operate(chance, config["handlers"]["mail"])
            time.sleep(chance.random() * 1.5)
            kind, victim = chance.choice(FAULTS), chance.choice(processes)
            if kind == "kill":
                victim.kill()
            elif kind == "stop" and victim.process.poll() is None:
                # Or else in mode wal its sink was interrupted (1), or another one has replaced its configuration (2).
                may_end = operate is not None or parts["source"]["mode"] == "wal"
                assert victim.terminate() in ((0, 1, 2) if may_end else (0,))
            elif kind == "cut":
                outbox.conn.execute(CUT, (chance.random(),))
            elif kind.startswith("cut"):
                (source if kind.endswith("source") else target).cut()
            elif kind == "stall":
                stalled = chance.choice((source, target))
                stalled.stall()
                time.sleep(chance.random() * 2)
                stalled.resume()
            elif kind == "freeze" and victim.process.poll() is None:
                # Others may claim its sink meanwhile; it goes on in the middle of its calls.
                victim.process.send_signal(signal.SIGSTOP)
                outbox.conn.execute(CUT, (chance.random(),))
                time.sleep(chance.random() * 4)
                victim.process.send_signal(signal.SIGCONT)

        def is_done() -> bool:
            ensure(1)
            return delivered() >= published and bool(outbox.value(IS_STORED))

        wait_until(is_done, 90)
    logged = chain.from_iterable(
        each.read_text().splitlines() for each in folder.glob("relay*.log")
    )
    # Its errors are what nobody has expected.
    assert [line for line in logged if '"logger": "asyncio"' in line] == []
    return published


IS_STORED = """
    select (s.snapshot is null or not exists (
               select from outbox_message_t where not pg_visible_in_snapshot(c_xid, s.snapshot)
                  and c_xid not in (select unnest(xids) from relay.sink_commits)))
       and not exists (select from relay.deferred)
      from relay.sinks as s
"""


def disturb_effects(
    outbox: Outbox,
    folder: Path,
    parts: Mapping[str, Any],
    chance: random.Random,
    seconds: float,
    operate: Operate | None = None,
) -> None:
    """Disturb a function that appends to `effects`: each event is there once, each host's in order."""
    outbox.conn.execute(EFFECTS)
    published = disturb(
        outbox, folder, parts, chance, seconds, lambda: int(outbox.value(COUNT)), operate
    )
    assert outbox.value("select count(*) from effects") == published
    assert outbox.value("select count(*) from outbox_message_t") == published
    require_exact(outbox)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def require_exact(outbox: Outbox) -> None:
    """Since the sink was moved, each event has one effect, each host's in order.

    The sequence counts inserts, and a transaction of a host begins after the one before it has committed. While a block
    is open, nobody moves the sink.
    """
    once = outbox.column(
        """
        select id from outbox_message_t
          left join (select id as done from effects where series = series()) as effect on done = id
         group by id having count(done) <> 1
        """
    )
    assert once == []
    wrong = outbox.column(
        """
        select c_offset from (
            select c_offset, c_offset < lag(c_offset) over (partition by host_id order by seq) as wrong
              from effects where series = series()
        ) as found where wrong
        """
    )
    assert wrong == []


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*ONE, *BATCHES, "complete_each"])
def test_effects_are_there_exactly_once(
    outbox: Outbox, tmp_path: Path, name: str, mode: str, seed: int
) -> None:
    chance = random.Random(f"{name} {mode} {seed}")
    disturb_effects(outbox, tmp_path, calling(outbox, name, mode), chance, 20)


def test_the_effects_of_batches_are_there_exactly_once(outbox: Outbox, tmp_path: Path) -> None:
    chance = random.Random("short")
    disturb_effects(outbox, tmp_path, calling(outbox, "complete_batch", "auto"), chance, 4)


def require_order(outbox: Outbox, written: Mapping[str, list[int]]) -> None:
    """Each host's events were delivered at least once, and for the first time in order."""
    for number in range(HOSTS):
        offsets = outbox.column(
            "select c_offset from outbox_message_t where host_id = %s order by 1", (host(number),)
        )
        assert list(dict.fromkeys(written[str(host(number))])) == offsets


def lines_of(file: Path) -> list[tuple[str, int, float]]:
    """What `write_down` has written: host, offset and time."""
    lines = (line.split() for line in file.read_text().splitlines())
    return [(key, int(offset), float(at)) for key, offset, at in lines]


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["write_down", "write_down_batch"])
def test_calls_are_made_at_least_once_and_in_order(
    outbox: Outbox, tmp_path: Path, name: str, mode: str
) -> None:
    file = tmp_path / "written"
    file.touch()
    disturb(
        outbox,
        tmp_path,
        calling(outbox, name, mode),
        random.Random(f"{name} {mode}"),
        20,
        lambda: len({offset for _, offset, _ in lines_of(file)}),
        TEST_FUNCTION_FILE=str(file),
    )
    written: dict[str, list[int]] = defaultdict(list)
    for key, offset, _ in lines_of(file):
        written[key].append(offset)
    require_order(outbox, written)


@pytest.mark.parametrize(
    "name", ["write_down_batch", pytest.param("write_down", marks=pytest.mark.rare)]
)
def test_a_kill_repeats_only_what_was_delivered_just_before(
    outbox: Outbox, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "written"
    file.touch()
    parts = calling(outbox, name, "auto")
    outbox.install_again(outbox.settings(**parts))
    config = outbox.config_file(tmp_path / "relay.yaml", **parts)
    published = 0
    with running(config, TEST_FUNCTION_FILE=str(file)) as process:
        wait_until(lambda: process.said("a sink is attached to the stream"))
        ends = time.monotonic() + REPEATED_SECONDS + 2
        while time.monotonic() < ends:
            published += 1
            outbox.publish(host(published % HOSTS), event(published))
            time.sleep(0.01)
        process.kill()
        killed = time.monotonic()
    with running(config, TEST_FUNCTION_FILE=str(file)):
        outbox.wait_delivered("mail")
    before: dict[int, float] = {}
    again = set[int]()
    for _, offset, at in lines_of(file):
        if at < killed:
            before[offset] = at
        else:
            again.add(offset)
    assert len(before.keys() | again) == published
    repeated = [before[offset] for offset in before.keys() & again]
    assert min(repeated, default=killed) > killed - REPEATED_SECONDS


class Endpoint(Webhook):
    """Notes the events that it takes, in order; now and then it is down, or names an event that it does not take."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(self._answer)
        self.written: dict[str, list[int]] = defaultdict(list)
        self.offsets: set[int] = set()
        self._chance = chance
        self._lock = Lock()

    def _answer(self, headers: dict[str, str], body: bytes) -> Answer:
        with self._lock:
            if self._chance.random() < 0.03:
                return Answer(503)
            refused: dict[str, str] = {}
            for each in json.loads(body):
                key, offset = each["hostid"], int(each["sequence"])
                if key not in refused and self._chance.random() < 0.03:
                    refused[key] = each["id"]
                elif key not in refused:
                    self.written[key].append(offset)
                    self.offsets.add(offset)
        failures = [{"itemIdentifier": each} for each in refused.values()]
        return Answer(200, body=json.dumps({"batchItemFailures": failures}).encode())


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_posted_at_least_once_and_in_order(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    chance = random.Random(mode)
    with Endpoint(chance) as endpoint:
        parts = sink(outbox, mode, type="http", url=endpoint.url, **BATCH)
        disturb(outbox, tmp_path, parts, chance, 20, lambda: len(endpoint.offsets))
        require_order(outbox, endpoint.written)


def change(chance: random.Random, handler: dict[str, Any]) -> None:
    """Change how transactions are called: alone or in batches, and how many at once."""
    for name in BATCH:
        handler.pop(name, None)
    handler["concurrency"] = chance.choice((1, 4, 16))
    if chance.random() < 0.5:
        handler |= BATCH | {"max_batch": chance.choice((2, 20))}


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_pauses_and_changes_of_the_configuration_repeat_nothing(
    outbox: Outbox, tmp_path: Path, mode: str
) -> None:
    parts = calling(outbox, "complete_any", mode)
    settings = outbox.settings(**parts)

    def operate(chance: random.Random, handler: dict[str, Any]) -> None:
        change(chance, handler)
        if outbox.column("select 1 from relay.sinks") and chance.random() < 0.5:
            sinks.pause(settings, "mail", "at random")
            time.sleep(chance.random())
            sinks.resume(settings, "mail")

    chance = random.Random(f"operated {mode}")
    disturb_effects(outbox, tmp_path, parts, chance, 20, operate)


@pytest.mark.rare
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["auto", "poll"])
@pytest.mark.parametrize("seed", range(2))
def test_what_follows_a_seek_is_there_exactly_once(
    outbox: Outbox, tmp_path: Path, mode: str, seed: int
) -> None:
    outbox.conn.execute(EFFECTS)
    parts = calling(outbox, "complete_any", mode)
    settings = outbox.settings(**parts)

    def operate(chance: random.Random, handler: dict[str, Any]) -> None:
        change(chance, handler)
        if outbox.column("select 1 from relay.sinks") and chance.random() < 0.3:
            sinks.seek(settings, "mail", to="beginning")

    chance = random.Random(f"sought {mode} {seed}")
    disturb(outbox, tmp_path, parts, chance, 20, lambda: int(outbox.value(COUNT)), operate)
    require_exact(outbox)
