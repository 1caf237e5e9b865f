"""Every setting of a run: ten sections of plain dataclasses, each field with type, default and explanation.

The record is frozen and imports nothing heavy. It holds what was asked for, not what was found out: no device, no model.
`load` makes one from YAML and the command line, `check` says what cannot work, docs/reference/config.md is made from these fields.
A non-finite loss or gradient always stops a run before the weights are touched; there is no switch for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ..base.hub import local
from ..stack import Stack
from .option import option, required

LONGEST = 2**40  # tokens of a row
DECAY, DECAY_SHAPE = 0.1, "1-sqrt"  # of a wsd schedule that does not say
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # q, k, v of latent attention


TASKS = ("needle", "multi_key", "multi_value", "variable_tracking", "common_words")
"""Of an evaluation. A new one is a name at the end here and a method of that name in evaluation/tasks.py."""
METRICS = ("held_out", "needle_longest", *TASKS)
"""Numbers of an evaluation that runs can be compared by: evaluation/suite.headline makes them."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary settings to train with, for a context the model was not made for. Names are those of Hugging Face's
    rope_parameters. What is null stays as the model has it; a new rope_type starts afresh and takes over rope_theta only."""

    rope_type: str | None = option(
        None, "How frequencies are stretched.", choices=("default", "linear", "dynamic", "yarn", "longrope", "llama3")
    )
    rope_theta: float | None = option(None, "Base of the frequencies; larger = slower turns = longer reach.", above=0)
    factor: float | None = option(
        None, "How much longer than the original length positions may get: context / original length.", above=0
    )
    original_max_position_embeddings: int | None = option(
        None, "Length the model was trained with before any stretching.", unit="tokens", least=1
    )
    attention_factor: float | None = option(None, "yarn, longrope: multiplies cos and sin.", above=0)
    beta_fast: float | None = option(None, "yarn: pairs with more turns than this stay as they are.", above=0)
    beta_slow: float | None = option(None, "yarn: pairs with fewer turns than this are stretched in full.", above=0)
    mscale: float | None = option(None, "yarn: weight in the scaling of cos and sin.")
    mscale_all_dim: float | None = option(None, "yarn: weight the scaling is divided by.")
    truncate: bool | None = option(None, "yarn: round the bounds of the ramp to whole pairs.")
    low_freq_factor: float | None = option(None, "llama3: pairs with fewer turns are stretched in full.", above=0)
    high_freq_factor: float | None = option(None, "llama3: pairs with more turns stay as they are.", above=0)
    short_factor: tuple[float, ...] | None = option(None, "longrope: a divisor per pair up to the original length.")
    long_factor: tuple[float, ...] | None = option(None, "longrope: a divisor per pair beyond it.")

    def over(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The model's rope_parameters with these settings on top."""
        given = {
            setting.name: getattr(self, setting.name)
            for setting in fields(self)
            if getattr(self, setting.name) is not None
        }
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        if self.rope_type not in (None, parameters.get("rope_type", "default")):
            parameters = {
                name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters
            }
        return {**parameters, **given}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (PEFT) on a frozen base."""

    rank: int = option(16, "Rank of each adapter.", least=1, most=65536)
    alpha: float = option(32.0, "Adapters are scaled by alpha / rank.", above=0)
    dropout: float = option(0.0, "Must be 0: with dropout no result could be compared with the untouched model.")
    targets: tuple[str, ...] = option(
        LINEARS,
        "Linear layers that get an adapter. The default means what a model has in their place too (gate_up_proj, q_a_proj). "
        "Experts get none.",
    )
    merge_on_export: bool = option(False, "Export the base with adapters added in; false = a PEFT adapter folder.")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Whose model it is."""

    folder: str = required(
        "A Hugging Face folder (config.json, safetensors, tokenizer), the name of a preset such as tiny_llama, or of a model on "
        "the Hub: owner/name, owner/name@revision (ithaca docs hub).",
        path=True,
    )
    dtype: str = option(
        "bf16", "What layers compute in; masters and optimizer states are fp32.", choices=("bf16", "fp32")
    )
    random_init: bool = option(False, "Start from random weights; only config.json of the folder is read.")
    trust_remote_code: bool = option(False, "Let Python code that comes with the model run. Read that code first.")
    rope: Rope | None = option(None, "Rotary settings to train with; null = the model's own.")  # noqa: RUF009
    lora: Lora | None = option(None, "Train adapters instead of all weights; null = off.")  # noqa: RUF009
    quantize: str | None = option(
        None,
        "With lora: keep the frozen linears of the layers in four bits a weight (QLoRA); null = in dtype.",
        choices=("nf4",),
    )

    @property
    def path(self) -> Path:
        """Where its files are; of a name on the Hub, once it was fetched."""
        return local(self.folder)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column of a record holds what."""

    WAS: ClassVar[dict[str, str]] = {"tokens": "input_ids"}

    text: str = option("text", "Plain text.")
    messages: str = option("messages", "A chat: a list of {role, content}.")
    tools: str = option("tools", "Of a chat: the tools it may call, a list or its JSON.")
    conversations: str = option("conversations", "ShareGPT: a list of {from, value}.")
    system: str = option("system", "ShareGPT, Alpaca: the system message.")
    instruction: str = option("instruction", "Alpaca: what is asked.")
    input: str = option("input", "Alpaca: what it is asked about; may be empty or absent.")
    output: str = option("output", "Alpaca: the answer.")
    history: str = option("history", "Alpaca: earlier turns, a list of [instruction, output].")
    prompt: str = option("prompt", "What is completed, or answered in two ways: a text or a list of messages.")
    completion: str = option("completion", "What is learned: a text or a list of messages.")
    chosen: str = option("chosen", "Preferences: the better answer, a text, a list of messages or token ids.")
    rejected: str = option("rejected", "Preferences: the other one.")
    completions: str = option("completions", "Rollouts: what was sampled for the prompt, a list of such answers.")
    rewards: str = option("rewards", "Rollouts: a number for each completion.")
    advantages: str = option("advantages", "Rollouts: the same, where a reward is compared with others already.")
    logprobs: str = option(
        "logprobs", "Rollouts: of each completion, the log-probabilities of its tokens when sampled."
    )
    nodes: str = option("nodes", "Trees: a list of {messages or text, parent, train} (ithaca docs data).")
    input_ids: str = option("input_ids", "Token ids, for data that is tokenised already.")
    labels: str = option("labels", "Of token ids: -100 where not supervised.")
    attention_mask: str = option("attention_mask", "Of token ids: must have no zeros.")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from. A plain text stands for {path: text}."""

    SHORT: ClassVar[str] = "path"

    path: str | None = option(
        None,
        "A file, a folder or a glob; of the Hub hf:owner/name, hf:owner/name@revision/data/*.parquet (ithaca docs hub); for format "
        "datasets the dataset's name.",
        path=True,
    )
    synthetic: str | None = option(
        None,
        "A built-in source: recall (look-up from one part of a row in another), needles (look-up at every distance).",
        choices=("recall", "needles"),
    )
    format: str = option(
        "auto",
        "auto = by file name. json: an array of records, read whole.",
        choices=("auto", "jsonl", "json", "parquet", "txt", "datasets", "tokens"),
    )
    kind: str | None = option(
        None,
        "What a record is; null = told by its columns. chat: messages; sharegpt: conversations; alpaca: instruction, output; "
        "completion: prompt, completion; preference: chosen, rejected; rollout: prompt, completions; "
        "tree: nodes; tokens: input_ids.",
        choices=("text", "chat", "sharegpt", "alpaca", "completion", "preference", "rollout", "tree", "tokens"),
    )
    split: str | None = option(
        None, "Of a dataset, or of the files of one on the Hub: the split; null = train, where there is one."
    )
    columns: Columns = field(default_factory=Columns)
    chat: bool = option(False, "The same as kind: chat.")
    use: str | None = option(
        None, "Of preferences: chosen = plain training on the chosen answers; null = both, for objective: dpo.", choices=("chosen",)
    )  # fmt: skip
    chat_template: str | None = option(None, "What data.chat_template is, for this source; null = that one.", path=True)
    validation: int | float | None = option(
        None, "What data.validation is, for this source; null = that one, 0 = nothing.", least=0
    )
    weight: float = option(1.0, "Share of this source among all, relative to the other weights.", above=0)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the model reads."""

    context: int = required("Tokens in a row: the length trained at.", unit="tokens", least=2, most=LONGEST)
    sources: tuple[Source, ...] = option((), "Where documents come from; `ithaca data pack` reads them.")
    packed: str | None = option(None, "Folder that `ithaca data pack` writes and training reads.", path=True)
    tokenizer: str | None = option(
        None, "Folder of the tokenizer, or owner/name; null = the model's folder.", path=True
    )
    long_documents: str = option(
        "split", "Documents longer than a row: cut into rows, left out (and counted), or refused.",
        choices=("split", "drop", "error"),
    )  # fmt: skip
    eos: bool = option(True, "End every document with the tokenizer's end-of-sequence token.")
    special_tokens: str = option(
        "text", "What the text of a special token, such as </s>, is in a document or a message: text, or (parse) that token.",
        choices=("text", "parse"),
    )  # fmt: skip
    chat_template: str | None = option(
        None,
        "How chats are rendered: one of our templates, which mark the assistant's turns (qwen3, chatml, llama3, gemma), or a Jinja "
        "file; null = the tokenizer's own.",
        path=True,
    )
    share_prefixes: str = option(
        "auto",
        "What the answers of a pair or group, or the branches of a tree, begin with alike: computed once (auto, where the model "
        "can), or for each (off). The numbers are the same.",
        choices=("auto", "off"),
    )
    validation: int | float | None = option(
        None,
        "Documents of each source that are not trained on but measured (eval.every): a number of them; below 1 with a point, a "
        "share, on average and at least one. Which ones depends on what they say and data.seed; null = none.",
        least=0,
    )
    seed: int = option(0, "Of the order of rows, which depends on nothing else, and of what is held out.", least=0)

    def held_out(self, source: Source | None = None) -> int | float:
        """What is held out of a source, or of one that was packed before and is not named; 0 = nothing."""
        given = None if source is None else source.validation
        return (self.validation if given is None else given) or 0

    @property
    def holds_out(self) -> bool:
        """Whether some documents are not trained on."""
        files = [source for source in self.sources if source.synthetic is None]
        return any(map(self.held_out, files)) or bool(self.packed is not None and not files and self.validation)

    @property
    def is_packed(self) -> bool:
        """Whether there is anything but synthetic data."""
        return self.packed is not None or any(source.synthetic is None for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class StackOptions(Stack):
    """The techniques of the run: the fields of ithaca.Stack. `stack: auto` lets ithaca choose them; giving any of them
    switches auto off, and the others then have the defaults below."""

    auto: bool = option(True, "Let ithaca choose; no other field but scratch may then be given.")
    scratch: str | None = option(None, "Folder for store: disk; null = the system's temporary folder.", path=True)

    @property
    def chosen(self) -> Stack | None:
        """The `Stack` that was asked for; None = choose one."""
        return None if self.auto else Stack(**{setting.name: getattr(self, setting.name) for setting in fields(Stack)})

    @classmethod
    def of(cls, stack: Stack, scratch: str | None = None) -> StackOptions:
        """Options that ask for this stack, for writing down what auto became."""
        return cls(
            **{setting.name: getattr(stack, setting.name) for setting in fields(Stack)}, auto=False, scratch=scratch
        )

    def violations(self, world: int | None = None) -> list[str]:
        chosen = self.chosen
        return [] if chosen is None else chosen.violations(world)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run at a context of its own. Weights, optimizer, learning rate and data cursor go on from phase to phase."""

    context: int = required("Tokens in a row in this phase.", unit="tokens", least=2, most=LONGEST)
    steps: int = required("Optimizer steps of this phase.", least=1)
    sources: tuple[Source, ...] = option((), "Data of this phase; none = data.sources.")
    packed: str | None = option(
        None, "Packed rows of this phase; null = data.packed, or made for its sources.", path=True
    )
    stack: StackOptions | None = option(None, "Techniques of this phase, or auto; null = those of `stack`.")  # noqa: RUF009
    rope: Rope | None = option(None, "Rotary settings of this phase; null = model.rope.")  # noqa: RUF009


