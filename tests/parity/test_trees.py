"""Trees of documents equal to the unrolled batch: the untouched model runs every way from a root to a leaf by itself, and their
losses are added. Loss and every gradient, float32, on real ranks."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ithaca.base.processes.pool import WorkerError
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.parallelize import prepare
from ithaca.engine.proof import LIMIT, apart
from ithaca.engine.trees import from_paths
from ithaca.stack import Stack
from ithaca.verify.case import full_gradients
from ithaca.verify.presets import add_lora

LENGTH = 67  # a prime: rows are padded on every layout
LONG = os.environ.get("ITHACA_TREES") == "long"  # make trees


@dataclass(frozen=True)
class Trial:
    model: str  # a tiny preset, or a type of transformers that runs by its own code
    stack: Stack
    changes: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    rows: int = 1
    seed: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    weighted: bool = False

    def __str__(self) -> str:
        return f"{self.model}-{self.seed}"


def built(trial: Trial) -> Any:
    from transformers import AutoModelForCausalLM

    table = trial.model.startswith("tiny_")
    config = preset_config(trial.model, **trial.changes) if table else smallest(trial.model)
    for name, value in ({} if table else trial.changes).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    randomize(model, 1)
    return add_lora(model, 2) if trial.lora else model


def random_row(rng: random.Random) -> list[Any]:
    """Nodes of a row: roots, chains, branches that branch again, plain documents, nodes of one token."""
    row, left = [], LENGTH
    while left:
        length = min(left, rng.choice([1, 1, 2, 3, 5, 8, 13]))
        parent = rng.choice([None, *range(len(row)), *range(len(row))])
        row.append(length if parent is None and rng.random() < 0.5 else (length, parent))
        left -= length
    return row


def batch_of(rng: random.Random, rows: int, vocabulary: int) -> tuple[Tensor, Tensor, list[list[Any]]]:
    """Half of the nodes are not supervised, as prompts are."""
    documents = [random_row(rng) for _ in range(rows)]
    ids = torch.tensor([[rng.randrange(vocabulary) for _ in range(LENGTH)] for _ in range(rows)])
    labels = ids.clone()
    for row, nodes in enumerate(documents):
        at = 0
        for node in nodes:
            length = node if isinstance(node, int) else node[0]
            if rng.random() < 0.5:
                labels[row, at : at + rng.randint(1, length)] = -100
            at += length
    return ids, labels, documents


def unrolled(nodes: list[Any]) -> list[list[int]]:
    """Of each leaf: the tokens from its root to its end."""
    paths, inner, at = [], set(), 0
    for node in nodes:
        length, parent = (node, None) if isinstance(node, int) else node
        inner.add(parent)
        paths.append([*(() if parent is None else paths[parent]), *range(at, at + length)])
        at += length
    return [path for node, path in enumerate(paths) if node not in inner]


def untouched(
    model: Any, ids: Tensor, labels: Tensor, documents: list[list[Any]], weights: Tensor, terms: dict[str, float]
) -> tuple[Tensor, dict[str, Tensor | None], int]:
    """-> loss, gradients, count"""
    loss, count = torch.zeros(()), 0
    for row, nodes in enumerate(documents):
        for path in unrolled(nodes):
            wanted = labels[row, path][1:]
            logits = model(input_ids=ids[row, path][None], use_cache=False).logits[0, :-1].float()
            smoothing = terms.get("label_smoothing", 0.0)
            losses = F.cross_entropy(logits, wanted, reduction="none", label_smoothing=smoothing)
            losses = losses + terms.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (wanted != -100)
            loss = loss + (losses * weights[row, path][1:]).sum()
            count += int((wanted != -100).sum())
    (loss / count).backward()
    return loss.detach() / count, {name: p.grad for name, p in model.named_parameters()}, count


def errors_of(trial: Trial, device: str = "cpu") -> dict[str, float]:
    """Collective; complete on rank 0."""
    model = built(trial)
    own = copy.deepcopy(model)
    run = prepare(model.to(device), trial.stack, device=device, dtype=torch.float32)
    ids, labels, documents = batch_of(random.Random(trial.seed), trial.rows * run.mesh.data.size, TEXT)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) if trial.weighted else None
    batch = run.shard(ids, labels=labels, documents=documents, weights=weights)
    loss = run.loss(batch, **trial.terms)
    loss.backward()
    gradients = {name: None if grad is None else grad.cpu() for name, grad in full_gradients(run.model).items()}
    if dist.get_rank():
        return {}
    each = torch.ones(ids.shape) if weights is None else weights
    theirs, expected, count = untouched(own, ids, labels, documents, each, trial.terms)
    assert batch.supervised == count and batch.parents is not None and batch.weights is not None
    alive = [(name, grad) for name, grad in expected.items() if grad is not None and bool(grad.any())]
    return {"loss": apart(loss.detach().cpu(), theirs)} | {n: apart(gradients[n], grad) for n, grad in alive}  # pyright: ignore


WINDOW = {"sliding_window": 6}
TRIALS = [
    Trial("tiny_llama3", Stack(shard_parameters=False), rows=2, terms={"label_smoothing": 0.1, "z_loss": 0.01}),
    Trial(
        "tiny_llama3",
        Stack(ulysses=2, heads_per_stage=1, store="host", tile=9, engine="streamed"),
        seed=1,
        weighted=True,
    ),
    Trial("tiny_llama3", Stack(ring=2, recompute="layer", engine="composed"), rows=2, seed=2),
    Trial("tiny_mistral", Stack(ulysses=2, ring=2, heads_per_stage=1), WINDOW, seed=3),
    Trial("tiny_gemma3", Stack(ring=3, tile=7), WINDOW, seed=4),
    Trial("tiny_qwen2", Stack(replicate=2), lora=True, seed=5),
    Trial(
        "tiny_qwen3_moe", Stack(ulysses=2, recompute="none", engine="composed"), {"output_router_logits": False}, seed=6
    ),
    Trial("gpt_oss", Stack(ulysses=2, ring=2, store="host"), WINDOW, seed=7),
]
if LONG:
    STACKS = [
        Stack(shard_parameters=False), Stack(ulysses=2, heads_per_stage=1), Stack(ring=2), Stack(ulysses=2, ring=2, tile=5),
        Stack(ring=4, recompute="layer"), Stack(ulysses=4, store="disk"), Stack(ulysses=2, replicate=2, recompute="none"),
    ]  # fmt: skip
    WINDOWED = ["tiny_mistral", "tiny_gemma3", "gpt_oss", "gemma2"]
    OTHERS = ["tiny_llama3", "tiny_olmo2", "tiny_granite", "tiny_ministral3", "glm4", "smollm3", "deepseek_v3"]
    TRIALS += [Trial("olmo3", Stack(ulysses=2, tile=9), WINDOW, rows=2, seed=8)]
    TRIALS += [
        Trial(model, stack, WINDOW if model in WINDOWED else {}, rows=2, seed=seed)
        for seed, (model, stack) in enumerate(product(WINDOWED + OTHERS, STACKS), 100)
    ]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_parity(workers, trial: Trial):
    errors = workers.run(errors_of, trial, world=trial.stack.context_ranks * trial.stack.replicate)[0]
    assert len(errors) > 8
    missed = {name: error for name, error in errors.items() if not error <= LIMIT}
    assert not missed, missed


# A prompt, two answers to it, of which the second has two ends, and a document beside them; all supervised
BRANCHED = [(9, None), (7, 0), (5, 0), (4, 2), (6, 2), 8]


def logits_of(trial: Trial, rows: list[Tensor]) -> tuple[list[dict[int, Tensor]], list[int]]:
    """This rank's logits of each row, by token of it as it was computed, and the node of each token there."""
    run = prepare(built(trial), trial.stack, device="cpu", dtype=torch.float32)
    found, nodes = [], []
    for ids in rows:
        batch = run.shard(ids, documents=[BRANCHED])
        with torch.no_grad():
            logits = run.logits(batch)[0]
        where = batch.layout.tokens(run.mesh.ring.rank, run.mesh.ulysses.rank).tolist()
        assert batch.documents is not None
        nodes = [node for node, length in enumerate(batch.documents[0]) for _ in range(length)]
        found.append({token: logits[at] for at, token in enumerate(where) if token < len(nodes)})
    return found, nodes


