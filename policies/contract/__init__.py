"""What two processes agree on byte for byte: wire messages, page keys, tokenizer bundle."""
