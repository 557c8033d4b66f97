"""Where everything of one step lies: the indices, worked out once and used by every layer.

The tokens of all rows lie one after another, row by row ("packed"). Per attention group the plan says where each
token's key and value go and what each row reads; for the recurrent groups it cuts every row at the positions where its
state is saved. The first pieces of all rows form one wave, the second ones the next: a wave is one call of the kernel,
and hands its final states on to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from kvproof.impl.reference.batch import Row
from kvproof.impl.reference.kernels import Reads
from kvproof.spec.config import Config, Group

FEW = 16
"""Rows of at most so many tokens read in one bundle; a longer one is work enough to be a bundle of its own."""


@dataclass(frozen=True)
class Table:
    """An attention group's part: the keys and values of ``tokens`` (None: all) go to ``offset`` of ``block``.

    A token that no block takes is written nowhere. Whoever reads it reads the null block, which nobody ever wrote: NaN.
    """

    tokens: Tensor | None
    block: Tensor
    offset: Tensor
    reads: tuple[Reads, ...]


@dataclass(frozen=True)
class Wave:
    """One piece each of some ``rows``: its tokens (None: all of the step's, in order), and the pieces' lengths."""

    rows: Tensor
    tokens: Tensor | None
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class States:
    """A recurrent group's part. Row i's state is read from ``block[i]``, or is zero where ``fresh[i]``.

    Then ``targets`` get temporal states, numbered through all rows' initial states and then each wave's final ones
    (``temporal``), and convolution windows, which are slots of the padded inputs (``window``: (targets, kernel - 1)).
    """

    block: Tensor
    fresh: Tensor
    targets: Tensor
    temporal: Tensor
    window: Tensor


@dataclass(frozen=True)
class Convolution:
    """Each row's inputs behind its window, in ``slots`` slots: where windows and tokens go, what a token reads."""

    slots: int
    windows: Tensor
    tokens: Tensor
    reads: Tensor


@dataclass(frozen=True)
class Plan:
    """A step. ``outputs`` are the packed positions whose next token is wanted, row by row."""

    ids: Tensor
    positions: Tensor
    outputs: Tensor
    tables: dict[int, Table]
    states: dict[int, States]
    waves: tuple[Wave, ...]
    convolution: Convolution


def plan_step(rows: Sequence[Row], config: Config, kernel: int, device: torch.device) -> Plan:
    """The plan for ``rows``, at least one, on ``device``. ``kernel`` is the convolution's width.

    Raises ValueError, with the request, for a row without tokens and for a save outside its chunk.
    """
    for row in rows:
        if not row.tokens:
            raise ValueError(f"{row.request}: a row without tokens")
    lengths = [len(row.tokens) for row in rows]
    firsts = [0, *accumulate(lengths)]
    row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    starts = torch.tensor([row.start for row in rows])
    positions = starts[row_of] + torch.arange(firsts[-1]) - torch.tensor(firsts)[row_of]
    outputs = [range(end - row.outputs, end) for row, end in zip(rows, firsts[1:], strict=True)]
    tables, states = {}, {}
    pieces, waves = _cut(rows, firsts, device)
    for index, group in enumerate(config.groups):
        if group.kind == "mamba":
            states[index] = _states(rows, index, pieces, firsts, kernel, device)
        else:
            tables[index] = _table(rows, index, group, row_of, positions, firsts, device)
    return Plan(
        ids=torch.tensor(list(chain.from_iterable(row.tokens for row in rows))).to(device),
        positions=positions.to(device),
        outputs=torch.tensor(list(chain.from_iterable(outputs)), dtype=torch.int64).to(device),
        tables=tables,
        states=states,
        waves=waves,
        convolution=_convolution(row_of, firsts, kernel, device),
    )


# -- attention --------------------------------------------------------------------------------------------------------


def _table(
    rows: Sequence[Row],
    index: int,
    group: Group,
    row_of: Tensor,
    positions: Tensor,
    firsts: Sequence[int],
    device: torch.device,
) -> Table:
    size = group.block_size
    slots = max(max(len(row.tables[index]), -(-row.end // size)) for row in rows)
    table = torch.tensor([[*row.tables[index], *([0] * (slots - len(row.tables[index])))] for row in rows])
    block = table[row_of, positions // size]
    taken = (block != 0).nonzero()[:, 0]
    bundles = [[r] for r, row in enumerate(rows) if len(row.tokens) > FEW]
    bundles.append([r for r, row in enumerate(rows) if len(row.tokens) <= FEW])
    reads = tuple(_reads(rows, bundle, table, group, firsts, device) for bundle in bundles if bundle)
    return Table(
        tokens=None if len(taken) == len(block) else taken.to(device),
        block=block[taken].to(device),
        offset=(positions % size)[taken].to(device),
        reads=reads,
    )


def _reads(
    rows: Sequence[Row],
    bundle: Sequence[int],
    table: Tensor,
    group: Group,
    firsts: Sequence[int],
    device: torch.device,
) -> Reads:
    chosen = [rows[r] for r in bundle]
    start = torch.tensor([row.start for row in chosen])[:, None]
    end = torch.tensor([row.end for row in chosen])[:, None]
    first = torch.tensor([firsts[r] for r in bundle])[:, None]
    low = (start - group.window + 1).clamp(min=0) if group.kind == "window" else torch.zeros_like(start)
    step = torch.minimum(torch.arange(int((end - start).max())), end - start - 1)
    asking = (start + step)[:, None, :, None]
    position = low + torch.arange(int((end - low).max()))
    at = position[:, None, None, :]
    mask = at <= asking
    if group.kind == "window":
        mask &= at > asking - group.window
    position = torch.minimum(position, end - 1)
    block = table[bundle].gather(1, position // group.block_size)
    return Reads(
        block=block.to(device),
        offset=(position % group.block_size).to(device),
        mask=mask.to(device),
        query=(first + step).to(device),
    )


# -- recurrence -------------------------------------------------------------------------------------------------------


def _cut(
    rows: Sequence[Row], firsts: Sequence[int], device: torch.device
) -> tuple[list[dict[int, int]], tuple[Wave, ...]]:
    """Per row, position to the number of its state as :class:`States` counts them; and the waves."""
    ends = []
    for row in rows:
        for save in row.saves:
            if not row.start <= save.position <= row.end:
                raise ValueError(f"{row.request}: a save at {save.position}, outside {row.start} to {row.end}")
        ends.append(sorted({row.end, *(s.position for s in row.saves if any(s.blocks))} - {row.start}))
    numbers = [{row.start: r} for r, row in enumerate(rows)]
    waves: list[Wave] = []
    count = len(rows)
    for piece in range(max(len(row_ends) for row_ends in ends)):
        members = [r for r, row_ends in enumerate(ends) if piece < len(row_ends)]
        lengths, tokens = [], []
        for r in members:
            begin, end = ends[r][piece - 1] if piece else rows[r].start, ends[r][piece]
            offset = firsts[r] - rows[r].start
            tokens.append(range(offset + begin, offset + end))
            lengths.append(end - begin)
            numbers[r][end] = count
            count += 1
        whole = sum(lengths) == firsts[-1]
        chosen = None if whole else torch.tensor(list(chain.from_iterable(tokens))).to(device)
        waves.append(Wave(torch.tensor(members).to(device), chosen, tuple(lengths)))
    return numbers, tuple(waves)


def _states(
    rows: Sequence[Row],
    index: int,
    numbers: Sequence[dict[int, int]],
    firsts: Sequence[int],
    kernel: int,
    device: torch.device,
) -> States:
    block = torch.tensor([row.state[index] for row in rows])
    # A block saved to twice keeps the later state: a dictionary, not a list, since a scatter promises no order.
    saved = {
        save.blocks[index]: (numbers[r][save.position], firsts[r] + r * (kernel - 1) + save.position - row.start)
        for r, row in enumerate(rows)
        for save in row.saves
        if save.blocks[index]
    }
    number = torch.tensor([number for number, _ in saved.values()], dtype=torch.int64)
    window = torch.tensor([window for _, window in saved.values()], dtype=torch.int64)
    return States(
        block=block.to(device),
        fresh=(block == 0).to(device),
        targets=torch.tensor(list(saved), dtype=torch.int64).to(device),
        temporal=number.to(device),
        window=(window[:, None] + torch.arange(kernel - 1)).to(device),
    )


def _convolution(row_of: Tensor, firsts: Sequence[int], kernel: int, device: torch.device) -> Convolution:
    count = len(firsts) - 1
    window = torch.tensor(firsts[:-1]) + torch.arange(count) * (kernel - 1)
    oldest = torch.arange(firsts[-1]) + row_of * (kernel - 1)
    return Convolution(
        slots=firsts[-1] + count * (kernel - 1),
        windows=(window[:, None] + torch.arange(kernel - 1)).to(device),
        tokens=(oldest + kernel - 1).to(device),
        reads=(oldest[:, None] + torch.arange(kernel)).to(device),
    )
