"""Text to token ids and back. The only place that imports the optional `tokenizers` library."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, MissingDependencyError

TOKENIZER_FILE = "tokenizer/tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# An incomplete UTF-8 character is at most 3 bytes, and each decodes to at most one replacement character.
_MAX_INCOMPLETE = 3
_MAX_WINDOW = 64


class Tokenizer(Protocol):
    """What the engine needs. decode leaves out special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class FileTokenizer:
    """A Hugging Face tokenizer.json. Its post-processor decides about a begin-of-sequence token."""

    def __init__(self, text: str) -> None:
        try:
            library: Any = import_module("tokenizers")
        except ImportError:
            raise MissingDependencyError(
                "tokenizer: expected the library 'tokenizers', which is not installed; "
                "pip install 'octavo[serve]', or work with token ids only (use_tokenizer=False)"
            ) from None
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(f"{TOKENIZER_FILE}: expected a tokenizer that loads, got: {error}") from None
        # Settings left over from training would cut prompts, or fill them up, in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: False for a text that names its special tokens itself, as chats do."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(artifact: Artifact) -> FileTokenizer | None:
    """The artifact's tokenizer, or None if it holds none."""
    if TOKENIZER_FILE not in artifact.files:
        return None
    return FileTokenizer(artifact.read(TOKENIZER_FILE).decode("utf-8", errors="replace"))


class IncrementalDecoder:
    """Text piece by piece as tokens arrive; the pieces joined are what decoding all tokens at once gives.

    A piece never ends within a character: bytes of an unfinished one are kept until it is complete or
    `flush`. Only the newest tokens are decoded again, with those of the last piece before them, as some
    decoders treat the first token of a text differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens that may still matter
        self._num_old = 0  # of these, tokens whose text is out
        self._num_shown = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = _without_incomplete(text)
        piece = stable[self._num_shown :]
        self._num_shown = max(self._num_shown, len(stable))
        if stable == text and piece:
            self._slide(self._num_old)
            self._num_old = len(self._window)
        elif len(self._window) > _MAX_WINDOW:  # bytes that never become text: keep the work per token bounded
            self._slide(len(self._window) - _MAX_WINDOW // 2)
        return piece

    def _slide(self, count: int) -> None:
        del self._window[:count]
        self._num_old = max(self._num_old - count, 0)
        self._num_shown = len(_without_incomplete(self._decode(self._window)))

    def flush(self) -> str:
        """What was kept back, with replacement characters for what never became a character."""
        text = self._decode(self._window)
        piece, self._num_shown = text[self._num_shown :], len(text)
        return piece


def _without_incomplete(text: str) -> str:
    kept = text.rstrip(REPLACEMENT)
    return text[: max(len(kept), len(text) - _MAX_INCOMPLETE)]


class StopFinder:
    """Cuts text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was completed (nothing after it is shown)."""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:  # the one completed first, however the text was cut into pieces
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, as no stop string can follow any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
