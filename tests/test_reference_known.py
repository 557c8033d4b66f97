"""What is known to break releases does not break the reference engine."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from kvproof import scenario_file
from kvproof.findings import Record, load
from kvproof.impl.reference.subject import ReferenceSubject
from kvproof.models.stateful.replay import replay
from kvproof.models.stateful.strategies import Setup
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import Scenario

RECORDS = [record for record in load() if record.scenario is not None]


def as_far_as_it_goes(scenario: Scenario) -> Scenario:
    """The same under the nearest configuration that the reference engine has: it serves text in order of arrival, and
    loads whole blocks from stores of others. Every request may read a cache there."""
    setup = Setup(scenario.config.usual(), 1)
    actions = tuple(replace(action, unread=False) for action in scenario.actions)
    for easier in (setup, setup.in_order(), setup.plain()):
        with contextlib.suppress(ConfigError):
            ReferenceSubject().start(easier.config, None)
            return replace(scenario, config=easier.config, actions=actions)
    raise AssertionError("not even the plainest configuration can be had")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.invariant}-{record.cause}")
def test_what_breaks_releases_does_not_break_the_reference(record: Record) -> None:
    assert record.scenario is not None
    scenario = as_far_as_it_goes(scenario_file.parse(record.scenario).scenario)
    found = replay(ReferenceSubject(), scenario)
    assert found.violations == (), found.text
    assert found.error == ""
    assert not found.spoiled
    sent, aborted = ({a.request for a in scenario.actions if a.kind == kind} for kind in ("submit", "abort"))
    assert found.steps > 0 or sent == aborted
