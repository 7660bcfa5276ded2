"""One process of the tests of hosts.py, started as `python -m tests.pod_rows [rows]`.

Its index comes from the environment. It checks which prompts it takes and, with `rows`, how rows are spread.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from gspo_jax import cli
from gspo_jax.data.pipeline import Batches, PromptBatch, prompt_batches
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.parallel import hosts, processes
from gspo_jax.parallel import mesh as mesh_lib

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

    def open_batches() -> Batches[PromptBatch]:
        return prompt_batches(records, tokenizer, prompts_per_batch=B, max_prompt_length=8, seed=3)

    def ids(batch: PromptBatch) -> list[int]:
        found = np.array([int(record["id"]) for record in batch.records], np.int32)
        if mesh is None:
            return found.tolist()
        own = hosts.own_rows(mesh, B)
        return hosts.allgather_rows(mesh, found[own], B).tolist()

    first, resumed = open_batches(), open_batches()
    seen = [ids(next(first))]
    resumed.set_state(first.get_state())
    return [*seen, *(ids(next(resumed)) for _ in range(2))]


if __name__ == "__main__":
    count = processes.start(heartbeat_s=10, start_s=60)
    cli.simulate_devices(8 // count)
    with processes.guarded(count):
        for each in MESHES if "rows" in sys.argv else ():
            check(each)
            hosts._BLOCK = 2**28
        ids = prompt_ids(mesh_lib.make_mesh(MESHES[0], jax.devices()[::-1]))
        print(f"{jax.process_count()} processes agree on prompts {ids}")
