"""An artifact that was opened: generate text, save it, read its report. Loads no torch unless it must."""

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from octavo.compiler.artifact import Artifact
from octavo.compiler.chat import Message, encode_chat
from octavo.compiler.errors import ToolchainError
from octavo.compiler.report import Report
from octavo.runtime.distributed_engine import DistributedEngine
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.open_ranks import TIMEOUT_S, open_ranks
from octavo.runtime.open_runner import is_for_gpu, open_runner
from octavo.runtime.request import Completion, Token
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.open_speculator import open_speculator
from octavo.runtime.speculative.options import Speculate
from octavo.runtime.tokenizer import FileTokenizer, load_tokenizer

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


def load(path: Path | str) -> "Compiled":
    """Open an artifact. Every file is checked; nothing is compiled. Raises ArtifactError."""
    return Compiled(Artifact.open(path))


class Compiled:
    """An artifact that was opened: generate text with it, save it, read its report."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._engine: Engine | DistributedEngine | None = None
        self.seconds: dict[str, float] = {}  # of each phase of the compilation that made it, if one did

    @property
    def path(self) -> Path:
        return self.artifact.path

    @functools.cached_property
    def tokenizer(self) -> FileTokenizer | None:
        """The artifact's own, or None."""
        return load_tokenizer(self.artifact)

    def runner(
        self, num_pages: int | None = None, num_threads: int | None = None, **gpu_options: Any
    ) -> ModelRunner:
        """What runs a step: the GPU's kernels or the host program, or the eager references where it cannot be built.

        gpu_options  those of `open_runner`: max_requests, max_batch_tokens, graphs
        An artifact for several ranks runs all of them here, one after another: to look at, not to be fast. See
        `distributed_engine` for ranks that are processes.
        """
        mesh = self.artifact.program.mesh
        if mesh.world > 1 and not is_for_gpu(self.artifact):
            simulated: Any = import_module(
                "octavo.compiler.simulated_runner"
            )  # needs torch, as collectives do
            ranks: ModelRunner = simulated.SimulatedRunner(self.artifact, num_pages, num_threads)
            return ranks
        try:
            return open_runner(self.artifact, num_pages, num_threads, **gpu_options)
        except ToolchainError as error:
            warnings.warn(f"{error}; running the eager references instead, slowly", stacklevel=2)
            eager: Any = import_module("octavo.compiler.eager_runner")  # needs torch, which serving does not
            runner: ModelRunner = eager.EagerRunner(self.artifact, num_pages)
            return runner

    def engine(
        self, *, num_pages: int | None = None, num_host_pages: int = 0, num_threads: int | None = None,
        max_requests: int = 64, max_batch_tokens: int | None = None, chunked_prefill: bool = True,
        prefix_caching: bool = True, seed: int | None = None, speculate: Speculate | None = None,
    ) -> Engine:  # fmt: skip
        """A serving engine of its own, with the page pool and limits given; it drafts tokens as `speculate` says."""
        runner = self.runner(
            num_pages, num_threads, num_host_pages=num_host_pages, max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
        )  # fmt: skip
        return Engine(
            runner, self.artifact.model, self.tokenizer, max_requests=max_requests, max_batch_tokens=max_batch_tokens,
            chunked_prefill=chunked_prefill, prefix_caching=prefix_caching, seed=seed,
            speculator=None if speculate is None else open_speculator(speculate, self.artifact, runner, num_threads),
        )  # fmt: skip

    def distributed_engine(
        self, group: Any = None, *, dispatcher: str | None = None, timeout_s: float = TIMEOUT_S,
        num_pages: int | None = None, num_host_pages: int = 0, num_threads: int | None = None,
        max_requests: int = 64, max_batch_tokens: int | None = None, chunked_prefill: bool = True,
        prefix_caching: bool = True, seed: int | None = None,
    ) -> DistributedEngine:  # fmt: skip
        """This rank's part of an engine over all ranks of the artifact. Each calls it, and then what rank 0 calls.

        group       a torch.distributed ProcessGroup of as many processes; None: those that torchrun started
        dispatcher  how tokens travel to experts: "all_to_all" (the default), "padded" (no size depends on where they
                    go) or "all_gather"; results are equal
        timeout_s   longest that a rank waits for another in a step; a lost one is named in a RankError
        """

        def make_engine(runner: ModelRunner) -> Engine:
            return Engine(
                runner, self.artifact.model, self.tokenizer, max_requests=max_requests,
                max_batch_tokens=max_batch_tokens, chunked_prefill=chunked_prefill,
                prefix_caching=prefix_caching, seed=seed,
            )  # fmt: skip

        return open_ranks(
            self.artifact, make_engine, group=group, dispatcher=dispatcher, timeout_s=timeout_s,
            num_pages=num_pages, num_threads=num_threads, num_host_pages=num_host_pages,
        )  # fmt: skip

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answers in the order of the prompts (text or token ids). Greedy unless `params` say otherwise.

        Under torchrun, an artifact for several ranks runs on these: every rank calls it, with the prompts of rank 0.
        """
        return self._own_engine().generate(prompts, params)

    def stream(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Token]:
        """Tokens as they come; closing the iterator ends its requests and frees their pages."""
        return self._own_engine().stream(prompts, params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The answer to a conversation ({"role": ..., "content": ...}), through the model's chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation. variables: what else the template reads. Raises RequestError."""
        return encode_chat(self.artifact, self.tokenizer, messages, **variables)

    def _own_engine(self) -> Engine | DistributedEngine:
        if self._engine is None:
            on_ranks = self.artifact.program.mesh.world > 1 and "TORCHELASTIC_RUN_ID" in os.environ
            self._engine = self.distributed_engine() if on_ranks else self.engine()
        return self._engine

    def save(self, path: Path | str) -> Path:
        """Copy the artifact to a directory that does not exist yet, or holds an artifact."""
        final = Path(path)
        if final.exists():
            Artifact.open(final)  # anything but an artifact is refused, and stays
            if final.resolve() == self.path.resolve():
                return final
            shutil.rmtree(final)
        shutil.copytree(self.path, final)
        return final

    def export_checkpoint(
        self, path: Path | str, source: Any, layout: Literal["modelopt", "compressed-tensors"] = "modelopt"
    ) -> Path:
        """Write the quantised model as a Hugging Face directory that other engines load: codes and scales as they are.

        path    of the directory, which must not be there
        source  the directory that the model was loaded from, or the model itself: what is not quantised comes from it
        Raises CheckpointError, which names the tensor, for what the layout has no words for. Outer scales are those of
        the artifact in "modelopt"; "compressed-tensors" holds their reciprocals, which may be off in the last bit.
        """
        # It needs torch, which serving does not.
        export: Any = import_module("octavo.compiler.checkpoints.export")
        with tempfile.TemporaryDirectory() as folder:
            if hasattr(source, "save_pretrained"):
                source.save_pretrained(folder)
                source = folder
            written: Path = export.export_checkpoint(self.artifact, Path(source), Path(path), layout)
        return written

    def report(self) -> Report:
        """Passes with their proofs, kernels with their evidence, memory and times."""
        return Report.of(self.artifact)
