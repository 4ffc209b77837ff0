"""Logs hold no secrets; metrics are exactly the table."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from gateway.api.exchange import clean_client_id, header_value, new_request_id
from gateway.telemetry import METRICS, REDACTED, Metrics, make_log


@pytest.mark.parametrize(
    "fields",
    [
        {"authorization": "Bearer abc"},
        {"api_key": "x"},
        {"join_token": "x"},
        {"note": "it sent Bearer abcdef"},
        {"note": "key sk-abcdefghijk was used"},
        {"note": "key kg-abcdefghijk was used"},
    ],
)
def test_secrets_are_replaced_by_name_and_by_shape(fields) -> None:
    stream = StringIO()
    make_log(stream).info("event", **fields)
    line = json.loads(stream.getvalue())
    assert REDACTED in json.dumps(line)
    assert not any(secret in stream.getvalue() for secret in ("abc", '"x"'))


def test_counts_of_tokens_are_not_taken_for_secrets() -> None:
    stream = StringIO()
    make_log(stream).info("request", prompt_tokens=5, cached_tokens=4, key_id="key_12")
    line = json.loads(stream.getvalue())
    assert (line["prompt_tokens"], line["cached_tokens"], line["key_id"]) == (5, 4, "key_12")


def test_log_on_a_full_disk_fails_nobody_and_says_what_it_lost() -> None:
    """Else the ledger's writer, which logs that the disk is full, would end of it."""

    class Disk(StringIO):
        is_full = True

        def flush(self) -> None:
            if self.is_full:
                self.seek(0)
                self.truncate()
                raise OSError(28, "No space left on device")

    disk = Disk()
    log = make_log(disk)
    log.info("first")
    log.info("second")
    disk.is_full = False
    log.info("third")
    lines = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [(line["event"], line.get("lines")) for line in lines] == [
        ("log_lines_lost", 2),
        ("third", None),
    ]


def test_every_row_of_the_table_is_exported_and_nothing_else() -> None:
    metrics = Metrics()
    families = {family.name: family for family in metrics.registry.collect()}
    assert set(families) == {row.name for row in METRICS}
    for row in METRICS:
        assert families[row.name].type == row.kind
        assert row.name.startswith("kagari_")
        assert (row.unit == "s") == row.name.endswith("_seconds")
        if row.kind == "histogram":
            assert row.buckets[-1] == 600


def test_request_ids_are_new_ordered_and_hard_to_guess() -> None:
    ids = [new_request_id() for _ in range(1000)]
    assert len({i[12:] for i in ids}) == 1000
    assert [i[:12] for i in ids] == sorted(i[:12] for i in ids)
    assert all(len(i) == 32 for i in ids)


def test_client_ids_cannot_inject_into_logs() -> None:
    assert clean_client_id('a"\n{}\x00b') == "ab"
    assert clean_client_id("é" * 5) is None
    assert clean_client_id("x" * 100) == "x" * 64


def test_any_name_fits_a_header() -> None:
    assert header_value("node-1") == b"node-1"
    assert header_value("ノード\r\nx: y") == b"?????x: y"
