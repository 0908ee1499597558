"""What the target is asked: the user's prompts, or those that come with Octavo, and which are held out."""

from importlib.resources import files
from pathlib import Path

from octavo.compiler.chat import encode_chat, load_chat_template
from octavo.compiler.compiled import Compiled
from octavo.compiler.errors import OptionError

# Of so many prompts one is never trained on.
HELD_OUT_STRIDE = 10


def default_prompts() -> list[str]:
    """About 190 short questions and tasks, as people put them to an assistant."""
    text = (files("octavo.compiler") / "draft_prompts" / "prompts.txt").read_text(encoding="utf-8")
    return text.splitlines()


def read_prompts(path: Path | None) -> list[str]:
    """A prompt a line. Raises OptionError for a file that cannot be read or has fewer than two."""
    if path is None:
        return default_prompts()
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompts: {path} cannot be read: {error}") from None
    if len(prompts) < 2:
        raise OptionError(f"prompts: expected 2 lines or more in {path}, one is held out; got {len(prompts)}")
    return prompts


def encode_prompts(compiled: Compiled, prompts: list[str]) -> list[list[int]]:
    """Token ids: of a chat where the model has a template, of the text itself, or the ids written in it."""
    tokenizer = compiled.tokenizer
    if tokenizer is not None and load_chat_template(compiled.artifact) is not None:
        return [
            encode_chat(compiled.artifact, tokenizer, [{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
    if tokenizer is not None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    try:
        return [[int(word) for word in prompt.replace(",", " ").split()] for prompt in prompts]
    except ValueError:
        raise OptionError(
            "prompts: expected token ids such as '12 7 99' on each line, as the model has no tokenizer"
        ) from None


def is_held_out(prompt: int) -> bool:
    return prompt % HELD_OUT_STRIDE == 0
