"""Capture, the `octavo::` dialect, proofs, the pipeline and the artifact. Import submodules directly."""
