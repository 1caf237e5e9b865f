"""When memory runs out in spite of the plan: one change, as settings, that promises less."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from ithaca.cli.main import build_parser
from ithaca.config import read_stack
from ithaca.planner.search import plan
from ithaca.planner.shortage import gpu_shortage, host_shortage


def settings(text: str) -> dict:
    """As a user would copy them."""
    words = shlex.split(re.findall(r"try: (.*) \(", text)[0])
    fields, problems = read_stack(build_parser().parse_args(["verify", *words]))
    assert fields and not problems
    return fields


def test_the_change_promises_less():
    found = plan("llama3_8b", gpus="8xH100-80GB", context="3M", host="4TB")
    text = gpu_shortage(found, found.allocated)
    assert "the plan had said" in text and "try: --stack." in text and "q, k, v, output" in text
    other = plan(
        "llama3_8b", gpus="8xH100-80GB", context="3M", host="4TB", stack=replace(found.stack, **settings(text))
    )
    assert other.peak <= 0.9 * found.peak and other.stack.ulysses == found.stack.ulysses


def test_what_the_plan_did_not_know_is_said():
    found = plan("llama32_1b", gpus="1xH200", context="64K")
    assert "something grew that it does not know" in gpu_shortage(found, 2 * found.allocated)
    assert "stack.store to host" in gpu_shortage(None, 10**10)


def test_host_memory():
    found = plan("llama3_8b", gpus="8xH100-80GB", context="1M", host="1TB")
    assert found.stack.store == "host"
    text = host_shortage(found, "the host has 100 GB available")
    changed = settings(text)
    other = plan("llama3_8b", gpus="8xH100-80GB", context="1M", host="1TB", stack=replace(found.stack, **changed))
    assert text.startswith("the host has 100 GB") and other.memory.host <= 0.9 * found.memory.host


def test_where_nothing_is_smaller_it_says_what_else():
    found = plan("llama3_8b", gpus="1xH100", context="1K", offload_optimizer=False)
    text = gpu_shortage(found, found.allocated)
    assert "nothing smaller would fit" in text and "train.offload_optimizer: true" in text and "LoRA" in text
