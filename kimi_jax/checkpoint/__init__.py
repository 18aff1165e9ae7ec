"""From checkpoint files to placed arrays: names, safetensors, checks, loading."""
