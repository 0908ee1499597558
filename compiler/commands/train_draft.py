"""`octavo train-draft`: a model -> draft heads that guess what it says, as a checkpoint of their own."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn

from octavo.compiler import api
from octavo.compiler.commands.compile import load
from octavo.compiler.compiled import Compiled
from octavo.compiler.draft_training.answers import generate_answers, jobs
from octavo.compiler.draft_training.examples import Example
from octavo.compiler.draft_training.held_out import Acceptance, measure
from octavo.compiler.draft_training.prompts import encode_prompts, is_held_out, read_prompts
from octavo.compiler.draft_training.teacher import compute_features
from octavo.compiler.draft_training.train_heads import RECIPES, Kind, frequent_ids, loss_of, new_head
from octavo.compiler.draft_training.trainer import Trainer
from octavo.compiler.draft_training.work import WorkDirectory
from octavo.compiler.drafts.checkpoints import save_draft_head
from octavo.compiler.drafts.head import logits_of
from octavo.compiler.errors import OptionError
from octavo.compiler.models import LoadedModel
from octavo.compiler.progress import Bars, progress_bars
from octavo.compiler.report import plain_table, seconds_line, titled
from octavo.runtime.engine import Engine

# Of the time, at most this goes to the target's answers.
_ANSWER_SHARE = 0.4
_MAX_REQUESTS = 32

# Tokens that are drafted from each held-out one.
_DEPTH = 5


@dataclass(frozen=True)
class Choices:
    """What the user chose. minutes: of all work but loading and compiling; num_tokens: of answers, at most."""

    model: str
    output: Path
    kind: Kind
    minutes: float
    num_tokens: int
    draft_vocab: int
    prompts: Path | None
    resume: bool


def run(choices: Choices) -> None:
    """Train; how good the head is goes to standard error, its directory to standard output."""
    if os.path.lexists(choices.output):
        raise OptionError(
            f"output: expected no file at {choices.output}, got one; choose another or remove it"
        )
    prompts = read_prompts(choices.prompts)
    facts = {
        "model": choices.model, "kind": choices.kind, "draft_vocab": choices.draft_vocab, "prompts": prompts,
    }  # fmt: skip
    work = WorkDirectory(choices.output.with_name(choices.output.name + ".training"), facts, choices.resume)
    try:
        loaded, load_s = load(choices.model)
        with progress_bars() as bars:
            acceptance, num_tokens = train(choices, loaded, prompts, work, bars)
    except KeyboardInterrupt:
        print(f"octavo: {work.path} holds what was done; --resume goes on", file=sys.stderr)
        raise
    work.remove()
    show(acceptance, num_tokens, {"load": load_s, **bars.seconds})
    print(choices.output)


def train(
    choices: Choices, loaded: LoadedModel, prompts: list[str], work: WorkDirectory, bars: Bars
) -> tuple[Acceptance, int]:
    """How good the saved head is, and of how many tokens it learnt."""
    dtype = logits_of(loaded.model).weight.dtype
    # Not model.float(): transformers refuses that for what it read from a .gguf file, which is plain numbers by then.
    model = nn.Module.float(loaded.model)
    compiled = _compile(loaded, bars)
    encoded = encode_prompts(compiled, prompts)
    total = choices.minutes * 60
    _answer(compiled, encoded, work, choices.num_tokens, total * _ANSWER_SHARE, bars)
    width = logits_of(model).in_features
    compute_features(model, work, width, bars("states"))
    known, held_out = split(work, width, len(prompts))
    vocab_size = logits_of(model).out_features
    ids = frequent_ids(known, compiled.artifact.model.eos_token_ids, choices.draft_vocab, vocab_size)
    head = new_head(choices.kind, model, ids, known)
    spent = work.seconds.get("answers", 0.0) + work.seconds.get("features", 0.0)
    trainer = Trainer(head.trained_parameters(), RECIPES[choices.kind], work)
    trainer.run(known, loss_of(head, vocab_size), total - spent, bars("train"))
    bars("measure")("held-out answers", 0, 1)
    recipe = RECIPES[choices.kind]
    depth = _DEPTH if choices.kind == "eagle" else getattr(head, "num_heads", 1)
    acceptance = measure(head.eval(), held_out, depth, recipe.window, recipe.size)
    save_draft_head(head.to(dtype), choices.output)
    return acceptance, sum(len(one.token_ids) - one.prompt_len for one in known)


def _compile(loaded: LoadedModel, bars: Bars) -> Compiled:
    """Answers need no proofs: what the head guesses is measured in the end."""
    bars("compile")("the target", 0, 1)
    return api.compile(loaded.model, tokenizer=loaded.tokenizer, verify="off", progress=False)


def _answer(
    compiled: Compiled,
    prompts: Sequence[Sequence[int]],
    work: WorkDirectory,
    num_tokens: int,
    seconds: float,
    bars: Bars,
) -> None:
    seconds -= work.seconds.get("answers", 0.0)
    engine = Engine.from_artifact(compiled.artifact, max_requests=_MAX_REQUESTS, use_tokenizer=False, seed=0)
    generate_answers(engine, prompts, work, num_tokens, seconds, bars("answers"))


def split(work: WorkDirectory, width: int, num_prompts: int) -> tuple[list[Example], list[Example]]:
    """(to train on, held out). Raises OptionError where one of them is empty."""
    asked = jobs(num_prompts)
    known: list[Example] = []
    held_out: list[Example] = []
    for answer, example in work.examples(width):
        (held_out if is_held_out(asked[answer.job].prompt) else known).append(example)
    if not known or not held_out:
        raise OptionError(
            f"minutes: expected time for answers to train on and to measure with, got {len(known)} and "
            f"{len(held_out)}; allow more"
        )
    return known, held_out


def show(acceptance: Acceptance, num_tokens: int, seconds: dict[str, float]) -> None:
    table = plain_table("token ahead", "right, if those before were")
    for place, rate in enumerate(acceptance.rates, 1):
        table.add_row(str(place), f"{rate:.3f}")
    title = f"greedy drafts from {acceptance.rows} tokens of held-out answers: {acceptance.mean_accepted:.2f} accepted"
    Console(stderr=True, highlight=False).print(titled(title, table))
    print(f"\nlearnt of: {num_tokens} tokens", file=sys.stderr)
    print(f"times:     {seconds_line(seconds)}", file=sys.stderr)
