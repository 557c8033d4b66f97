"""Why a lookup found so little: on a release's own scheduler, and the wording and bounds alone."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof.impl.vllm.live import counters
from kvproof.impl.vllm.live.counters import ShortHits
from kvproof.impl.vllm.live.keyhistory import Prompt, digests, marks
from kvproof.impl.vllm.live.why import KeyHistory, Miss, explain, never_hits
from kvproof.spec.config import Group

sys.path.insert(0, str(Path(__file__).parent))
from why_plays import PLAYS, config

sys.path.pop(0)

RELEASES = ("0.30.0", "0.32.0", "0.33.0")


# -- what it must say -----------------------------------------------------------------------------------------------

GONE = "384 was kept in step # and is gone since step # (evicted)"
MIDDLE = "recurrent group 1 (nearest state at 384), state 192 was never kept"
NONE = "recurrent group 1 (no state of this prompt)"
NO_BLOCK = "the prompt has no whole block of 64 tokens before its last token (short-prompt)"
SPARSE = "where a resend resumes or prompts were seen to part (retention)"
NEVER_128 = f"state 128 was never kept: retention 0 keeps only those {SPARSE}"
SHORT = "the part shared with an earlier prompt is shorter than one block of 64 tokens (short-share)"
DROPPED = "the last 64 tokens of a hit are dropped for the drafter (eagle)"
SAID: dict[str, tuple[int, int, str]] = {
    "prompt shorter than a block": (0, 32, f"{NONE}, {NO_BLOCK}"),
    "shared part shorter than a block": (0, 32, f"recurrent group 1 (nearest state at 192), {SHORT}"),
    "shared part shorter than a block, units finer": (0, 48, f"recurrent group 1 (nearest state at 192), {SHORT}"),
    "state in the unique part": (0, 192, f"{MIDDLE} and those of a are in the part not shared (unique-part)"),
    "divergence in the middle": (0, 192, f"{MIDDLE}: retention 0 keeps only those {SPARSE}"),
    "one state per 256 tokens": (
        256, 448, "recurrent group 1 (nearest state at 256 and 512), state 448 was never kept: retention 256 keeps one "
        f"per 256 tokens and those {SPARSE}",
    ),
    "drafter as a veto": (
        0, 192, "drafter group 2 (no blocks of this prompt), the drafter covers 0 of these tokens, and vetoes what the "
        "model itself has (drafter)",
    ),
    "eagle": (64, 128, f"full attention group 0 (nearest blocks at 64 and 128), {DROPPED}"),
    "long enough but for the drop": (0, 64, f"full attention group 0 (nearest blocks at 64), {DROPPED}"),
    "drafter's layer in the model's own group": (
        0, 64, f"full attention group 0 (nearest blocks at 64), {DROPPED}",
    ),
    "evicted": (0, 384, f"{NONE}, state {GONE}"),
    "evicted, a state below left": (320, 384, f"recurrent group 1 (nearest state at 320), state {GONE}"),
    "window evicted": (320, 384, f"sliding window group 1 (nearest window at 320), window {GONE}"),
    "window evicted, one block of it": (
        256, 384, "sliding window group 1 (nearest window at 256), window 320 was kept in step # and is gone since "
        "step # (evicted)",
    ),
    "window evicted in the unit to drop": (
        64, 192, "sliding window group 1 (nearest window at 64 and 256), window 192 was kept in step # and is gone "
        "since step # (evicted)",
    ),
    "tail evicted": (
        384, 432, "recurrent group 1 (nearest state at 384), state 432 was kept in step # and is gone since step # "
        "(evicted)",
    ),
    "state in the unit to drop": (
        0, 192, "recurrent group 1 (nearest state at 192), state 192 is in the last unit, which is dropped for the "
        "drafter (eagle)",
    ),
    "eagle, units finer": (
        64, 80, "full attention group 0 (nearest blocks at 64 and 80), the last 16 tokens of a hit are dropped for the "
        "drafter (eagle)",
    ),
    "pending, drafted": (0, 128, f"{NONE}, a is still computing the prefix and has not come to 320 (pending)"),
    "junction pending": (0, 192, f"{NONE}, c is still computing the prefix and has not come to 192 (pending)"),
    "running, but ends elsewhere": (0, 128, f"{NONE}, {NEVER_128}"),
    "given up": (0, 128, f"{NONE}, {NEVER_128}"),
    "a latest prompt that shares less": (0, 48, f"{NONE}, {SHORT}"),
    "window never kept": (
        0, 192, "sliding window group 1 (nearest window at 320), window 192 was never kept: retention 0 keeps only "
        f"those {SPARSE}",
    ),
    "pending": (0, 128, f"{NONE}, a is still computing the prefix and has not come to 384 (pending)"),
    "alignment": (
        128, 176, "recurrent group 1 (nearest state at 128 and 192), a state is kept on multiples of 64 tokens and at "
        "the end of a prompt (alignment)",
    ),
    "store shorter": (
        0, 384, f"{NONE}, and the external store brings 128 tokens more, which ends below (external)",
    ),
    "no prompt is long enough": (0, 48, f"{NONE}, {NO_BLOCK}"),
}  # fmt: skip
"""Per play: what b's first lookup answers, what attention has, and how the line goes on (with # for a step)."""

