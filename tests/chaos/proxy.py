"""A TCP proxy between relay and PostgreSQL that cuts and stalls connections."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from psycopg.conninfo import conninfo_to_dict, make_conninfo

Wish = Callable[[bytes], bool]


class Proxy:
    """Passes bytes on in both directions until it is told otherwise."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        parts = conninfo_to_dict(dsn)
        self._upstream = (str(parts["host"]), int(str(parts["port"])))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._stalled = Event()
        self._closing = Event()
        self.cuts = 0
        self.cut_after: Wish | None = None
        self.gather_after: Wish | None = None
        Thread(target=self._accept, daemon=True).start()

    @property
    def dsn(self) -> str:
        """The connection string that goes through the proxy."""
        return make_conninfo(
            self._dsn, host="127.0.0.1", port=str(self._listener.getsockname()[1]), hostaddr=""
        )

    def cut(self) -> None:
        """End every connection at once."""
        for pair in self._pairs:
            _close(*pair)
        self._pairs.clear()

    def stall(self) -> None:
        """Keep connections open and pass nothing on: half-open peers. New connections are not answered."""
        self._stalled.set()

    def resume(self) -> None:
        """Pass on again; what stalled is gone."""
        self._stalled.clear()
        self.cut()

    def close(self) -> None:
        """End it all."""
        self._closing.set()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
            except OSError:
                continue
            self._pairs.append((client, server))
            Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            selector.register(server, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(0.5):
                    sender = key.fileobj
                    assert isinstance(sender, socket.socket)
                    if self._stalled.is_set():
                        self._closing.wait(0.05)
                        continue
                    data = sender.recv(65536)
                    if not data:
                        return _close(client, server)
                    other[sender].sendall(data)
                    if sender is client and self.gather_after and self.gather_after(data):
                        client.sendall(_gathered(server))
                    if sender is client and self.cut_after and self.cut_after(data):
                        # The server receives the message, but its answer is lost.
                        server.recv(65536)
                        self.cuts += 1
                        return _close(client, server)
        _close(client, server)
        return None


def _gathered(server: socket.socket) -> bytes:
    """All that the server says until it falls silent."""
    data = b""
    server.settimeout(0.5)
    with suppress(TimeoutError):
        while more := server.recv(65536):
            data += more
    server.settimeout(None)
    return data


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@contextmanager
def through_proxy(dsn: str) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    proxy = Proxy(dsn)
    try:
        yield proxy
    finally:
        proxy.close()
