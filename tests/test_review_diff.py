"""What changed between two states of the specification, or two releases: only what decides counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvproof.errors import UsageError
from kvproof.review import content, diff, site, sources, status, verdicts
from kvproof.review.status import Status, Word
from kvproof.shipped import OnRecord

sys.path.insert(0, str(Path(__file__).parent))
from reviewed import said

sys.path.pop(0)

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


def test_what_declares_a_type_alone_is_no_function() -> None:
    text = "class A:\n    @overload\n    def f(self): ...\n    @typing.overload\n    def f(self, x): ...\n"
    assert sources.functions([("a.py", f"{text}    def f(self, x=1):\n        return x\n")])["A.f"].line == 6


def test_verdicts_differ_where_one_holds_and_the_other_does_not() -> None:
    def run(*words: tuple[str, str, str]) -> Status:
        return said("fuzz", *(Word("invariant", name, verdict, outcome) for name, verdict, outcome in words))

    before = run(("A", "fuzzed, holds", "pass"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    after = run(("A", "broken", "fail"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    assert [v.id for v in verdicts.differences(*map(verdicts.of_commit, (before, after)))] == ["A"]


def test_a_verdict_on_a_release_is_told_as_on_the_site() -> None:
    """Also one that was recorded after it was stored, and one whose rule has changed since."""
    stored = status.load(status.stored_file())
    (old,) = [word for word in stored.runs["fuzz 0.31.0"].words if word.id == "HIT.limit"]
    words = [word for word in stored.runs["fuzz 0.31.0"].words if word is not old]
    words.append(msgspec.structs.replace(old, digest="another"))
    stored.runs["fuzz 0.31.0"] = msgspec.structs.replace(stored.runs["fuzz 0.31.0"], words=words)
    for release in ("0.30.0", "0.31.0"):
        told = verdicts.of_release(release, stored)
        for entry in content.entries(stored):
            for line in entry.lines:
                run, _, claim = line.checker.partition(": ")
                if run == f"prove --on {release}":
                    assert told["prove --on", claim].told == line.told
                if run == f"fuzz, vLLM {release}":
                    assert told["fuzz", entry.id].told == line.told
    assert told["fuzz", "HIT.limit"].told == "fuzzed, holds (the rule has changed since)"


def test_verdicts_at_a_commit_are_told_in_the_same_words() -> None:
    """Words that were stored name what they are known as, in their way."""
    known = Word("proof", "A", "refuted (known: ADMIT.exact a)", "info")
    old = Word("proof", "B", "refuted (a whole engine did not show it; on record as: ADMIT.exact a, A.b c)", "info")
    today = OnRecord((("ADMIT.exact", "a"), ("A.b", "c")), shown=False).named
    assert today == "refuted (known, a whole engine did not show it: ADMIT.exact a, A.b c)"
    new = Word("proof", "C", today, "info")
    proved = Word("proof", "D", "proved", "pass", data={"premises": "x; y"})
    told = [stand.told for stand in verdicts.of_commit(said("prove --on 0.30.0", known, old, new, proved)).values()]
    unshown = "refuted (known, a whole engine did not show it)"
    assert told == ["refuted (known)", unshown, unshown, "proved under 2 premises"]


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
    assert len(made.missing) == 5
    assert all(told.endswith("only") for told in made.missing[:4])
    assert made.missing[4] == f"findings: no record names vllm@{tmp_path}, so none says that one is there, or is not"
    assert diff._way_out("fuzz 0.33.0") == "kvproof spec refresh 'fuzz 0.33.0'"


def test_a_difference_says_what_records_are_for_and_wraps_what_is_long() -> None:
    code = "\n".join(f"    x = {index} + {' + '.join('y' * 300)}" for index in range(100))
    old, new = (sources.functions([("a.py", text)]) for text in ("def f():\n    pass\n", f"def f():\n{code}\n"))
    made = diff.Difference("vllm==0.30.0", "vllm==0.31.0", {"chunk": sources.changes(old, new, ["f"])})
    made.records = [diff.OnRecord("vllm==0.30.0", (("A.b", "c"),), "no search of vllm==0.31.0 is stored")]
    text = diff.as_text(made)
    assert "findings on record for vllm==0.30.0 only (no search of vllm==0.31.0 is stored):\n  A.b (c)\n" in text
    assert diff.RECORDS in text
    assert "gone" not in text
    assert "chunk (what spec/rules/chunk.py mirrors in vLLM): to be read again" in text
    assert "lines more: --html FILE writes all of them" in text
    assert max(map(len, text.splitlines())) < 160
    at = text.splitlines().index("      @@ -1,2 +1,101 @@")
    assert text.splitlines()[at + 4].lstrip(" ").startswith("+  "), "a part of a long line is marked as the line"
    page = site.diff_page(made)
    assert " + ".join("y" * 300) in page
    assert "spec/rules/chunk.py" in page
    assert diff.RECORDS in page
    assert "On record for vllm==0.30.0 only" in page
    assert re.search(r"<details><summary[^>]*>f \(changed, \d{3} lines\)", page), "what is long is folded"


def test_a_page_opens_what_is_short_wraps_it_and_leads_to_the_release() -> None:
    names = [f"f{index}" for index in range(3)]
    old, new = (
        sources.functions([("vllm/a.py", "".join(f"def {name}(x):\n    return x + {add}\n" for name in names))])
        for add in (1, 2)
    )
    made = diff.Difference("vllm==0.30.0", "vllm==0.31.0", {"chunk": sources.changes(old, new, names)})
    gone = sources.Changed("g", "gone", sources.Function("vllm/a.py", 9, "def g():\n    pass"), None)
    made.sources["machine"] = [gone]
    page = site.diff_page(made)
    assert page.count("<details open>") == 4
    assert page.count('<pre class="lines">') == 4
    assert re.search(r"\.lines \{[^}]*white-space: pre-wrap", page)
    blob = "https://github.com/vllm-project/vllm/blob"
    assert f'<a href="{blob}/v0.31.0/vllm/a.py#L3">vllm/a.py:3</a>' in page
    assert f'<a href="{blob}/v0.30.0/vllm/a.py#L9">vllm/a.py:9</a>' in page, "what is gone is where it was"
    made.before, made.after = "HEAD~1", "HEAD"
    assert blob not in site.diff_page(diff.Difference("HEAD~1", "HEAD", {"rules": made.sources["chunk"]}))


def test_nothing_is_said_of_findings_in_a_release_that_nobody_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No record names it, so that what is on record for the other is not said to be there or gone."""
    monkeypatch.setattr(diff, "_tree", lambda *_: tmp_path)
    stored = status.load(status.stored_file())
    for pair in (("vllm==0.33.0", "vllm==0.33.9"), ("vllm==0.33.9", "vllm==0.33.0")):
        made = diff.diff(*pair, stored, ROOT, print)
        assert made.records == []
        assert [told for told in made.missing if told.startswith("findings: no record names vllm==0.33.9")]
    # 0.27.1 is named by records and was never searched: that is what is known.
    one, other = diff.diff("vllm==0.26.0", "vllm==0.27.1", stored, ROOT, print).records
    assert one.heading == "on record for vllm==0.26.0 only (no search of vllm==0.27.1 is stored)"
    assert other.asked.startswith("the stored search of vllm==0.26.0, kvproof fuzz vllm==0.26.0 ")
    assert other.asked.endswith(" came across none of these")


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
    only = {one.side: set(one.identities) for one in made.records}
    assert ("ADMIT.mamba-bound", "estimate-beyond-bound") in only["vllm==0.30.0"]
    told = {
        (verdict.checker, verdict.id): (verdict.before.split()[0], verdict.after.split()[0])
        for verdict in made.verdicts
    }
    assert told["prove --on", "MAMBA.estimate-bounded/checkpoint"] == ("refuted", "proved")
    # What a search of 0.31.0 came across is not on record for 0.30.0 only, on record there or not.
    shown = verdicts.shown(status.load(status.stored_file()).runs["fuzz 0.31.0"])
    assert shown
    assert not shown & only["vllm==0.30.0"]
    # Every function that is named says something else to Python, and no verdict is named on which both sides agree.
    for change in changed.values():
        assert any(line[:1] in "+-" for line in change.lines())
    # What says the same under other names is told apart, and nothing else is.
    assert {one.change.name: one.told for one in made.renamed} == {
        "Scheduler._mamba_block_aligned_split": "self.mamba_fine_grained_prefix_cache → "
        "self.mamba_shared_prefix_checkpoint",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate": "self._max_admission_blocks_per_request → "
        "self.max_admission_blocks_per_request; takes prefill_end, which it does not read",
    }
    assert len(changed) == 11
    text, page = diff.as_text(made), site.diff_page(made)
    assert f"\n{diff.RENAMED}\n  Scheduler._mamba_block_aligned_split  " in text
    assert "self.max_admission_blocks_per_request; takes prefill_end" in page
    opened = re.findall(r"<details open><summary[^>]*>(\S+) ", page)
    assert {*changed} - {*opened} == {"Scheduler.schedule"}, "only what is long is folded away"
    same = diff.diff("vllm==0.31.0", "vllm==0.31.0", status.load(status.stored_file()), ROOT, print)
    assert same.counts() == {"sources": 0, "renamed": 0, "sentences": 0, "verdicts": 0, "records": 0}