Inside = Callable[..., Any]


def plays(inside: Inside, release: str) -> dict[str, Any]:
    found: dict[str, Any] = inside(release, Path(__file__).with_name("why_plays.py"))
    return found


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
class TestOnARelease:
    @pytest.mark.parametrize("name", SAID)
    def test_a_short_lookup_gets_its_explanation(self, inside: Inside, release: str, name: str) -> None:
        answered, attention, rest = SAID[name]
        played = plays(inside, release)[name]
        miss = played["b"][0]["miss"]
        assert miss is not None, played
        line = re.sub(r"step \d+", "step #", miss["line"])
        head = f"b's lookup of {miss['prompt']} tokens answers {answered} where attention alone serves {attention}: "
        assert line == head + rest
        assert (miss["lost"], rest.endswith(f"({miss['rule']})")) == (attention - answered, True)
        assert played["a"][0]["miss"] is None, "nothing was there for the first of its kind"

    @pytest.mark.parametrize("name", [name for name in PLAYS if name not in SAID])
    def test_a_lookup_that_found_what_attention_has_gets_none(self, inside: Inside, release: str, name: str) -> None:
        played = plays(inside, release)[name]
        for request in played.keys() - {"never"}:
            assert [told["miss"] for told in played[request]] == [None] * len(played[request]), request

    def test_the_second_sibling_finds_the_junction_that_the_first_kept(self, inside: Inside, release: str) -> None:
        for name in ("state in the unique part", "divergence in the middle"):
            told = plays(inside, release)[name]["c"][0]
            assert (told["answered"], told["miss"]) == (192, None)

    def test_a_group_is_blamed_only_where_it_has_less(self, inside: Inside, release: str) -> None:
        played = plays(inside, release)
        assert played["healthy"]["b"][0]["of nothing"] == "unknown"
        assert played["two at once"]["b"][0]["of nothing"] == "pending", "its state is keyed in the same step"

    def test_it_warns_at_the_start_where_nothing_can_ever_hit(self, inside: Inside, release: str) -> None:
        played = plays(inside, release)
        warned = {name: it["never"] for name, it in played.items() if it.get("never")}
        assert set(warned) == {"no prompt is long enough", "long enough but for the drop"}
        assert all(told["answered"] == 0 for name in warned for told in played[name]["b"])
        assert played["just long enough"]["b"][0]["answered"] == 64, "one token more, and there are hits"
        assert warned["no prompt is long enough"] == (
            "no prompt can ever hit: a hit ends on a multiple of 64 tokens, so that only prompts of 65 tokens can have "
            "one, and max_model_len 64 allows 63 (raise it to 66, or choose a smaller block or prefix_match_unit)"
        )
        assert "and 64 more are dropped for the drafter" in warned["long enough but for the drop"]


# -- without a release ----------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_is_gone_was_there_and_what_came_back_is_not_gone() -> None:
    history = KeyHistory()
    history.step_starts()
    history.registered(1, key(1))
    assert history.gone(1, key(1)) is None
    history.step_starts()
    history.removed(1, key(1))
    assert history.gone(1, key(1)) == (1, 2)
    assert history.gone(0, key(1)) is None, "another group's key"
    history.registered(1, key(1))
    assert history.gone(1, key(1)) is None
    history.step_starts()
    history.removed(1, key(2))
    assert history.gone(1, key(2)) == (-1, 3), "it was there before anything was watched"


def test_a_second_copy_that_goes_does_not_forget_when_the_first_was_kept() -> None:
    history = KeyHistory()
    history.step_starts()
    history.registered(1, key(1))
    history.registered(1, key(1))
    for _ in range(2):
        history.step_starts()
        history.removed(1, key(1))
    assert history.gone(1, key(1)) == (1, 3)


def test_a_key_overwritten_in_the_step_that_made_it_was_never_kept() -> None:
    history = KeyHistory()
    history.step_starts()
    history.registered(1, key(1))
    history.removed(1, key(1))
    assert history.gone(1, key(1)) is None
    assert not history.forgot


def test_the_history_is_bounded_and_says_when_it_forgot() -> None:
    history = KeyHistory(keys=10, prompts=10)
    for number in range(100):
        history.step_starts()
        history.registered(0, key(number))
        history.step_starts()
        if number < 10:
            assert not history.forgot
        history.removed(0, key(number))
        history.registered(0, key(1000 + number))
        history.asked(Prompt(f"r{number}", 64, {n: key(64 * number + n) for n in range(3)}))
        assert len(history) <= 30
    assert history.forgot
    assert history.gone(0, key(99)) is not None
    assert history.gone(0, key(0)) is None
    history.cleared()
    assert len(history) == 0
    assert not history.forgot


