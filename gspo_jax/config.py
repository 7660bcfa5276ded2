"""Every config field with its default, meaning and unit. Files in `configs/` start from `base()` and change it."""

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from gspo_jax import objectives, tool_calls
from gspo_jax.data.templates import CLOCK
from gspo_jax.objectives import advantages, mismatch
from gspo_jax.rollout.drafts import MOST, Drafter


def base() -> ConfigDict:
    """Return the default config. A run must still set its policy (a folder or a cold start), task and rewards."""
    config = ConfigDict()
    config.seed = 0  # seeds initial weights, data order and sampling
    config.iterations = 1000  # iterations: sample a batch, score it, make `training.minibatches` updates
    config.cpu_devices = 8  # CPU backend only: simulated devices, over all processes
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1})  # trainer, -1: all remaining devices

    config.processes = ConfigDict()
    config.processes.grace_s = 30  # seconds from a signal to exit, saved or not
    # Seconds that any phase (sample, reward, update, save …) may take, compilation included. A process ends if a phase
    # exceeds both this and ten times its longest duration so far.
    config.processes.deadline_s = 1200.0

    config.model = ConfigDict()
    config.model.folder = ""  # Hugging Face folder of a Qwen3, Qwen3-MoE or OLMoE. Empty: a cold start's model
    config.model.published = ""  # expected model, e.g. "Qwen3-30B-A3B". Lets `plan` run without a folder
    # Random weights of model.published's or model.architecture's shape, made on the devices from `seed`, with a
    # tokenizer of bytes: to try a machine without a download.
    config.model.random = False
    config.model.dtype = "bfloat16"  # for compute, "bfloat16" or "float32". Trained weights are always float32
    # Kept per layer for the backward pass. "full": its input. "offload": its input, in host memory. "dots": its input
    # and matmul outputs. "none": all activations, without recomputation.
    config.model.remat = "full"
    config.model.dispatch = "gather"  # of tokens to experts: "gather" or, on TPU, "ragged_all_to_all"
    config.model.architecture = ConfigDict()  # fields of ModelConfig for the cold start's model

    # Low-rank adapters (LoRA), trained instead of the model's own weights.
    config.adapter = ConfigDict()
    config.adapter.rank = 0  # rank for matrices used by every token. Both ranks 0: all weights are trained
    config.adapter.expert_rank = 0  # rank for each expert's matrices, 0: no expert adapters
    config.adapter.alpha = 8.0  # an adapter's product is multiplied by alpha / √rank
    # Matrices with adapters, where a model has them. gate_proj, up_proj and down_proj mean dense layers and shared
    # experts. "router" may be added, and the delta rule's steps and decays, "in_proj_ba" or "in_proj_b", "in_proj_a".
    config.adapter.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    config.adapter.targets += ("kv_b_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj")
    config.adapter.targets += ("gate_proj", "up_proj", "down_proj")
    config.adapter.expert_targets = ("gate_proj", "up_proj", "down_proj")
    config.adapter.folder = ""  # `peft` folder with initial adapters. Empty: new ones
    # Dtype of frozen weights: "float32", "bfloat16" or, for matrices, "int8" with a scale per output channel.
    config.adapter.base_dtype = ""  # empty: model.dtype

    config.coldstart = ConfigDict()  # supervised training of an initial policy, unused if model.folder is set
    config.coldstart.steps = 0  # optimizer steps, 0: no cold start
    # File of conversations with assistant turns to learn. Empty: the task's worked answers.
    config.coldstart.conversations = ""
    config.coldstart.batch = 64  # demonstrations per step
    # Shares of demonstrations with the answer alone, in stages of equal length: (0.0, 0.0, 0.6) makes six of ten terse
    # in the last third. (): none.
    config.coldstart.terse = ()
    # Vocabulary size of the model and its new tokenizer, whose chat template is ChatML if the environment has tools.
    config.coldstart.vocab_size = 320
    config.coldstart.train_router = True  # False: routers get neither gradient nor decay
    config.coldstart.log_every = 100  # steps between progress reports
    config.coldstart.optimizer = adamw(learning_rate=3e-3, schedule="cosine", warmup_updates=20)

    config.data = ConfigDict()
    config.data.task = ""  # "gsm8k", "jsonl", one of `functions`, or a generated one (data/generated.py)
    # gsm8k, jsonl: folder with files of training and held-out rows, named as on a hub, or a prepared TFDS directory.
    config.data.folder = ""
    # jsonl: instead of a folder, a file or folder of training rows (JSON Lines, JSON, CSV or Parquet). "data/train"
    # means all parts data/train-00000-of-00002.parquet …
    config.data.train = ""
    config.data.test = ""  # jsonl: held-out rows, likewise
    # jsonl, conversations and examples: field of the prompt, with dots into objects. Empty: a row's `question`,
    # `prompt` or `messages`.
    config.data.prompt = ""
    config.data.held_out = 0.05  # jsonl: held-out share of training rows, without held-out files
    config.data.answer = "answer"  # likewise: field of the reference answer. Empty: rows need none
    config.data.sources = ConfigDict()  # jsonl: several weighted files instead of one, name -> `source(…)`
    config.data.data_dir = ""  # generated tasks: folder to build the data set in. Empty: TFDS's default
    config.data.options = ConfigDict()  # generated tasks: difficulty, seed, train_size, test_size. Functions: their own
    config.data.limit = 0  # use only the first N training records, 0: all
    config.data.prompts_per_batch = 128  # prompts (groups) per training or evaluation batch
    config.data.max_prompt_length = 512  # tokens. Longer prompts are left out, never cut
    config.data.system = ""  # system prompt of conversations without one
    config.data.instruction = placeholder(str)  # text appended to the last user turn, None: the task's own
    config.data.few_shot = ""  # file of worked examples, as turns before every prompt
    config.data.shots = 0  # use only the first N examples, 0: all
    # For chat templates that switch thinking, such as those of Qwen3, GLM and DeepSeek-V3.1. None: their default.
    config.data.enable_thinking = placeholder(bool)
    # Time for chat templates that ask, "2026-12-24" or "2026-12-24T18:30".
    config.data.clock = CLOCK

    config.sampling = ConfigDict()
    config.sampling.group_size = 8  # responses per prompt
    config.sampling.max_response_length = 1024  # tokens, EOS included. Of an episode: all turns and replies
    config.sampling.temperature = 1.0  # softmax temperature, also of the trainer's log-probs. Must be above 0
    config.sampling.top_k = 0  # sample among the k most probable tokens, 0: off
    config.sampling.top_p = 1.0  # sample among the fewest tokens with probabilities that reach top_p, 1: off
    config.sampling.min_p = 0.0  # leave out tokens below min_p times the largest probability, 0: off
    # Ids per token that the sampler records with their log-probs, 0: none. With top_k, top_p or min_p: all that these
    # kept, if no more (docs/decoding.md). Otherwise the most probable ones, among them the sampled one.
    config.sampling.keep_top = 0
    config.sampling.stop_ids = ()  # token ids, or one-token texts, that also end a turn
    config.sampling.prefix = ""  # beginning of every response, e.g. "<think>\n", not trained on
    # "bfloat16" or "int8": round the sampler's weights as a rollout engine would, under a more precise trainer. Empty:
    # model.dtype alone.
    config.sampling.weights_dtype = ""
    # "int8": store keys and values with a scale per token and head, in half of bfloat16's memory and read time. The
    # sampler then differs a little from the trainer. Empty: model.dtype.
    config.sampling.cache_dtype = ""
    config.sampling.slots = placeholder(int)  # responses decoded concurrently, over all devices. None: all
    # Tokens whose keys and values are stored at a time, over all devices. Slots that they cannot hold at full length
    # stay unused, but for partial rollouts, where responses take pages as they grow. None: what the slots may need, as
    # far as the devices' memory has room.
    config.sampling.pool_tokens = placeholder(int)
    # Tokens per page. None: an eighth of the longest response, at least 64; on TPU 128 or 256.
    config.sampling.page = placeholder(int)
    # Draft tokens that decode steps check several at a time; no token depends on it. "own": copied from the prompt and
    # the response, "group": also from the group's other responses, "history": also from earlier responses to the
    # prompt. "none": one token per step.
    config.sampling.draft = "none"
    config.sampling.draft_tokens = 3  # maximum drafts per step, 1 to 8; fewer where they do not pay
    config.sampling.mesh = ConfigDict()  # sampler mesh on the trainer's devices. All 0: as `mesh`. Otherwise 0 means 1
    config.sampling.mesh.update({"data": 0, "fsdp": 0, "expert": 0, "tensor": 0})
    config.sampling.partial = ConfigDict()  # unfinished responses resume in the next sampling call
    # Prompts in flight per sampling call, more than data.prompts_per_batch. None: no partial rollouts.
    config.sampling.partial.prompts = placeholder(int)
    # End the sampling call once this share of its unfinished responses has ended. It is looked at every 256 steps; in a
    # shorter decode after each, on each group of shards that share experts.
    config.sampling.partial.share = 0.9
    # Maximum sampling rounds per iteration. Above 1: DAPO's dynamic sampling, replacing groups with all advantages 0.
    config.sampling.rounds = 1
    # A reward or step reward: dynamic sampling also replaces groups with equal scores. Otherwise a format reward would
    # keep groups of wrong answers. Empty: by the advantages alone.
    config.sampling.filter = ""

    config.environment = ConfigDict()  # episodes of several turns
    config.environment.name = ""  # replies to turns, e.g. "countdown_feedback". Empty: one turn, no replies
    config.environment.turns = 2  # maximum turns of the policy per episode
    # Of tool calls: hermes, qwen3_coder, glm, deepseek, kimi, mistral or granite. Empty: as the chat template has it.
    config.environment.tool_format = ""
    # Partial rollouts: seconds that a sampling call waits for replies. Episodes without one wait while others go on.
    config.environment.patience_s = 1.0

    # Functions of your own: name -> "path/to/file.py:function" or "package.module:function". The name is valid in
    # rewards, step_rewards, environment.name, objective.name, mismatch.correction and data.task.
    config.functions = ConfigDict()

    config.rewards = ConfigDict()  # reward function: weight, 0: logged, not added
    config.scoring = ConfigDict()  # rewards that run in other processes: math_verify in workers, code in a sandbox
    config.scoring.timeout_s = 2.0  # seconds per response. On timeout, a worker's call has no score, a program scores 0
    config.scoring.unsafe = False  # run model-written programs without a sandbox, with this account's rights
    # Worker processes per process of the run. None: its share of the host's cores.
    config.scoring.workers = placeholder(int)
    # Environment variables that worker processes see, e.g. ("JUDGE_KEY",). Their values stay out of logs and folders.
    config.scoring.environment = ()
    # Rewards and environments of your own, and judges: calls in flight of each, per process of the run.
    config.scoring.concurrency = 64
    # Tokens in flight of each, taking four bytes of a prompt and response for one. None: no limit.
    config.scoring.tokens_in_flight = placeholder(int)
    config.scoring.deadline_s = 45.0  # seconds of a call, with all its attempts
    config.scoring.tries = 4  # attempts of a call, after failures that pass: resets, timeouts, HTTP 429 and 5xx
    # Share of a batch's responses that a reward may leave without a score. With more, and at least 8, the run ends.
    config.scoring.most_failed = 0.5

    # The reward `judge`: a language model behind a server of the OpenAI chat completions protocol.
    config.judge = ConfigDict()
    config.judge.url = ""  # what comes before /chat/completions, such as "http://host:8000/v1"
    config.judge.model = ""  # name under which the server has the model
    config.judge.key = ""  # name of the environment variable with the API key, never the key itself. Empty: none
    config.judge.rubric = ""  # file with what the judge is asked, with {prompt}, {completion} and {record[FIELD]}
    config.judge.low = 0.0  # ends of the rubric's scale. The reward is 0 at `low` …
    config.judge.high = 10.0  # … and 1 at `high`
    config.judge.samples = 1  # verdicts per response, averaged
    config.judge.temperature = placeholder(float)  # of the judge. None: the server's own
    config.judge.max_tokens = placeholder(int)  # maximum tokens of a verdict, thoughts included. None: the server's own
    # Compare the responses of a group instead, by a rubric with {completion_a} and {completion_b}. The reward is the
    # share of comparisons won.
    config.judge.pairwise = False
    # Pairwise: compare each response with this many that follow it in its group, in a ring. None: all with all.
    config.judge.pairs = placeholder(int)

    # The reward `reward_model`: a model behind a server that scores texts.
    config.reward_model = ConfigDict()
    config.reward_model.url = ""  # what comes before the path of the form, such as "http://host:8000"
    config.reward_model.model = ""  # name under which the server has the model
    config.reward_model.key = ""  # name of the environment variable with the API key, as judge.key
    config.reward_model.form = "classify"  # request to vLLM ("classify", "pooling", "score") or SGLang ("sglang")
    # File with the text to score, with {prompt} and {completion}. Empty: turns, for the server's chat template.
    config.reward_model.template = ""

    config.step_rewards = ConfigDict()  # step-reward function: weight. For objectives with per-token advantages
    config.overlong = ConfigDict()  # DAPO's soft overlong punishment
    config.overlong.penalty = 0.0  # its weight in the reward, 0: off
    config.overlong.cache = 0  # tokens before max_response_length where it grows from 0 to -1
    config.overlong.filter = False  # True: do not train on truncated responses

    # Objective. Its function documents the hyper-parameters below.
    config.objective = ConfigDict({"name": "gspo"})
    # How rewards become advantages: "group_zscore", "group_centered", "leave_one_out", "max_rl" (for verdicts), "gdpo"
    # (rewards compared one by one) or "optimal_token_baseline" (for objectives with per-token advantages). Empty: the
    # objective's own.
    config.objective.advantage = ""
    # Discount per turn of an episode: each turn has an advantage of its own, from the rewards that follow it. For
    # objectives with per-token advantages. None: one advantage per episode.
    config.objective.turn_discount = placeholder(float)
    config.objective.update(_sections(objectives.catalogue))

    config.routing = ConfigDict()  # mixture-of-experts models only
    # "r2": the trainer replays the old policy's expert choices. "r3": the sampler's. "r3w": the sampler's, and their
    # weights too, as constants: routers learn from no replayed token.
    config.routing.replay = "none"
    config.routing.balance_weight = 0.0  # weight of the load-balancing loss, 0: off
    config.routing.z_weight = 0.0  # weight of the router z-loss, 0: off
    # Step of a sigmoid router's correction bias against each expert's load, once an update. 0: the bias stays.
    config.routing.bias_rate = 0.0
    # Iterations between measurements of routing's effect on log-ratios, and of flips without replay (`noise/…`,
    # `routing/native_flip_rate`, two forward passes each). 0: none.
    config.routing.noise_every = 0
    config.reference = ConfigDict()  # reference policy: the run's initial policy, frozen
    config.reference.kl_weight = 0.0  # weight of the KL to it, 0: no reference policy
    config.reference.estimator = "k3"  # estimator of the KL in the loss: "k1", "k2" or "k3"
    config.reference.place = "loss"  # or "reward": subtract the KL (k1) from every token's reward, ppo only
    # On-policy distillation: a frozen model whose distribution the policy learns, by the reverse KL(π_θ ‖ teacher) of
    # the tokens that the policy samples. `rewards` may then be empty.
    config.teacher = ConfigDict()
    config.teacher.folder = ""  # Hugging Face folder of any size and family, with the policy's tokenizer. Empty: none
    config.teacher.dtype = ""  # of its weights, as adapter.base_dtype. Empty: model.dtype
    config.teacher.weight = 1.0  # weight of the KL, in nats per token, beside the advantages or in the loss
    # "advantage": −KL (k1) of each sampled token is added to its advantage. "k2", "k3": an estimate from the sampled
    # tokens in the loss. "full": the exact KL over the vocabulary in the loss.
    config.teacher.form = "advantage"
    config.critic = ConfigDict()  # ppo only
    config.critic.trunk = "own"  # a copy of the initial policy's trunk. "policy": a value head on the policy's
    config.critic.optimizer = adamw(learning_rate=1e-5, schedule="constant", warmup_updates=10)
    config.mismatch = ConfigDict()  # importance weights for the sampler–trainer mismatch
    # "tis", "icepop", "sequence_mask", "sequence_tis": the trainer scores old log-probs. Empty: none
    config.mismatch.correction = ""
    # Off-policy sequence mask: a response with a negative advantage has no gain if its mean log μ − log π_θ per token
    # exceeds this many nats (μ: sampler's policy, π_θ: the update's). None: off.
    config.mismatch.negative_mask = placeholder(float)
    # Score centring over the sampler's kept ids, which needs sampling.keep_top: takes out what the mean score of tokens
    # drawn by another policy adds to the gradient.
    config.mismatch.center = False
    # Iterations between measurements of the bias that the mismatch gives gradients (`noise/bias…`, before the updates;
    # with B mini-batches, 8 / B or at least one forward and backward passes over the batch). 0: none.
    config.mismatch.bias_every = 0
    config.mismatch.update(_sections(mismatch))

    config.training = ConfigDict()
    config.training.minibatches = 4  # optimizer updates per batch
    # Tokens of a row of packed responses, at least a prompt and response of full length. Each batch shard computes one
    # row at a time. Longer rows take more memory and, with few responses per shard, more padding. None: the fewest,
    # from 1024 on, that full-length responses nearly fill.
    config.training.row_tokens = placeholder(int)
    config.training.max_skipped = 10  # consecutive updates with non-finite gradients that end the run
    # Log-probs of the old policy. "sampler": the sampler's. "recompute": score with the trainer before a batch's first
    # update. "auto": recompute where the sampler's rounding could pass the objective's bounds, or where replay "r2",
    # mismatch.correction, mismatch.center or objective.advantage needs it.
    config.training.old_logprobs = "auto"
    config.training.entropy_weight = 0.0  # weight of an entropy bonus in the loss, 0: off
    config.training.logprob_chunk = 4096  # tokens, over all devices, with logits in memory at once

    config.optimizer = adamw(learning_rate=1e-6, schedule="constant", warmup_updates=10)

    config.eval = ConfigDict()  # evaluation on held-out prompts
    config.eval.every = 20  # iterations between evaluations, in addition to the initial and final ones
    config.eval.prompts = 256  # use only the first N test prompts, 0: all
    # The reward, one of `rewards`, whose verdicts, 0 or 1, are the accuracy. Empty: none, evaluations show the mean
    # reward.
    config.eval.correct = ""
    config.benchmarks = ConfigDict()  # benchmarks during the run: name -> `benchmark(…)`
    config.log = ConfigDict({"samples_every": 20, "samples": 4})  # iterations between samples shown, and how many
    config.log.wandb = ""  # Weights & Biases project for the metrics. Empty: none
    config.checkpoint = ConfigDict({"every": 20, "keep": 2})  # iterations between checkpoints, and newest ones kept
    # Also keep the checkpoint with the highest held-out accuracy, or mean reward without eval.correct.
    config.checkpoint.keep_best = False
    return config


