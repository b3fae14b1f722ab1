"""HTTP clients of a test, which are closed at its end: what is left open is reported in a later one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import httpx

opened = ExitStack()
"""The clients of the test that runs."""


def http_client(address: str, **more: Any) -> httpx.Client:
    """Return a client of an address, which waits for 30 seconds unless more is said, until the test ends."""
    return opened.enter_context(httpx.Client(**{"base_url": address, "timeout": 30, **more}))
