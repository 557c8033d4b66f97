"""Assertions in a vLLM that serves: hooks, a shadow of the device, reports."""
