"""What the bits of torch's results depend on beside their operands, told as a name.

Its libraries choose their kernels, and the order of their sums, by the processor and its caches,
and split some among threads; so the name is as narrow as the machine.
"""

from __future__ import annotations

from hashlib import sha256

import torch


def torch_arithmetic(device: torch.device) -> str:
    """Equal names: equal bits, on this device."""
    if device.type == "cuda":
        facts: object = (torch.version.cuda, torch.cuda.get_device_properties(device))
    else:
        facts = (sorted(torch.cpu.get_capabilities().items()), torch.get_num_threads())
    return f"torch-{torch.__version__}-{sha256(repr(facts).encode()).hexdigest()[:16]}"
