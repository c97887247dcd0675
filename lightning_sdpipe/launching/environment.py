"""What a strategy asks of the place where its processes run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.plugins import ClusterEnvironment

from lightning_sdpipe.errors import ConfigurationError


@contextmanager
def naming_the_port(environment: ClusterEnvironment) -> Iterator[None]:
    """Around what opens the process groups: ConfigurationError if the port is another program's."""
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise ConfigurationError(
                f"MASTER_PORT={environment.main_port} is in use by another program. Choose another one, or unset "
                "MASTER_PORT to let the system choose."
            ) from error
        raise


def where_to_listen(environment: ClusterEnvironment, num_nodes: int) -> str:
    """For a scheduler that rank 0 starts: on this machine only, if the run is."""
    if num_nodes == 1:
        return "tcp://127.0.0.1:*"
    host = socket.gethostbyname(environment.main_address)  # ZeroMQ binds to addresses only
    return f"tcp://{host}:*"
