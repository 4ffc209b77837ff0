"""What holds of both sides of a split: one id, one end, each token told once."""

from __future__ import annotations

import pytest

from engine.schedule.events import SequenceFailed, SequenceRefused, TokensProduced
from engine.schedule.transfer_orders import TransferFailed, TransferQuiet, Withdraw
from policies.contract.wire import Role
from tests.engine.arena_runner import alone
from tests.engine.split_bench import SplitBench
from tests.engine.split_leg import HOME, ID, PROMPT, Leg


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("transfer_refused", "transfer_refused"),
        ("transfer_layout", "transfer_layout"),
        ("aborted", "transfer_lost"),
        ("deadline_exceeded", "transfer_lost"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_transfer_that_fails_ends_the_leg_with_a_code_of_transfers(
    role: Role, code: str, told: str
) -> None:
    bench = Leg()
    bench.leg(role)
    bench.step()
    bench.told(TransferFailed(ID, code, "it says why"))
    end = bench.end(1)
    assert isinstance(end, SequenceFailed)
    assert end.code == told
    assert "it says why" in end.message
    withdrawn = [order.transfer_id for order in bench.orders() if isinstance(order, Withdraw)]
    assert withdrawn == ([HOME] if role == "prefill" else []), "nothing will come home"
    bench.told(TransferQuiet(ID))
    assert bench.scheduler.pool.num_held == 0
    assert not bench.scheduler.has_work


def test_a_transfer_that_is_over_before_it_is_handed_over_is_lost() -> None:
    for role in ("prefill", "decode"):
        bench = Leg()
        bench.leg(role)
        bench.step()
        bench.told(TransferQuiet(ID))
        end = bench.end(1)
        assert isinstance(end, SequenceFailed)
        assert end.code == "transfer_lost"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_id_is_for_one_transfer(role: Role) -> None:
    bench = Leg()
    bench.leg(role)
    with pytest.raises(SequenceRefused) as refused:
        bench.leg(role, sequence_id=2)
    assert refused.value.code == "transfer_refused"
    assert bench.scheduler.load().waiting_sequences == 1


def test_a_token_is_told_once_however_often_news_come() -> None:
    bench = SplitBench()
    bench.submit(1, PROMPT)
    for _ in range(50):
        for key in bench.network.live():
            bench.network.advance(key)
            while bench.network.hear(key, twice=True):
                pass
        bench.prefill.step()
        bench.decode.step()
    bench.rest()
    told = [event for event in bench.decode.events if isinstance(event, TokensProduced)]
    assert [event.tokens[0] for event in told] == alone(PROMPT, 4)
