from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from qwen3_tokenizer import qwen3_tokenizer
from tiny_tokenizer import write_tiny_tokenizer

from rimuru_cli.engine.chat_template import ChatTemplate
from rimuru_cli.engine.text import render_prompt
from rimuru_cli.engine.tokenizer import Tokenizer
from rimuru_models.errors import CheckpointError, NotFoundError, UsageError

CHAT = [
    {"role": "system", "content": "Be brief — naïve <b>&amp;</b> 你好"},
    {"role": "user", "content": "  What's 2+2? \n"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4", "extra": {"z": 1, "a": [1.5, None, True]}},
    {"role": "user", "content": "Thanks 😀\n\n"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "météo", "parameters": {"type": "object", "properties": {"città": {"type": "string", "enum": ["Zürich"]}}}},
    }
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}

TEMPLATES = {
    "macros": (
        "{% macro turn(role, text, open=true) -%}\n<|im_start|>{{ role }}\n{{ text | trim }}{% if not open %}<|im_end|>{% endif %}\n"
        "{%- endmacro %}\n{{ bos_token }}\n{% for m in messages %}\n  {{ turn(m.role, m['content'], open=loop.last) }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}"
        "{{ loop.index0 }}/{{ loop.length }}:{{ m.role }}{{ loop.cycle('a', 'b') }};{% else %}none{% endfor %}"
    ),
    "tojson": (
        "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[2] | tojson(sort_keys=true, separators=(',', ':')) }}"
        "|{{ messages[0] | tojson(ensure_ascii=true) }}|"
        "{% for t in tools %}{{ t.function.parameters | tojson(indent=4) | indent(2) }}{% endfor %}"
    ),
    "namespace": (
        "{%- set ns = namespace(last=-1, out='', seen=[]) -%}{% for m in messages[::-1] %}{% set ns.last = loop.index0 %}"
        "{% set ns.out = ns.out ~ m.role[:2] + '-' %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}"
        "{{ ns.last }}{{ ns.out }}{{ ns.seen | unique | join(', ') }}{{ ns.seen }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n{% set x = 1 %}{{ m.content }}{{ x }}{{ eos_token }}"
        "{% endgeneration %}\n{% endif %}{{ x }}{% endfor %}"
    ),
    "filters and methods": (
        "{{ messages | map(attribute='role') | join('|') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages[0].content.split(' ')[0].upper() }}{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}"
        "{{ ' , '.join(messages | map(attribute='role')) }}{{ messages[1].content | trim | length }}{{ 'x' | center(9) }}"
        "{{ messages[2].extra.items() | list }}{{ messages[2].extra | dictsort }}"
        "{{ dict(a=1, b=[2]) }}{{ (1, 2) }}{{ {'k': 'v'}.get('k') }}"
        "{{ '%s is %05.1f' | format('pi', 3.14159) }}{{ '%s-%s 12345 100%%' % ('a', 'b') }}"
        "{{ '{:>6}|{}'.format('r', 1) }}{{ 'ab' * 3 }}{{ [0] * 2 }}"
        "{{ 'user' in ['user'] and 'us' in 'user' and 1 < 2 <= 2 }}{{ messages[0].role is string }}{{ missing is defined }}{{ missing }}"
        "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -3 | abs }}{{ '5' | int + 1 }}"
        "{{ range(3) | list }}{{ [3, 1, 2] | sort | last }}{{ 2.55 | round(1) }}"
        "{{ [1, 2, 3] | sum }}{{ 'a b' | title | replace(' ', '_') }}{{ messages | first | string | length }}{{ 'abc' | batch(2) | list }}"
        "{{ 'abc'.replace('b', 'xx') }}{{ 'a' ~ 1 ~ none }}{{ messages[-1].content.rstrip() }}{{ [[1, 2], [3]] | sum(start=[]) }}"
    ),
    "whitespace": "  {% if true %}\n   a\n  {% endif %}\n  {#- c -#}  \n{%- for m in messages %}\n  {{- m.role -}}\n{% endfor %} \n z",
    "set blocks and calls": (
        "{% set x %}{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{% macro w() %}[{{ caller() }}]{% endmacro %}"
        "{% call w() %}{{ x }}{% endcall %}{% filter upper %}{{ x }}{% endfilter %}{% block b %}blk{% endblock %}{{ self.b() }}"
        "{% set a, b = 'p', 'q' %}{{ a }}{{ b }}{% for k, v in messages[2].extra.items() recursive %}{{ k }}={{ v }}{% endfor %}"
        "{% with q = 1 %}{{ q }}{% endwith %}{% set c = cycler('o', 'e') %}{{ c.next() }}{{ c.next() }}"
        "{%- set j = joiner(';') %}{{ j() }}x{{ j() }}"
    ),
    "kwargs": "{{ enable_thinking }}{{ tools is none }}{{ documents is none }}{{ custom }}"
    "{{ add_generation_prompt }}{{ pad_token }}{{ unk_token }}",
}


