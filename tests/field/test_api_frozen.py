"""A process of the HTTP API that is frozen for longer than its clients and their proxies wait, and goes on.

So are a paused container, a virtual machine that is moved, and a process under a debugger. Timers that have expired
meanwhile fire before what has arrived is read, and requests whose senders have gone are still there.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from relay.runtime.threads import beside
from tests.api import API, ResumingClient, Source, authorized, new_token, settings_of
from tests.outbox import Outbox, event, host, wait_until
from tests.process import running

REQUESTS = 8
FIRST_SECONDS = 0.3
"""How long a client waits at first; twice as long each time."""


@dataclass
class Impatient:
    """Publishes with an idempotency key, and repeats a request that takes too long."""

    address: str
    token: str
    given_up: dict[int, int] = field(default_factory=dict)
    """How often each request was given up."""

    def post(self, number: int, body: dict[str, Any], **query: Any) -> Any:
        """Publish an event with a number; returns the answer."""
        head = {**authorized(self.token), "idempotency-key": f"order {number}"}
        body = {"host_id": str(host(1)), "event_type": "order.placed", **body}
        seconds = FIRST_SECONDS
        while True:
            try:
                answer = httpx.post(
                    f"{self.address}/v1/events",
                    json={**body, "payload": {"number": number}},
                    headers=head,
                    params=query,
                    timeout=seconds,
                )
            except httpx.TransportError:
                self.given_up[number] = self.given_up.get(number, 0) + 1
                seconds *= 2
                continue
            if answer.status_code in (200, 202):
                return answer.json()
            assert answer.status_code == 503, answer.text
            time.sleep(0.1)


def numbers(outbox: Outbox) -> list[int]:
    return sorted(outbox.column("select (payload->>'number')::int from outbox_message_t"))


@pytest.mark.parametrize(
    "seconds",
    [
        0,
        # Also longer than the API waits for a head, for a client that takes nothing, and until a heartbeat.
        pytest.param(35, marks=[pytest.mark.rare, pytest.mark.slow]),
    ],
)
def test_what_was_asked_of_a_frozen_process_is_done_once(
    outbox: Outbox, tmp_path: Path, seconds: int
) -> None:
    """Its clients have gone, and have asked again; streams miss nothing, whether they wait or resume."""
    token = new_token(settings_of(outbox), rights=["read", "publish"])
    config = outbox.config_file(tmp_path / "relay.yaml", api=API)

    def publish(number: int, **more: Any) -> None:
        outbox.publish(host(1), event(number, "order.placed", payload={"number": number}, **more))

    with running(config, command="api") as ran, ThreadPoolExecutor(REQUESTS + 1) as threads:
        ran.wait_said("the API is served")
        (said,) = [each for each in ran.lines() if "the API is served" in each["message"]]
        client = Impatient(f"http://{said['address']}", token)
        resuming = ResumingClient(client.address, token)
        with (
            Source(client.address, token).ready() as patient,
            beside(lambda ended: resuming.read(outbox.reader_dsn, ended), "resumes"),
        ):
            publish(0)
            patient.take(1)
            wait_until(lambda: resuming.numbers == [0])
            id_ = uuid.uuid4()
            asked = threads.submit(client.post, 1, {"id": str(id_)}, wait=50)
            wait_until(lambda: numbers(outbox) == [0, 1])
            with ran.frozen():
                posted = {
                    number: threads.submit(client.post, number, {})
                    for number in range(2, REQUESTS + 2)
                }
                publish(REQUESTS + 2)
                publish(REQUESTS + 3, metadata={"causation_id": str(id_)})
                time.sleep(seconds)
                wait_until(
                    lambda: all(
                        each.done() or client.given_up.get(number, 0) >= 2
                        for number, each in posted.items()
                    )
                )
            for each in posted.values():
                assert each.result(120)["ids"]
            assert asked.result(120)["reply"]["payload"] == {"number": REQUESTS + 3}
            publish(REQUESTS + 4)
            everything = list(range(REQUESTS + 5))
            patient.limit(60)
            patient.take(len(everything))
            wait_until(lambda: len(resuming.numbers) >= len(everything), 60)
        assert sorted(each["payload"]["number"] for each in patient.events) == everything
        assert sorted(resuming.numbers) == everything
        assert resuming.refused == []
        assert ran.terminate() == 0
    assert numbers(outbox) == everything