def on_gsm8k(published: str = "") -> ConfigDict:
    """Return `base()` for GSM8K: math-verify's verdict, and a small reward for the answer's format.

    `published` is the model's name, e.g. "Qwen3-30B-A3B", or empty.
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
    config.warmup_updates = warmup_updates  # updates of linear learning-rate warm-up
    config.b1 = 0.9  # decay of the mean of gradients
    config.b2 = 0.95  # decay of the mean of their squares
    config.weight_decay = 0.0  # each update removes learning_rate × this share of a parameter
    # Parameters without decay: "norm", "bias" and "router", optionally "embed" and "head". (): decay all.
    config.no_decay = ("norm", "bias", "router")
    config.max_grad_norm = 1.0  # global norm for gradient clipping
    return config


def _sections(module: ModuleType) -> dict[str, ConfigDict]:
    """Return a section of keyword arguments and defaults for each function of a module's `__all__`."""
    return {name: _section(getattr(module, name)) for name in module.__all__}


def _section(function: Callable[..., Any]) -> ConfigDict:
    hints, section = get_type_hints(function), ConfigDict()
    for name, parameter in inspect.signature(function).parameters.items():
        (kind, *_) = get_args(hints[name]) or (hints[name],)  # "float" of "float | None"
        kind = str if get_origin(kind) is Literal else kind
        section[name] = placeholder(kind) if parameter.default is None else parameter.default
    return section


