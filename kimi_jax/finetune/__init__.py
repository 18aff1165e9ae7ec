"""Fine-tuning with low-rank adapters, and training small models whole."""
