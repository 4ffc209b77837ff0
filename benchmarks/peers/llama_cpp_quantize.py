"""Requantises a GGUF file to Q8_0 with llama.cpp's own function: `… SOURCE TARGET THREADS`.

Q8_0 is the form that its CPU kernels are best at.
"""

from __future__ import annotations

import os
import sys

import llama_cpp


def quantize(source: str, target: str, threads: int) -> None:
    """The target is whole or not there."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    settings.allow_requantize = True
    settings.nthread = threads
    part = f"{target}.{os.getpid()}"
    try:
        status = llama_cpp.llama_model_quantize(source.encode(), part.encode(), settings)
        if status != 0:
            sys.exit(f"llama_model_quantize answered {status}")
        os.rename(part, target)
    finally:
        if os.path.exists(part):
            os.remove(part)


if __name__ == "__main__":
    quantize(sys.argv[1], sys.argv[2], int(sys.argv[3]))