def test_an_earlier_prompt_is_another_one_even_if_this_one_asks_again_and_again() -> None:
    history, mine, first = KeyHistory(), Prompt("mine", 64, {64: key(1)}), Prompt("first", 64, {64: key(1)})
    assert history.earlier([key(1)], "mine") is None
    history.asked(first)
    for _ in range(3):
        history.asked(mine)
    assert history.earlier([key(2), key(1)], "mine") == (1, first)
    assert history.earlier([key(1)], "third") == (0, mine)


def test_a_prompt_is_marked_where_its_states_may_be_kept() -> None:
    hashes = [key(n) for n in range(1, 13)]
    assert marks(hashes, 16, 64, 200) == {16: key(1), 64: key(4), 128: key(8), 176: key(11), 192: key(12)}
    assert marks([], 64, 64, 40) == {}


def test_digests_tell_apart_by_tokens_and_by_what_salts_them() -> None:
    tokens = list(range(40))
    assert len(digests(tokens, None)) == 2
    assert digests(tokens, None)[:1] == digests(tokens[:20], None)
    assert digests(tokens, None)[0] != digests(tokens, "salt")[0]
    assert digests([1, *tokens[1:]], None)[1] != digests([2, *tokens[1:]], None)[1]


def miss(request: str = "b", **changes: Any) -> Miss:
    values: dict[str, Any] = {
        "request": request, "prompt": 400, "answered": 64, "attention": 192, "wanted": 192, "group": 1, "kind": "mamba",
        "nearest_below": 64, "nearest_above": 384, "rule": "chunk-end", "because": "because",
    }  # fmt: skip
    return Miss(**{**values, **changes})


def test_the_line_names_the_group_the_states_around_and_the_rule() -> None:
    head = "b's lookup of 400 tokens answers 64 where attention alone serves 192: "
    assert miss().line() == head + "recurrent group 1 (nearest state at 64 and 384), because (chunk-end)"
    assert "(nearest window at 384)" in miss(kind="window", nearest_below=None).line()
    assert "(no blocks of this prompt)" in miss(kind="full", nearest_below=None, nearest_above=None).line()
    assert miss().lost == 128


def test_a_cache_that_is_off_is_not_explained_but_warned_of() -> None:
    off = SimpleNamespace(enable_caching=False)
    assert explain(off, SimpleNamespace(), 0, KeyHistory()) is None
    assert "prefix caching is off" in str(never_hits(off))


def test_a_configuration_that_can_never_hit_is_warned_of() -> None:
    assert never_hits(config()) is None
    assert never_hits(config(max_model_len=66)) is None
    assert "max_model_len 65 allows 64" in str(never_hits(config(max_model_len=65)))
    fine = config(Group("full", 16), Group("mamba", 1024), unit=16, max_model_len=512)
    assert never_hits(fine) is None, "a hit may end inside a block"
    assert "1024" in str(never_hits(dataclasses.replace(fine, hash_unit=1024, groups=(Group("mamba", 1024),))))


def exposed(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_misses_are_counted_by_kind_and_rule_here_and_in_the_registry() -> None:
    labels = {"group": "mamba", "rule": "chunk-end"}
    before = [exposed(name, **labels) for name in (counters.SHORT_HITS, counters.TOKENS_LOST)]
    first, second = ShortHits(), ShortHits()
    assert first.add(miss("one"))
    assert not first.add(miss("one")), "a request that waits is looked up again and again"
    assert first.add(miss("two", kind="drafter", rule="drafter", answered=0))
    assert second.add(miss("three"))
    assert first.hits == {("mamba", "chunk-end"): 1, ("drafter", "drafter"): 1}
    assert first.lost == {("mamba", "chunk-end"): 128, ("drafter", "drafter"): 192}
    assert first.lines() == [
        "drafter: 1 lookups fell short by 192 tokens in all (drafter)",
        "mamba: 1 lookups fell short by 128 tokens in all (chunk-end)",
    ]
    after = [exposed(name, **labels) for name in (counters.SHORT_HITS, counters.TOKENS_LOST)]
    assert after == [before[0] + 2, before[1] + 256]


def test_requests_known_as_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "REMEMBERED", 2)
    counted = ShortHits()
    assert [counted.add(miss(name)) for name in ("a", "b", "c", "c", "a")] == [True, True, True, False, True]


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
from kvproof.impl.vllm.live.counters import ShortHits
from kvproof.impl.vllm.live.why import Miss
counted = ShortHits()
counted.add(Miss("b", 400, 64, 192, 192, 1, "mamba", 64, 384, "chunk-end", "because"))
print(counted.hits["mamba", "chunk-end"], counted.lost["mamba", "chunk-end"], {"vllm", "torch"} & set(sys.modules))
"""
AGAIN = """
import importlib
from kvproof.impl.vllm.live import counters
counters.ShortHits()
print(type(importlib.reload(counters).ShortHits()._exposed[0]).__name__)
"""


def printed(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_without_prometheus_they_are_plain_numbers_and_nothing_heavy_is_imported() -> None:
    assert printed(WITHOUT) == "1 128 set()"


def test_a_second_copy_of_the_module_counts_in_the_same_counters() -> None:
    assert printed(AGAIN) == "Counter"
