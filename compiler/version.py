"""The version of Octavo, as kernels and artifacts record it. pyproject.toml states the same; a test compares."""

VERSION = "0.1.0"
