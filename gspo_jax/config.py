"""Every field a run reads, with its default and its meaning. Files in `configs/` start from `base()` and change it."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def base() -> ConfigDict:
    """A config that lacks only what a run is about: the policy (a folder or a cold start), the task, the rewards."""
    config = ConfigDict()
    config.seed = 0  # of everything: initial weights, data order, sampling
    config.iterations = 1000  # each: sample a batch, reward it, learn from it in `training.minibatches` updates
    config.cpu_devices = 8  # simulated devices, where jax runs on CPU; of all processes together
    config.mesh = ConfigDict({"data": 1, "fsdp": -1, "expert": 1, "tensor": 1})  # -1: the rest of the devices

    config.processes = ConfigDict()  # of a run that several make
    config.processes.heartbeat_s = 30  # one that is silent for so long is lost, and the others end
    config.processes.start_s = 300  # they wait so long for each other at the start

    config.model = ConfigDict()
    config.model.folder = ""  # a Hugging Face folder of Qwen3 or Qwen3-MoE; empty: the cold start makes the model
    config.model.published = ""  # what the folder must hold, such as "Qwen3-30B-A3B": known to `plan` without it
    config.model.dtype = "bfloat16"  # of the computation; parameters are float32
    config.model.remat = "full"  # backward finds each layer's input; offload: on the host; dots: matmuls too; none: all
    config.model.dispatch = "gather"  # of tokens to experts: or "ragged_all_to_all" (TPU), "capacity"
    config.model.capacity_factor = placeholder(
        float
    )  # of capacity: times a balanced load, the rest dropped; None: no drops
    config.model.architecture = ConfigDict()  # of a model that the cold start makes: fields of ModelConfig

    config.coldstart = ConfigDict()
    config.coldstart.steps = 0  # 0: none
    config.coldstart.batch = 64
    config.coldstart.terse_steps = 0  # the last ones: a share of their demonstrations gives the answer without the work
    config.coldstart.terse = 0.0  # that share
    config.coldstart.vocab_size = 320
    config.coldstart.log_every = 100
    config.coldstart.optimizer = adamw(learning_rate=3e-3, schedule="cosine", warmup_updates=20)

    config.data = ConfigDict()
    config.data.task = ""  # arithmetic, countdown or gsm8k
    config.data.folder = ""  # of gsm8k: JSONL files or a prepared TFDS directory
    config.data.data_dir = ""  # where generated tasks are built; empty: TFDS's own place
    config.data.options = ConfigDict()  # of generated tasks, such as difficulty
    config.data.limit = 0  # first records of the training split; 0: all
    config.data.prompts_per_batch = 128
    config.data.max_prompt_length = 512  # tokens; a longer prompt is left out, never cut

    config.sampling = ConfigDict()
    config.sampling.group_size = 8  # responses to each prompt
    config.sampling.max_response_length = 1024  # tokens, EOS included
    config.sampling.temperature = 1.0  # scoring uses the same
    config.sampling.top_k = 0  # 0: off
    config.sampling.top_p = 1.0  # 1: off
    config.sampling.min_p = 0.0  # 0: off
    config.sampling.stop_ids = ()  # token ids, or texts of one token, that end a turn, beside the tokenizer's
    config.sampling.prefix = ""  # text that every response begins with, such as "<think>\n"; not learned from
    config.sampling.slots = placeholder(int)  # responses that decode at a time, over all devices; None: all
    config.sampling.mesh = ConfigDict()  # the sampler's axes over the same devices; all 0: as `mesh` above
    config.sampling.mesh.update({"data": 0, "fsdp": 0, "expert": 0, "tensor": 0})
    config.sampling.partial = ConfigDict()  # partial rollouts: what a call leaves unfinished goes on in the next one
    config.sampling.partial.prompts = placeholder(int)  # in a call, more than data.prompts_per_batch; None: none
    config.sampling.partial.share = 0.9  # of the responses under way whose end is the end of a call
    config.sampling.partial.tokens = placeholder(int)  # drawn, over all devices, that are; None: any number
    config.sampling.rounds = 1  # more: DAPO's dynamic sampling; groups whose rewards are all equal are replaced

    config.environment = ConfigDict()  # of episodes of several turns
    config.environment.name = ""  # what replies to a turn, such as countdown_feedback; empty: nothing does
    config.environment.turns = 2  # of the policy, at most; max_response_length bounds all of them and the replies

    config.rewards = ConfigDict()  # reward function: weight
    config.scoring = ConfigDict()  # of functions that run in processes of their own, such as math_verify
    config.scoring.timeout_s = 2.0  # for one response; its worker is then killed
    config.scoring.workers = 1

    config.step_rewards = ConfigDict()  # step-reward function: weight; for objectives with an advantage for each token
    config.overlong = ConfigDict()  # DAPO's length shaping, in tokens
    config.overlong.penalty = 0.0  # weight of the punishment in the reward; 0: none
    config.overlong.cache = 0  # the last tokens before the limit, over which the punishment grows from 0 to -1
    config.overlong.filter = False  # do not learn from responses that were cut at the limit

    config.objective = ConfigDict({"name": "gspo"})  # a name of the catalogue, and each one's hyper-parameters
    config.objective.reinforce = ConfigDict()
    config.objective.ppo = _clipped(0.2, 0.2)
    config.objective.ppo.update({"gamma": 1.0, "lam": 1.0, "whiten": True, "value_clip": 0.2, "value_weight": 0.5})
    config.objective.grpo = _clipped(0.2, 0.27)
    config.objective.dr_grpo = _clipped(0.2, 0.2)
    config.objective.dr_grpo.length = placeholder(float)  # None: sampling.max_response_length
    config.objective.rloo = ConfigDict()
    config.objective.gspo = _clipped(3e-4, 4e-4)
    config.objective.gspo_token = _clipped(3e-4, 4e-4)
    config.objective.dapo = _clipped(0.2, 0.28)
    config.objective.cispo = ConfigDict({"low": 1.0, "high": 4.0, "mask": placeholder(str)})  # mask: None or "ppo"
    config.objective.gmpo = ConfigDict({"log_clip": 0.4})
    config.objective.rspo = ConfigDict({"log_clip": 0.4, "gamma_min": 0.8, "apply": "after"})
    config.objective.sapo = ConfigDict({"tau_pos": 1.0, "tau_neg": 1.05})

    config.routing = ConfigDict()  # of mixtures of experts
    config.routing.replay = "none"  # r2: the trainer uses the old policy's experts; r3: the sampler's
    config.routing.router_logprobs = True  # the sampler keeps them for router KL and rspo, if no trainer does
    config.routing.balance_weight = 0.0  # of the load-balancing loss
    config.routing.z_weight = 0.0  # of the router z-loss
    config.reference = ConfigDict()  # the policy that the run begins from, kept as it is
    config.reference.kl_weight = 0.0  # 0: there is none
    config.reference.estimator = "k3"  # of the KL in the loss: k1, k2 or k3
    config.reference.place = "loss"  # or "reward": taken from every token's reward (k1), with ppo
    config.critic = ConfigDict()  # of ppo
    config.critic.trunk = "own"  # a copy of the first policy's; or "policy": a head on the policy's
    config.critic.optimizer = adamw(learning_rate=1e-5, schedule="constant", warmup_updates=10)
    config.mismatch = ConfigDict()  # importance weights for what sampler and trainer disagree on
    config.mismatch.correction = ""  # tis, icepop or sequence_mask; they need training.old_logprobs="recompute"
    config.mismatch.tis = ConfigDict({"cap": 2.0})
    config.mismatch.icepop = ConfigDict({"low": 0.5, "high": 5.0})
    config.mismatch.sequence_mask = ConfigDict({"low": 0.99, "high": 1.01})

    config.training = ConfigDict()
    config.training.minibatches = 4  # optimizer updates per iteration
    config.training.microbatches = 1  # gradient accumulation, and scoring in as many parts; only memory changes
    config.training.old_logprobs = "sampler"  # or "recompute": score with the trainer's model before the first update
    config.training.entropy_weight = 0.0  # of an entropy bonus in the loss
    config.training.logprob_chunk = 4096  # tokens, over all devices, whose logits exist at once

    config.optimizer = adamw(learning_rate=1e-6, schedule="constant", warmup_updates=10)

    config.eval = ConfigDict()
    config.eval.every = 20  # iterations
    config.eval.prompts = 256  # first ones of the test split; 0: all
    config.eval.correct = ""  # the reward function that says what is right
    config.log = ConfigDict({"samples_every": 20, "samples": 4})
    config.checkpoint = ConfigDict({"every": 20, "keep": 2})
    return config


def on_gsm8k(published: str = "") -> ConfigDict:
    """`base()` for GSM8K: math-verify's verdict, and a little for the format. `published` is the model's name."""
    config = base()
    config.model.published = published
    config.data.task = "gsm8k"
    config.rewards = ConfigDict({"math_verify": 1.0, "format": 0.1})
    config.eval.correct = "math_verify"
    return config


def adamw(*, learning_rate: float, schedule: str, warmup_updates: int) -> ConfigDict:
    """AdamW's section; `schedule` is "constant" or "cosine"."""
    config = ConfigDict({"learning_rate": learning_rate, "schedule": schedule, "warmup_updates": warmup_updates})
    config.b1 = 0.9
    config.b2 = 0.95
    config.weight_decay = 0.0
    config.max_grad_norm = 1.0
    return config


def _clipped(low: float, high: float) -> ConfigDict:
    """The section of an objective that clips its ratio: offsets from 1, and where Â < 0 a cap of the ratio, or None."""
    return ConfigDict({"low": low, "high": high, "dual_clip": placeholder(float)})
