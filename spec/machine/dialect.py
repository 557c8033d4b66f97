"""Where releases of vLLM do otherwise than the specification says, one switch for each way.

A machine that speaks a release's dialect takes that release's decisions, its faults included: conformance is judged
against it, and exploring it finds, in the smallest world, what the fault leads to. Without a dialect the machine is the
specification.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """``charges_external_state``: an external load brings the recurrent state at its end, which takes a block of its
    own. Up to 0.33.0 at least that block is not asked for (while a local hit that is not adopted is), and an allocation
    may fail halfway.

    ``waits_for_copied_tail``: a hit that ends inside an attention block is copied ahead of the forward, so a block that
    this very step writes can't be its source yet. Up to 0.33.0 at least only recurrent hits wait for their content.
    """

    charges_external_state: bool = True
    waits_for_copied_tail: bool = True


SPECIFICATION = Dialect()
