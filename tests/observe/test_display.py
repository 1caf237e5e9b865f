"""What is shown: on terminals of many sizes, a real one among them, in files, and where nobody looks any more."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from rich.console import Console

from ithaca.observe.display import Display, open_console
from ithaca.observe.panel import State, sparkline
from ithaca.observe.text import Facts, compact, duration, headline, plain_line
from ithaca.stack import Stack

from .records import record

BUSY = dict(
    loss=2.18342, lr=9.8e-6, grad_norm=0.8123, seconds=190.2, tokens_per_second=689.1, mfu=0.4812,
    gpu_peak=61_234_567_890, host_peak=412_000_000_000, copy_wait=0.42,
)  # fmt: skip
HUGE = dict(
    loss=-123456.7, lr=9.99e-10, grad_norm=1e12, seconds=1e6, tokens_per_second=999999.0, mfu=0.999,
    gpu_peak=999_900_000_000, host_peak=999_900_000_000, disk_peak=999_900_000_000_000, copy_wait=86399.0,
)  # fmt: skip


def terminal(width: int, height: int = 30, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, **options)


def text_of(console: Console) -> str:
    return cast(io.StringIO, console.file).getvalue()


def busy(console: Console) -> State:
    display = Display("llama3_8b_1m", 1000, folder="runs/llama3_8b_1m", console=console, quiet=True)
    for step in range(398, 413):
        display.step(record(step, **{**BUSY, "loss": 900 / step}), eta=111834.0, typical=190.2, next_save=500)
    display.step(record(412, **BUSY, eval_loss=2.2011), eta=111834.0, typical=190.2, next_save=500)
    display.doing("step 413")
    return display._state


# -- the panel --------------------------------------------------------------------------------------------------------


def test_the_panel_shows_everything():
    console = terminal(120, color_system=None)
    console.print(busy(console))
    lines = text_of(console).splitlines()
    assert len(lines) == 9 and all(len(line) == 120 for line in lines)
    shown = "\n".join(lines)
    for part in (
        "step 412 of 1,000", "41.2%", "ETA 1d07h", "step 413, 0.0s of about 3m10s", "2.1834  █", "9.80e-06", "0.812",
        "2.2011 at step 412", "689", "48.1%", "3m10s", "0.4s (0.2%)", "61.2 GB", "412.0 GB", "0 B", "step 500, in 4h38m",
        "runs/llama3_8b_1m",
    ):  # fmt: skip
        assert part in shown, part


@pytest.mark.parametrize("width", [10, 31, 32, 45, 63, 64, 80, 103, 104, 300])
@pytest.mark.parametrize("height", [1, 9, 10, 12, 18, 50])
@pytest.mark.parametrize("state", ["new", "busy"])
def test_the_panel_fits(width: int, height: int, state: str):
    console = terminal(width, height, color_system=None)
    console.print(busy(console) if state == "busy" else State("run", "runs/run", 10))
    lines = text_of(console).splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width


def test_the_panel_goes_on_between_logged_steps_and_says_how_it_ended():
    """Of ten steps the first is logged; the third is being saved when the run stops."""
    console = terminal(120, color_system=None)
    display = Display("run", 10, console=console, quiet=True)
    display.step(record(1), eta=90.0, typical=10.0, next_save=3)

    def shown(width: int = 120, height: int = 30) -> str:
        console = terminal(width, height, color_system=None)
        console.print(display._state)
        return text_of(console)

    display.doing("step 3", 2)
    assert "step 2 of 10" in shown() and "20.0%" in shown() and "step 3, in 10.0s" in shown()
    assert shown(60, 2).startswith("step 3; step 1/10")
    display.doing("saving", 3)
    assert "step 3 of 10" in shown() and "saving, 0.0s" in shown()
    display.ended("stopped", 3)
    assert "step 3 of 10" in shown() and "stopped" in shown() and "saving" not in shown() and "ETA -" in shown()
    console = terminal(120, color_system=None)
    with pytest.raises(RuntimeError), Display("run", 10, console=console) as display:
        display.doing("saving", 3)
        raise RuntimeError
    assert "failed" in text_of(console).rpartition("╭")[2]


@pytest.mark.parametrize("width", [40, 64, 80, 104, 120, 200])
def test_the_newest_loss_is_in_sight_and_moves_with_every_logged_step(width: int):
    display = Display("run", 100, console=terminal(120), quiet=True)
    rows = []
    for step in range(1, 61):
        display.step(record(step, loss=100.0 / step))
        console = terminal(width, color_system=None)
        console.print(display._state)
        rows.append(next(line for line in text_of(console).splitlines() if "loss " in line))
    assert all("…" not in row for row in rows) and len(set(rows)) == 60
    assert "█" in rows[-1] and "▁" in rows[-1]


def test_a_terminal_without_unicode_gets_none():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), force_terminal=True, width=120, height=30)
    console.print(busy(console))  # would raise


def test_a_panel_with_lines_above():
    console = terminal(120, color_system=None)
    with Display("run", 10, console=console) as display:
        assert display.live
        display.say("said")
        print("printed")  # by some library
        display.warn("warning: careful")
        display.step(record(1))
    assert not display.live
    shown = text_of(console)
    first = [shown.index(part) for part in ("said", "printed", "warning: careful")]
    last = shown.rindex("╭─ run")
    assert first == sorted(first) and first[-1] < last < shown.rindex("step 1 of 10")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
    assert "loss 2.5000" not in shown  # the panel says it; no lines


def test_the_panel_is_closed_when_a_run_fails():
    console = terminal(80)
    with pytest.raises(RuntimeError), Display("run", 10, console=console):
        raise RuntimeError
    assert text_of(console).rstrip().endswith("\x1b[?25h") and sys.stdout.__class__.__name__ != "FileProxy"


def test_sparkline():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline(range(100), 4) == "▁▃▆█" and sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([float("nan")], 8) == ""


# -- plain lines ------------------------------------------------------------------------------------------------------


def plain(run: Callable[[Display], None], encoding: str = "utf-8", **options: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding)
    with Display("run", 1000, console=open_console(file), **options) as display:
        assert not display.live
        run(display)
    return raw.getvalue().decode(encoding)


def show(display: Display) -> None:
    display.say("hello")
    display.doing("step 412")
    display.step(record(412, **BUSY, eval_loss=2.2011), eta=111834.0, next_save=500)
    display.warn("warning: careful")


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as build systems do
    assert plain(show).splitlines() == [
        "hello",
        "step 412/1000 loss 2.1834 lr 9.80e-06 grad 0.812 tok/s 689 mfu 48.1% gpu 61.2GB host 412.0GB disk 0B wait 0.4s "
        "eta 1d07h save 500",
        "step 412/1000 eval_loss 2.2011",
        "warning: careful",
    ]


def test_quiet_and_other_ranks():
    assert plain(show, quiet=True) == "warning: careful\n"
    assert plain(show, rank=1) == ""


def test_lines_have_the_same_keys_and_stay_narrow():
    lines = [
        plain_line(record(1), 10),
        plain_line(record(412, **BUSY), 1000, 111834.0, 500),
        plain_line(record(999_999, **HUGE), 999_999, 86400 * 999, 999_999),
    ]
    assert all(len(line) < 160 and line.isascii() for line in lines), max(map(len, lines))
    keys = [line.split(" ")[::2] for line in lines]
    assert keys[0] == keys[1] == keys[2] and len(keys[0]) == 12
    assert dict(zip(keys[0], lines[0].split(" ")[1::2], strict=True))["mfu"] == "-"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (59.94, "59.9s"), (59.96, "1m00s"), (190.2, "3m10s"), (3599.7, "1h00m"), (18720, "5h12m"),
     (86399.9, "1d00h"), (1e6, "11d13h"), (None, "-")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str):
    assert duration(seconds) == text


def test_compact_numbers():
    counts = (7, 999, 1000, 8_030_261_248, 999_999, 405_000_000_000, 15 * 10**12)
    assert [compact(n) for n in counts] == ["7", "999", "1K", "8.03B", "1000K", "405B", "15T"]


# -- the first lines --------------------------------------------------------------------------------------------------

FACTS = dict(
    name="llama3_8b_1m", folder="runs/llama3_8b_1m", model="Llama-3.1-8B", parameters=8_030_261_248,
    trained=8_030_261_248, dtype="bf16", context=2**20, rows=1, steps=1000, devices=8, device="NVIDIA H100 80GB HBM3",
    stack=Stack(ulysses=8, heads_per_stage=1, store="host"), kernel="cudnn", save_every=100, eval_every=50,
    data="packed/books: 5,120 rows, 99.1% full",
)  # fmt: skip


def test_first_lines():
    done = headline(Facts(**{**FACTS, "done": FACTS["steps"], "checkpoint": "step-9"}))
    assert f"all {FACTS['steps']:,} steps done" in done and ", 0 in all" in done
    assert headline(Facts(**FACTS)).splitlines() == [
        "ithaca 0.1.0 trains Llama-3.1-8B at 1M tokens, 1,000 steps, on 8 × NVIDIA H100 80GB HBM3",
        "  stack   ulysses 8, heads_per_stage 1, recompute keep_attention, store host, tile 4096, engine streamed, FSDP2, "
        "kernel cudnn",
        "  model   8.03B parameters, all trained, bf16",
        "  data    1 row × 1,048,576 tokens a step, 1.05B in all; packed/books: 5,120 rows, 99.1% full",
        "  folder  runs/llama3_8b_1m; saves every 100 steps and at the end, evaluates every 50",
    ]


def test_a_kernel_that_is_not_known_yet():
    own = Stack(ulysses=8, engine="module")
    stack = headline(Facts(**{**FACTS, "kernel": "", "stack": own})).splitlines()[1]
    assert stack.endswith("engine module, FSDP2, kernel chosen in the first step")


def test_ranks_that_share_a_gpu_say_so():
    first = headline(Facts(**{**FACTS, "shared": 1})).splitlines()[0]
    assert first.endswith("on 8 ranks that share 1 × NVIDIA H100 80GB HBM3: a rehearsal, its speed means nothing")


def test_first_lines_of_a_resumed_run_with_adapters_on_two_nodes():
    stack = Stack(
        ulysses=8, ring=2, recompute=("keep_attention",) * 20 + ("layer",) * 12, tile=None, shard_parameters=False
    )
    changes = dict(
        stack=stack, done=400, checkpoint="checkpoints/step-400", trained=41_943_040, devices=16, nodes=2, save_every=None,
        eval_every=None, rows=2,
    )  # fmt: skip
    lines = headline(Facts(**{**FACTS, **changes}))
    for part in (
        "steps 401 to 1,000, on 16 × NVIDIA H100 80GB HBM3 on 2 nodes", "ring 2, recompute 20 keep_attention + 12 layer",
        "tile none", "parameters whole", "41.9M of them trained", "2 rows × ", "saves at the end", "resumes checkpoints/step-400",
    ):  # fmt: skip
        assert part in lines, part


def test_a_file_without_unicode():
    assert "8 x NVIDIA" in plain(lambda display: display.say(headline(Facts(**FACTS))), encoding="ascii")
