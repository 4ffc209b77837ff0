"""Configuration: sources in order, origins kept, typos refused with the nearest name."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from io import StringIO
from pathlib import Path

import pytest

from gateway.__main__ import FLAGS, main, parser
from gateway.app import build
from gateway.config import (
    ConfigError,
    GatewayConfig,
    TieringConfig,
    load,
    read_secret,
    setting_names,
)
from gateway.home import Home, open_home
from gateway.telemetry import make_log


def write(folder: Path, text: str) -> Path:
    path = folder / "kagari.toml"
    path.write_text(text)
    return path


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path) -> None:
    path = write(tmp_path, '[server]\nport = 1\nhost = "0.0.0.0"\n[stream]\nheartbeat_s = 3\n')
    loaded = load(
        path,
        environment={"KAGARI_SERVER__PORT": "2", "KAGARI_HOME": "/h", "PATH": "x"},
        flags={"server.link_port": 3, "server.admin_port": None},
    )
    server = loaded.config.server
    assert (server.host, server.port, server.link_port, server.admin_port) == (
        "0.0.0.0",
        2,
        3,
        8002,
    )
    assert loaded.config.home == "/h"
    assert loaded.config.stream.heartbeat_s == 3.0
    origins = {name: origin for name, _, origin in loaded.rows()}
    assert origins["server.host"] == f"file {path}"
    assert origins["server.port"] == "environment KAGARI_SERVER__PORT"
    assert origins["server.link_port"] == "command line"
    assert origins["server.admin_port"] == "default"
    assert origins["home"] == "environment KAGARI_HOME"


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("[server]\nprot = 1\n", "server.prot", "server.port"),
        ("[sever]\nport = 1\n", "sever", "server"),
        ("hom = 'x'\n", "hom", "home"),
        ("[limits]\nbody_byte = 1\n", "limits.body_byte", "limits.body_bytes"),
    ],
)
def test_unknown_name_stops_the_start_with_the_nearest(tmp_path, text, name, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), environment={})
    assert caught.value.name == name
    assert hint in caught.value.remedy


def test_unknown_variable_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={"KAGARI_SERVER__PROT": "1"})
    assert caught.value.name == "KAGARI_SERVER__PROT"
    assert "server.port" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('[server]\nport = "1"\n', "server.port"),
        ("[server]\nport = 70000\n", "server.port"),
        ("[server]\nport = 5\nlink_port = 5\n", "server.port"),
        ("[stream]\nheartbeat_s = 0\n", "stream.heartbeat_s"),
        ("[stream]\nheartbeat_s = nan\n", "stream.heartbeat_s"),
        ("[limits]\nbody_bytes_in_flight = 5\n", "limits.body_bytes_in_flight"),
        ("[limits]\nchoices = 129\n", "limits.choices"),
        ("[tiering.quotas]\nacme = 0.7\nzoo = 0.4\n", "tiering.quotas"),
        ("[tiering]\nquotas = { acme = -0.1 }\n", "tiering.quotas"),
        ("[tiering]\nquotas = { acme = nan }\n", "tiering.quotas"),
        ('[routing]\npolicy = "random"\n', "routing.policy"),
        ("[server\n", "kagari.toml"),
    ],
)
def test_wrong_value_names_its_setting(tmp_path, text, name) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), environment={})
    assert caught.value.name.endswith(name)
    assert caught.value.found
    assert caught.value.allowed
    assert caught.value.remedy


def test_every_flag_is_a_setting() -> None:
    assert set(FLAGS.values()) <= set(setting_names())
    destinations = set(vars(parser().parse_args([])))
    of_upstreams = {"upstream", "dialect", "tokenizer"}  # together they are one setting
    assert set(FLAGS) == destinations - {"config", "api_key"} - of_upstreams


def test_wrong_configuration_exits_2_in_words(tmp_path, capsys) -> None:
    path = write(tmp_path, "[server]\nprot = 1\n")
    assert main(["--config", str(path)]) == 2
    assert "Did you mean server.port?" in capsys.readouterr().err


def test_secret_file_is_one_line_or_an_error(tmp_path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError):
        read_secret(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError):
        read_secret(str(file))
    file.write_text("  a-key-of-some-length \n")
    assert read_secret(str(file)) == "a-key-of-some-length"


def test_home_is_made_once_and_is_private(tmp_path) -> None:
    first = open_home(tmp_path / "h")
    assert open_home(tmp_path / "h") == first
    for name in ("admin.token", "join.token", "home.secret", "gateway.id"):
        assert stat.S_IMODE(os.stat(first.folder / name).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(first.folder).st_mode) == 0o700
    assert len(first.salt("a")) == 32
    assert first.salt("a") != first.salt("b")
    assert len({first.admin_token, first.join_token, first.secret.hex()}) == 3


def test_two_first_starts_at_once_agree(tmp_path) -> None:
    homes: list[Home] = []
    threads = [
        threading.Thread(target=lambda: homes.append(open_home(tmp_path / "h"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(homes) == 8
    assert len(set(homes)) == 1
    assert sorted(path.name for path in (tmp_path / "h").iterdir()) == [
        "admin.token",
        "gateway.id",
        "home.secret",
        "join.token",
    ]


def test_a_quota_of_a_tenant_without_a_key_is_told(tmp_path) -> None:
    quotas = {"acme": 0.1, "default": 0.2}
    config = GatewayConfig(home=str(tmp_path / "home"), tiering=TieringConfig(quotas))
    lines = StringIO()

    async def start() -> None:
        async with build(config, log=make_log(lines)):
            pass

    asyncio.run(start())
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert (line["event"], line["tenants"]) == ("quotas_of_tenants_without_a_key", ["acme"])
