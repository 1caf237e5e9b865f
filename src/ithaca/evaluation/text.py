"""An evaluation as tables for a terminal."""

from __future__ import annotations

from typing import Any

from ..base.units import format_tokens


def describe(record: dict[str, Any]) -> str:
    parts = []
    if held_out := record.get("held_out"):
        parts.append(
            f"held-out data: loss {held_out['loss']:.4f}, perplexity {held_out['perplexity']:,.2f}, next token right "
            f"{held_out['accuracy']:.1%}, {held_out['tokens']:,} tokens"
        )
        rows = [
            [f"{format_tokens(span['from'])} to {format_tokens(span['to'])}", f"{span['loss']:.4f}",
             f"{span['perplexity']:,.2f}", f"{span['accuracy']:.1%}", f"{span['tokens']:,}"]
            for span in held_out["positions"]
        ]  # fmt: skip
        parts.append(_table(["position", "loss", "perplexity", "right", "tokens"], rows))
    if needle := record.get("needle"):
        parts.append(f"needles found, by length and depth ({needle['samples']} each): {needle['mean']:.1%} in all")
        rows = [
            [format_tokens(length), *(f"{cell:.0%}" for cell in cells)]
            for length, cells in zip(needle["lengths"], needle["accuracy"], strict=True)
        ]
        parts.append(_table(["length", *(f"{depth:.0%}" for depth in needle["depths"])], rows))
    if tasks := record.get("tasks"):
        parts.append("tasks: answer tokens right, whole answers right, log-probability of a token")
        rows = [
            [result["task"], format_tokens(result["length"]), f"{result['accuracy']:.1%}", f"{result['exact']:.1%}",
             f"{result['log_probability']:.3f}"]
            for result in tasks
        ]  # fmt: skip
        parts.append(_table(["task", "length", "tokens", "answers", "log p"], rows))
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in [head, *rows]
    )
