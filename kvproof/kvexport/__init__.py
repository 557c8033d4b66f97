"""A scenario as something another project can keep: one stand-alone pytest file, or text.

The pytest file imports vLLM, torch, pytest and the standard library, never kvproof. It holds only what its finding
needs: the connector where there is one, drafts where there are any, and an oracle of the blocks' contents where content
is what broke. One file serves the releases 0.26 … 0.33: it asks the imported release what its classes take.
"""

from __future__ import annotations

from kvproof.errors import printable
from kvproof.kvexport.origin import origin
from kvproof.kvexport.plan import plan
from kvproof.kvexport.render import render
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario

__all__ = ["export_pytest", "export_text"]


def export_pytest(scenario: Scenario, violation: Violation | None, subject: str, action: int = -1) -> str:
    """A pytest file that fails where ``violation`` shows and passes where it does not.

    ``subject`` is where it was found, for the text. ``action`` is the index of the action that showed it, if known:
    later ones are left out; beyond the last one, what is left over at the end is looked at, too. Without a violation
    the test asks that nothing raises and that nothing is left at the end.

    Raises :class:`kvproof.spec.scenario.ScenarioError` for an invariant that no test is written for.
    """
    return render(plan(scenario, violation, action), scenario, violation, subject)


def export_text(scenario: Scenario, violation: Violation | None, subject: str) -> str:
    """The scenario as a conversation, with what it shows."""
    lines = [scenario.text()]
    if violation is not None:
        known = origin(scenario, violation, subject)
        where = f" on {known.place}" if known.place else ""
        lines += ["", f"shows{where}: {violation.invariant} ({violation.cause})"]
        lines += [f"  {said}" for said in (violation.witness, known.summary) if said]
        lines += [f"  {name}: {value}" for name, value in violation.where]
    if scenario.note:
        lines += ["", scenario.note]
    return printable("\n".join(lines).expandtabs()) + "\n"
