"""Secrets that are read when they are used: files, functions, and what executors get."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from relay.config import secrets
from relay.config.dsn import DatabaseAccess
from relay.config.handlers import HttpHandler
from relay.config.secrets import CallSecret, FileSecret, resolve_secret
from relay.config.settings import ConsoleSettings, Settings
from relay.console.security import Guard
from relay.faults import SecretUnavailable
from relay.spark.executor import PackedSettings

SECRET = "hunter2"


def made_by(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> CallSecret:
    """A secret that a function makes."""
    monkeypatch.setitem(secrets._calls, "shop:token", secrets._Calls("shop:token", function))
    return CallSecret("shop:token")


def test_a_file_is_read_each_time_and_an_empty_one_is_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    secret = resolve_secret({"file": str(file)})
    assert secret.get_secret_value() == "first"
    before = secret.mark()
    fresh = tmp_path / "fresh"
    fresh.write_text("second")
    fresh.replace(file)
    assert secret.get_secret_value() == "second"
    assert secret.mark() != before
    file.write_text("")
    with pytest.raises(SecretUnavailable, match="is empty"):
        secret.get_secret_value()
    assert SECRET not in repr(secret)


def test_a_function_is_called_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "RENEW_SECONDS", 0.0)
    numbers = iter(range(10))
    secret = made_by(monkeypatch, lambda: f"token {next(numbers)}")
    assert [secret.get_secret_value() for _ in range(2)] == ["token 0", "token 1"]
    # One of many requests takes the last one, until it is refused.
    assert [secret.recent(), secret.recent()] == ["token 1", "token 1"]
    secret.refused("token 0")
    assert secret.recent() == "token 1"
    secret.refused("token 1")
    assert secret.recent() == "token 2"


def test_refusals_do_not_call_a_function_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lixpi/lixpi#289: tokens that were refused made a storm of requests for tokens, all of which were refused then."""
    numbers = iter(range(10))
    secret = made_by(monkeypatch, lambda: f"token {next(numbers)}")
    for _ in range(5):
        assert secret.recent() == "token 0"
        secret.refused("token 0")


