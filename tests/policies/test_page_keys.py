"""Page keys: content and owner decide them, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.contract import page_keys
from policies.contract.wire import pack_ids

ROOT = Path(__file__).resolve().parents[2]
IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40).map(lambda ids: array("I", ids))
PARTS = st.fixed_dictionaries(
    {
        "identity": st.text(max_size=8),
        "tokenizer_digest": st.text(max_size=8),
        "page_size": st.sampled_from((16, 64)),
        "salt": st.binary(min_size=32, max_size=32),
    }
)
SEED = {"identity": "m", "tokenizer_digest": "t", "page_size": 16, "salt": bytes(32)}


def chain(ids: array[int], page_size: int = 4) -> list[bytes]:
    return page_keys.page_keys(page_keys.seed(**SEED), pack_ids(ids), page_size=page_size)


@given(first=PARTS, second=PARTS)
def test_no_two_owners_share_a_seed(first, second) -> None:
    """Each part is framed by its length, so text cannot wander from one part into the next."""
    assume(first != second)
    assert page_keys.seed(**first) != page_keys.seed(**second)
    glued = {**first, "identity": first["identity"] + first["tokenizer_digest"]}
    assert page_keys.seed(**{**glued, "tokenizer_digest": "x"}) != page_keys.seed(**first)


def test_exact_and_fast_engines_of_one_model_share_no_page() -> None:
    exact, fast = (page_keys.interchangeable_id("m", compute) for compute in ("exact", "fast"))
    assert exact == "m"  # as before there was another way to compute
    assert page_keys.seed(**{**SEED, "identity": fast}) != page_keys.seed(**SEED)


@given(left=IDS, right=IDS)
def test_keys_agree_exactly_as_far_as_the_tokens_do(left, right) -> None:
    keys, others = chain(left), chain(right)
    same = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        same += 1
    for index, (key, other) in enumerate(zip(keys, others, strict=False)):
        assert (key == other) == ((index + 1) * 4 <= same)
    assert [len(key) for key in keys] == [page_keys.KEY_BYTES] * (len(left) // 4)


def test_equal_last_page_and_count_are_not_an_equal_prefix() -> None:
    one, two = (
        chain(array("I", [1, 2, 3, 4, 9, 9, 9, 9])),
        chain(array("I", [5, 6, 7, 8] + [9] * 4)),
    )
    assert one[1] != two[1]


def test_keys_are_the_same_in_every_process() -> None:
    """A per-process hash seed would give 0 % hits between gateway and node without an error."""
    code = (
        "from policies.contract import page_keys as k;"
        "root = k.seed(identity='m', tokenizer_digest='t', page_size=16, salt=bytes(32));"
        "print(k.page_keys(root, bytes(range(128)), page_size=16)[-1].hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(said) == 1


def test_a_salt_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="salt has 31 bytes"):
        page_keys.seed(**{**SEED, "salt": bytes(31)})


def test_tenants_have_salts_that_only_the_home_secret_makes() -> None:
    assert page_keys.tenant_salt(b"secret", "a") != page_keys.tenant_salt(b"secret", "b")
    assert page_keys.tenant_salt(b"secret", "a") != page_keys.tenant_salt(b"other", "a")
