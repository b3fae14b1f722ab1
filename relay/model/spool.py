"""The spool: a temporary file for the rows of a commit that is too large for memory."""

from __future__ import annotations

import errno
import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct

from relay.faults import ConfigurationError, NotNow

_LENGTH = Struct(">I")
_READ = 1 << 20
_WRITE = 1 << 20


def require_writable(directory: Path | None) -> None:
    """Raise ConfigurationError unless files can be written in the folder; None is the system's for temporary files."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigurationError(
            f"batch.spool_directory: {_folder(directory)}: {error.strerror}: relay writes commits there that are too "
            "large for memory: name a folder that it can write to"
        ) from None


def _folder(directory: Path | None) -> str:
    try:
        return str(directory or tempfile.gettempdir())
    except FileNotFoundError:
        return "no folder for temporary files"


class Spool:
    """An unnamed temporary file of rows; the operating system removes it when no reader references it.

    Writing raises TransientFault while the disk is full or the folder is away.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        with self._writing():
            self._file = tempfile.TemporaryFile(dir=directory, buffering=_WRITE)  # noqa: SIM115
        self._end = 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotNow(
                f"batch.spool_directory: {_folder(self._directory)}: {error.strerror}: relay waits until it can write "
                "a large commit there"
            ) from None

    def append(self, row: bytes, to: SpooledTuples) -> None:
        """Append a row to the file, and its location to the rows of its business transaction, `to`."""
        with self._writing():
            self._file.write(_LENGTH.pack(len(row)))
            self._file.write(row)
        start = self._end
        self._end += _LENGTH.size + len(row)
        to.extend(start, self._end)

    def seal(self) -> None:
        """Flush the file, so that all rows can be read."""
        with self._writing():
            self._file.flush()

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the rows between two byte offsets of the file. Several readers may run at once.

        Raises OSError if the file is shorter.
        """
        while start < end:
            buffer = os.pread(self._file.fileno(), min(_READ, end - start), start)
            at = 0
            while len(buffer) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, at)
                after = at + _LENGTH.size + length
                if after > len(buffer):
                    break
                yield buffer[at + _LENGTH.size : after]
                at = after
            if not at:
                # A row that is longer than the buffer is read alone, so that it is copied only once.
                (length,) = _LENGTH.unpack(self._exactly(start, _LENGTH.size))
                yield self._exactly(start + _LENGTH.size, length)
                at = _LENGTH.size + length
            start += at

    def _exactly(self, start: int, size: int) -> bytes:
        """Read `size` bytes from a byte offset. Raises OSError if the file ends before."""
        data = os.pread(self._file.fileno(), size, start)
        if len(data) < size:
            raise OSError(errno.EIO, "the spool file of a large transaction was truncated")
        return data


class SpooledTuples:
    """The rows of one business transaction in a spool, as a list of runs: one, if no other transaction interleaves."""

    __slots__ = ("_count", "_ends", "_spool", "_starts")

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._starts = array("Q")
        self._ends = array("Q")
        self._count = 0

    def extend(self, start: int, end: int) -> None:
        """Add the row between two byte offsets of the file."""
        self._count += 1
        if self._ends and self._ends[-1] == start:
            self._ends[-1] = end
            return
        self._starts.append(start)
        self._ends.append(end)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from self._spool.read(start, end)
