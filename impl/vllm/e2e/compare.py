"""What a vLLM with a prefix cache says and keeps, held against the same vLLM with nothing cached.

A workload of shared prefixes and follow-up turns runs once with the cache. Then each of its requests runs again, alone,
on an engine that has forgotten everything: tokens must be the same, log-probabilities nearly so. And each block that
was keyed as a recurrent state, when the key appeared and again at the end, must hold what those runs had after exactly
the key's tokens. There the state is read where the request itself keeps it, so a wrong key can't hide behind another.

A check is worth as much as it can fail: :func:`control` spoils cached states on purpose and says whether both
comparisons notice.
"""

from __future__ import annotations

import importlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvproof.impl.vllm.e2e.engine import Answer, Engine, Keyed, State
from kvproof.impl.vllm.e2e.models import VOCABULARY

Spoiler = Callable[[Engine, Sequence[Keyed], Sequence[Keyed]], None]
"""Makes the cached states of two prefixes wrong. Both lists have one entry a group, in the same order."""

SYSTEMS: Final = 3
CONVERSATIONS: Final = 4
TURNS: Final = 3


@dataclass
class Result:
    """``wrong`` says in words what was not right: nothing, if the cache is. ``states`` keyed blocks were looked at."""

    requests: int = 0
    resumed: int = 0
    cached: int = 0
    tokens: int = 0
    different: int = 0
    logprob: float = 0.0
    states: int = 0
    prefixes: int = 0
    state: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass
class _Conversation:
    name: str
    tokens: list[int]
    turns: int = TURNS


def workload(engine: Engine, seed: int = 0) -> list[Answer]:
    """Conversations of several turns that share system prompts in groups, as many at once as the model allows."""
    rng = random.Random(seed)
    waiting: deque[_Conversation] = deque()
    systems = [_fresh(rng, rng.randint(2 * engine.block, 4 * engine.block)) for _ in range(SYSTEMS)]
    for index in range(SYSTEMS * CONVERSATIONS):
        waiting.append(_Conversation(f"c{index}", list(systems[rng.randrange(SYSTEMS)])))
    active: dict[str, _Conversation] = {}
    answers: list[Answer] = []
    while waiting or active:
        while waiting and len(active) < 2 * engine.model.together - 1:  # the rest of them wait inside the engine
            conversation = waiting.popleft()
            conversation.tokens += _more(rng, engine, len(conversation.tokens))
            name = f"{conversation.name}.{TURNS - conversation.turns}"
            engine.submit(name, conversation.tokens, _outputs(rng, engine, conversation))
            active[name] = conversation
        for answer in engine.step():
            answers.append(answer)
            conversation = active.pop(answer.name)
            conversation.tokens += answer.tokens
            conversation.turns -= 1
            if conversation.turns:
                waiting.append(conversation)
    return answers


