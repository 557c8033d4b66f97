"""The abstract machine: a hybrid cache as states and guarded actions, composed from :mod:`kvproof.spec.rules`.

Read on in this order: ``world.py`` what there is · ``machine.py`` what can happen · ``schedule.py`` who runs in a
step · ``lookup.py`` what the cache has of a request · ``sizes.py`` the rules, asked with numbers · ``blocks.py`` what a
step is charged, takes and keys (``unmoved.py`` where states stay as they were saved) · ``pool.py`` references, queue
and keys · ``device.py`` contents · ``view.py`` and ``subject.py`` the machine as predicates and drivers see it.

It describes vLLM's scheduling in align mode as of 0.33, without what :func:`kvproof.spec.machine.sizes.beyond` names;
``dialect.py`` has the ways in which releases, and the reference engine, do otherwise.
"""
