"""What goes on although nobody waits for it any more."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from relay.runtime.shielding import shielded


def test_the_error_of_what_nobody_waits_for_is_not_logged() -> None:
    """A session that ended while the source was cut left a traceback in the log."""
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        running: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(shielded(running))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not running.done()
        running.set_exception(ConnectionError())
        await asyncio.sleep(0)
        del running
        gc.collect()

    asyncio.run(main())
    assert reported == []
