"""Functions of all that the explorer's translator understands; a test compares what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Place(NamedTuple):
    row: int
    column: int


@dataclass
class Box:
    name: str
    items: list[int] = field(default_factory=list)
    place: Place | None = None
    inner: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.items)

    def put(self, item: int, *, twice: bool = False) -> int:
        self.items.append(item)
        if twice:
            self.items.append(item)
        return item


def digest(items: Sequence[int]) -> int:
    total = 7
    for item in items:
        total = (total * 31 + item) % 1_000_003
    return total


def arithmetic(a: int, b: int) -> int:
    whole = -(-a // 3) * 1000 + a % 3 * 100 + (a >> 1) + (a << 2) + (a & 6 | b ^ 3)
    return whole + a // b * 7 + a % b * 11 + (a > b) + (not a) * 3


def overflow(a: int, b: int) -> int:
    return (a + 5) * 1_000_000_007 * 1_000_000_007 * (b + 5)


def slices(a: int, b: int) -> int:
    items = list(range(8))
    items[a:b] = [100, 200]
    items[:0] = items[-2:]
    rest = items[b:] + items[:-1] + [-1] * a + [*items[:2], 5, *(a, b)]
    return digest(rest) + rest[a] * 1000 + items.pop(0)


def order(a: int, b: int) -> int:
    box = Box("1")
    total = box.put(a) * 3 + box.put(b) * 5
    if box.put(1) < box.put(a) < box.put(2) or box.put(9) > 3:
        total += both(box.put(4), len(box.items), right=box.put(5, twice=True))
    pair = (box.put(6), box.put(7))
    total, box.place = total + pair[0], Place(pair[1], total)
    box.items[0], box.items[1] = box.items[1], box.items[0]
    return digest(box.items) + total + box.place.column * 3 + box.place[0]


def both(left: int, middle: int = 1, right: int = 2) -> int:
    return left * 100 + middle * 10 + right


def sharing(a: int, b: int) -> int:
    first = [a]
    second = first
    second.append(b)
    first += [1]
    third = list(first)
    third.insert(1, 50)
    rows: list[list[int]] = [[] for _ in range(2)] + [first] * 2 if a else [first, [9]]
    rows[-1].append(3)
    steps: tuple[int, ...] = (1,)
    kept = steps
    steps += (a,)
    return digest(first) + digest(second) * 3 + digest(third) * 5 + digest(steps) + digest(kept) + len(rows[0])


def tables(a: int, b: int) -> int:
    table: dict[tuple[int, int], list[int]] = {}
    for number in range(12):
        table.setdefault((number % 3, number % (a + 2 if a > -2 else 2)), []).append(number)
    table.pop((0, 0), None)
    table.pop((9, 9), None)
    if (1, 1) in table:
        del table[1, 1]
    table[1, 1] = [b]
    found = table.get((2, 0))
    names = {str(place): place for place in range(4)}
    many = {row for row, _ in table} | {a, 77}
    total = digest([row * 10 + column for row, column in table])
    total += digest([number for held in table.values() for number in held])
    total += names[str(2)] + (found[0] if found is not None else -5) + len(table.get((5, 5), [1, 2]))
    total += sum(number in many for number in range(5))
    return total + digest(sorted(key[0] * 3 + held[0] for key, held in table.items()))


def choices(a: int, b: int) -> int:
    items = [3, a, 5, b, 0]
    least = min((item for item in items if item > a), default=-1)
    most = max(item * 2 for item in items if item >= 0)
    first = next((item for item in items if item > b), None)
    found = -9 if first is None else first
    lazy = any(item == a or items[item] > 9 for item in items) and not all(item < 4 for item in items[:2])
    ranked = sorted(enumerate(items), key=lambda entry: (-entry[1] % 4, entry[0]))
    spare = a or b
    kept = [] if a else items
    held = kept or [8, 8]
    counted = 0
    while counted < 10:
        counted += 1
        if counted == 3:
            continue
        if counted > a + 3:
            break
    back = [place * item for place, item in zip(range(9, 0, -2), reversed(items), strict=False)]
    total = least + most * 3 + found * 5 + lazy * 7 + digest([place for place, _ in ranked]) + spare + digest(held)
    return total + counted * 1000 + digest(back)


def records(a: int, b: int) -> int:
    boxes = [Box(str(number), [number], Place(number, 1)) for number in range(4)]
    twin = Box("2", [2], Place(2, 1))
    place = boxes.index(twin)
    boxes.remove(twin)
    another = replace(boxes[a], inner=(a, b), name="x")
    another.items.append(5)
    same = boxes[a] is another or boxes[a] == another or twin in boxes
    named = (another.name == "x") + (boxes[0].name == "0")
    return place * 100 + boxes[a].size * 10 + same + digest(another.inner) + named


def strict(a: int, b: int) -> int:
    total = 0
    for one, other in zip(range(a + 2), [1, 2, 3], strict=True):
        total += one * other
    assert total != 8 - b
    return total


def data(a: int, b: int) -> int:
    out = bytearray()
    out.append(a + 3)
    out += bytes((b + 3, 200))
    kept = bytes(out)
    out.append(100 * a)
    return digest(list(kept)) + digest(list(out)) + kept[-1] + len(kept[1:])
