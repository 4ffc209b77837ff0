"""Which form of tool calls a model's template has, and whose template a catalogue model gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.bundle import load_bundle
from node_agent.catalogue import load_catalogue
from node_agent.checkpoints import models_folder, prepare, resolve
from policies.contract.bundle import decode_bundle
from policies.contract.checkpoint_text import parser_family_of

# As templates have it inside a jinja text, and as plain text.
ESCAPED = (
    '{% if tools %}{{ \'<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": {}}\' }}{% endif %}'
)
PLAIN = '{% if tools %}<tool_call>{"name": "", "arguments": {}}</tool_call>{% endif %}'


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, None),
        ("", None),
        (ESCAPED, "hermes"),
        (PLAIN, "hermes"),
        (PLAIN.replace("tools", "messages"), None),
        ("{% if tools %}<tool_call>{{ name }}<arg_key>k</arg_key></tool_call>{% endif %}", None),
        (PLAIN + "<function=name>", None),
        ("{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}", None),
    ],
)
def test_the_form_of_calls_is_read_from_the_template(
    template: str | None, family: str | None
) -> None:
    assert parser_family_of(template) == family


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-32k"])
def test_the_default_models_speak_tools_by_our_template(name: str, tmp_path: Path) -> None:
    catalogue = load_catalogue()
    entry = catalogue.find(name)
    assert entry is not None
    prepared = prepare(resolve(name, catalogue, models_folder()), bundle_caches=(tmp_path,))
    bundle = decode_bundle(prepared.bundle)
    assert bundle.parser_family == "hermes"
    assert bundle.chat_template == entry.chat_template()


def test_the_same_file_without_our_template_is_another_bundle(tmp_path: Path) -> None:
    catalogue = load_catalogue()
    path = resolve(catalogue.default, catalogue, models_folder()).path
    files, families = set(), []
    for template in (None, PLAIN):
        file, encoded = load_bundle(
            path,
            tmp_path,
            source_digest="x",
            context_tokens=None,
            page_size=64,
            labels=(),
            chat_template=template,
        )
        files.add(file)
        families.append(decode_bundle(encoded).parser_family)
    assert len(files) == 2
    assert families == [None, "hermes"]
