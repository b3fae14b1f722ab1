"""`python -m relay.demo.postgres`: a PostgreSQL server to try relay on, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from relay.demo.embedded import Cluster
from relay.faults import RelayError


def main() -> None:
    """Run a server, print its connection string, and stop it at SIGINT or SIGTERM.

    Exits with status 1 and one line if the server does not start.
    """
    parser = argparse.ArgumentParser("python -m relay.demo.postgres", description=__doc__)
    parser.add_argument("--port", type=int, help="TCP port on 127.0.0.1; default: a free one")
    parser.add_argument(
        "--directory",
        type=Path,
        help="where its data is kept; default: a temporary folder, removed at the end",
    )
    arguments = parser.parse_args()
    signals = {signal.SIGINT, signal.SIGTERM}
    # Blocked before the start, so that `sigwait` also receives a signal that arrives during it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        with Cluster(arguments.directory, port=arguments.port) as cluster:
            print(f"{cluster.dsn()} is ready; Ctrl-C ends it", flush=True)
            signal.sigwait(signals)
    except RelayError as error:
        sys.exit(f"postgres: {error}")


if __name__ == "__main__":
    main()
