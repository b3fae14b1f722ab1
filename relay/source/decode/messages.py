"""Holds the messages of pgoutput that were read together in one buffer, with arrays of their boundaries. No I/O.

Source: PostgreSQL documentation, "Logical Replication Message Formats".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from relay.model.transactions import Buffer, Int64Array, Rows, at_each_octet
from relay.model.tuples import ProtocolError

BEGIN = np.dtype([("kind", "u1"), ("lsn", ">u8"), ("ts", ">i8"), ("xid", ">u4")])
COMMIT = np.dtype(
    [("kind", "u1"), ("flags", "u1"), ("lsn", ">u8"), ("end_lsn", ">u8"), ("ts", ">i8")]
)
INSERT = np.dtype([("kind", "u1"), ("oid", ">u4"), ("new", "u1")])
"""The fixed part of messages; an Insert's row follows it."""

_SHORTEST = np.ones(256, np.int64)
_SHORTEST[list(b"BCI")] = BEGIN.itemsize, COMMIT.itemsize, INSERT.itemsize


class MessageBuffer:
    """Messages in the order of the stream. `kinds` has the first octet of each.

    Raises ProtocolError for a message that is cut short.
    """

    __slots__ = ("_messages", "kinds")

    def __init__(self, messages: Rows) -> None:
        self._messages = messages
        kinds = np.frombuffer(messages.data, np.uint8)[messages.starts]
        if (messages.sizes < _SHORTEST[kinds]).any():
            raise ProtocolError("malformed pgoutput message")
        self.kinds: bytes = kinds.tobytes()

    @classmethod
    def of(cls, messages: Sequence[Buffer], header: int = 0) -> Self:
        """Copy messages into one buffer, without the `header` bytes before each."""
        return cls(Rows.of(messages).without_header(header))

    def __getitem__(self, index: int) -> bytes:
        messages = self._messages
        return messages.data[messages.starts[index] : messages.ends[index]]

    def part(self, first: int, last: int) -> MessageBuffer:
        """The messages from index `first` up to, and without, `last`, as a view."""
        return MessageBuffer(self._messages.part(first, last))

    def indices(self, kind: int) -> Int64Array:
        """The indices of the messages of a kind, int64, ascending."""
        indices: Int64Array = (np.frombuffer(self.kinds, np.uint8) == kind).nonzero()[0]
        return indices

    def read(self, indices: Int64Array, form: np.dtype[np.void]) -> NDArray[np.void]:
        """The fixed parts of the messages at some indices, as a structured array of dtype `form`."""
        return at_each_octet(self._messages.data, form)[self._messages.starts[indices]]

    def rows(self, indices: Int64Array) -> Rows:
        """The rows of the Inserts at some indices, as a view; copied if they are a small part of the buffer."""
        return self._messages.take(indices).without_header(INSERT.itemsize).compact()
