"""Runs the groups of one process, each a Service in a thread of its own: start, signals and the end of all of them.

Sources: Python documentation, "signal — Set handlers for asynchronous events", and "queue", whose SimpleQueue.put() is
reentrant.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Timer, main_thread
from threading import enumerate as all_threads
from types import FrameType

import psycopg

from relay.admin.check import require_when_reachable, same_target
from relay.config.files import Configuration, require_apart
from relay.config.settings import Settings
from relay.faults import RelayError, Unreachable, first_line
from relay.logs import of_group
from relay.runtime.memory import collect_rarely, return_large_blocks
from relay.runtime.threads import Thread, switch_often
from relay.service import Service
from relay.spark.session import Session
from relay.store.connections import asking, cancel_running, database_identity

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNAL_SECONDS = 1.0
"""Longest wait until the main thread runs the handlers of signals that other threads received."""
_LEAST_END_SECONDS = 1.0
"""How long threads may take to end, at least."""
_EXIT_NOTE_SECONDS = 2.0
"""Longest wait, before the process ends itself, for the record that this is no crash."""
_CANCEL_SECONDS = 1.0
"""Longest wait until the servers have cancelled what the process ran."""


class GroupsFailed(RelayError):
    """Groups of a process with several have failed; each line names the group and its file."""

    def __init__(self, lines: Iterable[str], exit_status: int) -> None:
        super().__init__("\n".join(lines))
        self.exit_status = exit_status


class Services:
    """The groups that this process relays.

    A group whose databases cannot be reached yet retries, while the others relay. When a group fails, the others end
    after their batches in flight and the process ends, so that its supervisor notices.
    """

    def __init__(
        self, configurations: Sequence[Configuration], accept_configuration: bool = False
    ) -> None:
        """Raises ConfigurationError if one process cannot run these configurations."""
        require_apart(configurations)
        self._all_settings = [each.settings for each in configurations]
        # None: a group begins to end.
        self._messages: SimpleQueue[_GroupThread | signal.Signals | None] = SimpleQueue()
        self._stopping = Event()
        self._session = _shared_session(self._all_settings)
        shared = _SharedState(self._stopping, self._session, accept_configuration)
        self._groups = [_GroupThread(each, shared, self._messages) for each in configurations]
        self._failed: list[_GroupThread] = []
        self._timeout = max(each.settings.shutdown_timeout for each in configurations)
        self._ends = 0.0
        self._last_resort = Timer(self._timeout, self._give_up)
        self._last_resort.daemon = True

    @property
    def running(self) -> list[tuple[str, Service]]:
        """The groups that relay, with their services, without those that still wait for their databases."""
        return [(each.name, each.service) for each in self._groups if each.service is not None]

    def run_in_foreground(self) -> None:
        """Relay until SIGTERM or SIGINT; for the main thread only. Raises RelayError if a group cannot go on."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        collect_rarely()
        switch_often()
        return_large_blocks()
        is_one = len(self._groups) == 1
        with _listening(self._all_settings):
            for group in self._groups:
                group.start(named=not is_one)
            self._watch()
        # Python gives them back their default actions when it ends, which would replace the exit status.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._last_resort.cancel()
        if self._session is not None:
            self._session.close()
        self._bound_end()
        self._raise_faults()

    def _bound_end(self) -> None:
        """End the process once shutdown_timeout is over, although threads that users' code has left would keep it."""
        left = max(_LEAST_END_SECONDS, self._ends - time.monotonic())
        last_resort = Timer(left, self._end_without_threads)
        last_resort.daemon = True
        last_resort.start()

    def _end_without_threads(self) -> None:
        threads = sorted(each.name for each in all_threads() if each is not main_thread())
        log.warning("the process ends while threads go on", extra={"threads": threads})
        cancel_running(_CANCEL_SECONDS)
        logging.shutdown()
        os._exit(self._failed[0].exit_status if self._failed else 0)

    def _watch(self) -> None:
        """Wait until all groups have ended; stop the others when one begins to end or a signal arrives."""
        left = set(self._groups)
        while left:
            message = self._next_message()
            if isinstance(message, _GroupThread):
                left.discard(message)
                self._note_end(message)
            elif message is not None and self.running:
                log.info("stopping after the batch in flight", extra={"signal": message.name})
            left -= self._stop(left)

    def _next_message(self) -> _GroupThread | signal.Signals | None:
        # The kernel may deliver a signal to a thread that is just starting. Python runs the handler in the main thread,
        # which such a signal does not wake.
        while True:
            with suppress(Empty):
                return self._messages.get(timeout=_SIGNAL_SECONDS)

    def _note_end(self, group: _GroupThread) -> None:
        if group.error is None:
            return
        self._failed.append(group)
        if len(self._groups) > 1:
            log.error(
                "a group has failed; all groups of this process stop",
                extra={"group": group.name, "fault": "; ".join(group.fault_lines())},
            )

    def _stop(self, left: set[_GroupThread]) -> set[_GroupThread]:
        """Stop groups after the batch in flight; return those that have not begun, which end at once."""
        self._stopping.set()
        if not self._last_resort.is_alive():
            self._ends = time.monotonic() + self._timeout
            self._last_resort.start()
        unbegun = set()
        for group in left:
            if group.service is None:
                unbegun.add(group)
            else:
                group.service.stop()
        return unbegun

    def _raise_faults(self) -> None:
        errors = [each.error for each in self._failed if each.error is not None]
        if not errors:
            return
        for error in errors:
            if len(self._groups) == 1 or not isinstance(error, RelayError | psycopg.Error):
                raise error
        status = errors[0].exit_status if isinstance(errors[0], RelayError) else 1
        raise GroupsFailed((line for each in self._failed for line in each.fault_lines()), status)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # A signal may interrupt the main thread anywhere, even inside a log call, so it only enqueues here.
        self._messages.put(signal.Signals(number))

    def _give_up(self) -> None:
        """End the process although a group does not: with the error that ends it, if there is one."""
        hanging = [each for each in self._groups if each.service is not None and not each.has_ended]
        several = len(self._groups) > 1
        for group in hanging:
            doing: dict[str, object] = {}
            if group.service is not None:
                doing = {"waits_for": group.service.doing, **_locks_of(group.service)}
            log.error(
                "the end took longer than shutdown_timeout; what was in flight will be delivered again",
                extra={**doing, **({"group": group.name} if several else {})},
            )
        # A target that does not answer must not keep the process.
        exiting = [Thread(service.note_orderly_exit) for _, service in self.running]
        for thread in exiting:
            thread.start()
        for thread in exiting:
            thread.join(_EXIT_NOTE_SECONDS)
        failed = [each for each in self._groups if each.fault is not None]
        for each in failed:
            for line in each.fault_lines() if several else str(each.fault).splitlines():
                log.error("ended by an error", extra={"fault": line})
        logging.shutdown()
        # Last: what is cancelled is tried again at once.
        cancel_running(_CANCEL_SECONDS)
        # Safe: the target rolls back unfinished work, and relay has acknowledged none of it.
        os._exit(failed[0].exit_status if failed else 1)


