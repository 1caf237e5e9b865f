"""The pool itself: order, groups, and every way a rank can fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import ithaca.base.processes.pool
import ithaca.base.processes.worker
from ithaca.base.processes.pool import WorkerError, Workers
from ithaca.base.processes.rank import Failure

from ..waiting import wait_until

NEVER = 1e6  # seconds: nothing in a test takes so long
LONG = pytest.mark.skipif(
    os.environ.get("ITHACA_FAULTS") != "long", reason="workers that import torch one by one, 20 s each: make faults"
)


def pid() -> int:
    return os.getpid()


def identity(tag: str, *, suffix: str) -> tuple:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dist.get_rank(), dist.get_world_size(), tag + suffix, [int(os.environ[name]) for name in names]


def sum_of_ranks() -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def big_tensor(elements: int) -> torch.Tensor:
    return torch.full((elements,), float(dist.get_rank()))


def random_number() -> float:
    return torch.rand(()).item()


def sum_over_mesh(elements: int) -> tuple[float, int, int]:
    """A DTensor sum on a two-axis mesh; also the number of groups and the threads of this process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    total = distribute_tensor(torch.ones(elements), mesh, [Replicate(), Shard(0)]).sum().full_tensor().item()  # pyright: ignore
    return total, len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))


def destroy_group() -> None:
    dist.destroy_process_group()


def refuse() -> None:
    raise ValueError("head count 7 is odd")


def leave_without_word(culprit: int, how: str, folder: Path) -> None:
    """One rank goes wrong when the others have come as far as here; they wait for it in a collective."""
    if dist.get_rank() == culprit:
        wait_until(lambda: len(list(folder.iterdir())) == dist.get_world_size() - 1)
        if how == "raise":
            raise KeyError("missing weight")
        sys.exit("bye")
    (folder / str(dist.get_rank())).touch()
    dist.barrier()


def die(culprit: int, how: str, folder: Path) -> None:
    """The first of the others misses it; the rest will never say a word."""
    rank = dist.get_rank()
    if rank == culprit:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    if rank == 0:
        dist.barrier()
    wait_for_ever(folder)


def wait_for_ever(folder: Path) -> None:
    (folder / str(dist.get_rank())).touch()
    threading.Event().wait()


def hang_alone(culprit: int, folder: Path) -> None:
    if dist.get_rank() == culprit:
        wait_for_ever(folder)


def raise_in_turn(folder: Path) -> None:
    """The others raise after rank 2: its worker has then noted the error, and let go of it and of these variables."""
    rank, noted = dist.get_rank(), folder / "noted"
    if rank == 2:
        mine = threading.Event()  # any object
        weakref.finalize(mine, noted.touch)
        raise RuntimeError("the cause")
    wait_until(noted.exists)
    raise RuntimeError(f"a consequence on rank {rank}")


