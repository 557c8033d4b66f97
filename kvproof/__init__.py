"""kvproof: an executable specification of hybrid prefix caching, and the checks that hold real engines to it.

``kvproof.spec`` says what such a cache is, ``kvproof.invariants`` what must hold of it, ``kvproof.models`` checks that
and ``kvproof.impl`` makes real caches checkable. This module imports nothing: live assertions import
``kvproof.invariants`` inside other people's servers.
"""