def oracle(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = utils.render_jinja_template(conversations=[messages], chat_template=template, **{**TOKENS, **kwargs})
    return str(rendered[0])


def render(template: str, messages: Any = CHAT, *, seconds: float | None = None, units: int | None = None, **kwargs: Any) -> str:
    made = ChatTemplate(template, model="tiny", special_tokens=TOKENS, budget_seconds=seconds, budget_units=units)
    return made.render(messages, **kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(name: str, prompt: bool) -> None:
    kwargs: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": prompt, "enable_thinking": False, "custom": "é"}
    assert render(TEMPLATES[name], **kwargs) == oracle(TEMPLATES[name], CHAT, **kwargs)


def test_date_equals_transformers() -> None:
    template = "{{ strftime_now('%d %B %Y, %-d') if false else strftime_now('%Y-%m-%d') }}"
    assert render(template) == oracle(template, CHAT)


# ---- the real template of Qwen3


@pytest.fixture(scope="module")
def qwen3() -> Path:
    """Folder with the tokenizer of Qwen3."""
    return qwen3_tokenizer()


QWEN_CHATS: list[list[dict[str, Any]]] = [
    CHAT,
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "météo", "arguments": {"città": "Zürich"}}}]},
        {"role": "tool", "content": "<tool_response> sunny"},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "reasoning_content": "It is sunny.", "content": "Sunny."},
        {"role": "user", "content": "Sure?"},
    ],
]


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", range(len(QWEN_CHATS)))
def test_qwen3_equals_transformers(qwen3: Path, chat: int, tools: Any, thinking: bool | None) -> None:
    template = ChatTemplate.from_dir(qwen3)
    assert template.supports_thinking and template.thinking_switch
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    expected = oracle(template.source, QWEN_CHATS[chat], tools=tools, add_generation_prompt=True, **kwargs)
    assert template.render(QWEN_CHATS[chat], tools=tools, enable_thinking=thinking) == expected


