"""Types of sinks that packages bring: found by their entry points, and part of the configuration."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.cli.keys import keys
from relay.config import sink_types
from relay.config.effects import Effects
from relay.config.loading import load
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.sinks import build_sinks
from tests.packages import install

MODULE = '''
from typing import Literal

from relay.sinks import Alike, Own, Secret, SinkSettings


class Settings(SinkSettings):
    """A pipe."""

    type: Alike[Literal["pipe"]]
    channel: Alike[str]
    """Where it leads."""
    token: Own[Secret | None] = None
    """Who may use it."""


def sink(name, settings):
    return Pipe(name, settings)


class Pipe:
    def __init__(self, name, settings):
        self.name, self.channel = name, settings.channel

    def resume(self, series):
        pass

    async def deliver(self, transaction):
        pass

    async def close(self):
        pass
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of imports, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    sink_types.module_of.cache_clear()
    yield folder
    sink_types.module_of.cache_clear()
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def pipes(site: Path) -> Path:
    """The package relay-pipe is installed."""
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": MODULE})
    return site


def loaded(tmp_path: Path, handler: str) -> Settings:
    file = tmp_path / "relay.yaml"
    file.write_text(
        f"source: {{dsn: postgresql:///}}\nhandlers:\n  out: {handler}\nroutes: [{{handlers: [out]}}]\n"
    )
    return load(file)


def refusal(tmp_path: Path, handler: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, handler)
    return str(refused.value).replace(f"{tmp_path / 'relay.yaml'}: handlers.out", "…")


def test_a_type_of_a_package_is_configured_and_built(pipes: Path, tmp_path: Path) -> None:
    settings = loaded(tmp_path, "{type: pipe, channel: a, timeout: 3, retry: {wait: 2}}")
    ((sink, handler),) = build_sinks(settings.handlers).values()
    assert sink.name == "out"
    assert getattr(sink, "channel") == "a"  # noqa: B009
    assert (handler.timeout, handler.retry.wait, handler.concurrency) == (3, 2, 16)
    asyncio.run(sink.close())


def test_its_keys_are_refused_as_those_of_other_types(pipes: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path, "{type: pipe}") == "….channel: is required"
    assert refusal(tmp_path, "{type: pipe, chanel: a, channel: a}") == (
        "….chanel: unknown key; did you mean channel?"
    )
    assert refusal(tmp_path, "{type: pipe, channel: a, retry: {wat: 2}}") == (
        "….retry.wat: unknown key; did you mean wait?"
    )
    assert refusal(tmp_path, "{type: pipe, channel: a, timeout: 0}") == (
        "….timeout: input should be greater than 0"
    )


def test_an_unknown_type_is_answered_with_those_that_are_installed(
    pipes: Path, tmp_path: Path
) -> None:
    assert "kafka, " in refusal(tmp_path, "{type: pip, channel: a}")
    assert "pipe" in refusal(tmp_path, "{type: pip, channel: a}")
    assert refusal(tmp_path, "[1]") == "…: must be a mapping of keys"
    assert refusal(tmp_path, "{type: [pipe]}").startswith("….type: must be one of sql, ")


def test_keys_that_are_alike_decide_effects(pipes: Path, tmp_path: Path) -> None:
    first, other, same = (
        Effects.of(loaded(tmp_path, handler))
        for handler in (
            "{type: pipe, channel: a}",
            "{type: pipe, channel: b}",
            "{type: pipe, channel: a, timeout: 3, token: hunter2}",
        )
    )
    assert other.difference(first.values) == "handlers.out.channel (a, here b)"
    assert first == same
    assert first.reordered(Effects.of(loaded(tmp_path, "{type: http, url: http://a}")).values) == []


def test_a_variable_may_be_its_secret(
    pipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPE_TOKEN", "hunter2")
    settings = loaded(tmp_path, "{type: pipe, channel: a, token: {env: PIPE_TOKEN}}")
    assert "hunter2" not in repr(settings)
    found: Any = settings.handlers["out"]
    assert found.token.get_secret_value() == "hunter2"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere", "pipe needs nowhere, which relay-pipe does not bring: install it"),
        ("1 / 0", "relay-pipe: relay_pipe cannot be imported: ZeroDivisionError: division by zero"),
        (
            "Settings = None",
            "relay-pipe: relay_pipe is no module with a class Settings and a function sink(name, settings)",
        ),
        (
            "def sink(name, settings): ...\nclass Settings: ...",
            "relay_pipe.Settings is no child of relay.sinks.SinkSettings",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    site: Path, tmp_path: Path, source: str, said: str
) -> None:
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source})
    assert refusal(tmp_path, "{type: pipe}") == f"….type: {said}"


def test_what_a_sink_imports_may_be_an_extra_of_its_package(site: Path, tmp_path: Path) -> None:
    source = MODULE.replace("return Pipe", "import nowhere\n    return Pipe")
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": source}, extras=("pipe",))
    settings = loaded(tmp_path, "{type: pipe, channel: a}")
    with pytest.raises(ConfigurationError) as refused:
        build_sinks(settings.handlers)
    assert str(refused.value) == ("handlers.out.type: pipe needs nowhere: install relay-pipe[pipe]")


def test_a_type_that_two_packages_bring_is_refused(pipes: Path, tmp_path: Path) -> None:
    install(pipes, "other-pipe", {"pipe": "other_pipe"}, {"other_pipe": MODULE})
    assert refusal(tmp_path, "{type: pipe, channel: a}") == (
        "….type: other-pipe and relay-pipe both bring the type pipe: remove one of them"
    )


def test_the_names_of_relays_own_types_are_taken(site: Path, tmp_path: Path) -> None:
    install(site, "relay-pipe", {"http": "relay_pipe"}, {"relay_pipe": "1 / 0"})
    assert loaded(tmp_path, "{type: http, url: http://a}").handlers["out"].type == "http"


def test_a_package_is_imported_only_where_a_handler_has_its_type(
    site: Path, tmp_path: Path
) -> None:
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": MODULE})
    loaded(tmp_path, "{type: http, url: http://a}")
    assert "relay_pipe" not in sys.modules


def test_the_keys_of_a_type_are_shown(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unusual = MODULE.replace("channel: Alike[str]", "channel: Alike[Callable[[], None]]")
    unusual = unusual.replace("import Literal", "import Callable, Literal").replace("pipe", "odd")
    install(site, "relay-pipe", {"pipe": "relay_pipe"}, {"relay_pipe": MODULE})
    install(site, "relay-odd", {"odd": "relay_odd"}, {"relay_odd": unusual})
    install(site, "relay-broken", {"broken": "nowhere"})
    keys()
    listed = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert listed["pipe"] == "relay-pipe\tA pipe."
    assert listed["broken"].startswith("relay-broken\tcannot be used: broken needs nowhere")
    assert listed["http"] == "relay-outbox\tAn endpoint to which relay posts CloudEvents."
    keys("pipe")
    described = capsys.readouterr().out.splitlines()
    assert described[0] == "key\ttype\tdefault\tmeaning"
    assert described[-2:] == [
        "channel\ttext\trequired\tWhere it leads.",
        "token\tnull or secret\tnull\tWho may use it.",
    ]
    assert "retry.attempts\tnull or integer, > 0\tnull\tThe attempts after which" in "\n".join(
        described
    )
    keys("odd", as_json=True)
    *_, channel, _ = json.loads(capsys.readouterr().out)
    assert channel == {
        "name": "channel",
        "type": "any",
        "default": "required",
        "meaning": "Where it leads.",
    }
    with pytest.raises(ConfigurationError, match=r"^type pipes: must be one of .*, pipe"):
        keys("pipes")
