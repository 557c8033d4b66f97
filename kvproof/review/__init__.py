"""Spec review: the specification as a site to read, question and sign, and what changed between two of its states.

Everything on the pages is read off the catalogue, the rules, the machine and stored results; nothing is written twice.
It asks the rest of kvproof, and nothing but the command ``spec`` asks it.
"""
