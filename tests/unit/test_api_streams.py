"""Which clients of streams are cut."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from relay.api.app import create_app
from relay.api.callers import TokenCaller
from relay.api.filters import ReadFilter
from relay.api.streams import BUFFER_BYTES, Client, Streams
from relay.config.settings import Settings

PAGE = [b"x" * 32_768] * 8
PAGE_BYTES = sum(map(len, PAGE))
TURN_SECONDS = 0.5


class _Slow(selectors.SelectSelector):
    """Each turn of the loop takes half a second, of a clock of its own."""

    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        self.turns += 1
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Slow()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.turns * TURN_SECONDS


def _streams() -> Streams:
    api = {"listen": "127.0.0.1:0"}
    settings = Settings(source={"dsn": "postgresql://u@h/x"}, api=api)
    assert settings.api is not None
    streams: Streams = create_app(settings, settings.api).state.streams
    return streams


def test_a_slow_loop_cuts_no_client_that_takes_and_one_that_does_not() -> None:
    """With thousands of streams a turn takes longer than the tail waited for those that are late."""

    async def scenario() -> None:
        streams = _streams()
        caller = TokenCaller(1, "x", frozenset(["read"]), frozenset("*"), ("*",), None, "")
        client = Client(ReadFilter(frozenset(), (), None, None, caller), lambda: None)
        streams._attached = {client.filter.key: {client}}

        def put(_: object) -> None:
            client.put(PAGE, PAGE_BYTES)

        async def take() -> None:
            while True:
                # Until the socket is empty, and until its writer knows.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                client.take()

        taking = asyncio.create_task(take())
        for _ in range(40):
            await streams._paced(put, None)
            assert client.ended is None
        taking.cancel()
        for _ in range(BUFFER_BYTES // PAGE_BYTES + 2):
            await streams._paced(put, None)
        assert client.ended == "slow"
        # Nobody waits for it until it has left.
        loop = asyncio.get_running_loop()
        began = loop.time()
        await streams._paced(put, None)
        assert loop.time() <= began + TURN_SECONDS

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(scenario())
