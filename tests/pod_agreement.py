"""One of several processes that have to agree: `python -m tests.pod_agreement`, its index in the environment.

It checks how rows are spread, errors shared, and stops agreed on, and prints which prompts all take.
"""

import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from gspo_jax import cli
from gspo_jax.data.pipeline import Batches, prompt_batches
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.errors import StopRequested, UserError
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel import mesh as mesh_lib
from gspo_jax.parallel.preemption import Preemption
from gspo_jax.rewards.replies import Replies, Setting, TurnOver
from gspo_jax.rewards.scorer import Scorer
from gspo_jax.training import checkpoint
from gspo_jax.types import Prompts

B = 16
MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "tensor": 4}, {"tensor": 8}]
"""Meshes to test; the last one replicates every row on all devices."""


def check(sizes: dict[str, int]) -> None:
    """Check that batches survive the round trip to the devices, and can be assembled from each process's own rows."""
    # Reversed devices: a process does not own the rows that its index suggests.
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[::-1])
    processes.connect(mesh)
    batch = {
        "tokens": np.arange(B * 6, dtype=np.int32).reshape(B, 6),
        "total": np.where(np.arange(B) % 5, np.arange(B), np.nan).astype(np.float32),
        "ended": np.arange(B) % 3 == 0,
    }
    own = hosts.own_rows(mesh, B)
    owners = hosts.allgather_rows(mesh, np.full(len(own), 1 + jax.process_index(), np.int32), B)
    assert np.bincount(owners)[1:].sum() == B and owners.all(), "every row belongs to exactly one process"
    np.testing.assert_array_equal(np.flatnonzero(owners == 1 + jax.process_index()), own)

    placed = hosts.shard_rows(mesh, batch)
    placed["tokens"] = jax.jit(lambda x: x + 0)(placed["tokens"])
    assert placed["tokens"].shape == (B, 6)
    known = hosts.fetch_own_rows(mesh, placed)
    for block in (2**28, 100):  # in one block, then in overlapping blocks
        hosts._BLOCK = block
        for found in (hosts.allgather(placed), hosts.allgather_rows(mesh, known, B)):
            jax.tree.map(np.testing.assert_array_equal, found, batch)
    jax.tree.map(lambda x, whole: np.testing.assert_array_equal(x, whole[own]), known, batch)


def prompt_ids(mesh: Mesh | None = None) -> list[list[int]]:
    """Return the ids of the prompts of three batches, two of them after a resume.

    The processes of a mesh take their own rows and put them together; without a mesh, this process takes all.
    """
    records = [
        {"id": str(i), "question": f"{i}+{i}=", "worked": "", "answer": str(2 * i), "instruction": ""}
        for i in range(40)
    ]
    tokenizer = Tokenizer.load(Path(__file__).parent / "golden" / "adder")

    def open_batches() -> Batches[Prompts]:
        return prompt_batches(records, tokenizer, prompts_per_batch=B, max_prompt_length=8, seed=3)

    def ids(batch: Prompts) -> list[int]:
        found = np.array([int(record["id"]) for record in batch.records], np.int32)
        if mesh is None:
            return found.tolist()
        own = hosts.own_rows(mesh, B)
        return hosts.allgather_rows(mesh, found[own], B).tolist()

    first, resumed = open_batches(), open_batches()
    seen = [ids(next(first))]
    resumed.set_state(first.get_state())
    return [*seen, *(ids(next(resumed)) for _ in range(2))]


def check_votes() -> None:
    """Check that all processes know of a checkpoint that only the last can't read, and of a scoring that it ends; and
    how many of them share the host's cores.
    """
    last = jax.process_index() == jax.process_count() - 1
    processes.connect(mesh_lib.make_mesh({"data": jax.process_count(), "fsdp": jax.local_device_count()}))
    _, why = checkpoint._attempt(lambda: 1 / (not last), note=None)
    assert "ZeroDivisionError" in why
    assert processes.own_cores() == max(1, processes.cores() // jax.process_count())
    with Scorer({"exact_answer": 1.0}) as scorer:
        scorer.interrupted = lambda: last
        try:
            scorer.score(["1+2="], ["3"], [{"answer": "3"}])
        except StopRequested:
            return
        raise AssertionError("the scoring was not ended")


def number(prompt: str, completion: str, record: dict) -> str | int:
    """Reply to a turn, in the last process with what is no text."""
    return 3 if record["last"] else "no"


def check_mistake() -> None:
    """Check that all processes end with the sentence about a reply of the last one's environment."""
    last = jax.process_index() == jax.process_count() - 1
    with Replies("number", Setting(own={"number": f"{__spec__.name}:number"})) as replies:
        over = TurnOver(b"0", "?", {"last": last}, "1", ("1",), ("",))
        pending = [replies.begin(over)]
        replies.wait(pending)
        try:
            replies.told([over], [each.result() for each in pending])
        except UserError as error:
            assert str(error) == "environment number replied 3; return a text, or None to end the episode", error
            return
        raise AssertionError("the reply was taken")


def check_stop() -> None:
    """Check that SIGTERM to the last process stops all at the same poll, although they poll at their own pace."""
    noticed, polls = [], 0
    preemption = Preemption(lambda: noticed.append(polls), lambda presses: None)
    with preemption.listening():
        while not preemption.agreed():
            polls += 1
            assert polls < 1000, "the processes have not stopped"
            if polls == 10 and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01 * (1 + jax.process_index()))
    assert len(noticed) == 1
    mesh = mesh_lib.make_mesh(MESHES[0], jax.devices()[::-1])
    everyones = hosts.allgather_rows(mesh, np.full(len(hosts.own_rows(mesh, B)), polls, np.int32), B)
    np.testing.assert_array_equal(everyones, polls)


if __name__ == "__main__":
    count = processes.start(heartbeat_s=10, start_s=60)
    cli.simulate_devices(8 // count)
    with processes.guarded(count):
        for each in MESHES:
            check(each)
            hosts._BLOCK = 2**28
        check_votes()
        check_mistake()
        check_stop()
        ids = prompt_ids(mesh_lib.make_mesh(MESHES[0], jax.devices()[::-1]))
        print(f"{jax.process_count()} processes agree on prompts {ids}")
