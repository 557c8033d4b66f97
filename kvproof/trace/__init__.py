"""Traces that a recording engine wrote: held to the specification, cut to scenarios, summed up."""
