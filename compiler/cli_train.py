"""The command of `octavo` that trains draft heads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import Model, Trace, exit_codes, starting


class Kinds(StrEnum):
    eagle = "eagle"
    medusa = "medusa"


def train_draft(
    model: Model,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The head to write; not there yet.")
    ],
    kind: Annotated[
        Kinds, typer.Option(help="eagle: a layer that drafts on from itself; medusa: a head for each token.")
    ] = Kinds.eagle,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Of answers, hidden states and training together.")
    ] = 20.0,
    tokens: Annotated[int, typer.Option(min=1, help="Of answers to learn from, at most.")] = 200_000,
    draft_vocab: Annotated[
        int, typer.Option(min=2, help="Tokens that the head can guess: those that answers use most.")
    ] = 4096,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A prompt a line. Default: 189 that come with Octavo.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupt left.")] = False,
    traceback: Trace = False,
) -> None:
    """Train a draft head on MODEL's own answers, for `octavo run --speculate`; print DIR.

    Example: octavo train-draft demo -o eagle; octavo compile demo --features -1; octavo compile eagle --draft-of demo

    Example: octavo train-draft DIR -o DIR-medusa --kind medusa --prompts questions.txt --minutes 60

    MODEL answers the prompts, as a chat where it has a template; one prompt of ten is held out. The head learns the
    distributions that MODEL's hidden states make, and reads the same hidden states when it drafts. How many of its
    guesses are right on the held-out answers is printed in the end, by how far ahead they lie.

    An interrupt loses nothing: DIR.training holds all that was done, and --resume goes on from there.
    """
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.train_draft import Choices, run
    with exit_codes(traceback):
        run(Choices(model, output, kind.value, minutes, tokens, draft_vocab, prompts, resume))
