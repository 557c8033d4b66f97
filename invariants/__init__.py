"""What must hold of a hybrid cache: one predicate per rule, in a catalogue.

Imports :mod:`kvproof.spec` and the standard library only: it runs inside other people's servers.
"""
