"""Which writes of a step others would see: the same for every view of a vLLM core."""

from kvproof.spec.sharing import broken_keys, sharers

__all__ = ["broken_keys", "sharers"]