def benchmark(data: str = "", **fields: Any) -> ConfigDict:
    """Return a section of `benchmarks`: its folder or file, and any other fields.

    Name the section after a benchmark (docs/benchmarks.md). Under any other name, `data` is a file of rows.
    """
    config = ConfigDict({"data": data})
    config.every = 0  # iterations between benchmarks, in addition to the initial and final ones. 0: never
    config.samples = 8  # responses per problem, a multiple of sampling.group_size
    config.update(fields)
    return config


def source(train: str, **fields: Any) -> ConfigDict:
    """Return a source of `data.sources`: a file or folder of training rows, and any other fields."""
    config = ConfigDict({"train": train})
    config.test = ""  # held-out rows. Empty: the share data.held_out of the training rows
    config.weight = 1.0  # relative share of training prompts
    config.rewards = ()  # subset of `rewards` for its responses, empty: all
    config.correct = ""  # its reward for correctness in evaluations, empty: eval.correct
    config.prompt = placeholder(str)  # field of its prompts, None: data.prompt
    config.system = placeholder(str)  # None: data.system
    config.instruction = placeholder(str)  # None: data.instruction
    config.update(fields)
    return config


INT32 = 2**31 - 1
"""Array indices and update counts are int32."""


class Range(NamedTuple):
    """Values that a field may have."""

    words: str
    """Completes "use …"."""
    holds: Callable[[Any], bool]
    """False for NaN."""


