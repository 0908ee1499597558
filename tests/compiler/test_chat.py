"""Chat templates render as transformers renders them, in a sandbox, with clear errors."""

from pathlib import Path
from typing import Any

import pytest
from tiny_llama import build, build_tokenizer
from transformers import PreTrainedTokenizerFast

import octavo
from octavo.compiler.chat import TEMPLATE_FILE, ChatTemplate, encode_chat, load_chat_template
from octavo.compiler.errors import ArtifactError, RequestError

# As SmolLM2-135M-Instruct's tokenizer carries it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What other families use: whitespace control, tokens, loop controls, tojson, generation, namespace.
BUSY = """
{%- set ns = namespace(found=false) %}
{{- bos_token }}
{%- if tools is not none %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'skipped' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.found = true %}
  {% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
  {% else %}
    {{ message | tojson }}
  {% endif %}
{%- endfor %}
{{ ns.found }} {{ strftime_now('%Y') | length }}
"""
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Is 1 < 2 & 'so on'? é"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "skipped", "content": "?"},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [SMOLLM2, BUSY], ids=["smollm2", "busy"])
@pytest.mark.parametrize("chat", [CHAT, CHAT[:1], [{"role": "system", "content": "Be brief."}, *CHAT[:1]]])
def test_equals_transformers(
    template: str, chat: list[dict[str, Any]], add_generation_prompt: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    theirs = tokenizer.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(chat, add_generation_prompt=add_generation_prompt) == theirs


def test_tools_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "description": "ä < b"}}]
    theirs = tokenizer.apply_chat_template(CHAT, chat_template=BUSY, tokenize=False, tools=tools)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(BUSY, tokens).render(CHAT, add_generation_prompt=False, tools=tools) == theirs


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", CHAT, "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, "unsafe|not safely callable"),
        ("{{ 1 + 'a' }}", CHAT, "does not take these messages"),
        ("x", [], "at least 1 message"),
        ("x", [{"content": "no role"}], "message 0: expected a mapping with a role"),
    ],
)
def test_errors_are_of_the_request(template: str, messages: list[Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ChatTemplate(template, {}).render(messages)


def test_a_broken_template_is_damage() -> None:
    with pytest.raises(ArtifactError, match=r"chat_template.jinja, line 2: expected a jinja template"):
        ChatTemplate("first\n{% if %}", {})


@pytest.fixture(scope="module")
def compiled() -> octavo.Compiled:
    return octavo.compile(build(), tokenizer=build_tokenizer(), verify="off")


def test_artifact_carries_its_template(compiled: octavo.Compiled, tokenizer: PreTrainedTokenizerFast) -> None:
    assert TEMPLATE_FILE in compiled.artifact.files
    template = load_chat_template(compiled.artifact)
    assert template is not None and template.tokens["bos_token"] == "<s>"
    theirs = tokenizer.apply_chat_template(
        CHAT[:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert compiled.chat_prompt(CHAT[:1]) == theirs
    answer = compiled.chat(CHAT[:1], octavo.SamplingParams(max_tokens=3))
    assert list(answer.prompt_token_ids) == theirs and len(answer.token_ids) <= 3


def test_config_holds_a_template_too(compiled: octavo.Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    named = '[{"name": "rag", "template": "r"}, {"name": "default", "template": "d{{ eos_token }}"}]'
    config = f'{{"chat_template": {named}, "eos_token": {{"content": "END"}}, "pad_token": null}}'.encode()
    files = {"tokenizer/tokenizer_config.json": config}

    class Held:
        path = Path("held")

        def __init__(self, content: dict[str, bytes]) -> None:
            self.files = content

        def read(self, name: str) -> bytes:
            return self.files[name]

    held: Any = Held(files)
    template = load_chat_template(held)
    assert template is not None and template.render(CHAT) == "dEND"
    nothing: Any = Held({})
    assert load_chat_template(nothing) is None
    with pytest.raises(RequestError, match="expected an artifact with a chat template, got none in held"):
        encode_chat(nothing, compiled.tokenizer, CHAT)
    broken: Any = Held({"tokenizer/tokenizer_config.json": b"{"})
    with pytest.raises(ArtifactError, match="expected JSON"):
        load_chat_template(broken)
