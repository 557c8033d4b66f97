"""Scenarios on a release: all of them in one process of their own, since importing a release takes some 15 seconds and
binds the process to it.

Run as a module, this is that process: names and scenarios come in as JSON, an answer a line goes out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvproof import subjects
from kvproof.engines import Progress, replay
from kvproof.errors import USAGE, explain
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import MOST_ACTIONS, Scenario
from kvproof.zoo.fault import Sign


class Shown(msgspec.Struct, frozen=True):
    """What one scenario showed on one release. ``seen`` has invariant, cause and witness of each kind of violation.

    ``follows`` are those that only came with the violation that ended the run. ``spoiled``: it was ended early, in the
    action ``ended``, counted from 0; a run that came to its end ended beyond its last action.
    ``refused`` says why the release can't be configured so, ``error`` what went wrong in a checker, ``problem`` why the
    release can't be driven here, which says nothing of the scenario.
    """

    seen: list[tuple[str, str, str]] = []
    follows: list[tuple[str, str]] = []
    spoiled: bool = False
    ended: int = MOST_ACTIONS
    refused: str = ""
    error: str = ""
    problem: str = ""

    def witness(self, signs: list[Sign]) -> str | None:
        """What was seen of a fault that has these signs; ``None`` if nothing was."""
        found = (w for i, c, w in self.seen if (i, c) not in self.follows and any(s.shown_by(i, c) for s in signs))
        return next(found, None)

    def lacks(self, invariant: str, action: int) -> bool:
        """Whether ``invariant`` held all the way, at least through ``action``: another violation may end the run."""
        ran = not (self.refused or self.error or self.problem) and self.ended >= action
        return ran and all(invariant != seen for seen, _, _ in self.seen)


def replay_all(release: str, scenarios: Mapping[str, Scenario], progress: Progress) -> Iterator[tuple[str, Shown]]:
    """The scenarios on ``release``, by name, each answer as it comes. What the process can't say any more, because it
    broke down, is an error of each scenario that is left."""
    if not scenarios:
        return
    progress(f"vllm=={release}: replaying {len(scenarios)} scenario{'s' * (len(scenarios) != 1)}")
    question = json.dumps({name: scenario.to_dict() for name, scenario in scenarios.items()})
    left = list(scenarios)
    command = [sys.executable, "-P", "-m", "kvproof.zoo.replays", f"vllm=={release}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as asking:
                asking.write(question)
            for line in process.stdout:
                name, shown = msgspec.json.decode(line, type=tuple[str, Shown])
                left.remove(name)
                yield name, shown
        except BrokenPipeError:
            pass
        except BaseException:
            process.terminate()
            raise
    for name in left:
        yield name, Shown(error=f"the process that replays on vllm=={release} ended with code {process.returncode}")


def _answer(subject: Any, scenario: Scenario) -> Shown:
    try:
        result = replay(subject, scenario)
    except ConfigError as error:
        return Shown(refused=str(error))
    except Exception as error:
        return Shown(error=f"{type(error).__name__}: {error}")
    seen: dict[tuple[str, str], str] = {}
    for violation in result.violations:
        seen.setdefault(violation.identity, violation.witness)
    # What is left over is looked at when all is done: whatever that shows, the scenario ran to its end.
    spoiled = result.spoiled and all(invariant != "REF.drained" for invariant, _ in seen)
    return Shown(
        seen=[(*identity, witness) for identity, witness in seen.items()],
        follows=sorted(result.follows),
        spoiled=spoiled,
        ended=result.actions[-1] if spoiled else MOST_ACTIONS,
        error=result.error or ("" if sum(result.evaluations.values()) else "no invariant was exercised"),
    )


def _serve() -> int:
    """Answer on the standard output there was; what a release prints goes to standard error.

    An interrupt is for whoever asks: it ends this process, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        scenarios = {name: Scenario.from_dict(data) for name, data in json.load(sys.stdin).items()}
        try:
            subject = subjects.open_subject(subjects.parse(sys.argv[1]), lambda line: None)
        except Exception as error:
            message, code = explain(error)
            shown = Shown(problem=message) if code == USAGE else Shown(error=message)
            for name in scenarios:
                answers.write(msgspec.json.encode((name, shown)).decode() + "\n")
            return 0
        for name, scenario in scenarios.items():
            answers.write(msgspec.json.encode((name, _answer(subject, scenario))).decode() + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
