"""Keys: shown once, found by digest, and changes by another process are seen by a gateway."""

import sqlite3
import stat
import subprocess
import sys

import pytest

from gateway.ledger.files import LedgerError
from gateway.ledger.keys import (
    APPLICATION_ID,
    LOOK_EVERY_S,
    MIGRATIONS,
    Key,
    KeyRefused,
    Keys,
)
from gateway.ledger.migrate import migrate


@pytest.fixture
def keys_path(tmp_path):
    return tmp_path / "home" / "keys.sqlite3"


def test_a_secret_is_shown_once_and_only_its_digest_is_kept(keys_path):
    with Keys(keys_path) as keys:
        key, secret = keys.create("laptop")
        assert secret.startswith("kg-")
        assert len(secret) == 3 + 43  # 32 bytes, url-safe
        assert keys.find(secret) == key
        assert keys.find(secret + "x") is None
        assert keys.find("\ud800") is None
        assert secret[3:] not in repr(keys.list())
    kept = keys_path.read_bytes() + b"".join(p.read_bytes() for p in keys_path.parent.glob("*-wal"))
    assert secret[3:].encode() not in kept
    with Keys(keys_path) as keys:
        assert keys.find(secret) == key


def test_the_files_are_the_owners_alone(keys_path):
    Keys(keys_path).close()
    assert stat.S_IMODE(keys_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys_path.parent.stat().st_mode) == 0o700


def test_a_revoked_key_is_refused_and_stays_listed(keys_path):
    with Keys(keys_path) as keys:
        key, secret = keys.create("laptop", tenant="acme")
        other, other_secret = keys.create("desktop")
        assert keys.revoke("laptop").key_id == key.key_id
        assert keys.find(secret) is None
        assert keys.find(other_secret) == other
        assert [(k.name, k.tenant, k.revoked_at is None) for k in keys.list()] == [
            ("laptop", "acme", False),
            ("desktop", "default", True),
        ]
        assert keys.revoke(other.key_id).name == "desktop"
        with pytest.raises(KeyRefused, match="kagari keys list"):
            keys.revoke("laptop")
        keys.create("laptop")  # the name is free again


def test_a_name_in_use_or_unprintable_is_refused(keys_path):
    with Keys(keys_path) as keys:
        keys.create("laptop")
        for name in ("laptop", "", "x" * 65, "a\nb"):
            with pytest.raises(KeyRefused, match="name"):
                keys.create(name)
        assert len(keys.list()) == 1


def test_a_running_gateway_sees_another_process_change_keys(keys_path):
    now = 100.0
    with Keys(keys_path, clock=lambda: now) as keys:
        _, old = keys.create("old")
        script = (
            "import sys; from pathlib import Path; from gateway.ledger.keys import Keys\n"
            "with Keys(Path(sys.argv[1])) as keys:\n"
            "    keys.revoke('old'); print(keys.create('new')[1])"
        )
        new = subprocess.run(
            [sys.executable, "-c", script, str(keys_path)],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
        assert keys.find(new) is None  # it looks at most twice a second
        now += LOOK_EVERY_S
        found = keys.find(new)
        assert found is not None
        assert found.name == "new"
        assert keys.find(old) is None


def test_a_literal_key_is_kept_in_memory_only(keys_path):
    with Keys(keys_path) as keys:
        key = keys.import_literal("correct horse battery")
        assert keys.find("correct horse battery") == key
        assert key.tenant == "default"
        keys.create("another")  # a reload keeps it
        assert keys.find("correct horse battery") == key
        for short in ("x" * 15, "x" * 15 + "\n", ""):
            with pytest.raises(KeyRefused, match="16"):
                keys.import_literal(short)
        assert [k.name for k in keys.list()] == ["another"]
    with Keys(keys_path) as keys:
        assert keys.find("correct horse battery") is None
        assert keys.import_literal("correct horse battery").key_id == key.key_id


def test_keys_of_an_older_build_are_kept_and_have_no_deadline(keys_path):
    keys_path.parent.mkdir()
    old = sqlite3.connect(keys_path, isolation_level=None)
    migrate(old, keys_path, MIGRATIONS[:2], APPLICATION_ID)
    old.execute("INSERT INTO keys VALUES ('key_1', 'laptop', 'acme', x'00', 1.5, NULL)")
    old.close()
    with Keys(keys_path) as keys:
        assert keys.list() == [Key("key_1", "laptop", "acme", 1.5)]
        assert keys.set_ttft_deadline("key_1", 900).ttft_deadline_ms == 900
    with Keys(keys_path) as keys:
        assert keys.get("laptop") == Key("key_1", "laptop", "acme", 1.5, ttft_deadline_ms=900)
        assert keys.set_ttft_deadline("key_1", None).ttft_deadline_ms is None


def test_a_deadline_that_cannot_be_is_refused(keys_path):
    with Keys(keys_path) as keys:
        key, _ = keys.create("laptop", ttft_deadline_ms=1)
        for milliseconds in (0, 3_600_001):
            with pytest.raises(KeyRefused, match="ttft_deadline_ms"):
                keys.create("another", ttft_deadline_ms=milliseconds)
            with pytest.raises(KeyRefused, match="ttft_deadline_ms"):
                keys.set_ttft_deadline(key.key_id, milliseconds)
        keys.revoke("laptop")
        with pytest.raises(KeyRefused, match="kagari keys list"):
            keys.set_ttft_deadline(key.key_id, 5)


def test_a_file_that_is_no_key_file_is_refused(keys_path):
    keys_path.parent.mkdir()
    keys_path.write_bytes(b"not a database at all, but long enough to look" * 40)
    with pytest.raises(LedgerError, match=r"keys\.sqlite3"):
        Keys(keys_path)
    keys_path.unlink()
    foreign = sqlite3.connect(keys_path)
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.close()
    with pytest.raises(LedgerError, match="no file of ours"):
        Keys(keys_path)


def test_keys_that_are_known_hold_while_the_file_cannot_be_read(keys_path):
    now = 0.0
    with Keys(keys_path, clock=lambda: now) as keys:
        key, secret = keys.create("laptop")
        other = sqlite3.connect(keys_path, isolation_level=None)
        other.execute("DROP TABLE keys")
        now += LOOK_EVERY_S
        assert keys.find(secret) == key
        with pytest.raises(LedgerError, match="no such table"):
            keys.create("desktop")
        with pytest.raises(LedgerError, match="no such table"):
            keys.revoke("laptop")
        other.close()
