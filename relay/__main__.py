"""Entry point of the command `relay` and of `python -m relay`."""

from __future__ import annotations

import sys

from relay import __version__
from relay.runtime.memory import collect_rarely


def run() -> None:
    """Run the command. Exits with status 2 if a package of the extra `service` is not installed.

    `--version` needs none of them.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"relay {__version__}")
        return
    # To look for garbage among what is imported took a tenth of a command's time.
    collect_rarely()
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
