"""Write the golden data: tiny random Hugging Face checkpoints and what transformers computes with them.

    python tests/golden/make_golden.py            # from the repository root; rewrites the folders beside this file
    python tests/golden/make_golden.py olmoe      # this one only

Needs torch and transformers, which gspo_jax itself does not: made with torch 2.13.0 (CPU) and transformers 5.23.0. Each
folder is a real `save_pretrained` folder plus `reference.npz`:
    tokens [B,T] int32      random ids
    logits [B,T,V] float32  of the eager forward
    lengths [B] int32       how many of a row's ids make a prompt
    greedy [B,64] int32     the greedy continuation of each prompt, which EOS does not stop
They cover: every family; norm_topk_prob true and false; experts as one tensor each in one file, and fused in a sharded
checkpoint with an index; head tied and untied; rotary positions plain, Llama 3's and of half a head; routers by softmax
and by sigmoid with a bias and groups; shared experts with a gate and without. Norm weights are pushed away from 1, so
that a forgotten scale shows.

A seed is taken only if rounding cannot change the answer: along the greedy path the best logit leads the second by more
than `MIN_GAP`, and everywhere the last chosen expert leads the first rejected one by more than `MIN_ROUTER_GAP`.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

ROWS, LENGTH, NEW_TOKENS = 3, 16, 64
LENGTHS = (16, 11, 5)
MIN_GAP = 5e-3  # in logits; float32 rounding moves them by about 1e-5
MIN_ROUTER_GAP = 1e-4  # in router logits
INF = float("inf")
MIN_DISTINCT = 8  # distinct tokens in a continuation, so that a decoder stuck on one token does not pass

COMMON = {
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "dtype": "float32",
}
SMALL = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "eos_token_id": 1,
    "intermediate_size": 24,
    "hidden_size": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
MOE = {"num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
DELTA = {
    "vocab_size": 128, "hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 4, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
# folder -> (class, changes to the config, arguments of save_pretrained)
MODELS = {
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        {**MOE, "num_hidden_layers": 3, "num_experts_per_tok": 2, "norm_topk_prob": True, "eos_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {},
    ),
    "qwen3_moe_fused": (
        transformers.Qwen3MoeForCausalLM,
        {**MOE, "num_hidden_layers": 3, "num_experts_per_tok": 3, "norm_topk_prob": False, "eos_token_id": [1, 2],
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"save_original_format": False, "max_shard_size": "240KB"},
    ),
    "olmoe": (  # intermediate_size is an expert's; heads are hidden_size / num_attention_heads wide
        transformers.OlmoeForCausalLM,
        {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 12,
         "norm_topk_prob": False, "eos_token_id": 1, "rms_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {},
    ),
    "qwen3": (
        transformers.Qwen3ForCausalLM,
        {"num_hidden_layers": 3, "tie_word_embeddings": False, "eos_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {},
    ),
    "qwen3_tied": (
        transformers.Qwen3ForCausalLM,
        {"num_hidden_layers": 2, "tie_word_embeddings": True, "eos_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {},
    ),
    "llama": (  # the band of mixed frequencies lies inside the head's
        transformers.LlamaForCausalLM,
        {"num_hidden_layers": 3, "tie_word_embeddings": False, "eos_token_id": [1, 2],
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
        {},
    ),
    "llama_tied": (  # heads are hidden_size / num_attention_heads wide
        transformers.LlamaForCausalLM,
        {"num_hidden_layers": 2, "tie_word_embeddings": True, "eos_token_id": 1, "head_dim": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        {},
    ),
    "qwen3_next": (  # linear and full attention alternate
        transformers.Qwen3NextForCausalLM,
        {**DELTA, "layer_types": [LINEAR, FULL, LINEAR, FULL], "tie_word_embeddings": False},
        {},
    ),
    "qwen3_5_moe": (  # layers in no period; experts fused
        transformers.Qwen3_5MoeForCausalLM,
        {**DELTA, "layer_types": [LINEAR, LINEAR, FULL, LINEAR], "linear_num_key_heads": 4},
        {"save_original_format": False},
    ),
    "granitemoe": (  # intermediate_size is an expert's, fused on disk as in memory
        transformers.GraniteMoeForCausalLM,
        {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True,
         "attention_multiplier": 0.2, "embedding_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 0.5,
         "rope_parameters": PLAIN},
        {},
    ),
    "glm4_moe": (
        transformers.Glm4MoeForCausalLM,
        {**SMALL, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
         "n_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
         "num_mtp_layers": 0, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        {},
    ),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        {**SMALL, "tie_word_embeddings": True, "rope_parameters": PLAIN},
        {},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeForCausalLM,
        {**SMALL, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "rope_parameters": PLAIN},
        {},
    ),
    "deepseek_v3": (  # yarn's mixed frequencies lie inside the rotary part; a value is wider than a key
        transformers.DeepseekV3ForCausalLM,
        {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
         "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "moe_intermediate_size": 8, "n_group": 4, "topk_group": 2,
         "first_k_dense_replace": 1, "num_mtp_layers": 0, "attention_bias": True,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e2, "factor": 4.0, "mscale": 0.7,
                             "mscale_all_dim": 1.3, "original_max_position_embeddings": 128}},
        {},
    ),
    "glm4_moe_lite": (  # queries without a latent; experts fused
        transformers.Glm4MoeLiteForCausalLM,
        {**SMALL, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
         "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "rope_parameters": PLAIN},
        {"save_original_format": False},
    ),
    "mixtral": (  # intermediate_size is an expert's
        transformers.MixtralForCausalLM,
        {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2, "rope_parameters": PLAIN},
        {},
    ),
}  # fmt: skip


def build(name: str, seed: int) -> transformers.PreTrainedModel:
    """A float32 model, its matrices drawn wide enough that the logits are far from flat, its norm weights not 1."""
    cls, changes, _ = MODELS[name]
    model = cls(cls.config_class(**(COMMON | changes), attn_implementation="eager", experts_implementation="eager"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in key:
                continue
            if "norm" in key:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                # At 0.2 a tied head would mostly repeat the token it was fed.
                std = 0.1 if "embed_tokens" in key and model.config.tie_word_embeddings else 0.2
                weight.normal_(0.0, std, generator=generator)
    return model.eval()


def router_gap(router: torch.nn.Module, logits: torch.Tensor) -> float:
    """By how much the last chosen expert leads the next one, and the last chosen group the next one."""
    bias, k = getattr(router, "e_score_correction_bias", None), router.top_k
    scores, gaps = logits if bias is None else logits.sigmoid() + bias, []
    if bias is not None and router.num_group > 1:
        apart = scores.unflatten(-1, (router.num_group, -1))
        values = apart.topk(2, dim=-1).values.sum(-1)
        ranked = values.sort(dim=-1, descending=True)
        gaps.append(ranked.values[..., router.topk_group - 1] - ranked.values[..., router.topk_group])
        inside = torch.zeros_like(values, dtype=torch.bool).scatter(-1, ranked.indices[..., : router.topk_group], True)
        scores = apart.masked_fill(~inside[..., None], -INF).flatten(-2)
    ranked = scores.sort(dim=-1, descending=True).values
    return min(gap.min().item() for gap in [*gaps, ranked[..., k - 1] - ranked[..., k]])


@torch.no_grad()
def reference(model: transformers.PreTrainedModel, seed: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The arrays to keep, and the margins that decide whether the seed is taken."""
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(3, model.config.vocab_size, (ROWS, LENGTH), generator=generator)
    logits = model(tokens, use_cache=False).logits
    greedy, margins = [], {"logits_std": logits.std().item(), "greedy_gap": INF, "distinct": INF, "router_gap": INF}

    def watch(router: torch.nn.Module, _: object, out: tuple[torch.Tensor, ...]) -> None:
        margins["router_gap"] = min(margins["router_gap"], router_gap(router, out[0]))

    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(watch)
    for row, length in zip(tokens, LENGTHS, strict=True):
        path = row[None, :length]
        for _ in range(NEW_TOKENS):
            step = model(path, use_cache=False).logits[:, -1]
            path = torch.cat([path, step.argmax(-1, keepdim=True)], dim=1)
        greedy.append(path[0, length:])
        out = model(path, use_cache=False)
        best = out.logits[:, length - 1 : -1].topk(2, dim=-1).values
        margins["greedy_gap"] = min(margins["greedy_gap"], (best[..., 0] - best[..., 1]).min().item())
        margins["distinct"] = min(margins["distinct"], len(set(greedy[-1].tolist())))
    arrays = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "lengths": np.array(LENGTHS, np.int32),
        "greedy": torch.stack(greedy).numpy().astype(np.int32),
    }
    return arrays, margins


def make(name: str, root: pathlib.Path) -> dict[str, object]:
    """Try seeds until one has safe margins, write its folder, and report it."""
    for seed in range(100):
        model = build(name, seed)
        arrays, margins = reference(model, seed)
        if (
            margins["greedy_gap"] > MIN_GAP
            and margins["router_gap"] > MIN_ROUTER_GAP
            and margins["distinct"] >= MIN_DISTINCT
        ):
            break
    else:
        raise SystemExit(f"{name}: none of 100 seeds has safe margins")
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **MODELS[name][2])
    np.savez_compressed(folder / "reference.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {"folder": name, "seed": seed, **margins, "kilobytes": size // 1000}


def main() -> None:
    """Write every folder and print one line of margins for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parent, help="where to write")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="folders to write; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        print(json.dumps(make(name, args.root)))


if __name__ == "__main__":
    main()
