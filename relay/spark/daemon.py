"""PySpark's daemon of Python workers, without the traceback of a worker whose task Spark has given up.

Spark closes the worker's socket when another task of the job fails, and logs that failure itself. It starts the daemon
with `python -m`, by `spark.python.daemon.module`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from pyspark import daemon


def _quiet(worker: Callable[[socket.socket, bool], int]) -> Callable[[socket.socket, bool], int]:
    def run(sock: socket.socket, authenticated: bool) -> int:
        try:
            return worker(sock, authenticated)
        except BrokenPipeError:
            # The worker ends with it, as it does without this.
            return 1

    return run


if __name__ == "__main__":
    # Where the manager looks for it.
    vars(daemon)["worker"] = _quiet(daemon.worker)
    daemon.manager()
