"""Pages of real faults in a real browser: each opens where it breaks, steps by keys, and complains of nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.models.stateful.film import film
from kvproof.pages import counterexample

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.release,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]

FAULTS = {
    "S1, chunk ends": ("zoo/z01.json", "0.26.0", "SLOT.chunk-end"),
    "S2, the cut": ("zoo/z32.json", "0.27.0", "HIT.only-recurrent-short"),
    "S3, the charge": ("zoo/z10.json", "0.30.0", "ADMIT."),
    "a state under a wrong key": ("findings/slot-key-content-full-key-stale.json", "0.33.0", "SLOT.key-content"),
    "events": ("zoo/z80.json", "0.33.0", "EVENT."),
}

STEPS = """<script>
const seen = [];
const press = (key) => { document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  seen.push(document.getElementById("where").textContent); };
for (const key of ["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "v"]) press(key);
document.getElementById("next").click();
document.body.dataset.seen = seen.join("|");
document.body.dataset.requests = performance.getEntriesByType("resource").length;
</script>"""


def in_browser(page: str, folder: Path) -> tuple[str, str]:
    """The page after some keys, and what the browser said on its console."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += [f"--user-data-dir={folder / 'user'}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", file.as_uri()], check=True, capture_output=True, text=True
    )
    return html.unescape(done.stdout), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def check(page: str, invariant: str, folder: Path) -> None:
    found = re.search(r"<script id=\"film\" type=\"application/json\">(.*?)</script>", page, re.S)
    assert found is not None
    data = json.loads(found[1])
    opened, console = in_browser(page, folder)
    assert console == ""
    frame = data["frames"][data["start"]]
    assert any(violation["id"].startswith(invariant) for violation in frame["violations"])
    for violation in frame["violations"]:
        assert violation["witness"] in opened
    assert 'class="broken"' in opened
    pressed, console = in_browser(page.replace("</body>", f"{STEPS}</body>"), folder)
    assert console == ""
    assert re.search(r'data-requests="0"', pressed), "it asked the network for something"
    seen = re.search(r'data-seen="([^"]*)"', pressed)
    assert seen is not None
    moments = [int(part.partition(" ")[0]) for part in seen[1].split("|")]
    last = len(data["frames"])
    broken = next((place + 1 for place, one in enumerate(data["frames"]) if place and one["violations"]), 1)
    assert moments == [1, min(2, last), min(3, last), max(1, min(3, last) - 1), last, 1, broken]


@pytest.mark.parametrize("name", FAULTS)
def test_a_page_of_a_fault_in_a_browser(name: str, tmp_path: Path) -> None:
    file, release, invariant = FAULTS[name]
    page = tmp_path / "made.html"
    command = [sys.executable, "-P", "-m", "kvproof", "export", str(ROOT / file), "--as", "html"]
    subprocess.run([*command, "--on", f"vllm=={release}", "-o", str(page)], check=True, cwd=tmp_path)
    check(page.read_text(encoding="utf-8"), invariant, tmp_path)


def test_a_page_of_a_state_that_is_not_held_in_a_browser(tmp_path: Path) -> None:
    """S4 is not in vLLM: it is planted in the reference engine."""
    from kvproof.impl.reference.mutants import MUTANTS
    from kvproof.models.mutants.workload import workload
    from kvproof.mutating import planted

    mutant = next(one for one in MUTANTS if one.id == "checkpoint-is-not-held")
    subject = planted(mutant)
    for scenario in workload():
        taken = film(subject, scenario)
        found = [v for frame in taken.frames for v in frame.violations if v.invariant.startswith("TAIL.")]
        if found:
            page = counterexample(scenario, taken, found[0], subject.name)
            check(page, "TAIL.", tmp_path)
            # The block that nobody holds stands below two long tables: a button leads there.
            assert "to what is marked" in in_browser(page, tmp_path)[0].partition("<script")[0]
            return
    pytest.fail("no scenario shows it")
