"""The queue of commits between the receiver and the service."""

from __future__ import annotations

import time
from threading import Timer

from relay.config.settings import BatchLimits
from relay.source.stream.commit_queue import CommitQueue


def test_whoever_waits_for_commits_is_woken() -> None:
    """A relay that started, or took over, noticed only a second later that it had the stream."""
    queue = CommitQueue(BatchLimits())
    began = time.monotonic()
    Timer(0.05, queue.wake).start()
    assert queue.take(30) is None
    queue.wake()
    assert queue.take(30) is None
    assert time.monotonic() - began < 20
    assert queue.take(0.01) is None
