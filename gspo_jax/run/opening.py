"""Opening of a run in its folder."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
from ml_collections import ConfigDict

from gspo_jax import coldstart, engine
from gspo_jax.config import MAY_CHANGE
from gspo_jax.errors import ScoringFailed, StopRequested
from gspo_jax.folder import lease
from gspo_jax.folder.storage import check_place, open_folder
from gspo_jax.measuring import published
from gspo_jax.parallel import hosts, processes
from gspo_jax.profiling.phases import PhaseTraces, Span, check_span
from gspo_jax.rewards.batches import BatchScorer
from gspo_jax.run import branch, resume
from gspo_jax.run import log as log_lib
from gspo_jax.run.evaluations import Evaluations
from gspo_jax.run.phases import open_phases
from gspo_jax.run.session import Run
from gspo_jax.setup import data, learning, players, policy, teacher
from gspo_jax.setup.checks import check
from gspo_jax.setup.meshes import make_meshes
from gspo_jax.training.checkpoint import Checkpointer, steps
from gspo_jax.training.state import TrainState


@contextmanager
def open_run(
    config: ConfigDict,
    place: str | Path,
    *,
    begin_from: str = "",
    parts: Sequence[str] = (),
    start_over: bool = False,
    command: str = "",
    profile: Span | None = None,
) -> Iterator[tuple[Run, TrainState]]:
    """Open the run in `place`, a folder or a bucket, at its newest checkpoint or at its beginning.

    Errors in config, data, rewards, model folder and run folder are raised before any compilation. A cold start, if
    configured, is trained first, unless the run begins from RUN[@STEP], `begin_from`, with some `parts` of its
    checkpoint (see run/branch.py). With `start_over`, a run with lost or damaged checkpoints begins again.
    The phases of the iterations in `profile` are traced. `StopRequested` passes through after the state is saved.
    """
    check_place(place)
    if profile is not None:
        check_span(profile, done=0, iterations=config.iterations)
    given = branch.parse(begin_from, parts, place)
    model = check(config, count_devices=jax.device_count)
    policy.check_weights(config)
    with ExitStack() as stack:
        confirm_lease = stack.enter_context(lease.hold(place))
        files = stack.enter_context(open_folder(place))
        phases = stack.enter_context(open_phases(config, files))
        phases.saved = next(iter(steps(files.checkpoints)), None)
        if phases.saved is not None and not start_over:
            resume.check_folder(config, files)
        folder = policy.initial_folder(config, files.local)
        source = None
        begins = phases.saved is None or start_over
        if begins and (asked := branch.request_of(given, files, saved=phases.saved)) is not None:
            source = stack.enter_context(branch.open_source(asked, config))
            folder = source.initial_folder(config, folder)
        tokenizer = None
        draws = config.model.random and begins and source is None
        if phases.saved is None and not config.model.folder and (source is None or not source.gives_cold_start(config)):
            coldstart.check_reuse(config, folder, may_change=MAY_CHANGE)
        if config.model.folder or (folder.exists() and not draws):
            model, tokenizer = policy.read_folder(config, folder)
        records = {split: data.load_records(config, split) for split in ("train", "test")}
        learns = tokenizer is None and not draws
        shown = coldstart.load(config) if config.coldstart.conversations and learns else records["train"]
        taken = published.of_run(config)
        scorer = stack.enter_context(data.make_scorer(config))
        replies = stack.enter_context(players.make_replies(config))
        meshes = make_meshes(config, model)
        stack.enter_context(jax.set_mesh(meshes.trainer))
        if tokenizer is None:
            if draws:
                policy.write_random(config, folder)
            else:
                coldstart.coldstart(config, shown, meshes.trainer, folder, on_step=phases.tick("cold start"))
                phases.enter("start")
            files.share()
            model, tokenizer = policy.read_folder(config, folder)
        teacher.check_tokens(config, tokenizer)
        stop, memory = players.stop_rule_of(config, tokenizer), hosts.memory_of(meshes.sampler)
        made = engine.build(config, model, meshes, stop, memory=memory)
        made.sampler.poll, scorer.interrupted = phases.poll, phases.noticed
        if replies is not None:
            replies.interrupted = phases.noticed
        prompts = data.training_prompts(config, tokenizer, records["train"])
        player = players.make_player(config, tokenizer, made.sampler, replies)
        of_steps = data.make_step_scorer(config)
        evaluations = Evaluations(
            config=config,
            engine=made,
            player=player,
            tokenizer=tokenizer,
            scorer=scorer,
            steps=of_steps,
            prompts=data.held_out_prompts(config, tokenizer, records["test"]),
            benchmarks={label: (each, each.prompts(tokenizer)) for label, each in taken.items()},
        )
        content = {"measured_on": evaluations.content, "folder": folder}
        begin = {"source": source, "asked": given, "start_over": start_over}
        start = resume.start(config, made, files, prompts, **content, **begin)
        if profile is not None:
            check_span(profile, done=start.boundary.done, iterations=config.iterations)
            profile = profile._replace(last=min(profile.last, config.iterations))
        checkpointer = Checkpointer(
            files.checkpoints, keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        )
        stack.callback(checkpointer.close)
        phases.saved = checkpointer.latest
        where = {"after_step": start.step, "done": start.boundary.done, "command": command}
        log = stack.enter_context(log_lib.open_log(config, files.local, **where))
        phases.show = log.progress.phase
        began = {"done": start.boundary.done, "total": config.iterations, "resumed": start.step is not None}
        for text in log_lib.opening_lines(files.name, **began, extensible=not learning.falling(config)):
            log.progress.say(text)
        log.note_start(files.local, origin=start.origin, changes=start.changes, said=start.said)
        taught = made.teacher is not None
        log.guard_config(made.objective, group_size=config.sampling.group_size, taught=taught)
        if text := players.truncation_warning(config, made.policy.config.vocab_size):
            log.warn(text)
        if config.training.old_logprobs == "auto" and (why := learning.why_recomputed(config)):
            log.progress.say(why)
        for text in start.changed:
            log.warn(text)
        if player.history is not None:
            player.history.restore(start.arrays)
        scored = BatchScorer(scorer, tokenizer.decode, meshes.trainer, steps=of_steps)
        if scorer.asks_ahead:
            player.heard = scored.ahead
        buffer = players.make_buffer(config, player, start.boundary.unfinished)
        run = Run(
            config=config,
            engine=dataclasses.replace(
                made, frozen=start.frozen, reference=start.reference, teacher_params=start.teacher
            ),
            tokenizer=tokenizer,
            base=start.base,
            inputs=start.inputs,
            origin=start.origin,
            changes=start.changes,
            boundary=start.boundary,
            key=start.key,
            prompts=prompts,
            evaluations=dataclasses.replace(evaluations, inputs=start.inputs),
            player=player if buffer is None else buffer,
            scorer=scored,
            files=files,
            checkpointer=checkpointer,
            log=log,
            phases=phases,
            confirm_lease=confirm_lease,
            traces=None if profile is None else PhaseTraces(files.profile, profile, process=processes.number()),
        )
        phases.settled = lambda: run.settled
        if source is not None and start.step is None:
            run.save()  # the run that it began from may go
        try:
            yield run, start.boundary.state
        except StopRequested:
            run.stop()
            raise
        except ScoringFailed:
            if run.boundary.done:
                run.keep()
            raise
