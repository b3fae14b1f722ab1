"""Translates rows as the source stores them into what relay reads: UTF-8 text, and times with a zone. No I/O.

A database in UTF-8 whose times are `timestamptz` needs no translation. Other encodings are read as they are stored, and
relay converts value by value: the server would end a stream or a query at the first byte that it cannot convert.

Source: PostgreSQL documentation, "Character Set Support" and "Date/Time Types".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct

from relay.model.events import NOTE
from relay.model.transactions import Rows
from relay.model.tuples import zoned
from relay.source.decode.pgoutput import decode_tuple, encode_tuple

TIMESTAMPTZ = 1184
"""The oid of `timestamptz`."""

_MOST_SHOWN = 20
_COUNT = Struct(">H")
_UNDECODABLE = re.compile("[\udc80-\udcff]")
_TIMES = ("event_ts", "deliver_at")
_JSON = ("payload", "metadata")


@dataclass(frozen=True, slots=True)
class Encoding:
    """A server encoding by its PostgreSQL name, and the Python codec that converts it exactly as PostgreSQL does."""

    name: str
    codec: str

    @classmethod
    def of(cls, server_encoding: str | None) -> Encoding | None:
        """The encoding that relay converts; None where the server converts, as for UTF8."""
        codec = CODECS.get(server_encoding or "")
        return None if codec is None or server_encoding is None else cls(server_encoding, codec)

    def name_of(self, text: str) -> str:
        """The name of a table or column whose bytes were read as UTF-8 with `surrogateescape`."""
        return text.encode("utf-8", "surrogateescape").decode(self.codec, "backslashreplace")


def codec_of(server_encoding: str | None) -> str:
    """The codec that gives the bytes in which the server stores a text, and hashes it.

    Of EUC_JP, EUC_JIS_2004 and EUC_KR it differs in a few characters, and EUC_TW and MULE_INTERNAL have none: a host
    with others than ASCII may there have another partition while relay polls. Nothing is applied twice for that.
    """
    return (_CONVERTED | CODECS).get(server_encoding or "", "utf-8")


class Translation:
    """The translation of one table layout. `columns` are the columns of the translated rows."""

    def __init__(
        self,
        names: Sequence[str],
        mapping: dict[str, str],
        encoding: Encoding | None,
        naive: Collection[str] = (),
    ) -> None:
        self._names = names
        self._encoding = encoding
        self._naive = frozenset(naive)
        self._read = frozenset(mapping.values())
        self._json = frozenset(mapping[field] for field in _JSON)
        self._naive_indices = [index for index, name in enumerate(names) if name in self._naive]
        self.columns = [*names, NOTE] if encoding is not None else list(names)

    @classmethod
    def needed(
        cls,
        columns: Sequence[tuple[str, int]],
        mapping: dict[str, str],
        encoding: Encoding | None,
    ) -> Translation | None:
        """The translation of rows with `columns` (name, oid of the type); None where none is needed."""
        times = {mapping[field] for field in _TIMES}
        naive = [name for name, oid in columns if name in times and oid != TIMESTAMPTZ]
        if encoding is None and not naive:
            return None
        return cls([name for name, _ in columns], mapping, encoding, naive)

    def rows(self, rows: Rows) -> Rows:
        """Translate many rows. Raises ProtocolError for a row that is cut short."""
        translated = None if self._encoding is not None else zoned(rows, self._naive_indices)
        return Rows.of([self.row(row) for row in rows]) if translated is None else translated

    def row(self, data: bytes) -> bytes:
        """Translate one row of TupleData. Raises ProtocolError for a row that is cut short."""
        if self._encoding is not None and not self._naive and data.isascii():
            return _COUNT.pack(len(self.columns)) + data[_COUNT.size :] + b"n"
        cells: list[bytes | None] = []
        notes: list[str] = []
        for name, value in zip(self._names, decode_tuple(data), strict=True):
            if value is not None and name in self._read:
                if name in self._naive:
                    value = _zoned(value)
                if self._encoding is not None and not value.isascii():
                    value = self._decoded(name, value, self._encoding, notes)
            cells.append(value)
        if self._encoding is not None:
            cells.append("; ".join(notes).encode() or None)
        return encode_tuple(cells)

    def _decoded(self, name: str, value: bytes, encoding: Encoding, notes: list[str]) -> bytes:
        text = value.decode(encoding.codec, "surrogateescape")
        undecodable = _UNDECODABLE.findall(text)
        if not undecodable:
            return text.encode()
        notes.append(_note(name, text, encoding, len(undecodable)))
        # JSON stays JSON, so that the dead letter keeps the other values of the payload.
        escape = r"\\x%02x" if name in self._json else r"\x%02x"
        return _UNDECODABLE.sub(lambda byte: escape % _byte(byte[0]), text).encode()


def _note(name: str, text: str, encoding: Encoding, count: int) -> str:
    shown = [
        f"0x{_byte(byte[0]):02x} at byte "
        f"{len(text[: byte.start()].encode(encoding.codec, 'surrogateescape'))}"
        for byte in islice(_UNDECODABLE.finditer(text), _MOST_SHOWN)
    ]
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    form = "UTF-8" if encoding.name == "SQL_ASCII" else encoding.name
    return f"{name} is not {form}: {', '.join(shown)}{more}"


def _byte(surrogate: str) -> int:
    return ord(surrogate) - 0xDC00


def _zoned(value: bytes) -> bytes:
    """A time as PostgreSQL prints it, with the zone UTC added if it has none."""
    if b"+" in value or value.endswith(b"infinity"):
        return value
    era = b" BC" if value.endswith(b" BC") else b""
    return value.removesuffix(era) + b"+00" + era


_CONVERTED = {"EUC_JP": "euc_jp", "EUC_JIS_2004": "euc_jis_2004", "EUC_KR": "euc_kr"}
"""The codecs of encodings from which the server converts."""

CODECS = {
    "SQL_ASCII": "utf-8",
    "EUC_CN": "gb2312",
    "ISO_8859_5": "iso8859-5",
    "ISO_8859_6": "iso8859-6",
    "ISO_8859_7": "iso8859-7",
    "ISO_8859_8": "iso8859-8",
    "KOI8R": "koi8-r",
    "KOI8U": "koi8-u",
    "LATIN1": "iso8859-1",
    "LATIN2": "iso8859-2",
    "LATIN3": "iso8859-3",
    "LATIN4": "iso8859-4",
    "LATIN5": "iso8859-9",
    "LATIN6": "iso8859-10",
    "LATIN7": "iso8859-13",
    "LATIN8": "iso8859-14",
    "LATIN9": "iso8859-15",
    "LATIN10": "iso8859-16",
    "WIN866": "cp866",
    "WIN874": "cp874",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "WIN1253": "cp1253",
    "WIN1254": "cp1254",
    "WIN1255": "cp1255",
    "WIN1256": "cp1256",
    "WIN1257": "cp1257",
    "WIN1258": "cp1258",
}
"""Python's codecs for EUC_JP, EUC_JIS_2004 and EUC_KR differ from PostgreSQL's in some characters, and there are none
for EUC_TW and MULE_INTERNAL: there the server converts. SQL_ASCII has no encoding; its bytes are taken as UTF-8."""
