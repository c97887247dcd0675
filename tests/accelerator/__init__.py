"""A fake accelerator: memory of the processor that says it is another device, where there is a compiler to build it.

It cannot be taken back, so only processes of their own may :func:`register` it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor
from torch import library as torch_library

NAME = "fake"
_AUTOCAST = torch_library.Library("aten", "IMPL")
_MODULE = "fake_accelerator"
_SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "backend.cpp")]


class CannotBuildError(RuntimeError):
    """There is nothing to build it with here."""


def build() -> Path:
    """The library, which is built once for each version of it, of torch and of Python, whoever asks at the same time.

    Raises:
        CannotBuildError: says what is missing, or what the compiler said.
    """
    texts = [path.read_text() for path in (*_SOURCES, Path(__file__).with_name("device.h"))]
    version = hashlib.sha256("".join([*texts, torch.__version__, sys.version, platform.machine()]).encode())
    place = Path("~/.cache/lightning_sdpipe/tests").expanduser()  # shared by all checkouts
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        place = Path(tempfile.gettempdir())
    library = place / f"{_MODULE}-{version.hexdigest()[:16]}.so"
    if library.exists():
        return library
    if missing := [program for program in ("c++", "ninja") if shutil.which(program) is None]:
        raise CannotBuildError(f"no {' and no '.join(missing)}")
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        call = f"load({_MODULE!r}, {list(map(str, _SOURCES))}, ['-O0', '-g0'], build_directory={directory!r})"
        program = f"from torch.utils.cpp_extension import load; {call}"
        environment = {**os.environ, "MAX_JOBS": "2"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        built = Path(directory, f"{_MODULE}.so")
        if not built.exists():
            raise CannotBuildError("the compiler failed:\n" + (done.stdout + done.stderr)[-2000:])
        shutil.copy(built, f"{library}.{os.getpid()}")
    os.replace(f"{library}.{os.getpid()}", library)


@functools.cache
def register(ranked: bool = False) -> None:
    """Makes ``torch.device("fake")`` known to this process, with four devices.

    Args:
        ranked: its tensors travel as NCCL's do; else as those of CUDA over gloo. See ``backend.cpp``.
    """
    specification = importlib.util.spec_from_file_location(_MODULE, build())
    assert specification is not None
    assert specification.loader is not None
    library = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _AUTOCAST.impl("linear", _in_lower_precision, "AutocastPrivateUse1")

    def over_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.over_gloo(dist.ProcessGroupGloo(store, rank, size, timeout), ranked)

    dist.Backend.register_backend("over_gloo", over_gloo, devices=[NAME])


def _in_lower_precision(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(without):
        dtype = torch.get_autocast_dtype(NAME)
        return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _device_module(library: ModuleType) -> ModuleType:
    """What ``torch.fake`` is."""
    module = ModuleType(f"torch.{NAME}")
    count = 4

    def generator(device: Any = None) -> torch.Generator:
        index = None if device is None else torch.device(device).index
        return module.default_generators[module.current_device() if index is None else index]

    module.default_generators = [library.default_generator(index) for index in range(count)]
    module.is_available = lambda: True
    module.device_count = lambda: count
    module.current_device = lambda: torch.accelerator.current_device_index()
    module.set_device = lambda device: torch.accelerator.set_device_index(torch.device(device).index)
    module.get_device_name = lambda device=None: NAME
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream  # which is a context itself
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in module.default_generators]
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


class Fake(Accelerator):
    """For Lightning."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
