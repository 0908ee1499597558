"""Artifact -> the runner that its files are for: this machine's processor, or a GPU."""

from octavo.compiler.artifact import Artifact
from octavo.runtime.cuda_runner import DEFAULT_MAX_REQUESTS, CudaRunner
from octavo.runtime.model_runner import ModelRunner, NativeRunner


def is_for_gpu(artifact: Artifact) -> bool:
    """Whether the artifact holds cubins."""
    return any(name.startswith("kernels/") and name.endswith(".cubin") for name in artifact.files)


def open_runner(
    artifact: Artifact, num_pages: int | None = None, num_threads: int | None = None, *,
    num_host_pages: int = 0, max_requests: int = DEFAULT_MAX_REQUESTS, max_batch_tokens: int | None = None,
    graphs: bool = True,
) -> ModelRunner:  # fmt: skip
    """A runner for the artifact. num_threads is of a cpu's, the options behind num_host_pages are of a GPU's.

    Raises MissingDependencyError without a GPU or its driver, ArtifactError if the artifact is for another GPU,
    ToolchainError if a cpu's program has to be built and no compiler is here.
    """
    if not is_for_gpu(artifact):
        return NativeRunner(artifact, num_pages, num_threads, num_host_pages)
    return CudaRunner(
        artifact, num_pages, num_host_pages=num_host_pages, max_requests=max_requests,
        max_batch_tokens=max_batch_tokens, graphs=graphs,
    )  # fmt: skip
