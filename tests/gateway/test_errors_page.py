"""The table of errors and docs/errors.md say the same, and an error carries what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gateway.errors import CLIENT_CODE, KINDS, GatewayError, fault, near, quote

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()


def test_page_has_a_section_for_each_code_and_no_other() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == list(KINDS)


@pytest.mark.parametrize("code", list(KINDS))
def test_row_of_the_page_equals_the_table(code) -> None:
    kind = KINDS[code]
    retry = {True: "yes", False: "no", None: "–"}[kind.should_retry]
    row = f"| [`{code}`](#{code}) | {kind.status} | {kind.number} | {kind.type} | {retry} |"
    assert row in PAGE
    section = PAGE.split(f"\n## {code}\n")[1].split("\n## ")[0]
    assert kind.summary in section
    assert "*Remedy:*" in section


def test_workers_ai_numbers_go_with_their_meaning() -> None:
    numbers = {code: KINDS[code].number for code in KINDS}
    assert numbers["model_not_found"] == 5007
    assert numbers["invalid_request"] == 5004
    assert numbers["missing_body"] == 3003
    assert numbers["request_too_large"] == 3006
    assert numbers["body_timeout"] == 3007
    assert numbers["aborted"] == 3008
    assert (KINDS["quota_exceeded"].number, KINDS["capacity_exceeded"].number) == (3036, 3040)


def test_quota_and_capacity_steer_retries_apart() -> None:
    quota = dict(GatewayError("quota_exceeded").headers())
    capacity = dict(GatewayError("capacity_exceeded", retry_after_s=0.25).headers())
    assert quota == {"x-should-retry": "false"}
    assert capacity == {"x-should-retry": "true", "retry-after": "1", "retry-after-ms": "250"}


def test_message_is_one_sentence_of_the_four_parts() -> None:
    error = GatewayError(
        "invalid_request", field="top_p", found="7", allowed="0 to 1", remedy="lower it"
    )
    body = msgspec.json.decode(error.body("r1"))["error"]
    assert all(part in body["message"] for part in ("top_p", "7", "0 to 1", "lower it"))
    assert body["message"].endswith(".")
    assert "\n" not in body["message"]
    assert (body["param"], body["found"], body["allowed"]) == ("top_p", "7", "0 to 1")


def test_unknown_fault_has_a_name_of_ours() -> None:
    assert fault("node_lost").code == "node_lost"
    assert fault("something_else").code == "engine_error"
    full = fault("engine_full")
    assert (full.code, full.kind.number) == ("capacity_exceeded", 3040)
    assert dict(full.headers())["retry-after-ms"] == "1000"
    assert set(CLIENT_CODE.values()) <= set(KINDS)


def test_quoted_input_is_short_and_printable() -> None:
    shown = quote("a\x00b\n" + "c" * 500)
    assert len(shown) < 90
    assert "\x00" not in shown
    assert "\n" not in shown


def test_near_names_are_bounded() -> None:
    assert near("smolm2", ["smollm2", "other"]) == ["smollm2"]
    assert near("x" * 1_000_000, ["y" * 1_000_000]) == []


def test_a_request_that_waited_for_a_node_that_ends_is_told_so() -> None:
    error = fault("node_draining")
    assert (error.code, error.retry_after_s) == ("no_node", 1.0)
    assert "takes nothing new" in msgspec.json.decode(error.body("r1"))["error"]["found"]
