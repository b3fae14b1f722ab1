"""The keys that order events, as text, and the hash of a host, by which its partition is found. No I/O.

The hash is PostgreSQL's `hashtext` in numpy, so that no server is asked.

Source: PostgreSQL, src/common/hashfn.c (`hash_bytes`, after Bob Jenkins' lookup3), on a little-endian server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

LONGEST = 1_000
"""The most bytes of each part of a key: an index entry of PostgreSQL, with group and sink, has at most 2,704 bytes."""
_BYTES_OF_CHARACTER = 4
_AT = "\x1f"
"""What separates a key from an endpoint, and no part of a key has."""


def host_part(host: str) -> str:
    """The first part of a host's keys, before a space: the host_id, or its digest if that would be no part of a key."""
    return _digest(host) or host


def _digest(text: str) -> str | None:
    """The digest of a text that is too long for a part of a key, or has what separates one from an endpoint."""
    if len(text) * _BYTES_OF_CHARACTER <= LONGEST and _AT not in text:
        return None
    octets = text.encode("utf-8", "surrogateescape")
    return sha256(octets).hexdigest() if len(octets) > LONGEST or _AT in text else None


def of_host(host: str) -> str:
    """The key of all events of a host."""
    return f"{host_part(host)} host"


def of_values(kind: str, host: str, values: Iterable[str]) -> str:
    """The key of a host, a kind of key such as `user`, and some values."""
    within = " ".join((kind, *values))
    if digest := _digest(within):
        within = f"{kind} {digest}"
    return f"{host_part(host)} {within}"


def of_endpoint(keys: Iterable[str], endpoint: str | None) -> frozenset[str]:
    """Ordering keys at one of several endpoints, in which others have no part; the keys themselves without one."""
    return frozenset(keys if endpoint is None else (f"{key}{_AT}{endpoint}" for key in keys))


def at_any(key: str) -> str:
    """A key of `of_endpoint` without the endpoint."""
    return key.partition(_AT)[0]


_BLOCK = 12
"""The bytes that are mixed at once: three words."""
_START = 0x9E3779B9 + 3923095

_Words = NDArray[np.uint32]
_Int32 = NDArray[np.int32]


def hashes(values: Sequence[bytes]) -> _Int32:
    """The hash of each value, as `hashtext(value collate "C")` computes it of text with these bytes; int32, new."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    blocks = lengths // _BLOCK
    found = np.empty(len(values), np.uint32)
    # Values with equally many blocks are mixed together, so that a long one does not pad the others.
    for count in np.unique(blocks).tolist():
        members = np.flatnonzero(blocks == count)
        width = (count + 1) * _BLOCK
        padded = b"".join(values[index].ljust(width, b"\0") for index in members.tolist())
        words = np.frombuffer(padded, "<u4").reshape(len(members), count + 1, 3)
        found[members] = _hashed(words, lengths[members])
    return found.view(np.int32)


def _hashed(words: _Words, lengths: NDArray[np.int64]) -> _Words:
    a = (_START + lengths & 0xFFFFFFFF).astype(np.uint32)
    b, c = a.copy(), a.copy()
    last = words.shape[1] - 1
    for block in range(last):
        a, b, c = _mixed(a + words[:, block, 0], b + words[:, block, 1], c + words[:, block, 2])
    # The lowest byte of the last word is that of the length.
    return _final(a + words[:, last, 0], b + words[:, last, 1], c + (words[:, last, 2] << 8))


def _mixed(a: _Words, b: _Words, c: _Words) -> tuple[_Words, _Words, _Words]:
    for first, second, third in ((4, 6, 8), (16, 19, 4)):
        a, c = (a - c) ^ _rotated(c, first), c + b
        b, a = (b - a) ^ _rotated(a, second), a + c
        c, b = (c - b) ^ _rotated(b, third), b + a
    return a, b, c


def _final(a: _Words, b: _Words, c: _Words) -> _Words:
    c = (c ^ b) - _rotated(b, 14)
    a = (a ^ c) - _rotated(c, 11)
    b = (b ^ a) - _rotated(a, 25)
    c = (c ^ b) - _rotated(b, 16)
    a = (a ^ c) - _rotated(c, 4)
    b = (b ^ a) - _rotated(a, 14)
    return (c ^ b) - _rotated(b, 24)


def _rotated(words: _Words, bits: int) -> _Words:
    rotated: _Words = words << np.uint32(bits) | words >> np.uint32(32 - bits)
    return rotated
