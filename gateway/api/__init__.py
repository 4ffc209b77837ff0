"""The OpenAI-style HTTP surface."""
