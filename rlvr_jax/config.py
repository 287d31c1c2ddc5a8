"""Configuration: frozen, strict models, read from YAML with ``a.b=value`` overrides.

Every default is a decision; every field is read somewhere (``tests/test_config.py`` checks it). A wrong key, type or
combination raises :class:`ConfigError`, one line that names the field and the nearest valid key. No jax in here.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml

from rlvr_jax.config_errors import explain


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line."""


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Model(Strict):
    path: str = "embedded"
    """Hugging Face folder (gs:// too), the id of a model on its hub (Qwen/Qwen2.5-7B), or 'embedded' for the tiny model inside the package."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Master weights are float32 always. bfloat16 pays on TPU and GPU; on CPU it is no faster."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matmul results, or everything inside a layer."""
    attention: Literal["reference", "blocks", "splash"] | None = None
    """Attention of training (``kernels/attention/``): null for the best on the platform (splash on TPU, else blocks), splash for TPU only,
    blocks in plain XLA, reference to check them (holds all scores)."""
    system_prompt: str | None = None
    template_args: dict[str, Any] = {}
    """Passed to the chat template, e.g. {enable_thinking: false} for Qwen3."""


class Domain(Strict):
    task: str | None = None
    """A generated task: arithmetic, countdown, knights. Exclusive with path."""
    task_args: dict[str, Any] = {}
    problems: int | None = pydantic.Field(None, ge=1)
    """Of a task: train on so many different problems, the same for every seed, which come again each epoch; null = endless."""
    path: str | None = None
    """JSONL, JSON or parquet file (gs:// too), below data.root unless absolute; 'hf:NAME[:CONFIG][@SPLIT]' reads the datasets library."""
    eval_path: str | tuple[str, ...] | None = None
    """Held-out file, or several that count as one; without one a share of the rows (data.holdout), chosen by hash, is held out.
    Alone, without path or task: a domain that is evaluated, all its rows, and never trained on (a benchmark, ``configs/eval/``)."""
    split: str = "train"
    """Split of an 'hf:' source."""
    columns: dict[str, str] = {}
    """Our name -> column of the file (dots descend): prompt, answer, response (for sft), and any further field of the
    verifier. Common names (question, problem, answer, verl's schema, ...) are found without it."""
    answer_after: str | None = None
    """Keep only what follows the last occurrence of this string in the answer ('####' for GSM8K)."""
    template: str = "{prompt}"
    """Name of a convention (``rlvr_jax/data/templates.py``: boxed_cot, letter_cot, ...), or a Python format string over the row's fields;
    lists have two formats, {options:letters} and {numbers:commas}."""
    verifier: str | None = None
    """math, countdown, knights, choice, format or module:function. Generated tasks bring their own."""
    verifier_args: dict[str, Any] = {}
    """Settings of the verifier: for math require_box, ordered, percent, significant, precision; for format kind, pattern, prefilled."""
    rewards: tuple[dict[str, float], ...] | None = None
    """Overrides the top-level rewards for this domain."""
    weight: float = pydantic.Field(1.0, gt=0)
    """Relative share of this domain in the static mix."""

    @pydantic.model_validator(mode="after")
    def _source(self) -> Self:
        if (self.task is not None and self.path is not None) or not (self.trained or self.eval_path):
            raise ValueError("a domain needs exactly one of 'task' and 'path', or an 'eval_path' alone if it is for evaluation only")
        if self.task is None and self.problems is not None:
            raise ValueError("'problems' goes with 'task'; a file has the rows that it has")
        if self.task is None and self.verifier is None and not self.rewards:
            raise ValueError("a domain read from a file needs a 'verifier' (math, countdown, knights, choice, format or module:function)")
        return self

    @property
    def trained(self) -> bool:
        """False for a domain that is only evaluated."""
        return self.task is not None or self.path is not None


