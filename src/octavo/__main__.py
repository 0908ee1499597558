"""`python -m octavo` is the command `octavo`; so torchrun starts it: `torchrun --nproc-per-node 4 -m octavo run DIR`."""

from octavo.compiler.cli import main

if __name__ == "__main__":
    main()
