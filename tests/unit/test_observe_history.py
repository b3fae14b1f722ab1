"""The samples that the console draws: bounded, in order, one history for each group."""

from __future__ import annotations

from relay.observe import history
from relay.observe.history import Sample, SampleHistory


def test_only_the_last_samples_are_kept_in_order() -> None:
    kept = SampleHistory(kept=3)
    for moment in range(5):
        kept.add(Sample(float(moment), {"lag_bytes": moment}))
    assert [each.at for each in kept.samples()] == [2.0, 3.0, 4.0]
    assert [each.at for each in kept.samples(since=3.0)] == [3.0, 4.0]


def test_each_group_of_the_process_has_its_own() -> None:
    history.of("one").add(Sample(1.0, {}))
    assert history.of("one").samples() == [Sample(1.0, {})]
    assert history.of("another") is history.of("another")
    assert history.of("another").samples() == []
