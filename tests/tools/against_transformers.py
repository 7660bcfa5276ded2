"""Random Hugging Face folders of every family and variant, computed by transformers and by us.

    JAX_PLATFORMS=cpu python -m tests.tools.against_transformers --python=V/bin/python --seeds=0,1 glm4_moe deepseek_v3

V is an environment with torch and transformers, which this project itself does not need: tried with torch 2.13.0 (CPU)
and transformers 5.23.0. For each variant and seed V makes a folder in float32 and, in float64, its logits, 64 greedy
tokens after ragged prompts, and the gradient of a text's mean log-prob. Then, here:

- logits are compared, and the greedy tokens, by the cached decoder with pages of 8 tokens and fewer slots than prompts;
- the folder is read, written and read again: every bit is the same, and so is every tensor of the file;
- gradients are compared, parameter by parameter, relative to the norm of theirs.

Prints a line per folder. Exits with code 1 if one differs by more than the limits in the brackets of the heading. Delta
rule layers norm outputs that may be tiny, and with weights as large as these magnify rounding ("theirs": by how much
transformers' own float32 differs). A folder beyond the limits is therefore computed again with our float32 replaced by
float64, and must then be within `EXACT`. A greedy token may differ only where transformers' two best logits are closer
than `TIE`. With --drawn the weights are those that transformers draws, ten times smaller.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

NEW_TOKENS, ROWS, LENGTH = 64, 4, 24
LENGTHS = (24, 17, 9, 1)
LOGITS, GRADIENTS, TIE, EXACT = 1e-4, 1e-5, 1e-4, 1e-6

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25},
}

# family -> (class, what all its variants share, the variants)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, [{}, {"tie_word_embeddings": True}, {"rope_parameters": YARN}]),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        [{"norm_topk_prob": True}, {"norm_topk_prob": False}],
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}, [{}]),
    "llama": ("LlamaForCausalLM", {}, [{}, {"head_dim": 20}, {"tie_word_embeddings": True}]),
    "qwen2": (
        "Qwen2ForCausalLM",
        {},
        [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}, {"rope_parameters": YARN}],
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}, [{}, {"head_dim": 20}, {"tie_word_embeddings": True}]),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        [{}, {"norm_topk_prob": True}, {"tie_word_embeddings": True}, {"qkv_bias": False}],
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
        [{}, {"num_experts_per_tok": 3}, {"head_dim": 20}, {"tie_word_embeddings": True}],
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
        [
            {
                "embedding_multiplier": 12.0,
                "attention_multiplier": 0.3,
                "residual_multiplier": 0.22,
                "logits_scaling": 0.5,
            },
            {"attention_multiplier": 0.25},
            {"attention_multiplier": 0.25, "tie_word_embeddings": True, "embedding_multiplier": 3.0},
            {"attention_multiplier": 0.25, "num_experts_per_tok": 1},
        ],
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        SIGMOID | {"head_dim": 16, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        [
            {},
            {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
            {"n_group": 4, "topk_group": 2, "attention_bias": True, "first_k_dense_replace": 2},
            {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 2},
            {"tie_word_embeddings": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 1.0}},
        ],
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SIGMOID | MLA | {"n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
        [
            {},
            {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2}},
            {"rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
            {"attention_bias": True, "v_head_dim": 24, "first_k_dense_replace": 0},
        ],
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        SIGMOID | MLA | {"v_head_dim": 20, "num_key_value_heads": 4},
        [
            {},
            {"q_lora_rank": None},
            {"n_group": 2, "topk_group": 1, "attention_bias": True},
            {"rope_interleave": False, "mlp_layer_types": ["dense", "dense", "sparse"]},
        ],
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        DELTA,
        [
            {},
            {"norm_topk_prob": False, "num_hidden_layers": 8},
            {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            {"tie_word_embeddings": True, "linear_num_key_heads": 1},
        ],
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        DELTA,
        [
            {},
            {"num_hidden_layers": 8},
            {"linear_num_key_heads": 4},
            {"layer_types": ["linear_attention", "full_attention"] * 2},
        ],
    ),
}


def common(rng: random.Random) -> dict[str, Any]:
    """Return what every config has, of a random size."""
    return {
        "vocab_size": rng.choice((96, 128, 200)),
        "hidden_size": rng.choice((32, 48, 64)),
        "intermediate_size": rng.choice((40, 64)),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 512,
        "rope_parameters": PLAIN,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "dtype": "float32",
    }


def make(family: str, variant: int, seed: int, folder: Path, *, drawn: bool) -> None:
    """Write a folder, a folder of gradients in its tensors' places, and reference.npz. Runs where torch is."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    name, shared, variants = FAMILIES[family]
    cls = getattr(transformers, name)
    rng = random.Random(f"{family} {variant} {seed}")
    fields = common(rng) | shared | variants[variant]
    known = set(cls.config_class().to_dict()) | {"dtype", "qkv_bias"}
    config = cls.config_class(**{key: value for key, value in fields.items() if key in known})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in () if drawn else (*model.named_parameters(), *model.named_buffers()):
            if "correction_bias" in key:
                weight.normal_(0.0, 0.2, generator=generator)
            elif "norm" in key or "A_log" in key or "dt_bias" in key:
                weight.uniform_(0.5, 1.5, generator=generator)
            elif "inv_freq" not in key:
                weight.normal_(0.0, 0.1 if "embed" in key and config.tie_word_embeddings else 0.2, generator=generator)
    model.save_pretrained(folder / "model")
    tokens = torch.randint(2, config.vocab_size, (ROWS, LENGTH), generator=generator)
    found = {"tokens": tokens.numpy(), "lengths": np.array(LENGTHS)}

    def graded() -> torch.Tensor:
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).mean().backward()
        return logits.detach()

    model.eval()
    rounded, grads = graded(), [None if p.grad is None else p.grad.double() for p in model.parameters()]
    model = model.double()
    float32, to_float32 = torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64  # for what casts to float32 inside, and for angles
    torch.Tensor.float = torch.Tensor.double
    for parent in model.modules():
        for key, child in [*parent.named_children()]:
            if hasattr(child, "inv_freq"):
                setattr(parent, key, type(child)(config))
    found["logits"] = graded().numpy()
    off = [
        float((own - p.grad).norm() / p.grad.norm().clamp(min=1e-12))
        for own, p in zip(grads, model.parameters(), strict=True)
        if own is not None and p.grad is not None
    ]
    found["rounding"] = np.array([np.abs(rounded.numpy() - found["logits"]).max(), max(off)])
    with torch.no_grad():
        greedy, gaps = [], []
        for row, length in zip(tokens, LENGTHS, strict=True):
            path = row[None, :length]
            for _ in range(NEW_TOKENS):
                best = model(path, use_cache=False).logits[0, -1].topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                path = torch.cat([path, best.indices[None, :1]], dim=1)
            greedy.append(path[0, length:].numpy())
    torch.float, torch.float32, torch.Tensor.float = float32, float32, to_float32
    found |= {"greedy": np.stack(greedy), "gaps": np.array(gaps).reshape(ROWS, NEW_TOKENS)}
    np.savez(folder / "reference.npz", **found)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    model.save_pretrained(folder / "gradients")