def _locks_of(service: Service) -> dict[str, object]:
    """The locks that a service waits for, for its log; nothing without any, or if the target does not answer."""
    found: list[str] = []

    def read() -> None:
        with suppress(psycopg.Error, RelayError):
            found.extend(service.lock_waits())

    thread = Thread(read)
    thread.start()
    thread.join(_EXIT_NOTE_SECONDS)
    return {"locks": list(found)} if found else {}


class _SharedState:
    """State that the groups of a process share."""

    def __init__(
        self, stopping: Event, session: Session | None, accept_configuration: bool
    ) -> None:
        self.stopping = stopping
        self.session = session
        self.accept_configuration = accept_configuration
        self._targets: dict[tuple[str, str], Configuration] = {}
        self._lock = Lock()

    def claim(self, configuration: Configuration) -> None:
        """Raise ConfigurationError if another group of this process has the same name and target.

        Different addresses may lead to one database, so it compares the identities of the databases.
        """
        settings = configuration.settings
        try:
            with asking(settings.target_dsn) as conn:
                key = (database_identity(conn), settings.group)
        except psycopg.Error:
            # The service itself waits for its databases.
            return
        with self._lock:
            other = self._targets.setdefault(key, configuration)
        if other is not configuration:
            raise same_target(other, configuration)


class _GroupThread:
    """A group and the thread that relays it; `service` is None until its databases can be reached."""

    def __init__(
        self,
        configuration: Configuration,
        shared: _SharedState,
        messages: SimpleQueue[_GroupThread | signal.Signals | None],
    ) -> None:
        self.name = configuration.settings.group
        self.service: Service | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._configuration = configuration
        self._shared = shared
        self._messages = messages

    def start(self, named: bool) -> None:
        """Relay in a thread, which reports its end. With `named` its log lines have the group's name."""
        Thread(self._run, name=f"relay {self.name}", args=(named,)).start()

    @property
    def fault(self) -> BaseException | None:
        """Why the group has ended, or is about to end."""
        if self.error is None and self.service is not None:
            return self.service.error
        return self.error

    @property
    def exit_status(self) -> int:
        """The exit status of a process that its fault ends."""
        return self.fault.exit_status if isinstance(self.fault, RelayError) else 1

    def fault_lines(self) -> list[str]:
        """Return the fault that ends the group, for a person; each line names the group."""
        error = self.fault
        text = (
            f"the database refuses: {first_line(error)}"
            if isinstance(error, psycopg.Error)
            else str(error)
        )
        return [f"group {self.name} ({self._configuration.name}): {t}" for t in text.splitlines()]

    def _run(self, named: bool) -> None:
        if named:
            of_group(self.name)
        try:
            self._relay(named)
        except BaseException as error:
            self.error = error
        finally:
            self.has_ended = True
            self._messages.put(self)

    def _relay(self, named: bool) -> None:
        settings, shared = self._configuration.settings, self._shared
        try:
            require_when_reachable(settings, shared.stopping, shared.accept_configuration)
        except Unreachable:
            if shared.stopping.is_set():
                return
            raise
        if named:
            shared.claim(self._configuration)
        service = Service(
            settings,
            shared.session,
            shared.accept_configuration,
            partial(self._messages.put, None),
        )
        # Either `_stop` finds the service, or `stopping` is set before this is read.
        self.service = service
        if not shared.stopping.is_set():
            service.run()


@contextmanager
def _listening(all_settings: Sequence[Settings]) -> Iterator[None]:
    """Serve each `observe.listen`, also while groups cannot reach their databases.

    Raises ConfigurationError if relay cannot listen at an address.
    """
    addresses = {each.observe.listen for each in all_settings if each.observe.listen}
    with ExitStack() as listening:
        for address in sorted(each for each in addresses if each.port):
            # It imports prometheus_client.
            from relay.observe.server import listen

            listening.callback(listen(address).close)
        yield


def _shared_session(all_settings: Sequence[Settings]) -> Session | None:
    """Return the Spark session of several groups, since a process has one JVM; None if one group has its own."""
    with_spark = [each for each in all_settings if each.needs_spark]
    if len(all_settings) == 1 or not with_spark:
        return None
    return Session(with_spark[0].spark)
