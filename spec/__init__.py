"""What a hybrid KV cache is: the vocabulary, the rules, and the nouns that tie kvproof together.

Imports the standard library only. Read in this order: :mod:`logic` and :mod:`radix` (the vocabulary), :mod:`rules`
(pure functions), :mod:`config` and :mod:`scenario` (what is driven), :mod:`view` and :mod:`events` (what is seen),
:mod:`subject` and :mod:`finding` (who is driven and what was found).
"""
