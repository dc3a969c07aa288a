"""The typed settings of a run: one YAML a recipe, dotted overrides, every check that spans keys.

Unknown, misspelt and contradictory keys are errors that name the nearest valid key. Every key
below is read by the code it configures; a key that nothing reads does not belong here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forage.algorithm_config import AlgorithmConfig, Settings
from forage.config_file import read_tree
from forage.endpoint_config import EndpointConfig
from forage.errors import UserError
from forage.placement_config import PlacementConfig
from forage.reward_config import RewardConfig
from forage.warm_start_config import WarmStartConfig

QuestionSet = Literal[
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "search-r1",
    "seven",
]
"""Published sets as ``forage data prepare`` names them."""
Corpus = Literal["wiki-18", "wiki-18-e5", "wiki-18-e5-hnsw64", "wiki-18-bm25", "asearcher"]
"""Published corpora and indexes as ``forage data corpus`` names them."""

MODEL_KEYS_OF_WEIGHTS = ("dtype", "device", "gradient_checkpointing", "lora")
"""Keys of ``model`` that are read where the weights are loaded here."""

Method = Literal[
    "search", "direct", "chain_of_thought", "rag", "ircot", "search_o1", "rejection_sampling"
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class LoraConfig(_Frozen):
    """Adapters of rank ``rank`` beside linear layers, scaled by ``alpha / rank``.

    ``target_modules`` are names of layers such as q_proj; none named is every linear layer of the
    blocks. ``dropout`` is for ``forage sft`` alone.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] = ()


class ModelConfig(_Frozen):
    """The policy: an ordinary Hugging Face directory or hub id, or a directory of adapters.

    With ``lora``, ``train`` and ``sft`` leave its weights as they are and learn adapters. With
    ``endpoint`` a server samples instead (``forage eval`` and ``forage play``), and ``path`` names
    the tokenizer alone.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None
    endpoint: EndpointConfig | None = None

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        if self.endpoint is not None:
            for name in sorted(set(MODEL_KEYS_OF_WEIGHTS) & self.model_fields_set):
                raise ValueError(
                    f"model.{name} does nothing with model.endpoint, where a server has the "
                    "weights; remove it"
                )
        return self


class DataConfig(_Frozen):
    """Question files (any form that ``forage.data.questions`` reads), their order, and an index.

    ``train_form`` and ``test_form`` name the form of a file that fits more than one. ``weights``
    is the share of each data source in training; ``difficulty`` an episode file that says how
    often each question was answered, for the order ``easy_first`` (the first epoch runs from easy
    to hard) and for keeping those from ``min_success`` to ``max_success``. ``index`` is a
    directory of ``forage index``: the arms gold and random take passages from it.
    ``train_sets`` and ``test_sets`` are the published sets that the files are made of: a file that
    is not there yet is answered with the command that makes it.
    """

    train: Path | None = None
    test: Path | None = None
    train_form: str | None = None
    test_form: str | None = None
    train_sets: tuple[QuestionSet, ...] = ()
    test_sets: tuple[QuestionSet, ...] = ()
    order: Literal["shuffled", "easy_first"] = "shuffled"
    weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    difficulty: Path | None = None
    min_success: float = Field(default=0.0, ge=0, le=1)
    max_success: float = Field(default=1.0, ge=0, le=1)
    index: Path | None = None

    @property
    def has_band(self) -> bool:
        """Whether questions are kept by their measured success."""
        return (self.min_success, self.max_success) != (0.0, 1.0)

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        for name in ("train", "test"):
            for key in (f"{name}_form", f"{name}_sets"):
                if getattr(self, key) and getattr(self, name) is None:
                    raise ValueError(f"data.{key} does nothing without data.{name}; remove it")
        is_used = self.order == "easy_first" or self.has_band
        if self.difficulty is not None and not is_used:
            raise ValueError(
                "data.difficulty does nothing by itself: set data.order to easy_first, or "
                "data.min_success and data.max_success"
            )
        if self.difficulty is None and is_used:
            raise ValueError(
                "data.order: easy_first, data.min_success and data.max_success need measured "
                "success rates: set data.difficulty to a file of episodes"
            )
        if self.min_success > self.max_success:
            raise ValueError(
                f"data.min_success ({self.min_success}) is above data.max_success "
                f"({self.max_success})"
            )
        if self.weights and not any(self.weights.values()):
            raise ValueError("data.weights are all 0: no question would be left")
        return self


class EnvironmentConfig(_Frozen):
    """The protocol and the budgets of an episode (tokens, turns).

    ``protocol``: ``tags`` in the policy's own text, or native ``tools`` through the tokenizer's
    chat template. ``prompt`` is a built-in template or a file, by default that of the protocol.
    """

    protocol: Literal["tags", "tools"] = "tags"
    prompt: str = "search-r1"
    max_turns: int = Field(default=4, ge=1)
    has_final_turn: bool = True
    max_turn_tokens: int = Field(default=500, ge=1)
    max_observation_tokens: int = Field(default=500, ge=16)
    max_tokens: int = Field(default=4096, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _prompt_of_the_protocol(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("protocol") == "tools":
            return {"prompt": "tools", **values}
        return values


class SearchConfig(_Frozen):
    """The retriever, over HTTP, and how patient its client is.

    ``url`` may name several servers (a list, or with commas) that serve the same index: a search
    that fails on one goes to another. Without ``token_file``, FORAGE_TOKEN is the token if set.
    ``corpora`` are the published ones that it serves: what has to be fetched before, for the plan
    of ``forage train --dry-run`` and for the message when nothing answers at ``url``.
    """

    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    token_file: Path | None = None
    topk: int = Field(default=3, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)
    deadline_s: float = Field(default=30.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    max_concurrent_requests: int = Field(default=32, ge=1)
    max_queries_per_request: int = Field(default=64, ge=1)
    cache_size: int = Field(default=10_000, ge=0)
    startup_timeout_s: float = Field(default=60.0, gt=0)
    corpora: tuple[Corpus, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of ``url``, one each."""
        texts = self.url.split(",") if isinstance(self.url, str) else self.url
        return tuple(text.strip() for text in texts)

    @model_validator(mode="after")
    def _deadline_covers_a_try(self) -> Self:
        if self.deadline_s < self.timeout_s:
            raise ValueError(
                f"search.deadline_s ({self.deadline_s}) is shorter than search.timeout_s "
                f"({self.timeout_s}): not even one try would fit; raise deadline_s"
            )
        return self


