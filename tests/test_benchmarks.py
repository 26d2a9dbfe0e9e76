"""Benchmarks that stand on the simulation work: they take long, and run by hand."""

from __future__ import annotations

from benchmarks import resume


def test_a_large_run_that_goes_on_reaches_its_first_request() -> None:
    row = resume.measure(160)
    assert row["groups"] == 160
    assert row["facts"] == 2 + 160 * 10 + 10 * 4
