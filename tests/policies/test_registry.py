"""A policy's values as plain data: they survive JSON, and what cannot be is refused before anything starts."""

from __future__ import annotations

import inspect
import math
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import msgspec
import pytest

from lightning_sdpipe import policies
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import GroupPolicy, Policy, PolicyConfig, registry
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized

HERE = "tests.policies.test_registry"


class Often(PolicyConfig, frozen=True):
    """A user's own."""

    times: int = 1
    within: float = 0.5

    def make_policy(self, num_stages: int, num_pipelines: int) -> Policy:
        return GroupPolicy(num_stages, num_pipelines)


class Empty(PolicyConfig, frozen=True):
    def make_policy(self, num_stages: int, num_pipelines: int) -> Policy:
        return object()  # type: ignore[return-value]


def test_every_policy_of_the_package_is_listed() -> None:
    modules = [import_module(f"lightning_sdpipe.policies.{each.name}") for each in iter_modules(policies.__path__)]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    assert {kind for kind in kinds if issubclass(kind, PolicyConfig)} - {PolicyConfig} == {*registry.BUILT_IN.values()}


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_policy_is_found_by_its_name_and_built(name: str) -> None:
    for form in registry.BUILT_IN[name].forms:
        config = registry.make(name, form)
        assert registry.name_of(config) == name
        assert registry.from_json(registry.to_json(config)) == config
        assert registry.build(config, 2, 4).deadline() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1.0}, r"window=-1.0.*from 0 to inf"),
        ({"window": math.nan}, "window=nan"),
        ({"window": "often"}, "window='often'.*paper"),
        ({"connectivity": 0}, "connectivity=0.*from 1"),
        ({"connectivity_unit": "seconds"}, "connectivity_unit='seconds'.*groups"),
        ({"min_group": 0}, "min_group=0"),
        ({"min_group": 3}, r"min_group=3 has no effect with window=auto.*leave min_group out"),
        ({"min_group": 3, "window": math.inf}, "min_group=3 has no effect"),
        ({"max_group": 1}, "max_group=1"),
        ({"max_group": 2, "min_group": 3, "window": 1.0}, "at least min_group"),
        ({"max_group": 2, "window": math.inf}, "contradicts"),
        ({"seating": "near"}, "seating is not a value of SemiDecentralized; it has left the package: leave it out"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SemiDecentralized(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("semi_decentralised", {}, "did you mean semi_decentralized"),
        ("elsewhere", {}, "there are: semi_decentralized.*my_package.policies:RoundRobin"),
        ("semi_decentralized", {"windw": 1}, "windw is not a value of semi_decentralized; did you mean window"),
        ("semi_decentralized", {"window": -1}, "window=-1"),
        ("ad_psgd", {"staleness": 8}, r"ad_psgd; it has left the package.*or use PHDPSGD\(staleness=8\)"),
        ("local_sgd", {}, "missing required field `every`"),
        ("no.such.module:Policy", {}, "No module named 'no'.*working directory, PYTHONPATH"),
        (f"{HERE}:Missing", {}, "has no attribute 'Missing'"),
        (f"{HERE}:HERE", {}, "a policy is named by the class of its values"),
        (f"{HERE}:Often", {"times": "many"}, "Expected `int`, got `str`.*times"),
        (f"{HERE}:Often", {"often": 1}, "often is not a value of"),
    ],
)
def test_what_is_not_there_or_not_allowed_is_refused(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        registry.make(name, values)


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_policies.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="failing_policies:Mine cannot be imported: RuntimeError: no licence"):
        registry.find("failing_policies:Mine")


def test_what_another_process_cannot_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(PolicyConfig, frozen=True):
        pass

    with pytest.raises(ConfigurationError, match=r"Local is defined in a function.*from my_policies import Local"):
        registry.check(Local())
    monkeypatch.setattr(Often, "__module__", "__main__")
    with pytest.raises(ConfigurationError, match="Often is defined in the script that is run"):
        registry.check(Often())


def test_values_that_would_not_arrive_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Expected `int`"):
        registry.check(Often(times="many"))  # type: ignore[arg-type]
    registry.check(Often(within=math.inf))


def test_what_is_made_must_be_a_policy() -> None:
    with pytest.raises(ConfigurationError, match=r"makes a object, which has no on and no deadline"):
        registry.build(Empty(), 1, 1)
    with pytest.raises(ConfigurationError, match="num_pipelines=0"):
        registry.build(NoSync(), 1, 0)


@pytest.mark.parametrize("text", ["{", '{"type": "no_such"}', '{"type": "semi_decentralized", "window": -1}', "[]"])
def test_a_policy_from_bad_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        registry.from_json(text)


@pytest.mark.parametrize("config", [SemiDecentralized(window=0.5, connectivity=None), PartialReduce(group_size=3)])
def test_a_configuration_file_of_lightning_gives_the_values_of_a_class(config: PolicyConfig) -> None:
    parser = pytest.importorskip("jsonargparse").ArgumentParser(exit_on_error=False)
    parser.add_argument("--sync", type=PolicyConfig | str)
    given = {"class_path": f"lightning_sdpipe.{type(config).__name__}", "init_args": msgspec.to_builtins(config)}
    assert parser.instantiate(parser.parse_object({"sync": given})).sync == config
    with pytest.raises(Exception, match="'windw' is not accepted"):
        parser.parse_object({"sync": given | {"init_args": {"windw": 1}}})