def _from_to(low: int, high: int) -> Range:
    return Range(f"{low} to {high}", lambda x: low <= x <= high)


def _one_of(*texts: str, note: str = "") -> Range:
    *others, last = map(repr, texts)
    return Range(f"{', '.join(others)} or {last}{note}", lambda x: x in texts)


COUNT = _from_to(1, INT32)
COUNT_OR_0 = _from_to(0, INT32)
AXIS = Range(f"1 to {INT32}, or -1 for the remaining devices", lambda x: x == -1 or 1 <= x <= INT32)
SAMPLER_AXIS = Range(f"0 to {INT32}, or -1 for the remaining devices", lambda x: -1 <= x <= INT32)
HOST_LIMIT = _from_to(1, 2**16)  # what one machine can hold
FINITE = Range("a finite number", lambda x: -math.inf < x < math.inf)
POSITIVE = Range("a finite number above 0", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Range("a finite number, 0 or above", lambda x: 0 <= x < math.inf)
FRACTION = Range("a fraction from 0 to 1", lambda x: 0 <= x <= 1)
FRACTION_ABOVE_0 = Range("a fraction above 0, up to 1", lambda x: 0 < x <= 1)
FRACTION_BELOW_1 = Range("a fraction from 0 up to, but not including, 1", lambda x: 0 <= x < 1)

_ADAMW = {
    "learning_rate": POSITIVE,
    "schedule": _one_of("constant", "cosine"),
    "warmup_updates": COUNT_OR_0,
    "b1": FRACTION_BELOW_1,
    "b2": FRACTION_BELOW_1,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": Range("a number above 0, or inf for no clipping", lambda x: x > 0),
}

RANGES = {
    "seed": _from_to(0, 2**32 - 1),
    "iterations": COUNT,
    "cpu_devices": HOST_LIMIT,
    **{f"mesh.{axis}": AXIS for axis in ("data", "fsdp", "expert", "tensor")},
    "processes.grace_s": COUNT,
    "processes.deadline_s": POSITIVE,
    "model.dtype": _one_of("bfloat16", "float32"),
    "model.remat": _one_of("none", "dots", "full", "offload"),
    "model.dispatch": _one_of("gather", "ragged_all_to_all"),
    **{f"model.architecture.{size}": COUNT for size in ("hidden_size", "num_layers", "num_heads", "num_kv_heads")},
    **{f"model.architecture.{size}": COUNT for size in ("head_dim", "intermediate_size")},
    **{f"model.architecture.{size}": COUNT_OR_0 for size in ("num_experts", "experts_per_token", "dense_layers")},
    **{f"model.architecture.{size}": COUNT_OR_0 for size in ("moe_intermediate_size", "shared_intermediate_size")},
    **{f"model.architecture.{size}": COUNT for size in ("expert_groups", "groups_per_token", "linear_conv_width")},
    **{f"model.architecture.linear_{of}_{size}": COUNT_OR_0 for of in ("key", "value") for size in ("heads", "dim")},
    **{f"model.architecture.{factor}": POSITIVE for factor in ("routed_scaling_factor", "logits_scaling")},
    **{f"model.architecture.{of}_multiplier": POSITIVE for of in ("attention", "embedding", "residual")},
    **{f"model.architecture.latent.{size}": COUNT for size in ("rank", "query_rank", "plain_dim", "value_dim")},
    "model.architecture.partial_rotary_factor": FRACTION_ABOVE_0,
    "model.architecture.rope_theta": POSITIVE,
    "model.architecture.rms_norm_eps": POSITIVE,
    "model.architecture.max_position_embeddings": COUNT,
    "adapter.rank": COUNT_OR_0,
    "adapter.expert_rank": COUNT_OR_0,
    "adapter.alpha": POSITIVE,
    "adapter.base_dtype": _one_of("float32", "bfloat16", "int8", "", note=" for model.dtype"),
    "coldstart.steps": COUNT_OR_0,
    "coldstart.batch": COUNT,
    "coldstart.vocab_size": _from_to(259, INT32),  # all bytes and three special tokens
    "coldstart.log_every": COUNT,
    "data.options.train_size": COUNT,
    "data.options.test_size": COUNT,
    "data.held_out": FRACTION_BELOW_1,
    "data.limit": COUNT_OR_0,
    "data.shots": COUNT_OR_0,
    "data.prompts_per_batch": COUNT,
    "data.max_prompt_length": COUNT,
    "sampling.group_size": COUNT,
    "sampling.max_response_length": COUNT,
    "sampling.temperature": Range("a positive number; 0 would make all responses to a prompt equal", POSITIVE.holds),
    "sampling.keep_top": COUNT_OR_0,
    "sampling.weights_dtype": _one_of("bfloat16", "int8", "", note=" for model.dtype"),
    "sampling.cache_dtype": _one_of("int8", "", note=" for model.dtype"),
    "sampling.slots": COUNT,
    "sampling.pool_tokens": COUNT,
    "sampling.page": COUNT,
    "sampling.draft": _one_of("none", *get_args(Drafter)),
    "sampling.draft_tokens": _from_to(1, MOST),
    **{f"sampling.mesh.{axis}": SAMPLER_AXIS for axis in ("data", "fsdp", "expert", "tensor")},
    "sampling.partial.prompts": COUNT,
    "sampling.partial.share": FRACTION_ABOVE_0,
    "sampling.rounds": COUNT,
    "environment.turns": COUNT,
    "environment.tool_format": _one_of(*tool_calls.FORMATS, "", note=" for the chat template's"),
    "environment.patience_s": NOT_NEGATIVE,
    "scoring.timeout_s": POSITIVE,
    "scoring.workers": HOST_LIMIT,
    "scoring.concurrency": COUNT,
    "scoring.tokens_in_flight": COUNT,
    "scoring.deadline_s": POSITIVE,
    "scoring.tries": COUNT,
    "scoring.most_failed": FRACTION,
    "objective.advantage": _one_of(*advantages.__all__, "", note=" for the objective's own"),
    "objective.turn_discount": FRACTION,
    "judge.low": FINITE,
    "judge.high": FINITE,
    "judge.samples": COUNT,
    "judge.temperature": NOT_NEGATIVE,
    "judge.max_tokens": COUNT,
    "judge.pairs": COUNT,
    "reward_model.form": _one_of("classify", "pooling", "score", "sglang"),
    "overlong.penalty": NOT_NEGATIVE,
    "mismatch.negative_mask": NOT_NEGATIVE,
    "mismatch.bias_every": COUNT_OR_0,
    "overlong.cache": COUNT_OR_0,
    "routing.replay": _one_of("none", "r2", "r3", "r3w"),
    "routing.balance_weight": NOT_NEGATIVE,
    "routing.z_weight": NOT_NEGATIVE,
    "routing.bias_rate": NOT_NEGATIVE,
    "routing.noise_every": COUNT_OR_0,
    "reference.kl_weight": NOT_NEGATIVE,
    "reference.estimator": _one_of("k1", "k2", "k3"),
    "reference.place": _one_of("loss", "reward"),
    "teacher.dtype": _one_of("float32", "bfloat16", "int8", "", note=" for model.dtype"),
    "teacher.weight": POSITIVE,
    "teacher.form": _one_of("advantage", "k2", "k3", "full"),
    "critic.trunk": _one_of("own", "policy"),
    "training.minibatches": COUNT,
    "training.row_tokens": COUNT,
    "training.max_skipped": COUNT,
    "training.old_logprobs": _one_of("auto", "sampler", "recompute"),
    "training.entropy_weight": FINITE,
    "training.logprob_chunk": COUNT,
    **{f"{of}optimizer.{name}": allowed for of in ("", "critic.", "coldstart.") for name, allowed in _ADAMW.items()},
    "eval.every": COUNT,
    "eval.prompts": COUNT_OR_0,
    "log.samples_every": COUNT,
    "log.samples": COUNT,
    "checkpoint.every": COUNT,
    "checkpoint.keep": COUNT,
}
"""None is also allowed where it is the default."""

MAY_CHANGE = (
    "iterations",
    "eval.",
    "log.",
    "checkpoint.",
    "scoring.",
    "judge.url",
    "judge.key",
    "reward_model.url",
    "reward_model.key",
    "data.data_dir",
    "cpu_devices",
    "processes.",
    "mesh.",
    "sampling.slots",
    "sampling.pool_tokens",
    "sampling.page",
    "sampling.draft",
    "model.dispatch",
    "model.remat",
    "training.row_tokens",
    "training.max_skipped",
    "training.logprob_chunk",
)
"""Prefixes of fields that may change on resuming, with at most rounding differences.

`iterations` may not change under a cosine learning rate.
"""

ADJUSTABLE = (
    *(f"{of}optimizer.{name}" for of in ("", "critic.") for name in ("learning_rate", "b1", "b2", "weight_decay")),
    *(f"{of}optimizer.{name}" for of in ("", "critic.") for name in ("no_decay", "max_grad_norm")),
    "objective.*.*",
    "mismatch.*",
    "reference.*",
    "overlong.*",
    "routing.balance_weight",
    "routing.z_weight",
    "routing.bias_rate",
    "routing.noise_every",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.top_p",
    "sampling.min_p",
    "sampling.keep_top",
    "sampling.rounds",
    "sampling.filter",
    "training.entropy_weight",
    "training.old_logprobs",
    "benchmarks.*",
)
"""Patterns of hyper-parameters that a resumed run may change, from its next update on. None shapes the train state.

What `training.old_logprobs` amounts to may not change with partial rollouts, which keep router log-probs for one of its
values only. Nor may `sampling.keep_top`, as they keep so many ids per token.
"""
