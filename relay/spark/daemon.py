"""PySpark's daemon of Python workers, without the traceback of a worker whose task Spark has cancelled.

Spark closes the worker's socket when another task of the job fails, and logs that failure itself. Spark runs the daemon
with `python -m`, as `spark.python.daemon.module` names it.
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
            # The exit status of a worker that ends with an exception.
            return 1

    return run


if __name__ == "__main__":
    # The manager calls the module's global of this name.
    vars(daemon)["worker"] = _quiet(daemon.worker)
    daemon.manager()