class EngineConfig(_Frozen):
    """The in-process engine: slots with a KV cache, decoded in tiles of a fixed shape."""

    num_slots: int = Field(default=64, ge=1)
    tile_rows: int = Field(default=32, ge=1)
    prefill_bucket: int = Field(default=32, ge=8)


class RolloutConfig(_Frozen):
    """How episodes are sampled and how many are in flight."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_concurrent_episodes: int = Field(default=64, ge=1)
    max_staleness: int = Field(default=0, ge=0)
    episode_deadline_s: float = Field(default=600.0, gt=0)
    train_on_failed_searches: bool = False
    engine: EngineConfig = EngineConfig()


class TrainerConfig(_Frozen):
    """Batch shape, optimizer and cadence of the loop.

    A step's groups are learnt in ``num_mini_batches`` optimizer steps, ``num_epochs`` times over.
    """

    num_steps: int = Field(default=100, ge=1)
    questions_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_tokens_per_micro_batch: int = Field(default=16_384, ge=256)
    num_mini_batches: int = Field(default=1, ge=1)
    num_epochs: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)


class SentinelConfig(_Frozen):
    """What is taken for the signs of a collapse, and what is done then (docs/sentinel.md)."""

    action: Literal["off", "warn", "stop", "roll_back"] = "warn"
    window: int = Field(default=8, ge=1)
    patience: int = Field(default=2, ge=1)
    likelihood_drop: float = Field(default=0.02, gt=0)
    surprise_growth: float = Field(default=2.0, gt=1)
    min_entropy: float = Field(default=0.001, ge=0)
    entropy_growth: float = Field(default=3.0, gt=1)
    grad_norm_growth: float = Field(default=5.0, gt=1)
    max_misranked: float = Field(default=0.3, gt=0, le=1)
    format_breaks_rise: float = Field(default=0.2, gt=0, le=1)
    repetition_rise: float = Field(default=0.2, gt=0, le=1)
    repeated_searches_rise: float = Field(default=0.25, gt=0, le=1)
    empty_answers_rise: float = Field(default=0.25, gt=0, le=1)
    searches_drop: float = Field(default=0.5, gt=0, le=1)
    rate_factor: float = Field(default=0.5, gt=0, lt=1)
    max_rollbacks: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        defaults = type(self).model_fields
        dead = [name for name in defaults if name != "action"] if self.action == "off" else []
        if self.action in ("warn", "stop"):
            dead = ["rate_factor", "max_rollbacks"]
        for name in dead:
            if getattr(self, name) != defaults[name].default:
                raise ValueError(
                    f"sentinel.{name} does nothing with sentinel.action: {self.action}; "
                    "remove it, or set another action"
                )
        return self


class EvaluationConfig(_Frozen):
    """Which arms and questions, how they are sampled, and how often during training.

    Of ``data.test``, ``num_questions`` are evaluated (None: all), and ``num_training_questions`` of
    these (None: all of them) after every ``every`` steps of training (0: never); ``at_end`` adds an
    evaluation of all of them when training ends. A part of the questions keeps the shares of the
    data sources and of the numbers of hops; ``subset_seed`` shuffles before it is taken (None:
    those that come first in the file). ``temperature`` 0 is greedy; above it each question is
    played ``num_samples`` times, with ``rollout.top_p``. The arm ``other_retriever`` searches with
    ``other_search``, whose keys are those of ``search``; what it leaves out is as there.

    ``method``: ``search`` plays the environment as training does, the others are the baselines of
    docs/baselines.md. ``num_candidates`` episodes are played by rejection sampling (5).
    """

    method: Method = "search"
    num_candidates: int | None = Field(default=None, ge=2)
    every: int = Field(default=0, ge=0)
    at_end: bool = False
    num_questions: int | None = Field(default=None, ge=1)
    num_training_questions: int | None = Field(default=None, ge=1)
    subset_seed: int | None = Field(default=0, ge=0)
    arms: tuple[
        Literal["normal", "closed_book", "empty", "gold", "random", "other_retriever"], ...
    ] = ("normal",)
    other_search: SearchConfig | None = None
    num_samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    num_bootstrap: int = Field(default=1000, ge=100)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if not self.arms:
            raise ValueError("evaluation.arms is empty; name at least one, for example: normal")
        twice = sorted({arm for arm in self.arms if self.arms.count(arm) > 1})
        if twice:
            raise ValueError(f"evaluation.arms names {', '.join(twice)} more than once")
        if ("other_retriever" in self.arms) != (self.other_search is not None):
            raise ValueError(
                "the arm other_retriever and evaluation.other_search belong together: set "
                "evaluation.other_search.url to the other server, or remove both"
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluation.num_samples is {self.num_samples} and evaluation.temperature is 0: "
                "greedy samples are all the same; raise temperature, or set num_samples to 1"
            )
        if self.num_training_questions is not None and not self.every:
            raise ValueError(
                "evaluation.num_training_questions does nothing without evaluation.every; "
                "remove it, or set every"
            )
        if (self.num_training_questions or 0) > (self.num_questions or math.inf):
            raise ValueError(
                f"evaluation.num_training_questions ({self.num_training_questions}) is above "
                f"evaluation.num_questions ({self.num_questions}), of which they are a part"
            )
        if self.num_candidates is not None and self.method != "rejection_sampling":
            raise ValueError(
                "evaluation.num_candidates does nothing: set evaluation.method to "
                "rejection_sampling, or remove it"
            )
        if self.temperature and self.method == "rejection_sampling":
            raise ValueError(
                "evaluation.temperature does nothing with evaluation.method: rejection_sampling, "
                "which samples at rollout.temperature; remove it"
            )
        return self


class RunConfig(_Frozen):
    """A whole run: what ``forage train`` and ``forage eval`` read."""

    name: str = "run"
    note: str = ""
    seed: int = Field(default=0, ge=0)
    output_dir: Path = Path("runs/run")
    model: ModelConfig
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    search: SearchConfig = SearchConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    sentinel: SentinelConfig = SentinelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="before")
    @classmethod
    def _other_search_is_as_search(cls, values: Any) -> Any:
        """Fill ``evaluation.other_search`` up from ``search``; a token stays with its address."""
        search, evaluation = (
            values.get(key) if isinstance(values, dict) else None
            for key in ("search", "evaluation")
        )
        if not (isinstance(search, dict) and isinstance(evaluation, dict)):
            return values
        other = evaluation.get("other_search")
        if not isinstance(other, dict):
            return values
        shared = {k: v for k, v in search.items() if k != "token_file" or "url" not in other}
        return {**values, "evaluation": {**evaluation, "other_search": {**shared, **other}}}

    @model_validator(mode="after")
    def _cross_field_checks(self) -> Self:
        env, roll, trainer = self.environment, self.rollout, self.trainer
        if self.evaluation.other_search == self.search:
            raise ValueError(
                "evaluation.other_search is the same as search: the arms normal and "
                "other_retriever would be one; name another url, or remove it"
            )
        if env.max_turn_tokens + env.max_observation_tokens > env.max_tokens:
            raise ValueError(
                f"environment.max_tokens ({env.max_tokens}) does not hold one turn "
                f"({env.max_turn_tokens}) and one observation ({env.max_observation_tokens})"
            )
        if trainer.max_tokens_per_micro_batch < env.max_tokens:
            raise ValueError(
                f"trainer.max_tokens_per_micro_batch ({trainer.max_tokens_per_micro_batch}) is "
                f"below environment.max_tokens ({env.max_tokens}): a whole episode must fit"
            )
        if roll.engine.num_slots < roll.engine.tile_rows:
            raise ValueError(
                f"rollout.engine.num_slots ({roll.engine.num_slots}) is below tile_rows "
                f"({roll.engine.tile_rows}); lower tile_rows"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits_the_run(self) -> Self:
        algorithm, trainer, env = self.algorithm, self.trainer, self.environment
        if algorithm.advantage == "pass_at_k" and algorithm.pass_k > trainer.group_size:
            raise ValueError(
                f"algorithm.pass_k ({algorithm.pass_k}) is above trainer.group_size "
                f"({trainer.group_size}): no k episodes can be drawn; lower pass_k"
            )
        if trainer.num_mini_batches > trainer.questions_per_step:
            raise ValueError(
                f"trainer.num_mini_batches ({trainer.num_mini_batches}) is above "
                f"questions_per_step ({trainer.questions_per_step}): groups are not split; lower it"
            )
        is_learnt_once = trainer.num_mini_batches * trainer.num_epochs == 1
        is_fresh = algorithm.decoupled or self.rollout.max_staleness == 0
        if algorithm.likelihood_protection.coefficient and is_learnt_once and is_fresh:
            raise ValueError(
                "algorithm.likelihood_protection does nothing where each batch is learnt once: "
                "set trainer.num_mini_batches or trainer.num_epochs above 1, or remove it"
            )
        if algorithm.dynamic_sampling.is_enabled and trainer.group_size < 2:
            raise ValueError(
                "algorithm.dynamic_sampling compares the episodes of a group: set "
                f"trainer.group_size above {trainer.group_size}"
            )
        if self.reward.search_cost and algorithm.turns.search_cost:
            raise ValueError(
                "reward.search_cost and algorithm.turns.search_cost both take off what a search "
                "costs: remove the first to charge the turn that searched, or the second to charge "
                "the episode"
            )
        longest = algorithm.overlong.max_tokens
        if longest is not None and longest - algorithm.overlong.buffer_tokens >= env.max_tokens:
            raise ValueError(
                f"algorithm.overlong.max_tokens ({longest}) less its buffer_tokens is not below "
                f"environment.max_tokens ({env.max_tokens}): no episode could reach it; lower it"
            )
        return self

    @model_validator(mode="after")
    def _a_healthy_checkpoint_is_kept(self) -> Self:
        trainer = self.trainer
        reach = (trainer.keep_checkpoints - 1) * trainer.checkpoint_every
        needed = self.sentinel.patience + self.sentinel.window + self.rollout.max_staleness
        if self.sentinel.action == "roll_back" and reach < needed:
            raise ValueError(
                "sentinel.action is roll_back, but no checkpoint from before an alarm would be "
                f"left: (trainer.keep_checkpoints - 1) * checkpoint_every is {reach}, and "
                f"sentinel.patience + sentinel.window + rollout.max_staleness is {needed}; raise "
                "keep_checkpoints"
            )
        return self

    @model_validator(mode="after")
    def _placement_fits_the_run(self) -> Self:
        placement = self.placement
        if placement.has_server and "engine" in self.rollout.model_fields_set:
            raise ValueError(
                f"rollout.engine does nothing: it sizes the in-process engine, and "
                f"placement.engine is {placement.engine}; remove one of them"
            )
        if self.model.device == "cpu" and (placement.num_gpus > 1 or placement.has_server):
            raise ValueError(
                f"model.device is cpu, and placement asks for {placement.num_gpus} GPUs and the "
                f"engine {placement.engine}: set model.device to cuda, or remove placement"
            )
        return self

    @model_validator(mode="after")
    def _policy_fits_the_run(self) -> Self:
        endpoint, roll = self.model.endpoint, self.rollout
        if endpoint is not None and "engine" in roll.model_fields_set:
            raise ValueError(
                "rollout.engine does nothing with model.endpoint, where a server samples; remove it"
            )
        is_chat = endpoint is not None and endpoint.form == "chat"
        if is_chat and self.environment.protocol == "tools":
            raise ValueError(
                "environment.protocol: tools needs the tokens of the chat template, which "
                "model.endpoint.form: chat does not give; use environment.protocol: tags"
            )
        if self.evaluation.method == "rejection_sampling" and roll.temperature <= 0:
            raise ValueError(
                "evaluation.method: rejection_sampling chooses among different episodes, and at "
                "rollout.temperature 0 they are all the same; raise it"
            )
        return self

    def check_placement(self) -> None:
        """Refuse a placement that training cannot do; raises ``UserError``."""
        if missing := self.placement.not_yet():
            raise UserError(
                "; ".join(missing) + ". See what it would take with: forage train --dry-run"
            )

    def check_trainable(self) -> None:
        """Refuse what an evaluation may use but a training run may not; raises ``UserError``."""
        self.check_weights_are_here("training")
        evaluation = self.evaluation
        if (evaluation.every or evaluation.at_end) and evaluation.method != "search":
            raise UserError(
                f"evaluation.method is {evaluation.method}: in a training run the policy is "
                "evaluated as it is trained; use search, or set evaluation.every to 0 and at_end "
                "to false"
            )
        if self.rollout.temperature <= 0:
            raise UserError(
                "rollout.temperature is 0: a greedy policy does not explore; use 1.0 to train"
            )
        if self.rollout.top_p < 1:
            raise UserError(
                f"rollout.top_p is {self.rollout.top_p}: sampling from a cut distribution breaks "
                "the probability ratio; use 1.0 to train"
            )
        if self.model.lora is not None and self.model.lora.dropout:
            raise UserError(
                f"model.lora.dropout is {self.model.lora.dropout}: the trainer would see another "
                "policy than the one that sampled, and the probability ratio would be noise; use 0 "
                "to train (forage sft may drop)"
            )
        if self.data.train is None:
            raise UserError("data.train is missing: name a file of questions")
        if self.trainer.group_size < 2 and self.algorithm.needs_groups:
            raise UserError(
                f"trainer.group_size is {self.trainer.group_size}: a group baseline needs at "
                "least 2 episodes of a question"
            )

    def check_supervised(self) -> None:
        """Refuse what supervised learning cannot use; raises ``UserError``."""
        self.check_weights_are_here("supervised learning")
        if self.model.lora is not None and self.warm_start.optimizer == "muon":
            raise UserError(
                "model.lora with warm_start.optimizer: muon: Muon evens out the directions of a "
                "matrix, which a product of two thin ones does not survive; set "
                "warm_start.optimizer: adamw, and warm_start.learning_rate to 1e-4 or so"
            )

    def check_weights_are_here(self, doing: str) -> None:
        """Refuse a policy whose weights a server has; raises ``UserError``."""
        if self.model.endpoint is not None:
            raise UserError(
                f"model.endpoint is set: {doing} needs the weights of model.path, and what a "
                "server samples is never learnt from; remove it (forage eval and play use it)"
            )


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe with its bases, apply ``key.sub=value`` overrides; raises ``UserError``."""
    tree = read_tree(path)
    for override in overrides:
        _apply_override(tree, override)
    # A section that is null is one that the recipe does without.
    present = {key: value for key, value in tree.items() if value is not None}
    return build_config(present, source=str(path))


