"""``python -m pagespec.cli``: the command line without its script."""

from pagespec.cli.main import main

main()
