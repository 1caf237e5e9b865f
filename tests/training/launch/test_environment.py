"""Which job a process belongs to: every launcher, half a set of variables, and variables that contradict each other."""

from __future__ import annotations

import pytest

from ithaca.training.launch import Job, find_job
from ithaca.training.launch.environment import expand_hosts, tasks_per_node

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "node[007-008]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
PORT = 15000 + 1234 * 31 % 15000


def test_no_job():
    assert find_job({}) is None
    assert find_job({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None  # somebody's shell profile


def test_torchrun():
    assert find_job(TORCHRUN) == Job(3, 1, 4, 2, 1, "10.0.0.1", 29500, "torchrun")
    agent = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    job = find_job(agent)
    assert job is not None and (job.hosted, job.attempt, job.one_machine) == (True, 2, False)


def test_torchrun_without_the_node_number_as_accelerate_may_do():
    job = find_job({name: value for name, value in TORCHRUN.items() if name != "GROUP_RANK"})
    assert job is not None and job.node == 1


def test_our_own_launcher():
    one = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
    job = find_job({**one, "ITHACA_LAUNCHER": "77", "ITHACA_LISTENER": "5"})
    assert job is not None and (job.kind, job.listener, job.one_machine) == ("local", 5, True)


def test_srun():
    assert find_job(SRUN) == Job(3, 1, 4, 2, 1, "node007", PORT, "srun")


def test_srun_prefers_what_slurm_says_about_the_step():
    step = {
        **SRUN, "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_STEP_NODELIST": "node[008-009]", "SLURM_LOCALID": "2",
    }  # fmt: skip
    assert find_job(step) == Job(3, 2, 4, 3, 1, "node008", PORT, "srun")


def test_srun_on_one_node_stays_on_loopback():
    one = {
        **SRUN,
        "SLURM_JOB_NODELIST": "node007",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_LOCALID": "3",
        "SLURM_NODEID": "0",
    }
    job = find_job(one)
    assert job is not None and (job.address, job.one_machine) == ("127.0.0.1", True)


def test_srun_with_an_address_from_the_script():
    job = find_job({**SRUN, "MASTER_ADDR": "ib-node007", "MASTER_PORT": "12345", "WORLD_SIZE": "4"})
    assert job is not None and (job.address, job.port) == ("ib-node007", 12345)


@pytest.mark.parametrize("step", [None, "-5", "4294967291", "4294967290"])
def test_a_batch_script_or_interactive_shell_is_not_a_task(step: str | None):
    """Slurm sets SLURM_PROCID=0 and SLURM_NTASKS there too."""
    environ = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    del environ["SLURM_STEP_ID"]
    assert find_job({**environ, **({"SLURM_STEP_ID": step} if step else {})}) is None


def test_a_step_of_one_task_is_nothing_to_join():
    assert find_job({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_the_launcher_that_was_started_last_wins():
    job = find_job({**SRUN, **TORCHRUN})
    assert job is not None and job.kind == "torchrun"
    job = find_job({**SRUN, **MPIRUN})
    assert job is not None and job.kind == "mpirun"


def test_mpirun():
    assert find_job(MPIRUN) == Job(3, 1, 4, 2, 1, "10.0.0.1", 29500, "mpirun")
    assert find_job({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                     "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}) is None  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE are set, but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "unset WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is below 0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2, RANK=3 and WORLD_SIZE=4 contradict"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "contradict each other"),  # one machine, but two ranks
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "contradict each other"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts srun, which says 4"),
        ({**SRUN, "SLURM_NTASKS": "6"}, "6 tasks, SLURM_JOB_NODELIST=node[007-008] with 2 nodes, and 2 + 2 tasks"),
        ({**SRUN, "SLURM_JOB_NODELIST": "node[007-"}, "SLURM_JOB_NODELIST='node[007-' is not a list of hosts"),
        ({**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "--distribution=block"),  # dealt out in turn
        ({name: v for name, v in SRUN.items() if name != "SLURM_STEP_ID"}, "SLURM_PROCID=3 is set, but not SLURM_STEP_ID"),
        ({name: v for name, v in SRUN.items() if name != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
        ({name: v for name, v in SRUN.items() if name != "SLURM_JOB_NODELIST"}, "but not SLURM_STEP_NODELIST or SLURM_JOB"),
        ({name: v for name, v in SRUN.items() if name != "SLURM_NTASKS_PER_NODE"}, "srun --ntasks-per-node=N"),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "2(x"}, "SLURM_TASKS_PER_NODE='2(x' cannot be read"),
        ({name: v for name, v in MPIRUN.items() if name != "MASTER_ADDR"}, "-x MASTER_ADDR=HOST_OF_RANK_0"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "but not OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)  # fmt: skip
def test_half_a_job_is_an_error_that_names_the_variables(environ: dict[str, str], words: str):
    with pytest.raises(ValueError) as error:
        find_job(environ)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[003-005,9]", ["node003", "node004", "node005", "node9"]),
        ("a,b-2,c.example.org", ["a", "b-2", "c.example.org"]),
        ("gpu[1,3-4]-ib,cpu09", ["gpu1-ib", "gpu3-ib", "gpu4-ib", "cpu09"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a]1[", "a[2-1]", "a[x-y]", "a[]", "a b", "a[1-999999]b[1-999]"])
def test_what_is_no_host_list(text: str):
    with pytest.raises(ValueError, match="VARIABLE="):
        expand_hosts(text, "VARIABLE")


def test_tasks_per_node():
    assert tasks_per_node("8(x2),4", "x") == [8, 8, 4]
    assert tasks_per_node("2", "x") == [2]
