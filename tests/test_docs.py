"""What the documents say is so: Python blocks run, commands are those of the real parsers, and nothing is left out.

``python -m tests.test_docs`` counts. A block that is not run says why in the line before it: ``<!-- not run: … -->``.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.cli import main
from tests.own_session import script

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_GIVEN = {"torch": torch, "nn": nn, "L": L, "SDPipeStrategy": SDPipeStrategy}
"""What a block need not import that shows a line or two."""
QUESTIONS = 25
LINES_OF_README = 90


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    why_not_run: str | None


def blocks(page: str, language: str) -> list[Block]:
    found = [Block(each["language"], each["code"], each["why"]) for each in _BLOCK.finditer(PAGES[page].read_text())]
    return [block for block in found if block.language == language]


def run(page: str) -> list[Block]:
    return [block for block in blocks(page, "python") if block.why_not_run is None]


@pytest.mark.distributed
@pytest.mark.parametrize("page", [page for page in PAGES if run(page)])
def test_python_blocks_run(page: str, tmp_path: Path) -> None:
    with script(tmp_path, _execute, [block.code for block in run(page)]) as running:
        assert running.wait(90) == 0, running.printed()
        assert running.left() == []


def _execute(codes: list[str]) -> None:
    """One after the other, as one script; workers are forked, which saves importing torch in each."""
    defaults: Any = SDPipeStrategy.__init__.__kwdefaults__
    defaults["start_method"] = "fork"
    model = nn.Linear(2, 2)
    names = {**_GIVEN, "__name__": "__main__", "model": model, "gradients": torch.ones(8), "total": torch.ones(8)}
    for code in codes:
        exec(compile(code, "block", "exec"), names)


def commands() -> Iterator[tuple[str, list[str]]]:
    """With their pages, without what a prompt or a comment adds."""
    for page in PAGES:
        for block in [*blocks(page, ""), *blocks(page, "bash")]:
            if block.why_not_run is None:
                for line in block.code.replace("\\\n", " ").splitlines():
                    line = line.strip().removeprefix("$ ").partition(" # ")[0].partition(" && ")[0]
                    if re.match(r"(sdpipe|python -m|make|torchrun|srun) ", line) and not re.search(r"[\[…]", line):
                        yield page, shlex.split(line)


class _ParsedError(Exception):
    """A parser has taken its arguments."""


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: Any) -> Any:
        parse(parser, *arguments)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)


@pytest.mark.usefixtures("only_parsed")
def test_commands_are_those_of_the_parsers() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    count = 0
    for page, words in commands():
        for program in ("sdpipe", "-m"):
            if program in words[1:] and words[0] in ("torchrun", "srun"):
                words = words[words.index(program) :]
        match words:
            case ["sdpipe", *arguments]:
                with pytest.raises(_ParsedError):
                    main(arguments)
            case ["make", target, *_]:
                assert target in targets, page
            case ["python", "-m", module, *overrides] | ["-m", module, *overrides] if module.startswith("recipes."):
                _compose(module, overrides)
            case ["python", "-m", module, *_] | ["-m", module, *_]:
                assert find_spec(module), page
            case _:
                continue
        count += 1
    assert count > 30


def _compose(module: str, overrides: list[str]) -> None:
    """A sweep's first job."""
    first = re.compile(r"(?:(=\w+),[\w,]+|=interval\((.+),.+\))$")
    given = [first.sub(_first, each) for each in overrides if re.match(r"[+\w]", each)]
    name = {"recipes.bench": "bench"}.get(module, "train")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose(name, [each for each in given if not re.match(r"hydra[./]", each)])


def _first(values: re.Match[str]) -> str:
    return values[1] or f"={values[2]}"


def test_every_question_has_its_answer() -> None:
    assert answered() == list(range(1, QUESTIONS + 1))


def answered() -> list[int]:
    page = PAGES["docs/answers.md"].read_text()
    return [int(number) for number in re.findall(r"^## (\d+)\. .+\?\n\n\S", page, re.MULTILINE)]


SYMPTOMS = {
    "One GPU is slower",
    "Workers get preempted",
    "The network is slow",
    "It does not fit",
    "The loss is worse than with DDP",
}


def test_every_symptom_says_how_to_see_it_what_to_pass_and_what_that_costs() -> None:
    _, *sections = re.split(r"^## ", PAGES["docs/symptoms.md"].read_text(), flags=re.MULTILINE)
    assert {section.partition("\n")[0] for section in sections} == SYMPTOMS
    for section in sections:
        parts = re.findall(r"^\*\*(How to see it|What to pass|What it costs)\.\*\* \S", section, re.MULTILINE)
        assert parts == ["How to see it", "What to pass", "What it costs"], section
        assert re.search(r"```bash\n.*sdpipe ", section)


FIGURES = re.compile(r"\([^()]*one seed|, \**one seed|\bMeasured (for|by `)|\btook \d")


def test_figures_of_measurements_are_on_their_own_page() -> None:
    pages = {page: PAGES[page].read_text() for page in PAGES if page.startswith("docs/") and "benchmarks" not in page}
    assert {page: found[0] for page, text in pages.items() if (found := FIGURES.search(text))} == {}


def test_readme_is_short() -> None:
    assert lines_of_readme() <= LINES_OF_README


def lines_of_readme() -> int:
    return len(PAGES["README.md"].read_text().splitlines())


if __name__ == "__main__":
    python = [block for page in PAGES for block in blocks(page, "python")]
    print(f"questions answered: {len(answered())} of {QUESTIONS}")
    print(f"Python blocks: {sum(block.why_not_run is None for block in python)} of {len(python)} run")
    print(f"commands: {len(list(commands()))}")
    print(f"lines of README: {lines_of_readme()} of at most {LINES_OF_README}")
