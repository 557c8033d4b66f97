"""The hybrid language model over blocks: prefill chunks and decodes of many requests in one paged forward.

Start with :func:`build`. The words of a block: an attention group's layers lie side by side, each as (positions, keys
then values); so do a recurrent group's, each as its temporal state (heads, key head, value head) and then its
convolution window, the inputs of the last tokens, oldest first.

The paged forward never reads a position that no row of the sequence wrote, nor one outside the window. It writes all
rows' keys and values of a layer before any row reads them, and reads all rows' states of a layer before any is saved.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from kvproof.impl.reference.batch import Load, Row
from kvproof.impl.reference.kernels import attend, recur
from kvproof.impl.reference.memory import Memory
from kvproof.impl.reference.network import Layer, Plain, layers_of, make_network, vocabulary_row
from kvproof.impl.reference.packing import Convolution, Plan, Table, plan_step
from kvproof.impl.reference.weights import Attention, Block, Recurrence, Weights, read_weights
from kvproof.spec.config import Config

LOGITS_TOLERANCE: Final = 5e-4
"""By how much logits (their standard deviation is 1) may differ from recomputed ones.

Measured on the CPU: at most 5.2e-5 over 71 600 positions (4 seeds of weights, 4 shapes of up to 6 layers, 24 runs of 4
sequences of up to 400 tokens each in random chunks). A state or convolution window that is zeroed moves them by more
than 1; one position of full attention out of 40 by 1e-2 in the median and 1.7e-4 at the least, so that a single wrong
key can hide in the tolerance: the tracers see that one.
"""
STATE_TOLERANCE: Final = 2e-4
"""By how much a word of a state may differ from its recomputation. In the same runs: at most 2.1e-5."""


def build(config: Config, seed: int, device: torch.device, layers: int = 1) -> TorchModel:
    """A model for the configuration: ``layers`` layers for every group, weights by the seed. Needs transformers."""
    return TorchModel(config, make_network(layers_of(config, layers), seed), device, layers)


class TorchModel:
    """The model of :mod:`kvproof.impl.reference.batch`, with floats in the blocks, and its recomputation.

    ``network`` is a ``Qwen3_5ForCausalLM`` in fp32 on the CPU whose layers are those of :func:`layers_of`, in that
    order. It is not to be used for anything else: its window layers are narrowed. Recomputation runs on it, on the CPU
    whatever ``device`` is, so that it shares no kernel with a GPU.
    """

    def __init__(self, config: Config, network: Any, device: torch.device, layers: int = 1) -> None:
        self.config = config
        self.device = device
        self.each = layers
        self.layers = layers_of(config, layers)
        self.network = network
        self.plain = Plain(network, self.layers)
        self.weights: Weights = read_weights(copy.deepcopy(network).to(device))
        self.shape = self.weights.shape

    # -- the protocol -------------------------------------------------------------------------------------------------

    def words(self, kind: str, block_size: int) -> int:
        """How many float32 words one block takes for a group of that kind."""
        return self.each * self._layer_words(kind, block_size)

    def forward(self, rows: Sequence[Row], memory: Memory) -> list[list[int]]:
        """One step over all rows: the greedy next token after each of a row's last ``outputs`` positions.

        Greedy is the first of the largest logits, computed in fp32: where the best two are closer than twice
        LOGITS_TOLERANCE, a recomputation may choose the other (see :meth:`first_wrong`).
        """
        chosen: list[int] = self.logits(rows, memory).argmax(-1).tolist()
        answers = []
        for row in rows:
            answers.append(chosen[: row.outputs])
            chosen = chosen[row.outputs :]
        return answers

    def fill(self, load: Load, memory: Memory) -> None:
        """Write what an external store brings, computed without any cache.

        Where a table has no block nothing is written: a window has passed there.
        """
        caches = self.plain.caches(load.tokens[: load.end])
        at = torch.arange(load.start, load.end)
        for layer, cache in zip(self.layers, caches, strict=True):
            if layer.kind == "mamba":
                if load.state[layer.group]:
                    words = torch.cat((cache.first.flatten(), cache.second.flatten()))
                    self._region(layer, memory)[load.state[layer.group]] = words.to(self.device)
                continue
            size = self.config.groups[layer.group].block_size
            slots = list(load.tables[layer.group]) + [0] * (-(-load.end // size) - len(load.tables[layer.group]))
            block = torch.tensor(slots, dtype=torch.int64)[at // size]
            held, block = at[block != 0], block[block != 0]
            words = torch.cat((cache.first.flatten(1), cache.second.flatten(1)), dim=1)[held]
            where = (block.to(self.device), (held % size).to(self.device))
            self._positions(layer, memory)[where] = words.to(self.device)

    # -- recomputation ------------------------------------------------------------------------------------------------

    def run_plain(self, tokens: Sequence[int], new: int) -> list[int]:
        """Greedy generation of ``new`` tokens without any cache: the whole sequence anew for every token."""
        sequence = list(tokens)
        for _ in range(new):
            sequence.append(int(self.plain.logits(sequence)[-1].argmax()))
        return sequence[len(tokens) :]

    def plain_logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits after every token, without any cache: (tokens, vocabulary)."""
        return self.plain.logits(tokens)

    def first_wrong(self, prompt: Sequence[int], outputs: Sequence[int]) -> int | None:
        """The index of the first output that is not the greedy token after what is before it, or None.

        One forward without any cache, where :meth:`run_plain` takes one a token, and fair to a tie: an output is right
        if its recomputed logit is the best or less than twice LOGITS_TOLERANCE below.
        """
        if not outputs:
            return None
        logits = self.plain.logits([*prompt, *outputs[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(outputs)[:, None])[:, 0]
        wrong = (logits.amax(-1) - chosen >= 2 * LOGITS_TOLERANCE).nonzero()
        return int(wrong[0]) if len(wrong) else None

    def plain_states(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """Recurrent group to the words its block should hold after all the tokens, computed without any cache."""
        groups = [index for index, group in enumerate(self.config.groups) if group.kind == "mamba"]
        found = {index: torch.zeros(self.words("mamba", 0)) for index in groups}
        if tokens:
            size = self._layer_words("mamba", 0)
            for layer, cache in zip(self.layers, self.plain.caches(tokens), strict=True):
                if layer.kind == "mamba":
                    words = torch.cat((cache.first.flatten(), cache.second.flatten()))
                    found[layer.group][layer.place * size : (layer.place + 1) * size] = words
        return found

    def state_difference(self, memory: Memory, group: int, block: int, tokens: Sequence[int]) -> float:
        """The largest absolute difference between a block's state and the recomputed one after ``tokens``.

        Infinite where the block holds a NaN. Compare with STATE_TOLERANCE.
        """
        words = memory.words[block, : self.words("mamba", 0)].cpu()
        return float((words - self.plain_states(tokens)[group]).abs().nan_to_num(nan=float("inf")).max())

    # -- the paged forward --------------------------------------------------------------------------------------------

    def logits(self, rows: Sequence[Row], memory: Memory) -> Tensor:
        """:meth:`forward` before the choice: (all rows' outputs, vocabulary), row by row."""
        weights = self.weights
        if not rows:
            return weights.head.new_empty(0, weights.shape.vocabulary)
        plan = plan_step(rows, self.config, self.shape.kernel, self.device)
        with torch.inference_mode():
            hidden = weights.embedding[vocabulary_row(plan.ids, self.shape.vocabulary)]
            angles = plan.positions[:, None] * torch.cat((weights.frequencies, weights.frequencies))
            rotation = (angles.cos() * weights.rotary_scale, angles.sin() * weights.rotary_scale)
            for layer, block in zip(self.layers, weights.blocks, strict=True):
                entering = self._norm(hidden, block.mixer_norm)
                if isinstance(block.mixer, Attention):
                    mixed = self._attend(block.mixer, entering, rotation, layer, plan.tables[layer.group], memory)
                else:
                    mixed = self._recur(block.mixer, entering, layer, plan, memory)
                hidden = self._mlp(block, hidden + mixed)
            return functional.linear(self._norm(hidden[plan.outputs], weights.norm), weights.head)

    def _norm(self, values: Tensor, factor: Tensor) -> Tensor:
        return functional.rms_norm(values, (values.shape[-1],), factor, self.shape.epsilon)

    def _mlp(self, block: Block, hidden: Tensor) -> Tensor:
        gate, value = functional.linear(self._norm(hidden, block.mlp_norm), block.up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * value, block.down)

    def _attend(
        self,
        weights: Attention,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer: Layer,
        table: Table,
        memory: Memory,
    ) -> Tensor:
        shape = self.shape
        size = shape.kv_heads * shape.head
        asked, keys, values = functional.linear(hidden, weights.project).split_with_sizes(
            [2 * shape.heads * shape.head, size, size], dim=-1
        )
        query, gate = torch.unflatten(asked, -1, (shape.heads, 2, shape.head)).unbind(2)
        query = _rotate(self._norm(query, weights.query_norm), rotation)
        key = _rotate(self._norm(torch.unflatten(keys, -1, (shape.kv_heads, shape.head)), weights.key_norm), rotation)
        cache = self._positions(layer, memory)
        written = torch.cat((key.flatten(1), values), dim=1)
        cache[table.block, table.offset] = written if table.tokens is None else written[table.tokens]
        mixed = attend(query, cache, table.reads) * torch.sigmoid(gate)
        return functional.linear(mixed.flatten(1), weights.out)

    def _recur(self, weights: Recurrence, hidden: Tensor, layer: Layer, plan: Plan, memory: Memory) -> Tensor:
        shape, states = self.shape, plan.states[layer.group]
        region = self._region(layer, memory)
        inputs, gate, beta, rise = functional.linear(hidden, weights.project).split_with_sizes(
            [shape.channels, shape.value_heads * shape.value_head, shape.value_heads, shape.value_heads], dim=-1
        )
        read = region[states.block].masked_fill(states.fresh[:, None], 0.0)
        temporal, windows = read.split_with_sizes([shape.temporal, shape.window], dim=-1)
        padded, mixed = _convolve(inputs, windows, weights.filters, plan.convolution)
        keys = shape.key_heads * shape.key_head
        query, key, value = mixed.split_with_sizes([keys, keys, shape.channels - 2 * keys], dim=-1)
        out, reached = self._waves(
            torch.unflatten(query, -1, (shape.key_heads, -1)),
            torch.unflatten(key, -1, (shape.key_heads, -1)),
            torch.unflatten(value, -1, (shape.value_heads, -1)),
            -weights.rate * functional.softplus(rise + weights.bias),
            torch.sigmoid(beta),
            torch.unflatten(temporal, -1, (shape.value_heads, shape.key_head, shape.value_head)),
            plan,
        )
        if len(states.targets):
            saved = (reached[states.temporal].flatten(1), padded[states.window].flatten(1))
            region[states.targets] = torch.cat(saved, dim=1)
        out = self._norm(out, weights.norm).flatten(1) * functional.silu(gate)
        return functional.linear(out, weights.out)

    def _waves(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """The outputs, and all states reached: the rows' initial ones, then each wave's final ones."""
        repeat = self.shape.value_heads // self.shape.key_heads
        if repeat > 1:
            query, key = query.repeat_interleave(repeat, dim=1), key.repeat_interleave(repeat, dim=1)
        reached = [state]
        out = torch.empty_like(value)
        for wave in plan.waves:
            if wave.tokens is None:
                out, final = recur(query, key, value, decay, beta, wave.lengths, state)
                reached.append(final)
                continue
            at = wave.tokens
            out[at], final = recur(query[at], key[at], value[at], decay[at], beta[at], wave.lengths, state[wave.rows])
            reached.append(final)
            state = state.index_copy(0, wave.rows, final)
        return out, torch.cat(reached)

    # -- where words lie ----------------------------------------------------------------------------------------------

    def _layer_words(self, kind: str, block_size: int) -> int:
        if kind == "mamba":
            return self.shape.temporal + self.shape.window
        return block_size * self.shape.keys_and_values

    def _region(self, layer: Layer, memory: Memory) -> Tensor:
        """A layer's words in every block: (blocks, words)."""
        size = self._layer_words(layer.kind, self.config.groups[layer.group].block_size)
        return memory.words.narrow(1, layer.place * size, size)

    def _positions(self, layer: Layer, memory: Memory) -> Tensor:
        """An attention layer's words, position by position: (blocks, positions, keys and values)."""
        return torch.unflatten(self._region(layer, memory), 1, (-1, self.shape.keys_and_values))


def _rotate(values: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of the first part of every head: (tokens, heads, head)."""
    cosine, sine = rotation[0][:, None], rotation[1][:, None]
    turned, kept = values.split_with_sizes([cosine.shape[-1], values.shape[-1] - cosine.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    return torch.cat((turned * cosine + torch.cat((-high, low), dim=-1) * sine, kept), dim=-1)


def _convolve(inputs: Tensor, windows: Tensor, filters: Tensor, convolution: Convolution) -> tuple[Tensor, Tensor]:
    """The inputs with each row's window before them, (slots, channels), and their causal convolution, activated."""
    padded = inputs.new_empty(convolution.slots, inputs.shape[-1])
    padded[convolution.windows] = torch.unflatten(windows, -1, (-1, inputs.shape[-1]))
    padded[convolution.tokens] = inputs
    return padded, functional.silu((padded[convolution.reads] * filters).sum(1))
