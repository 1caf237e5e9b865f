"""What attention holds, in bytes: the terms of stages.py, ring.py and segments.py. No torch; tested against the dry run.

A stage projects a few heads of this rank's tokens (`sent`), exchanges tokens for heads, and attends those that are this rank's, of
all tokens (`here`). Unless a name says otherwise a term is in bf16, and k and v count one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ...base.kernels import backward_workspace
from ..limits import BF16, FP32, OVERLAP_BYTES
from .head_schedule import Stage, head_schedule

WIDE = FP32 // BF16  # how many times a bf16 tensor its copy in fp32 takes
QKV, KV, Q_OUT_DOUT = 3, 2, 3  # tensors: q, k, v; k, v; q, output and its gradient
Bytes = dict[str, int]  # category -> bytes


@dataclass(frozen=True)
class StageCost:
    """One stage of one rank."""

    q_sent: int  # query heads of this rank's tokens, attended by any rank
    q_here: int  # query heads that this rank attends, of all tokens
    k_sent: int  # KV heads that are new in this stage, of this rank's tokens
    k_here: int  # this rank's KV heads, of all tokens
    lse: int  # log-sum-exp of the heads that this rank attends
    heads: int  # sent
    new_kv_heads: int  # sent
    distinct_kv_heads: int  # of those, projected once each
    heads_here: int
    kv_heads_here: int
    q_copies: int  # tensors that hold what arrives: as received, and in order where heads or rows must be put in order
    k_copies: int
    brings_kv: bool  # new KV heads come with it
    ends_kv: bool  # it is the last that uses some KV heads, whose gradients then go home


class AttentionCost:
    def __init__(self, heads: int, kv_heads: int, head_dim: int, rows: int, tokens: int, ulysses: int, ring: int,
                 heads_per_stage: int | None, trees: bool = False) -> None:  # fmt: skip
        self.trees = trees  # documents are; counted is one whose answers are half of the row
        self.rows, self.tokens, self.head_dim, self.ulysses, self.ring = rows, tokens, head_dim, ulysses, ring
        self.head = rows * tokens * head_dim * BF16  # one head of this rank's tokens
        self.schedule = head_schedule(heads, kv_heads, ulysses, heads_per_stage)
        self.stages = [self._stage(stage) for stage in self.schedule]
        later = (stage.q_sent for stage in reversed(self.stages))
        self._behind = list(accumulate(later, initial=0))[::-1]
        # whether the next stage is brought while this one attends
        self.overlaps = ulysses > 1 and max(stage.q_sent for stage in self.stages) <= OVERLAP_BYTES
        self.lse = sum(stage.lse for stage in self.stages)

    def _stage(self, stage: Stage) -> StageCost:
        heads, new = sum(map(len, stage.queries)), sum(map(len, stage.fresh))
        here, kv_here = self.ulysses * len(stage.queries[0]), self.ulysses * len(stage.kv[0])
        return StageCost(
            q_sent=heads * self.head,
            q_here=here * self.head,
            k_sent=new * self.head,
            k_here=kv_here * self.head,
            lse=here * self.rows * self.tokens * FP32,
            heads=heads,
            new_kv_heads=new,
            distinct_kv_heads=len({head for rank in stage.fresh for head in rank}),
            heads_here=len(stage.queries[0]),
            kv_heads_here=len(stage.kv[0]),
            q_copies=self._copies(len(stage.queries[0])),
            k_copies=self._copies(len(stage.kv[0])),
            brings_kv=any(stage.fresh),
            ends_kv=any(stage.done),
        )

    def _copies(self, heads: int) -> int:
        if self.ulysses == 1:
            return 1 if self.rows > 1 else 0
        return 2 if heads > 1 or self.rows > 1 else 1

    def behind(self, t: int) -> int:
        """Query heads of stage t and all later ones, of this rank's tokens."""
        return self._behind[min(t, len(self.stages))]

    def _sets(self, t: int) -> tuple[int, int]:
        """Buffers that exist of q, and of KV, when stage t runs and the next one is brought: at most two of each."""
        brought = self.stages[: t + 2]
        return min(2, len(self.stages), t + 2), min(2, sum(stage.brings_kv for stage in brought))

    # -- forward --------------------------------------------------------------------------------------------------------

    def kept_qkv(self) -> int:
        """recompute="none": q, k and v of every stage stay for backward."""
        return sum(stage.q_here + KV * stage.k_here for stage in self.stages)

    def bringing(self, t: int) -> Bytes:
        """Stage t is projected and sent, and nothing attends meanwhile."""
        stage = self.stages[t]
        if self.ulysses == 1 or self.overlaps:
            return self.attending(t)
        before = KV * stage.k_here if t else 0  # of the stage before, which may use the same
        arriving = KV * stage.k_copies * stage.k_here if stage.k_sent else 0
        return {
            "exchange": stage.q_sent + KV * stage.k_sent,
            "attention": stage.q_copies * stage.q_here + arriving + before,
        }

    def attending(self, t: int) -> Bytes:
        """q, k and v of stage t are in use; where stages overlap, those of the next are on their way."""
        stage = self.stages[t]
        if self.ulysses > 1 and not self.overlaps:
            return {"attention": stage.q_here + KV * stage.k_here}
        q_sets, kv_sets = (1, 1) if self.ulysses == 1 else self._sets(t)
        return {
            "exchange": q_sets * stage.q_sent + KV * kv_sets * stage.k_here,
            "attention": stage.q_copies * q_sets * stage.q_here + KV * stage.k_copies * kv_sets * stage.k_here,
        }

    def output(self, t: int) -> Bytes:
        """What the kernel makes; around a ring it is merged block by block, half of the queries at a time."""
        stage = self.stages[t]
        if self.ring == 1 and not self.trees:
            return {"attention": stage.q_here}
        running = WIDE * stage.q_here  # the result so far, in fp32
        block = stage.q_here // 2  # the kernel's output for half of the queries
        merging = 3 * WIDE * (stage.q_here // 2)  # both parts weighted, and their sum, in fp32
        if self.ring == 1:
            return {"attention": running + block + merging}
        arriving = KV * stage.k_here  # the next block
        return {"attention": running + block + merging, "exchange": arriving}

    def going_home(self, t: int) -> Bytes:
        """The output of stage t goes back to the ranks whose tokens it is of: sent in another order, and received."""
        stage = self.stages[t]
        received = stage.q_sent if self.ulysses > 1 else 0
        ordered = stage.q_here if stage.q_copies > 1 else 0
        return {"attention": stage.q_here, "exchange": received + ordered}

    def leaving(self, t: int) -> int:
        """The output of the stage before, still on its way home: sent and received."""
        return self.stages[t].q_sent + self.stages[t].q_here

    # -- backward -------------------------------------------------------------------------------------------------------

    def shares_kv(self, t: int) -> bool:
        """Whether stage t uses KV heads of the stage before, so that their gradients add up."""
        return t > 0 and not self.stages[t].brings_kv

    def kv_sums(self, t: int) -> int:
        """Gradients of k and v that several stages add to, in fp32."""
        return KV * WIDE * self.stages[t].k_here

    def gradients(self, t: int, sums: int, leaving: int, workspace: int) -> Bytes:
        """dq, dk and dv as the kernel makes them. sums: of KV gradients that they are added to; leaving: dq of the stage before."""
        stage = self.stages[t]
        if self.ring == 1:
            made = stage.q_here + KV * stage.k_here
            cases = [(made, workspace)]
            if self.trees:  # then in fp32, and to that comes what the answers have of their prompt
                cases += [(made + WIDE * made, 0), (WIDE * made + made // 2, workspace // 2)]
            held, workspace = max(cases, key=sum)
            return {"attention": held + sums, "workspace": workspace, "exchange": leaving}
        dq = WIDE * stage.q_here + stage.q_here  # the sum in fp32, and a block's part
        # in fp32 the sums of the block that is here, and those just passed on; a block's part is of half of the keys
        dkv = 2 * KV * WIDE * stage.k_here + KV * (stage.k_here // 2)
        arriving = KV * stage.k_here + KV * WIDE * stage.k_here  # the next block, and the sums that travel with it
        return {
            "attention": dq + dkv + sums,
            "workspace": workspace // 2,
            "exchange": arriving + leaving,
        }  # attends in halves

    def workspace(self, t: int, kernel: str, processors: int) -> int:
        stage = self.stages[t]
        shape = (self.rows, stage.heads_here, self.tokens * self.ulysses, self.head_dim)
        return backward_workspace(kernel, shape, max(stage.kv_heads_here, 1), processors)

    def kept_backward(self, t: int) -> Bytes:
        """recompute="none": q, k, v are there; output and its gradient come."""
        stage = self.stages[t]
        return {"exchange": 2 * stage.q_sent, "attention": 2 * stage.q_copies * stage.q_here}

    def bringing_backward(self, t: int) -> Bytes:
        stage = self.stages[t]
        k_copies = stage.k_copies if stage.k_sent else 1
        return {
            "exchange": Q_OUT_DOUT * stage.q_sent + KV * stage.k_sent,
            "attention": Q_OUT_DOUT * stage.q_copies * stage.q_here + KV * k_copies * stage.k_here,
        }

    def attending_backward(self, t: int) -> Bytes:
        """q, output, its gradient, k and v of stage t; where stages overlap, the next one's and gradients on their way home too."""
        stage = self.stages[t]
        if self.ulysses > 1 and not self.overlaps:
            return {"attention": Q_OUT_DOUT * stage.q_here + KV * stage.k_here}
        q_sets, kv_sets, homes = 1, 1, 0
        if self.ulysses > 1:
            q_sets, kv_sets = self._sets(t)
            homes = min(2, t) * stage.q_sent  # buffers of dq
            homes += self.kv_homes(t) * KV * stage.k_here
        return {
            "exchange": Q_OUT_DOUT * q_sets * stage.q_sent + KV * kv_sets * stage.k_here + homes,
            "attention": Q_OUT_DOUT * stage.q_copies * q_sets * stage.q_here
            + KV * stage.k_copies * kv_sets * stage.k_here,
        }

    def kv_homes(self, t: int) -> int:
        """Buffers, at most two, into which dk and dv of stages before t have come home."""
        return min(2, sum(stage.ends_kv for stage in self.stages[:t]))

    def delivered(self, t: int, whole: bool) -> int:
        """Gradients of stage t that the layer takes: dq, dk, dv of this rank's tokens. whole: they are copies of what was made."""
        stage = self.stages[t]
        return stage.q_sent + KV * stage.k_here if self.ulysses > 1 or whole else stage.q_here

    def departing(self, t: int) -> int:
        """Gradients of stage t on their way home while the layer takes those of the stage before."""
        stage = self.stages[t]
        return stage.q_here + (KV * stage.k_here if stage.ends_kv else 0) if self.overlaps and t > 0 else 0

    # -- links ----------------------------------------------------------------------------------------------------------

    def exchanged(self, recompute: str) -> int:
        """Bytes that a rank puts into the all-to-alls of a layer in a step, its own part included."""
        q_there, out_home = sum(stage.q_sent for stage in self.stages), sum(stage.q_here for stage in self.stages)
        kv_there = KV * sum(stage.k_sent for stage in self.stages)
        kv_home = KV * sum(stage.k_here for stage in self.stages if stage.ends_kv)
        forward = q_there + kv_there + out_home
        backward = 2 * q_there + out_home + kv_home  # output and its gradient; dq; dk and dv
        again = {"none": 0, "keep_attention": q_there + kv_there, "layer": forward + q_there + kv_there}
        return forward + backward + again[recompute]

    def passed_around(self, recompute: str) -> int:
        """Bytes that a rank passes on around the ring in a layer and step: KV blocks, and in backward the fp32 sums of gradients,
        which make one hop more."""
        blocks = (self.ring - 1) * KV * sum(stage.k_here for stage in self.stages)
        sums = self.ring * KV * WIDE * sum(stage.k_here for stage in self.stages) if self.ring > 1 else 0
        return blocks * (3 if recompute == "layer" else 2) + sums

    def last_hop(self) -> int:
        """Of what is passed around, the fp32 sums of KV gradients on their way home, when all blocks are done."""
        return KV * WIDE * sum(stage.k_here for stage in self.stages) if self.ring > 1 else 0

    def stashed(self) -> int:
        """Outside of the device: sums of KV gradients for the next stage, and gradients of the output for the stages behind it."""
        ahead = 3 if self.overlaps else 2
        waits = [self.kv_sums(t) + self.behind(t + ahead) for t in range(len(self.stages) - 1) if self.shares_kv(t + 1)]
        return max(waits, default=0)
