"""A whole vLLM on the CPU: nothing is wrong with its cache, and what is made wrong with it is noticed.

They need an interpreter whose vLLM can run models (``bench/e2e.py`` says how to set one up) and are skipped in others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.vllm.e2e import copies
from kvproof.impl.vllm.e2e.compare import Plain, Spoiler, compare, control, importable, swap, workload, zero
from kvproof.impl.vllm.e2e.engine import Answer, Engine
from kvproof.impl.vllm.e2e.misses import SETTINGS, SHAPES, Seen, Shape
from kvproof.impl.vllm.e2e.models import MODELS

BENCH = Path(__file__).parent.parent / "bench" / "e2e.py"
MISSES = BENCH.with_name("misses.py")
HAS_VLLM = importlib.util.find_spec("vllm") is not None

REASON = "this interpreter has no vllm: bench/e2e.py says how to set one up"

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason=REASON)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(MODELS["granite"])
    yield engine
    engine.close()


@pytest.mark.skipif(HAS_VLLM, reason="this interpreter has a vllm")
@pytest.mark.parametrize("bench", [BENCH, MISSES], ids=lambda bench: bench.stem)
def test_without_a_vllm_the_bench_says_what_is_missing(bench: Path) -> None:
    done = subprocess.run([sys.executable, bench], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert "has no vllm" in done.stdout


def test_the_stored_explanations_are_in_the_words_of_today() -> None:
    lines = (BENCH.parent / "results" / "misses.txt").read_text(encoding="utf-8").splitlines()
    said = [line.partition(": ")[2].partition(": ")[2] for line in lines if line.startswith("    kvproof: ")]
    assert said == [shape.says for shape in SHAPES]


@needs_vllm
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_changes_nothing(name: str, tmp_path: Path) -> None:
    missing = [need for need in MODELS[name].needs if not importable(need)]
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}, which does not import here")
    command = [sys.executable, BENCH, "--model", name, "--json", tmp_path / "e2e.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "e2e.json").read_text())
    assert not found["wrong"]
    assert found["resumed"] > 0.5 * found["requests"]
    assert found["states"] > 100
    assert all(noticed["all"] for noticed in found["control"].values())


@needs_vllm
@pytest.mark.slow
@pytest.mark.release
class TestFaults:
    """Each is made in the running engine; the comparison that a clean run passes must say so."""

    def broken(self, engine: Engine, fault: Callable[[], None], at: int) -> str:
        """What ``compare`` says of a workload in which ``fault`` happens after so many steps."""
        steps = 0

        def happen() -> None:
            nonlocal steps
            steps += 1
            if steps == at:
                fault()

        def run(engine: Engine) -> list[Answer]:
            engine.after_step.append(happen)
            try:
                return workload(engine)
            finally:
                engine.after_step.remove(happen)

        wrong = compare(engine, run).wrong
        assert steps > at
        return "\n".join(wrong)

    def test_a_resume_reads_the_keyed_state_of_every_group(self, engine: Engine) -> None:
        """Else a comparison of outputs, or of states, would leave some of them out."""
        rng = random.Random(2)
        prompt = [rng.randrange(512) for _ in range(2 * engine.block + 9)]
        engine.reset()
        plain = engine.serve("one", prompt, 4)
        newest = [keyed for keyed in engine.keyed() if len(keyed.prefix) == 2 * engine.block]
        assert {keyed.group for keyed in newest} == set(engine.groups)
        again = engine.serve("two", prompt, 4)
        assert again.cached == 2 * engine.block
        assert again.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        for keyed in newest:
            state = engine.state(keyed.group, keyed.block)
            engine.write_state(keyed.group, keyed.block, None)
            assert engine.serve("three", prompt, 4).logprobs != pytest.approx(plain.logprobs, abs=1e-4), keyed.group
            engine.write_state(keyed.group, keyed.block, state)
        assert engine.serve("four", prompt, 4).logprobs == pytest.approx(plain.logprobs, abs=1e-4)

    def test_another_prefix_has_another_state(self, engine: Engine) -> None:
        """Else any state would do."""
        rng = random.Random(3)
        prompts = [tuple(rng.randrange(512) for _ in range(engine.block)) for _ in range(2)]
        plain = Plain(engine)
        one, other = (plain.states(prompt) for prompt in prompts)
        for group in engine.groups:
            for a, b in zip(one[group], other[group], strict=True):
                assert (a - b).abs().max() > 0.1 * b.abs().max()

    @pytest.mark.parametrize("spoil", [zero, swap])
    def test_spoiled_states_are_noticed(self, engine: Engine, spoil: Spoiler) -> None:
        noticed = control(engine, spoil)
        assert noticed.all, noticed

    def test_a_control_that_spoils_nothing_notices_nothing(self, engine: Engine) -> None:
        noticed = control(engine, lambda engine, one, other: None)
        assert noticed.resumed
        assert not noticed.by_answers
        assert not noticed.by_states

    def test_a_state_that_is_overwritten_while_it_is_keyed_is_noticed(self, engine: Engine) -> None:
        def overwrite() -> None:
            for keyed in engine.keyed():
                engine.write_state(keyed.group, keyed.block, None)

        said = self.broken(engine, overwrite, at=40)
        assert "is another token without a cache" in said
        assert "differs from it by" in said

    def test_keys_that_name_each_others_blocks_are_noticed(self, engine: Engine) -> None:
        def exchange() -> None:
            keys = engine.pool.cached_block_hash_to_block._cache
            for group in engine.groups:
                of_group = [key for key in keys if int.from_bytes(key[-4:], "big") == group]
                first, last = of_group[0], of_group[-1]
                keys[first], keys[last] = keys[last], keys[first]

        assert "differs from it by" in self.broken(engine, exchange, at=40)


# -- why so few hits --------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("model", sorted({SETTINGS[shape.setting].model.name for shape in SHAPES}))
def test_public_shapes_of_no_hits_get_the_right_explanation(model: str, tmp_path: Path) -> None:
    command = [sys.executable, MISSES, "--model", model, "--json", tmp_path / "misses.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "misses.json").read_text())
    assert [one["name"] for one in found] == [s.name for s in SHAPES if SETTINGS[s.setting].model.name == model]
    for one in found:
        assert (one["seen"]["cached"], one["wrong"]) == (0, [])
        assert one["of contrast"]["cached"] > 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.setting}: {shape.name}")
def test_a_miss_is_right_only_with_its_line_and_its_counters_and_a_contrast_that_hits(shape: Shape) -> None:
    miss = Seen(0, (shape.line,), {shape.counts: 1}, {shape.counts: shape.attention})
    hit = Seen(64, (), {}, {})
    assert shape.wrong(miss, hit) == []
    for changes in (
        {"cached": 32},
        {"lines": ()},
        {"lines": miss.lines * 2},
        {"hits": {}},
        {"lost": {shape.counts: 1}},
    ):
        assert len(shape.wrong(dataclasses.replace(miss, **changes), hit)) == 1
    assert shape.wrong(miss, dataclasses.replace(hit, cached=0)) == ["the contrast finds nothing either"]
    assert "for the same reason" in "".join(shape.wrong(miss, dataclasses.replace(hit, hits=miss.hits)))


class TestCopies:
    """The kernels' stand-ins, on two requests of which the second is in row 1 of the block table."""

    BLOCK, WINDOW, WIDE, HEAD = 4, 3, 5, 6

    def states(self) -> tuple[Any, Any, tuple[Any, ...]]:
        """Windows and temporal states of ten blocks, and what the kernels are told of them."""
        torch = pytest.importorskip("torch")
        windows = torch.arange(10.0 * self.WINDOW * self.WIDE).reshape(10, self.WINDOW, self.WIDE)
        temporal = torch.arange(10.0 * self.HEAD).reshape(10, self.HEAD) + 1000
        self.table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
        told = (
            torch.tensor([self.table.data_ptr()]),
            self.table.stride(0),
            torch.tensor([windows.data_ptr(), temporal.data_ptr()]),
            torch.tensor([4 * self.WINDOW * self.WIDE, 4 * self.HEAD]),
            torch.tensor([4, 4]),
            torch.tensor([self.WIDE, self.HEAD]),
            torch.tensor([self.WINDOW, 0]),
            torch.tensor([0, 0]),
            None,
            None,
        )
        return windows, temporal, told

    def precopy(self, told: tuple[Any, ...], *columns: Any, rows_first: bool = False) -> None:
        copies.precopy(*columns, *told, None, 2, CONV_STATE_DIM_FIRST=rows_first, HAS_IDX_MAPPING=False)

    def test_a_request_takes_its_state_into_a_new_block(self) -> None:
        windows, temporal, told = self.states()
        old, before = windows.clone(), temporal.clone()
        self.precopy(told, [2, 1], [-1, 0], [0, 1])  # the first is new, the second had one draft accepted
        assert (windows[6, :-1] == old[5, 1:]).all()
        assert (temporal[6] == before[6]).all(), "it is in the column of the accepted token already"
        untouched = [block for block in range(10) if block != 6]
        assert (windows[untouched] == old[untouched]).all()
        self.precopy(told, [3, 1], [0, 1], [0, 0])
        assert (temporal[4] == before[1]).all()
        assert (windows[4] == old[1]).all()

    def test_what_is_accepted_up_to_a_boundary_is_kept_there(self) -> None:
        windows, temporal, told = self.states()
        old, before = windows.clone(), temporal.clone()
        # A step of 2 tokens after 3, the draft accepted: its first token comes to the boundary 4. After 6: its second.
        accepted, column, left = [2, 2], [1, 1], [2, 2]
        copies.postprocess(
            accepted, column, [2, 2], [3, 6], [1, 1], *told, left, None, 2, block_size=4, CONV_STATE_DIM_FIRST=False
        )
        assert (windows[1] == old[2]).all()
        assert (temporal[1] == before[2]).all()
        assert (windows[6, :-1] == old[6, 1:]).all()
        assert (temporal[6] == before[7]).all()
        assert left == [2, 1]

    def test_what_is_not_copied_here_is_refused(self) -> None:
        told = self.states()[2]
        with pytest.raises(NotImplementedError, match="row by row"):
            self.precopy(told, [1, 1], [0, 0], [0, 0], rows_first=True)
