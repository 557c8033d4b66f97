"""The generated explorer: the same states as the Python explorer, byte by byte, and never a silent difference."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.models.explore import scope as scope_module
from kvproof.models.explore import shard
from kvproof.models.explore.native import build, generate, program
from kvproof.models.explore.native.explorer import digest_of, explore_native
from kvproof.models.explore.native.kinds import Untranslatable
from kvproof.models.explore.scope import Move, Prompt, Scope
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.search import explore
from kvproof.models.explore.shard import Judge, Shard
from kvproof.spec.finding import Violation
from kvproof.spec.machine import blocks, pool
from kvproof.spec.machine.blocks import Faulty
from kvproof.spec.machine.dialect import REFERENCE, SPECIFICATION, SWITCHES, dialect_of
from kvproof.spec.machine.world import World

try:
    build.compiler()
except build.Unavailable as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL = replace(SCOPES["tiny"], name="small", prompts=(Prompt(2),), requests=1)
"""One request at a time: explored in no time."""


@pytest.fixture
def optimised() -> None:
    """For tests of what is compiled as for use."""


@pytest.fixture(autouse=True)
def _quickly_compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is looked at a moment only is not optimised: compiling takes longer than running it."""
    if "optimised" not in request.fixturenames:
        monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))


def in_python(scope: Scope, symmetry: bool = True, most: int = 10**9) -> Shard:
    one = Shard(scope, judged=False, symmetry=symmetry)
    one.start()
    while one.frontier and len(one.states) < most:
        one.level()
    return one


def assert_same(scope: Scope, *, symmetry: bool = True, workers: int = 1, most: int = 10**9, **more: Any) -> int:
    """Both visit the same states by as many moves. How many states that is."""
    slow = in_python(scope, symmetry, most)
    fast = explore_native(scope, symmetry=symmetry, workers=workers, most=most, **more)
    assert len(fast.states_bytes()) == fast.states
    assert set(fast.states_bytes()) == set(slow.states)
    assert fast.digest == digest_of(slow.states)
    assert (fast.states, fast.transitions, fast.complete) == (len(slow.states), slow.transitions, not slow.frontier)
    return fast.states


