"""docs/transfers.md shows the protocol's table and states as they are in the code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.transfer.states import RECEIVER, SENDER, Act, Event, Rules, State, Table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transfers.md"
SHARED = (State.DRAINING, State.LEAVING, State.QUIET)


def rows(table: Table, states: Iterable[State]) -> list[str]:
    return [
        f"| {state.name} | {event.value} | {rule.act.value} | {rule.then.name} |"
        for state in states
        for event, rule in table[state].items()
    ]


def rendered(title: str, table: Table, states: Iterable[State]) -> str:
    states = list(states)
    return "\n".join(
        [
            f"### {title}",
            "",
            "| State | is the one that |",
            "|---|---|",
            *(f"| {state.name} | {state.value} |" for state in states),
            "",
            "| In | on | it does | and is |",
            "|---|---|---|---|",
            *rows(table, states),
        ]
    )


def test_the_page_shows_the_table() -> None:
    own = [
        (title, table, [state for state in table if state not in SHARED])
        for title, table in (("The sender", SENDER), ("The receiver", RECEIVER))
    ]
    expected = "\n\n".join(rendered(*part) for part in (*own, ("Both, at the end", SENDER, SHARED)))
    assert expected in PAGE.read_text(), f"put this into {PAGE.name}:\n{expected}"


@pytest.mark.parametrize("table", [SENDER, RECEIVER])
def test_every_pair_of_state_and_event_has_a_rule(table: Table) -> None:
    for state, rules in table.items():
        assert Event.ANY in rules, state
        assert {rule.then for rule in rules.values()} <= set(table)


def test_both_sides_end_alike() -> None:
    assert all(SENDER[state] == RECEIVER[state] for state in SHARED)


@pytest.mark.parametrize("table", [SENDER, RECEIVER])
def test_only_quiet_is_for_ever_and_every_state_leads_there(table: Table) -> None:
    def may_become(rules: Rules) -> set[State]:
        return {rule.then for rule in rules.values()}

    assert may_become(table[State.QUIET]) == {State.QUIET}
    leads = {State.QUIET}
    while more := {state for state in table if may_become(table[state]) & leads} - leads:
        leads |= more
    assert leads == set(table)
    for state in set(table) - {State.QUIET}:  # a cut or a deadline is never without effect
        for event in (Event.CUT, Event.LATE):
            rule = table[state].get(event) or table[state][Event.ANY]
            assert rule.act is not Act.IGNORE, (state, event)


def test_quiet_is_told_where_it_is_reached_and_nowhere_else() -> None:
    for table in (SENDER, RECEIVER):
        for state, rules in table.items():
            for rule in rules.values():
                is_end = rule.then is State.QUIET and state is not State.QUIET
                assert ("TransferQuiet" in rule.act.value) == is_end
