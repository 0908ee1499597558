"""`octavo run`: prompts -> text as it comes. Loads no compiler where the artifact's program can be used."""

import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.compiler.chat import encode_chat, load_chat_template
from octavo.compiler.commands.live_stats import LiveStats
from octavo.compiler.commands.show_speculation import speculation
from octavo.compiler.compiled import Compiled, load
from octavo.compiler.errors import OptionError, RequestError
from octavo.compiler.progress import progress_bars
from octavo.runtime.distributed_engine import DistributedEngine
from octavo.runtime.engine import Engine
from octavo.runtime.request import Token
from octavo.runtime.sampling_params import SamplingParams, Structured
from octavo.runtime.speculative.options import Speculate

Prompt = str | list[int]
Message = dict[str, str]


@dataclass(frozen=True)
class Choices:
    """What the user chose. prompt None: standard input, or a dialogue where that is a terminal.

    dispatcher  of an artifact for several ranks
    speculate   draft tokens and verify several in a step
    began       seconds of the clock when the command did
    """

    artifact: Path
    prompt: str | None
    prompts_file: Path | None
    chat: bool | None
    system: str | None
    params: SamplingParams
    stats: bool
    dispatcher: str | None = None
    speculate: Speculate | None = None
    began: float = field(default_factory=time.perf_counter)


def read_structured(json_schema: Path | None, regex: str | None) -> Structured | None:
    """What the answer must be, by the schema in a file or by an expression."""
    if json_schema is not None and regex is not None:
        raise OptionError("regex: expected --json-schema or --regex, got both")
    if regex is not None:
        return Structured.regex(regex)
    if json_schema is None:
        return None
    try:
        return Structured.json_schema(json_schema.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"json-schema: {json_schema} cannot be read: {error}") from None


def run(choices: Choices) -> None:
    """Answer the prompt, the prompts of a file, or what a user types."""
    if choices.prompt is not None and choices.prompts_file is not None:
        raise OptionError("prompt: expected PROMPT or --prompts-file, got both")
    compiled = load(choices.artifact)
    if compiled.artifact.program.mesh.world == 1:
        if choices.dispatcher is not None:
            raise OptionError(
                f"dispatcher: expected an artifact for several ranks, got {choices.artifact}; leave it out"
            )
        answer(choices, Session(choices, compiled, compiled.engine(speculate=choices.speculate)))
        return
    if choices.speculate is not None:
        raise OptionError(
            f"speculate: expected an artifact for one rank, got {compiled.artifact.program.mesh}; leave it out"
        )
    engine = compiled.distributed_engine(dispatcher=choices.dispatcher)
    with engine.explaining_termination():
        if engine.rank != 0:
            engine.serve()
            return
        try:
            answer(choices, Session(choices, compiled, engine))
        except (OptionError, RequestError):
            engine.close()  # the other ranks did nothing wrong
            raise
        engine.close()


def answer(choices: Choices, session: "Session") -> None:
    """As `run`, once all is loaded."""
    try:
        if choices.prompts_file is not None:
            session.answer_file(choices.prompts_file)
        elif choices.prompt is None and sys.stdin.isatty():
            if choices.params.n > 1:
                raise OptionError(
                    f"n: expected 1 answer in a dialogue, got {choices.params.n}; give a PROMPT"
                )
            session.talk()
        else:
            is_piped = choices.prompt in (None, "-")
            session.answer(sys.stdin.read().removesuffix("\n") if is_piped else str(choices.prompt))
    finally:
        if choices.stats:
            print(session.stats(), file=sys.stderr)
            console = Console(stderr=True, highlight=False)
            console.print(session.live.summary(), soft_wrap=True)
            if session.speculator is not None:
                console.print(speculation(session.speculator, session.figures.seconds), soft_wrap=True)


