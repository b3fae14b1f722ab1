"""What users of job queues report of functions that other tools call, tried on sinks of type function."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from relay import Delivery
from relay.admin.dead_letters import DeadLetters
from relay.demo.embedded import free_port
from relay.sinks import function_calls
from relay.sinks.function_calls import LoopCalls, ThreadCalls
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import running

QUICK = {"wait": 0.1, "max_wait": 0.2, "jitter": 0.01, "defer_after": 0.05, "attempts": 100}


class Calls:
    """The calls of this module's functions."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, str]] = []
        self.done: list[int] = []
        self.behave: Callable[[Delivery, int], Any] = lambda delivery, amount: None


CALLS = Calls()


@pytest.fixture(autouse=True)
def calls() -> Calls:
    CALLS.__init__()  # type: ignore[misc]
    return CALLS


def _amount(delivery: Delivery) -> int:
    (first, *_) = delivery.events
    amount = int(first.payload["amount"])
    CALLS.begun.append((amount, delivery.attempt, delivery.idempotency_key))
    return amount


def plain(delivery: Delivery) -> None:
    """Do what the test says, in a thread."""
    amount = _amount(delivery)
    CALLS.behave(delivery, amount)
    CALLS.done.append(amount)


async def awaited(delivery: Delivery) -> None:
    """The same in an event loop."""
    amount = _amount(delivery)
    found = CALLS.behave(delivery, amount)
    if found is not None:
        await found
    CALLS.done.append(amount)


def effect(delivery: Delivery) -> None:
    """Commit an effect with the delivery."""
    amount = _amount(delivery)
    with delivery.transaction() as conn:
        CALLS.behave(delivery, amount)
        conn.execute("insert into effects values (%s)", (amount,))


def hang(delivery: Delivery) -> None:
    """Never return, in a process that is to be stopped or killed; leaves a file that says so."""
    (first, *_) = delivery.events
    file = Path(os.environ["TEST_FUNCTION_FILE"])
    if first.payload["amount"] == 1:
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            time.sleep(600)
    with file.open("a") as log:
        print(first.payload["amount"], file=log)


async def hang_awaited(delivery: Delivery) -> None:
    """The same, in an event loop that it blocks."""
    hang(delivery)


