"""The reference engine's model: its paged forward against a forward without any cache."""

from __future__ import annotations

import importlib.util
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproof.impl.reference.batch import Load, Row, Save
from kvproof.impl.reference.kernels import recur
from kvproof.impl.reference.memory import Memory
from kvproof.impl.reference.model import LOGITS_TOLERANCE, STATE_TOLERANCE, TorchModel, build
from kvproof.impl.reference.network import VOCABULARY, make_network, vocabulary_row
from kvproof.impl.reference.null_model import NullModel
from kvproof.spec.config import Config, Group
from kvproof.spec.tracer import states_of

CPU = torch.device("cpu")
HYBRID = (Group("full", 16), Group("mamba", 32))
WINDOWS = (Group("window", 8, window=20), Group("mamba", 32), Group("full", 16), Group("window", 16, window=5))
RECURRENT = (Group("mamba", 32), Group("mamba", 32))
SHAPES = {
    "hybrid": (HYBRID, 1),
    "windows": (WINDOWS, 1),
    "two layers a group": ((Group("full", 16), *RECURRENT), 2),
    "recurrent only": (RECURRENT, 1),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and on a busy machine wait for it a hundred times over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[str, TorchModel]:
    return {name: build(config(groups), 0, CPU, layers) for name, (groups, layers) in SHAPES.items()}


def config(groups: tuple[Group, ...]) -> Config:
    return Config(groups, num_blocks=160, hash_unit=8, step_tokens=256)


class Cache:
    """Blocks in shuffled order, and whoever wants some. Every word that no model writes stays NaN."""

    def __init__(self, model: TorchModel, seed: int = 0, device: torch.device = CPU) -> None:
        self.model, self.random = model, random.Random(seed)
        groups = model.config.groups
        self.memory = Memory(model.config, max(model.words(g.kind, g.block_size) for g in groups), device)
        self.free = list(range(1, model.config.num_blocks))
        self.random.shuffle(self.free)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2**31) for _ in range(count)]

    def sequence(self, tokens: list[int]) -> Sequence:
        return Sequence(self, tokens)

    def states(self) -> tuple[int, ...]:
        """A block for every recurrent group."""
        return tuple(self.free.pop() if g.kind == "mamba" else 0 for g in self.model.config.groups)

    def logits(self, *rows: Row) -> list[Tensor]:
        return list(self.model.logits(rows, self.memory).split([row.outputs for row in rows]))


