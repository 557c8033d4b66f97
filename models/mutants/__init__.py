"""Mutation: checkers are shown engines and rules that are wrong, and must say so.

:mod:`workload` what a live engine is put through · :mod:`checkers` one wrong engine before one checker ·
:mod:`matrix` all of them before all · :mod:`operators` wrong rules, made by changing one operator at a time.

Nothing here knows the engine: whoever calls hands over how to start one, healthy or wrong.
"""
