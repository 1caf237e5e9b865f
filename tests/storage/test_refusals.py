"""What does not fit is refused on every rank, before anything is overwritten; what cannot be written harms nothing."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.base.processes.pool import WorkerError, Workers
from ithaca.storage import check, files
from ithaca.storage.checkpoint import CheckpointError, load, save

from .runs import started, state_of, tiny, tokens, train, weights

ALONE = dict(shard_parameters=False)


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama after one step."""
    run, optimizer = started(stack=ALONE)
    train(run, optimizer, range(1))
    return save(tmp_path_factory.mktemp("saved"), run, optimizer, {"cursor": 8}, step=1).wait()


def refusal(path: Path, run: Any, optimizer: Any = None) -> str:
    before = weights(run)
    with pytest.raises(CheckpointError) as caught:
        load(path, run, optimizer)
    after = weights(run)
    assert all(torch.equal(after[name], before[name]) for name in before), "nothing may be overwritten"
    assert optimizer is None or not optimizer.state
    return str(caught.value)


def test_another_size(saved: Path):
    run, optimizer = started(stack=ALONE, intermediate_size=80)
    text = refusal(saved, run, optimizer)
    assert "is of another model: " in text and str(saved) in text
    assert (
        "model.layers.0.mlp.down_proj.weight is float32[64, 96] in the checkpoint and float32[64, 80] in this run"
        in text
    )
    assert "; 1 more. Fix: build the model from the folder" in text


def test_another_depth_and_another_family(saved: Path):
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    assert "model.layers.1.input_layernorm.weight is not in this run" in refusal(saved, run, optimizer)
    run, optimizer = started("qwen3", ALONE)
    text = refusal(saved, run, optimizer)
    assert "q_norm.weight is not in the checkpoint" in text and "lm_head.weight is not in this run" in text


def test_another_dtype_is_not_cast_in_silence(saved: Path):
    import ithaca
    from ithaca.engine.model.weights import cast_parameters

    run = ithaca.prepare(cast_parameters(tiny(), torch.bfloat16), ithaca.Stack(**ALONE), device="cpu")
    assert "is float32[257, 64] in the checkpoint and bfloat16[257, 64] in this run" in refusal(saved, run)


def test_another_optimizer(saved: Path):
    run, optimizer = started(stack=ALONE)
    plain = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    text = refusal(saved, run, plain)
    assert "the optimizer's groups had 16 + 5 parameters and have 21" in text and "load without one" in text
    turned = torch.optim.AdamW(list(reversed(optimizer.param_groups)), lr=1e-2)
    assert "groups had 16 + 5 parameters and have 5 + 16" in refusal(saved, run, turned)
    groups = [{"params": list(reversed(group["params"]))} for group in optimizer.param_groups]
    assert "the optimizer's groups had model.embed_tokens.weight where" in refusal(
        saved, run, torch.optim.AdamW(groups)
    )
    amsgrad = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups], amsgrad=True)
    assert "lm_head.weight.max_exp_avg_sq is not in the checkpoint" in refusal(saved, run, amsgrad)
    other = torch.optim.Adam([{"params": g["params"]} for g in optimizer.param_groups])
    assert "the optimizer was AdamW and is Adam" in refusal(saved, run, other)


def test_weights_alone_may_be_loaded(saved: Path):
    run, optimizer = started(stack=ALONE, seed=5)
    assert load(saved, run) == {"step": 1, "cursor": 8} and not optimizer.state
    other, again = started(stack=ALONE, seed=4)
    load(saved, other, again)
    assert all(torch.equal(weights(run)[name], value) for name, value in weights(other).items())


def test_a_checkpoint_without_optimizer(tmp_path: Path):
    run, optimizer = started(stack=ALONE)
    save(tmp_path, run, None, {}, step=1)
    assert "it was saved without one" in refusal(tmp_path, run, optimizer)
    load(tmp_path, run)


def test_adapters_know_their_base(tmp_path: Path):
    run, optimizer = started(stack=ALONE, lora=True)
    train(run, optimizer, range(1))
    path = save(tmp_path, run, optimizer, {}, step=1).wait()
    whole = sum(p.numel() for p in run.model.parameters()) * 4
    assert (path / "__0_0.distcp").stat().st_size < whole, "the base is not stored"
    other, again = started(stack=ALONE, lora=True, seed=3)
    text = refusal(path, other, again)
    assert "was trained on another base" in text and "base_layer.weight was float32-" in text
    same, again = started(stack=ALONE, lora=True)
    load(path, same, again)
    assert all(torch.equal(weights(run)[name], value) for name, value in weights(same).items())


