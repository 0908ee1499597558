"""Serves artifacts: requests, pages, scheduling, sampling. numpy only; import submodules directly."""