def _fresh(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _more(rng: random.Random, engine: Engine, length: int) -> list[int]:
    """What a user adds to ``length`` tokens: up to a block and a half.

    A prompt that ends less than ``together`` tokens behind a boundary could be finished in the step that reaches the
    boundary, with a checkpoint inside the step, which the Mamba2 kernels of the CPU build can't take.
    """
    count = rng.randint(5, engine.block + engine.block // 2)
    while 0 < (length + count) % engine.block <= engine.model.together:
        count += 1
    return _fresh(rng, count)


def _outputs(rng: random.Random, engine: Engine, conversation: _Conversation) -> int:
    """How many tokens a turn gets, at most a block. The last turn's may run over a boundary: nothing resumes there."""
    count = rng.randint(4, engine.block)
    if engine.model.from_outputs or conversation.turns == 1:
        return count
    return min(count, engine.block - len(conversation.tokens) % engine.block)


class KeyedStates:
    """Copies of what lies under each key of a recurrent group, taken at the end of the step in which it appeared."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: list[tuple[Keyed, State]] = []
        self._known: set[Keyed] = set()
        engine.after_step.append(self._collect)

    def finish(self) -> None:
        """Take all that is keyed now once more: what was right once must be right still."""
        self.engine.after_step.remove(self._collect)
        self._known.clear()
        self._collect()

    def _collect(self) -> None:
        now = set(self.engine.keyed())
        for keyed in sorted(now - self._known, key=lambda one: (one.block, one.group)):
            self.found.append((keyed, self.engine.state(keyed.group, keyed.block)))
        self._known = now


class Plain:
    """Runs without any cache: answers, and the states that they went through at the ends of steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._states: dict[tuple[int, ...], dict[int, State]] = {}

    def answer(self, one: Answer) -> Answer:
        """The same request again, alone and with nothing cached."""
        self.engine.reset()
        return self._watched(f"{one.name} again", one.prompt, len(one.tokens))

    def states(self, prefix: tuple[int, ...]) -> dict[int, State]:
        """Each recurrent group's state after ``prefix``, from a run that had these tokens as a prompt or as its own."""
        if prefix not in self._states:
            self.engine.reset()
            self._watched(f"prefix {len(self._states)}", prefix, 2)
        return self._states[prefix]

    def _watched(self, name: str, prompt: Sequence[int], outputs: int) -> Answer:
        def watch() -> None:
            running = self.engine.running_states(name)
            if running is not None and running[0] % self.engine.hash_unit == 0:
                tokens = tuple(self.engine.requests[name].all_token_ids[: running[0]])
                self._states.setdefault(tokens, running[1])

        self.engine.after_step.append(watch)
        try:
            answer = self.engine.serve(name, prompt, outputs)
        finally:
            self.engine.after_step.remove(watch)
            del self.engine.requests[name]
        if answer.cached:
            raise RuntimeError(f"{name} found {answer.cached} tokens in a cache that was reset")
        return answer


def compare(engine: Engine, run: Callable[[Engine], list[Answer]] = workload) -> Result:
    """Run a workload with the cache and hold everything against runs without."""
    engine.reset()
    kept = KeyedStates(engine)
    answers = run(engine)
    kept.finish()
    plain, result = Plain(engine), Result()
    _compare_answers(answers, plain, result)
    _compare_states(kept.found, plain, result)
    if not result.resumed:
        result.wrong.append("no request found anything in the cache: nothing was tested")
    if not result.states:
        result.wrong.append("no recurrent state was keyed: nothing was tested")
    return result


def _compare_answers(answers: Sequence[Answer], plain: Plain, result: Result) -> None:
    tolerance = plain.engine.model.logprob_tolerance
    for answer in answers:
        right = plain.answer(answer)
        result.requests += 1
        result.resumed += answer.cached > 0
        result.cached += answer.cached
        result.tokens += len(answer.tokens)
        # Behind the first token that differs the two go on from different prefixes.
        same = [one == other for one, other in zip(answer.tokens, right.tokens, strict=True)]
        first = same.index(False) if False in same else len(same)
        if first < len(same):
            result.different += 1
            result.wrong.append(f"{answer.name}: output {first} of {len(same)} is another token without a cache")
        for one, other in zip(answer.logprobs[:first], right.logprobs[:first], strict=True):
            result.logprob = max(result.logprob, abs(one - other))
    if not result.logprob <= tolerance:
        result.wrong.append(f"a log-probability differs by {result.logprob:.1e}, more than {tolerance:.0e}")


def _compare_states(found: Sequence[tuple[Keyed, State]], plain: Plain, result: Result) -> None:
    tolerance = plain.engine.model.state_tolerance
    seen = set()
    for keyed, state in found:
        seen.add(keyed.prefix)
        result.states += 1
        difference = _difference(state, plain.states(keyed.prefix)[keyed.group])
        result.state = max(result.state, difference)
        if not difference <= tolerance:
            result.wrong.append(
                f"block {keyed.block}, keyed for group {keyed.group} as the state after {len(keyed.prefix)} tokens,"
                f" differs from it by {difference:.1e} of its size, more than {tolerance:.0e}"
            )
    result.prefixes = len(seen)


def _difference(one: State, other: State) -> float:
    """The largest of all parts, each relative to its largest number; infinite where there is a NaN."""
    return max(
        float((a.float() - b.float()).abs().nan_to_num(nan=float("inf")).max() / b.float().abs().max().clamp(min=1e-30))
        for a, b in zip(one, other, strict=True)
    )


# -- the control ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noticed:
    """Of a spoiled cache: whether the answers were seen to change, and whether all spoiled states were seen."""

    spoiled: int
    by_answers: bool
    by_states: bool
    resumed: bool

    @property
    def all(self) -> bool:
        return self.spoiled > 0 and self.resumed and self.by_answers and self.by_states


def zero(engine: Engine, one: Sequence[Keyed], other: Sequence[Keyed]) -> None:
    """Zero the states of both."""
    for keyed in (*one, *other):
        engine.write_state(keyed.group, keyed.block, None)


def swap(engine: Engine, one: Sequence[Keyed], other: Sequence[Keyed]) -> None:
    """Exchange the states of two prefixes, group by group."""
    for first, second in zip(one, other, strict=True):
        mine, its = (engine.state(keyed.group, keyed.block) for keyed in (first, second))
        engine.write_state(first.group, first.block, its)
        engine.write_state(second.group, second.block, mine)


def control(engine: Engine, spoil: Spoiler, seed: int = 1) -> Noticed:
    """Cache two prompts, spoil the states that they would resume from, and go on: what do the comparisons say?"""
    rng = random.Random(seed)
    engine.reset()
    prompts = [_fresh(rng, 3 * engine.block + engine.block // 2) for _ in range(2)]
    for index, prompt in enumerate(prompts):
        engine.serve(f"first {index}", prompt, 2)
    pair = []
    for prompt in prompts:
        states = [keyed for keyed in engine.keyed() if keyed.prefix == tuple(prompt[: 3 * engine.block])]
        pair.append(sorted(states, key=lambda keyed: keyed.group))
    spoil(engine, pair[0], pair[1])
    spoiled = [(keyed, engine.state(keyed.group, keyed.block)) for keyed in (*pair[0], *pair[1])]
    answers = [engine.serve(f"next {index}", prompt, 8) for index, prompt in enumerate(prompts)]
    plain, by_answers, by_states = Plain(engine), Result(), Result()
    _compare_answers(answers, plain, by_answers)
    _compare_states(spoiled, plain, by_states)
    return Noticed(
        spoiled=len(spoiled),
        by_answers=bool(by_answers.wrong),
        by_states=len(by_states.wrong) == len(spoiled),
        resumed=by_answers.resumed == len(prompts),
    )


def importable(name: str) -> bool:
    """Whether a module is there and starts: an extension built for another torch is there and does not."""
    try:
        importlib.import_module(name)
    except Exception:
        return False
    return True
