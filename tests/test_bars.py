"""How big and how tangled the project may be. Bars fall with each commit that makes it smaller.

``python -m tests.test_bars`` prints what is measured now.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import lightning.fabric
import lightning.pytorch
import lightning_utilities
import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy, SemiDecentralized
from tests.features.running import Regression, on_four_ranks, one_process, pipelines, train_loader

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_sdpipe"
INTERNALS = (f"{PACKAGE}.lightning_internals", f"{PACKAGE}.lightning_results")
"""Where names that Lightning keeps private may be used."""

BARS = {
    "code lines of the package": 37_672,
    "code lines of recipes, without baselines and tools": 6_998,
    "code lines of tests": 39_000,
    "statements that raise something": 480,
    "types of messages, events, decisions and effects": 77,
}
"""The largest values allowed. A commit that lowers one lowers its bar; a feature that needs more says how much."""

VOCABULARY = re.compile(r"Event|Decision|Request|Reply|Question|Effect|FromProcess")
"""Unions with such a name list the types that their users pass to each other."""

WAY = 28
"""Modules of the package in which code runs between two mini-batches of SemiDecentralized under 1F1B, on two pipelines
of two stages; the number is only ever made smaller."""

CALLS = 166
"""Python functions that a step of one pipeline of one stage calls beyond a step of Lightning's DDP, which calls about
1,850; the number is only ever made smaller."""

FOREIGN = {"_apply", "_buffers", "_device", "_modules", "_parameters", "_values", "_version"}
"""Private names of torch that the package has, too."""
LIGHTNING = ("lightning.", "lightning_utilities.")
_DECLARED = re.compile(r"(?:def |class |self\.|\w\.(?=_\w+ = ))(_[a-zA-Z]\w*)")


@cache
def modules() -> dict[str, Path]:
    """Of the package and of recipes/, by their full names."""
    paths = [path for top in (PACKAGE, "recipes") for path in sorted((ROOT / top).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    return {name: path for name, path in named.items() if not name.startswith(f"{PACKAGE}.conf.")}


@cache
def parsed(path: Path) -> list[ast.AST]:
    """All nodes of a file, its module first, and else in no order."""
    return list(ast.walk(ast.parse(path.read_text())))


def tree(name: str) -> ast.Module:
    module = parsed(modules()[name])[0]
    assert isinstance(module, ast.Module)
    return module


def of_the_package() -> list[str]:
    return [name for name in modules() if name.partition(".")[0] == PACKAGE]


def nodes(name: str) -> list[ast.AST]:
    return parsed(modules()[name])


@cache
def imports(name: str) -> frozenset[str]:
    """Modules of the house that one imports, anywhere, for type checkers too."""
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in modules()} or {node.module}
            if not all(name in modules() for name in names):
                found.add(node.module)
    return frozenset(found & set(modules()) - {name})


def names_of_lightning() -> list[str]:
    """Where a module other than those of INTERNALS uses what Lightning keeps private, besides what it overrides."""
    ours = {name for module in of_the_package() for node in nodes(module) for name in _declared(node)}
    foreign = _privates_of_lightning() - import_module(INTERNALS[0]).OVERRIDDEN.keys()
    known = foreign - ours - {*dir(nn.Module()), *dir(nn.Parameter()), *dir(DataLoader)}
    found = []
    for module in of_the_package():
        if module in INTERNALS:
            continue
        in_texts = {id(part) for node in nodes(module) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIGHTNING):
                places = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                names = [place for place in places if place.startswith("_")]
            elif isinstance(node, ast.Attribute):
                names = [node.attr] if node.attr in known else []
            elif isinstance(node, ast.Constant) and id(node) not in in_texts:  # for getattr and the like
                names = [node.value] if isinstance(node.value, str) and node.value in known else []
            elif isinstance(node, ast.ClassDef):
                inherited = _inherited(module, node.name) & foreign
                names = [each.attr for each in ast.walk(node) if _is_own(each) and each.attr in inherited]
            else:
                continue
            found += [f"{module}:{node.lineno}: {name}" for name in names]
    return found


def knows_lightning(module: str) -> bool:
    """Does it import something of Lightning's, or the names of ours for that?"""
    imported = [node.module or "" for node in nodes(module) if isinstance(node, ast.ImportFrom)]
    return any(f"{other}.".startswith((*LIGHTNING, *INTERNALS)) for other in imported)


