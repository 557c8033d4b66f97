"""What the explorer's translator makes of Python: it means the same, or it is an error that says where."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproof.models.explore.native import build, generate, program
from kvproof.models.explore.native.kinds import Untranslatable

sys.path.insert(0, str(Path(__file__).parent))
import explore_examples

sys.path.pop(0)

EXAMPLES = Path(__file__).with_name("explore_examples.py").read_text(encoding="utf-8")


REFUSED = {
    "over_a_set": ("for item in {a, 2}:\n        a += item\n    return a", "a loop over a set"),
    "text": ('return len(f"{a}")', "the method format of a text"),
    "caught": ("try:\n        return a\n    except ValueError:\n        return 0", "TryStmt has no translation"),
    "fraction": ("return int(a / 2)", "int / int"),
    "written_out": ("return len({a: 1})", "a dictionary that is written out"),
    "stride": ("return len([a, 2, 3][::2])", "a slice"),
    "foreign": ("return math.gcd(a, 2)", "a call of math.gcd has no translation"),
    "otherwise": ("for _ in range(a):\n        break\n    else:\n        return 1\n    return 0", "a loop with else"),
    "lambda_": ("twice = lambda n: n * 2\n    return twice(a)", "LambdaExpr has no translation"),
    "two_kinds": ("item: int | str = a\n    if a:\n        item = str(a)\n    return item == 3", "a text where a int"),
    "truth_of_text": ('return 1 if str(a) else 0', "the truth of a text"),
    "told": ("return listened(None if a else both)", "somebody would be told"),
}  # fmt: skip

EXTRA = """
import math
from collections.abc import Callable


def listened(ear: Callable[[int], int] | None) -> int:
    return 1
"""

FUNCTIONS = ("arithmetic", "overflow", "slices", "order", "sharing", "tables", "choices", "records", "strict", "data")
RAISED = -(1 << 40)


@pytest.fixture(scope="module")
def planted() -> program.Program:
    refused = "".join(f"\n\ndef {name}(a: int) -> int:\n    {body}\n" for name, (body, _) in REFUSED.items())
    return program.read({"kvproof.planted": EXAMPLES + EXTRA + refused})


@pytest.mark.parametrize("name", REFUSED)
def test_a_construct_without_a_translation_is_an_error_that_says_where(planted: program.Program, name: str) -> None:
    with pytest.raises(Untranslatable, match=rf"kvproof.planted.py, line \d+: .*({REFUSED[name][1]})"):
        generate.functions(planted, {}, {"run": f"kvproof.planted.{name}"})


@pytest.fixture(scope="module")
def compiled(planted: program.Program) -> Callable[[str, int, int], int]:
    made = generate.functions(planted, {}, {f"run_{name}": f"kvproof.planted.{name}" for name in FUNCTIONS})
    assert not made.questions
    cases = " ".join(f"case {place}: return run_{name}(a, b);" for place, name in enumerate(FUNCTIONS))
    call = (
        'extern "C" Int call(Int which, Int a, Int b) { Arena arena; arena.open(); arena_next = arena.next;'
        f" arena_end = arena.end; try {{ switch (which) {{ {cases} }} }} catch (const Raised&) {{ return {RAISED}LL; }}"
        " return 0; }"
    )
    runtime = Path(program.__file__).with_name("runtime.hpp").read_text(encoding="utf-8")
    function = ctypes.CDLL(str(build.compiled(f"{runtime}\n{made.text}\n{call}"))).call
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    return lambda name, a, b: int(function(FUNCTIONS.index(name), a, b))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "overflow"])
def test_what_is_translated_means_the_same(compiled: Callable[[str, int, int], int], name: str) -> None:
    answers = set()
    for a in range(-4, 7):
        for b in range(-4, 7):
            try:
                wanted = int(getattr(explore_examples, name)(a, b))
            except (IndexError, ValueError, ZeroDivisionError, AssertionError, KeyError):
                wanted = RAISED
            assert compiled(name, a, b) == wanted, (name, a, b)
            answers.add(wanted)
    assert len(answers) > 1


def test_a_number_that_is_too_large_is_never_cut(compiled: Callable[[str, int, int], int]) -> None:
    assert compiled("overflow", -4, -4) == 1_000_000_007**2
    assert compiled("overflow", 5, 5) == RAISED
