"""The one error of fetching, in a module of its own so that each step can raise it."""

from __future__ import annotations


class FetchError(Exception):
    """A release could not be fetched. The message is one line, for people, and says what to do."""