class Mixer(Strict):
    """null = the mixer's own default (``rlvr_jax/strategies/mix.py``); a setting that it does not have is refused."""

    name: Literal["static", "reward_gap", "dump_ucb", "tscl"] = "static"
    """static: the domains' weights. reward_gap: low mean reward. dump_ucb: large advantages, few visits. tscl: moving reward."""
    window: int | None = pydantic.Field(None, ge=2)
    """Steps of each domain's signal that count (50)."""
    warmup_steps: int | None = pydantic.Field(None, ge=0)
    """Uniform until then (10)."""
    update_every: int | None = pydantic.Field(None, ge=1)
    """Steps between changes (5)."""
    floor: float | None = pydantic.Field(None, ge=0, le=1)
    """Share that no domain falls below (0.05)."""
    temperature: float | None = pydantic.Field(None, gt=0)
    """Of the softmax over domains (1; tscl 0.1)."""
    exploration: float | None = pydantic.Field(None, ge=0)
    """dump_ucb: weight of the bonus for domains seen seldom (1)."""
    published_slope: bool | None = None
    """tscl: the slope per step instead of per window."""

    def settings(self) -> dict[str, Any]:
        """What is set, besides the name."""
        return {k: v for k, v in self.model_dump().items() if v is not None and k != "name"}


class Prompts(Strict):
    """null = the kind's own default (``rlvr_jax/strategies/prompts.py``); a setting that the kind does not have is refused."""

    kind: Literal["random", "mopps", "greso"] = "random"
    """Which prompts of a domain are rolled out. random: in the order of the data. mopps: those whose success rate, drawn from
    a posterior, is nearest to 0.5 (arXiv 2507.04632). greso: prompts that taught nothing lately are skipped at random
    (arXiv 2506.02177). Both learn from prompts that come again."""
    candidates: int | None = pydantic.Field(None, ge=1)
    """Candidates looked at per slot (mopps 8; greso 4, at most)."""
    decay: float | None = pydantic.Field(None, ge=0, le=1)
    """mopps: what a posterior keeps at each visit of its prompt (0.5; 1 for a policy that hardly moves)."""
    zero_variance_target: float | None = pydantic.Field(None, gt=0, lt=1)
    """greso: share of rolled-out groups that may teach nothing (0.25): a third of it all right, two thirds all wrong."""
    remembered: int | None = pydantic.Field(None, ge=1)
    """Prompts that are remembered (65536); beyond, the one visited longest ago is forgotten."""

    @pydantic.model_validator(mode="after")
    def _taken(self) -> Self:
        taken = {"random": (), "mopps": ("candidates", "decay", "remembered"), "greso": ("candidates", "zero_variance_target", "remembered")}[self.kind]
        for name in type(self).model_fields:
            if name not in ("kind", *taken) and getattr(self, name) is not None:
                raise ValueError(f"prompts '{self.kind}' has no setting '{name}'; it takes {', '.join(taken) or 'none'}")
        return self


class Data(Strict):
    domains: dict[str, Domain] = {"arithmetic": Domain(task="arithmetic")}
    root: str | None = None
    """Folder (gs:// too) that relative paths start from; default $RLVR_DATA, else the working directory."""
    mixer: Mixer = Mixer()
    prompts: Prompts = Prompts()
    max_prompt_length: int = pydantic.Field(128, gt=0)
    overlong_prompt: Literal["drop", "truncate"] = "drop"
    """drop: skipped with a counter; truncate: tokens are cut from the left, up to 256 characters per token of the limit."""
    exhausted: Literal["repeat", "hand_over"] = "repeat"
    """A file that was read to its end: repeat (in a new order), or hand its share of the prompts to the other domains."""
    broken_row: Literal["skip", "refuse"] = "skip"
    """skip: reported with file and line, and counted; refuse: the first broken row ends the run at start-up."""
    holdout: float = pydantic.Field(0.1, gt=0, lt=1)
    """Share of prompts, chosen by a hash of their text, that is for evaluation only."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the domains that are trained on, in their order."""
        return tuple(name for name, domain in self.domains.items() if domain.trained)


class Rollout(Strict):
    samples_per_prompt: int = pydantic.Field(8, ge=1)
    max_new_tokens: int = pydantic.Field(64, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0)
    top_k: int = pydantic.Field(0, ge=0)
    """0 = off."""
    top_p: float = pydantic.Field(1.0, gt=0, le=1)
    min_p: float = pydantic.Field(0.0, ge=0, lt=1)
    """Of what top-k and top-p leave, tokens at least this many times as likely as the likeliest; 0 = off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, as an end token does; the string is kept. Evaluation stops at them too."""
    slots: int | None = pydantic.Field(None, ge=1)
    """Rows that decode together; the cache holds slots x length. Default: 64 on CPU, 256 elsewhere."""
    record_entropy: bool = False
    """Record the entropy of every sampled token; strategies that read it turn it on."""

    @pydantic.field_validator("stop")
    @classmethod
    def _stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("an empty string would end every answer; remove it")
        return stop

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole softmax."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Pool(Strict):
    workers: int = pydantic.Field(2, ge=1)
    cpu_seconds: float = pydantic.Field(5.0, gt=0)
    """CPU time one verdict may take; counted in the worker, so a busy machine changes no verdict."""
    wall_seconds: float = pydantic.Field(60.0, gt=0)
    """Bound for a verifier that sleeps: time in which its worker does not want a core."""
    memory_mb: int = pydantic.Field(4096, ge=0)
    """Address space a worker may take on top of what its imports took; 0 = no limit."""


