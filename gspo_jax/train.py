"""One RL run: prompts, decode, rewards, advantages, objective, update, metrics.

    python -m gspo_jax.train --config=configs/tiny.py --workdir=runs/tiny

Starts a run, or resumes from the newest checkpoint in its folder. iteration.py is the whole algorithm. run/session.py
adds the log, checkpoints and evaluations.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from gspo_jax import cli
from gspo_jax.config_files import config_words
from gspo_jax.errors import StopRequested
from gspo_jax.iteration import iterate
from gspo_jax.parallel.compilation import CompileCounter
from gspo_jax.planning.elsewhere import check_for
from gspo_jax.profiling.phases import Span, read_span
from gspo_jax.run.opening import open_run
from gspo_jax.secrets import redacted


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    begin_from: str = "",
    parts: Sequence[str] = (),
    start_over: bool = False,
    command: str = "",
    profile: Span | None = None,
) -> dict[str, Any]:
    """Train until `config.iterations` are done, counting those before a resume. Return the first and last evaluation.

    Any program, e.g. a notebook, may call it after `cli.prepare(config)`, which sets the number of simulated devices on
    CPU. A new run may begin from a checkpoint of another one, `begin_from`, RUN or RUN@STEP, with `parts` of
    `branch.PARTS`, (): all that fit. With `start_over`, a run with lost or damaged checkpoints begins again. `command`
    is noted in the run folder. The phases of the iterations in `profile` are traced.

    Raises:
      UserError: config, folder or devices do not allow the run.
      StopRequested: SIGTERM, SIGINT or SIGHUP ended the run early. The newest iteration is saved.
    """
    begin: dict[str, Any] = {"begin_from": begin_from, "parts": parts, "start_over": start_over}
    begin |= {"command": command, "profile": profile}
    with open_run(config, workdir, **begin) as (run, state):
        run.evaluate_if_due()
        for iteration in range(run.boundary.done, config.iterations):
            watch = run.watch()
            player, prompts, key = run.plays(watch), watch.timed(run.prompts), run.sample_key(iteration)
            state, batch, metrics = iterate(run.engine, player, run.scorer, state, prompts, key, watch)
            run.report(iteration, state, batch, metrics, player, watch)
            del batch  # makes room for evaluations and the next batch
            run.conclude()
        return run.finish()


def main(config: ConfigDict) -> None:
    """Run the command."""
    if flags.FLAGS.check_for is not None:
        print(check_for(config, flags.FLAGS.check_for, config_words(sys.argv[1:])))
        return
    compiled, command = CompileCounter(), redacted(shlex.join(["python", "-m", "gspo_jax.train", *sys.argv[1:]]))
    with suppress(StopRequested):
        given: Any = {"begin_from": flags.FLAGS["from"].value or "", "parts": flags.FLAGS.from_parts}
        given["profile"] = None if flags.FLAGS.profile is None else read_span(flags.FLAGS.profile)
        facts = train(config, flags.FLAGS.workdir, **given, start_over=flags.FLAGS.start_over, command=command)
        facts["compile"] = {"programs": compiled.programs, "cached": compiled.cached, "seconds": compiled.seconds}
        cli.write_facts(flags.FLAGS.json, facts)


if __name__ == "__main__":
    cli.run(main, "train")
