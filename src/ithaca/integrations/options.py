"""Settings of a trainer that contradict a stack, each with its remedy.

A stack shards parameters, cuts sequences, recomputes and keeps activations by itself, and its loss is the cross-entropy of the next
token, or for TRL's DPOTrainer a preference of engine/objective/preference.py. A setting that asks somebody else to do so, or that
reads what never exists whole here, would be left out without a word or be wrong; so it is named before the data is even tokenized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..engine.objective.preference import Preference

# torch's own, which work on sharded parameters, weight by weight
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")

_FSDP = "parameters are sharded by the stack (shard_parameters=True); leave it out"
# setting -> what it may be, and why not otherwise
_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "gradients divided by a million tokens underflow in it; use bf16=True"),
    "fp16_full_eval": ((False,), "the model is sharded and keeps its dtype; leave it out, evaluation computes as training does"),
    "bf16_full_eval": ((False,), "the model is sharded and keeps its dtype; leave it out, evaluation computes as training does"),
    "torch_compile": ((False,), "layers run by ithaca's own code, which a compiled model would not call; leave it out"),
    "use_liger_kernel": ((False,), "it replaces parts of the model whose work is done here (the loss is fused); leave it out"),
    "neftune_noise_alpha": ((None, 0), "its noise is scaled by the length of a sequence, of which a rank has a part; leave it out"),
    "auto_find_batch_size": ((False,), "a rank that runs out of memory alone leaves the others waiting; use `ithaca plan`, a "
                             "smaller batch, or Stack(store='host')"),
    "deepspeed": ((None,), _FSDP),
    "deepspeed_plugin": ((None,), _FSDP),
    "fsdp_plugin_args": ((None,), _FSDP),
    "parallelism_config": ((None,), "ranks share a sequence by Stack(ulysses=, ring=); leave it out"),
    "ddp_find_unused_parameters": ((None,), "there is no DDP: gradients are summed by the stack; leave it out"),
    "ddp_bucket_cap_mb": ((None,), "there is no DDP: gradients are summed by the stack; leave it out"),
    "ddp_broadcast_buffers": ((None,), "there is no DDP: gradients are summed by the stack; leave it out"),
    "ddp_static_graph": ((None,), "there is no DDP: gradients are summed by the stack; leave it out"),
    "optim_target_modules": ((None,), "it is for optimizers that project whole gradients, and these are sharded; leave it out"),
    "save_on_each_node": ((False,), "rank 0 writes weights, all ranks the rest, into one folder; use one that all nodes see"),
    "enable_jit_checkpoint": ((False,), "ranks get a signal at different steps, and a save needs all of them; save by save_steps"),
    "train_sampling_strategy": (("random", "sequential", "group_by_length"), "it makes batches for each rank, but ranks share "
                                "them; use 'random' or 'group_by_length'"),
    "activation_offloading": ((None, False), "activations are kept by the stack; use Stack(store='host')"),
    "loss_type": ((None, "nll"), "the loss here is cross-entropy over the next token; use 'nll'"),
    "optim": (OPTIMIZERS, f"only optimizers that are known to work on sharded parameters run: {', '.join(OPTIMIZERS)}; or name a "
              "class with optimizer_cls_and_kwargs"),
}  # fmt: skip
_GIVEN: dict[str, str] = {
    "model_init": "it builds another model when training begins; pass model",
    "compute_loss_func": "the loss here is cross-entropy over the next token, and logits never exist whole; leave it out",
    "compute_metrics": "it needs logits of all tokens, which never exist whole; leave it out (eval_loss is computed), or ask the "
    "saved model with `ithaca eval`",
    "preprocess_logits_for_metrics": "it needs logits of all tokens, which never exist whole; leave it out",
    "quantization_config": "there is no exact path for quantised weights; load the model in bf16, and for QLoRA pass "
    "quantize='nf4' to this trainer",
}


# of TRL's DPOConfig
_PREFERENCE: dict[str, tuple[tuple[Any, ...], str]] = {
    "f_divergence_type": (("reverse_kl",), "only DPO's own divergence is computed here; use 'reverse_kl'"),
    "ld_alpha": (
        (None,),
        "log-probabilities are summed by answer, and those of its tail cannot be weighted; leave it out",
    ),
    "use_weighting": ((False,), "its weights need sums over the vocabulary that are not computed here; leave it out"),
    "sync_ref_model": ((False,), "the reference is sharded apart from the policy and stays as it is; leave it out"),
    "loss_weights": ((None, [1.0]), "there is one loss; leave it out"),
    "label_smoothing_factor": ((0.0,), "it is of the cross-entropy, which is no part of a preference; leave it out"),
}
# of TRL's GRPOConfig
_POLICY: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_vllm": (
        (False,),
        "it would be given whole weights by every rank; sample with a server of your own in rollout_func",
    ),
    "log_completions": (
        (False,),
        "every rank has all completions, and they would be shown once for each; leave it out",
    ),
    "sync_ref_model": ((False,), "the reference is sharded apart from the policy and stays as it is; leave it out"),
    "use_adaptive_entropy": ((False,), "its state would not be in checkpoints; use entropy_coef"),
    "cast_lm_head_to_fp32": ((False,), "log-probabilities are in fp32 as they are; leave it out"),
    "label_smoothing_factor": ((0.0,), "it is of the cross-entropy, which is no part of a policy step; leave it out"),
}
# what TRL calls a loss -> ours: loss, by_length
PREFERENCES: dict[str, tuple[str, bool]] = {
    "sigmoid": ("sigmoid", False), "sigmoid_norm": ("sigmoid", True), "robust": ("robust", False), "hinge": ("hinge", False),
    "ipo": ("ipo", True),
}  # fmt: skip


def violations(args: Any, given: Mapping[str, Any], groups: int) -> list[str]:
    """Everything about a trainer's settings that cannot work with a stack.

    args: its TrainingArguments. given: what else the trainer is made with. groups: of data-parallel ranks."""
    return [*_argument_violations(args, _ARGUMENTS, groups), *_given_violations(given)]


def preference_violations(args: Any, given: Mapping[str, Any], groups: int) -> list[str]:
    """The same for TRL's DPOTrainer."""
    rules = {name: rule for name, rule in _ARGUMENTS.items() if name != "loss_type"} | _PREFERENCE
    problems = [*_argument_violations(args, rules, groups), *_given_violations(given)]
    losses = args.loss_type if isinstance(args.loss_type, list) else [args.loss_type]
    if len(losses) != 1 or losses[0] not in PREFERENCES:
        problems.append(f"loss_type={_short(args.loss_type)}: with a stack it is one of {', '.join(PREFERENCES)}")
    elif args.label_smoothing and losses[0] != "robust":
        problems.append(
            f"label_smoothing={args.label_smoothing}: TRL leaves it out of the loss {losses[0]!r}; use loss_type='robust', or 0.0"
        )
    elif not problems:
        problems += preference_of(args).violations()
    model = given.get("model")
    if given.get("ref_model") is None and hasattr(model, "peft_config"):
        problems.append(
            "model has adapters already, and TRL would copy them as a reference; merge them (model.merge_and_unload()) and pass "
            "peft_config for new ones, which are switched off for the reference, or pass ref_model"
        )
    elif (
        args.precompute_ref_log_probs and given.get("ref_model") is None and any(p.is_meta for p in _parameters(model))
    ):
        problems.append(
            "precompute_ref_log_probs=True: TRL reads the weights of the model to know them again, but it is on the meta device; "
            "load it, and drop weights="
        )
    return problems


