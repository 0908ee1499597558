"""Training draft heads on what their target answers."""