def return_lambda() -> object:
    return lambda: None


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a slow machine is not taken for one that has nothing to say."""
    for limit in ("START_SECONDS", "_GRACE_SECONDS", "_WORD_SECONDS"):
        monkeypatch.setattr(ithaca.base.processes.pool, limit, NEVER)


def test_results_come_in_rank_order(workers: Workers) -> None:
    for world in (1, 3, 8):
        got = workers.run(identity, "a", suffix="b", world=world)
        assert got == [(rank, world, "ab", [rank, rank, world, world]) for rank in range(world)]
    assert len(workers.run(pid)) == 8  # all, when not told


def test_collectives_over_changing_worlds_on_the_same_processes(workers: Workers) -> None:
    pids = workers.run(pid)
    for world in (2, 4, 8, 2, 8):
        assert workers.run(sum_of_ranks, world=world) == [world * (world - 1) / 2] * world
    assert workers.run(pid) == pids


def test_group_is_kept_while_the_world_stays(workers: Workers) -> None:
    workers.run(sum_of_ranks, world=4)
    generation = workers._generation
    for _ in range(3):
        workers.run(sum_of_ranks, world=4)
    assert workers._generation == generation


def test_large_results_come_back_by_value(workers: Workers) -> None:
    for rank, tensor in enumerate(workers.run(big_tensor, 1_000_000, world=2)):
        assert torch.equal(tensor, torch.full((1_000_000,), float(rank)))


def test_every_run_starts_from_the_same_seed(workers: Workers) -> None:
    assert len({*workers.run(random_number, world=2), *workers.run(random_number, world=2)}) == 1


@pytest.fixture
def fresh() -> Iterator[Workers]:
    """Workers that no other test has used: their threads are their own."""
    with Workers(4) as own:
        yield own


def test_a_run_leaves_no_group_behind(fresh: Workers) -> None:
    threads = []
    for elements in range(8, 80, 8):  # other shapes each time: DTensor caches by shape and mesh
        for total, groups, count in fresh.run(sum_over_mesh, elements, world=4):
            assert (total, groups) == (elements, 3)  # the world, and one group for each axis
            threads.append(count)
    assert max(threads) - min(threads) <= 6  # what the two groups of one run own; nine runs left 48 more


def test_a_mesh_does_not_outlive_its_world(workers: Workers) -> None:
    """The same mesh, by value, before and after another world: its groups are other ones."""
    for world in (4, 2, 4):
        for total, _, _ in workers.run(sum_over_mesh, 32, world=world):
            assert total == 32


def test_a_function_may_destroy_its_group(workers: Workers) -> None:
    workers.run(destroy_group, world=2)
    assert workers.run(sum_of_ranks, world=2) == [1.0, 1.0]


def test_same_error_on_all_ranks_is_said_once_and_the_pool_survives(workers: Workers) -> None:
    pids = workers.run(pid, world=4)
    with pytest.raises(WorkerError) as caught:
        workers.run(refuse, world=4)
    text = str(caught.value)
    assert text.splitlines()[0] == "all 4 ranks raised ValueError: head count 7 is odd"
    assert text.count("Traceback") == 2  # ours of rank 0, and Python's own first line
    assert "in refuse" in text and "workers.py" not in text.replace("test_workers.py", "")
    assert (caught.value.ranks, caught.value.kind) == ([0, 1, 2, 3], "ValueError")
    assert workers.run(pid, world=4) == pids
    assert workers.run(sum_of_ranks, world=4) == [6.0] * 4


def test_the_rank_that_raised_first_is_named(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(raise_in_turn, tmp_path, world=4)
    assert str(caught.value).startswith("rank 2 raised RuntimeError: the cause\n")
    assert "rank 0 raised RuntimeError: a consequence on rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "headline"),
    [("raise", "rank 1 raised KeyError: 'missing weight'"), ("sys.exit", "rank 1 raised SystemExit: bye")],
)
def test_one_rank_raises_while_the_others_wait(
    fresh: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, headline: str
) -> None:
    fresh.run(pid, world=4)
    monkeypatch.setattr(ithaca.base.processes.pool, "_GRACE_SECONDS", 0.2)  # however long, they wait in vain
    with pytest.raises(WorkerError) as caught:
        fresh.run(leave_without_word, 1, how, tmp_path, world=4, timeout=NEVER)
    text = str(caught.value)
    assert text.splitlines()[0] == headline
    standing = re.findall(r"^ranks? ([0-3, ]+) stood here", text, re.MULTILINE)
    assert sorted(", ".join(standing).split(", ")) == ["0", "2", "3"] and "in leave_without_word" in text
    assert fresh.run(sum_of_ranks, world=4) == [6.0] * 4


def test_ranks_that_stand_at_one_place_are_said_together() -> None:
    failures = {1: Failure("KeyError", "'missing weight'", "trace", 0.0)}
    stacks = {0: "  in barrier", 2: "  in step", 3: "  in barrier"}
    text = str(ithaca.base.processes.pool._error(4, failures, {}, stacks, 1.0, ""))
    assert re.findall(r"^(ranks? .*) stood here.*\n(.*)", text, re.MULTILINE) == [
        ("ranks 0, 3", "  in barrier"), ("rank 2", "  in step"),
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "cause"), [("kill", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_dead_rank_is_noticed_though_the_others_are_silent(
    workers: Workers, tmp_path: Path, how: str, cause: str
) -> None:
    workers.run(pid, world=4)
    with pytest.raises(WorkerError) as caught:
        workers.run(die, 2, how, tmp_path, world=4, timeout=NEVER)
    assert str(caught.value).splitlines()[0] == f"rank 2 died: {cause}"
    assert caught.value.kind == "died"
    assert workers.run(sum_of_ranks, world=4) == [6.0] * 4


def test_a_hang_times_out_and_says_where(workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_wait = ithaca.base.processes.pool.wait

    def time_out(fn: Callable[..., None], *args: object, world: int, hanging: int) -> str:
        """Time runs out, but not before all ranks have answered that will, and the others hang."""
        folder = tmp_path / str(hanging)
        folder.mkdir()

        def wait(sources: list, seconds: float) -> list:
            if len(sources) > hanging:
                return real_wait(sources)
            wait_until(lambda: len(list(folder.iterdir())) == hanging)
            return real_wait(sources, seconds)

        workers.run(pid, world=world)
        with monkeypatch.context() as patch, pytest.raises(WorkerError) as caught:
            patch.setattr(ithaca.base.processes.pool, "wait", wait)
            workers.run(fn, *args, folder, world=world, timeout=0.2)
        return str(caught.value)

    text = time_out(wait_for_ever, world=2, hanging=2)
    assert text.startswith("all 2 ranks did not answer within 0.2 s\n") and "in wait_for_ever" in text
    text = time_out(hang_alone, 1, world=3, hanging=1)
    assert text.startswith("rank 1 did not answer within 0.2 s\n")
    assert workers.run(sum_of_ranks, world=2) == [1.0, 1.0]


def test_a_worker_that_died_between_runs_is_replaced(workers: Workers) -> None:
    victim = workers.run(pid, world=2)[1]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not workers._workers[1].idle)
    assert workers.run(sum_of_ranks, world=2) == [1.0, 1.0]


@LONG
def test_the_death_of_the_template_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, worker = ithaca.base.processes.pool, ithaca.base.processes.worker
    monkeypatch.setattr(worker, "_template", None)
    monkeypatch.setattr(pool, "_PRELOAD", ("ithaca.base.processes.rank", __name__))  # this proof needs no transformers
    with Workers(2) as own:
        pids = own.run(pid)
        template = worker._template
        assert template is not None and template.process is not None
        server = template.process.pid
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not alive(server))
        assert own.run(pid) == pids, "it harms nobody"
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: not own._workers[1].idle)
        assert own.run(sum_of_ranks) == [1.0, 1.0]
        assert template.process.pid != server and not alive(pids[0])
    template.close()


@LONG
def test_without_a_template_workers_are_started_one_by_one(capfd: pytest.CaptureFixture[str]) -> None:
    template = ithaca.base.processes.worker.Template([sys.executable, "-c", "raise ImportError('no such module')"])
    with pytest.MonkeyPatch.context() as patch, Workers(2) as own:
        patch.setattr(ithaca.base.processes.worker, "_template", template)
        assert own.run(sum_of_ranks) == [1.0, 1.0]
    said = capfd.readouterr().err
    assert "no such module" in said and said.count("they are started one by one\n") == 1


def test_interrupting_the_parent_leaves_a_usable_pool(workers: Workers, tmp_path: Path) -> None:
    pids = workers.run(pid, world=2)

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        workers.run(wait_for_ever, tmp_path, world=2)
    assert not any(alive(old) for old in pids)
    assert workers.run(sum_of_ranks, world=2) == [1.0, 1.0]


def test_a_failed_start_is_reported_and_the_next_one_is_whole(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.close()
    monkeypatch.setattr(workers, "threads", 0)
    for _ in range(2):
        with pytest.raises(WorkerError, match="all 2 ranks raised RuntimeError: set_num_threads"):
            workers.run(pid, world=2)
    monkeypatch.undo()
    assert workers.run(sum_of_ranks, world=2) == [1.0, 1.0]


def test_what_cannot_work_is_refused(workers: Workers) -> None:
    with pytest.raises(ValueError, match="must be at module level"):
        workers.run(lambda: None)
    with pytest.raises(ValueError, match="between 1 and the 8 workers"):
        workers.run(pid, world=9)
    with pytest.raises(WorkerError, match=r"ranks raised .*return_lambda"):
        workers.run(return_lambda, world=2)
    with pytest.raises(ValueError, match="count must be at least 1"):
        Workers(0)
    with pytest.raises(ValueError, match="GPUs"):
        Workers(torch.cuda.device_count() + 1, device="cuda")


def say_who_and_wait(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    threading.Event().wait()


def be_a_parent(folder: Path) -> None:
    """With workers of its own, and a template of its own for them."""
    pool = ithaca.base.processes.pool
    pool._PRELOAD = ("ithaca.base.processes.rank", __name__)  # this proof needs no transformers
    Workers(2).run(say_who_and_wait, folder, timeout=NEVER)


def test_no_worker_outlives_its_parent(workers: Workers, tmp_path: Path) -> None:
    """Kill a parent whose workers are busy; nothing of it may remain, the template included. A rank is the parent: it has imported
    torch already."""
    (parent,) = workers.run(pid, world=1)
    family: list[int] = []

    def kill() -> None:
        try:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
            family.extend(process.pid for process in psutil.Process(parent).children(recursive=True))
        finally:
            os.kill(parent, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerError, match="rank 0 died: killed by SIGKILL"):
        workers.run(be_a_parent, tmp_path, world=1, timeout=NEVER)
    thread.join()
    assert len(family) == 3 and {int(path.name) for path in tmp_path.iterdir()} < set(family)
    wait_until(lambda: not any(alive(child) for child in family))


def alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
