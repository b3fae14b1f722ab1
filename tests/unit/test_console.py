"""Parts of the console that need no database: charts, series, signatures, attempts."""

from __future__ import annotations

from importlib.resources import files

import pytest
from jinja2 import Environment, PackageLoader

from relay.console import measured
from relay.console.charts import amount, chart, duration
from relay.console.measured import Point, Series
from relay.console.security import Failures, Signer, TooManyFailures, printable
from relay.observe.history import Sample


def samples(count: int, rate: float) -> list[Sample]:
    """Samples of ten seconds each, at a steady rate."""
    return [
        Sample(1_000.0 + n * 10, {"events_total": n * 10 * rate, "lag_seconds": float(n % 7)})
        for n in range(count)
    ]


def test_rates_are_differences() -> None:
    """A count that begins again, as after a restart, or is not known, leaves a gap."""
    throughput = measured.of_group(samples(20, 40.0))[0]
    assert {point.value for point in throughput.points} == {40.0}
    again = [
        Sample(0.0, {"events_total": 500.0}),
        Sample(10.0, {"events_total": 20.0}),
        Sample(20.0, {}),
        Sample(30.0, {"events_total": 90.0}),
        Sample(40.0, {"events_total": 190.0}),
    ]
    assert [each.value for each in measured.of_group(again)[0].points] == [None, None, None, 10.0]


def test_many_samples_are_few_points() -> None:
    """Of six hours a chart has at most 180 points, each the greatest lag of its interval."""
    throughput, lag, *_ = measured.of_group(samples(2160, 5.0))
    assert 100 < len(lag.points) <= 180
    assert {point.value for point in lag.points} == {6.0}
    assert all(point.value == 5.0 for point in throughput.points)


def test_a_chart_has_words_and_a_table() -> None:
    """What is drawn can be read: a title, a description, and rows; a gap parts the line."""
    points = [Point(60.0 * n, None if n == 5 else float(n)) for n in range(10)]
    drawn = chart(Series("lag", "Lag", "seconds", points))
    assert drawn is not None
    assert drawn.description == "Lag from 00:00 to 00:09 UTC: last 9.0 s, least 0.0 s, most 9.0 s"
    assert len(drawn.lines) == 2
    assert drawn.rows[-1] == ("00:09", "9.0 s")
    assert chart(Series("lag", "Lag", "seconds", [Point(0.0, None)])) is None
    flat = chart(Series("lag", "Lag", "events", [Point(1.0, 0.0)]))
    assert flat is not None
    assert flat.upward[-1].text == "1"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "bytes", "0 B"),
        (1536.0, "bytes", "1.5 kB"),
        (3 * 1024.0**3, "bytes", "3 GB"),
        (12_345.0, "events/s", "12.3 k/s"),
        (7.0, "events/s", "7 events/s"),
        (None, "bytes", "-"),
        (90.0, "seconds", "90 s"),
    ],
)
def test_amounts_are_short(value: float | None, unit: str, text: str) -> None:
    """In the unit that a person would use."""
    assert amount(value, unit) == text


def test_durations_are_short() -> None:
    """Seconds, minutes, hours or days."""
    assert [duration(each) for each in (0.42, 12, 300, 7200, 200_000)] == [
        *("0.4 s", "12 s", "5 min", "2 h", "2 d"),
    ]


def test_a_signature_is_for_one_purpose() -> None:
    """What was signed for something else, by another token, or changed, is nothing."""
    signer = Signer(b"one")
    signed = signer.sign("session", {"name": "anna"})
    assert signer.read("session", signed) == {"name": "anna"}
    assert signer.read("said", signed) is None
    assert Signer(b"two").read("session", signed) is None
    for changed in ("", ".", signed[:-1], "x" + signed, signed + ".x", "é.é"):
        assert signer.read("session", changed) is None


def test_wrong_tokens_are_counted_by_address() -> None:
    """Ten a minute; another address is not concerned, and a minute later all is forgotten."""
    now = 0.0
    failures = Failures(lambda: now)
    for _ in range(10):
        failures.require_few("a")
        failures.note("a")
    with pytest.raises(TooManyFailures):
        failures.require_few("a")
    failures.require_few("b")
    now = 61.0
    failures.require_few("a")
    failures.note("a")
    failures.require_few("a")


def test_addresses_that_are_counted_are_bounded() -> None:
    """Somebody with many addresses takes no memory."""
    failures = Failures(lambda: 0.0)
    for number in range(5_000):
        failures.note(str(number))
    assert len(failures._counted) == 1_000


def test_names_are_printable() -> None:
    """A name has no control characters, and an end."""
    assert printable(" an\x1b[31mna\n") == "an[31mna"
    assert len(printable("x" * 500)) == 100


def test_its_files_are_in_the_package() -> None:
    """Every template is valid, and the style sheet, the script and the icon are there."""
    package = files("relay.console")
    names = {each.name for each in (package / "static").iterdir()}
    assert names == {"console.css", "console.js", "icon.svg"}
    environment = Environment(loader=PackageLoader("relay.console"), autoescape=True)
    environment.filters |= dict.fromkeys(
        ("when", "ago", "age", "amount", "duration", "number"), str
    )
    templates = environment.list_templates()
    assert "base.html" in templates
    for name in templates:
        environment.get_template(name)
        text = (package / "templates" / name).read_text(encoding="utf-8")
        assert "|safe" not in text
        assert "style=" not in text
        assert "<script>" not in text
