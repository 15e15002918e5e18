"""`python -m jingu` is `jingu`."""

from jingu.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
