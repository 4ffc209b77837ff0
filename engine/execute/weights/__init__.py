"""Checkpoint readers: GGUF and safetensors, streamed, never trusted."""
