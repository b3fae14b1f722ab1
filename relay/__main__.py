"""The command `relay`, also as `python -m relay`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command, if what it needs is installed: `relay.client` needs nothing, the service does."""
    try:
        from relay.cli.app import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "relay":
            raise
        print(
            f"relay: the service needs {error.name}: pip install 'relay-outbox[service]'",
            file=sys.stderr,
        )
        sys.exit(2)
    main()


if __name__ == "__main__":
    run()