def build_config(tree: dict[str, Any], source: str = "the settings") -> RunConfig:
    """Check a tree of settings; raises ``UserError`` that names each wrong key."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(tree, dict(detail)) for detail in error.errors()]
        raise UserError(f"{source}:\n  " + "\n  ".join(lines)) from None


def to_yaml(config: RunConfig) -> str:
    """The whole config, defaults included, as YAML that ``load_config`` reads back equal."""
    tree = config.model_dump(mode="json", exclude_defaults=False)
    _drop_dead_keys(config.algorithm, tree["algorithm"])
    _drop_dead_keys(config.warm_start, tree["warm_start"])
    _drop_dead_keys(config.placement, tree["placement"])
    if config.placement.has_server or config.model.endpoint is not None:
        del tree["rollout"]["engine"]
    if config.model.endpoint is not None:
        for name in MODEL_KEYS_OF_WEIGHTS:
            del tree["model"][name]
    return yaml.safe_dump(tree, sort_keys=False)


def _drop_dead_keys(section: Settings, tree: dict[str, Any]) -> None:
    for name in type(section).model_fields:
        child = getattr(section, name)
        if name in section.dead_keys():
            del tree[name]
        elif isinstance(child, Settings):
            _drop_dead_keys(child, tree[name])


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not of the form key.sub=value, "
            "for example trainer.learning_rate=1e-5"
        )
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        if node.get(name) is None:  # absent, or null: an optional section that is off
            node[name] = {}
        child = node[name]
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {name} is a value, it has no keys below it")
        node = child
    node[last] = _parse_value(value)


def _parse_value(value: str) -> Any:
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    # YAML 1.1 reads 1e-5 as a string: numbers without a dot are common on a command line.
    if isinstance(parsed, str):
        try:
            return float(parsed)
        except ValueError:
            return parsed
    return parsed


def _explain(tree: dict[str, Any], detail: dict[str, Any]) -> str:
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {location}{_nearest(location)}"
    if detail["type"] == "missing":
        return f"{location} is missing"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message
    return f"{location}: {message} (got {detail['input']!r})"


def _nearest(location: str) -> str:
    keys = list(_all_keys(RunConfig, ""))
    name = location.rsplit(".", 1)[-1]
    # The right name in the wrong place is likelier than another name in the same place.
    close = [key for key in keys if key.rsplit(".", 1)[-1] == name] or difflib.get_close_matches(
        location, keys, n=1, cutoff=0.6
    )
    return f"; did you mean {close[0]}?" if close else ""


def _all_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for section in get_args(field.annotation) or (field.annotation,):
            if isinstance(section, type) and issubclass(section, BaseModel):
                keys.extend(_all_keys(section, f"{prefix}{name}."))
    return keys
