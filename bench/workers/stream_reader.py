"""Follows a Redis stream and notes the time of each event's arrival."""

from __future__ import annotations

import re
from typing import Any

import redis

from bench.workers.talk import Arrivals, arguments, say

SUBJECT = re.compile(rb'"subject": ?"([^"]+)"')
WAIT_MS = 1_000


def main() -> None:
    job = arguments()
    arrivals = Arrivals(job["arrivals"])
    client = redis.Redis(port=job["port"])
    last: Any = b"0"
    say("ready")
    while True:
        answer: Any = client.xread({job["stream"]: last}, count=1_000, block=WAIT_MS)
        for _, messages in answer:
            subjects = (SUBJECT.search(fields[b"data"]) for _, fields in messages)
            arrivals.note(match[1].decode() for match in subjects if match)
            last = messages[-1][0]


if __name__ == "__main__":
    main()
