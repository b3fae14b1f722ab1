"""`relay top`: shows the group at a terminal until q is pressed."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer

from relay.cli.options import ConfigOption, out
from relay.config.files import load
from relay.config.settings import Settings

_WAIT_SECONDS = 0.1
_REFRESH_SECONDS = 1.0
"""The largest interval between two drawings: the terminal may be resized while a query runs."""
_MEASURE_SECONDS = 6.0
"""Between the two readings of `--once` that give the throughput: relay stores its counts every five seconds."""
_WHOLE = 10_000
"""The columns and lines of a screen on which nothing is cut off."""


def top(
    config: ConfigOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Seconds between two queries.")
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print the state once and end, as without a terminal; takes 6 s.",
        ),
    ] = False,
) -> None:
    """Show the group live: source, slot, throughput, lags, deferred, dead letters; q ends."""
    settings = load(config)
    if once or not out.is_terminal:
        _print(settings)
    else:
        _show(settings, interval)


def _print(settings: Settings) -> None:
    from relay.admin.status import Watch
    from relay.observe.top.frame import Size, lines
    from relay.observe.top.rates import Trends

    watch, trends = Watch(settings), Trends()
    try:
        observation = watch.read()
        if observation.instances and not observation.faults:
            trends.note(observation)
            time.sleep(_MEASURE_SECONDS)
            observation = watch.read()
    finally:
        watch.close()
    trends.note(observation)
    size = (
        Size(out.size.width, _WHOLE, out.options.ascii_only)
        if out.is_terminal
        else Size(_WHOLE, _WHOLE)
    )
    for line in lines(observation, trends, size):
        out.print(line, soft_wrap=True)
    if observation.faults:
        raise typer.Exit(1)


def _show(settings: Settings, interval: float) -> None:
    from rich.live import Live

    from relay.observe.top.live import View

    with _interrupted_by_signals(), _keys() as key:
        try:
            with (
                View(settings, interval) as view,
                Live(view, console=out, screen=True, auto_refresh=False) as live,
            ):
                drawn = 0.0
                while key() != "q":
                    if view.refreshed.is_set() or time.monotonic() - drawn > _REFRESH_SECONDS:
                        view.refreshed.clear()
                        live.refresh()
                        drawn = time.monotonic()
        except KeyboardInterrupt:
            return


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM too, and for SIGINT where a shell without job control has it ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that waits 0.1 s for a key and returns it, or ''; without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    # Python does not have these modules on every system.
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield partial(_key, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    time.sleep(_WAIT_SECONDS)
    return ""


def _key(descriptor: int) -> str:
    ready, _, _ = select.select([descriptor], [], [], _WAIT_SECONDS)
    if not ready:
        return ""
    # The end of input is a closed terminal.
    return os.read(descriptor, 1).decode(errors="replace") or "q"
