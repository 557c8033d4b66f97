"""The tutorial, typed as it stands: each command ends as the page says, and prints what the page quotes of it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvproof.impl.vllm.fetch import release_tree

pytestmark = [pytest.mark.release, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
LEFT_OUT = "…"


@dataclass(frozen=True)
class Typed:
    """A command of the page: how it is to end, and the lines that are quoted of its output."""

    command: str
    exit_code: int
    quoted: tuple[str, ...]


def typed(page: str) -> list[Typed]:
    found = []
    for block in re.findall(r"^```\n(\$ .*?)^```", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *quoted = part.splitlines()
            code = re.search(r"# exit code (\d+)$", command)
            found.append(Typed(command, int(code[1]) if code else 0, tuple(quoted)))
    return found


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def quotes(quoted: tuple[str, ...], output: str) -> bool:
    """Whether the lines are in the output one after the other, but for blank ones and what is left out."""
    pattern = r"\n"
    for line in lines("\n".join(quoted)):
        inside = ".*".join(map(re.escape, line.split(LEFT_OUT)))
        pattern += r"(?:.*\n)*?" if line == LEFT_OUT else inside + r"\n"
    return re.search(pattern, "\n" + "\n".join(lines(output)) + "\n") is not None


def test_what_is_quoted_is_told_from_what_is_not() -> None:
    output = "a\n\n  b 1 s\nc\nd\n"
    for right in (("a", "b 1 s"), ("a", LEFT_OUT, "d"), ("b … s", "c"), ("c",), ()):
        assert quotes(right, output), right
    for wrong in (("a", "c"), ("b",), ("d", LEFT_OUT, "a"), ("b … t",), ("e",)):
        assert not quotes(wrong, output), wrong


def test_the_tutorial_goes_as_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    # The page names the cache where it is by default.
    cache = release_tree("0.26.0").parents[1]
    commands = typed(page.replace("~/.cache/kvproof", str(cache)))
    assert len(commands) > 10
    checkout, work, told = tmp_path / "checkout", tmp_path / "tutorial", tmp_path / "told"
    checkout.mkdir()
    told.mkdir()
    (checkout / "findings").symlink_to(ROOT / "findings")
    (checkout / ".venv").symlink_to(sys.prefix)
    script = "".join(
        f"{{ {one.command}\n}} >{told}/{number}.out 2>{told}/{number}.err; echo $? >{told}/{number}.code\n"
        for number, one in enumerate(commands)
    )
    subprocess.run(["bash", "-c", script], cwd=checkout, check=False)
    for number, one in enumerate(commands):
        output, errors = ((told / f"{number}.{end}").read_text(encoding="utf-8") for end in ("out", "err"))
        said = f"{one.command}\n{output[-3000:]}\n{errors[-3000:]}"
        assert int((told / f"{number}.code").read_text(encoding="utf-8")) == one.exit_code, said
        assert quotes(one.quoted, output), said
        if one.command.startswith("kvproof fuzz"):
            assert "\n    new on vllm==0.26.0\n" in output, said
            kept = re.findall(r"^kept in (kept/.+\.json)$", output, re.MULTILINE)
            assert kept, said
            for file in kept:
                assert (work / file).is_file(), file
                assert f"\nreplay: kvproof replay {file} --on vllm==0.26.0\n" in output, said
    assert "SLOT.key-content" in (work / "stale.html").read_text(encoding="utf-8")
