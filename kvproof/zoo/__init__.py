"""The zoo: public faults of hybrid caches, on the releases that shipped them, and which of our searches find them.

``fault`` reads the data files (``zoo/`` of the project). ``running`` replays their scenarios on releases (``replays``)
and has mutants judged that stand for those which no release had. ``blind`` searches for the faults without having read
anything of them, ``results`` keeps what came out, ``matrix`` shows it. Nothing that searches imports this package.
"""
