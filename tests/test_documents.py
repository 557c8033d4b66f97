"""The documents: they name commands, options, files and functions that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from kvproof import cli
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.models.smt import CLAIMS
from kvproof.spec.config import Config, Group

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_documents_link_to_what_is_there(file: Path) -> None:
    for href in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
        if not href.startswith("https://"):
            assert (file.parent / href).exists(), f"{file.name} links to {href}"


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_documents_name_commands_and_options_that_there_are(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for line in re.findall(r"(?:^|\$ |`)kvproof ((?:[a-z]+)(?: [^`\n#]*)?)", text, re.MULTILINE):
        words = line.split()
        command = typer.main.get_command(cli.app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command.name != "kvproof", f"{file.name}: there is no kvproof {line}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word.startswith("--"):
                assert word in known | {"--help"}, f"{file.name}: kvproof {command.name} has no {word}"


def blocks(text: str) -> Iterator[str]:
    """The command lines in the blocks of a page, without comments and (after two spaces) explanations."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^(?:\$ )?kvproof (.+)$", block, re.MULTILINE):
            yield re.split(r"  +|\s#", line)[0].strip()


LINES = [f"{file.name}: {line}" for file in DOCUMENTS for line in blocks(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("line", [line for line in LINES if "…" not in line])
def test_command_lines_in_documents_are_taken_by_the_parser(line: str) -> None:
    # As in a usage line: brackets around what may be left out, bars between what may be chosen.
    words = shlex.split(re.sub(r"\[[^]]*\]|\|[\w|]+", "", line.partition(": ")[2]))
    command = typer.main.get_command(cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.name != "kvproof", "there is no such command"
    command.make_context(command.name, words)


def test_the_workflow_is_shell_that_parses_and_names_options_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / "docs" / "kvproof.yml").read_text(encoding="utf-8"))
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "kvproof fuzz vllm@. --preset pull-request --report reports" in scripts[1]
    assert "kvproof fuzz vllm@. --preset nightly --campaign kvproof-campaign --report reports" in scripts[1]
    assert {str(preset) for preset in cli.PRESETS} == {"pull-request", "nightly"}
    steps = {step.get("uses", "").partition("@")[0]: step for job in workflow["jobs"].values() for step in job["steps"]}
    restored, saved = steps["actions/cache/restore"], steps["actions/cache/save"]
    assert restored["with"]["path"] == saved["with"]["path"] == "kvproof-campaign"
    assert saved["with"]["key"].startswith(restored["with"]["restore-keys"])
    assert "always()" in saved["if"], "a search that found something fails, and is kept"


def flat(text: str) -> str:
    return " ".join(re.sub(r"^ *#", "", text, flags=re.MULTILINE).split())


def test_the_main_job_is_told_in_the_same_words_everywhere() -> None:
    words = (
        "the main job: prove the rules, visit small worlds whole, fuzz the reference engine and the newest supported "
        "vLLM release, one table"
    )
    for file in ("README.md", "Makefile"):
        assert words in flat((ROOT / file).read_text(encoding="utf-8")), file
    help_text = str(typer.main.get_command(cli.app).commands["verify"].help)  # type: ignore[attr-defined]
    assert words.capitalize()[:1] + words[1:] in flat(help_text)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_documents_say_the_same_of_what_an_exported_test_imports(file: Path) -> None:
    text = flat(file.read_text(encoding="utf-8"))
    for said in re.findall(r"[^.:(]*\bpytest only\b", text):
        assert said.endswith("imports vLLM, torch and pytest only"), said


def test_each_field_of_a_configuration_is_told_in_vllms_words() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \| \S", text, re.MULTILINE)
    assert sorted(told) == sorted([*Config.__dataclass_fields__, *Group.__dataclass_fields__])


def test_the_table_of_proofs_names_claims_and_invariants_that_there_are() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    table = text[text.index("| proof | invariant |") :]
    claims, invariants = {claim.id for claim in CLAIMS}, {entry.id for entry in CATALOGUE}
    for line in table.splitlines()[2:]:
        proofs, asked = line.strip("| ").split(" | ")
        assert set(re.findall(r"\b[A-Z]+\.[a-z-]+", proofs)) <= claims, line
        assert set(re.findall(r"\b[A-Z]+\.[a-z-]+", asked)) <= invariants, line
