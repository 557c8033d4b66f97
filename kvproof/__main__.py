"""``python -m kvproof``: the same as the ``kvproof`` command."""

from kvproof.cli import main

if __name__ == "__main__":
    main()
