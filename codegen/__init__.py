"""From kernel ops to binaries: select, render, build, emit."""
