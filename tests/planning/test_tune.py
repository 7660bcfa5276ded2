"""The search for the least projected iteration, on programs whose times and memory are made up."""

import pytest
from rich.console import Console

from gspo_jax import cli
from gspo_jax.engine import build
from gspo_jax.errors import UserError
from gspo_jax.lengths import Lengths
from gspo_jax.parallel.mesh import make_mesh, reshaped
from gspo_jax.planning import topology, tune
from gspo_jax.planning.decoding import Step
from gspo_jax.planning.rates import assumed
from gspo_jax.planning.setting import Setting
from gspo_jax.planning.show import show_try
from gspo_jax.rollout.sampling import StopRule
from gspo_jax.setup import memory
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import Meshes

LIMIT = 960


def small():
    """Return the 30B recipe with 512 responses of up to 960 tokens, on 8 chips."""
    config = cli.load_config("configs/qwen3_30b_a3b.py")
    config.data.prompts_per_batch, config.data.max_prompt_length = 32, 64
    config.sampling.max_response_length, config.sampling.slots = LIMIT, 128
    config.sampling.mesh.update({"data": -1, "expert": 4})
    config.training.row_tokens = 1024
    return config


class Made:
    """A planner that compiles nothing; remembers what it was asked for."""

    def __init__(self, **memory):
        self.asked, self.memory = [], memory

    def __call__(self, config, names):
        mesh = make_mesh(dict(config.mesh))
        own = {axis: size or 1 for axis, size in config.sampling.mesh.items()}
        stop = StopRule(max_length=LIMIT, eos_ids=(1,))
        model = check(config)
        setting = Setting(
            build(config, model, Meshes(mesh, reshaped(mesh, own)), stop), topology.CHIPS["v5p"], assumed("v5p")
        )
        self.asked += names
        return {name: self.facts(name, config, setting) for name in names}, setting

    def facts(self, name, config, setting):
        """Remat "full" takes less memory and more time; rows of 2048 and an expert axis of 8 are faster."""
        slow = 1.2 if config.model.remat == "full" else 1.0
        positions = config.training.row_tokens or 1024
        seconds = {"update": slow * (20 + 2000 / positions), "score": 5.0, "sample_prefill": 0.1, "reshard": 0.1}
        share = self.memory.get("update", 0.7)
        used = {"update": 0.3 if config.model.remat == "full" else share * positions / 1024}
        expert = setting.engine.meshes.sampler.shape["expert"]
        slots, pool = setting.decoder_size
        used["sample_decode"] = self.memory.get("slot", 0.001) * pool.pages * pool.columns / 1024
        free = round(1 - used.get(name, 0.1), 4)
        facts = {"fits": free >= 0, "headroom": free}
        if facts["fits"]:
            step = seconds.get(name, 0.01)
            facts |= {"seconds": {"executed": step, "exposed": 0.0}, "executed_by": {"attention": 0.1 * step}}
        if name == "sample_decode":
            steps = [(n, (8 / expert) * 1e-3 + 1e-5 * n) for n in (slots, slots // 2, slots // 4)]
            facts["steps"] = [{"slots": n, "fixed_s": s, "key_s": 1e-9} for n, s in steps]
        return facts


def search(planner, headroom=0.08, config=None):
    """Return the search, the changes it found, and their iteration."""
    lengths, console = Lengths("lognormal:300:0.8", LIMIT, "the limit"), Console(record=True, width=200)
    made = tune.Search(config or small(), planner, lengths, headroom, lambda one: show_try(console, one))
    return made, *made.run(), console.export_text()


def test_the_best_that_fits_is_found():
    """Rows of 2048 tokens need 1.4 times a chip's memory and are not taken; more slots and an expert axis of 8 are."""
    planner = Made()
    found, changes, iteration, said = search(planner)
    assert changes["sampling.mesh.expert"] == 8 and changes["sampling.slots"] > 128
    assert not {"model.remat", "training.row_tokens", "mesh.data"} & set(changes)
    trained = {str(one.changes): one for one in found.tries if one.part == tune.TRAINING}
    assert trained["{'training.row_tokens': 2048}"].note == "does not fit"
    assert trained["{'model.remat': 'full'}"].seconds > trained["{}"].seconds
    assert iteration.seconds < max(one.seconds for one in found.tries if one.part == tune.SAMPLING and one.seconds) + (
        iteration.by_phase["update"] + iteration.by_phase["reward"] + 1
    )
    assert planner.asked.count("score") == 1, "programs are planned once for settings that do not shape them"
    assert "training" in said and "as the config has it" in said and "does not fit" in said


@pytest.mark.slow
def test_partial_rollouts_are_planned_with_the_pool_that_their_prefixes_leave_room_for():
    """Pages serve more slots than they could hold whole responses."""
    found, *_ = search(Made(slot=0.01, update=0.1), headroom=0.82)
    slots = [one.changes for one in found.tries if "sampling.slots" in one.changes]
    whole = [one["sampling.slots"] for one in slots if "sampling.partial.prompts" not in one]
    partial = [one for one in slots if "sampling.partial.prompts" in one]
    assert partial and len(slots) <= tune.TRIED
    for one in partial:
        assert one["sampling.pool_tokens"] < LIMIT * max([128, *whole])
        assert one["sampling.slots"] * LIMIT > 1.5 * one["sampling.pool_tokens"]


@pytest.mark.slow
def test_memory_that_has_to_stay_free():
    found, changes, _, _ = search(Made(slot=0.04), headroom=0.3)
    refused = [one for one in found.tries if one.note == "leaves less than 30% of the memory free"]
    assert refused and all(one.headroom < 0.3 for one in refused)
    assert "sampling.slots" not in changes and changes["sampling.mesh.expert"] == 8
    with pytest.raises(UserError, match="own update leaves less than 50% of a chip's memory free"):
        search(Made(), headroom=0.5)


def test_steps_between_those_that_are_compiled():
    steps = (Step(32, 4.2e-3, 1e-9), Step(16, 3.4e-3, 1e-9), Step(8, 3.0e-3, 1e-9))
    found = tune.interpolated(steps, 24)
    assert [step.slots for step in found] == [24, 12, 6]
    assert [step.fixed_s for step in found] == pytest.approx([3.8e-3, 3.2e-3, 2.9e-3])


def test_bytes_of_a_decode():
    """48 layers, 4 heads of 128, keys and values in bfloat16: 98,304 bytes for each of 8 × 128 columns of 16 slots.

    With partial rollouts, rows of 1024 tokens for half of the slots; of a shared pool, 1.15 times its tokens. 1.5 times
    the routes, tokens and log-probs of 64 or 80 responses on each of 8 shards.
    """
    config, record = small(), 1.5 * LIMIT * (48 * 8 + 12)
    _, setting = Made()(config, [])
    assert memory.token_bytes(config, setting.model, {"tensor": 1}) == 98_304
    assert tune.sampling_bytes(setting) == 1.1 * 16 * 1024 * 98_304 + 64 * record
    config.sampling.partial.prompts = 40
    _, setting = Made()(config, [])
    assert tune.sampling_bytes(setting) == (1.1 * 16 + 8) * 1024 * 98_304 + 80 * record
    config.sampling.pool_tokens = 8 * 8 * 1024
    _, setting = Made()(config, [])
    assert tune.sampling_bytes(setting) == (1.1 * 8 + 12) * 1024 * 98_304 + 80 * record  # 12 rows, not 10
