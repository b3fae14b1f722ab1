"""The parts of a sink's session with each other, on a database."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

from relay.delivery.checkpoint import Checkpoint, SinkContext
from relay.delivery.connections import Connections
from relay.delivery.dispatch import Dispatcher
from relay.delivery.feed import Feed, WalHold
from relay.delivery.progress import SinkProgress
from relay.delivery.sinks import Sinks
from relay.delivery.submission import Submission
from relay.faults import Rejected
from relay.model.dispositions import Blocked, Disposition, RetryLater
from relay.pipeline.failure_limit import FailureLimit
from relay.pipeline.listeners import Meter
from relay.pipeline.routing import BatchRouter
from relay.store import deferred
from relay.store.positions.sinks import Claims
from tests.outbox import Outbox
from tests.unit.test_dispatch import Scripted, delivery, retried


def test_what_fails_while_held_keys_are_queried_holds_its_keys(outbox: Outbox) -> None:
    hook = {"type": "http", "url": "http://localhost/", "on_exhausted": "block_key"}
    settings = outbox.settings(handlers={"hook": hook}, routes=[{"handlers": ["hook"]}])
    of_sinks = Sinks(settings, lambda _: None, lambda: None)
    claims = Claims(settings.target_dsn, settings.group)
    assert claims.take(["hook"]) == {"hook"}
    state = claims.load({"hook": "now"})["hook"]
    connections = Connections(settings)

    async def main() -> tuple[dict[int, Disposition], set[str]]:
        feed = Feed(1, lambda: None)
        context = SinkContext(
            "hook",
            settings,
            of_sinks,
            feed,
            WalHold(True),
            Event(),
            connections.of_sink(),
            connections.outbox_end,
            Meter(),
        )

        async def behave(number: int) -> None:
            # While the store is busy with something else.
            while not checkpoint.storing.locked():
                await asyncio.sleep(0)
            if number == 1:
                raise Rejected("HTTP 400")

        configured: Any = settings.handlers["hook"]
        dispatcher = Dispatcher(Scripted(behave), configured, 1_000, FailureLimit({}, {}))
        progress = SinkProgress(state.position, state.done, context.polls)
        checkpoint = Checkpoint(context, state, progress, dispatcher)
        submission = Submission(context, BatchRouter(settings), checkpoint, dispatcher)
        dispatcher.end(retried(5, "b"), RetryLater("hook", Rejected("HTTP 400"), 60.0))
        dispatcher.submit(delivery(1, "a"))
        await submission._query_held([frozenset("a")])
        # The failure is not stored yet.
        found = deferred.held(claims.conn, settings.group, "hook", ["a"])
        dispatcher.submit(delivery(2, "a"))
        await dispatcher.wait_idle()
        await dispatcher.close()
        ended = dispatcher.take_ended()
        return {each.rows.commit.xid: disposition for each, disposition in ended}, found

    dispositions, found = asyncio.run(asyncio.wait_for(main(), 10))
    connections.close()
    claims.close()
    assert not found
    assert isinstance(dispositions[2], Blocked)