def calling(name: str, **more: Any) -> dict[str, Any]:
    retry = {**QUICK, **more.pop("retry", {})}
    handler = {"type": "function", "callable": f"{__name__}:{name}", "retry": retry, **more}
    return {"handlers": {"mail": handler}, "routes": [{"handlers": ["mail"]}]}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end is waited for briefly."""
    monkeypatch.setattr(function_calls, "END_SECONDS", 0.2)


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.usefixtures("soon")
def test_threads_that_hang_do_not_use_up_the_workers(
    outbox: Outbox, calls: Calls, let_go: threading.Event
) -> None:
    """dramatiq 211, 445, 653: a request without a time-out holds its thread, until no worker is left."""
    calls.behave = lambda delivery, amount: let_go.wait(60) if amount < 2 else None
    breaker = {"cool_down": 0.5}
    keys = calling("plain", concurrency=2, timeout=0.3, circuit_breaker=breaker)
    with relaying(outbox.settings(**keys)):
        for number in range(2):
            outbox.publish(host(number), event(number))
        wait_until(lambda: len(calls.begun) == 2)
        outbox.publish(host(2), event(2))
        # Both hang: the sink says so, and stops where it is. It does not start a third and a fourth call of these.
        wait_until(
            lambda: (
                "calls have not ended" in str(outbox.column("select fault from relay.sinks"))
                or calls.done == [2]
            )
        )
        let_go.set()
        wait_until(lambda: {0, 1, 2} == set(calls.done))
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


@pytest.mark.usefixtures("soon")
def test_others_go_on_beside_a_thread_that_hangs(
    outbox: Outbox, calls: Calls, let_go: threading.Event
) -> None:
    """river 1291, dramatiq 211: a call past its deadline takes a thread from the others for ever."""
    calls.behave = lambda delivery, amount: let_go.wait(60) if amount == 0 else None
    with relaying(
        outbox.settings(**calling("plain", concurrency=2, timeout=0.3, circuit_breaker=None))
    ):
        for number in range(20):
            outbox.publish(host(number), event(number))
        wait_until(lambda: set(calls.done) == set(range(1, 20)))
        assert [amount for amount, *_ in calls.begun].count(0) == 1
        let_go.set()
        wait_until(lambda: 0 in calls.done)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["plain", "awaited"])
def test_a_call_past_its_time_does_not_run_twice_at_once(
    outbox: Outbox, calls: Calls, let_go: threading.Event, name: str
) -> None:
    """celery 5306, pretix 2058, pg-boss 555, river 1135, hexpm 1825: what expires is begun again beside itself."""
    at_once: list[int] = []
    most: list[int] = []

    def behave(delivery: Delivery, amount: int) -> None:
        at_once.append(amount)
        most.append(len(at_once))
        let_go.wait(60)
        at_once.remove(amount)

    calls.behave = behave
    with relaying(outbox.settings(**calling(name, timeout=0.2, circuit_breaker=None))):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.column("select 1 from relay.deferred where attempts >= 3") != [])
        let_go.set()
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert max(most) == 1
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_what_is_blocked_does_not_use_up_its_attempts(outbox: Outbox, calls: Calls) -> None:
    """java-dynamic-sqs-listener 369, broadway_sqs 78: the second of a group fails, or overtakes."""

    def behave(delivery: Delivery, amount: int) -> None:
        if amount == 1 or (amount == 2 and delivery.attempt < 3):
            raise ValueError(amount)

    calls.behave = behave
    with relaying(outbox.settings(**calling("plain", retry={"attempts": 3}))):
        for number in (1, 2, 3):
            outbox.publish(host(1), event(number))
        wait_until(lambda: calls.done == [2, 3])
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    tried = [(amount, attempt) for amount, attempt, _ in calls.begun]
    assert tried == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 1


def test_a_replay_is_not_taken_for_a_repetition(outbox: Outbox, calls: Calls) -> None:
    """outpost 670, documenso 3204, ay-framework 252: a key that differs between attempts, or stops a manual retry."""
    outbox.conn.execute("create table effects (amount int)")

    def behave(delivery: Delivery, amount: int) -> None:
        if amount == 1 and len(calls.begun) < 4:
            raise ValueError("not yet")

    calls.behave = behave
    settings = outbox.settings(**calling("effect", retry={"attempts": 2}))
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 1)
    for _ in range(2):
        # One more attempt each; the second of them succeeds.
        with connect(outbox.relay_dsn) as conn:
            found = DeadLetters(settings, conn)
            found.replay(found.find(DeadLetterSelection()), "again")
        with relaying(settings):
            wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert outbox.column("select amount from effects") == [1]
    assert {key for *_, key in calls.begun} == set(
        outbox.column("select id::text from outbox_message_t")
    )
    assert outbox.column("select status from relay.dead_letter_queue") == ["replayed"]


def test_one_call_at_a_time_is_enough_for_everything(outbox: Outbox, calls: Calls) -> None:
    """google-cloud-java 2041: a pool of one thread waits for itself."""
    outbox.conn.execute("create table effects (amount int)")
    settings = outbox.settings(**calling("effect", concurrency=1), sinks={"connections": 2})
    with relaying(settings):
        for number in range(10):
            outbox.publish(host(number), event(number))
        wait_until(lambda: outbox.value("select count(*) from effects") == 10)


def test_an_exception_while_relay_stops_does_not_hold_it_up(outbox: Outbox, calls: Calls) -> None:
    """python-pubsub 394: an exception in a callback, and the shutdown hangs."""

    async def fail_late() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            raise ValueError("while it is cancelled")

    calls.behave = lambda delivery, amount: fail_late() if len(calls.begun) == 1 else None
    settings = outbox.settings(**calling("awaited"), shutdown_timeout=4)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(calls.begun) == 1)
    with relaying(settings):
        wait_until(lambda: calls.done == [1])
    assert [attempt for _, attempt, _ in calls.begun] == [1, 1]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hang", "terminate"),
        ("hang_awaited", "kill"),
        pytest.param("hang", "kill", marks=pytest.mark.rare),
        pytest.param("hang_awaited", "terminate", marks=pytest.mark.rare),
    ],
)
def test_what_hangs_does_not_hold_up_the_end_of_the_process(
    outbox: Outbox, tmp_path: Path, name: str, end: str
) -> None:
    """river 78, oban 856, 429, pg-boss 102, celery 1628, 4976: a stop waits for a job, loses it, or frees it late."""
    file = tmp_path / "hangs"
    more = {**calling(name), "shutdown_timeout": 4}
    more["handlers"]["other"] = {**more["handlers"]["mail"]}
    more["routes"] = [{"handlers": ["mail", "other"]}]
    config = outbox.config_file(tmp_path / "relay.yaml", **more)
    outbox.install_again(outbox.settings(**more))
    with running(config, TEST_FUNCTION_FILE=str(file)) as service:
        service.wait_said("reading the WAL")
        outbox.publish(host(1), event(1))
        wait_until(file.exists)
        if end == "kill":
            service.kill()
        else:
            assert service.terminate() == 0
    with running(config, TEST_FUNCTION_FILE=str(file)):
        outbox.publish(host(1), event(2))
        wait_until(lambda: file.read_text().split().count("2") == 2)
    # Each sink has both. After an orderly end, that of the sink that did not hang comes once.
    assert file.read_text().split().count("1") in ((2,) if end == "terminate" else (2, 3))


async def stop_the_loop(delivery: Delivery) -> None:
    """Stop the event loop in the first attempt, as a library for scripts does."""
    amount = _amount(delivery)
    if amount == 1 and delivery.attempt == 1 and not CALLS.done:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
    CALLS.done.append(amount)


def test_a_function_that_stops_its_loop_stops_nothing(outbox: Outbox, calls: Calls) -> None:
    """VirusTotal/vt-py#46: a library ends the loop that it runs in, and no task is done any more."""
    with relaying(outbox.settings(**calling("stop_the_loop", timeout=5))):
        for number in range(1, 4):
            outbox.publish(host(number), event(number))
        wait_until(lambda: set(calls.done) == {1, 2, 3})


