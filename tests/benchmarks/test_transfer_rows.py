"""The transfers' benchmark measures a way between two processes, beside both of its peers."""

from benchmarks.beside import Beside
from benchmarks.transfer import measure


def test_a_way_is_measured_beside_a_socket_and_a_copy() -> None:
    transfer, setup = measure(num_pages=3, rounds=1, ways=("auto",))
    assert isinstance(transfer, Beside)
    assert isinstance(setup, Beside)
    assert (transfer.name, setup.name) == ("transfer_auto", "setup_auto")
    assert set(transfer.peers) == {"plain socket", "copy"}
    assert min(transfer.ours, setup.ours) > 0