def changed(module: Any, old: str, new: str) -> dict[str, str]:
    """The source of a module with one line replaced."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return {module.__name__: text.replace(old, new)}


# -- the same states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_same_states_byte_by_byte(workers: int) -> None:
    assert assert_same(SMALL, workers=workers) == 24


def test_a_search_says_how_far_it_came() -> None:
    whole, part = explore(SMALL, judged=False, liveness=False), explore(SMALL, judged=False, liveness=False, most=5)
    for most, slow in ((10**6, whole), (5, part)):
        fast = explore_native(SMALL, most=most)
        assert (fast.states, fast.depth, fast.complete) == (slow.states, slow.depth, slow.complete)


@pytest.mark.slow
def test_the_same_states_where_blocks_have_names() -> None:
    assert assert_same(SMALL, symmetry=False) == 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "prefills", "tails", "at-once"])
def test_the_same_states_in_every_small_scope(name: str) -> None:
    assert_same(SCOPES[name], workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafts", "store", "acceptance"])
@pytest.mark.usefixtures("optimised")
def test_the_same_states_of_whole_levels_in_larger_scopes(name: str) -> None:
    assert assert_same(SCOPES[name], workers=2, most=3_000) >= 3_000


LIKE_THE_REFERENCE = (
    "spares_lone_prefill", "stops_by_prompt", "steps_to_junction", "hits_as_keyed", "asks_once", "drafts_count",
    "drafts_with_samples", "pads_admitted", "limits_decoding", "spares_last", "reserves_for_prefills",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "dialect",
    [dialect_of((0, 26)), replace(SPECIFICATION, **dict.fromkeys(LIKE_THE_REFERENCE, False))],
    ids=["the oldest release", "like the reference engine"],
)
def test_the_same_states_in_other_dialects(dialect: Any) -> None:
    other = replace(SCOPES["acceptance"], dialect=dialect)
    assert assert_same(other, most=3_000) >= 3_000
    assert set(in_python(other, most=300).states) != set(in_python(SCOPES["acceptance"], most=300).states)


@pytest.fixture(scope="module")
def sources() -> program.Program:
    return program.read()


def test_every_switch_that_can_be_explored_is_translated(sources: program.Program) -> None:
    done = []
    for name in SWITCHES:
        try:
            dialect = replace(SPECIFICATION, **{name: False})
        except ValueError:  # only together with others, and states that are not moved have no bytes
            continue
        generate.generate(sources, replace(SCOPES["acceptance"], dialect=dialect))
        done.append(name)
    assert set(LIKE_THE_REFERENCE) < set(done)
    with pytest.raises(ValueError, match="no bytes yet"):
        generate.generate(sources, replace(SCOPES["acceptance"], dialect=REFERENCE))


# -- differences are noticed -------------------------------------------------------------------------------------------


def test_another_source_leads_to_other_states() -> None:
    texts = changed(pool, "            if world.keys[block]:\n", "            if not world.keys[block]:\n")
    fast = explore_native(SMALL, texts=texts)
    assert set(fast.states_bytes()) != set(in_python(SMALL).states)
    assert fast.digest != digest_of(in_python(SMALL).states)


def test_what_is_taken_for_constant_is_constant() -> None:
    texts = changed(scope_module, "branches=False, dialect=self.dialect)", "branches=False)")
    other = replace(SMALL, dialect=dialect_of((0, 26)))
    with pytest.raises(Untranslatable, match=r"scope.py, line \d+: another object is passed on than the one there is"):
        generate.generate(program.read(texts), other)


@pytest.mark.slow
def test_a_machine_at_fault_is_told_of_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = changed(blocks, "    if count > len(world.queue):\n", "    if count and world.keys[world.queue[0]]:\n")
    fast = explore_native(SMALL, texts=texts)
    right = blocks.new_blocks

    def new_blocks(world: Any, count: int, taken: Any, group: int) -> Any:
        if count and world.keys[world.queue[0]]:
            raise Faulty("the first free block has a key")
        return right(world, count, taken, group)

    class Strict(Judge):
        def run(self, world: World, move: Move) -> list[Violation]:
            self.machine.become(world)
            try:
                self.scope.carry_out(self.machine, move)
            except Faulty:
                return [Violation("ADMIT.exact", "faulty", "")]
            return []

    monkeypatch.setattr(blocks, "new_blocks", new_blocks)
    monkeypatch.setattr(shard, "Judge", Strict)
    slow = in_python(SMALL)
    assert set(fast.states_bytes()) == set(slow.states)
    found = [(slow.states[one.state], shard.unpack(one.move)) for one in slow.broken]
    assert found
    assert set(found) == set(fast.faults)
    for state, move in fast.faults:
        machine = SMALL.machine()
        machine.become(slow.encoding.decode(state))
        with pytest.raises(Faulty):
            SMALL.carry_out(machine, move)


@pytest.mark.slow
def test_what_python_would_raise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = changed(pool, "    world.queue[:0] = front\n", "    world.queue[:0] = [front[9]]\n")
    with pytest.raises(RuntimeError, match="IndexError: list index out of range, which Python does not raise there"):
        explore_native(SMALL, texts=texts)

    def release(world: Any, freed: Any) -> None:
        raise IndexError("as in the source")

    monkeypatch.setattr(pool, "release", release)
    with pytest.raises(IndexError, match="as in the source"):
        explore_native(SMALL, texts=texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rule_that_raises_ends_the_search(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def recurrent_total(*numbers: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "_recurrent_total", recurrent_total)
    with pytest.raises(KeyboardInterrupt):
        explore_native(SMALL, workers=workers)


def test_where_others_have_taken_what_threads_own_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    flags, right = [], ctypes.CDLL

    def load(name: str) -> ctypes.CDLL:
        flags.append(name)
        if len(flags) == 1:
            raise OSError(f"{name}: cannot allocate memory in static TLS block")
        return right(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert explore_native(SMALL).states == 24
    assert len(set(flags)) == 2


# -- what can't be done ------------------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.Unavailable, match=r"needs a C\+\+ compiler: install g\+\+ or clang\+\+, or set CXX"):
        build.compiled("int main() {}")


def test_what_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    with pytest.raises(build.Unavailable, match=r"does not compile what was generated .*: .*error"):
        build.compiled("nonsense")
    assert not list(tmp_path.glob("explore/*"))


def test_a_compiler_may_have_arguments_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    monkeypatch.setenv("CXX", f"{found} -O1")
    assert build.compiler() == [found, "-O1"]
    monkeypatch.setenv("CXX", "nothing-of-the-kind -O1")
    with pytest.raises(build.Unavailable, match="there is no nothing-of-the-kind"):
        build.compiler()


def test_half_a_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    file = build.compiled("int answer() { return 42; }")
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    assert build.compiled("int answer() { return 42; }") == file
    assert len(file.read_bytes()) == len(whole)
    ctypes.CDLL(str(file))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads how large a process is from /proc")
def test_without_memory_for_all_threads_the_search_does_not_begin() -> None:
    code = (
        "import resource\n"
        "from kvproof.models.explore.native.explorer import explore_native\n"
        "from kvproof.models.explore.scopes import SCOPES\n"
        "explore_native(SCOPES['tiny'], most=1)\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30),) * 2)\n"
        "explore_native(SCOPES['tiny'], workers=8)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "MemoryError: the search can't begin"


def test_without_mypy_there_is_one_clear_line() -> None:
    code = (
        "import sys; sys.modules['mypy'] = None\n"
        "from kvproof.models.explore.native.explorer import explore_native\n"
        "from kvproof.models.explore.scopes import SCOPES\n"
        "explore_native(SCOPES['tiny'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.endswith("the generated explorer needs mypy, which types the sources: pip install mypy")
