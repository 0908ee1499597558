"""Graph rewrites, one pass per file; the order is in `octavo.compiler.pipeline`."""
