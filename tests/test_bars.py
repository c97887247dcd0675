"""How big and how tangled the package may be: shapes may only fall; sizes grow in a commit that says what for.

``python -m tests.test_bars`` prints what is measured now.
"""

from __future__ import annotations

import ast
import inspect
import io
import math
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import lightning.fabric
import lightning.pytorch as pl
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

LONGEST = 400  # lines of a module; tests/test_layers.py names those that are longer
METHODS = 25  # of a class, besides those that override Lightning's
ARGUMENTS = 8  # of a constructor
FAN_OUT = 22  # modules of the package that one imports
SHORT = 90  # lines: such a module with a single importer belongs into it
FRAGMENTS = {
    *("What", "Who", "Whose", "How", "Which", "Those", "Why", "Where", "Whether", "As", "It", "Of", "By", "Until"),
    *("Is", "Are", "Was", "Were", "Has", "Have", "Had", "Did", "May", "Can"),
}  # words with which the first line of a docstring is a question, or a part of a sentence
NOUNS = {"Delays", "Figures", "Names", "Places", "Processes", "Samples"}  # and verbs

SHAPES = {
    "classes with too many methods": 0,
    "constructors with too many arguments": 0,
    "modules with too many imports": 1,
    "class names used twice": 1,
    "short modules with one importer": 3,
    "reaches into another object's privates": 0,
    "uses of Lightning's private names": 0,
    "circles": 0,
    "summaries without a subject or verb": 0,
    "summaries in another mood": 0,
}
"""How many there may be. These numbers are only ever made smaller."""

SIZES: dict[str, tuple[int, int]] = {
    "checkpoints": (753, 8),
    "data": (600, 5),
    "dealing": (600, 6),
    "exchange": (2848, 22),
    "heterogeneity": (469, 8),
    "loop": (2674, 16),
    "membership": (1305, 11),
    "optim": (319, 4),
    "partition": (3878, 27),
    "pipeline": (1889, 17),
    "placement": (3256, 22),
    "policies": (2729, 24),
    "recipes": (8233, 90),
    "scheduler": (5540, 40),
    "seeing": (2079, 15),
    "simulate": (707, 5),
    "strategy": (871, 6),
    "supervision": (1307, 12),
    "sync": (2780, 16),
    "top": (1576, 12),
    "topology": (600, 5),
    "worker": (4201, 26),
}
"""Code lines and modules of each room, without docstrings, comments and blank lines."""

WAY = 40
"""Modules of the package in which code runs between two mini-batches of SemiDecentralized under 1F1B, on two pipelines
of two stages. The aim is 30; the number is only ever made smaller."""

CALLS = 256
"""Python functions that a step of one pipeline of one stage calls beyond a step of Lightning's DDP, which calls about
1,850; the number is only ever made smaller."""

FOREIGN = {"_apply", "_buffers", "_device", "_modules", "_parameters", "_values", "_version"}
"""Private names of torch that the package has, too."""
LIGHTNING = ("lightning.", "lightning_utilities.")
_DECLARED = re.compile(r"(?:def |class |self\.|\w\.(?=_\w+ = ))(_[a-zA-Z]\w*)")
FREE_ARGUMENTS = {"SDPipeStrategy.__init__"}  # users' options


@cache
def modules() -> dict[str, Path]:
    """Of the package and of recipes/, by their full names."""
    paths = [path for top in (PACKAGE, "recipes") for path in sorted((ROOT / top).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    return {name: path for name, path in named.items() if not name.startswith(f"{PACKAGE}.conf")}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def of_the_package() -> list[str]:
    return [name for name in modules() if name.partition(".")[0] == PACKAGE]


@cache
def nodes(name: str) -> list[ast.AST]:
    """Of :func:`tree`, in no order."""
    return list(ast.walk(tree(name)))


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


def classes(name: str) -> Iterator[ast.ClassDef]:
    return (node for node in nodes(name) if isinstance(node, ast.ClassDef))


def functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [child for child in node.body if isinstance(child, ast.FunctionDef)]


def overridden() -> set[str]:
    """Names of Lightning's hooks and strategy methods."""
    kinds = (pl.strategies.DDPStrategy, pl.callbacks.Callback, pl.LightningModule)
    return {name for kind in kinds for name in dir(kind)}


def many_methods() -> list[str]:
    known = overridden()
    return [
        f"{module}.{node.name}: {count}"
        for module in of_the_package()
        for node in classes(module)
        if (count := sum(method.name not in known for method in functions(node))) > METHODS
    ]


def many_arguments() -> list[str]:
    found = []
    for module in of_the_package():
        for node in classes(module):
            for method in functions(node):
                count = len(method.args.posonlyargs + method.args.args + method.args.kwonlyargs) - 1
                name = f"{node.name}.{method.name}"
                if method.name == "__init__" and count > ARGUMENTS and name not in FREE_ARGUMENTS:
                    found.append(f"{module}.{name}: {count}")
    return found


def many_imports() -> list[str]:
    counts = {module: len(imports(module)) for module in of_the_package()}
    return [f"{module}: {count}" for module, count in counts.items() if count > FAN_OUT]


def twice() -> list[str]:
    homes = defaultdict(set)
    for module in of_the_package():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module)
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(homes.items()) if len(where) > 1]


