"""What changed between two states of the specification, or two releases: only what decides counts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvproof.errors import UsageError
from kvproof.review import diff, site, sources, status
from kvproof.review.status import Said, Status, Word

ROOT = Path(__file__).parents[1]


def test_only_what_decides_counts_as_a_change() -> None:
    before = (
        'class A:\n    def f(self, x: int) -> int:\n        """Says."""\n        return x + 1\n    def g(self): ...\n'
    )
    after = (
        "class A:\n    def f(self, x: float):\n        # new words\n        logger.info('x')\n        return x + 1\n"
        "    def h(self): ...\n"
    )
    old, new = (sources.functions([("a.py", text)]) for text in (before, after))
    assert [(c.name, c.how) for c in sources.changes(old, new, ["A.f", "A.g", "A.h"])] == [
        ("A.g", "gone"),
        ("A.h", "new"),
    ]
    other = sources.functions([("a.py", before.replace("x + 1", "x + 2"))])
    (change,) = sources.changes(old, other, ["A.f"])
    assert change.place == "a.py:2"
    assert [line for line in change.lines() if line[:1] in "+-"] == ["-    return x + 1", "+    return x + 2"]


def test_verdicts_differ_where_one_holds_and_the_other_does_not() -> None:
    def run(*words: tuple[str, str, str]) -> Said:
        told = [Word("invariant", name, verdict, outcome) for name, verdict, outcome in words]
        return Said("fuzz", "", "", "", "", 0, told)

    before = run(("A", "fuzzed, holds", "pass"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    after = run(("A", "broken", "fail"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    assert [v.id for v in diff._verdicts("fuzz", [before, after])] == ["A"]


def commit(folder: Path, text: str) -> None:
    (folder / "spec" / "rules").mkdir(parents=True, exist_ok=True)
    (folder / "invariants").mkdir(exist_ok=True)
    (folder / "spec" / "rules" / "chunk.py").write_text(f"def split(case):\n    return {text}\n")
    (folder / "invariants" / "slot.py").write_text(f'E = Invariant(id="SLOT.x", statement="It is {text}.", why="w")\n')
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", text], check=True)


def test_two_commits_differ_in_rules_and_sentences(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path, print)
    assert [change.name for change in made.sources["rules"]] == ["split"]
    assert made.sentences == [("SLOT.x", "It is one.", "It is two.")]
    assert "+    return two" in diff.as_text(made)
    assert "It is two." in site.diff_page(made)
    assert "rules (spec/rules, spec/radix.py, spec/logic.py): to be read again" in diff.as_text(made)
    assert "nothing differs" in diff.as_text(diff.Difference("a", "b"))


def test_commits_are_compared_from_any_folder_of_the_checkout(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path / "spec", print)
    assert made.counts()["sources"] == made.counts()["sentences"] == 1


def test_a_file_of_a_commit_that_is_no_python_is_said(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    (tmp_path / "invariants" / "odd.py").write_text("<<<<<<< HEAD\n")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path, print)
    assert made.missing[0] == "HEAD~1 has no stored results"
    assert made.missing[1] == "invariants/odd.py of HEAD, which is no Python"
    assert made.sentences == [("SLOT.x", "It is one.", "It is two.")]


def test_commits_of_nothing_are_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, in one of something else, and without git nothing is compared, which is said."""
    with pytest.raises(UsageError, match="is in no git checkout: change to one of kvproof"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    with pytest.raises(UsageError, match="is no checkout of kvproof"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git, which is not installed"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)


def test_any_checkout_is_compared_and_a_refresh_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    core = tmp_path / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (core / "old.py").write_bytes(b"# Andr\xe9 wrote this\ndef f(): pass\n")
    made = diff.diff(f"vllm@{tmp_path}", f"vllm@{tmp_path}", Status(1, {}), tmp_path, print)
    assert "\n  " not in diff.as_text(made), "the same is the same"
    assert len(made.missing) == 4
    assert all(told.endswith("only") for told in made.missing)
    assert diff._way_out("fuzz 0.33.0") == "kvproof spec refresh 'fuzz 0.33.0'"


def test_a_difference_says_where_gone_and_new_come_from_and_wraps_what_is_long() -> None:
    code = "\n".join(f"    x = {index} + {' + '.join('y' * 300)}" for index in range(100))
    old, new = (sources.functions([("a.py", text)]) for text in ("def f():\n    pass\n", f"def f():\n{code}\n"))
    made = diff.Difference("vllm==0.30.0", "vllm==0.31.0", {"chunk": sources.changes(old, new, ["f"])})
    made.gone = [("A.b", "c")]
    text = diff.as_text(made)
    assert "findings, by the records in findings/" in text
    assert "  gone: A.b (c)" in text
    assert "chunk (what spec/rules/chunk.py mirrors in vLLM): to be read again" in text
    assert "lines more: --html FILE writes all of them" in text
    assert max(map(len, text.splitlines())) < 160
    at = text.splitlines().index("      @@ -1,2 +1,101 @@")
    assert text.splitlines()[at + 4].lstrip(" ").startswith("+  "), "a part of a long line is marked as the line"
    page = site.diff_page(made)
    assert " + ".join("y" * 300) in page
    assert "spec/rules/chunk.py" in page
    assert "By the records in findings/" in page


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("vllm==0.30.0", "HEAD"), "can't be compared"),
        (("HEAD", "no-such-commit"), "no-such-commit is neither a release"),
        (("0.30.0", "0.31.0"), "write a release as vllm==0.30.0"),
        (("--help", "HEAD"), "names no commit"),
    ],
)
def test_what_can_not_be_compared_is_said_in_a_line(pair: tuple[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        diff.diff(*pair, Status(1, {}), ROOT, print)


@pytest.mark.release
@pytest.mark.slow
def test_the_admission_change_of_0_31_is_shown_and_nothing_else() -> None:
    made = diff.diff("vllm==0.30.0", "vllm==0.31.0", status.load(status.stored_file()), ROOT, print)
    changed = {change.name: change for found in made.sources.values() for change in found}
    estimate = "\n".join(changed["MambaManager.get_num_blocks_to_allocate"].lines())
    assert re.search(r"^\+ .*num_new_blocks = min\(", estimate, re.MULTILINE), "the cap is a cap from 0.31.0 on"
    assert ("ADMIT.mamba-bound", "estimate-beyond-bound") in made.gone
    told = {(verdict.checker, verdict.id): (verdict.before[:7], verdict.after[:7]) for verdict in made.verdicts}
    assert told["prove --on", "MAMBA.estimate-bounded/checkpoint"] == ("refuted", "proved")
    # What a search of 0.31.0 came across is not called gone, on record there or not.
    shown = diff._shown(status.load(status.stored_file()).runs["fuzz 0.31.0"])
    assert shown
    assert not shown & set(made.gone)
    # Every function that is named says something else to Python, and no verdict is named on which both sides agree.
    for change in changed.values():
        assert any(line[:1] in "+-" for line in change.lines())
    same = diff.diff("vllm==0.31.0", "vllm==0.31.0", status.load(status.stored_file()), ROOT, print)
    assert same.counts() == {"sources": 0, "sentences": 0, "verdicts": 0, "gone": 0, "new": 0}
