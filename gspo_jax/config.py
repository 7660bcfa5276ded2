"""Every config field with its default, meaning and unit. Files in `configs/` start from `base()` and change it."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from gspo_jax import objectives
from gspo_jax.data.templates import CLOCK
from gspo_jax.objectives import mismatch


def base() -> ConfigDict:
    """Return the default config; a run still has to set its policy (a folder or a cold start), task and rewards."""
    config = ConfigDict()
    config.seed = 0  # seeds everything: initial weights, data order, sampling
    config.iterations = 1000  # iterations of the run: sample a batch, score it, make `training.minibatches` updates
    config.cpu_devices = 8  # CPU backend only: simulated devices, over all processes
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1})  # trainer; -1: all remaining devices

    config.processes = ConfigDict()
    config.processes.grace_s = 30  # seconds from a signal until a process exits, saved or not
    # Seconds that a phase (sample, reward, update, save …) may take in any case, as the first of each kind compiles; a
    # process whose phase takes longer, and ten times as long as any before, is ended.
    config.processes.deadline_s = 1200.0

    config.model = ConfigDict()
    config.model.folder = ""  # Hugging Face folder of a Qwen3, Qwen3-MoE or OLMoE; empty: a cold start makes the model
    config.model.published = ""  # model the folder must hold, such as "Qwen3-30B-A3B"; lets `plan` run without a folder
    config.model.dtype = "bfloat16"  # compute dtype, "bfloat16" or "float32"; what is trained is always float32
    # What each layer keeps for the backward pass. "full": its input; "offload": its input, in host memory; "dots": its
    # input and the outputs of its matmuls; "none": all activations, nothing is recomputed.
    config.model.remat = "full"
    config.model.dispatch = "gather"  # of tokens to experts: "gather" or, on TPU, "ragged_all_to_all"
    config.model.architecture = ConfigDict()  # fields of ModelConfig for the model that the cold start makes

    # Low-rank adapters (LoRA): the model's own weights stay as they are, and matrices beside them are trained.
    config.adapter = ConfigDict()
    config.adapter.rank = 0  # rank beside matrices that every token passes; this and expert_rank 0: train all weights
    config.adapter.expert_rank = 0  # rank beside the matrices of every expert; 0: experts stay as they are
    config.adapter.alpha = 8.0  # an adapter's product is multiplied by alpha / √rank
    # Matrices with adapters: gate_proj, up_proj and down_proj mean those of dense layers; "router" may be added.
    config.adapter.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    config.adapter.expert_targets = ("gate_proj", "up_proj", "down_proj")
    config.adapter.folder = ""  # folder of `peft` with the adapters to start with; empty: new ones
    # Dtype of the model's own weights: "float32", "bfloat16" or, matrices, "int8" with a scale for each output channel.
    config.adapter.base_dtype = ""  # empty: model.dtype

    config.coldstart = ConfigDict()  # supervised training of an initial policy; unused if model.folder is set
    config.coldstart.steps = 0  # optimizer steps; 0: no cold start
    # File of conversations to learn, whose assistant's turns are the demonstrations; empty: the task's worked answers.
    config.coldstart.conversations = ""
    config.coldstart.batch = 64  # demonstrations per step
    # Stages of equal length, each with the share of its demonstrations that give the answer without the work: with
    # (0.0, 0.0, 0.6) six of ten in the last third. (): none.
    config.coldstart.terse = ()
    config.coldstart.vocab_size = 320  # size of the vocabulary of the tokenizer, which is trained too, and of the model
    config.coldstart.train_router = True  # False: routers get no gradient and, left out of the decay, stay as they are
    config.coldstart.log_every = 100  # steps between progress reports
    config.coldstart.optimizer = adamw(learning_rate=3e-3, schedule="cosine", warmup_updates=20)

    config.data = ConfigDict()
    config.data.task = ""  # "gsm8k", "jsonl", one of `functions`, or a generated one (data/generated.py)
    # gsm8k, jsonl: folder with files of training and of held-out rows, named as on a hub, or a prepared TFDS directory.
    config.data.folder = ""
    # jsonl: instead of a folder, a file or folder of training rows: JSON Lines, JSON, CSV or Parquet; "data/train" is
    # all of data/train-00000-of-00002.parquet and the others.
    config.data.train = ""
    config.data.test = ""  # jsonl: the held-out rows, likewise
    # jsonl, conversations and examples: field of the prompt, by its whole name or with dots into objects; empty:
    # `question`, `prompt` or `messages`, whichever a row has.
    config.data.prompt = ""
    config.data.held_out = 0.05  # jsonl: share of the training rows that is held out where there is no file of such
    config.data.answer = "answer"  # likewise: field of the reference answer; empty: rows need none
    config.data.sources = ConfigDict()  # jsonl: instead of one file, several, mixed by weight: name -> `source(…)`
    config.data.data_dir = ""  # generated tasks only: folder to build the data set in; empty: TFDS's default
    config.data.options = (
        ConfigDict()
    )  # generated tasks: difficulty, seed, train_size, test_size; one of `functions`: its own
    config.data.limit = 0  # use only this many records, the first of the training split; 0: all
    config.data.prompts_per_batch = 128  # prompts, and so groups, per training batch and per evaluation batch
    config.data.max_prompt_length = 512  # tokens; longer prompts are left out, never cut
    config.data.system = ""  # system prompt of conversations without one
    config.data.instruction = placeholder(str)  # text appended to the last user turn; None: the task's own
    config.data.few_shot = ""  # file of worked examples, which come before every prompt as turns
    config.data.shots = 0  # use only this many examples, the first of the file; 0: all
    config.data.enable_thinking = placeholder(bool)  # for chat templates that ask, such as Qwen3's; None: their default
    # Time that chat templates are told if they ask, such as "2026-12-24" or "2026-12-24T18:30".
    config.data.clock = CLOCK

    config.sampling = ConfigDict()
    config.sampling.group_size = 8  # responses per prompt
    config.sampling.max_response_length = 1024  # tokens, EOS included; of an episode: all turns and replies
    config.sampling.temperature = 1.0  # softmax temperature, also of the trainer's log-probs; must be above 0
    config.sampling.top_k = 0  # sample among the k most probable tokens; 0: off
    config.sampling.top_p = 1.0  # sample among the fewest tokens whose probabilities reach top_p; 1: off
    config.sampling.min_p = 0.0  # leave out tokens below min_p times the largest probability; 0: off
    config.sampling.stop_ids = ()  # token ids, or texts of one token, that end a turn in addition to the tokenizer's
    config.sampling.prefix = ""  # text that every response begins with, such as "<think>\n"; not trained on
    # "bfloat16" or "int8": round the sampler's weights to what a rollout engine would store, under a trainer in more
    # precision, so that the two policies differ as they do there. Empty: model.dtype alone.
    config.sampling.weights_dtype = ""
    # "int8": the decoder's cache of keys and values takes half of bfloat16's memory and time to read, with a scale for
    # each token and head. The sampler's policy then differs a little from the trainer's. Empty: model.dtype.
    config.sampling.cache_dtype = ""
    config.sampling.slots = placeholder(int)  # responses decoded concurrently, over all devices; None: all of them
    config.sampling.mesh = ConfigDict()  # sampler mesh on the trainer's devices; all 0: `mesh` above; else 0 means 1
    config.sampling.mesh.update({"data": 0, "fsdp": 0, "expert": 0, "tensor": 0})
    config.sampling.partial = ConfigDict()  # partial rollouts: unfinished responses resume in the next sampling call
    # Prompts in flight per sampling call, more than data.prompts_per_batch. None: no partial rollouts.
    config.sampling.partial.prompts = placeholder(int)
    # End the sampling call once this share of its unfinished responses has ended; counted on each batch shard.
    config.sampling.partial.share = 0.9
    # Sampling rounds per iteration, at most. Above 1: DAPO's dynamic sampling, in which further rounds replace groups
    # that there is nothing to learn from, because all their advantages are 0.
    config.sampling.rounds = 1
    # One of `rewards` or `step_rewards` by which dynamic sampling replaces groups, too: those whose scores are equal. A
    # reward for the format alone would keep groups of wrong answers. Empty: by the advantages alone.
    config.sampling.filter = ""

    config.environment = ConfigDict()  # episodes of several turns
    config.environment.name = ""  # what replies to a turn, such as "countdown_feedback"; empty: one turn, no replies
    config.environment.turns = 2  # turns of the policy per episode, at most

    # Functions of your own: name -> "path/to/file.py:function" or "package.module:function". The name can then stand
    # wherever the catalogue's do: in rewards, step_rewards, environment.name, objective.name, mismatch.correction and
    # data.task.
    config.functions = ConfigDict()

    config.rewards = ConfigDict()  # reward function: weight; 0: logged, not added
    config.scoring = ConfigDict()  # rewards that run in other processes: math_verify in workers, code in a sandbox
    config.scoring.timeout_s = 2.0  # seconds per response; after that a worker's call has no score, a program scores 0
    config.scoring.unsafe = False  # run programs of the model without a sandbox, with this account's rights
    # Worker processes for each process of the run; None: the cores of its host, shared by the processes that run there.
    config.scoring.workers = placeholder(int)

    config.step_rewards = ConfigDict()  # step-reward function: weight; for objectives with per-token advantages
    config.overlong = ConfigDict()  # DAPO's soft overlong punishment
    config.overlong.penalty = 0.0  # its weight in the reward; 0: off
    config.overlong.cache = 0  # last tokens before max_response_length, over which it grows from 0 to -1
    config.overlong.filter = False  # True: do not train on responses truncated at the limit

    # An objective of the catalogue; below, each one's hyper-parameters, which its function documents.
    config.objective = ConfigDict({"name": "gspo", **_sections(objectives.catalogue)})

    config.routing = ConfigDict()  # mixture-of-experts models only
    config.routing.replay = "none"  # "r2": the trainer replays the old policy's expert choices; "r3": the sampler's
    config.routing.balance_weight = 0.0  # weight of the load-balancing loss; 0: off
    config.routing.z_weight = 0.0  # weight of the router z-loss; 0: off
    # Iterations between two measurements of what routing does to the log-ratios (`noise/…`), each of which takes two
    # forward passes after the iteration's updates. 0: none.
    config.routing.noise_every = 0
    config.reference = ConfigDict()  # reference policy: the policy the run begins from, frozen
    config.reference.kl_weight = 0.0  # weight of the KL to it; 0: no reference policy
    config.reference.estimator = "k3"  # estimator of the KL in the loss: "k1", "k2" or "k3"
    config.reference.place = "loss"  # or "reward": subtract the KL (k1) from every token's reward; ppo only
    config.critic = ConfigDict()  # ppo only
    config.critic.trunk = "own"  # a copy of the initial policy's trunk; "policy": a value head on the policy's
    config.critic.optimizer = adamw(learning_rate=1e-5, schedule="constant", warmup_updates=10)
    config.mismatch = ConfigDict()  # importance weights that correct for the mismatch of sampler and trainer
    config.mismatch.correction = ""  # "tis", "icepop", "sequence_mask": need old_logprobs="recompute"; empty: none
    # Off-policy sequence mask: a response with a negative advantage has no gain once the mean of log μ − log π_θ over
    # its tokens exceeds this number of nats, μ the sampler's policy and π_θ that of the update. None: off.
    config.mismatch.negative_mask = placeholder(float)
    config.mismatch.update(_sections(mismatch))

    config.training = ConfigDict()
    config.training.minibatches = 4  # optimizer updates per batch
    # Tokens of a row, into which responses are packed; each batch shard computes one row at a time. It must hold a
    # prompt and a response of full length; more take more memory, and more padding if a shard has few. None: the
    # fewest, from 1024 on, of which responses of full length leave little to spare.
    config.training.row_tokens = placeholder(int)
    config.training.max_skipped = 10  # end the run after so many updates in a row whose gradient was not finite
    config.training.old_logprobs = "sampler"  # or "recompute": score with the trainer before a batch's first update
    config.training.entropy_weight = 0.0  # weight of an entropy bonus in the loss; 0: off
    config.training.logprob_chunk = 4096  # tokens, over all devices, whose logits are in memory at once

    config.optimizer = adamw(learning_rate=1e-6, schedule="constant", warmup_updates=10)

    config.eval = ConfigDict()  # evaluation on held-out prompts
    config.eval.every = 20  # iterations between evaluations; the initial and the final policy are always evaluated
    config.eval.prompts = 256  # use only this many prompts, the first of the test split; 0: all
    config.eval.correct = ""  # reward function, one of `rewards`, that decides which responses are correct
    config.benchmarks = ConfigDict()  # benchmarks during the run, each with its own interval: name -> `benchmark(…)`
    config.log = ConfigDict({"samples_every": 20, "samples": 4})  # iterations between samples shown, and how many
    config.log.wandb = ""  # project at Weights & Biases that also gets the metrics; empty: none
    config.checkpoint = ConfigDict({"every": 20, "keep": 2})  # iterations between checkpoints, and newest ones kept
    config.checkpoint.keep_best = False  # also keep the checkpoint with the highest held-out accuracy
    return config


def on_gsm8k(published: str = "") -> ConfigDict:
    """Return `base()` for GSM8K: math-verify's verdict, and a small reward for the answer's format.

    `published` is the name of the model, such as "Qwen3-30B-A3B", or empty.
    """
    config = base()
    config.model.published = published
    config.data.task = "gsm8k"
    config.rewards = ConfigDict({"math_verify": 1.0, "math_verify_flexible": 0.0, "answer_format": 0.1})
    config.eval.correct = "math_verify"
    # In bfloat16, the sampler's log-probs differ from the trainer's by more than GSPO's bounds.
    config.training.old_logprobs = "recompute"
    return config


def adamw(*, learning_rate: float, schedule: str, warmup_updates: int) -> ConfigDict:
    """Return an AdamW section."""
    config = ConfigDict()
    config.learning_rate = learning_rate  # after the warm-up
    config.schedule = schedule  # "constant", or "cosine", which falls to zero at the end of the run
    config.warmup_updates = warmup_updates  # updates in which the learning rate rises linearly
    config.b1 = 0.9  # decay of the mean of gradients
    config.b2 = 0.95  # decay of the mean of their squares
    config.weight_decay = 0.0  # times the learning rate, the share of a parameter that an update takes off
    # Parameters that are not decayed: "norm", "bias" and "router", perhaps also "embed" and "head"; (): decay them all.
    config.no_decay = ("norm", "bias", "router")
    config.max_grad_norm = 1.0  # global norm at which gradients are clipped
    return config


def _sections(module: ModuleType) -> dict[str, ConfigDict]:
    """Return a section for each function of a module's `__all__`: its keyword arguments, with their defaults."""
    return {name: _section(getattr(module, name)) for name in module.__all__}