class Session:
    """A loaded artifact, how prompts become token ids, and what was measured.

    engine  of this process, or of all ranks; figures are of this one's part
    """

    def __init__(self, choices: Choices, compiled: Compiled, engine: Engine | DistributedEngine) -> None:
        self.artifact, self.tokenizer = compiled.artifact, compiled.tokenizer
        self.is_chat = self._is_chat(choices)
        self.system = [{"role": "system", "content": choices.system}] if choices.system is not None else []
        self.params = choices.params
        self.engine = engine
        own = engine if isinstance(engine, Engine) else engine.engine
        assert own is not None, "rank 0 leads"
        self.figures = own.stats
        self.speculator = own.speculator
        self.live = LiveStats(own, choices.stats)
        self.shows_bars = False if choices.stats else None  # figures take their place
        self.load_s = time.perf_counter() - choices.began
        self.prefill_s = self.decode_s = 0.0
        self.num_decoded = 0

    def _is_chat(self, choices: Choices) -> bool:
        """As the user says; otherwise if there is a template."""
        has_template = self.tokenizer is not None and load_chat_template(self.artifact) is not None
        if not has_template and (choices.chat or choices.system is not None):
            raise OptionError(
                f"chat: expected an artifact with a chat template, got {choices.artifact}; use --raw"
            )
        if choices.chat is False and choices.system is not None:
            raise OptionError("system: expected a chat, got --raw, which sends the prompt alone")
        return has_template if choices.chat is None else choices.chat

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Token ids of a conversation; without a chat the last message's text, or the ids written in it."""
        text = messages[-1]["content"]
        if not text.strip():
            raise RequestError("prompt: expected some text, as an argument or on standard input, got none")
        if self.is_chat:
            return encode_chat(self.artifact, self.tokenizer, [*self.system, *messages])
        if self.tokenizer is not None:
            return text
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise RequestError(
                f"prompt: expected token ids such as '12 7 99', as there is no tokenizer, got {text!r}"
            ) from None

    def answer(self, text: str) -> None:
        """One prompt. What was generated stays if it is interrupted; several answers come one after another."""
        if self.params.n > 1:
            self._answer_several(text)
            return
        for _ in self._printed([{"role": "user", "content": text}]):
            pass

    def _answer_several(self, text: str) -> None:
        record = self._record(text)
        with self.live, progress_bars(self.shows_bars) as bars:
            report, num_tokens = bars("generate"), 0
            for token in self._stream([self.prompt([{"role": "user", "content": text}])]):
                _append(record, token)
                num_tokens += 1
                report("tokens", num_tokens, 0)
        for number, answer in enumerate(record["answers"], 1):
            shown = answer["text"] if self.tokenizer is not None else " ".join(map(str, answer["token_ids"]))
            print(f"[{number}/{self.params.n}] {shown}")

    def _record(self, line: str) -> dict[str, Any]:
        """What becomes a line of JSON: an answer's fields beside its prompt, or a list of answers."""
        if self.params.n == 1:
            return {"prompt": line, **_empty()}
        return {"prompt": line, "answers": [_empty() for _ in range(self.params.n)]}

    def talk(self) -> None:
        """Prompts from a terminal until it ends. In a chat the model sees what was said before."""
        with suppress(ImportError):
            import_module("readline")  # gives input() a history and keys that edit
        print("Ctrl-C ends an answer, Ctrl-D the dialogue.", file=sys.stderr)
        history: list[Message] = []
        while True:
            try:
                text = input("> ")
            except EOFError:
                print()
                return
            messages = [*history, {"role": "user", "content": text}] if text.strip() else []
            answer: list[str] = []
            try:
                answer.extend(self._printed(messages) if messages else ())
            except KeyboardInterrupt:
                pass
            except RequestError as error:
                print(f"octavo: {error}", file=sys.stderr)
                continue
            if messages and self.is_chat:
                history = [*messages, {"role": "assistant", "content": "".join(answer)}]

    def answer_file(self, path: Path) -> None:
        """Every line is a prompt, all in one batch; one JSON object a line comes out, in their order."""
        try:
            lines = [line for line in path.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"prompts-file: {path} cannot be read: {error}") from None
        if not lines:
            raise OptionError(f"prompts-file: expected a prompt a line, got none in {path}")
        prompts = [self.prompt([{"role": "user", "content": line}]) for line in lines]
        records = [self._record(line) for line in lines]
        with self.live, progress_bars(self.shows_bars) as bars:
            report, num_done = bars("generate"), 0
            for token in self._stream(prompts):
                _append(records[token.index], token)
                num_done += token.finish_reason is not None
                report("answers done", num_done, len(prompts) * self.params.n)
        for record in records:
            print(json.dumps(record, ensure_ascii=False))

    def _printed(self, messages: Sequence[Message]) -> Iterator[str]:
        """The pieces of an answer, each on the screen before it is yielded."""
        with self.live, closing(self._stream([self.prompt(messages)])) as tokens:
            is_begun = False
            try:
                for token in tokens:
                    is_begun = True
                    piece = token.text if self.tokenizer is not None else f"{token.token_id} "
                    self.live.write(piece)
                    yield piece
            finally:
                if is_begun:
                    self.live.write("\n")

    def _stream(self, prompts: list[Prompt]) -> Generator[Token, None, None]:
        began = latest = time.perf_counter()
        tokens = self.engine.stream(prompts, self.params)  # ends its requests when it is dropped
        for token in tokens:
            now = time.perf_counter()
            if latest == began:
                self.prefill_s += now - began
            else:
                self.decode_s, self.num_decoded = self.decode_s + now - latest, self.num_decoded + 1
            latest = now
            self.live.tick()
            yield token

    def stats(self) -> str:
        """Times of this run. tokens/s counts what came after an answer's first token, of a whole batch."""
        num_prompt, num_generated = self.figures.prompt_tokens, self.figures.generated_tokens
        rate = f", {self.num_decoded / self.decode_s:.1f} tokens/s" if self.num_decoded else ""
        return (
            f"load {self.load_s:.2f} s; {num_prompt} prompt tokens, first token after "
            f"{self.prefill_s:.2f} s; {num_generated} tokens{rate}"
        )


def _empty() -> dict[str, Any]:
    return {"text": "", "token_ids": []}


def _append(record: dict[str, Any], token: Token) -> None:
    record = record["answers"][token.branch] if "answers" in record else record
    record["text"] += token.text
    if token.token_id is not None:
        record["token_ids"].append(token.token_id)
    if token.finish_reason is not None:
        record["finish_reason"] = token.finish_reason
