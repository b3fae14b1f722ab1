"""A sign of life that another thread gives in a handler's session is no end of its transaction."""

from __future__ import annotations

from threading import Lock, Timer
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg.pq import TransactionStatus

from relay.faults import ConfigurationError
from relay.handlers.python import call

ACTIVE, IDLE, IN_TRANSACTION = (
    TransactionStatus.ACTIVE,
    TransactionStatus.IDLE,
    TransactionStatus.INTRANS,
)


class Session:
    """A connection in which a sign of life is in flight, after which its status is `then`."""

    broken = False
    _adapters = None

    def __init__(self, then: TransactionStatus) -> None:
        self.lock = Lock()
        self.lock.acquire()
        self.pgconn = self.info = SimpleNamespace(transaction_status=ACTIVE)
        self._then = then

    def answered(self) -> None:
        """End the sign, as the thread does that gives it."""
        self.info.transaction_status = self._then
        self.lock.release()


def called(then: TransactionStatus, raises: bool) -> None:
    """Call a function that ends while the sign is in flight."""
    session = Session(then)

    def function(transaction: object, cursor: object) -> None:
        Timer(0.05, session.answered).start()
        if raises:
            raise ValueError("refused")

    call("h", function, *cast(Any, (session, None, None)))


def test_a_sign_in_flight_ends_no_transaction() -> None:
    called(IN_TRANSACTION, raises=False)


@pytest.mark.parametrize("raises", [False, True])
def test_a_function_that_ended_it_is_named_after_the_sign(raises: bool) -> None:
    with pytest.raises(ConfigurationError, match="ended the database transaction"):
        called(IDLE, raises)
