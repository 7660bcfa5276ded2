"""Write the golden adapters: folders that `peft` saves, and the logits that it computes with them.

    python tests/golden/make_adapters.py qwen3 qwen3_moe      # from the repository root; rewrites folders in adapters/
    python tests/golden/make_adapters.py qwen3_moe_modules
    python tests/golden/make_adapters.py qwen3_moe_before

Needs torch, transformers and peft, which gspo_jax itself does not: made with torch 2.13.0 (CPU) and, in this order,
transformers 5.24.0 and peft 0.21.2; transformers 4.57.1 and peft 0.17.1, where every expert is a module; transformers
5.24.0 and peft 0.18.0, which took the fused parameters of experts for transposed ones. Each folder is of random
adapters beside a model of this folder, with `logits.npy` [B,T,V] of the tokens in the model's reference.npz.

    python tests/golden/make_adapters.py --check=FOLDER --model=qwen3_moe

prints the largest difference between the logits in FOLDER/logits.npy and those that peft computes with its adapters.
"""

import argparse
import pathlib
import shutil

import numpy as np
import peft
import torch
import transformers

ATTENTION, DENSE = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# folder -> (model, fields of LoraConfig)
ADAPTERS = {
    "qwen3": ("qwen3", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + DENSE}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ATTENTION,
            "target_parameters": FUSED,
            "rank_pattern": {f".*{name}": 3 for name in FUSED},
            "alpha_pattern": {".*down_proj": 5},
        },
    ),
    "qwen3_moe_modules": (
        "qwen3_moe",
        {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION + DENSE},
    ),
    "qwen3_moe_before": ("qwen3_moe", {"r": 3, "lora_alpha": 6, "target_parameters": FUSED, "target_modules": []}),
}
ROOT = pathlib.Path(__file__).parent


def read(name: str) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """A golden model, and the tokens of its reference."""
    config = transformers.AutoConfig.from_pretrained(ROOT / name)
    if transformers.__version__.startswith("4.") and "moe" in name:  # which reads these two under other names
        config.num_experts, config.rope_theta = 8, 1e6
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / name, config=config, dtype=torch.float32)
    return model.eval(), torch.tensor(np.load(ROOT / name / "reference.npz")["tokens"]).long()


@torch.no_grad()
def make(name: str) -> None:
    """Write one folder."""
    of, fields = ADAPTERS[name]
    model, tokens = read(of)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**fields, init_lora_weights=False))
    folder = ROOT / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.peft_config["default"].base_model_name_or_path = f"tests/golden/{of}"
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    np.save(folder / "logits.npy", adapted(tokens).logits.numpy())
    print(folder)


@torch.no_grad()
def check(folder: pathlib.Path, name: str) -> None:
    """Print how far peft's logits are from those in the folder."""
    model, tokens = read(name)
    before = model(tokens).logits
    after = peft.PeftModel.from_pretrained(model, folder)(tokens).logits.numpy()
    found = np.load(folder / "logits.npy")
    print(f"{np.abs(found - after).max():.1e}, of {np.abs(found - before.numpy()).max():.1e} that the adapters change")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"folders to write: {', '.join(ADAPTERS)}")
    parser.add_argument("--check", type=pathlib.Path, help="folder of adapters to read")
    parser.add_argument("--model", help="golden model that they are beside")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for each in given.names:
        make(each)
    if given.check:
        check(given.check, given.model)