def test_qwen3_ids_equal_transformers(qwen3: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(qwen3)  # AutoTokenizer takes 15 s
    ours = Tokenizer.from_dir(qwen3)
    ids = render_prompt(ours, ChatTemplate.from_dir(qwen3), QWEN_CHATS[2], tools=TOOLS)
    assert ids == theirs.apply_chat_template(QWEN_CHATS[2], tools=TOOLS, add_generation_prompt=True, return_dict=False)


# ---- where templates come from


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_sources_in_order(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tiny_tokenizer(tmp_path)

    def both(**kwargs: Any) -> str:
        ours = ChatTemplate.from_dir(tmp_path).render(CHAT, **kwargs)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert ours == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **kwargs)
        return ours

    assert both().startswith("<|im_start|>system\nBe brief")
    named = [{"name": "default", "template": "plain{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]
    edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert both() == "plain<|im_start|>"
    assert both(tools=TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_bytes(b"own\r\nfile{{ eos_token }}\n")
    assert both() == "own\nfile<|im_end|>"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json file"}), encoding="utf-8")
    assert ChatTemplate.from_dir(tmp_path).render(CHAT) == "json file"


def test_no_template_points_to_raw(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template") as info:
        ChatTemplate.from_dir(tmp_path, model="Base-7B")
    assert "Base-7B" in info.value.what
    assert "--raw" in str(info.value.hint)
    with pytest.raises(NotFoundError):
        ChatTemplate.from_dir(tmp_path / "nothing")


@pytest.mark.parametrize("value", [3, {"default": "x"}, [], [{"name": "default"}], [{"name": "other", "template": "x"}], ["x"]])
def test_odd_templates_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate.from_dir(tmp_path)


def test_thinking_is_recognised() -> None:
    def made(source: str) -> ChatTemplate:
        return ChatTemplate(source, model="m")

    assert not made("{{ messages }}").supports_thinking
    assert made("{{ messages }}<think>\n").supports_thinking and not made("<think>").thinking_switch
    assert made("{% if enable_thinking is defined %}x{% endif %}").thinking_switch


# ---- templates that fail or attack


def test_the_templates_own_refusal_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Roles must alternate") as info:
        render("{{ raise_exception('Roles must alternate\x1b[2J\n!') }}")
    assert "\x1b" not in info.value.what
    with pytest.raises(UsageError, match="at least one message"):
        render("x", [])
    with pytest.raises(UsageError, match="must be an object"):
        render("x", ["hi"])


@pytest.mark.parametrize(
    ("source", "line"),
    [("{{ 1 + }}", 1), ("a\n\n{% for x in y %}\n", 3), ("a\n{% nonsense %}", 2), ("{{ 'a'|nofilter }}", 1), ("\n{{ x", 2)],
)
def test_broken_syntax_names_the_line(source: str, line: int) -> None:
    with pytest.raises(CheckpointError, match=f"tiny is broken at line {line}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ a.b.c }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ messages + 1 }}",
        "{{ lipsum() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 1" + "0" * 5000 + " }}",
    ],
)
def test_failures_name_the_model(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template of tiny"):
        render(source)


def test_oversized_source_is_refused() -> None:
    with pytest.raises(CheckpointError, match="too large"):
        render("a" * 300_000)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''.__class__.__mro__[1].__subclasses__()",
        "messages[0]['__class__']",
        "''|attr('__class__')",
        "['']|map(attribute='__class__')|list",
        "['']|map('attr', '__class__')|list",
        "['']|groupby('__class__')",
        "cycler.__init__.__globals__",
        "namespace.__init__.__globals__",
        "raise_exception.__globals__",
        "self.__init__",
        "'{0.__class__.__mro__}'.format(1)",
        "'{a.__class__}'.format_map({'a': 1})",
        "('{0._' ~ '_class__}').format(1)",
        "('{0.__class__}'|safe).format(1)",
        "messages.append(1)",
        "messages[0].update(a=1)",
        "messages[0].pop('role')",
        "'a'.translate({97: 'b'})",
        "'a'.encode('idna')",
    ],
)
def test_the_sandbox_holds(expression: str) -> None:
    before = json.dumps(CHAT)
    with pytest.raises(CheckpointError, match="sandbox"):
        render("{{ " + expression + " }}")
    assert json.dumps(CHAT) == before


DOUBLE = "{% set ns = namespace(x=START, y=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) recursive %}{{ loop(range(100000)) if false }}{% for j in range(100000) if j %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% set x %}{% for i in range(100000) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
        "{% macro f() %}" + "a" * 100_000 + "{% endmacro %}{% for i in range(100000) %}{% set x = f() %}{% endfor %}",
        "{{ range(100000)|map('string')|map('center', 9000)|list }}",
        "{{ range(100000)|select('in', range(100000)|list)|list }}",
        "{{ dict.fromkeys(range(100000)|list, 'a' * 1000000) }}",
        DOUBLE.replace("START", "'aaaa'").replace("STEP", "ns.x ~ ns.x"),
        DOUBLE.replace("START", "'aaaa'").replace("STEP", "ns.x + ns.x"),
        DOUBLE.replace("START", "'aaaa'").replace("STEP", "[ns.x, ns.x]|join"),
        DOUBLE.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
        DOUBLE.replace("START", "[1]").replace("STEP", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
        DOUBLE.replace("START", "(1,)").replace("STEP", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
        DOUBLE.replace("START", "(1,)").replace("STEP", "(ns.x, ns.x)") + "{{ messages[0][ns.x] }}",
        DOUBLE.replace("START", "[1]").replace("STEP", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
        "{% set ns = namespace(l=[]) %}{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    ],
)
def test_endless_templates_are_stopped(source: str) -> None:
    with pytest.raises(CheckpointError, match="was stopped: it "):
        render(source, units=4_000_000)


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10 ** 10",
        "10000000000 * 'a'",
        "[1] * 10000000000",
        "[['a' * 100000] * 1000] * 1000",
        "2 ** 100000000",
        "-2 ** 99999 ** 9",
        "'%1000000000d'|format(1)",
        "'%1000000000d' % 1",
        "'%.1000000000f' % 1",
        "'%*d' % (1000000000, 1)",
        "'%-.*f' % (1000000000, 1)",
        "'%(a)099999d' % {'a': 1}",
        "('%(' ~ 'a' * 200 ~ ')99999d') % {'a' * 200: 1}",
        "('%(a)s' * 1000) % {'a': 'a' * 100000}",
        "'{:1000000000}'.format(1)",
        "'{:{}}'.format(1, 1000000000)",
        "'a'|center(1000000000)",
        "'a'.center(1000000000)",
        "'a'.encode('utf-8').zfill(1000000000)",
        "('\\t' * 10000).expandtabs(9999)",
        "('a' * 10000).replace('a', 'b' * 10000)",
        "('a' * 10000)|replace('a', 'b' * 10000)",
        "('a' * 4000).join('b' * 400000)",
        "('b' * 400000)|join('a' * 4000)",
        "('a\\n' * 10000)|indent(9000)",
        "messages|tojson(indent=1000000000)",
        "messages|tojson(separators=('a' * 100000, ':'))",
        "'abc'|batch(10000000000, 'x')|list",
        "'abc'|slice(10000000000)|list",
        "1.5|round(1000000000, 'ceil')",
        "('a b ' * 100000)|wordwrap(1)",
        "('1' * 10000000)|int",
        "(1).to_bytes(10000000000, 'big')",
        "strftime_now('%1000000000Y')",
    ],
)
def test_blow_ups_are_refused_before_they_happen(expression: str) -> None:
    with pytest.raises(CheckpointError, match="was stopped: it"):
        render("{{ " + expression + " }}")
    with pytest.raises(CheckpointError, match="was stopped: it"):
        render("{% set x = " + expression + " %}")


def test_time_limit() -> None:
    with pytest.raises(CheckpointError, match="takes too long"):
        render("{% for m in messages %}{{ m.role }}{% endfor %}", seconds=-1.0)


def test_a_stopped_template_does_not_harm_the_next_rendering() -> None:
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}x{% endfor %}{% endfor %}", model="m", budget_units=100_000)
    with pytest.raises(CheckpointError):
        template.render(CHAT, n=1000)
    assert template.render(CHAT, n=2) == "xxxx"


def test_long_chats_stay_far_below_the_limits() -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " * 500} for i in range(400)]
    source = (
        "{%- set ns = namespace(out='') %}{% for m in messages %}{% if 'x' in m.content or m.content.startswith('9') %}!{% endif %}"
        "{% set ns.out = ns.out ~ m.content.strip() %}{{ messages[loop.index0 - 1].content | trim }}{% endfor %}{{ ns.out }}"
    )
    assert render(source, chat) == oracle(source, chat, add_generation_prompt=True)
