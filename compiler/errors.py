"""Every exception class of Octavo. A leaf: imports nothing of ours."""


class OctavoError(Exception):
    """Base of all errors that a user can meet."""


class OptionError(OctavoError):
    """An option or a target is not one that exists, or two options exclude each other."""


class CaptureError(OctavoError):
    """The model could not be captured as a graph."""


class IllegalGraphError(OctavoError):
    """A graph holds an op, type or shape that its stage does not allow."""


class PassError(OctavoError):
    """A pass failed: a site was missed, or a rewrite was not proven equal."""


class CodegenError(OctavoError):
    """No kernel exists for an op, or a kernel did not build within its limits."""


class ToolchainError(CodegenError):
    """A compiler that a target needs is missing or broken on this machine."""


class ArtifactError(OctavoError):
    """An artifact is damaged, foreign or of another version."""


class CheckpointError(OctavoError):
    """A checkpoint's files, scales or configuration are not what its format says."""


class RequestError(OctavoError):
    """A request can never be served as asked (empty prompt, too long, bad sampling parameters)."""


class MissingDependencyError(OctavoError):
    """An optional library that a feature needs is not installed."""


class ExecutionError(OctavoError):
    """A program failed while it ran, or gave logits that are not numbers."""


class RankError(ExecutionError):
    """Another rank is gone, stopped, or ended with an error, which the message names."""


class OutOfPages(OctavoError):
    """The page pool cannot serve an allocation now. Internal: the scheduler preempts or waits."""
