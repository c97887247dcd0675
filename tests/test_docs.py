"""What the documents say is so: Python blocks run, commands are those of the real parsers, and nothing is left out.

A block that is not run says why in the line before it: ``<!-- not run: … -->``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc, signature
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

import lightning_sdpipe
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
        running.ends(0)


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
            case ["python", "-m", module, *arguments] if module.startswith("recipes.tools."):
                with pytest.raises(_ParsedError):
                    import_module(module).main(arguments)
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


def test_links_lead_to_headings() -> None:
    """By the anchors of GitHub, which are those of the site."""
    without_code = {
        path: re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for path in PAGES.values()
    }
    anchors = {path: anchors_of(text) for path, text in without_code.items()}
    wrong = []
    for path, text in without_code.items():
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
            page, _, anchor = link.partition("#")
            target = (path.parent / page).resolve() if page else path
            if not target.exists() or (anchor and anchor not in anchors.get(target, ())):
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def user_pages() -> dict[str, str]:
    """The README, and what the tree of the documents has before the pages for contributors."""
    tree, _, _ = PAGES["docs/index.md"].read_text().partition(":caption: Contributing")
    names = ["README.md", *(f"docs/{name}.md" for name in re.findall(r"^([a-z_]+)$", tree, re.MULTILINE))]
    assert len(names) > 20
    return {name: PAGES[name].read_text() for name in names}


PACKAGE = ROOT / "lightning_sdpipe"
INNER = {
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" and "conf" not in path.parts
}
_SHOWN = {"script.py", *(path.name for path in (ROOT / "recipes/examples").rglob("*.py"))}
"""Files that users open, some of which are named like one of the package."""


def internal_names(text: str) -> list[str]:
    """Modules that the page of the API does not name, as dotted paths or files."""
    public = set(re.findall(r"lightning_sdpipe(?:\.\w+)*", PAGES["docs/api.md"].read_text()))
    public |= {f"lightning_sdpipe.{name}" for name in lightning_sdpipe.__all__}
    public |= {".".join(name.split(".")[:length]) for name in public for length in range(1, name.count(".") + 2)}
    found = []
    for name in re.findall(r"(?<![\w/~.-])[\w./]*\w[./]\w+", text):
        module = name.removeprefix("lightning_sdpipe/").removesuffix(".py").replace("/", ".")
        inner = module.removeprefix("lightning_sdpipe.").replace(".", "/")
        if name.startswith("lightning_sdpipe."):
            if module not in public:
                found.append(name)
        elif name.endswith(".py"):
            stem = "/" + inner
            if name not in _SHOWN and any(f"/{known}".endswith(stem) for known in INNER):
                found.append(name)
        elif any(inner == known or inner.startswith(f"{known}/") for known in INNER if "/" in known):
            found.append(name)
    return found


def test_pages_for_users_name_public_modules_only() -> None:
    assert {page: names for page, text in user_pages().items() if (names := internal_names(text))} == {}


def test_the_help_of_the_strategy_has_every_option_with_its_default() -> None:
    text = getdoc(SDPipeStrategy)
    assert text is not None
    described = dict(re.findall(r"^    (\w+): (.+(?:\n     +.+)*)", text, re.MULTILINE))
    options = [each for each in signature(SDPipeStrategy).parameters.values() if each.kind is not each.VAR_KEYWORD]
    assert list(described)[: len(options)] == [option.name for option in options]
    for option in options:
        default = "timedelta(minutes=30)" if option.name == "timeout" else repr(option.default).replace("'", '"')
        words = " ".join(described[option.name].split())
        assert f"Default: ``{default}``" in words, option.name


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().splitlines()) <= 100


def test_addresses_of_the_project_are_those_of_its_package() -> None:
    """They change in pyproject.toml on publication."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert f"url: {urls['Source']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"<{urls['Security']}>" in (ROOT / "SECURITY.md").read_text()
