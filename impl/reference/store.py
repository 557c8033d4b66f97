"""An external store of prefixes: what it claims to hold, what it delivers, and when.

A store may deliver in the same step or some steps later, and less than it claimed, or nothing. What it brings is
attention's keys and values token by token, and, with the last of them, the recurrent state at the end: a state can't be
cut, so a load that falls short brings none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproof.impl.reference.batch import Load
from kvproof.impl.reference.request import Request
from kvproof.spec.config import Config
from kvproof.spec.tracer import State


@dataclass
class Flight:
    """A load under way: it arrives in ``steps`` steps, and brings the tokens up to position ``received``.

    ``states`` are the prefixes of the sequence it belongs to, for the tracers.
    """

    load: Load
    states: Sequence[State]
    received: int
    steps: int

    @property
    def whole(self) -> bool:
        return self.received == self.load.end


class Store:
    """What is offered, and the asynchronous loads in flight.

    ``distrusted`` are requests whose load fell short: they are offered nothing again, lest they wait for ever.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.flying: dict[str, Flight] = {}
        self.distrusted: set[str] = set()

    def offer(self, request: Request, local: int) -> int:
        """Tokens that the store claims beyond ``local``: up to a block boundary, and never the last token."""
        if self.config.connector == "none" or request.name in self.distrusted:
            return 0
        block = self.config.scheduler_block
        return max(0, min(request.claimed, request.known - 1) // block * block - local)

    def start(self, request: Request, load: Load) -> Flight:
        """Begin a load. What is asynchronous is heard of again from :meth:`arrived`."""
        lost = min(request.missing, load.end - load.start)
        flight = Flight(load, request.states, load.end - lost, self.config.load_steps)
        if self.config.connector == "async":
            self.flying[request.name] = flight
        return flight

    def arrived(self) -> list[Flight]:
        """A step has passed: the loads that are complete now. A load outlives its request; the blocks wait for it."""
        for flight in self.flying.values():
            flight.steps -= 1
        done = [flight for flight in self.flying.values() if flight.steps <= 0]
        for flight in done:
            del self.flying[flight.load.request]
        return done
