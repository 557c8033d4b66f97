"""A fast path for exploring a small world: the machine's own sources, translated to C++ for one scope.

Nothing is written twice. What a move does, which moves there are and what a state's bytes are is translated from the
Python sources (:mod:`.functions`, :mod:`.expressions`, :mod:`.calls`), with the types that mypy finds; configuration,
dialect and prompts are constants there. The proved rules are not translated at all: they are asked in Python, and
each answer is remembered. What is written by hand is the search (``search.hpp``) and what Python's lists and
dictionaries do (``runtime.hpp``). A construct that is not known to mean the same is an error, never a guess.
"""
