"""The text side of Kimi K3: tokenizer, message format and tool calls."""
