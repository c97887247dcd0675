"""A pipeline of one stage that takes part in a run without a model: it enrols, asks for groups, and gives its number of
updates to newcomers. Argument: how many updates there are. It imports neither torch nor Lightning."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time

from lightning_sdpipe.membership.members import Epoch
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import policy_file
from lightning_sdpipe.scheduler.client.client import Callbacks, Receive, SchedulerClient
from lightning_sdpipe.scheduler.credentials import worker_keys
from lightning_sdpipe.worker.launching.elastic_job import from_environment


def main(updates: int) -> None:
    job = from_environment(os.environ)
    assert job is not None
    if job.policy_file is not None:
        policy_file.offer(job.policy_file, SemiDecentralized(connectivity=7))
    address = os.environ["SDPIPE_SCHEDULER"]
    keys = worker_keys(address, os.environ.get("SDPIPE_KEY_FILE"))
    worker, incarnation = Worker(0, job.pipeline), secrets.randbits(60) + 1
    newest, changed = [0], threading.Condition()

    def hear(epoch: Epoch) -> None:
        with changed:
            newest.append(epoch.number)
            changed.notify()

    def hold() -> None:  # as who makes the process group of each epoch, beside the training
        known = 1
        while True:
            with changed:
                while len(newest) == known:
                    changed.wait()
                known, held = len(newest), newest[-4:]
            client.holds(held)

    client = SchedulerClient(address, worker, incarnation, credentials=keys, told=Callbacks(epoch=hear))
    client.greet()
    done, answer = 0, client.enrol({"model": "toy"})
    while isinstance(answer, Receive):
        done = answer.update
        answer = client.received(answer.transfer, done)
    threading.Thread(target=hold, daemon=True).start()
    client.holds([answer.epoch.number])
    client.join()
    while done < updates:
        client.ready(done)
        client.group()
        done += 1
        for transfer in client.donations:
            client.snapshot_taken(transfer, done)
        client.has_made(done)
        print(f"\rupdate {done}", end="", flush=True)
        time.sleep(0.02)
    client.leave()
    client.depart(finished=True)
    client.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
