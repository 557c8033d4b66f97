"""A request: its tokens, how far they are computed, and the blocks that it counts on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvproof.spec.tracer import EMPTY, State, advance


class Status(Enum):
    """Where a request is. ``LOADING`` and ``LOADED`` requests hold blocks while they wait."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Recurrent:
    """One request's blocks of one recurrent group.

    ``running`` holds the state at the computed position (0: none yet). ``scratch`` are private blocks to write into:
    one per draft, so that each draft's state is kept until it is known which are accepted. ``columns`` is how many
    blocks' worth of tokens the request has been given state blocks for: entering another column may take one more.
    ``exporting`` is the block that this step's chunk saves a checkpoint to (0: none).

    ``held`` is the checkpoint kept: (position, block) of the newest state that a later request could resume from,
    pinned so that nobody evicts it while this request lives. ``newest`` is what ought to be held, noted apart so that
    the two can be compared.
    """

    running: int = 0
    scratch: list[int] = field(default_factory=list)
    columns: int = 0
    exporting: int = 0
    held: tuple[int, int] | None = None
    newest: tuple[int, int] | None = None


@dataclass(eq=False)
class Request:
    """``tables[g]`` are the blocks of attention group g by slot (0: the window has passed it).

    ``claimed`` is how many tokens of the prompt an external store says it holds, ``missing`` how many of those it then
    fails to deliver. ``stops`` are the positions at which a chunk is made to end, since a later request can resume
    there; ``tail`` is the last of them that its own prompt allows, ``junction`` where others' prefix ends.
    """

    name: str
    prompt: int
    max_tokens: int
    claimed: int = 0
    missing: int = 0
    tokens: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=lambda: [EMPTY])
    status: Status = Status.WAITING
    computed: int = 0
    highest: int = 0
    """The most that was computed at the end of any step, whatever was lost since."""
    admitted: bool = False
    """Whether blocks for its first forward have been allocated since it last waited without any."""
    tables: list[list[int]] = field(default_factory=list)
    recurrent: dict[int, Recurrent] = field(default_factory=dict)
    tail: int = 0
    last_cacheable: int = 0
    junction: int = 0
    finishing: bool = False

    def extend(self, tokens: list[int]) -> None:
        """More tokens, and the prefixes that they lead to."""
        for token in tokens:
            self.tokens.append(token)
            self.states.append(advance(self.states[-1], token))

    @property
    def known(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.tokens)

    @property
    def prefill_end(self) -> int:
        """Up to here known tokens are replayed; a resumed request replays its output too."""
        return max(self.prompt, self.known - 1)

    @property
    def outputs(self) -> int:
        return self.known - self.prompt
