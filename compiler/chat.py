"""Chat messages -> the prompt that a model was trained on, by the template that its tokenizer carries.

Templates are foreign code: they run in jinja2's sandbox, with the functions that Hugging Face gives them.
Source: transformers, utils/chat_template_utils.py.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, RequestError
from octavo.runtime.tokenizer import FileTokenizer

TEMPLATE_FILE = "tokenizer/chat_template.jinja"
CONFIG_FILE = "tokenizer/tokenizer_config.json"

Message = Mapping[str, Any]


class ChatTemplate:
    """A template and the special tokens that it may name (bos_token, eos_token, ...)."""

    def __init__(self, text: str, tokens: Mapping[str, str], where: str = TEMPLATE_FILE) -> None:
        self.tokens = dict(tokens)
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            place = f"{where}, line {error.lineno}"
            raise ArtifactError(f"{place}: expected a jinja template, got: {error}") from None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt as text, special tokens written out: encode it without adding any.

        messages   {"role": "user", "content": "..."}, oldest first
        variables  what else the template reads (tools, documents, enable_thinking, ...)
        Raises RequestError for messages that the template does not take.
        """
        if not messages:
            raise RequestError("chat: expected at least 1 message, got none")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise RequestError(f"chat: message {index}: expected a mapping with a role, got {message!r}")
        given = {"tools": None, "documents": None, **self.tokens, **variables}
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **given
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"chat: the model's template does not take these messages: {error}") from None


def load_chat_template(artifact: Artifact) -> ChatTemplate | None:
    """The artifact's chat template, or None if its tokenizer has none. ArtifactError if it is broken."""
    config = _config(artifact)
    named = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
    tokens = {name: token for name, token in named.items() if token}
    if TEMPLATE_FILE in artifact.files:
        return ChatTemplate(artifact.read(TEMPLATE_FILE).decode("utf-8", errors="replace"), tokens)
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}.get("default")
    return ChatTemplate(text, tokens, CONFIG_FILE) if isinstance(text, str) else None


def encode_chat(
    artifact: Artifact, tokenizer: FileTokenizer | None, messages: Sequence[Message], **variables: Any
) -> list[int]:
    """Token ids of a conversation. Raises RequestError without a tokenizer or a template."""
    template = load_chat_template(artifact)
    if tokenizer is None or template is None:
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise RequestError(
            f"chat: expected an artifact with a {missing}, got none in {artifact.path}; give a prompt"
        )
    return tokenizer.encode(template.render(messages, **variables), add_special_tokens=False)


def _config(artifact: Artifact) -> dict[str, Any]:
    if CONFIG_FILE not in artifact.files:
        return {}
    try:
        config = json.loads(artifact.read(CONFIG_FILE))
    except ValueError as error:
        raise ArtifactError(f"{artifact.path}/{CONFIG_FILE}: expected JSON, got: {error}") from None
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str:
    """A special token is written as text, or as an object that holds it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
