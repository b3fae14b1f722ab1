"""`python -m relay`."""

from relay.cli import main

main()