def in_steps(given: int | float, total: int) -> int:
    """Steps that are given as such, or as a share of all."""
    return math.ceil(given * total) if isinstance(given, float) else given


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the weights change."""

    steps: int = option(0, "Optimizer steps of the whole run; 0 = as many as train.epochs takes.", least=0)
    epochs: float | None = option(
        None,
        "In place of steps: the run ends when every source was gone through so often, each time in a new order. By its weight a "
        "smaller source may come more often. The last step is filled up with rows of the next epoch.",
        above=0,
        most=1_000_000,
    )
    rows: int = option(1, "Rows per optimizer step, over all ranks and accumulation.", least=1)
    accumulation: int = option(1, "Micro-batches that a step's rows are split into, one after the other.", least=1)
    optimizer: str = option(
        "adamw",
        "adamw8bit holds its states in 8 bits (package torchao). muon orthogonalises the updates of the layers' matrices, with the "
        "same lr and decay; embedding, head, norms and biases have AdamW.",
        choices=("adamw", "adamw8bit", "muon"),
    )
    offload_optimizer: bool | None = option(
        None,
        "Master weights, gradients and optimizer states wait in host memory, and a layer at a time comes to the GPU. null: only "
        "where `stack: auto` finds that the run does not fit otherwise.",
    )
    lr: float = option(1e-5, "Largest learning rate.", above=0)
    min_lr: float = option(0.0, "Learning rate at the last step.", least=0)
    schedule: str = option(
        "cosine",
        "From lr to min_lr after the warm-up. wsd (warm-up, stable, decay): lr stays until the last steps, which bring it down.",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay: int | float = option(
        DECAY, "wsd: steps that bring lr down; a number below 1 with a point is a share of all steps.", least=0
    )
    decay_shape: str = option(
        DECAY_SHAPE, "wsd: how lr comes down; 1-sqrt falls fast first and slowly at the end.",
        choices=("1-sqrt", "linear", "cosine"),
    )  # fmt: skip
    schedule_steps: int | None = option(
        None, "Steps that warm-up and schedule are spread over; null = train.steps.", least=1
    )
    warmup: int | float = option(
        0.05, "Steps of warm-up; a number below 1 with a point is a share of all steps.", least=0
    )
    weight_decay: float = option(0.1, "Of matrices; norms and biases have none.", least=0)
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's averages of gradients and their squares.")
    eps: float = option(1e-8, "AdamW's epsilon.", above=0)
    clip: float | None = option(1.0, "Largest norm of the gradient over all parameters; null = off.", above=0)
    z_loss: float = option(0.0, "Weight of the penalty on log²Z (PaLM); 0 = off.", least=0)
    label_smoothing: float = option(0.0, "Share of the target spread over the vocabulary.", least=0, below=1)
    seed: int = option(0, "Of random weights and adapters.", least=0)
    deterministic: bool = option(False, "Same bits on every run of the same hardware and world size; slower.")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is learned (ithaca docs preferences). A plain word stands for {kind: word}. sft: tokens are predicted. dpo: of two
    answers the chosen one becomes likelier than the other, compared with a reference. policy: of completions that were sampled and
    judged, the better ones become likelier."""

    SHORT: ClassVar[str] = "kind"

    kind: str = option("sft", "sft, dpo (preferences) or policy (rollouts).", choices=("sft", "dpo", "policy"))
    loss: str | None = option(
        None,
        "dpo: sigmoid, robust, hinge, ipo; null = sigmoid. policy: grpo, bnpo, dr_grpo, dapo; null = grpo.",
        choices=("sigmoid", "robust", "hinge", "ipo", "grpo", "bnpo", "dr_grpo", "dapo"),
    )
    reference: str | None = option(
        None,
        "What the model is compared with: adapters (itself without them, computed in every step), start (its weights before the "
        "first step, which score all data once), or a folder that `ithaca score` wrote. null = adapters where there are any, else "
        "start. policy has one only where kl is above 0.",
        path=True,
    )
    beta: float = option(0.1, "dpo: how much a log-ratio counts; the smaller, the further from the reference.", above=0)
    label_smoothing: float = option(0.0, "dpo: share of pairs that are the wrong way round.", least=0, below=0.5)
    by_length: bool = option(False, "dpo: log-ratios a token, so that a long answer weighs no more than a short one.")
    clip_low: float = option(0.2, "policy: a ratio below 1 - this has no more to win.", least=0, most=1)
    clip_high: float = option(0.2, "policy: nor one above 1 + this.", least=0)
    kl: float = option(0.0, "policy: weight of the divergence from the reference; 0 = no reference.", least=0)
    unbiased_kl: bool = option(
        True, "policy: the divergence times the ratio, whose gradient is that of the divergence."
    )
    normalise: str = option(
        "group", "policy: what rewards less their mean are divided by: the spread of their group, of the step, or nothing.",
        choices=("group", "batch", "none"),
    )  # fmt: skip
    longest: int | None = option(
        None, "policy with dr_grpo: the tokens a completion may have at most, which its loss is divided by.", least=1
    )
    temperature: float = option(1.0, "policy: that completions were sampled with.", above=0)

    def reference_of(self, lora: bool) -> str | None:
        """What is compared with; None = nothing is."""
        if self.kind == "sft" or (self.kind == "policy" and self.kl == 0):
            return None
        return self.reference or ("adapters" if lora else "start")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of a run is written down. The end of a run always is."""

    every: int | None = option(100, "Steps between checkpoints; null = only at the end.", least=1)
    keep_last: int = option(2, "How many of the newest stay.", least=1)
    keep_every: int | None = option(
        None, "Of the others, those at multiples of so many steps stay; null = none.", least=1
    )
    asynchronous: bool = option(True, "Write while training goes on.")
    failures: int = option(3, "Saves in a row that may fail because of the disk; then the run stops.", least=1)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Does the model use its context? Loss by position on data that is not trained on, and questions about long texts. While
    training every so many steps, and by itself with `ithaca eval`."""

    every: int | None = option(None, "Steps between evaluations; null = never.", least=1)
    sources: tuple[Source, ...] = option((), "Where documents come from that are not trained on.")
    packed: str | None = option(
        None, "Folder of packed rows; null = made beside the results, where there are sources.", path=True
    )
    rows: int = option(8, "Held-out rows per evaluation.", least=1)
    tasks: tuple[str, ...] = option(
        (),
        f"Questions to ask: {', '.join(TASKS)}; needle asks at a grid of lengths and depths.",
        choices=TASKS,
    )
    lengths: tuple[int, ...] = option(
        (), "Lengths to ask at; none = a quarter, a half and all of data.context.", unit="tokens", least=2, most=LONGEST
    )
    depths: int = option(5, "Depths of the needle, from the beginning of the text to its end.", least=1, most=1000)
    samples: int = option(4, "Texts of each task and length, and of each cell of the grid.", least=1)
    language: str = option(
        "auto",
        "What is asked in: words (needs a tokenizer), ids (drawn from the vocabulary), pairs (the tokens of synthetic sources); "
        "auto = words with a tokenizer, else pairs where training data is synthetic, else ids.",
        choices=("auto", "words", "ids", "pairs"),
    )
    seed: int = option(0, "Of the texts.", least=0)
    metric: str | None = option(
        None,
        "What evaluations are compared by: held_out (loss, the lower the better), or a task's accuracy; needle_longest: that of "
        "needles at the greatest length. null = held_out where there is such data, else the first task.",
        choices=METRICS,
    )
    improvement: float = option(0.0, "By how much the metric must beat the best so far to be the best.", least=0)
    stop_after: int | None = option(
        None,
        "The run ends after so many evaluations in a row that were not the best; null = at its last step.",
        least=1,
    )
    keep_best: bool = option(
        False,
        "Save after the best evaluation so far, and keep that checkpoint whatever is pruned: ithaca export --checkpoint best.",
    )


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a run says. metrics.jsonl in the run folder is always written; a tracker that is down never stops a run."""

    every: int = option(1, "Steps between lines.", least=1)
    tensorboard: bool = option(False, "Also write TensorBoard events into the run folder.")
    wandb: str | None = option(None, "Weights & Biases project to report to; null = off.")
    mlflow: str | None = option(
        None,
        "MLflow experiment to report to (package mlflow or mlflow-skinny), at MLFLOW_TRACKING_URI, or else in the run folder; "
        "null = off.",
    )


@dataclass(frozen=True, kw_only=True)
class Results:
    """Where results go (ithaca docs run_folder). The same folder again means: resume."""

    name: str = option("run", "Name of the run. Without one: that of the file or recipe.")
    folder: str = option("runs/run", "The run folder. Without one: runs/NAME.", path=True)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds without progress after which a rank counts as hanging; null = never. What was slow before may be slow again: a limit
    grows to 5 times the longest section of its kind so far, so a slow run is not taken for a hanging one."""

    setup: float | None = option(3600.0, "From the start of a rank to its first step.", above=0)
    step: float | None = option(
        1800.0,
        "A step, or a batch of an evaluation. The first step of a process has twice this, or 10 times what was planned.",
        above=0,
    )
    data: float | None = option(900.0, "Waiting for the rows of a step.", above=0)
    save: float | None = option(3600.0, "Writing a checkpoint while the run waits for it.", above=0)
    silence: float | None = option(
        300.0, "A process that gives no sign of life at all: stopped, or on a host that is cut off.", above=0
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How processes start. Under torchrun or srun the command joins that job, and the job's numbers must agree."""

    workers: int | None = option(
        None, "Processes per node, one per GPU; null = as many as there are GPUs.", least=1, most=4096
    )
    cpu: int | None = option(None, "Train on the CPU with so many processes (gloo).", least=1, most=4096)
    share_gpu: bool = option(
        False,
        "Let workers share GPUs: a larger job rehearsed on those there are, with real NCCL (2.30 or newer) and real data. Its "
        "speed means nothing.",
    )
    nodes: int = option(1, "Machines. More than one needs torchrun or srun.", least=1, most=65536)
    gpu_memory: int | None = option(
        None, "Memory of a GPU that the run may use (80GB); null = all of it.", unit="bytes", above=0
    )
    restarts: int = option(
        3,
        "On one machine: how often workers are started again after one was lost. Errors that would come again are not retried, "
        "nor is a run that fails three more times before it passes the step it failed at. Elsewhere this is the scheduler's.",
        least=0,
    )
    grace: float | None = option(
        None,
        "Seconds that the scheduler waits between its signal and the kill, for a warning if saving takes longer; null = 30 under "
        "torchrun, else not known.",
        above=0,
    )
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def world(self) -> int | None:
        """Processes in all; None = depends on the machine."""
        workers = self.cpu or self.workers
        return None if workers is None else workers * self.nodes


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. Paths are relative to the folder the command is started in; ~ is the home folder."""

    description: str = option("", "One line about the run, for people.")
    model: Model
    data: Data
    stack: StackOptions = field(default_factory=StackOptions)
    train: Train
    objective: Objective = field(default_factory=Objective)
    phases: tuple[Phase, ...] = option(
        (), "A length curriculum: contexts one after the other. data.context and train.steps then follow from it."
    )
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Evaluate = field(default_factory=Evaluate)
    log: Log = field(default_factory=Log)
    run: Results = field(default_factory=Results)
    launch: Launch = field(default_factory=Launch)

    @property
    def tokenizer(self) -> str:
        """What the tokenizer is called: its own folder or name, or the model's."""
        return self.data.tokenizer or self.model.folder