def dust() -> list[str]:
    importers = Counter(other for module in modules() for other in imports(module))
    return [
        module
        for module in of_the_package()
        if importers[module] == 1
        and modules()[module].name != "__init__.py"
        and len(modules()[module].read_text().splitlines()) <= SHORT
    ]


def privates() -> list[str]:
    """Where a private attribute that no class of the same module has is read from something else than ``self``."""
    found = []
    for module in of_the_package():
        if module in INTERNALS:
            continue
        own = {name for node in nodes(module) for name in _declared(node)}
        for node in nodes(module):
            if not (isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")):
                continue
            receiver = node.value
            if isinstance(receiver, ast.Name) and receiver.id in ("self", "cls"):
                continue
            if node.attr not in own and node.attr in _private_names():
                found.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    return found


def names_of_lightning() -> list[str]:
    """Where a module other than those of INTERNALS uses what Lightning keeps private, besides what it overrides."""
    ours = {name for module in of_the_package() for node in nodes(module) for name in _declared(node)}
    foreign = _privates_of_lightning() - import_module(INTERNALS[0]).OVERRIDDEN.keys()
    known = foreign - ours - {*dir(nn.Module()), *dir(nn.Parameter()), *dir(DataLoader)}
    found = []
    for module in of_the_package():
        if module in INTERNALS:
            continue
        for node in nodes(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIGHTNING):
                places = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                names = [place for place in places if place.startswith("_")]
            elif isinstance(node, ast.Attribute):
                names = [node.attr] if node.attr in known else []
            elif isinstance(node, ast.Constant):  # for getattr and the like
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


def fragments() -> list[str]:
    """Docstrings whose first line does not say what the thing is, or what it does."""
    return [
        f"{module}: {text.splitlines()[0]}"
        for module in modules()
        for node in nodes(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) and re.split(r"\W", text, maxsplit=1)[0] in FRAGMENTS
    ]


def moods() -> list[str]:
    """Docstrings of functions that say "Returns" where others say "Return". "The batch ..." says what a function is."""
    texts = {
        (module, text.splitlines()[0]): re.split(r"\W", text, maxsplit=1)[0]
        for module in modules()
        for node in nodes(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node))
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    imperative = set(texts.values()) - NOUNS
    third = {form for verb in imperative for form in (f"{verb}s", f"{verb}es", f"{verb.removesuffix('y')}ies")} - NOUNS
    return [f"{module}: {line}" for (module, line), word in texts.items() if word in third]


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


SHAPES_OF = {
    "classes with too many methods": many_methods,
    "constructors with too many arguments": many_arguments,
    "modules with too many imports": many_imports,
    "class names used twice": twice,
    "short modules with one importer": dust,
    "reaches into another object's privates": privates,
    "uses of Lightning's private names": names_of_lightning,
    "circles": circles,
    "summaries without a subject or verb": fragments,
    "summaries in another mood": moods,
}


def room(name: str) -> str:
    """Modules at the top of the package are one room."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return "recipes"
    path = modules()[name]
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and path.name == "__init__.py") else "top"


def code_lines(name: str) -> int:
    """Lines with tokens that are neither comments nor docstrings."""
    text = modules()[name].read_text()
    docstrings = {
        line
        for node in nodes(name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sizes() -> dict[str, tuple[int, int]]:
    """Code lines and modules of each room."""
    found: dict[str, list[int]] = defaultdict(list)
    for name in modules():
        found[room(name)].append(code_lines(name))
    return {name: (sum(lines), len(lines)) for name, lines in sorted(found.items())}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_only_fall(shape: str) -> None:
    found = SHAPES_OF[shape]()
    assert len(found) <= SHAPES[shape], found


@pytest.mark.distributed
def test_the_way_of_a_step_only_gets_shorter() -> None:
    found = way_of_a_step()
    assert f"{PACKAGE}.exchange.transfers" in found, "the models were averaged"
    assert len(found) <= WAY, found


@pytest.mark.distributed
def test_a_step_only_calls_less() -> None:
    assert calls_of_a_step() <= CALLS


def test_rooms_grow_only_where_the_table_says_so() -> None:
    found = sizes()
    assert found.keys() == SIZES.keys()
    grown = {name: size for name, size in found.items() if size[0] > SIZES[name][0] or size[1] > SIZES[name][1]}
    assert not grown


if __name__ == "__main__":
    for shape, find in SHAPES_OF.items():
        print(f'    "{shape}": {len(find())},')
        for line in find():
            print("       #", line)
    for name, size in sizes().items():
        print(f'    "{name}": {size},')
    print("CALLS =", calls_of_a_step())
    print("WAY =", len(found := way_of_a_step()))
    for name in found:
        print("       #", name)
    total = [sum(column) for column in zip(*(size for name, size in sizes().items() if name != "recipes"), strict=True)]
    print(f"    # the package: {total}")