def test_a_changed_byte_is_noticed_unless_nobody_looks(tmp_path: Path):
    run, optimizer = started(stack=ALONE)
    path = save(tmp_path, run, optimizer, {}, step=1).wait()
    shard = path / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert "__0_0.distcp has changed since it was saved" in refusal(tmp_path, run, optimizer)
    load(tmp_path, run, check_hashes=False)


def test_folders_without_a_checkpoint(tmp_path: Path):
    run, optimizer = started(stack=ALONE)
    assert "has no complete checkpoint; start without one" in refusal(tmp_path, run, optimizer)
    assert "step-3 is not there, or not any more" in refusal(tmp_path / "step-3", run, optimizer)


def test_only_between_steps_and_only_json(tmp_path: Path):
    run, optimizer = started(stack=ALONE)
    with pytest.raises(CheckpointError, match=r"extra cannot be written as JSON: .* set .* pass numbers, texts"):
        save(tmp_path, run, optimizer, {"seen": {1, 2}}, step=1)
    run.busy = True
    with pytest.raises(CheckpointError, match="save and load between steps"):
        save(tmp_path, run, optimizer, {}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_strange_optimizer_is_refused_when_saving(tmp_path: Path):
    run, _ = started(stack=ALONE)
    foreign = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(
        CheckpointError, match=r"parameters that are not the run's; make it from run.model.parameters\(\)"
    ):
        save(tmp_path, run, foreign, {}, step=1)
    optimizer = torch.optim.LBFGS(run.model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        loss = run.loss(run.shard(tokens(0)))
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
        save(tmp_path, run, optimizer, {}, step=1)
    assert list(tmp_path.iterdir()) == []


def differ(folder: str) -> None:
    """Rank 1 alone has another model."""
    changes = dict(intermediate_size=80) if dist.get_rank() == 1 else {}
    run, optimizer = started(stack=ALONE, **changes)
    load(Path(folder), run, optimizer)


def test_one_rank_that_does_not_fit_stops_all(workers: Workers, saved: Path):
    with pytest.raises(WorkerError) as caught:
        workers.run(differ, str(saved), world=2)
    assert caught.value.kind == "CheckpointError" and caught.value.ranks == [0, 1]
    assert "rank 1: checkpoint" in str(caught.value) and "is of another model" in str(caught.value).splitlines()[0]


def full_disk(folder: str, asynchronous: bool) -> list[Any]:
    """Rank 1 cannot write more than 5 KB; then it can again."""
    run, optimizer = started(stack=dict(ulysses=2), num_hidden_layers=1)
    train(run, optimizer, range(1))
    save(Path(folder), run, optimizer, {}, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    error = ""
    try:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
        saving = save(Path(folder), run, optimizer, {}, step=2, asynchronous=asynchronous)
        saving.wait()
    except CheckpointError as problem:
        error = str(problem)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    train(run, optimizer, range(1))  # goes on
    save(Path(folder), run, optimizer, {}, step=3)
    return [error, left]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_costs_that_save_only(workers: Workers, tmp_path: Path, asynchronous: bool):
    for error, left in workers.run(full_disk, str(tmp_path), asynchronous, world=2):
        assert "writing" in error and "failed on rank 1: OSError: [Errno 27] File too large" in error
        assert left == ["LATEST", "RUN", "step-1"]
    assert files.latest(tmp_path) == tmp_path / "step-3" and check.verify(tmp_path / "step-3") == []


def poll(folder: str) -> list[Any]:
    run, optimizer = started(stack=dict(ring=2), num_hidden_layers=1)
    train(run, optimizer, range(1))
    state = state_of(run, optimizer)
    before = weights(run)
    saving = save(Path(folder), run, optimizer, {}, step=1, asynchronous=True)
    early = (Path(folder) / "step-1").exists()
    for step in range(1, 200):
        train(run, optimizer, range(step, step + 1))  # changes what is being written, if it is not a copy
        if saving.poll():
            break
    moved = not torch.equal(weights(run)["lm_head.weight"], before["lm_head.weight"])
    again, fresh = started(stack=dict(ring=2), seed=5, num_hidden_layers=1)
    load(Path(folder), again, fresh)
    loaded, states = weights(again), state_of(again, fresh)
    same = all(torch.equal(loaded[name], value) for name, value in before.items())
    alike = all(torch.equal(states[key], value) for key, value in state.items())
    return [early, saving.done(), saving.path, moved, same, alike]


def test_an_asynchronous_save_is_published_at_a_step_and_holds_that_moment(workers: Workers, tmp_path: Path):
    for early, done, path, moved, same, alike in workers.run(poll, str(tmp_path), world=2):
        assert not early and done and path == tmp_path / "step-1" and moved and same and alike