class Critic(Strict):
    """PPO's value head and its loss (``rlvr_jax/critic.py``)."""

    learning_rate: float = pydantic.Field(0.05, gt=0)
    """Of the value head alone: about as far as a value may move in one update, at any model width. Rewards are of size 1."""
    gamma: float = pydantic.Field(1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = pydantic.Field(1.0, ge=0, le=1)
    """GAE's lambda; 1: the return itself less the value (arXiv 2503.24290). Below, a reward reaches back 1 / (1 - lam) tokens
    until the critic carries it further."""
    value_clip: float | None = pydantic.Field(0.2, gt=0)
    """A value's loss counts moves of up to this much since the step began; null = no clipping."""
    coef: float = pydantic.Field(0.1, ge=0)
    """Weight of the value loss in the gradient of the decoder that critic and policy share; 0: only the head learns values."""
    warmup_steps: int = pydantic.Field(0, ge=0)
    """Steps at the start in which only the value head learns."""


class Algorithm(Strict):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gae"] = "grpo"
    """gae is PPO (arXiv 1707.06347): a critic gives every token a value; groups are not needed."""
    critic: Critic | None = None
    """Of gae alone; null: its defaults."""
    restandardise: bool = False
    """Standardise again within the rows that selection kept (as GFPO and PODS do)."""
    objective: Literal["clip", "gspo", "cispo"] = "clip"
    clip_low: float = pydantic.Field(0.2, ge=0)
    clip_high: float = pydantic.Field(0.2, ge=0)
    dual_clip: float | None = None
    """For negative advantages the loss is bounded by this multiple of |A|; null = off (10 is usual)."""
    kl_coef: float = pydantic.Field(0.0, ge=0)
    """0 keeps no reference model in memory."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    kl_in_reward: bool = False
    """Subtract kl_coef * k1 from the reward instead of adding a loss term."""
    entropy_coef: float = pydantic.Field(0.0, ge=0)
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_const"] = "token_mean"
    loss_denominator: Literal["kept", "all"] = "kept"
    success_threshold: float = 0.5
    is_cap: float | None = 2.0
    """Bound of the importance weight old/behaviour; null = none."""
    is_mode: Literal["cap", "mask"] = "cap"
    """A weight above is_cap becomes is_cap (cap) or 0 (mask)."""
    is_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    off_policy: Literal["decoupled", "naive", "behaviour"] = "decoupled"
    """Rows that other weights sampled. decoupled: clipped around the old policy, importance weight old/behaviour
    (arXiv 2110.00641). Ablations: naive: as if on-policy, weight 1; behaviour: clipped around the behaviour policy, weight 1."""
    recompute_old: bool = False
    """Compute logprob_old in its own pass even with one update per batch."""
    mask_truncated: bool = False
    """Overlong filtering: rows that ran into max_new_tokens get weight 0."""
    overlong_buffer: int | None = pydantic.Field(None, ge=1)
    """Soft overlong penalty, in tokens: the reward falls by up to 1 over the last so many of max_new_tokens; null = off."""

    @pydantic.model_validator(mode="after")
    def _kl(self) -> Self:
        if self.kl_in_reward and self.kl_coef == 0:
            raise ValueError("'kl_in_reward' needs kl_coef > 0")
        if self.critic is not None and self.advantage != "gae":
            raise ValueError(f"'critic' is of advantage 'gae' alone, and this is '{self.advantage}'; remove one of them")
        return self

    @property
    def value(self) -> Critic | None:
        """The critic's settings; None where the advantage has no critic."""
        return (self.critic or Critic()) if self.advantage == "gae" else None


class Optimizer(Strict):
    learning_rate: float = pydantic.Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to 0 at train.steps."""
    warmup_steps: int = pydantic.Field(0, ge=0)
    weight_decay: float = pydantic.Field(0.0, ge=0)
    b1: float = pydantic.Field(0.9, ge=0, lt=1)
    b2: float = pydantic.Field(0.99, ge=0, lt=1)
    eps: float = pydantic.Field(1e-8, gt=0)
    max_grad_norm: float = pydantic.Field(1.0, gt=0)


class Replay(Strict):
    """null = the kind's own default; a setting that the kind does not have is refused."""

    kind: Literal["popo", "filter", "ineffective", "stale", "kl", "hybrid", "arpo"] = "popo"
    """What happens to the slots of ineffective groups. popo: the most recent effective groups (arXiv 2606.01281). Its
    ablations: filter (dropped, no refill), ineffective (the most recent groups, effective or not), stale (groups at least
    min_age steps old), kl (the groups nearest to the current policy; one forward pass over the buffer). hybrid: popo with a
    reservoir of older groups beside it. arpo: a stored success in each group that failed throughout (arXiv 2505.16282)."""
    by: Literal["reward", "accuracy"] = "reward"
    """What must differ within an effective group: the training reward, or the verdicts."""
    capacity: int | None = pydantic.Field(None, gt=0)
    """Groups in the buffer: prompts per step (stale: times min_age). arpo: rows, 8 times those of a step; 12 bytes a token."""
    min_age: int | None = pydantic.Field(None, ge=1)
    """stale: steps (8)."""
    max_age: int | None = pydantic.Field(None, ge=1)
    """Older groups are not replayed: no bound; hybrid: 16, for the reservoir alone."""
    reservoir: int | None = pydantic.Field(None, ge=1)
    """hybrid: groups kept of all effective ones seen, uniformly (4 times capacity)."""
    reservoir_share: float | None = pydantic.Field(None, ge=0, le=1)
    """hybrid: probability that a slot is filled from the reservoir (0.2)."""
    successes_per_prompt: int | None = pydantic.Field(None, ge=1)
    """arpo: 8."""

    @pydantic.model_validator(mode="after")
    def _taken(self) -> Self:
        buffered = ("by", "capacity", "max_age")
        taken = {"filter": ("by",), "stale": (*buffered, "min_age"), "hybrid": (*buffered, "reservoir", "reservoir_share"),
                 "arpo": ("capacity", "successes_per_prompt")}.get(self.kind, buffered)
        for name, field in type(self).model_fields.items():
            if name not in ("kind", *taken) and getattr(self, name) != field.default:
                raise ValueError(f"replay '{self.kind}' has no setting '{name}'; it takes {', '.join(taken)}")
        if self.min_age and self.max_age and self.min_age > self.max_age:
            raise ValueError(f"min_age {self.min_age} is above max_age {self.max_age}: no group could be replayed")
        return self


class DynamicSampling(Strict):
    max_batches: int = pydantic.Field(10, ge=1)
    """Batches of prompts generated for one step until train.prompts_per_step groups are effective (arXiv 2503.14476); then
    the step trains on what there is."""
    by: Literal["reward", "accuracy"] = "reward"
    """What must differ within an effective group: the training reward, or the verdicts (use it with an overlong penalty)."""


class Train(Strict):
    steps: int = pydantic.Field(100, ge=0)
    prompts_per_step: int = pydantic.Field(16, ge=1)
    updates_per_batch: int = pydantic.Field(1, ge=1)
    """Mini-batches of one rollout, each an optimizer step; > 1 computes logprob_old first."""
    micro_batch: int = pydantic.Field(16, ge=1)
    """Rows of full length per forward and backward pass, over all devices."""
    packing: bool = True
    """Lay short rows end to end, so that padding is not computed; false: one row per sequence, for comparison."""
    save_every: int = pydantic.Field(50, ge=1)
    save_seconds: float = pydantic.Field(300.0, gt=0)
    """Save, too, after the first step that ends so long after the last save: what a kill costs is at most that and the running step."""
    eval_every: int = pydantic.Field(50, ge=1)
    max_to_keep: int = pydantic.Field(2, ge=1)
    """Newest checkpoints kept; the best one by evaluation is kept beside them."""
    max_seconds: float | None = pydantic.Field(None, gt=0)
    """Stop after this wall time (saving first); the next start goes on."""
    generated_tokens: int | None = pydantic.Field(None, ge=1)
    """End the run at the first step by which so many tokens have been sampled, if that is before `steps`."""
    updated_tokens: int | None = pydantic.Field(None, ge=1)
    """The same for tokens that were learned from."""
    step_limit_seconds: float | None = pydantic.Field(None, gt=0)
    """A start, step, evaluation or save that takes longer ends the process with exit code 69 and all stacks: a stuck host must not
    hold a pod. The first of each compiles: leave it minutes. null = off."""
    barren_steps: int = pydantic.Field(10, ge=1)
    """So many steps in a row with no finite gradient, or without one verdict, end the run; fewer are passed over, told and counted."""
    samples_every: int = pydantic.Field(10, ge=1)
    """Steps between sample texts written to samples.jsonl."""


class Eval(Strict):
    prompts_per_domain: int = pydantic.Field(200, ge=0)
    """Held-out prompts of a domain that is trained on; 0 = no evaluation. A domain with an eval_path alone is evaluated whole."""
    limit: int | None = pydantic.Field(None, ge=1)
    """At most so many prompts of every domain: the first in an order by a hash of their text, the same for every model, a fair
    sample even of a sorted file. A larger limit later goes on where the smaller one ended."""
    samples_per_prompt: int = pydantic.Field(1, ge=1)
    temperature: float = pydantic.Field(0.0, ge=0)
    batch_prompts: int = pydantic.Field(64, ge=1)


class Mesh(Strict):
    data: int = pydantic.Field(1, ge=1)
    fsdp: int = pydantic.Field(1, ge=1)
    tensor: int = pydantic.Field(1, ge=1)
    offload_optimizer: bool = False
    """Keep Adam's moments in the host's memory and bring them over for the optimizer step alone: 8 bytes a parameter less on the
    devices while sampling and while gradients are summed, for two copies a step. Same weights. Needs a backend with pinned host memory."""


class Sft(Strict):
    """Only ``rlvr-jax sft`` reads this section."""

    init: Literal["pretrained", "scratch"] = "pretrained"
    """scratch: train a new tokenizer and a new model of the shape below; pretrained: start from model.path."""
    steps: int = pydantic.Field(1000, ge=1)
    batch: int = pydantic.Field(64, ge=1)
    learning_rate: float = pydantic.Field(1e-3, gt=0)
    warmup_steps: int = pydantic.Field(50, ge=0)
    max_length: int = pydantic.Field(256, ge=8)
    """Longer rows are dropped with a counter."""
    export: str | None = None
    """Folder for the resulting Hugging Face model; default <run_dir>/model."""
    vocab_size: int = pydantic.Field(512, ge=300)
    layers: int = pydantic.Field(4, ge=1)
    width: int = pydantic.Field(128, ge=8)
    ffn: int = pydantic.Field(384, ge=8)
    heads: int = pydantic.Field(4, ge=1)
    kv_heads: int = pydantic.Field(2, ge=1)


class Config(Strict):
    seed: int = pydantic.Field(0, ge=0)
    run_dir: str | None = None
    """Default runs/<config name>. gs://bucket/... for a pod: checkpoints go there directly, the small files at every save."""
    model: Model = Model()
    data: Data = Data()
    rollout: Rollout = Rollout()
    rewards: tuple[dict[str, float], ...] = ({"verifier": 1.0},)
    """Weighted sum; 'verifier' stands for the domain's own. 'correct' is the first one's verdict."""
    pool: Pool = Pool()
    algorithm: Algorithm = Algorithm()
    strategies: tuple[str | dict[str, Any], ...] = ()
    """Presets, {select|reweight: act, score: ...} mappings, or module:function; applied in order."""
    replay: Replay | None = None
    dynamic_sampling: DynamicSampling | None = None
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    eval: Eval = Eval()
    mesh: Mesh = Mesh()
    sft: Sft = Sft()

    @pydantic.model_validator(mode="after")
    def _combinations(self) -> Self:
        check = [
            (bool(self.data.domains), "data.domains: at least one domain is needed"),
            (self.train.prompts_per_step % self.train.updates_per_batch == 0,
             f"train.updates_per_batch: {self.train.updates_per_batch} does not divide train.prompts_per_step {self.train.prompts_per_step}"),
            (not self.data.trained or self.train.micro_batch % (self.mesh.data * self.mesh.fsdp) == 0,
             f"train.micro_batch: {self.train.micro_batch} is not a multiple of mesh.data*mesh.fsdp = {self.mesh.data * self.mesh.fsdp}"),
            ((self.algorithm.overlong_buffer or 0) <= self.rollout.max_new_tokens,
             f"algorithm.overlong_buffer: {self.algorithm.overlong_buffer} is more than rollout.max_new_tokens {self.rollout.max_new_tokens}"),
            (self.data.prompts.remembered is None or self.data.prompts.remembered >= self.train.prompts_per_step,
             f"data.prompts.remembered: {self.data.prompts.remembered} is less than train.prompts_per_step {self.train.prompts_per_step}"),
            (all(len(r) == 1 for r in self.rewards) and len(self.rewards) > 0, "rewards: a list of one-entry mappings, e.g. [{math: 1.0}, {format: 0.1}]"),
        ]
        for good, message in check:
            if not good:
                raise ValueError(message)
        return self


def check_for_training(config: Config) -> None:
    """Combinations that only training refuses (evaluation and generation allow them).

    Raises:
      ConfigError: nothing to train on, temperature 0, one sample per prompt where samples are compared, a critic's warm-up
        without an end.
    """
    check_trained(config)
    if config.rollout.temperature == 0:
        raise ConfigError("rollout.temperature: 0 samples one answer only and has no policy gradient; use a value > 0 (1.0 is usual)")
    critic, steps = config.algorithm.value, config.train.steps
    if config.rollout.samples_per_prompt < 2:
        _check_single_samples(config)
    if critic is not None and config.data.mixer.name == "dump_ucb":
        raise ConfigError("data.mixer.name: dump_ucb reads the advantages of groups, and advantage 'gae' has none; use static, reward_gap or tscl")
    if critic is not None and steps and critic.warmup_steps >= steps:
        raise ConfigError(f"algorithm.critic.warmup_steps: {critic.warmup_steps} of train.steps {steps} leave no step to the policy; use fewer")


def check_trained(config: Config) -> None:
    """
    Raises:
      ConfigError: nothing to train on.
    """
    if not config.data.trained:
        raise ConfigError("data.domains: every domain has an 'eval_path' alone, for evaluation only; give one a 'path' or a 'task' to train on")


def _check_single_samples(config: Config) -> None:
    if config.algorithm.value is None:
        raise ConfigError("rollout.samples_per_prompt: 1 gives every group advantage 0; use at least 2 (8 is usual), or advantage 'gae'")
    compares = [("replay", config.replay is not None), ("dynamic_sampling", config.dynamic_sampling is not None),
                ("data.prompts.kind: greso", config.data.prompts.kind == "greso")]
    for what, present in compares:
        if present:
            raise ConfigError(f"{what} compares the samples of one prompt, and rollout.samples_per_prompt is 1; use at least 2, or leave it out")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-5 as a float (YAML 1.2); PyYAML's own takes it for a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)|\.\d+([eE][-+]?\d+)?|\d[\d_]*\.[\d_]*|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+0123456789."))


def read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``a.b=value`` onto a nested dict; values are YAML.

    Raises:
      ConfigError: no '=' in an override, or a path through something that is no mapping.
    """
    tree = json.loads(json.dumps(tree))
    for item in overrides:
        key, eq, value = item.partition("=")
        if not eq or not key:
            raise ConfigError(f"override '{item}' is not of the form a.b=value")
        node, *parents = tree, *key.split(".")
        for part in parents[:-1]:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise ConfigError(f"override '{item}': '{part}' is not a mapping in this config")
        try:
            node[parents[-1]] = read_yaml(value)
        except yaml.YAMLError as e:
            raise ConfigError(f"override '{item}': value is not YAML ({_one_line(e)})") from None
    return tree


def load(path: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file, applies overrides, validates; ``run_dir`` defaults to ``runs/<file name>``.

    Raises:
      ConfigError: unreadable file, bad YAML, unknown key, wrong type, impossible combination.
    """
    tree: Any = {}
    if path is not None:
        try:
            tree = read_yaml(Path(path).read_text()) or {}
        except OSError as e:
            raise ConfigError(f"config '{path}' cannot be read: {e.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise ConfigError(f"config '{path}' is not YAML: {_one_line(e)}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"config '{path}' must be a mapping of sections, found a {type(tree).__name__}")
    tree = apply_overrides(tree, overrides)
    if tree.get("run_dir") is None:
        tree["run_dir"] = f"runs/{Path(path).stem if path else 'default'}"
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """A plain mapping to a :class:`Config`.

    Raises:
      ConfigError: with one line for the first fault found.
    """
    try:
        return Config.model_validate_json(json.dumps(tree))
    except pydantic.ValidationError as e:
        raise ConfigError(explain(e, Config)) from None
    except TypeError as e:
        raise ConfigError(f"config holds something that is no plain YAML value: {e}") from None


def dump(config: Config) -> str:
    """YAML of the resolved config; :func:`load` reads it back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())
