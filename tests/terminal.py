"""Runs a command at a pseudo-terminal, and reads its output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread

from tests.process import ROOT


@dataclass
class Terminal:
    """A `relay` command at a terminal, and its output so far."""

    process: subprocess.Popen[bytes]
    keyboard: int
    drawn: bytearray

    @property
    def text(self) -> str:
        """The output without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.drawn.decode(errors="replace"))

    def shows(self, text: str) -> bool:
        """Whether the output has a text."""
        return text in self.text

    def press(self, keys: bytes) -> None:
        """Type some keys."""
        os.write(self.keyboard, keys)


@contextmanager
def at_terminal(
    *arguments: str, columns: int = 80, rows: int = 24, stdout: int | None = None
) -> Iterator[Terminal]:
    """Run `relay` with these arguments, with another `stdout` where one is given; it is killed at the end."""
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RELAY_", "PG"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "relay", *arguments],
        stdin=screen,
        stdout=screen if stdout is None else stdout,
        stderr=screen,
        start_new_session=True,
        env={**kept, "TERM": "xterm", "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)},
    )
    os.close(screen)
    terminal = Terminal(process, keyboard, bytearray())

    def read() -> None:
        with suppress(OSError):
            while chunk := os.read(keyboard, 65_536):
                terminal.drawn.extend(chunk)

    reader = Thread(target=read)
    reader.start()
    try:
        yield terminal
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)
        os.close(keyboard)