def _is_own(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


@cache
def _privates_of_lightning() -> frozenset[str]:
    roots = [Path(package.__path__[0]) for package in (lightning.pytorch, lightning.fabric, lightning_utilities)]
    texts = [path.read_text() for root in roots for path in root.rglob("*.py")]
    return frozenset(name for text in texts for name in _DECLARED.findall(text))


def _inherited(module: str, name: str) -> set[str]:
    """Private names that a class has of Lightning's classes."""
    if not knows_lightning(module):
        return set()
    kind = getattr(import_module(module), name, object)
    return {name for base in kind.__mro__ if base.__module__.startswith(LIGHTNING) for name in _declared_by(base)}


@cache
def _declared_by(base: type) -> list[str]:
    return _DECLARED.findall(inspect.getsource(base))


@cache
def _private_names() -> frozenset[str]:
    """All that classes and modules of the package declare."""
    names = {name for module in of_the_package() for node in nodes(module) for name in _declared(node)}
    return frozenset(name for name in names if name.startswith("_")) - FOREIGN


def _declared(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []
    if isinstance(node, ast.AnnAssign | ast.Assign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def circles() -> list[str]:
    """One after the other, each without the ones before."""
    graph = {module: set(imports(module)) for module in modules()}
    found: list[str] = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found
        except CycleError as error:
            way = error.args[1]
            found.append(" <- ".join(way))
            graph[way[1]].discard(way[0])


class Way:
    """Counts the calls of each module's functions, in any thread, from one call of ``start`` to the next. It is no
    callback, since what the package does around users' hooks would be a part of the way."""

    def __init__(self, start: Callable[..., object]) -> None:
        self._start = start.__code__
        self.seen: list[Counter[str]] = [Counter()]

    def watch(self) -> None:
        """Begin, in this thread and those that it starts."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code is self._start:
                self.seen.append(Counter())
            self.seen[-1][frame.f_globals.get("__name__", "")] += 1


def _way_of_this_rank(directory: Path) -> list[Counter[str]]:
    way = Way(SDPipeStrategy.on_train_batch_start)
    way.watch()
    strategy = SDPipeStrategy(num_stages=2, sync=SemiDecentralized(window=math.inf), schedule="1f1b")
    trainer = pipelines(directory, strategy, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Regression(), train_loader(128))
    return way.seen[2:-1]  # in the first step links are set up, and the last one ends the epoch


def way_of_a_step() -> list[str]:
    """Modules of the package that ran on any of four ranks, and in every step: not in one in which something came late,
    or a heartbeat was due."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = on_four_ranks(_way_of_this_rank, Path(directory))
    steps = [set().union(*step) for step in zip(*ranks, strict=True)]
    return sorted(name for name in set.intersection(*steps) if name.partition(".")[0] == PACKAGE)


def _calls_of_this_rank(directory: Path, ddp: bool) -> int:
    way = Way(Regression.training_step)
    way.watch()
    strategy = DDPStrategy(process_group_backend="gloo") if ddp else SDPipeStrategy(sync=AllReduce())
    trainer = one_process(directory, strategy=strategy, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Regression(), train_loader(64))
    return min(step.total() for step in way.seen[2:-1])  # in some steps garbage is collected


def calls_of_a_step() -> int:
    """Those of a step beyond one of Lightning's DDP, in the middle of an epoch."""
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = (on_four_ranks(_calls_of_this_rank, Path(directory), ddp, count=1) for ddp in (False, True))
    return ours[0] - theirs[0]  # type: ignore[no-any-return]


def code_lines(*paths: Path) -> int:
    """Lines with more than comments and docstrings."""
    count = 0
    for path in paths:
        text, docstrings = path.read_text(), set[int]()
        code = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in ("", "#")}
        for node in parsed(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
                code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # those of a string
        count += len(code - docstrings)
    return count


def raises() -> int:
    """Statements of the package that raise something, not again what was caught."""
    found = [node for module in of_the_package() for node in nodes(module)]
    return sum(isinstance(node, ast.Raise) and node.exc is not None for node in found)


def vocabulary() -> set[str]:
    """Members of the unions that :data:`VOCABULARY` names, with the module of the union."""
    found = set()
    for module in of_the_package():
        for node in tree(module).body:
            if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias" and node.value):
                continue
            if VOCABULARY.search(ast.unparse(node.target)):
                members = {ast.unparse(part) for part in _members(node.value)}
                found |= {f"{module}.{name}" for name in members if not VOCABULARY.search(name)}
    return found


def _members(union: ast.expr) -> list[ast.expr]:
    if isinstance(union, ast.BinOp):
        return _members(union.left) + _members(union.right)
    return [union] if isinstance(union, ast.Name | ast.Attribute) else []


def measured() -> dict[str, int]:
    """What :data:`BARS` limits, in the same order."""
    apart = (ROOT / "recipes" / "baselines", ROOT / "recipes" / "tools")
    recipes = [
        path for path in (ROOT / "recipes").rglob("*.py") if not any(path.is_relative_to(other) for other in apart)
    ]
    counts = (
        code_lines(*(ROOT / PACKAGE).rglob("*.py")),
        code_lines(*recipes),
        code_lines(*(ROOT / "tests").rglob("*.py")),
        raises(),
        len(vocabulary()),
    )
    return dict(zip(BARS, counts, strict=True))


@pytest.fixture(autouse=True, scope="module")
def forgets() -> Iterator[None]:
    """The trees of all files are 200 MB, which every later fork of this process would have."""
    yield
    parsed.cache_clear()


def test_the_house_only_gets_smaller() -> None:
    found = measured()
    assert {name: count for name, count in found.items() if count > BARS[name]} == {}


def test_no_module_imports_itself_by_a_detour() -> None:
    assert circles() == []


def test_what_lightning_keeps_private_is_used_in_one_place() -> None:
    assert names_of_lightning() == []


@pytest.mark.distributed
def test_the_way_of_a_step_only_gets_shorter() -> None:
    found = way_of_a_step()
    assert f"{PACKAGE}.exchange.transfers" in found, "the models were averaged"
    assert len(found) <= WAY, found


@pytest.mark.distributed
def test_a_step_only_calls_less() -> None:
    assert calls_of_a_step() <= CALLS


if __name__ == "__main__":
    for name, count in measured().items():
        print(f'    "{name}": {count:_},')
    print("CALLS =", calls_of_a_step())
    print("WAY =", len(found := way_of_a_step()))
    for name in found:
        print("       #", name)