def policy_violations(args: Any, given: Mapping[str, Any], groups: int) -> list[str]:
    """The same for TRL's GRPOTrainer."""
    rules = {name: rule for name, rule in _ARGUMENTS.items() if name != "loss_type"} | _POLICY
    problems = [*_argument_violations(args, rules, groups), *_given_violations(given)]
    if given.get("rollout_func") is None:
        problems.append(
            "rollout_func is missing, so TRL would sample with the model that is trained: its shards would be gathered for every "
            "token, and every rank would hold whole sequences. Pass one that samples elsewhere (vLLM, SGLang); rank 0 calls it"
        )
    for name in ("tools", "environment_factory"):
        if given.get(name) is not None:
            problems.append(f"{name}: completions come from rollout_func, which may use it; leave it out")
    rewards = given.get("reward_funcs")
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(reward, str) or hasattr(reward, "parameters"):
            problems.append("reward_funcs: a reward model would lie whole on every rank; pass a function that asks it")
    batches = {"train": (args.per_device_train_batch_size * args.steps_per_generation, args.num_generations)}
    if getattr(args.eval_strategy, "value", args.eval_strategy) != "no":
        batches["eval"] = (args.per_device_eval_batch_size, args.num_generations_eval or args.num_generations)
    for name, (rows, each) in batches.items():
        if rows * groups % each:
            problems.append(
                f"{rows * groups} completions are sampled at a time (per_device_{name}_batch_size counts those of a data-parallel "
                f"group), which is no multiple of {each} generations a prompt; raise it"
            )
    if args.beta and hasattr(given.get("model"), "peft_config"):
        problems.append(
            "model has adapters already, and TRL would copy them as a reference; merge them (model.merge_and_unload()) and pass "
            "peft_config for new ones, which are switched off for the reference, or beta=0.0"
        )
    return problems


