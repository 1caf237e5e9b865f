"""One training step as a plan sees it, and what it holds. `Job` is the one record of what was asked: every setting of a run that
changes memory or time is a field of it, and a test walks the config to see that none is dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ..config.schema import LINEARS
from ..stack import Stack
from .model.sizes import ModelSizes

OPTIMIZERS = {
    "adamw": 8.0,
    "adamw8bit": 2.1,
    "muon": 4.0,
}  # bytes of states for each trained weight; of muon, of a matrix


@dataclass(frozen=True)
class Job:
    """One training step, as a rank sees it."""

    model: ModelSizes
    stack: Stack
    context: int
    world: int = 1
    rows: int = 1  # of an optimizer step, over all ranks and micro-batches
    kernel: str = "fa4"
    windowed: str = ""  # the kernel of layers with a window, if that is another
    optimizer: str = "adamw"
    lora: int = 0  # rank of adapters on `targets`; 0 = all weights are trained
    targets: tuple[str, ...] = LINEARS
    quantize: str | None = None  # how the frozen linears of layers wait
    offload: bool = False  # weights, gradients and states wait in host memory (train.offload_optimizer)
    accumulation: int = 1  # micro-batches of a step
    asynchronous: bool = True  # checkpoints are copied to host memory and written from there
    units: bool = False  # log-probabilities of answers are differentiated, not cross-entropy (objective dpo, policy)
    reference: bool = (
        False  # in every step the base scores the same rows without gradients (objective.reference=adapters)
    )
    trees: bool = (
        False  # answers share their prompt, so that attention of a stage is merged in fp32 (data.share_prefixes)
    )
    processors: int = 0  # of the GPU, where results must have the same bits each time; 0 = they need not

    @property
    def batch(self) -> int:
        """Rows of a micro-batch."""
        return max(1, self.rows // self.accumulation)

    @property
    def optimizer_bytes(self) -> float:
        """Of states, for a trained weight; the mean, where they differ."""
        if self.optimizer != "muon":
            return OPTIMIZERS[self.optimizer]
        share = sum(rows * columns for rows, columns in self.matrices) / self.trained
        return share * OPTIMIZERS["muon"] + (1 - share) * OPTIMIZERS["adamw"]

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of every matrix of the layers."""
        return [shape for shape in self.model.layer_tensors if min(shape) > 1] * self.model.layers

    def kernel_of(self, layer: int) -> str:
        return self.windowed or self.kernel if self.model.windows[layer] is not None else self.kernel

    # -- what is trained ------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> dict[str, int]:
        """Weights of the adapter on each linear of a layer, and on lm_head, that has one."""
        return _adapters(self.model, self.lora, self.targets) if self.lora else {}

    @property
    def after_trained(self) -> int:
        """Trained weights of o_proj, MLP and their norms."""
        m = self.model
        if self.lora:
            return sum(weights for name, weights in self.adapters.items() if name == "o_proj" or name in m.mlp_linears)
        return m.heads * m.head_dim * m.hidden + m.mlp_weights + m.norm_weights

    @property
    def layer_trained(self) -> int:
        if not self.lora:
            return self.model.layer_weights
        return sum(weights for name, weights in self.adapters.items() if name != "lm_head")

    @property
    def head_trained(self) -> int:
        """Of a head that is not the embedding; with adapters of any."""
        return self.adapters.get("lm_head", 0) if self.lora else 0 if self.model.tied else self.model.embedding_weights

    @property
    def trained(self) -> int:
        m = self.model
        if self.lora:
            return m.layers * self.layer_trained + self.head_trained
        return m.weights

    @property
    def frozen(self) -> int:
        return self.model.weights if self.lora else 0

    @property
    def packed(self) -> int:
        """Weights of a layer that wait in four bits."""
        return self.model.layer_matrices if self.quantize else 0


@cache
def _adapters(model: ModelSizes, rank: int, targets: tuple[str, ...]) -> dict[str, int]:
    return {name: rank * sum(model.linears[name]) for name in model.named(targets)}


@dataclass
class Memory:
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    host: int = 0
    disk: int = 0
    offloaded: int = 0  # of what is on the host: weights, gradients and states
    snapshot: int = 0  # copies in host memory that an asynchronous checkpoint is written from
    near: int = 0  # of what is on disk, kept in host memory too where that is free

    @property
    def peak(self) -> int:
        return max(sum(holders.values()) for holders in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