def compare(folder: Path) -> dict[str, Any]:
    """Return how far ours is from what `make` wrote."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from safetensors.numpy import load_file

    from gspo_jax.models import huggingface
    from gspo_jax.models.config import by_path
    from gspo_jax.rollout.decoder import response_keys
    from gspo_jax.rollout.pages import Pool
    from gspo_jax.rollout.sampling import SamplingParams, StopRule
    from gspo_jax.types import Prompts, Weights
    from tests.tiny import generate, load_model

    reference = np.load(folder / "reference.npz")

    def errors(dtype: Any) -> dict[str, Any]:
        """Return how far logits and gradients are off if we compute in this dtype wherever we do in float32."""
        with jax.enable_x64(dtype == jnp.float64), mock.patch.object(jnp, "float32", dtype):
            model, config = load_model(folder / "model", dtype=dtype, param_dtype=dtype)
            graph, params = nnx.split(model)
            params = jax.tree.map(lambda x: x.astype(dtype), params)
            tokens = jnp.asarray(reference["tokens"], jnp.int32)

            def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
                logits = nnx.merge(graph, params)(tokens).logits
                logprobs = jax.nn.log_softmax(logits)[:, :-1]
                return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean(), logits

            grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        ours, theirs = by_path(grads), by_path(huggingface.load_params(folder / "gradients", config))
        pairs = {path: (np.asarray(leaf), np.asarray(theirs[path])) for path, leaf in ours.items()}
        off = {
            path: float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12))
            for path, (ours, theirs) in pairs.items()
            if np.any(ours) or (np.any(theirs) and "bias" not in path)  # a bias of the choice alone has no gradient
        }
        worst = max(off, key=lambda path: off[path])
        return {
            "logits": float(np.abs(np.asarray(logits) - reference["logits"]).max()),
            "gradients": off[worst],
            "worst": worst,
        }

    found = errors(jnp.float32)
    if found["logits"] > LOGITS or found["gradients"] > GRADIENTS:
        found["float64"] = errors(jnp.float64)
    model, config = load_model(folder / "model")
    graph, params = nnx.split(model)
    lengths = np.asarray(reference["lengths"], np.int32)
    prompts = np.where(np.arange(LENGTH)[None] < lengths[:, None], reference["tokens"], 1).astype(np.int32)
    out, _, _ = generate(
        graph,
        Weights.full(params),
        Prompts(prompts, lengths),
        response_keys(jax.random.key(0), jnp.arange(ROWS)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopRule(max_length=NEW_TOKENS, eos_ids=()),
        slots=2,
        pool=Pool(8, 2 * NEW_TOKENS // 8),
    )
    differ = 0
    for ours_row, theirs_row, gaps in zip(out.tokens, reference["greedy"], reference["gaps"], strict=True):
        wrong = np.flatnonzero(np.asarray(ours_row) != theirs_row)
        differ += int(len(wrong) > 0 and gaps[wrong[0]] > TIE)

    huggingface.save(params, config, folder / "ours")
    again = by_path(huggingface.load_params(folder / "ours", huggingface.read_config(folder / "ours")))
    before, after = (
        {name: value for file in (folder / kind).glob("*.safetensors") for name, value in load_file(file).items()}
        for kind in ("model", "ours")
    )
    same = all(np.array_equal(again[path], leaf) for path, leaf in by_path(params).items()) and config == (
        huggingface.read_config(folder / "ours")
    )
    shared = before.keys() & after.keys()
    return found | {
        "theirs": reference["rounding"].tolist(),
        "greedy": differ,
        "round trip": int(not same) + sum(not np.array_equal(before[name], after[name]) for name in shared),
        "tensors": len(before.keys() ^ after.keys()),
    }


def main() -> int:
    """Make and compare every folder asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="python of an environment with torch and transformers")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--variant", type=int, help="only this one")
    parser.add_argument("--drawn", action="store_true", help="keep the weights that transformers draws")
    parser.add_argument("--keep", type=Path, help="folder to keep everything in")
    parser.add_argument("--make", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("families", nargs="*", help="all by default")
    args = parser.parse_args()
    if args.make:
        family, variant, seed, folder = args.make
        make(family, int(variant), int(seed), Path(folder), drawn=args.drawn)
        return 0
    from gspo_jax.errors import UserError

    wrong = 0
    print(f"family, variant, seed: logits [{LOGITS:g}], gradients [{GRADIENTS:g}], greedy rows [0], round trip [0]")
    for family in args.families or FAMILIES:
        for variant in range(len(FAMILIES[family][2])) if args.variant is None else [args.variant]:
            for seed in map(int, args.seeds.split(",")):
                with tempfile.TemporaryDirectory() as temporary:
                    folder = (args.keep or Path(temporary)) / f"{family}-{variant}-{seed}"
                    folder.mkdir(parents=True, exist_ok=True)
                    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
                    command = [args.python, __file__, "--make", family, str(variant), str(seed), str(folder)]
                    command += ["--drawn"] * args.drawn
                    subprocess.run(command, check=True, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                    try:
                        found = compare(folder)
                    except UserError as error:
                        print(family, variant, seed, f"REFUSED: {error}", flush=True)
                        wrong += 1
                        continue
                exact = found.get("float64")
                too_far = exact is not None and max(exact["logits"], exact["gradients"]) > EXACT
                bad = bool(too_far or found["greedy"] or found["round trip"])
                wrong += bad
                print(family, variant, seed, json.dumps(found), "WRONG" if bad else "", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