def preference_of(args: Any) -> Preference:
    """What a DPOConfig asks for."""
    name = args.loss_type[0] if isinstance(args.loss_type, list) else args.loss_type
    loss, by_length = PREFERENCES[name]
    return Preference(loss, args.beta, args.label_smoothing, by_length)


def _parameters(model: Any) -> Iterator[Any]:
    return model.parameters() if hasattr(model, "parameters") else iter(())  # it may be a name


def _argument_violations(args: Any, rules: Mapping[str, tuple[tuple[Any, ...], str]], groups: int) -> Iterator[str]:
    for name, (allowed, why) in rules.items():
        value = getattr(args, name, allowed[0])
        value = getattr(value, "value", value)  # of an enum
        if value not in allowed:
            yield f"{name}={_short(value)}: {why}"
    if args.debug:
        yield f"debug={_short(args.debug)}: its hooks see a part of the tokens; leave it out"
    if args.n_gpu > 1:
        yield (
            f"one process sees {args.n_gpu} GPUs, over which transformers would copy the model (DataParallel); start one process "
            f"a GPU: torchrun --nproc-per-node {args.n_gpu}"
        )
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        yield f"mixed precision {args.mixed_precision!r} (of accelerate launch): use bf16 or none"
    elif args.mixed_precision == "fp16" and not args.fp16:
        yield "mixed precision 'fp16' (of accelerate launch): gradients divided by a million tokens underflow in it; use bf16"
    if not args.average_tokens_across_devices and groups > 1:
        yield (
            f"average_tokens_across_devices=False: the loss is the mean over the tokens of all {groups} data-parallel groups; "
            "leave it True"
        )
    loader = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(loader, name, None):
            yield f"accelerator_config.{name}=True: every rank reads the whole batch here; leave it out"


def _given_violations(given: Mapping[str, Any]) -> Iterator[str]:
    for name, why in _GIVEN.items():
        if given.get(name) is not None:
            yield f"{name}: {why}"
    if any(part is not None for part in given.get("optimizers") or ()):
        yield (
            "optimizers: they hold parameters that are sharded when the trainer is made, and would train nothing; use "
            "args.optim and args.lr_scheduler_type, or optimizer_cls_and_kwargs"
        )
    devices = set((getattr(given.get("model"), "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        yield f"the model lies on {len(devices)} devices (device_map); load it without device_map: the stack shards it"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
