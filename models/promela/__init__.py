"""The machine in Promela: a second opinion on small worlds, written by hand and run by ``spin``.

``cache.pml`` the model: what there is and what can happen; ``pool.pml`` references, queue and keys; ``blocks.pml`` one
request's lookup, chunk and blocks; ``step.pml`` one step · ``worlds.py`` the worlds that both sides visit ·
``projection.py`` a state in words, the same on both sides · ``spin.py`` runs it. Needs ``spin`` (6.5) and ``gcc``.
"""
