"""The process clients talk to: all text and all money, never torch."""
