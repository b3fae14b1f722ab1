"""A limit of the system on threads: what relay cannot start now, it starts later.

torproject/sbws#195: a program ended with a traceback where the system had no thread for it.
dgtlmoon/changedetection.io#1993: its container restarted again and again. ranaroussi/multitasking#4: after some seconds
threads can be had again.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relay.runtime import threads
from tests.outbox import Outbox, event, host, relaying, wait_until

MESSAGE = "can't start new thread"


class Limit:
    """Refuses threads while it `refuses`, as the system does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.refused = 0
        start = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            if self.refuses and thread.name.startswith(
                ("apply", "sinks", "calls", "receiver", "keep-alive", "sessions")
            ):
                self.refused += 1
                raise RuntimeError(MESSAGE)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starting)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


@pytest.mark.parametrize(("at_start", "sink"), [(True, False), (False, False), (False, True)])
def test_relay_goes_on_once_there_are_threads_again(
    outbox: Outbox, limit: Limit, at_start: bool, sink: bool
) -> None:
    more: dict[str, Any] = {}
    if sink:
        outbox.conn.execute(
            "create table effects (id uuid, host_id uuid, c_offset bigint, attempt int)"
        )
        config = outbox.config()
        function = {"type": "function", "callable": "tests.callables:complete"}
        more["handlers"] = {**config["handlers"], "calls": function}
        more["routes"] = [{"handlers": ["projection", "calls"]}]
    settings = outbox.settings(**more)
    limit.refuses = at_start
    with relaying(settings) as service:
        if at_start:
            wait_until(lambda: limit.refused > 1)
            limit.refuses = False
        outbox.publish(host(0), event(0))
        outbox.wait_handled()
        limit.refused, limit.refuses = 0, True
        with outbox.conn.transaction():
            for number in range(400):
                outbox.publish(host(number), event(number))
        wait_until(lambda: limit.refused > 1)
        assert service.error is None
        limit.refuses = False
        outbox.wait_handled(60)
        if sink:
            outbox.wait_delivered("calls")
    outbox.assert_exact()


def test_calls_wait_for_the_threads_that_there_are(limit: Limit) -> None:
    with threads.pool(4, "apply") as pool:
        limit.refuses = True
        with pytest.raises(RuntimeError, match=MESSAGE):
            pool.submit(int, "1")
        limit.refuses = False
        go_on = threading.Event()
        first = pool.submit(go_on.wait, 60)
        limit.refuses = True
        more = [pool.submit(int, str(number)) for number in range(8)]
        go_on.set()
        assert first.result(60)
        assert [each.result(60) for each in more] == list(range(8))
        assert isinstance(pool, ThreadPoolExecutor)
        assert pool._work_queue.empty()
