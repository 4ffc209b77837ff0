"""Runs a state machine of hypothesis for as many examples as a test asks for."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(machine: type[RuleBasedStateMachine], examples: int) -> None:
    """Of 40 steps each, however long they take."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