@pytest.mark.parametrize("stack", [Stack(ulysses=2), Stack(ring=2)], ids=["ulysses", "ring"])
def test_a_branch_changes_nothing_beside_it(workers, stack):
    """Bit for bit: siblings, ancestors and other documents of the row; what is below it sees it."""
    lengths = [node if isinstance(node, int) else node[0] for node in BRANCHED]
    rows = [torch.randint(0, TEXT, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))]
    below = {1: {1}, 2: {2, 3, 4}, 4: {4}, 5: {5}}
    for changed in below:
        start = sum(lengths[:changed])
        other = rows[0].clone()
        other[0, start : start + lengths[changed]] = (other[0, start : start + lengths[changed]] + 1) % TEXT
        rows.append(other)
    ranks = workers.run(logits_of, Trial("tiny_mistral", stack, {"sliding_window": 11}), rows, world=2)
    nodes = ranks[0][1]
    # two last tokens have moved into two children each
    assert sum(len(found[0]) for found, _ in ranks) == len(nodes) == sum(lengths) + 2
    for at, hit in enumerate(below.values(), 1):
        differ = [t for found, _ in ranks for t in found[0] if not torch.equal(found[0][t], found[at][t])]
        assert {nodes[token] for token in differ} == hit


def test_sequences_put_together_are_the_sequences(workers):
    """Answers to a prompt that is not learned, one of them twice, and a document; as a tree, and each by itself."""
    prompt = list(range(20, 40))
    answers = [[1, 2, 3, 4], [1, 2, 5], [6, 7, 8], [1, 2, 3, 4]]
    paths = [*(prompt + answer for answer in answers), [9, 9, 8]]
    labels = [*([-100] * len(prompt) + answer for answer in answers), [-100, 9, 8]]
    loss, sums, expected, sizes = workers.run(put_together, paths, labels, world=2)[0]
    assert sizes == (16, 16, 35, 97), "labels of both, tokens of both"
    assert max(apart(*loss), apart(*sums)) < LIMIT and len(expected) > 8
    assert not {name: error for name, error in expected.items() if not error <= LIMIT}