def test_a_client_that_renews_a_token_gets_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It got the same until its last moment: openclaw/openclaw#113395, joaquinbejar/ig-client#56. One that cannot be
    renewed serves on: thingsboard/thingsboard#15670."""
    now, texts = [1000.0], iter(["first", "second"])
    monkeypatch.setattr(secrets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    secret = made_by(monkeypatch, lambda: (next(texts), 100.0))
    assert secret.lease() == ("first", 100.0)
    now[0] += 40
    assert secret.lease() == ("first", 60.0)
    now[0] += 40
    assert secret.lease() == ("second", 100.0)
    now[0] += 80
    assert secret.lease() == ("second", 20.0)
    now[0] += 20
    with pytest.raises(SecretUnavailable):
        secret.lease()


def test_a_function_may_say_how_long_its_text_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers = [1000.0], iter(range(10))
    monkeypatch.setattr(secrets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    secret = made_by(monkeypatch, lambda: (f"token {next(numbers)}", 0.25))
    assert {secret.get_secret_value() for _ in range(5)} == {"token 0"}
    assert secret.lease() == ("token 0", 0.25)
    assert secret.recent() == "token 0"
    now[0] += 0.25
    assert [secret.recent(), secret.get_secret_value()] == ["token 1", "token 1"]


def test_connections_that_are_opened_at_once_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = threading.Event(), []

    def function() -> str:
        calls.append(1)
        release.wait(5)
        return SECRET

    secret = made_by(monkeypatch, function)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(secret.get_secret_value())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    release.set()
    for thread in threads:
        thread.join()
    assert found == [SECRET] * 8
    assert len(calls) == 1


def test_a_function_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(secrets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(secrets, "CALL_SECONDS", 0.05)
    release, calls = threading.Event(), []

    def function() -> str:
        calls.append(1)
        if len(calls) == 1:
            release.wait()
        return SECRET

    secret = made_by(monkeypatch, function)
    for _ in range(2):
        with pytest.raises(
            SecretUnavailable, match=r"{call: shop:token} has not returned for 0.05 s"
        ):
            secret.get_secret_value()
    assert len(calls) == 1
    now[0] += secrets._HUNG_SECONDS + 1
    monkeypatch.setattr(secrets, "CALL_SECONDS", 60.0)
    assert secret.get_secret_value() == SECRET
    release.set()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned NoneType: return a text"),
        (b"x", "returned bytes: return a text"),
        ("", "returned an empty text"),
        (("a", "b"), "returned tuple: return a text"),
    ],
)
def test_what_is_no_secret_is_one_line(
    monkeypatch: pytest.MonkeyPatch, result: object, said: str
) -> None:
    with pytest.raises(SecretUnavailable, match=said):
        made_by(monkeypatch, lambda: result).get_secret_value()


def test_a_fault_of_a_function_is_one_line_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def function() -> str:
        calls.append(1)
        if len(calls) > 1:
            raise PermissionError(f"Vault refuses {SECRET}\nwith a traceback")
        return SECRET

    secret = made_by(monkeypatch, function)
    assert secret.get_secret_value() == SECRET
    with pytest.raises(SecretUnavailable) as raised:
        secret.get_secret_value()
    assert str(raised.value) == "{call: shop:token} failed: PermissionError: Vault refuses …"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"call": "no module"}, "must be module:function"),
        ({"call": "nowhere:function"}, "importing 'nowhere' failed"),
        ({"call": "tests.callables:absent"}, "has no 'absent'"),
        ({"call": "tests.callables:PASSWORDS"}, "is not callable"),
        ({"vault": "x"}, "must be a text, {env: NAME}, {file: PATH} or {call: module:function}"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(value: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve_secret(value)


def test_executors_get_the_newest_text(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first")
    settings = Settings(source={"dsn": "host=h user=u", "password": {"file": str(file)}})
    assert settings.target_dsn == settings.source_dsn
    assert isinstance(settings.source.password, FileSecret)
    first = PackedSettings.of(settings)
    file.write_text("second")
    second = PackedSettings.of(settings)
    assert first.identity == second.identity
    other = Settings(source={"dsn": "host=h user=w", "password": {"file": str(file)}})
    assert PackedSettings.of(other).identity != first.identity
    there: Settings = pickle.loads(first.pickled)
    assert there.source_dsn.conninfo() == "user=u host=h password=first"
    pickle.loads(second.pickled)
    assert there.source_dsn.conninfo() == "user=u host=h password=second"
    assert "second" not in repr(there.source_dsn)


def test_a_password_completes_a_connection_string() -> None:
    """A token of RDS has characters that a URI would need escaped."""
    settings = Settings(
        source={"dsn": "postgresql://u@h:5432/d", "password": "h:5432/?Action=connect&X=a%2F'b \\"}
    )
    access = settings.source_dsn
    assert "X=a%2F" in access.conninfo()
    assert access.parameters() == {"user": "u", "host": "h", "port": "5432", "dbname": "d"}
    assert settings.one_database
    assert "Action" not in repr(settings)


def test_a_connection_string_that_is_none_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    file.write_text("host=h")
    access = DatabaseAccess("source.dsn", resolve_secret({"file": str(file)}))
    file.write_text(f"postgresql://u:{SECRET}@@h")
    with pytest.raises(SecretUnavailable) as raised:
        access.conninfo()
    assert SECRET not in str(raised.value)


def test_several_secrets_sign() -> None:
    def secrets_of(value: object) -> list[str]:
        handler = HttpHandler.model_validate({"type": "http", "url": "http://h", **value})  # type: ignore[dict-item]
        return [each.get_secret_value() for each in handler.signing_secret]

    assert secrets_of({}) == []
    assert secrets_of({"signing_secret": None}) == []
    assert secrets_of({"signing_secret": "whsec_YQ=="}) == ["whsec_YQ=="]
    assert secrets_of({"signing_secret": ["whsec_YQ==", "whsec_Yg=="]}) == [
        "whsec_YQ==",
        "whsec_Yg==",
    ]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xef\xbb\xbftoken\r\n")
    assert resolve_secret({"file": str(file)}).get_secret_value() == "token"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As the shell's `<(vault read …)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("token",))
    writer.start()
    assert resolve_secret({"file": str(pipe)}) == "token"
    writer.join()


def test_a_password_of_the_target_needs_its_connection_string() -> None:
    with pytest.raises(ValueError, match="password: needs a dsn"):
        Settings(target={"password": "x"})


def test_the_console_knows_the_newest_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("the first token 16")
    guard = Guard(
        ConsoleSettings.model_validate({"listen": "127.0.0.1:1", "token": {"file": str(file)}})
    )

    def caller(token: str) -> object:
        return guard.caller(
            Request({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})
        )

    assert caller("the first token 16")
    cookie = guard.signer.sign("session", {"name": "n"})
    assert guard.signer.read("session", cookie)
    file.write_text("another token of 24")
    assert caller("another token of 24")
    assert not caller("the first token 16")
    assert not guard.signer.read("session", cookie)
    # Neither an empty file nor a short text opens the door, or closes it.
    for text in ("", "short"):
        file.write_text(text)
        assert caller("another token of 24")
        assert not caller(text)
