"""`python -m octavo` is the command `octavo`, and so is what `torchrun -m octavo` starts."""

from octavo.compiler.cli import main

if __name__ == "__main__":
    main()
