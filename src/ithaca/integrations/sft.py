"""TRL's supervised fine-tuning with a stack."""

from __future__ import annotations

import trl

from .trainer import LongContext


class SFTTrainer(LongContext, trl.SFTTrainer):
    """`trl.SFTTrainer` with `stack=`: packing, completion and assistant masks, PEFT LoRA by `peft_config`. It logs no entropy and
    no token accuracy: they would take logits that never exist whole."""