class Sequence:
    """A request as the engine would keep it: tables, and where its state lies."""

    def __init__(self, cache: Cache, tokens: list[int]) -> None:
        self.cache, self.all, self.done = cache, tokens, 0
        self.groups = cache.model.config.groups
        self.tables: list[list[int]] = [[] for _ in self.groups]
        self.state = (0,) * len(self.groups)
        self.running = cache.states()

    def row(self, count: int, outputs: int | None = None, saves: tuple[Save, ...] = ()) -> Row:
        """The next ``count`` tokens, all of them outputs unless it says otherwise; the state goes on in ``running``."""
        start, end = self.done, self.done + count
        for group, table in zip(self.groups, self.tables, strict=True):
            if group.kind == "mamba":
                continue
            table.extend(self.cache.free.pop() for _ in range(-(-end // group.block_size) - len(table)))
            if group.kind == "window":
                for slot in range(max(0, start - group.window + 1) // group.block_size):
                    table[slot] = 0
        saves = tuple(sorted((*saves, Save(end, self.running)), key=lambda save: save.position))
        row = Row(
            "r",
            tuple(self.all[start:end]),
            start,
            tuple(tuple(table) for table in self.tables),
            self.state,
            saves,
            count if outputs is None else outputs,
            (),
        )
        self.done, self.state = end, self.running
        return row


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())


# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_many_rows_equal_the_forward_without_a_cache(
    models: dict[str, TorchModel], shape: str, seed: int
) -> None:
    model = models[shape]
    cache = Cache(model, seed)
    sequences = [cache.sequence(cache.tokens(cache.random.randrange(1, 150))) for _ in range(4)]
    found: list[list[Tensor]] = [[] for _ in sequences]
    saved = []
    while any(sequence.done < len(sequence.all) for sequence in sequences):
        rows, whose = [], []
        for index, sequence in enumerate(sequences):
            left = len(sequence.all) - sequence.done
            if left and cache.random.random() < 0.8:
                count = min(left, cache.random.choice((1, 1, 2, 3, 8, 17, 32, 70)))
                extra = ()
                if len(cache.free) > 60:
                    position = sequence.done + cache.random.randrange(1, count + 1)
                    extra = (Save(position, cache.states()),)
                    saved.append((extra[0], sequence.all[:position]))
                rows.append(sequence.row(count, saves=extra))
                whose.append(index)
        if rows:
            for index, logits in zip(whose, cache.logits(*rows), strict=True):
                found[index].append(logits)
    for sequence, parts in zip(sequences, found, strict=True):
        plain = model.plain_logits(sequence.all)
        assert difference(torch.cat(parts), plain) < LOGITS_TOLERANCE
        assert torch.cat(parts).argmax(-1).tolist() == plain.argmax(-1).tolist()
        saved.append((Save(sequence.done, sequence.running), sequence.all))
    assert saved
    for save, tokens in saved:
        for group, block in enumerate(save.blocks):
            if block:
                assert model.state_difference(cache.memory, group, block, tokens) < STATE_TOLERANCE
    assert cache.memory.words[[0, *cache.free]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_generate_what_a_run_without_a_cache_does(models: dict[str, TorchModel], shape: str) -> None:
    model = models[shape]
    cache = Cache(model)
    sequences = [cache.sequence(cache.tokens(count)) for count in (1, 30, 45)]
    prompts = [list(sequence.all) for sequence in sequences]
    answers = model.forward([sequence.row(len(sequence.all), outputs=1) for sequence in sequences], cache.memory)
    for _ in range(11):
        for sequence, answer in zip(sequences, answers, strict=True):
            sequence.all += answer
        answers = model.forward([sequence.row(1) for sequence in sequences], cache.memory)
    for prompt, sequence, answer in zip(prompts, sequences, answers, strict=True):
        generated = [*sequence.all[len(prompt) :], *answer]
        assert generated == model.run_plain(prompt, 12)
        assert model.first_wrong(prompt, generated) is None
        assert len(set(generated)) > 6  # else the checks above say little
        generated[7] = (generated[7] + 1) % VOCABULARY
        assert model.first_wrong(prompt, generated) == 7
        assert model.first_wrong(prompt, []) is None


def test_a_row_resumes_from_blocks_that_another_row_wrote(models: dict[str, TorchModel]) -> None:
    model = models["windows"]
    cache = Cache(model)
    tokens = cache.tokens(80)
    first = cache.sequence(tokens)
    checkpoint = Save(32, cache.states())
    cache.logits(first.row(70, saves=(checkpoint,)))
    second = cache.sequence([*tokens[:32], *cache.tokens(30)])
    for group, table in enumerate(first.tables):
        second.tables[group] = [*table[: 32 // model.config.groups[group].block_size]] if table else []
    second.done, second.state = 32, checkpoint.blocks
    # Both go on in one step, the second from the first one's blocks.
    ahead, resumed = cache.logits(first.row(10), second.row(30))
    assert difference(ahead, model.plain_logits(first.all)[70:]) < LOGITS_TOLERANCE
    assert difference(resumed, model.plain_logits(second.all)[32:]) < LOGITS_TOLERANCE


def test_drafts_are_verified_and_an_accepted_ones_state_goes_on(models: dict[str, TorchModel]) -> None:
    model = models["windows"]
    cache = Cache(model)
    tokens = cache.tokens(60)
    sequence = cache.sequence([*tokens[:51], *cache.tokens(3)])  # one token and three drafts, of which none is right
    cache.logits(sequence.row(50))
    drafts = tuple(Save(50 + count, cache.states()) for count in (1, 2, 3))
    (logits,) = cache.logits(sequence.row(4, saves=drafts))
    assert difference(logits, model.plain_logits(sequence.all)[50:]) < LOGITS_TOLERANCE
    for save in drafts:
        accepted = sequence.all[: save.position]
        assert model.state_difference(cache.memory, 1, save.blocks[1], accepted) < STATE_TOLERANCE
    sequence.all, sequence.done, sequence.state = tokens, 51, drafts[0].blocks
    (logits,) = cache.logits(sequence.row(9))
    assert difference(logits, model.plain_logits(tokens)[51:]) < LOGITS_TOLERANCE


def test_a_window_hides_what_is_behind_it() -> None:
    groups = (Group("window", 8, window=5), Group("full", 16))
    only = build(config(groups[:1]), 0, CPU)
    tokens = Cache(only).tokens(40)
    changed = [*tokens[:20], tokens[20] + 1, *tokens[21:]]
    reach = (only.plain_logits(tokens) - only.plain_logits(changed)).abs().amax(-1)
    assert (reach[20:25] > 0.01).all()  # the token itself and four more; one layer, so no further
    assert (reach[:20] == 0).all()
    assert (reach[25:] == 0).all()


@pytest.mark.parametrize("shape", ["hybrid", "windows", "two layers a group"])
def test_a_load_writes_what_the_forward_would_have(models: dict[str, TorchModel], shape: str) -> None:
    model = models[shape]
    cache = Cache(model)
    tokens = cache.tokens(70)
    computed, loaded = cache.sequence(tokens), cache.sequence(tokens)
    cache.logits(computed.row(50))
    cache.logits(loaded.row(16))
    row = loaded.row(34)
    before = cache.memory.words.clone()
    model.fill(Load("r", tuple(tokens[:50]), 16, 50, row.tables, loaded.running), cache.memory)
    touched = {i for i in range(160) if not torch.equal(before[i].nan_to_num(), cache.memory.words[i].nan_to_num())}
    expected = {block for block in loaded.running if block}
    for group, table in zip(model.config.groups, row.tables, strict=True):
        expected |= {block for block in table[16 // group.block_size :] if block} if table else set()
    assert touched == expected
    for group, block in enumerate(loaded.running):
        if block:
            assert model.state_difference(cache.memory, group, block, tokens[:50]) < STATE_TOLERANCE
    later = cache.logits(computed.row(20), loaded.row(20))
    assert difference(later[0], later[1]) < LOGITS_TOLERANCE
    assert difference(later[1], model.plain_logits(tokens)[50:]) < LOGITS_TOLERANCE


def test_a_load_without_a_state_writes_keys_and_values_alone(models: dict[str, TorchModel]) -> None:
    model = models["hybrid"]
    cache = Cache(model)
    tokens = cache.tokens(20)
    row = cache.sequence(tokens).row(20)
    for known in (1, 2):  # a table may be short of blocks
        model.fill(Load("r", tuple(tokens), 0, 20, (row.tables[0][:known], ()), (0, 0)), cache.memory)
        written = {i for i in range(160) if not cache.memory.words[i].isnan().all()}
        assert written == set(row.tables[0][:known])


# -- what it reads and writes -----------------------------------------------------------------------------------------


def test_whatever_is_cached_matters(models: dict[str, TorchModel]) -> None:
    """The negative control: wrong words in what a row reads move its logits far beyond the tolerance."""
    model = models["windows"]
    base = Cache(model)
    sequence = base.sequence(base.tokens(41))
    base.logits(sequence.row(40))
    words, row = base.memory.words.clone(), sequence.row(1)
    right = base.logits(row)[0]
    temporal, state = model.shape.temporal, row.state[1]
    wrong = {
        "temporal state": (state, slice(temporal)),
        "convolution window": (state, slice(temporal, temporal + model.shape.window)),
        "block of full attention": (row.tables[2][0], slice(None)),
        "last position of a window": (row.tables[0][4], slice(7 * model.shape.keys_and_values)),
    }
    for name, (block, part) in wrong.items():
        base.memory.words.copy_(words)
        base.memory.words[block, part] = 0.0
        assert difference(base.logits(row)[0], right) > 20 * LOGITS_TOLERANCE, name
    base.memory.words.copy_(words)
    assert difference(base.logits(row)[0], right) == 0.0


def test_a_state_is_read_before_any_is_saved(models: dict[str, TorchModel]) -> None:
    """Two rows trade blocks: each saves where the other reads."""
    model = models["hybrid"]
    cache = Cache(model)
    one, two = cache.sequence(cache.tokens(40)), cache.sequence(cache.tokens(40))
    cache.logits(one.row(30), two.row(30))
    one.running, two.running = two.running, one.running
    logits = cache.logits(one.row(10), two.row(10))
    for sequence, found in zip((one, two), logits, strict=True):
        assert difference(found, model.plain_logits(sequence.all)[30:]) < LOGITS_TOLERANCE
        assert model.state_difference(cache.memory, 1, sequence.running[1], sequence.all) < STATE_TOLERANCE


def test_saves_at_the_start_into_one_block_twice_and_into_none(models: dict[str, TorchModel]) -> None:
    model = models["hybrid"]
    cache = Cache(model)
    sequence = cache.sequence(cache.tokens(40))
    cache.logits(sequence.row(20))
    at_start, twice = cache.states(), cache.states()
    cache.logits(sequence.row(20, saves=(Save(20, at_start), Save(25, twice), Save(31, twice), Save(33, (0, 0)))))
    assert model.state_difference(cache.memory, 1, at_start[1], sequence.all[:20]) < STATE_TOLERANCE
    assert model.state_difference(cache.memory, 1, twice[1], sequence.all[:31]) < STATE_TOLERANCE
    fresh = cache.sequence(cache.tokens(5))
    nothing = cache.states()
    cache.logits(fresh.row(5, saves=(Save(0, nothing),)))
    assert model.state_difference(cache.memory, 1, nothing[1], []) == 0.0


def test_reading_what_nobody_wrote_shows_and_stays_with_the_row(models: dict[str, TorchModel]) -> None:
    model = models["hybrid"]
    for what in ("state", "keys", "no block"):
        cache = Cache(model)
        one, two = cache.sequence(cache.tokens(40)), cache.sequence(cache.tokens(40))
        cache.logits(one.row(20), two.row(20))
        if what == "state":
            one.state = cache.states()
        elif what == "keys":
            one.tables[0][0] = cache.free.pop()
        else:
            one.tables[0][:] = [*one.tables[0], 0]
        broken, whole = cache.logits(one.row(20), two.row(20))
        assert broken[-1].isnan().all()
        assert difference(whole, model.plain_logits(two.all)[20:]) < LOGITS_TOLERANCE
        assert cache.memory.words[0].isnan().all()


def test_a_step_that_makes_no_sense_is_refused(models: dict[str, TorchModel]) -> None:
    model = models["hybrid"]
    cache = Cache(model)
    sequence = cache.sequence(cache.tokens(9))
    with pytest.raises(ValueError, match="r: a save at 12, outside 0 to 9"):
        cache.logits(sequence.row(9, saves=(Save(12, cache.states()),)))
    with pytest.raises(ValueError, match="r: a row without tokens"):
        cache.logits(sequence.row(0))
    assert model.forward([], cache.memory) == []


# -- what it is made of -----------------------------------------------------------------------------------------------


def naive() -> Any:
    """fla's naive operators, from their file: their package imports Triton and every kernel it has."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "ops", "gated_delta_rule", "naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5,), (1, 70, 2, 3, 64, 1, 129)])
def test_fla_has_the_same_recurrence(lengths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    count = sum(lengths)
    query, key, value = (torch.randn(count, 2, 16, generator=generator) for _ in range(3))
    decay = -0.2 * torch.rand(count, 2, generator=generator)
    beta = torch.rand(count, 2, generator=generator)
    initial = torch.randn(len(lengths), 2, 16, 16, generator=generator)
    out, final = recur(query, key, value, decay, beta, lengths, initial)
    unit = [tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt() for tensor in (query, key)]
    for segment, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths, strict=True)):
        named = dict(zip("qkvg", (*unit, value, decay), strict=True), beta=beta)
        part = {name: tensor[None, end - length : end] for name, tensor in named.items()}
        for operator in (naive().naive_recurrent_gated_delta_rule, naive().naive_chunk_gated_delta_rule):
            theirs, state = operator(**part, initial_state=initial[[segment]].clone(), output_final_state=True)
            assert difference(out[end - length : end], theirs[0]) < 1e-5
            assert difference(final[segment], state[0]) < 1e-5


def test_a_checkpoint_loads_elsewhere_and_back(models: dict[str, TorchModel], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = models["hybrid"]
    model.network.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = TorchModel(model.config, loaded, CPU)
    tokens = Cache(model).tokens(30)
    assert difference(again.plain_logits(tokens), model.plain_logits(tokens)) == 0.0


def test_the_seed_alone_decides_the_weights(models: dict[str, TorchModel]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    network = make_network(models["hybrid"].layers, 0)
    assert torch.equal(torch.get_rng_state(), before)
    same = models["hybrid"].network.state_dict()
    assert all(torch.equal(weight, same[name]) for name, weight in network.state_dict().items())
    other = make_network(models["hybrid"].layers, 1)
    assert not torch.equal(other.lm_head.weight, network.lm_head.weight)


def test_ids_of_any_size_have_a_row() -> None:
    inside = torch.arange(VOCABULARY)
    assert torch.equal(vocabulary_row(inside), inside)
    # Prompts are numbered in blocks; blocks a multiple of the vocabulary apart must not be the same to the model.
    far = vocabulary_row(torch.arange(20) * VOCABULARY * 1000 + 7)
    assert len(far.unique()) == 20
    assert int(vocabulary_row(torch.tensor([2**31])).max()) < VOCABULARY


def test_the_null_model_answers_with_the_prefix() -> None:
    tokens = (5, 6, 7)
    states = tuple(states_of((1, 2, *tokens)))
    row = Row("r", tokens, 2, ((1,),), (0,), (), 2, states[2:])
    memory = Memory(config(HYBRID), NullModel().words("full", 16), CPU)
    assert memory.words.shape[1] == 0
    expected = [1_000_000_000 + (state >> 22) % 65_521 for state in states[-2:]]
    assert NullModel().forward([row], memory) == [expected]
    prefill = Row("r", tokens, 2, ((1,),), (0,), (), 0, states[2:])
    assert NullModel().forward([prefill], memory) == [[]]


# -- other machines ---------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch
if "first" in sys.argv:
    import fla.ops.gated_delta_rule
from kvproof.impl.reference.model import build
from kvproof.spec.config import Config, Group
model = build(Config((Group("mamba", 32),), 9, 8, 64), 0, torch.device("cpu"))
print(model.plain_logits(range(40)).isfinite().all().item(), "fla.ops" in sys.modules, "fla" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU fla is welcome")
@pytest.mark.parametrize(("when", "printed"), [("first", "True True True"), ("never", "True False False")])
def test_transformers_operators_run_whether_it_sees_fla_or_not(when: str, printed: str) -> None:
    """With fla imported first, transformers takes its Triton kernels, which fail without a GPU."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM, when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_computes_the_same(shape: str) -> None:
    groups, layers = SHAPES[shape]
    device = torch.device("cuda")
    model = build(config(groups), 0, device, layers)
    cache = Cache(model, device=device)
    sequences = [cache.sequence(cache.tokens(count)) for count in (3, 90)]
    first = cache.logits(*(sequence.row(len(sequence.all) - 2) for sequence in sequences))
    then = cache.logits(*(sequence.row(2) for sequence in sequences))
    for sequence, *parts in zip(sequences, first, then, strict=True):
        assert difference(torch.cat(parts).cpu(), model.plain_logits(sequence.all)) < LOGITS_TOLERANCE
        for group, block in enumerate(sequence.running):
            if block:
                assert model.state_difference(cache.memory, group, block, sequence.all) < STATE_TOLERANCE
