"""Imported by every process that runs a test, workers included, and before torch.

One thread each: there are more processes than cores, and OpenMP's threads spin while they wait.

On a CPU without bf16 instructions torch multiplies bf16 matrices one number after the other and warns: 0.1 GFLOP/s on a
Neoverse N1, half an hour for this suite. There the tests multiply in float32 and round the results, which is what such
instructions do. Other CPUs keep torch's kernels. A process that has no torch, such as one that packs data, needs neither.
"""

import os
import sys
import warnings
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ITHACA_LINKS"] = ""  # plans of tests are those of any machine
os.environ["HF_HUB_OFFLINE"] = (
    "1"  # a mistyped path may look like a name on the Hub; tests of names have one of their own
)

SLOW = ("mm", "bmm", "addmm", *(f"_scaled_dot_product_flash_attention_for_cpu{which}" for which in ("", "_backward")))


def multiply_in_float32() -> None:
    import torch

    def wide(value):
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value

    def in_float32(kernel, keys, *given, **named):
        """kernel: torch's own. Of its results those are rounded that would have been bf16: all but the logarithms of sums."""
        found = kernel.call_boxed(keys, *map(wide, given), **{key: wide(value) for key, value in named.items()})
        if given[0].dtype is not torch.bfloat16:
            return found
        if isinstance(found, torch.Tensor):
            return found.bfloat16()
        return tuple(each.bfloat16() if each.dim() == 4 else each for each in found)

    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or LIBRARIES:
        return
    LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernels that are replaced
        for name in SLOW:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            LIBRARIES[0].impl(name, partial(in_float32, kernel), "CPU", with_keyset=True)


LIBRARIES = []  # what is registered lasts as long as its library
if "torch" in sys.modules:
    multiply_in_float32()