def put_together(paths: list[list[int]], labels: list[list[int]]) -> Any:
    """Collective. Cross-entropy, and of log-probabilities of whole sequences something that is not a sum, as preferences are."""
    tree = from_paths(paths, labels)
    flat = [torch.tensor([[token for path in each for token in path]]) for each in (paths, labels)]
    losses, sums, gradients, sizes, counts = [], [], [], [], []
    for together in (True, False):
        run = prepare(built(Trial("tiny_llama3", Stack())), Stack(ring=2), device="cpu", dtype=torch.float32)
        if together:
            batch = run.shard(tree.tokens[None], tree.labels[None], [tree.documents])
            assert batch.weights is not None
        else:
            batch = run.shard(*flat, [[len(path) for path in paths]])
        loss = run.loss(batch)
        loss.backward()
        logprobs = run.by_document(batch, run.logprobs(batch))  # pyright: ignore[reportArgumentType]
        logprobs = tree.per_path(logprobs) if together else logprobs
        (-F.logsigmoid(0.3 * (logprobs[1:] - logprobs[:-1])).sum()).backward()
        losses.append(loss.detach())
        sums.append(logprobs.detach())
        gradients.append(full_gradients(run.model))
        counts.append(batch.supervised)
        sizes.append(batch.tokens)
    errors = {name: apart(gradients[0][name], grad) for name, grad in gradients[1].items() if grad is not None}  # pyright: ignore
    return losses, sums, errors, (*counts, *sizes)


def test_a_balance_loss_is_refused(workers):
    with pytest.raises(
        WorkerError, match=r"documents are trees, and the router's balance loss .* output_router_logits"
    ):
        workers.run(errors_of, Trial("tiny_qwen3_moe", Stack(ulysses=2)), world=2)
