"""Chat templates: the dialect of Hugging Face, inside a sandbox, on a budget."""

import time
from datetime import datetime

import pytest

from gateway.text.errors import TextError
from gateway.text.template import ChatTemplate
from policies.contract.bundle import Bundle

HELLO = [{"role": "user", "content": "hi"}]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(
        source, bos_token="<s>", eos_token=None, clock=lambda: datetime(2026, 11, 29)
    )


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for m in messages %}\n  {% if m %}\n{{ m.content }}\n{% endif %}{% endfor %}", "hi\n"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s>True"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [0, 1] %}{% if i == 0 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Nov 2026"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% set n = namespace() %}{% for m in [4] %}{% set n.x = m %}{% endfor %}{{ n.x }}", "4"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.length }}{% endfor %}", "01"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f('b') }}", "[a][b]"),
        ("{{ '%s-%d' % ('a', 3) }}{{ 'x' * 3 }}{{ 2 * 3 }}", "a-3xxx6"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
    ],
)  # fmt: skip
def test_the_dialect_of_model_files(source: str, rendered: str) -> None:
    assert template_of(source).render(HELLO) == rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'x' %}",
        "{{ messages[0]['absent']['deeper'] }}",
        "{{ 'a' + none }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(TextError) as caught:
        template_of(source).render(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000000000) %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for m in messages * 9 %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in [[]] recursive %}{{ loop([[]]) }}{{ loop([[]]) }}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in [1]*60 %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in [1]*60 %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% for i in range(200000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ [0] * 1000000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format('x') }}",
        "{{ '{:>{}}'.format('x', 1000000000) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ range(1000000000) | list }}",
        "{{ range(10 ** 30) | list }}",
        "{{ range(1000000000000000000000000000000) | list }}",
        "{% for i in [1] * 9999 %}{{ -999 | step }}{% for j in [1] * 99 %}{% endfor %}{% endfor %}",
        "{{ [1] | tojson(indent=1000000000) }}",
    ],
)  # fmt: skip
def test_a_template_cannot_take_the_machine(source: str) -> None:
    started = time.thread_time()  # of this test alone, however busy the machine
    with pytest.raises(TextError):
        template_of(source).render(HELLO)
    assert time.thread_time() - started < 5.0


def test_each_rendering_has_its_own_budget() -> None:
    template = template_of("{% for i in range(100000) %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(5)] == ["ok"] * 5


@pytest.mark.parametrize("source", ["{% if %}", "{{ '\ufdd0' }}", "{{ x | no_such_filter }}"])
def test_a_broken_template_says_so_when_used(source: str) -> None:
    template = template_of(source)
    assert template.fault
    with pytest.raises(TextError, match="does not compile"):
        template.render(HELLO)


def test_searched_markers_are_found() -> None:
    source = "{% if '</think>' in messages[0].content %}{{ 'x'.split('<a>')[0] }}{% endif %}"
    assert template_of(source).searched == {"</think>", "<a>"}


def test_default_template_renders_as_transformers_does(smollm2_bundle: Bundle) -> None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    assert smollm2_bundle.chat_template is not None
    template = ChatTemplate(
        smollm2_bundle.chat_template,
        bos_token=smollm2_bundle.bos_token,
        eos_token=smollm2_bundle.eos_token,
    )
    system = {"role": "system", "content": "Be brief.\n"}
    turn = [
        HELLO[0],
        {"role": "assistant", "content": " <b>é</b>\n\n"},
        {"role": "user", "content": ""},
    ]
    for messages in (HELLO, [system, *HELLO], turn, [system, *turn * 5]):
        expected, _ = render(
            [messages],
            chat_template=smollm2_bundle.chat_template,
            add_generation_prompt=True,
            bos_token=smollm2_bundle.bos_token,
            eos_token=smollm2_bundle.eos_token,
        )
        assert template.render(messages) == expected[0]
