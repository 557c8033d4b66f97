"""The rules: pure functions over integers or solver terms, one idea per module.

:mod:`chunk` where a prefill chunk may end · :mod:`slots` what a recurrent slot holds after a chunk, and which slot
may be keyed · :mod:`checkpoint` the state a final chunk exports inside itself · :mod:`blocks` how many blocks a step
is charged and takes, and how many a request ever holds · :mod:`hits` what a lookup may answer and where a request may
resume · :mod:`reuse` what it has to find at least · :mod:`ledger` references, holders and the free queue, for one
arbitrary block.
"""
