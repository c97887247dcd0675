"""Fresh processes of tests import Lightning without what torchmetrics would load for metrics that the tests do not use:
scipy, transformers and matplotlib take a third of the seconds. Who imports them by name gets them. And they look for
garbage seldom, which there is little of while modules are imported: another fifth.

And they write their stacks when a test is stuck (see tests/patience.py).

Python imports this module at its start, since ``tests/conftest.py`` puts the folder on PYTHONPATH.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ASKS = "lightning_utilities.core.imports"
_NOT_ASKED_FOR = ("matplotlib", "scipy", "transformers")


class _Lean:
    """Finds the module that Lightning and torchmetrics ask for what is installed, and changes its answers."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _ASKS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module)

        loader.exec_module = execute_and_change
        return spec


def _change(module: Any) -> None:
    is_available, check = module.package_available, module.RequirementCache._check_requirement

    def check_requirement(requirement: Any) -> None:
        check(requirement)
        if str(requirement.requirement).startswith(_NOT_ASKED_FOR):
            requirement.available = False

    module.RequirementCache._check_requirement = check_requirement
    module.package_available = lambda name: name not in _NOT_ASKED_FOR and is_available(name)


gc.set_threshold(20_000, 50, 50)
sys.meta_path.insert(0, _Lean())  # type: ignore[arg-type]
if "SDPIPE_TEST_STACKS" in os.environ:
    faulthandler.register(signal.SIGUSR2, open(os.environ["SDPIPE_TEST_STACKS"], "ab"), all_threads=True)  # noqa: SIM115