OPENED: list[str] = []


def refuses_to_open() -> Any:
    OPENED.append("refused")
    raise ConnectionError


@contextmanager
def opens_for_ever() -> Iterator[None]:
    OPENED.append("hangs")
    STUCK.wait(60)
    yield


@asynccontextmanager
async def awaits_for_ever() -> AsyncIterator[None]:
    OPENED.append("awaits")
    await asyncio.sleep(600)
    yield


STUCK = threading.Event()


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("plain", "refuses_to_open"),
        ("awaited", "refuses_to_open"),
        ("plain", "opens_for_ever"),
        ("awaited", "awaits_for_ever"),
    ],
)
def test_nothing_is_left_of_an_open_that_fails(name: str, opens: str) -> None:
    """data61/anonlink-entity-service#472, celery/celery#7771: each attempt to set up leaves a thread or a task."""
    OPENED.clear()
    STUCK.clear()

    async def run() -> int:
        calls: Any
        if name == "plain":
            calls = ThreadCalls("mail", plain, 2, lambda call: None)
        else:
            calls = LoopCalls("mail", awaited, lambda call: None)
        for _ in range(20):
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(0.02):
                    await calls.enter(globals()[opens])
            await asyncio.sleep(0.01)
        held = len(calls._held)
        threads = sum(each.name == "function mail" for each in threading.enumerate())
        STUCK.set()
        await calls.close(1)
        assert held <= 2
        return threads

    assert asyncio.run(run()) <= 1
    # Only a thread cannot be ended: no second one is started beside it.
    assert (len(OPENED) == 1) == (opens == "opens_for_ever")


async def waits_in_a_thread(delivery: Delivery) -> None:
    """Wait in a thread of the loop's, which nobody can end."""
    Path(os.environ["TEST_FUNCTION_FILE"]).touch()
    await asyncio.to_thread(time.sleep, 100)


def test_a_thread_of_the_function_does_not_hold_up_the_end(outbox: Outbox, tmp_path: Path) -> None:
    """python/cpython#111358, polarsource/polar#10303: a thread keeps the process after its end."""
    more = {**calling("waits_in_a_thread"), "shutdown_timeout": 4}
    config, file = outbox.config_file(tmp_path / "relay.yaml", **more), tmp_path / "waits"
    outbox.install_again(outbox.settings(**more))
    with running(config, TEST_FUNCTION_FILE=str(file)) as service:
        outbox.publish(host(1), event(1))
        wait_until(file.exists)
        assert service.terminate() == 0
        assert service.said("the process ends while threads go on")


PROCESSES: list[ProcessPoolExecutor] = []


def in_a_process(delivery: Delivery) -> None:
    """Work in a pool of processes; note the process of relay and that of the pool."""
    if not PROCESSES:
        PROCESSES.append(ProcessPoolExecutor(1))
    worker = PROCESSES[0].submit(os.getpid).result()
    with Path(os.environ["TEST_FUNCTION_FILE"]).open("a") as file:
        print(os.getpid(), worker, file=file)


def test_what_was_forked_keeps_no_session_and_no_address(outbox: Outbox, tmp_path: Path) -> None:
    """que-rb/que#30, unjs/env-runner#23, topoteretes/cognee#4249: orphans of a killed worker hold its connections."""
    more = {**calling("in_a_process"), "observe": {"listen": f"127.0.0.1:{free_port()}"}}
    config, file = outbox.config_file(tmp_path / "relay.yaml", **more), tmp_path / "worked"
    outbox.install_again(outbox.settings(**more))
    own = """
        select count(*) from pg_stat_activity
         where starts_with(application_name, 'relay') and datname = current_database()
    """
    with running(config, TEST_FUNCTION_FILE=str(file)) as service:
        service.wait_said("reading the WAL")
        outbox.publish(host(1), event(1))
        wait_until(lambda: file.exists() and len(file.read_text().split()) == 2)
        service.kill()
    worker = int(file.read_text().split()[1])
    try:
        assert Path(f"/proc/{worker}").exists()
        wait_until(lambda: outbox.value(own) == 0)
        with running(config, TEST_FUNCTION_FILE=str(file)):
            outbox.publish(host(1), event(2))
            wait_until(lambda: len(file.read_text().split()) >= 4)
    finally:
        for each in {worker, *map(int, file.read_text().split()[3::2])}:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
