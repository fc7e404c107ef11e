"""`python -m migrate`."""

from .cli.main import main

main()
