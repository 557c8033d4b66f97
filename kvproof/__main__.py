"""``python -m kvproof`` and the ``kvproof`` command: first of all, what to do when asked for an end."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command. Importing it takes a while, of which an interrupt must not show the traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from kvproof import cli

    cli.main()


def _end(number: int, frame: object) -> None:
    """Nothing has been begun yet, so nothing is lost. An exception might be, in whatever is being imported."""
    try:
        os.write(2, b"kvproof: error: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
