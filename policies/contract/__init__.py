"""What two processes must agree on byte for byte: wire messages, page keys, the tokenizer bundle."""
