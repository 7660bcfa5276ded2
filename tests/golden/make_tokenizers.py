"""Write the files of folders whose tokenizer files disagree, and the ids that transformers makes of texts with them.

    python tests/golden/make_tokenizers.py            # from the repository root; rewrites tests/golden/tokenizers.json

Needs transformers, which gspo_jax itself does not: made with transformers 5.24.0. All folders have the `tokenizer.json`
of the folder "adder", with bytes for text and the special tokens <|endoftext|>, <|im_end|>, <|im_start|>; what stands
beside it differs. For each text there are its ids, and their text without special tokens.
"""

import json
import pathlib
import shutil
import tempfile

import transformers

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "1+1=<think>2</think> 2",
    "<|im_start|>user\n1+1=<|im_end|>\n",
    " <tool> 7 <tool>8<word> <word>9 x<word>",
    "<|endoftext|>a  <|im_end|>  b<extra>",
]


def token(content: str, **flags: bool) -> dict[str, object]:
    """One entry of added_tokens_decoder."""
    usual = {"special": False, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content} | usual | flags


def folders(first: int) -> dict[str, dict[str, object]]:
    """The files of each folder; `first` is the first free id."""
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    there = {str(i): token(t, special=True) for i, t in enumerate(("<|endoftext|>", "<|im_end|>", "<|im_start|>"))}
    new = {
        str(first): token("<think>"),
        str(first + 1): token("</think>"),
        str(first + 2): token("<tool>", special=True, lstrip=True, rstrip=True),
        str(first + 3): token("<word>", single_word=True, normalized=True),
    }
    return {
        "decoder": {"tokenizer_config": named | {"added_tokens_decoder": there | new}},
        "flags": {
            "tokenizer_config": named
            | {"added_tokens_decoder": there | {"1": token("<|im_end|>", special=True, lstrip=True, rstrip=True)}}
        },
        "extra": {
            "tokenizer_config": named
            | {"added_tokens_decoder": there, "additional_special_tokens": ["<extra>", "<tool>"]}
        },
        "older": {
            "tokenizer_config": {},
            "special_tokens_map": named | {"additional_special_tokens": ["<|im_start|>", "<tool>"]},
            "added_tokens": {"<think>": first, "<tool>": first + 1},
        },
    }


def main() -> None:
    """Write the file."""
    content = json.loads((HERE / "adder" / "tokenizer.json").read_text())
    first, found = max(content["model"]["vocab"].values()) + 1, {}
    for name, files in folders(first).items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(HERE / "adder" / "tokenizer.json", folder)
            for file, fields in files.items():
                pathlib.Path(folder, f"{file}.json").write_text(json.dumps(fields))
            reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ids = {text: reference(text, add_special_tokens=False).input_ids for text in TEXTS}
        texts = {text: [own, reference.decode(own, skip_special_tokens=True)] for text, own in ids.items()}
        found[name] = {"files": files, "texts": texts}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(folder)}" for name, folder in found.items())
    (HERE / "tokenizers.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
