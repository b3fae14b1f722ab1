"""The daemon of Spark's Python workers."""

from __future__ import annotations

import socket

import pytest

from relay.spark.daemon import _quiet


def test_a_worker_whose_task_is_given_up_ends_without_a_traceback() -> None:
    def broken(sock: socket.socket, authenticated: bool) -> int:
        raise BrokenPipeError if authenticated else ValueError("x")

    with socket.socket() as sock:
        assert _quiet(broken)(sock, True) == 1
        assert _quiet(lambda *_: 7)(sock, True) == 7
        with pytest.raises(ValueError, match="x"):
            _quiet(broken)(sock, False)