def _section(function: Callable[..., Any]) -> ConfigDict:
    hints, section = get_type_hints(function), ConfigDict()
    for name, parameter in inspect.signature(function).parameters.items():
        (kind, *_) = get_args(hints[name]) or (hints[name],)  # "float" of "float | None"
        kind = str if get_origin(kind) is Literal else kind
        section[name] = placeholder(kind) if parameter.default is None else parameter.default
    return section


def benchmark(data: str = "", **fields: Any) -> ConfigDict:
    """Return a section of `benchmarks`: its folder or file, and any of the other fields.

    The section's name is that of a benchmark (docs/benchmarks.md); under any other, `data` is a file of rows.
    """
    config = ConfigDict({"data": data})
    config.every = 0  # iterations between two times; the initial and the final policy take it too; 0: never
    config.samples = 8  # responses to every problem, a multiple of sampling.group_size
    config.update(fields)
    return config


def source(train: str, **fields: Any) -> ConfigDict:
    """Return a source of `data.sources`: a file or folder of training rows, and any of the other fields."""
    config = ConfigDict({"train": train})
    config.test = ""  # the held-out rows; empty: the share data.held_out of the training rows
    config.weight = 1.0  # share of its prompts in training, relative to other sources
    config.rewards = ()  # those of `rewards` that score its responses; empty: all
    config.correct = ""  # the one of them that decides which are correct in evaluations; empty: eval.correct
    config.prompt = placeholder(str)  # field of its prompts; None: data.prompt
    config.system = placeholder(str)  # None: data.system
    config.instruction = placeholder(str)  # None: data.instruction
    config.update(fields)
    return config
