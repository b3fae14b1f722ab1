"""Repeats every chaos test `RELAY_CHAOS_ROUNDS` times: once in `make test`, more often in `make chaos`."""

from __future__ import annotations

import os

import pytest

ROUNDS = int(os.environ.get("RELAY_CHAOS_ROUNDS", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chance is not seeded, so each round kills and cuts at other moments."""
    if ROUNDS > 1:
        metafunc.fixturenames.append("chaos_round")
        metafunc.parametrize("chaos_round", range(ROUNDS))
